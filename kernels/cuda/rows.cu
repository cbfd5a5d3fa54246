/* SPDX-License-Identifier: Apache-2.0 */
/* Elementwise steps over rows: activations, dropout on its own, the expert of
 * the tests. Contracts: kernels/linear.h, kernels/norm.h, kernels/gate.h. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dropout.cuh"
#include "kernels/cuda/vector.cuh"

enum {
  THREADS = 256,
  UNROLL = 2,         /* packs of each array that a thread reads at once */
  MAX_BLOCKS = 32768, /* behind that, blocks go on to further elements */
  ROWS = THREADS / 32 /* of a block where a warp has a row */
};

/* --- activations --- */

typedef struct map {
  const int32_t *rows; /* backend memory */
  int64_t max_rows, width;
  const void *in[3];
  void *out[3];
  bool vector; /* all arrays are aligned to 16 bytes */
} map_t;

static __device__ __forceinline__ float sigmoid(float x)
{
  return __fdividef(1.0f, 1.0f + expf(-x));
}

/* gelu_tanh(u) = u sigmoid(2 z), z = sqrt(2 / pi) (u + 0.044715 u^3) (Hendrycks
 * and Gimpel 2016, arXiv:1606.08415, sec. 2), for 1 + tanh(z) = 2 sigmoid(2 z).
 */
struct gelu_op {
  enum { IN = 1, OUT = 1 };
  static __device__ __forceinline__ void apply(const float *in, float *out)
  {
    const float linear = 1.59576912f;  /* 2 sqrt(2 / pi) */
    const float cubic = 0.0713548163f; /* 0.044715 of it */
    float u = in[0];

    out[0] = u * sigmoid(u * (linear + cubic * u * u));
  }
};

/* a = silu(gate) up */
struct swiglu_op {
  enum { IN = 2, OUT = 1 };
  static __device__ __forceinline__ void apply(const float *in, float *out)
  {
    out[0] = in[0] * sigmoid(in[0]) * in[1];
  }
};

/* gate, up, da -> dgate, dup, a */
struct swiglu_grad_op {
  enum { IN = 3, OUT = 3 };
  static __device__ __forceinline__ void apply(const float *in, float *out)
  {
    float g = in[0], s = sigmoid(g);

    out[0] = in[2] * in[1] * s * (1.0f + g * (1.0f - s));
    out[1] = in[2] * g * s;
    out[2] = g * s * in[1];
  }
};

/* N elements from their raw form; an output may be an input's array, since all
 * of them were read before. */
template <typename T, typename Op, int N>
static __device__ __forceinline__ void
map_pack(const map_t &a, int64_t at, const typename mz_raw<T, N>::type *raw)
{
  typedef typename mz_raw<T, N>::type raw_t;
  float in[Op::IN][N], out[Op::OUT][N];

#pragma unroll
  for (int k = 0; k < Op::IN; k++)
    mz_widen_raw<T, N>(raw[k], in[k]);
#pragma unroll
  for (int i = 0; i < N; i++) {
    float x[Op::IN], y[Op::OUT];

#pragma unroll
    for (int k = 0; k < Op::IN; k++)
      x[k] = in[k][i];
    Op::apply(x, y);
#pragma unroll
    for (int k = 0; k < Op::OUT; k++)
      out[k][i] = y[k];
  }
#pragma unroll
  for (int k = 0; k < Op::OUT; k++)
    ((raw_t *)a.out[k])[at] = mz_narrow_raw<T, N>(out[k]);
}

template <typename T, typename Op>
static __global__ void __launch_bounds__(THREADS) map_rows(map_t a)
{
  enum { N = mz_pack<T>::N };
  int64_t rows = max((int64_t)0, min((int64_t)a.rows[0], a.max_rows));
  int64_t n = rows * a.width, packs = a.vector ? n / N : 0;
  int64_t block = blockIdx.x, step = (int64_t)gridDim.x * THREADS;

  for (int64_t i = block * THREADS * UNROLL + threadIdx.x; i < packs;
       i += step * UNROLL) {
    uint4 raw[UNROLL][Op::IN];

#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int k = 0; k < Op::IN; k++)
        if (i + u * THREADS < packs)
          raw[u][k] = __ldcs((const uint4 *)a.in[k] + i + u * THREADS);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (i + u * THREADS < packs)
        map_pack<T, Op, N>(a, i + u * THREADS, raw[u]);
  }
  /* The rest of a pack, or all where nothing is aligned. */
  for (int64_t i = packs * N + block * THREADS + threadIdx.x; i < n;
       i += step) {
    T raw[Op::IN];

#pragma unroll
    for (int k = 0; k < Op::IN; k++)
      raw[k] = ((const T *)a.in[k])[i];
    map_pack<T, Op, 1>(a, i, raw);
  }
}

template <typename T, typename Op>
static mz_status_t map_all(map_t a, const char *what, cudaStream_t stream)
{
  int64_t n, blocks;

  MZ_REQUIRE(a.max_rows >= 0 && a.width >= 0, MZ_ERR_ARG,
             "%s: %" PRId64 " rows of %" PRId64, what, a.max_rows, a.width);
  MZ_TRY(mz_mul_i64(a.max_rows, a.width, &n));
  if (n == 0) return MZ_OK;
  a.vector = true;
  for (int k = 0; k < Op::IN; k++)
    a.vector = a.vector && mz_aligned(a.in[k]);
  for (int k = 0; k < Op::OUT; k++)
    a.vector = a.vector && mz_aligned(a.out[k]);
  blocks = mz_div_up(n, (int64_t)THREADS * UNROLL * mz_pack<T>::N);
  map_rows<T, Op>
      <<<(unsigned)mz_min_i64(blocks, MAX_BLOCKS), THREADS, 0, stream>>>(a);
  MZ_LAUNCHED(what);
  return MZ_OK;
}

template <typename Op>
static mz_status_t map_dtype(const mz_kernels_t *kernels, const map_t &a,
                             const char *what, mz_stream_t stream)
{
  cudaStream_t s = mz_cuda_stream(stream);

  return kernels->dtype == MZ_BF16 ? map_all<__nv_bfloat16, Op>(a, what, s)
                                   : map_all<float, Op>(a, what, s);
}

extern "C" mz_status_t mz_k_gelu_cuda(const mz_kernels_t *kernels,
                                      const mz_gelu_t *a, mz_stream_t stream)
{
  map_t map = {a->rows, a->max_rows, a->width, {a->pre}, {a->a}};

  return MZ_TRACE(map_dtype<gelu_op>(kernels, map, "gelu", stream));
}

extern "C" mz_status_t mz_k_swiglu_cuda(const mz_kernels_t *kernels,
                                        const mz_swiglu_t *a,
                                        mz_stream_t stream)
{
  map_t map = {a->rows, a->max_rows, a->width, {a->gate, a->up}, {a->a}};

  return MZ_TRACE(map_dtype<swiglu_op>(kernels, map, "swiglu", stream));
}

extern "C" mz_status_t mz_k_swiglu_grad_cuda(const mz_kernels_t *kernels,
                                             const mz_swiglu_t *a,
                                             mz_stream_t stream)
{
  map_t map = {a->rows,
               a->max_rows,
               a->width,
               {a->gate, a->up, a->da},
               {a->dgate, a->dup, a->a}};

  return MZ_TRACE(
      map_dtype<swiglu_grad_op>(kernels, map, "swiglu_grad", stream));
}

/* --- dropout --- */

/* A warp a row, N elements a thread. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    drop_rows(mz_dropout_apply_t a, mz_mask_t mask)
{
  typedef typename mz_raw<T, N>::type raw_t;
  int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / 32;
  int64_t packs = a.width / N;
  raw_t *x = (raw_t *)((T *)a.x + row * a.width);
  uint64_t first;

  if (row >= a.rows) return;
  first = mz_mask_first(mask, row, a.width);
#pragma unroll 4
  for (int64_t at = threadIdx.x % 32; at < packs; at += 32) {
    float value[N];

    mz_widen_raw<T, N>(x[at], value);
    mz_mask_apply<N>(mask, first + (uint64_t)(at * N), value);
    x[at] = mz_narrow_raw<T, N>(value);
  }
}

template <typename T>
static mz_status_t dropout(const mz_dropout_apply_t *a, cudaStream_t stream)
{
  enum { N = mz_pack<T>::N };
  mz_mask_t mask;
  int64_t blocks = mz_div_up(a->rows, ROWS);

  MZ_TRY(mz_mask_make(&a->dropout, &mask));
  MZ_REQUIRE(a->rows >= 0 && blocks <= INT32_MAX, MZ_ERR_ARG,
             "dropout on %" PRId64 " rows", a->rows);
  if (mask.threshold == 0 || a->rows == 0) return MZ_OK;
  if (a->width % N == 0 && mz_aligned(a->x))
    drop_rows<T, N><<<(unsigned)blocks, THREADS, 0, stream>>>(*a, mask);
  else
    drop_rows<T, 1><<<(unsigned)blocks, THREADS, 0, stream>>>(*a, mask);
  MZ_LAUNCHED("dropout");
  return MZ_OK;
}

extern "C" mz_status_t mz_k_dropout_cuda(const mz_kernels_t *kernels,
                                         const mz_dropout_apply_t *a,
                                         mz_stream_t stream)
{
  return MZ_TRACE(MZ_BY_DTYPE(kernels, dropout, a, mz_cuda_stream(stream)));
}

/* --- the expert of the tests --- */

/* A warp a row. */
template <typename T>
static __global__ void __launch_bounds__(THREADS) scale(mz_scale_rows_t a)
{
  int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / 32;
  const T *x = (const T *)a.x + row * a.width;
  T *y = (T *)a.y + row * a.width;
  int32_t expert = 0, end = a.num_experts;
  float factor;

  if (row >= a.max_rows || row < a.offsets[0] || row >= a.offsets[end]) return;
  while (end - expert > 1) { /* offsets[expert] <= row < offsets[end] */
    int32_t middle = expert + (end - expert) / 2;

    if (a.offsets[middle] <= row)
      expert = middle;
    else
      end = middle;
  }
  factor = (float)(a.first_expert + expert + 1);
  for (int64_t c = threadIdx.x % 32; c < a.width; c += 32)
    y[c] = mz_store<T>(mz_load(x[c]) * factor);
}

template <typename T>
static mz_status_t scale_rows(const mz_scale_rows_t *a, cudaStream_t stream)
{
  int64_t blocks = mz_div_up(a->max_rows, ROWS);

  MZ_REQUIRE(a->num_experts >= 1 && a->max_rows >= 0 && blocks <= INT32_MAX,
             MZ_ERR_ARG, "scale_rows: %" PRId32 " experts, %" PRId64 " rows",
             a->num_experts, a->max_rows);
  if (a->max_rows == 0) return MZ_OK;
  scale<T><<<(unsigned)blocks, THREADS, 0, stream>>>(*a);
  MZ_LAUNCHED("scale_rows");
  return MZ_OK;
}

extern "C" mz_status_t mz_k_scale_rows_cuda(const mz_kernels_t *kernels,
                                            const mz_scale_rows_t *a,
                                            mz_stream_t stream)
{
  return MZ_TRACE(MZ_BY_DTYPE(kernels, scale_rows, a, mz_cuda_stream(stream)));
}
