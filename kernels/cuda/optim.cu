/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer step and the work on shards before and after the wire, on the
 * GPU. Everything here is bound by memory: each number is read once and written
 * once, 16 bytes at a time where the addresses allow. Contracts:
 * kernels/optim.h. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/vector.cuh"

#include <math.h>

enum {
  THREADS = 256,
  PIECE = 8192,                /* elements of a stretch that a block updates */
  PIECES = MZ_STRETCH / PIECE, /* blocks of a stretch */
  UPDATE_UNROLL = 2, /* packs of each array that a thread reads at once */
  SQUARE_THREADS = 512,
  SQUARE_UNROLL = 4,
  TOTAL_THREADS = 1024, /* of the one block that sums over stretches */
  STEPS = 64,           /* groups that are sent to the device at once */
  MAX_BLOCKS = 32768    /* behind that, blocks go on to further elements */
};

/* The operation of a template on a floating-point type. */
#define BY_FLOAT(dtype, function, ...)                                         \
  ((dtype) == MZ_BF16  ? function<__nv_bfloat16>(__VA_ARGS__)                  \
   : (dtype) == MZ_F16 ? function<__half>(__VA_ARGS__)                         \
                       : function<float>(__VA_ARGS__))

static bool is_float(mz_dtype_t dtype)
{
  return dtype == MZ_F32 || dtype == MZ_BF16 || dtype == MZ_F16;
}

/* --- AdamW --- */

/* The numbers of a group's step, rounded to fp32 once. */
typedef struct adamw_step {
  float lr, eps, decay, l2;
  float beta1, rest1, beta2, rest2; /* rest = 1 - beta */
  float scale1, scale2;             /* 1 / c1, 1 / c2 */
} adamw_step_t;

static adamw_step_t adamw_step(const mz_adamw_t *a, const mz_adamw_group_t *g)
{
  double c1 = a->bias_correction ? 1.0 - pow(g->beta1, (double)a->t) : 1.0;
  double c2 = a->bias_correction ? 1.0 - pow(g->beta2, (double)a->t) : 1.0;
  adamw_step_t s = {};

  s.lr = (float)g->lr;
  s.eps = (float)g->eps;
  s.decay = a->l2 ? 0.0f : (float)g->decay;
  s.l2 = a->l2 ? (float)g->decay : 0.0f;
  s.beta1 = (float)g->beta1;
  s.rest1 = (float)(1.0 - g->beta1);
  s.beta2 = (float)g->beta2;
  s.rest2 = (float)(1.0 - g->beta2);
  s.scale1 = (float)(1.0 / c1);
  s.scale2 = (float)(1.0 / c2);
  return s;
}

static __device__ __forceinline__ void update(const adamw_step_t &s,
                                              float factor, float grad,
                                              float *w, float *m, float *v)
{
  float g = factor * grad + s.l2 * *w;
  float mean = s.beta1 * *m + s.rest1 * g;
  float square = s.beta2 * *v + s.rest2 * g * g;
  float step = mean * s.scale1 / (sqrtf(square * s.scale2) + s.eps);

  *m = mean;
  *v = square;
  *w -= s.lr * (step + s.decay * *w);
}

/* Four weights of the model at elements 4 at .. 4 at + 3. */
template <typename O>
static __device__ __forceinline__ void put_weights(void *out, int at,
                                                   const float *w)
{
  if constexpr (sizeof(O) == 4)
    __stcs((uint4 *)out + at, mz_narrow<O>(w));
  else
    __stcs((uint2 *)out + at, make_uint2(mz_narrow_word<O>(w[0], w[1]),
                                         mz_narrow_word<O>(w[2], w[3])));
}

/* Packs [first, end) of a stretch. */
template <typename O>
static __device__ __forceinline__ void
update_packs(const mz_stretch_t &s, const adamw_step_t &step, float factor,
             int first, int end)
{
  for (int i = first + (int)threadIdx.x; i < end;
       i += THREADS * UPDATE_UNROLL) {
    uint4 raw[UPDATE_UNROLL][4];

#pragma unroll
    for (int u = 0; u < UPDATE_UNROLL; u++) {
      int at = i + u * THREADS;

      if (at >= end) continue;
      raw[u][0] = __ldcs((const uint4 *)s.grad + at);
      raw[u][1] = __ldcs((const uint4 *)s.w + at);
      raw[u][2] = __ldcs((const uint4 *)s.m + at);
      raw[u][3] = __ldcs((const uint4 *)s.v + at);
    }
#pragma unroll
    for (int u = 0; u < UPDATE_UNROLL; u++) {
      int at = i + u * THREADS;
      float g[4], w[4], m[4], v[4];

      if (at >= end) continue;
      mz_widen<float>(raw[u][0], g);
      mz_widen<float>(raw[u][1], w);
      mz_widen<float>(raw[u][2], m);
      mz_widen<float>(raw[u][3], v);
#pragma unroll
      for (int j = 0; j < 4; j++)
        update(step, factor, g[j], w + j, m + j, v + j);
      __stcs((uint4 *)s.w + at, mz_narrow<float>(w));
      __stcs((uint4 *)s.m + at, mz_narrow<float>(m));
      __stcs((uint4 *)s.v + at, mz_narrow<float>(v));
      if (s.out) put_weights<O>(s.out, at, w);
    }
  }
}

/* A block a piece of a stretch. */
template <typename O>
static __global__ void __launch_bounds__(THREADS)
    update_pieces(const mz_stretch_t *stretches, const adamw_step_t *steps,
                  const float *factors)
{
  mz_stretch_t s = stretches[blockIdx.x / PIECES];
  int begin = (int)(blockIdx.x % PIECES) * PIECE, end = min(begin + PIECE, s.n);
  adamw_step_t step;
  float factor;
  bool vector;

  if (begin >= end) return;
  step = steps[s.group];
  factor = factors[0];
  vector =
      ((uintptr_t)s.w | (uintptr_t)s.m | (uintptr_t)s.v | (uintptr_t)s.grad) %
              16 ==
          0 &&
      (uintptr_t)s.out % (4 * sizeof(O)) == 0;
  if (vector) {
    update_packs<O>(s, step, factor, begin / 4, end / 4);
    begin = max(begin, end / 4 * 4);
  }
  for (int i = begin + (int)threadIdx.x; i < end; i += THREADS) {
    update(step, factor, s.grad[i], s.w + i, s.m + i, s.v + i);
    if (s.out) ((O *)s.out)[i] = mz_store<O>(s.w[i]);
  }
}

template <typename O>
static void start_update(const mz_adamw_t *a, const adamw_step_t *steps,
                         cudaStream_t stream)
{
  update_pieces<O>
      <<<(unsigned)(a->num_stretches * PIECES), THREADS, 0, stream>>>(
          a->stretches, steps, a->factor);
}

/* The groups' numbers travel as arguments of kernels, some at a time. */
static mz_status_t send_steps(const mz_kernels_t *kernels, const mz_adamw_t *a,
                              adamw_step_t *steps, mz_stream_t stream)
{
  adamw_step_t some[STEPS];

  for (int32_t first = 0; first < a->num_groups; first += STEPS) {
    int32_t count = (int32_t)mz_min_i64(STEPS, a->num_groups - first);

    for (int32_t i = 0; i < count; i++)
      some[i] = adamw_step(a, a->groups + first + i);
    MZ_TRY(mz_device_upload(kernels->device, steps + first, some,
                            count * (int64_t)sizeof *some, stream));
  }
  return MZ_OK;
}

extern "C" mz_status_t mz_k_adamw_cuda(const mz_kernels_t *kernels,
                                       const mz_adamw_t *a, mz_stream_t stream)
{
  adamw_step_t *steps;
  int64_t at = 0;

  MZ_REQUIRE(a->t >= 1, MZ_ERR_ARG, "adamw: t is %" PRId64 ", need 1 or more",
             a->t);
  MZ_REQUIRE(is_float(a->out_dtype), MZ_ERR_UNSUPPORTED,
             "adamw: no weights of dtype %d", (int)a->out_dtype);
  MZ_REQUIRE(a->num_groups >= 1 && a->num_stretches >= 0 &&
                 a->num_stretches <= INT32_MAX / PIECES,
             MZ_ERR_ARG, "adamw: %" PRId32 " groups, %" PRId64 " stretches",
             a->num_groups, a->num_stretches);
  if (a->num_stretches == 0) return MZ_OK;
  MZ_TRY(
      mz_cuda_scratch(kernels, &at, a->num_groups, "groups of AdamW", &steps));
  MZ_TRY(send_steps(kernels, a, steps, stream));
  BY_FLOAT(a->out_dtype, start_update, a, steps, mz_cuda_stream(stream));
  MZ_LAUNCHED("adamw");
  return MZ_OK;
}

/* --- sums --- */

/* Of a block of 32 * WARPS threads in a fixed tree; thread 0 has it. */
template <int WARPS>
static __device__ __forceinline__ double block_sum(double x)
{
  __shared__ double shared[WARPS];
  int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;

  for (int offset = 16; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  x = lane < WARPS ? shared[lane] : 0.0;
  for (int offset = 16; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

static __device__ __forceinline__ void add_squares(uint4 raw, double *sum)
{
  float x[4];

  mz_widen<float>(raw, x);
#pragma unroll
  for (int j = 0; j < 4; j++)
    sum[j] += (double)x[j] * (double)x[j];
}

/* A block a stretch. Which thread adds what depends on the stretch's length
 * alone, not on its address: so there is one path, and an address without
 * 16-byte accesses costs four loads. */
static __global__ void __launch_bounds__(SQUARE_THREADS)
    square_stretches(const mz_stretch_t *stretches, double *partial)
{
  mz_stretch_t s = stretches[blockIdx.x];
  int packs = s.n / 4;
  bool vector = (uintptr_t)s.grad % 16 == 0;
  double sum[4] = {}, total;

  for (int i = (int)threadIdx.x; i < packs;
       i += SQUARE_THREADS * SQUARE_UNROLL) {
    uint4 raw[SQUARE_UNROLL];

#pragma unroll
    for (int u = 0; u < SQUARE_UNROLL; u++) {
      int at = i + u * SQUARE_THREADS;
      const uint32_t *word = (const uint32_t *)s.grad + 4 * at;

      raw[u] = make_uint4(0, 0, 0, 0);
      if (at >= packs) continue;
      if (vector)
        raw[u] = __ldg((const uint4 *)s.grad + at);
      else
        raw[u] = make_uint4(word[0], word[1], word[2], word[3]);
    }
#pragma unroll
    for (int u = 0; u < SQUARE_UNROLL; u++)
      add_squares(raw[u], sum);
  }
  if (4 * packs + (int)threadIdx.x < s.n) {
    double x = s.grad[4 * packs + threadIdx.x];

    sum[0] += x * x;
  }
  total = block_sum<SQUARE_THREADS / 32>((sum[0] + sum[1]) + (sum[2] + sum[3]));
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

/* One block: out[0] the sum of all, out[1] what is not finite. */
static __global__ void __launch_bounds__(TOTAL_THREADS)
    total_squares(const mz_stretch_t *stretches, int count,
                  const double *partial, double *out)
{
  __shared__ int first; /* stretch whose sum is not finite */
  double sum = 0.0;
  int mine = count;

  if (threadIdx.x == 0) first = count;
  __syncthreads();
#pragma unroll 8
  for (int i = (int)threadIdx.x; i < count; i += TOTAL_THREADS) {
    double x = partial[i];

    sum += x;
    if (!isfinite(x)) mine = min(mine, i);
  }
  if (mine < count) atomicMin(&first, mine);
  sum = block_sum<TOTAL_THREADS / 32>(sum); /* with a barrier behind first */
  if (threadIdx.x == 0) {
    out[0] = sum;
    out[1] = first < count ? 1.0 + stretches[first].tensor : 0.0;
  }
}

extern "C" mz_status_t mz_k_sum_squares_cuda(const mz_kernels_t *kernels,
                                             const mz_sum_squares_t *a,
                                             mz_stream_t stream)
{
  cudaStream_t s = mz_cuda_stream(stream);
  int count;

  (void)kernels;
  MZ_REQUIRE(a->num_stretches >= 0, MZ_ERR_ARG,
             "sum_squares: %" PRId64 " stretches", a->num_stretches);
  MZ_TRY(mz_int_from_i64(a->num_stretches, &count));
  if (count > 0) {
    square_stretches<<<(unsigned)count, SQUARE_THREADS, 0, s>>>(a->stretches,
                                                                a->partial);
    MZ_LAUNCHED("sum_squares");
  }
  total_squares<<<1, TOTAL_THREADS, 0, s>>>(a->stretches, count, a->partial,
                                            a->out);
  MZ_LAUNCHED("sum_squares: total");
  return MZ_OK;
}

/* Where a rank's numbers begin. */
template <typename T, int N>
static __device__ __forceinline__ const typename mz_raw<T, N>::type *
numbers_of(const mz_reduce_ranks_t &a, int32_t rank)
{
  typedef typename mz_raw<T, N>::type raw_t;

  if (rank == a.place) return (const raw_t *)a.own;
  return (const raw_t *)a.in + (rank - (rank > a.place)) * (a.stride / N);
}

/* Elements [N at, N at + N): the ranks' numbers in order, then the old sum. */
template <typename T, int N>
static __device__ __forceinline__ void reduce_at(const mz_reduce_ranks_t &a,
                                                 int64_t at)
{
  enum { M = N < 4 ? N : 4 }; /* floats of one access */
  typedef typename mz_raw<float, M>::type out_t;
  out_t *out = (out_t *)(a.out + at * N);
  float sum[N], x[N];

  mz_widen_raw<T, N>(numbers_of<T, N>(a, 0)[at], sum);
#pragma unroll 4
  for (int32_t r = 1; r < a.num_ranks; r++) {
    mz_widen_raw<T, N>(numbers_of<T, N>(a, r)[at], x);
#pragma unroll
    for (int i = 0; i < N; i++)
      sum[i] += x[i];
  }
#pragma unroll
  for (int i = 0; i < N; i += M) {
    if (a.accumulate) {
      mz_widen_raw<float, M>(out[i / M], x);
#pragma unroll
      for (int j = 0; j < M; j++)
        sum[i + j] = x[j] + sum[i + j];
    }
    out[i / M] = mz_narrow_raw<float, M>(sum + i);
  }
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    reduce_elements(mz_reduce_ranks_t a, bool vector)
{
  enum { N = mz_pack<T>::N };
  int64_t packs = vector ? a.n / N : 0;
  int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  int64_t step = (int64_t)gridDim.x * THREADS;

  for (int64_t i = first; i < packs; i += step)
    reduce_at<T, N>(a, i);
  for (int64_t i = packs * N + first; i < a.n; i += step)
    reduce_at<T, 1>(a, i);
}

/* Blocks for n elements, N a thread. */
static unsigned blocks_of(int64_t n, int64_t elements)
{
  return (unsigned)mz_min_i64(mz_div_up(n, THREADS * elements), MAX_BLOCKS);
}

template <typename T>
static void start_reduce(const mz_reduce_ranks_t *a, cudaStream_t stream)
{
  enum { N = mz_pack<T>::N };
  mz_reduce_ranks_t all = *a;
  bool vector = mz_aligned(a->in) && mz_aligned(a->out) && mz_aligned(a->own) &&
                (a->num_ranks == 1 || a->stride % N == 0);

  if (!a->own) all.place = a->num_ranks; /* no rank */
  reduce_elements<T><<<blocks_of(a->n, N), THREADS, 0, stream>>>(all, vector);
}

extern "C" mz_status_t mz_k_reduce_ranks_cuda(const mz_kernels_t *kernels,
                                              const mz_reduce_ranks_t *a,
                                              mz_stream_t stream)
{
  (void)kernels;
  MZ_REQUIRE(a->num_ranks >= 1, MZ_ERR_ARG, "reduce_ranks: %" PRId32 " ranks",
             a->num_ranks);
  MZ_REQUIRE(is_float(a->in_dtype), MZ_ERR_UNSUPPORTED,
             "reduce_ranks: no input of dtype %d", (int)a->in_dtype);
  MZ_REQUIRE(!a->own || (a->place >= 0 && a->place < a->num_ranks), MZ_ERR_ARG,
             "reduce_ranks: place %" PRId32 " of %" PRId32, a->place,
             a->num_ranks);
  if (a->n <= 0) return MZ_OK;
  BY_FLOAT(a->in_dtype, start_reduce, a, mz_cuda_stream(stream));
  MZ_LAUNCHED("reduce_ranks");
  return MZ_OK;
}

/* --- copies --- */

/* The shards of one unit; a rank's lie behind each other at a pitch. Lengths
 * and pitches in words of type W; blockIdx.y is the rank. */
template <typename W>
static __global__ void __launch_bounds__(THREADS)
    copy_shards(W *dst, int64_t dst_pitch, const W *src, int64_t src_pitch,
                int64_t length)
{
  int64_t step = (int64_t)gridDim.x * THREADS;
  W *__restrict__ to = dst + blockIdx.y * dst_pitch;
  const W *__restrict__ from = src + blockIdx.y * src_pitch;

#pragma unroll 4
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < length;
       i += step)
    to[i] = from[i];
}

typedef struct shards {
  char *dst;
  const char *src;
  int64_t dst_pitch, src_pitch, length; /* bytes */
} shards_t;

template <typename W>
static bool start_copy(const shards_t *s, int32_t num_ranks,
                       cudaStream_t stream)
{
  int64_t size = (int64_t)sizeof(W);
  int64_t blocks = mz_div_up(s->length, size * THREADS * 4);
  dim3 grid((unsigned)mz_min_i64(blocks, MAX_BLOCKS), (unsigned)num_ranks);

  if (!mz_aligned(s->dst, sizeof(W)) || !mz_aligned(s->src, sizeof(W)) ||
      s->dst_pitch % size || s->src_pitch % size || s->length % size)
    return false;
  copy_shards<W><<<grid, THREADS, 0, stream>>>(
      (W *)s->dst, s->dst_pitch / size, (const W *)s->src, s->src_pitch / size,
      s->length / size);
  return true;
}

extern "C" mz_status_t mz_k_reorder_cuda(const mz_kernels_t *kernels,
                                         const mz_reorder_t *a,
                                         mz_stream_t stream)
{
  int64_t total = 0, by_rank = 0, size = (int64_t)a->element_bytes;
  cudaStream_t queue = mz_cuda_stream(stream);

  (void)kernels;
  MZ_REQUIRE(a->num_ranks >= 0 && a->num_ranks <= UINT16_MAX, MZ_ERR_ARG,
             "reorder: %" PRId32 " ranks", a->num_ranks);
  for (int32_t u = 0; u < a->num_units; u++)
    total += a->lengths[u];
  for (int32_t u = 0; u < a->num_units; u++) {
    int64_t length = a->lengths[u] * size, pitch = total * size;
    int64_t by_unit = by_rank * a->num_ranks;
    shards_t s = {(char *)a->dst, (const char *)a->src, length, length, length};

    if (a->to_rank_major) {
      s.dst += by_rank;
      s.src += by_unit;
      s.dst_pitch = pitch;
    } else {
      s.dst += by_unit;
      s.src += by_rank;
      s.src_pitch = pitch;
    }
    by_rank += length;
    if (length == 0 || a->num_ranks == 0) continue;
    if (!start_copy<uint4>(&s, a->num_ranks, queue) &&
        !start_copy<uint32_t>(&s, a->num_ranks, queue))
      start_copy<uint8_t>(&s, a->num_ranks, queue);
    MZ_LAUNCHED("reorder");
  }
  return MZ_OK;
}

/* One of S and D is float. A thread converts as many elements as the shorter
 * ones fill 16 bytes. */
template <typename S, typename D>
static __global__ void __launch_bounds__(THREADS)
    convert_elements(const S *src, D *dst, int64_t n, bool vector)
{
  enum { N = 8, LOADS = N / mz_pack<S>::N, STORES = N / mz_pack<D>::N };
  int64_t packs = vector ? n / N : 0;
  int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  int64_t step = (int64_t)gridDim.x * THREADS;

  for (int64_t i = first; i < packs; i += step) {
    uint4 raw[LOADS];
    float x[N];

#pragma unroll
    for (int k = 0; k < LOADS; k++)
      raw[k] = __ldcs((const uint4 *)src + i * LOADS + k);
#pragma unroll
    for (int k = 0; k < LOADS; k++)
      mz_widen<S>(raw[k], x + k * mz_pack<S>::N);
#pragma unroll
    for (int k = 0; k < STORES; k++)
      ((uint4 *)dst)[i * STORES + k] = mz_narrow<D>(x + k * mz_pack<D>::N);
  }
  for (int64_t i = packs * N + first; i < n; i += step)
    dst[i] = mz_store<D>(mz_load(src[i]));
}

template <typename T>
static void start_convert(const mz_convert_t *a, cudaStream_t stream)
{
  bool vector = mz_aligned(a->src) && mz_aligned(a->dst);
  unsigned blocks = blocks_of(a->n, 8);

  if (a->src_dtype == MZ_F32)
    convert_elements<<<blocks, THREADS, 0, stream>>>((const float *)a->src,
                                                     (T *)a->dst, a->n, vector);
  else
    convert_elements<<<blocks, THREADS, 0, stream>>>(
        (const T *)a->src, (float *)a->dst, a->n, vector);
}

extern "C" mz_status_t mz_k_convert_cuda(const mz_kernels_t *kernels,
                                         const mz_convert_t *a,
                                         mz_stream_t stream)
{
  cudaStream_t queue = mz_cuda_stream(stream);
  bool same = a->src_dtype == a->dst_dtype;
  bool known = is_float(a->src_dtype) && is_float(a->dst_dtype) &&
               (same || a->src_dtype == MZ_F32 || a->dst_dtype == MZ_F32);

  (void)kernels;
  MZ_REQUIRE(known, MZ_ERR_UNSUPPORTED, "convert: no way from dtype %d to %d",
             (int)a->src_dtype, (int)a->dst_dtype);
  if (a->n <= 0) return MZ_OK;
  if (same) { /* also to and from host memory of the device */
    size_t bytes = (size_t)a->n * mz_dtype_bytes(a->src_dtype);

    MZ_CUDA(cudaMemcpyAsync(a->dst, a->src, bytes, cudaMemcpyDefault, queue));
    return MZ_OK;
  }
  if (a->src_dtype == MZ_BF16 || a->dst_dtype == MZ_BF16)
    start_convert<__nv_bfloat16>(a, queue);
  else
    start_convert<__half>(a, queue);
  MZ_LAUNCHED("convert");
  return MZ_OK;
}
