/* SPDX-License-Identifier: Apache-2.0 */
/* The head's product with its cross-entropy, forward and backward in one pass
 * over chunks of rows. Letters and contract: kernels/embedding.h.
 *
 * Logits of a chunk are kept in the table's dtype, their rows on 16 bytes where
 * the scratch has room for that: with an odd vocabulary products and loads are
 * many times slower otherwise. The columns behind the vocabulary are zeros. */
#include "kernels/cuda/products_impl.h"

/* Threads of a row; loads of each in flight; threads of the sum of losses; rows
 * of a product's tile, of which a chunk has a multiple. */
enum { THREADS = 512, FLIGHT = 4, SUM_THREADS = 1024, TILE_ROWS = 128 };
enum { OWN_SHARED = 1024 /* bytes that a kernel has besides what is asked */ };

/* N elements at a time: 16 bytes, or one element of odd rows. */
template <typename T, int N> struct alignas(N * sizeof(T)) piece {
  T v[N];
};

/* A row's running maximum and sum of exp(z - maximum). */
typedef struct running {
  float maximum, sum;
} running_t;

static __device__ __forceinline__ running_t join(running_t a, running_t b)
{
  running_t c = {fmaxf(a.maximum, b.maximum), 0};

  /* A side that has seen nothing has the maximum -inf and the sum 0. */
  if (a.sum != 0) c.sum += a.sum * __expf(a.maximum - c.maximum);
  if (b.sum != 0) c.sum += b.sum * __expf(b.maximum - c.maximum);
  return c;
}

static __device__ __forceinline__ running_t warp_join(running_t a)
{
  for (int offset = 16; offset > 0; offset /= 2) {
    running_t b = {__shfl_xor_sync(0xffffffffu, a.maximum, offset),
                   __shfl_xor_sync(0xffffffffu, a.sum, offset)};
    a = join(a, b);
  }
  return a;
}

/* Of all threads of a block, in a fixed order; every thread gets it. */
static __device__ __forceinline__ running_t block_join(running_t a)
{
  __shared__ running_t shared[THREADS / 32 + 1];
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);

  a = warp_join(a);
  if (lane == 0) shared[warp] = a;
  __syncthreads();
  if (warp == 0) {
    running_t none = {-INFINITY, 0};

    a = warp_join(lane < THREADS / 32 ? shared[lane] : none);
    if (lane == 0) shared[THREADS / 32] = a;
  }
  __syncthreads();
  return shared[THREADS / 32];
}

/* What the kernel of a chunk needs. */
typedef struct rows_args {
  void *logits; /* [., ld] */
  int64_t vocab, ld;
  const int32_t *labels; /* of the chunk */
  double *losses;        /* [rows] */
  double scale;
  int gradient; /* logits := scale * (softmax - onehot) */
} rows_args_t;

/* A piece of a row; columns behind the vocabulary become -inf, of which the
 * exponential is 0. */
template <typename T, int N>
static __device__ __forceinline__ piece<T, N>
load_piece(const T *row, int64_t p, int64_t vocab)
{
  piece<T, N> q = ((const piece<T, N> *)row)[p];

  if (N > 1 && (p + 1) * N > vocab) {
#pragma unroll
    for (int j = 0; j < N; j++)
      if (p * N + j >= vocab) q.v[j] = mz_store<T>(-INFINITY);
  }
  return q;
}

template <typename T, int N>
static __device__ __forceinline__ void add_piece(running_t *r, piece<T, N> q)
{
  float top = mz_load(q.v[0]), sum = 0;

#pragma unroll
  for (int j = 1; j < N; j++)
    top = fmaxf(top, mz_load(q.v[j]));
  if (top > r->maximum) {
    r->sum *= __expf(r->maximum - top);
    r->maximum = top;
  }
#pragma unroll
  for (int j = 0; j < N; j++)
    sum += __expf(mz_load(q.v[j]) - r->maximum);
  r->sum += sum;
}

/* Reads the row once into its maximum and sum; held keeps it, unless NULL. */
template <typename T, int N>
static __device__ __forceinline__ running_t
read_row(const T *row, int64_t vocab, int64_t pieces, piece<T, N> *held)
{
  running_t r = {-INFINITY, 0};

  for (int64_t p0 = threadIdx.x; p0 < pieces; p0 += THREADS * FLIGHT) {
    piece<T, N> q[FLIGHT];

#pragma unroll
    for (int f = 0; f < FLIGHT; f++)
      if (p0 + f * THREADS < pieces)
        q[f] = load_piece<T, N>(row, p0 + f * THREADS, vocab);
#pragma unroll
    for (int f = 0; f < FLIGHT; f++) {
      if (p0 + f * THREADS >= pieces) break;
      if (held) held[p0 + f * THREADS] = q[f];
      add_piece<T, N>(&r, q[f]);
    }
  }
  return block_join(r);
}

/* Overwrites the row: factor * exp(z - maximum) - (column == label) * scale. A
 * thread takes the pieces that it put into held itself. */
template <typename T, int N>
static __device__ __forceinline__ void
write_row(T *row, int64_t vocab, int64_t pieces, const piece<T, N> *held,
          float maximum, float factor, int32_t label, float scale)
{
#pragma unroll 2
  for (int64_t p = threadIdx.x; p < pieces; p += THREADS) {
    piece<T, N> q = held ? held[p] : load_piece<T, N>(row, p, vocab);
    int64_t chosen = label - p * N; /* in this piece: 0 to N - 1 */

#pragma unroll
    for (int j = 0; j < N; j++)
      q.v[j] = mz_store<T>(factor * __expf(mz_load(q.v[j]) - maximum) -
                           (chosen == j ? scale : 0.0f));
    ((piece<T, N> *)row)[p] = q;
  }
}

template <typename T, int N>
static __device__ __forceinline__ void zero_row(T *row, int64_t pieces)
{
  piece<T, N> zero;

#pragma unroll
  for (int j = 0; j < N; j++)
    zero.v[j] = mz_store<T>(0.0f);
  for (int64_t p = threadIdx.x; p < pieces; p += THREADS)
    ((piece<T, N> *)row)[p] = zero;
}

/* A block a row: its loss, and in place the gradient of scale * loss. HELD: the
 * row waits in shared memory between reading and writing. */
template <typename T, int N, bool HELD>
static __global__ void __launch_bounds__(THREADS, 2) loss_rows(rows_args_t a)
{
  extern __shared__ uint4 memory[];
  piece<T, N> *held = HELD ? (piece<T, N> *)memory : NULL;
  int64_t pieces = (a.vocab + N - 1) / N;
  T *row = (T *)a.logits + blockIdx.x * a.ld;
  int32_t label = a.labels[blockIdx.x];
  float chosen = NAN;
  running_t r;

  if (label < 0) {
    if (threadIdx.x == 0) a.losses[blockIdx.x] = 0;
    if (a.gradient) zero_row<T, N>(row, pieces);
    return;
  }
  /* Read before the barriers in read_row, so before the row is overwritten. A
   * label that does not exist gives a loss that is no number. */
  if (threadIdx.x == 0 && label < a.vocab) chosen = mz_load(row[label]);
  r = read_row<T, N>(row, a.vocab, pieces, held);
  if (a.gradient)
    write_row<T, N>(row, a.vocab, pieces, held, r.maximum,
                    (float)(a.scale / (double)r.sum), label, (float)a.scale);
  if (threadIdx.x == 0)
    a.losses[blockIdx.x] =
        log((double)r.sum) + (double)r.maximum - (double)chosen;
}

/* *loss += the losses of a chunk, in one block and a fixed order. */
static __global__ void __launch_bounds__(SUM_THREADS)
    sum_losses(const double *losses, int64_t rows, double *loss)
{
  __shared__ double shared[SUM_THREADS];
  int t = (int)threadIdx.x;
  double sum = 0;

  for (int64_t r = t; r < rows; r += SUM_THREADS)
    sum += losses[r];
  shared[t] = sum;
  for (int half = SUM_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (t < half) shared[t] += shared[t + half];
  }
  if (t == 0) *loss += shared[0];
}

/* --- a chunk --- */

/* Logits at a time: rows [rows, ld] of a dtype. */
typedef struct chunk {
  mz_dtype_t dtype;
  int64_t rows, ld;
} chunk_t;

/* Rows of a chunk when all chunks are about as long: a chunk of few rows costs
 * a pass over the table and its gradient all the same. */
static int64_t even_rows(int64_t rows, int64_t most)
{
  int64_t even = mz_div_up(rows, mz_max_i64(mz_div_up(rows, most), 1));

  return mz_max_i64(mz_min_i64(mz_round_up(even, TILE_ROWS), most), 1);
}

static chunk_t plan_chunk(const mz_kernels_t *kernels, const mz_xent_t *a)
{
  int64_t element = (int64_t)mz_dtype_bytes(kernels->dtype);
  int64_t bytes = a->chunk_rows * a->vocab * 4;
  chunk_t dense = {kernels->dtype, bytes / (a->vocab * element), a->vocab};
  chunk_t padded = dense;

  padded.ld = mz_round_up(a->vocab, 16 / element);
  padded.rows = bytes / (padded.ld * element);
  if (padded.rows < mz_max_i64(1, dense.rows / 2)) padded = dense;
  padded.rows = even_rows(a->rows, padded.rows);
  return padded;
}

static mz_status_t multiply(const mz_kernels_t *kernels, const mz_product_t *p,
                            mz_stream_t stream)
{
  mz_cuda_products_t *products = mz_cuda_state(kernels)->products;
  mz_product_place_t place =
      mz_cuda_product_place(products, mz_cuda_stream(stream));
  bool finished;

  return MZ_TRACE(mz_cuda_product(products, p, &place, &finished));
}

static const void *rows_of(const void *base, mz_dtype_t dtype, int64_t first,
                           int64_t width)
{
  return (const char *)base + first * width * (int64_t)mz_dtype_bytes(dtype);
}

static mz_status_t logits_of(const mz_kernels_t *kernels, const mz_xent_t *a,
                             const chunk_t *c, int64_t first, int64_t rows,
                             mz_stream_t stream)
{
  mz_product_t p = {MZ_PRODUCT_FORWARD, MZ_PRODUCT_PLAIN, kernels->dtype,
                    c->dtype};

  p.rows = rows;
  p.n = a->vocab;
  p.k = a->width;
  p.ldn = c->ld;
  p.a = a->w;
  p.b = rows_of(a->x, kernels->dtype, first, a->width);
  p.d = a->logits;
  return MZ_TRACE(multiply(kernels, &p, stream));
}

/* dw reads x before dx, which may be the same memory, is written. */
static mz_status_t gradients_of(const mz_kernels_t *kernels, const mz_xent_t *a,
                                const chunk_t *c, int64_t first, int64_t rows,
                                mz_stream_t stream)
{
  mz_product_t p = {MZ_PRODUCT_WGRAD, MZ_PRODUCT_PLAIN, kernels->dtype, MZ_F32};

  p.add = a->accumulate || first > 0;
  p.rows = rows;
  p.n = a->vocab;
  p.k = a->width;
  p.ldn = c->ld;
  p.a = rows_of(a->x, kernels->dtype, first, a->width);
  p.b = a->logits;
  p.d = a->dw;
  MZ_TRY(multiply(kernels, &p, stream));
  p.kind = MZ_PRODUCT_DGRAD;
  p.out = kernels->dtype;
  p.add = 0;
  p.a = a->w;
  p.d = (void *)rows_of(a->dx, kernels->dtype, first, a->width);
  return MZ_TRACE(multiply(kernels, &p, stream));
}

template <typename T, int N, bool HELD>
static mz_status_t start_rows(const rows_args_t *args, int64_t rows,
                              int64_t held_bytes, cudaStream_t stream)
{
  if (HELD)
    MZ_CUDA(cudaFuncSetAttribute(loss_rows<T, N, HELD>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)held_bytes));
  loss_rows<T, N, HELD>
      <<<(unsigned)rows, THREADS, HELD ? (size_t)held_bytes : 0, stream>>>(
          *args);
  MZ_LAUNCHED("cross-entropy");
  return MZ_OK;
}

template <typename T>
static mz_status_t losses_of_rows(const rows_args_t *args, int64_t rows,
                                  cudaStream_t stream)
{
  enum { N = 16 / sizeof(T) };
  int64_t held = mz_round_up(args->vocab, N) * (int64_t)sizeof(T);
  bool wide = args->ld % N == 0 && (uintptr_t)args->logits % 16 == 0;
  int bytes;

  MZ_TRY(mz_cuda_shared_bytes(&bytes));
  if (!wide) return MZ_TRACE((start_rows<T, 1, false>(args, rows, 0, stream)));
  if (!args->gradient || held > bytes - OWN_SHARED)
    return MZ_TRACE((start_rows<T, N, false>(args, rows, 0, stream)));
  return MZ_TRACE((start_rows<T, N, true>(args, rows, held, stream)));
}

static mz_status_t losses_of(const mz_kernels_t *kernels, const mz_xent_t *a,
                             const chunk_t *c, int64_t first, int64_t rows,
                             mz_stream_t stream)
{
  rows_args_t args = {a->logits, a->vocab, c->ld,        a->labels + first,
                      NULL,      a->scale, a->dx != NULL};
  int64_t at = mz_cuda_state(kernels)->products->bytes;

  /* Read by the sum at once: no product runs while they are needed. */
  MZ_TRY(mz_cuda_scratch(kernels, &at, rows, "losses of rows", &args.losses));
  MZ_TRY(MZ_BY_DTYPE(kernels, losses_of_rows, &args, rows,
                     mz_cuda_stream(stream)));
  sum_losses<<<1, SUM_THREADS, 0, mz_cuda_stream(stream)>>>(args.losses, rows,
                                                            a->loss);
  MZ_LAUNCHED("sum of losses");
  return MZ_OK;
}

static mz_status_t check(const mz_xent_t *a)
{
  int64_t elements;
  int narrow;

  MZ_REQUIRE(a->rows >= 0 && a->width >= 1 && a->vocab >= 1 &&
                 a->chunk_rows >= 1,
             MZ_ERR_ARG,
             "%" PRId64 " rows of %" PRId64 ", vocabulary %" PRId64
             ", chunks of %" PRId64 " rows",
             a->rows, a->width, a->vocab, a->chunk_rows);
  MZ_REQUIRE(a->labels || !a->dx, MZ_ERR_ARG, "gradients without labels");
  MZ_TRY(mz_int_from_i64(a->width, &narrow));
  MZ_TRY(mz_int_from_i64(a->vocab, &narrow));
  MZ_TRY(mz_int_from_i64(a->chunk_rows, &narrow));
  MZ_TRY(mz_int_from_i64(2 * a->chunk_rows, &narrow));
  MZ_TRY(mz_mul_i64(4 * a->chunk_rows, a->vocab, &elements));
  return MZ_OK;
}

/* Without labels only the logits of the last chunk are kept, in fp32, so no
 * other chunk is computed. */
static mz_status_t last_logits(const mz_kernels_t *kernels, const mz_xent_t *a,
                               mz_stream_t stream)
{
  chunk_t c = {MZ_F32, a->chunk_rows, a->vocab};
  int64_t first;

  if (a->rows == 0) return MZ_OK;
  first = (a->rows - 1) / a->chunk_rows * a->chunk_rows;
  return MZ_TRACE(logits_of(kernels, a, &c, first, a->rows - first, stream));
}

extern "C" mz_status_t mz_k_xent_cuda(const mz_kernels_t *kernels,
                                      const mz_xent_t *a, mz_stream_t stream)
{
  chunk_t c;

  MZ_TRY(check(a));
  if (!a->labels) return MZ_TRACE(last_logits(kernels, a, stream));
  c = plan_chunk(kernels, a);
  if (a->dx && a->rows == 0 && !a->accumulate)
    MZ_CUDA(cudaMemsetAsync(a->dw, 0,
                            (size_t)(a->vocab * a->width) * sizeof(float),
                            mz_cuda_stream(stream)));
  for (int64_t first = 0; first < a->rows; first += c.rows) {
    int64_t rows = mz_min_i64(c.rows, a->rows - first);

    MZ_TRY(logits_of(kernels, a, &c, first, rows, stream));
    MZ_TRY(losses_of(kernels, a, &c, first, rows, stream));
    if (a->dx) MZ_TRY(gradients_of(kernels, a, &c, first, rows, stream));
  }
  return MZ_OK;
}
