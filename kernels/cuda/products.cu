/* SPDX-License-Identifier: Apache-2.0 */
/* Products through cuBLASLt and the table of their algorithms.
 *
 * A choice is made for a row count rounded up to 1, 2, 3, 4, 6, 8, 12, 16, ...
 * and with that count, not with the first that came: so it depends on its key
 * alone, a resumed run makes the same choices, and row counts that vary from
 * call to call need few. An algorithm that refuses the real count is replaced
 * by one for exactly that count. */
#include "kernels/cuda/products_impl.h"

#include <string.h>

enum { BIAS_THREADS = 256 };

/* --- life --- */

static mz_status_t create(const mz_kernels_t *kernels,
                          mz_cuda_products_t *products)
{
  int device, major, minor;

  MZ_TRY(
      mz_new(MZ_PRODUCTS_ENTRIES, "choices of products", &products->choices));
  MZ_TRY(mz_new(MZ_PRODUCTS_SLOTS, "choices of products", &products->slots));
  products->device = kernels->device;
  MZ_CUBLAS(cublasLtCreate(&products->handle));
  MZ_CUDA(cudaGetDevice(&device));
  MZ_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                                 device));
  MZ_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor,
                                 device));
  products->capability = 10 * major + minor;
  products->streams = 1;
  products->workspace = kernels->workspace;
  products->bytes =
      mz_min_i64(MZ_PRODUCTS_BYTES, kernels->workspace_bytes / 2) /
      MZ_ALIGN_BYTES * MZ_ALIGN_BYTES;
  products->behind_bytes = kernels->workspace_bytes - products->bytes;
  MZ_CUDA(cudaEventCreateWithFlags(&products->fork, cudaEventDisableTiming));
  for (int i = 0; i < 2; i++)
    MZ_CUDA(cudaEventCreate(&products->timed[i]));
  return MZ_OK;
}

mz_status_t mz_cuda_products_create(const mz_kernels_t *kernels,
                                    mz_cuda_products_t **out)
{
  mz_cuda_products_t *products = NULL;
  mz_status_t st;

  MZ_TRY(mz_new(1, "products", &products));
  st = create(kernels, products);
  if (st != MZ_OK)
    mz_cuda_products_destroy(products);
  else
    *out = products;
  return st;
}

void mz_cuda_products_destroy(mz_cuda_products_t *products)
{
  if (!products) return;
  for (int i = 0; i < MZ_PRODUCTS_STREAMS; i++) {
    if (products->join[i]) cudaEventDestroy(products->join[i]);
    if (products->stream[i]) cudaStreamDestroy(products->stream[i]);
  }
  for (int i = 0; i < 2; i++)
    if (products->timed[i]) cudaEventDestroy(products->timed[i]);
  if (products->fork) cudaEventDestroy(products->fork);
  if (products->handle) cublasLtDestroy(products->handle);
  mz_free(products->slots);
  mz_free(products->choices);
  mz_free(products);
}

extern "C" mz_cuda_products_t *mz_cuda_products_of(const mz_kernels_t *kernels)
{
  return mz_cuda_state(kernels)->products;
}

/* --- streams --- */

extern "C" mz_status_t mz_cuda_products_spread(mz_cuda_products_t *products,
                                               int streams)
{
  MZ_REQUIRE(streams >= 1 && streams <= MZ_PRODUCTS_STREAMS, MZ_ERR_ARG,
             "products on %d streams, from 1 to %d are possible", streams,
             (int)MZ_PRODUCTS_STREAMS);
  mz_device_settle(products->device);
  /* made when they are wanted: they would share queues with MPI's */
  for (int i = 0; streams > 1 && i < streams; i++) {
    if (!products->join[i])
      MZ_CUDA(
          cudaEventCreateWithFlags(&products->join[i], cudaEventDisableTiming));
    if (!products->stream[i])
      MZ_CUDA(cudaStreamCreateWithFlags(&products->stream[i],
                                        cudaStreamNonBlocking));
  }
  products->streams = streams;
  return MZ_OK;
}

mz_product_place_t mz_cuda_product_place(const mz_cuda_products_t *products,
                                         cudaStream_t stream)
{
  return {stream, products->workspace, products->bytes, 1};
}

mz_status_t mz_cuda_spread_begin(mz_cuda_products_t *products,
                                 cudaStream_t stream, int32_t num_groups,
                                 mz_product_spread_t *spread_out)
{
  int streams = num_groups > 1 ? products->streams : 1;

  *spread_out = {products, stream, streams, 0};
  if (streams == 1) return MZ_OK;
  MZ_CUDA(cudaEventRecord(products->fork, stream));
  for (int i = 0; i < streams; i++)
    MZ_CUDA(cudaStreamWaitEvent(products->stream[i], products->fork, 0));
  return MZ_OK;
}

mz_product_place_t mz_cuda_spread_next(mz_product_spread_t *spread)
{
  const mz_cuda_products_t *products = spread->products;
  mz_product_place_t place = mz_cuda_product_place(products, spread->stream);

  if (spread->streams == 1) return place;
  place.streams = spread->streams;
  place.stream = products->stream[spread->next];
  place.bytes =
      products->bytes / spread->streams / MZ_ALIGN_BYTES * MZ_ALIGN_BYTES;
  place.workspace += spread->next * place.bytes;
  spread->next = (spread->next + 1) % spread->streams;
  return place;
}

mz_status_t mz_cuda_spread_end(const mz_product_spread_t *spread)
{
  mz_cuda_products_t *products = spread->products;

  for (int i = 0; spread->streams > 1 && i < spread->streams; i++) {
    MZ_CUDA(cudaEventRecord(products->join[i], products->stream[i]));
    MZ_CUDA(cudaStreamWaitEvent(spread->stream, products->join[i], 0));
  }
  return MZ_OK;
}

/* --- cuBLASLt's view --- */

/* d [m, n] = op(a) op(b), column-major, k summed over. */
typedef struct geometry {
  int64_t m, n, k, lda, ldb, ldd;
  cublasOperation_t ta, tb;
} geometry_t;

static geometry_t geometry_of(const mz_product_t *p, int64_t rows)
{
  switch (p->kind) {
  case MZ_PRODUCT_FORWARD:
    return {p->n, rows, p->k, p->k, p->k, p->ldn, CUBLAS_OP_T, CUBLAS_OP_N};
  case MZ_PRODUCT_DGRAD:
    return {p->k, rows, p->n, p->k, p->ldn, p->k, CUBLAS_OP_N, CUBLAS_OP_N};
  default:
    return {p->k, p->n, rows, p->k, p->ldn, p->k, CUBLAS_OP_N, CUBLAS_OP_T};
  }
}

static cudaDataType_t type_of(mz_dtype_t dtype)
{
  return dtype == MZ_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

static mz_status_t describe_epilogue(const mz_product_t *p, int64_t ldd,
                                     cublasLtMatmulDesc_t op)
{
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;

  if (p->epilogue == MZ_PRODUCT_BIAS)
    epilogue = CUBLASLT_EPILOGUE_BIAS;
  else if (p->epilogue == MZ_PRODUCT_GELU)
    epilogue =
        p->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  else if (p->epilogue == MZ_PRODUCT_DGELU)
    epilogue = CUBLASLT_EPILOGUE_DGELU;
  MZ_CUBLAS(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_EPILOGUE,
                                           &epilogue, sizeof epilogue));
  if (p->bias)
    MZ_CUBLAS(cublasLtMatmulDescSetAttribute(
        op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias, sizeof p->bias));
  if (!p->aux) return MZ_OK;
  MZ_CUBLAS(cublasLtMatmulDescSetAttribute(
      op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &p->aux, sizeof p->aux));
  MZ_CUBLAS(cublasLtMatmulDescSetAttribute(
      op, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ldd, sizeof ldd));
  return MZ_OK;
}

mz_status_t mz_cuda_product_describe(const mz_product_t *p, int64_t rows,
                                     mz_product_problem_t *problem_out)
{
  geometry_t g = geometry_of(p, rows);
  cudaDataType_t in = type_of(p->in), out = type_of(p->out);
  bool ta = g.ta == CUBLAS_OP_T, tb = g.tb == CUBLAS_OP_T;
  cublasLtMatmulDesc_t op = &problem_out->op;

  MZ_CUBLAS(cublasLtMatmulDescInit(op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  MZ_CUBLAS(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA,
                                           &g.ta, sizeof g.ta));
  MZ_CUBLAS(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSB,
                                           &g.tb, sizeof g.tb));
  MZ_TRY(describe_epilogue(p, g.ldd, op));
  MZ_CUBLAS(cublasLtMatrixLayoutInit(&problem_out->a, in,
                                     (uint64_t)(ta ? g.k : g.m),
                                     (uint64_t)(ta ? g.m : g.k), g.lda));
  MZ_CUBLAS(cublasLtMatrixLayoutInit(&problem_out->b, in,
                                     (uint64_t)(tb ? g.n : g.k),
                                     (uint64_t)(tb ? g.k : g.n), g.ldb));
  MZ_CUBLAS(cublasLtMatrixLayoutInit(&problem_out->d, out, (uint64_t)g.m,
                                     (uint64_t)g.n, g.ldd));
  return MZ_OK;
}

/* --- keys --- */

static int64_t round_rows(int64_t rows)
{
  for (int64_t power = 1;; power *= 2) {
    if (rows <= power) return power;
    if (rows <= power + power / 2) return power + power / 2;
  }
}

/* 0 to 3: 2, 4, 8, 16 bytes divide the address of every row. Taken from the
 * start of a row and the distance between rows, so that it does not vary with
 * the row at which a group begins. */
static uint32_t align_class(const void *pointer, int64_t row_bytes)
{
  uint64_t bits = (uint64_t)(uintptr_t)pointer | (uint64_t)row_bytes;

  return bits % 16 == 0 ? 3 : bits % 8 == 0 ? 2 : bits % 4 == 0 ? 1 : 0;
}

enum { ALIGN_A, ALIGN_B, ALIGN_D, ALIGN_BIAS, ALIGN_AUX };

static uint32_t align_field(int which, const void *pointer, int64_t row_bytes)
{
  return align_class(pointer, row_bytes) << (MZ_KEY_AT_ALIGN + 2 * which);
}

static mz_product_key_t key_of(const mz_product_t *p,
                               const mz_product_place_t *place, bool exact)
{
  geometry_t g = geometry_of(p, p->rows);
  int64_t in = (int64_t)mz_dtype_bytes(p->in);
  int64_t out = (int64_t)mz_dtype_bytes(p->out);
  mz_product_key_t key = {p->n,
                          p->k,
                          p->ldn,
                          exact ? p->rows : round_rows(p->rows),
                          (uint32_t)p->kind,
                          0};

  key.flags |= p->in == MZ_BF16 ? MZ_KEY_BF16 : 0;
  key.flags |= p->in == MZ_BF16 && p->out == MZ_F32 ? MZ_KEY_OUT_F32 : 0;
  key.flags |= p->bias ? MZ_KEY_HAS_BIAS : 0;
  key.flags |= p->add ? MZ_KEY_ADD : 0;
  key.flags |= exact ? MZ_KEY_EXACT : 0;
  key.flags |= (uint32_t)p->epilogue << MZ_KEY_AT_EPILOGUE;
  key.flags |= (uint32_t)place->streams << MZ_KEY_AT_STREAMS;
  key.flags |= align_field(ALIGN_A, p->a, g.lda * in);
  key.flags |= align_field(ALIGN_B, p->b, g.ldb * in);
  key.flags |= align_field(ALIGN_D, p->d, g.ldd * out);
  key.flags |= align_field(ALIGN_BIAS, p->bias, 0);
  key.flags |= align_field(ALIGN_AUX, p->aux, p->aux ? g.ldd * out : 0);
  return key;
}

/* The slot that holds the key, or the free one where it belongs. */
static int64_t slot_of(const mz_cuda_products_t *products,
                       const mz_product_key_t *key)
{
  const uint8_t *bytes = (const uint8_t *)key;
  uint64_t hash = 14695981039346656037u; /* FNV-1a */
  int64_t slot;

  for (size_t i = 0; i < sizeof *key; i++)
    hash = (hash ^ bytes[i]) * 1099511628211u;
  for (slot = (int64_t)(hash % MZ_PRODUCTS_SLOTS); products->slots[slot] != 0;
       slot = (slot + 1) % MZ_PRODUCTS_SLOTS)
    if (memcmp(&products->choices[products->slots[slot] - 1].key, key,
               sizeof *key) == 0)
      break;
  return slot;
}

int32_t mz_cuda_product_find(const mz_cuda_products_t *products,
                             const mz_product_key_t *key)
{
  return products->slots[slot_of(products, key)] - 1;
}

bool mz_cuda_product_keep(mz_cuda_products_t *products,
                          const mz_product_choice_t *choice)
{
  int64_t slot = slot_of(products, &choice->key);

  if (products->slots[slot] == 0) {
    if (products->num_choices == MZ_PRODUCTS_ENTRIES) return false;
    products->slots[slot] = ++products->num_choices;
  }
  products->choices[products->slots[slot] - 1] = *choice;
  return true;
}

/* --- search --- */

static mz_status_t set_preference(cublasLtMatmulPreference_t preference,
                                  const mz_product_key_t *key,
                                  const mz_product_place_t *place)
{
  static const cublasLtMatmulPreferenceAttributes_t align[4] = {
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
      CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
  static const int which[4] = {ALIGN_A, ALIGN_B, ALIGN_D, ALIGN_D};
  uint64_t bytes = (uint64_t)place->bytes;
  /* Partial sums in fp32 or none: the others round them to the output's type.
   */
  uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

  MZ_CUBLAS(cublasLtMatmulPreferenceInit(preference));
  MZ_CUBLAS(cublasLtMatmulPreferenceSetAttribute(
      preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
      sizeof bytes));
  MZ_CUBLAS(cublasLtMatmulPreferenceSetAttribute(
      preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes,
      sizeof schemes));
  for (int i = 0; i < 4; i++) {
    uint32_t value =
        2u << (key->flags >> (MZ_KEY_AT_ALIGN + 2 * which[i]) & 3u);

    MZ_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, align[i], &value,
                                                   sizeof value));
  }
  return MZ_OK;
}

mz_status_t mz_cuda_product_search(mz_cuda_products_t *products,
                                   const mz_product_t *p, int64_t rows,
                                   const mz_product_place_t *place,
                                   cublasLtMatmulAlgo_t *algos, int wanted,
                                   int *found_out)
{
  cublasLtMatmulHeuristicResult_t results[MZ_PRODUCTS_CANDIDATES];
  cublasLtMatmulPreferenceOpaque_t preference;
  mz_product_problem_t problem;
  mz_product_key_t key = key_of(p, place, false);
  cublasStatus_t status;
  int found = 0;

  *found_out = 0;
  MZ_TRY(mz_cuda_product_describe(p, rows, &problem));
  MZ_TRY(set_preference(&preference, &key, place));
  status = cublasLtMatmulAlgoGetHeuristic(
      products->handle, &problem.op, &problem.a, &problem.b, &problem.d,
      &problem.d, &preference, wanted, results, &found);
  if (status != CUBLAS_STATUS_SUCCESS) return MZ_OK;
  for (int i = 0; i < found; i++)
    if (results[i].state == CUBLAS_STATUS_SUCCESS)
      algos[(*found_out)++] = results[i].algo;
  return MZ_OK;
}

static mz_status_t choose(mz_cuda_products_t *products, const mz_product_t *p,
                          const mz_product_place_t *place, bool exact,
                          mz_product_choice_t *choice)
{
  mz_product_key_t key = key_of(p, place, exact);
  int32_t at = mz_cuda_product_find(products, &key);
  int found = 0;

  if (at >= 0 && (products->choices[at].timed || !products->tune)) {
    *choice = products->choices[at];
    return MZ_OK;
  }
  memset(choice, 0, sizeof *choice);
  choice->key = key;
  mz_device_settle(products->device); /* the library may load */
  if (products->tune) {
    MZ_TRY(mz_cuda_product_tune(products, p, place, choice));
  } else {
    MZ_TRY(mz_cuda_product_search(products, p, key.bucket, place, &choice->algo,
                                  1, &found));
    choice->form = found > 0 ? MZ_FORM_WHOLE : MZ_FORM_PARTS;
  }
  /* A full table only costs time: the search is made again. */
  mz_cuda_product_keep(products, choice);
  return MZ_OK;
}

/* Before a choice is taken for the first time, which loads its kernels. */
static void mark_used(mz_cuda_products_t *products, mz_product_choice_t *choice)
{
  if (choice->used) return;
  mz_device_settle(products->device);
  choice->used = true;
  mz_cuda_product_keep(products, choice);
}

/* --- run --- */

cublasStatus_t mz_cuda_product_start(mz_cuda_products_t *products,
                                     const mz_product_t *p,
                                     mz_product_problem_t *problem,
                                     const cublasLtMatmulAlgo_t *algo, void *d,
                                     const mz_product_place_t *place)
{
  float alpha = 1, beta = p->add ? 1.0f : 0.0f;

  return cublasLtMatmul(products->handle, &problem->op, &alpha, p->a,
                        &problem->a, p->b, &problem->b, &beta, d, &problem->d,
                        d, &problem->d, algo, place->workspace,
                        (size_t)place->bytes, place->stream);
}

/* Whether another algorithm may do what this one would not. */
static bool refused(cublasStatus_t status)
{
  return status == CUBLAS_STATUS_NOT_SUPPORTED ||
         status == CUBLAS_STATUS_INVALID_VALUE;
}

template <typename T>
static __global__ void lay_bias(const T *__restrict__ bias, T *__restrict__ d,
                                int64_t n, int64_t ldn, int64_t count)
{
  int64_t i = (int64_t)blockIdx.x * BIAS_THREADS + threadIdx.x;

  if (i < count) d[i / n * ldn + i % n] = bias[i % n];
}

/* The bias is laid down and the product added to it, for shapes for which there
 * is no epilogue: still one rounding. */
static mz_status_t run_on_bias(mz_cuda_products_t *products,
                               const mz_product_t *p,
                               const mz_product_place_t *place)
{
  mz_product_t part = *p;
  int64_t count = p->rows * p->n, blocks = mz_div_up(count, BIAS_THREADS);

  MZ_REQUIRE(blocks <= INT32_MAX, MZ_ERR_OVERFLOW,
             "bias of %" PRId64 " elements", count);
  if (p->out == MZ_BF16)
    lay_bias<<<(unsigned)blocks, BIAS_THREADS, 0, place->stream>>>(
        (const __nv_bfloat16 *)p->bias, (__nv_bfloat16 *)p->d, p->n, p->ldn,
        count);
  else
    lay_bias<<<(unsigned)blocks, BIAS_THREADS, 0, place->stream>>>(
        (const float *)p->bias, (float *)p->d, p->n, p->ldn, count);
  MZ_LAUNCHED("bias");
  part.epilogue = MZ_PRODUCT_PLAIN;
  part.bias = NULL;
  part.add = 1;
  return MZ_TRACE(mz_cuda_product_run(products, &part, place));
}

/* @param done_out  False: no algorithm for the whole product. */
static mz_status_t run_whole(mz_cuda_products_t *products,
                             const mz_product_t *p,
                             const mz_product_place_t *place, bool *done_out)
{
  mz_product_problem_t problem;

  *done_out = false;
  MZ_TRY(mz_cuda_product_describe(p, p->rows, &problem));
  for (int exact = 0; exact < 2; exact++) {
    mz_product_choice_t choice;
    cublasStatus_t status;

    MZ_TRY(choose(products, p, place, exact != 0, &choice));
    if (choice.form == MZ_FORM_PARTS) return MZ_OK;
    mark_used(products, &choice);
    status =
        mz_cuda_product_start(products, p, &problem, &choice.algo, p->d, place);
    if (refused(status)) continue;
    MZ_CUBLAS(status);
    *done_out = true;
    return MZ_OK;
  }
  return MZ_OK;
}

mz_status_t mz_cuda_product_run(mz_cuda_products_t *products,
                                const mz_product_t *p,
                                const mz_product_place_t *place)
{
  bool done;

  MZ_TRY(run_whole(products, p, place, &done));
  if (done) return MZ_OK;
  if (p->epilogue == MZ_PRODUCT_BIAS)
    return MZ_TRACE(run_on_bias(products, p, place));
  MZ_FAIL(MZ_ERR_CUDA,
          "cuBLASLt has no algorithm for product %d of %" PRId64
          " rows, n %" PRId64 ", k %" PRId64 ", %zu-byte operands",
          (int)p->kind, p->rows, p->n, p->k, mz_dtype_bytes(p->in));
}

/* Whether cuBLASLt's activations can be asked for: they want distances of 8
 * elements, and fp32 is left to the exact own kernels. */
static bool can_fuse(const mz_product_t *p)
{
  int64_t ldd = p->kind == MZ_PRODUCT_FORWARD ? p->ldn : p->k;

  return p->in == MZ_BF16 && p->out == MZ_BF16 && ldd % 8 == 0 &&
         (uintptr_t)p->aux % 16 == 0;
}

mz_product_t mz_cuda_product_part(const mz_product_t *p)
{
  mz_product_t part = *p;

  part.epilogue = p->bias ? MZ_PRODUCT_BIAS : MZ_PRODUCT_PLAIN;
  part.aux = NULL;
  if (p->epilogue == MZ_PRODUCT_GELU) part.d = p->aux;
  return part;
}

mz_status_t mz_cuda_product(mz_cuda_products_t *products, const mz_product_t *p,
                            const mz_product_place_t *place, bool *finished_out)
{
  mz_product_t part = mz_cuda_product_part(p);
  mz_product_key_t key = key_of(p, place, false);
  bool done = false;

  *finished_out = true;
  if (p->epilogue == MZ_PRODUCT_PLAIN || p->epilogue == MZ_PRODUCT_BIAS)
    return MZ_TRACE(mz_cuda_product_run(products, p, place));
  /* Fused activations are taken only where timing found them faster. */
  if (can_fuse(p) &&
      (products->tune || mz_cuda_product_find(products, &key) >= 0))
    MZ_TRY(run_whole(products, p, place, &done));
  if (done) return MZ_OK;
  *finished_out = false;
  return MZ_TRACE(mz_cuda_product_run(products, &part, place));
}
