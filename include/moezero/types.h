/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moezero/types.h
 * @brief Small types that every part shares.
 */
#ifndef MZ_TYPES_H
#define MZ_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Longest name of a tensor, buffer, layer or group, with its final zero. */
enum { MZ_NAME_MAX = 96 };

typedef enum mz_dtype {
  MZ_F32,
  MZ_BF16,
  MZ_F16,
  MZ_F64,
  MZ_I32,
  MZ_I64,
  MZ_U8
} mz_dtype_t;

/** Bytes of one element; 0 outside the list. */
static inline size_t mz_dtype_bytes(mz_dtype_t dtype)
{
  switch (dtype) {
  case MZ_F32:
  case MZ_I32:
    return 4;
  case MZ_BF16:
  case MZ_F16:
    return 2;
  case MZ_F64:
  case MZ_I64:
    return 8;
  case MZ_U8:
    return 1;
  }
  return 0;
}

/** What a dump, a load or a checkpoint works on; all are fp32. */
typedef enum mz_tensor_part {
  MZ_PART_WEIGHTS, /* master weights */
  MZ_PART_GRADS,   /* summed gradients of the last step, before clipping */
  MZ_PART_EXP_AVG,
  MZ_PART_EXP_AVG_SQ
} mz_tensor_part_t;

/** Which numbers of mz_hyper_t are given. */
enum {
  MZ_GIVES_LR = 1,
  MZ_GIVES_BETAS = 2,
  MZ_GIVES_EPS = 4,
  MZ_GIVES_WEIGHT_DECAY = 8
};

/** What a parameter group sets for itself, units as in optimizer.params. */
typedef struct mz_hyper {
  int32_t gives; /* MZ_GIVES_LR | ...; numbers not given are ignored */
  double lr;     /* >= 0: the schedule scales it like optimizer.params.lr */
  double beta1, beta2; /* in [0, 1) */
  double eps;          /* >= 0 */
  double weight_decay; /* >= 0 */
} mz_hyper_t;

/** A number with a name: milliseconds of a part, bytes of a category. */
typedef struct mz_named_number {
  const char *name; /* letters, digits, '_' and '.' only */
  double value;
} mz_named_number_t;

/** How messages reach MPI; the bits are the same. */
typedef enum mz_form {
  MZ_FORM_AUTO,       /* pairwise where a message goes from and to the memory of
                         GPUs and the ranks of its group share a machine */
  MZ_FORM_COLLECTIVE, /* one call of all ranks, if its counts fit */
  MZ_FORM_PAIRWISE    /* a send and a receive with each other rank */
} mz_form_t;

/** The two backends by name; "auto" takes CUDA where a GPU is found. */
#define MZ_BACKEND_CPU "/cpu"
#define MZ_BACKEND_CUDA "/cuda"

/** A queue of the backend's work; NULL on the CPU. Opaque: no CUDA header. */
typedef void *mz_stream_t;

/** The kernel table of a backend (kernels/kernels.h); opaque in public. */
typedef struct mz_kernels mz_kernels_t;

#ifdef __cplusplus
}
#endif
#endif
