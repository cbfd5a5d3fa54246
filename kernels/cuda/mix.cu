/* SPDX-License-Identifier: Apache-2.0 */
/* Experts' output mixed with a dense map's on CUDA. Letters and formulas:
 * kernels/mix.h.
 *
 * A warp has a token; its lanes take every 32nd unit of the row. The gradient
 * of W is summed by blocks over stretches of the tokens, and their sums in
 * order of the stretches; the bias is one more column, of ones. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/unit.h"

enum {
  THREADS = 256,
  WARPS = THREADS / 32,
  MIN_STRETCH = 32,    /* tokens of a block in the gradient of W, at least */
  MAX_STRETCHES = 256, /* at most, whatever the GPU, for equal bits */
  UNROLL = 8           /* tokens whose loads are under way together */
};

static __device__ __forceinline__ int64_t token(void)
{
  return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
}

static __device__ __forceinline__ float sigmoid(float z)
{
  return 1.0f / (1.0f + expf(-z));
}

/* Unit @p at of an array of T. */
template <typename T, int N>
static __device__ __forceinline__ void load(const void *array, int64_t at,
                                            float (&out)[N])
{
  mz_unpack(((const mz_unit<T, N> *)array)[at], out);
}

template <typename T, int N>
static __device__ __forceinline__ void store(void *array, int64_t at,
                                             const float (&x)[N])
{
  mz_repack(x, (mz_unit<T, N> *)array + at);
}

/* What W and x give to the logit of c1, less that of c0; in every lane. */
template <typename T, int N>
static __device__ float logit(const mz_mix_t &a, int64_t t, int64_t units)
{
  float first = 0.0f, second = 0.0f, b[2] = {0.0f, 0.0f};
  bool softmax = a.kind == MZ_MIX_SOFTMAX;

  for (int64_t c = threadIdx.x % 32; c < units; c += 32) {
    float x[N], w[2][N] = {};

    load<T, N>(a.x, t * units + c, x);
    load<T, N>(a.w, c, w[0]);
    if (softmax) load<T, N>(a.w, units + c, w[1]);
#pragma unroll
    for (int n = 0; n < N; n++) {
      first += x[n] * w[0][n];
      second += x[n] * w[1][n];
    }
  }
  first = mz_warp_sum(first);
  if (!softmax) return first;
  second = mz_warp_sum(second);
  if (a.b) {
    b[0] = mz_load(((const T *)a.b)[0]);
    b[1] = mz_load(((const T *)a.b)[1]);
  }
  return second - first + (b[1] - b[0]);
}

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    mix_rows(mz_mix_t a, int64_t units)
{
  int64_t t = token();
  int lane = (int)(threadIdx.x % 32);
  float c0 = 1.0f, c1 = 1.0f;

  if (t >= a.num_tokens) return;
  if (a.kind != MZ_MIX_SUM) {
    float z = logit<T, N>(a, t, units);

    c1 = sigmoid(z);
    if (a.kind == MZ_MIX_SOFTMAX) c0 = sigmoid(-z);
    if (lane == 0) {
      a.coef[2 * t] = c0;
      a.coef[2 * t + 1] = c1;
    }
  }
  for (int64_t c = t * units + lane; c < (t + 1) * units; c += 32) {
    float moe[N], side[N];

    load<T, N>(a.moe, c, moe);
    load<T, N>(a.side, c, side);
#pragma unroll
    for (int n = 0; n < N; n++)
      moe[n] = c0 * moe[n] + c1 * side[n];
    store<T, N>(a.y, c, moe);
  }
}

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    mix_grad_rows(mz_mix_grad_t a, int64_t units)
{
  const mz_mix_t &f = a.forward;
  bool softmax = f.kind == MZ_MIX_SOFTMAX;
  int64_t t = token();
  int lane = (int)(threadIdx.x % 32);
  float c0, c1, dot = 0.0f;

  if (t >= f.num_tokens) return;
  c1 = f.coef[2 * t + 1];
  c0 = softmax ? f.coef[2 * t] : 1.0f - c1;
  for (int64_t c = t * units + lane; c < (t + 1) * units; c += 32) {
    float dy[N], side[N], moe[N] = {}, d_moe[N];

    load<T, N>(a.dy, c, dy);
    load<T, N>(f.side, c, side);
    if (softmax) load<T, N>(f.moe, c, moe);
#pragma unroll
    for (int n = 0; n < N; n++) {
      dot += dy[n] * (side[n] - moe[n]);
      d_moe[n] = c0 * dy[n];
      dy[n] *= c1;
    }
    if (softmax) store<T, N>(a.d_moe, c, d_moe);
    store<T, N>(a.d_side, c, dy);
  }
  dot = mz_warp_sum(dot);
  if (lane == 0) a.d[t] = c1 * c0 * dot;
}

/* sums[stretch, c] = sum of d x over a stretch of tokens; column H: of d. */
template <typename T>
static __global__ void __launch_bounds__(THREADS)
    mix_dw(mz_mix_grad_t a, int64_t stretch, float *sums)
{
  const mz_mix_t &f = a.forward;
  int64_t c = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  int64_t begin = blockIdx.y * stretch, end = begin + stretch;
  const T *x = (const T *)f.x + c;
  float sum = 0.0f;

  if (c > f.width) return;
  end = end < f.num_tokens ? end : f.num_tokens;
#pragma unroll UNROLL
  for (int64_t t = begin; t < end; t++)
    sum += a.d[t] * (c < f.width ? mz_load(x[t * f.width]) : 1.0f);
  sums[blockIdx.y * (f.width + 1) + c] = sum;
}

static __device__ __forceinline__ void put(float *dst, float value,
                                           int accumulate)
{
  *dst = accumulate ? *dst + value : value;
}

static __global__ void __launch_bounds__(THREADS)
    mix_dw_sum(mz_mix_grad_t a, const float *sums, int64_t stretches)
{
  int64_t c = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  int64_t width = a.forward.width;
  bool softmax = a.forward.kind == MZ_MIX_SOFTMAX;
  float sum = 0.0f;

  if (c > width) return;
#pragma unroll UNROLL
  for (int64_t s = 0; s < stretches; s++)
    sum += sums[s * (width + 1) + c];
  if (c < width) {
    put(a.dw + (softmax ? width : 0) + c, sum, a.accumulate_w);
    if (softmax) put(a.dw + c, -sum, a.accumulate_w);
  } else if (a.db) {
    put(a.db, -sum, a.accumulate_b);
    put(a.db + 1, sum, a.accumulate_b);
  }
}

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    mix_dgrad_rows(mz_mix_dgrad_t a, int64_t units)
{
  int64_t t = token();
  bool softmax = a.kind == MZ_MIX_SOFTMAX;
  float d = 0.0f;

  if (t >= a.num_tokens) return;
  if (a.kind != MZ_MIX_SUM) d = a.d[t];
  for (int64_t c = threadIdx.x % 32; c < units; c += 32) {
    float dx[N], side[N], w[2][N] = {};

    load<T, N>(a.dx, t * units + c, dx);
    load<T, N>(a.d_side, t * units + c, side);
    if (softmax) load<T, N>(a.w, c, w[0]);
    if (a.kind != MZ_MIX_SUM) load<T, N>(a.w, (softmax ? units : 0) + c, w[1]);
#pragma unroll
    for (int n = 0; n < N; n++)
      dx[n] = dx[n] + side[n] - d * w[0][n] + d * w[1][n];
    store<T, N>(a.dx, t * units + c, dx);
  }
}

/* --- launch --- */

/* Whether rows of T are whole 16-byte units, and the arrays begin with one. */
template <typename T>
static bool in_units(int64_t width, const void *const *arrays, int num_arrays)
{
  bool good = width % mz_pack<T>::N == 0;

  for (int i = 0; i < num_arrays; i++)
    good = good && mz_unit_aligned(arrays[i]);
  return good;
}

static mz_status_t blocks_of(int64_t num_tokens, unsigned *blocks_out)
{
  int blocks;

  MZ_TRY(mz_int_from_i64(mz_div_up(num_tokens, WARPS), &blocks));
  *blocks_out = (unsigned)blocks;
  return MZ_OK;
}

template <typename T>
static mz_status_t mix(const mz_mix_t *a, cudaStream_t stream)
{
  const int n = mz_pack<T>::N;
  const void *arrays[] = {a->x, a->w, a->moe, a->side, a->y};
  unsigned blocks;

  if (a->num_tokens == 0) return MZ_OK;
  MZ_TRY(blocks_of(a->num_tokens, &blocks));
  if (in_units<T>(a->width, arrays, 5))
    mix_rows<T, n><<<blocks, THREADS, 0, stream>>>(*a, a->width / n);
  else
    mix_rows<T, 1><<<blocks, THREADS, 0, stream>>>(*a, a->width);
  MZ_LAUNCHED("mix_rows");
  return MZ_OK;
}

extern "C" mz_status_t mz_k_mix_cuda(const mz_kernels_t *kernels,
                                     const mz_mix_t *a, mz_stream_t stream)
{
  return MZ_TRACE(MZ_BY_DTYPE(kernels, mix, a, mz_cuda_stream(stream)));
}

template <typename T>
static mz_status_t weight_grad(const mz_kernels_t *kernels,
                               const mz_mix_grad_t *a, cudaStream_t stream)
{
  const mz_mix_t *f = &a->forward;
  int64_t stretch =
      mz_max_i64(mz_div_up(f->num_tokens, MAX_STRETCHES), MIN_STRETCH);
  int64_t stretches = mz_div_up(f->num_tokens, stretch), at = 0;
  dim3 grid((unsigned)mz_div_up(f->width + 1, THREADS), (unsigned)stretches);
  float *sums;

  MZ_TRY(mz_cuda_scratch(kernels, &at, stretches * (f->width + 1),
                         "gradient of the mix", &sums));
  if (stretches > 0) {
    mix_dw<T><<<grid, THREADS, 0, stream>>>(*a, stretch, sums);
    MZ_LAUNCHED("mix_dw");
  }
  mix_dw_sum<<<grid.x, THREADS, 0, stream>>>(*a, sums, stretches);
  MZ_LAUNCHED("mix_dw_sum");
  return MZ_OK;
}

template <typename T>
static mz_status_t mix_grad(const mz_kernels_t *kernels, const mz_mix_grad_t *a,
                            cudaStream_t stream)
{
  const mz_mix_t *f = &a->forward;
  const int n = mz_pack<T>::N;
  const void *arrays[] = {f->side, a->dy, a->d_side, f->moe, a->d_moe};
  int num_arrays = f->kind == MZ_MIX_SOFTMAX ? 5 : 3;
  unsigned blocks;

  MZ_REQUIRE(f->kind != MZ_MIX_SUM, MZ_ERR_ARG,
             "a plain sum has no gradient of its own");
  MZ_TRY(blocks_of(f->num_tokens, &blocks));
  if (blocks > 0) {
    if (in_units<T>(f->width, arrays, num_arrays))
      mix_grad_rows<T, n><<<blocks, THREADS, 0, stream>>>(*a, f->width / n);
    else
      mix_grad_rows<T, 1><<<blocks, THREADS, 0, stream>>>(*a, f->width);
    MZ_LAUNCHED("mix_grad_rows");
  }
  return MZ_TRACE(weight_grad<T>(kernels, a, stream));
}

extern "C" mz_status_t mz_k_mix_grad_cuda(const mz_kernels_t *kernels,
                                          const mz_mix_grad_t *a,
                                          mz_stream_t stream)
{
  return MZ_TRACE(
      MZ_BY_DTYPE(kernels, mix_grad, kernels, a, mz_cuda_stream(stream)));
}

template <typename T>
static mz_status_t mix_dgrad(const mz_mix_dgrad_t *a, cudaStream_t stream)
{
  const int n = mz_pack<T>::N;
  const void *arrays[] = {a->dx, a->d_side, a->w};
  unsigned blocks;

  if (a->num_tokens == 0) return MZ_OK;
  MZ_TRY(blocks_of(a->num_tokens, &blocks));
  if (in_units<T>(a->width, arrays, a->kind == MZ_MIX_SUM ? 2 : 3))
    mix_dgrad_rows<T, n><<<blocks, THREADS, 0, stream>>>(*a, a->width / n);
  else
    mix_dgrad_rows<T, 1><<<blocks, THREADS, 0, stream>>>(*a, a->width);
  MZ_LAUNCHED("mix_dgrad_rows");
  return MZ_OK;
}

extern "C" mz_status_t mz_k_mix_dgrad_cuda(const mz_kernels_t *kernels,
                                           const mz_mix_dgrad_t *a,
                                           mz_stream_t stream)
{
  return MZ_TRACE(MZ_BY_DTYPE(kernels, mix_dgrad, a, mz_cuda_stream(stream)));
}
