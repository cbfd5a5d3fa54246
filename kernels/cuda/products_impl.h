/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products through cuBLASLt, as the files of this folder use them.
 *
 * A product works on three row-major matrices: x [rows, k], y [rows, n] with
 * rows ldn elements apart, w [n, k]; two are read and one is written. cuBLASLt
 * thinks in columns, so it sees each of them transposed. */
#ifndef MZ_KERNELS_CUDA_PRODUCTS_IMPL_H
#define MZ_KERNELS_CUDA_PRODUCTS_IMPL_H

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/products.h"

enum {
  MZ_PRODUCTS_BYTES = 64 << 20, /* of the workspace, at most */
  MZ_PRODUCTS_ENTRIES = 4096,
  MZ_PRODUCTS_SLOTS = 4 * MZ_PRODUCTS_ENTRIES,
  MZ_PRODUCTS_CANDIDATES = 8,
  MZ_PRODUCTS_STREAMS = 8
};

typedef enum mz_product_kind {
  MZ_PRODUCT_FORWARD, /* y = x w^T:   a = w, b = x, d = y */
  MZ_PRODUCT_DGRAD,   /* x = y w:     a = w, b = y, d = x */
  MZ_PRODUCT_WGRAD    /* w = y^T x:   a = x, b = y, d = w */
} mz_product_kind_t;

typedef enum mz_product_epilogue {
  MZ_PRODUCT_PLAIN,
  MZ_PRODUCT_BIAS,  /* d += bias in each row (forward) */
  MZ_PRODUCT_GELU,  /* aux = product + bias, d = gelu(aux); bias may be NULL */
  MZ_PRODUCT_DGELU, /* d = product * gelu'(aux) */
} mz_product_epilogue_t;

typedef struct mz_product {
  mz_product_kind_t kind;
  mz_product_epilogue_t epilogue;
  mz_dtype_t in, out; /* of a and b; of d, bias and aux */
  int add;            /* d += product (only with MZ_PRODUCT_PLAIN) */
  int64_t rows, n, k; /* each >= 1 */
  int64_t ldn;        /* >= n */
  const void *a, *b;
  void *d;
  const void *bias; /* [n] */
  void *aux;        /* as dense as d; read by MZ_PRODUCT_DGELU */
} mz_product_t;

/* What a choice depends on. No padding, so that it compares as bytes. */
typedef struct mz_product_key {
  int64_t n, k, ldn;
  int64_t bucket; /* rows, rounded up unless MZ_KEY_EXACT */
  uint32_t kind, flags;
} mz_product_key_t;

/* flags: bits, and fields that begin at a bit. */
enum {
  MZ_KEY_BF16 = 1 << 0,
  MZ_KEY_OUT_F32 = 1 << 1, /* with MZ_KEY_BF16 */
  MZ_KEY_HAS_BIAS = 1 << 2,
  MZ_KEY_ADD = 1 << 3,
  MZ_KEY_EXACT = 1 << 4,
  MZ_KEY_AT_EPILOGUE = 5, /* 2 bits */
  MZ_KEY_AT_STREAMS = 7,  /* 4 bits */
  MZ_KEY_AT_ALIGN = 11    /* 2 bits each for a, b, d, bias, aux */
};

/* How a product is done. */
typedef enum mz_product_form {
  MZ_FORM_WHOLE, /* all by the algorithm */
  MZ_FORM_PARTS, /* the epilogue by own kernels; the algorithm is not used */
} mz_product_form_t;

typedef struct mz_product_choice {
  mz_product_key_t key;
  mz_product_form_t form;
  bool timed; /* or imported: it stays */
  bool used;  /* here: what it needs is loaded */
  cublasLtMatmulAlgo_t algo;
} mz_product_choice_t;

struct mz_cuda_products {
  const mz_device_t *device;
  cublasLtHandle_t handle;
  int capability; /* 10 * major + minor */
  char *workspace;
  int64_t bytes;        /* of the products, in front */
  int64_t behind_bytes; /* the rest, free while a product is tuned */
  bool tune;
  cudaEvent_t timed[2]; /* around a candidate */
  int streams;
  cudaStream_t stream[MZ_PRODUCTS_STREAMS];
  cudaEvent_t fork, join[MZ_PRODUCTS_STREAMS];
  int32_t num_choices;
  mz_product_choice_t *choices; /* [MZ_PRODUCTS_ENTRIES] in order of coming */
  int32_t *slots;               /* hash table of indices + 1, 0: free */
};

/* Where a product runs. */
typedef struct mz_product_place {
  cudaStream_t stream;
  char *workspace;
  int64_t bytes;
  int streams; /* that work is spread over now */
} mz_product_place_t;

/* cuBLASLt's view of a product. */
typedef struct mz_product_problem {
  cublasLtMatmulDescOpaque_t op;
  cublasLtMatrixLayoutOpaque_t a, b, d;
} mz_product_problem_t;

/** Where products run that are not spread. */
mz_product_place_t mz_cuda_product_place(const mz_cuda_products_t *products,
                                         cudaStream_t stream);

/**
 * Runs one product. @param[out] finished_out  False: of MZ_PRODUCT_GELU only
 * aux is written and of MZ_PRODUCT_DGELU d without its factor; the caller
 * applies mz_cuda_gelu or mz_cuda_dgelu (to several groups at once).
 */
mz_status_t mz_cuda_product(mz_cuda_products_t *products, const mz_product_t *p,
                            const mz_product_place_t *place,
                            bool *finished_out);

/** Spreads the groups of one call over the products' streams: begin after the
 * work they need was started, take a place for each, end before what needs
 * them. */
typedef struct mz_product_spread {
  mz_cuda_products_t *products;
  cudaStream_t stream;
  int streams, next;
} mz_product_spread_t;
mz_status_t mz_cuda_spread_begin(mz_cuda_products_t *products,
                                 cudaStream_t stream, int32_t num_groups,
                                 mz_product_spread_t *spread_out);
mz_product_place_t mz_cuda_spread_next(mz_product_spread_t *spread);
mz_status_t mz_cuda_spread_end(const mz_product_spread_t *spread);

/** y = gelu(pre), d *= gelu'(pre), count elements. */
mz_status_t mz_cuda_gelu(mz_dtype_t dtype, const void *pre, void *y,
                         int64_t count, cudaStream_t stream);
mz_status_t mz_cuda_dgelu(mz_dtype_t dtype, const void *pre, void *d,
                          int64_t count, cudaStream_t stream);

/* --- between the products' own files --- */

/** @param rows  Taken instead of p->rows. */
mz_status_t mz_cuda_product_describe(const mz_product_t *p, int64_t rows,
                                     mz_product_problem_t *problem_out);
/** Candidates, best first by the library's guess; none is no error. */
mz_status_t mz_cuda_product_search(mz_cuda_products_t *products,
                                   const mz_product_t *p, int64_t rows,
                                   const mz_product_place_t *place,
                                   cublasLtMatmulAlgo_t *algos, int wanted,
                                   int *found_out);
cublasStatus_t mz_cuda_product_start(mz_cuda_products_t *products,
                                     const mz_product_t *p,
                                     mz_product_problem_t *problem,
                                     const cublasLtMatmulAlgo_t *algo, void *d,
                                     const mz_product_place_t *place);
/** Number of the choice with this key, -1: none. */
int32_t mz_cuda_product_find(const mz_cuda_products_t *products,
                             const mz_product_key_t *key);
/** Adds or replaces. @return false: the table is full. */
bool mz_cuda_product_keep(mz_cuda_products_t *products,
                          const mz_product_choice_t *choice);
/** Fills algo and form by timing, and the mark. */
mz_status_t mz_cuda_product_tune(mz_cuda_products_t *products,
                                 const mz_product_t *p,
                                 const mz_product_place_t *place,
                                 mz_product_choice_t *choice);

/** The product without its epilogue's activation, as MZ_FORM_PARTS starts it:
 * with MZ_PRODUCT_GELU into aux. */
mz_product_t mz_cuda_product_part(const mz_product_t *p);
/** A product whose epilogue is MZ_PRODUCT_PLAIN or _BIAS. */
mz_status_t mz_cuda_product_run(mz_cuda_products_t *products,
                                const mz_product_t *p,
                                const mz_product_place_t *place);

static inline int64_t mz_product_d_elements(const mz_product_t *p)
{
  return p->kind == MZ_PRODUCT_FORWARD ? p->rows * p->ldn
         : p->kind == MZ_PRODUCT_DGRAD ? p->rows * p->k
                                       : p->n * p->k;
}

#endif
