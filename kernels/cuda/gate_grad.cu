/* SPDX-License-Identifier: Apache-2.0 */
/* The gate's gradient: d of the logits, then dx += dlogits W and dw (+)=
 * dlogits^T x. Letters: kernels/cuda/gate.h; formulas: kernels/gate.h.
 *
 * Both products are bound by memory for few experts, so they run on the plain
 * fp32 units: a lane has a few neighbouring columns of 8 tokens (dx) or of 8
 * experts (dw) in registers. dw is summed by blocks over stretches of the
 * tokens, and their sums in order of the stretches. */
#include "kernels/cuda/gate.h"

enum {
  THREADS = 256,
  WARPS = THREADS / 32,
  LANES = THREADS / MZ_GATE_TILE, /* of a token in dlogits */
  EIGHT = 8,   /* tokens (dx) or experts (dw) of a warp at a time */
  CHUNK = 32,  /* tokens of a warp between two looks at dlogits (dw) */
  BLOCKS = 264 /* dw: about as many, whatever the GPU, for equal bits */
};

/* --- dlogits --- */

static __device__ __forceinline__ double group_sum(double x)
{
  for (int offset = LANES / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/* What reaches the gates of a token's routes: (d_weight - dot) / sum. */
typedef struct weight_grad {
  float dot, sum;
  bool flows;
} weight_grad_t;

static __device__ weight_grad_t weight_grad_of(const mz_gate_grad_t &a,
                                               int64_t t)
{
  const mz_gate_t &f = a.forward;
  weight_grad_t grad = {0.0f, 1.0f, true};

  if (!mz_gate_is_divided(f)) return grad;
  grad.sum = mz_gate_kept_sum(f, t);
  grad.flows = !(grad.sum <= MZ_GATE_MIN_SUM);
  for (int64_t r = t * f.k; r < (t + 1) * f.k; r++)
    if (f.row[r] >= 0) grad.dot += f.weight[r] * a.d_weight[r];
  return grad;
}

/* What the balance terms give to the share of expert e of every token. */
static __device__ float balance_slope(const mz_gate_grad_t &a, int32_t e)
{
  double slope = 0.0;

  if (a.aux_scale != 0.0) slope += a.aux_scale * (double)a.aux_counts[e];
  if (a.sums_scale != 0.0)
    slope += a.sums_scale * (a.aux_sums[e] - a.sums_mean);
  return (float)slope;
}

/* d, and what reaches gate e of token t through its routes. */
static __device__ float add_weights(const mz_gate_grad_t &a, int64_t t,
                                    int32_t e, const weight_grad_t &grad,
                                    float d)
{
  const mz_gate_t &f = a.forward;

  if (!grad.flows) return d;
  for (int64_t r = t * f.k; r < (t + 1) * f.k; r++)
    if (f.expert[r] == e && f.row[r] >= 0)
      d += (a.d_weight[r] - grad.dot) / grad.sum;
  return d;
}

/* dz = g (dg - <g, dg>) + z_scale 2 lse g. */
static __device__ void softmax_grad(const mz_gate_grad_t &a, int64_t t,
                                    int32_t experts, int lane,
                                    const weight_grad_t &grad, float scale)
{
  const mz_gate_t &f = a.forward;
  const float *gate = f.probs + t * f.num_experts;
  float *dlogit = a.dlogits + t * f.num_experts, shift = 0.0f;
  double dot = 0.0;

  for (int32_t e = lane; e < experts; e += LANES) {
    float d = add_weights(a, t, e, grad, balance_slope(a, e));

    dlogit[e] = d;
    dot += (double)gate[e] * (double)d;
  }
  dot = group_sum(dot);
  if (experts > 0)
    shift = (float)(a.z_scale * 2.0 * (double)f.lse[t]) - (float)dot;
  for (int32_t e = lane; e < experts; e += LANES)
    dlogit[e] = gate[e] * (dlogit[e] + shift) / scale;
}

/* dz = g (1 - g) dg; dg also from the shares p = g / sum: (dp - <p, dp>) / sum.
 */
static __device__ void sigmoid_grad(const mz_gate_grad_t &a, int64_t t,
                                    int32_t experts, int lane,
                                    const weight_grad_t &grad, float scale)
{
  const mz_gate_t &f = a.forward;
  const float *gate = f.probs + t * f.num_experts;
  float *dlogit = a.dlogits + t * f.num_experts;
  double sum = 0.0, dot = 0.0;

  for (int32_t e = lane; e < experts; e += LANES) {
    sum += (double)gate[e];
    dot += (double)gate[e] * (double)balance_slope(a, e);
  }
  sum = group_sum(sum);
  dot = group_sum(dot);
  for (int32_t e = lane; e < experts; e += LANES) {
    double share = ((double)balance_slope(a, e) - dot / sum) / sum;

    dlogit[e] = add_weights(a, t, e, grad, (float)share) *
                (gate[e] * (1.0f - gate[e])) / scale;
  }
}

/* LANES lanes a token. */
static __global__ void __launch_bounds__(THREADS) gate_dlogits(mz_gate_grad_t a)
{
  const mz_gate_t &f = a.forward;
  int lane = (int)threadIdx.x % LANES;
  int64_t t = (int64_t)blockIdx.x * MZ_GATE_TILE + threadIdx.x / LANES;
  int32_t experts = t < f.num_tokens ? f.num_experts : 0;
  float scale = f.temperature > 0.0f ? f.temperature : 1.0f;
  weight_grad_t grad = {};

  if (experts > 0) grad = weight_grad_of(a, t);
  if (f.score == MZ_SCORE_SOFTMAX)
    softmax_grad(a, t, experts, lane, grad, scale);
  else
    sigmoid_grad(a, t, experts, lane, grad, scale);
}

/* --- products --- */

/* acc[8, N] += column of 8 times row of N. */
template <int N>
static __device__ __forceinline__ void add_outer(float (&acc)[EIGHT * N],
                                                 const float4 (&column)[2],
                                                 const float (&x)[N])
{
  float d[EIGHT] = {column[0].x, column[0].y, column[0].z, column[0].w,
                    column[1].x, column[1].y, column[1].z, column[1].w};

#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 0; i < EIGHT; i++)
      acc[i * N + n] += d[i] * x[n];
}

/* A warp has 8 tokens and 32 N columns. */
template <typename T, int N, bool JITTER>
static __global__ void __launch_bounds__(THREADS, 2) gate_dx(mz_gate_grad_t a)
{
  typedef mz_unit<T, N> unit;
  __shared__ float4 shared[WARPS][32][2]; /* expert: d of the 8 tokens */
  const mz_gate_t &f = a.forward;
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
  int64_t t = ((int64_t)blockIdx.x * WARPS + warp) * EIGHT;
  int64_t c = ((int64_t)blockIdx.y * 32 + lane) * N;
  T *dx = (T *)a.dx + t * f.width + c;
  float acc[EIGHT * N] = {};
  unit old[EIGHT] = {};

#pragma unroll
  for (int i = 0; i < EIGHT; i++)
    if (c < f.width && t + i < f.num_tokens)
      old[i] = *(const unit *)(dx + i * f.width);
  for (int32_t e0 = 0; e0 < f.num_experts; e0 += 32) {
    int32_t n = f.num_experts - e0 < 32 ? f.num_experts - e0 : 32;
    const T *w = (const T *)f.w + e0 * f.width + c;
    float d[EIGHT];

#pragma unroll
    for (int i = 0; i < EIGHT; i++)
      d[i] = t + i < f.num_tokens && lane < n
                 ? a.dlogits[(t + i) * f.num_experts + e0 + lane]
                 : 0.0f;
    shared[warp][lane][0] = make_float4(d[0], d[1], d[2], d[3]);
    shared[warp][lane][1] = make_float4(d[4], d[5], d[6], d[7]);
    __syncwarp();
    if (c < f.width) {
#pragma unroll 2
      for (int32_t e = 0; e < n; e++) {
        float row[N];

        mz_unpack(*(const unit *)(w + e * f.width), row);
        add_outer<N>(acc, shared[warp][e], row);
      }
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < EIGHT; i++) {
    float sum[N], add[N];

    if (c >= f.width || t + i >= f.num_tokens) continue;
    mz_unpack(old[i], sum);
#pragma unroll
    for (int n = 0; n < N; n++)
      add[n] = acc[i * N + n];
    if constexpr (JITTER)
      mz_gate_jitter<N>(f, mz_gate_number(f, t + i, f.width) + (uint64_t)c,
                        add);
#pragma unroll
    for (int n = 0; n < N; n++)
      sum[n] += add[n];
    mz_repack(sum, (unit *)(dx + i * f.width));
  }
}

/* How dw is cut. A block has 32 N columns, *groups* times 8 experts and a
 * stretch of *chunks* chunks, shared by its WARPS / groups warps of a group. */
typedef struct cut {
  int64_t columns, experts, stretches; /* blocks along each */
  int64_t chunks;
  int groups;
} cut_t;

static cut_t cut_of(const mz_gate_t *f, int64_t columns)
{
  int64_t chunks = mz_div_up(f->num_tokens, CHUNK);
  cut_t cut = {};

  for (cut.groups = 1; cut.groups < WARPS;) {
    if (cut.groups * EIGHT >= f->num_experts) break;
    cut.groups *= 2;
  }
  cut.columns = mz_div_up(f->width, columns);
  cut.experts = mz_div_up(f->num_experts, (int64_t)cut.groups * EIGHT);
  cut.chunks = mz_div_up(chunks * cut.columns * cut.experts, BLOCKS);
  cut.chunks = mz_max_i64(cut.chunks, WARPS / cut.groups);
  cut.stretches = mz_div_up(chunks, cut.chunks);
  return cut;
}

/* sums[stretch, e, c] = sum over the tokens of a stretch. */
template <typename T, int N, bool JITTER>
static __global__ void __launch_bounds__(THREADS, 2)
    gate_dw(mz_gate_grad_t a, cut_t cut, float *sums)
{
  typedef mz_unit<T, N> unit;
  __shared__ float4 shared[WARPS][CHUNK][2]; /* token: d of the 8 experts */
  __shared__ float tree[WARPS / 2 * EIGHT * N * 32];
  const mz_gate_t &f = a.forward;
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
  int warps = WARPS / cut.groups, group = warp / warps, w = warp % warps;
  int64_t c = ((int64_t)blockIdx.x * 32 + lane) * N;
  int32_t e0 = ((int32_t)blockIdx.y * cut.groups + group) * EIGHT;
  int64_t begin = blockIdx.z * cut.chunks * CHUNK;
  int64_t end = begin + cut.chunks * CHUNK;
  float acc[EIGHT * N] = {};

  end = end < f.num_tokens ? end : f.num_tokens;
  for (int64_t t = begin + w * CHUNK; t < end; t += warps * CHUNK) {
    int n = end - t < CHUNK ? (int)(end - t) : CHUNK;
    const T *x = (const T *)f.x + t * f.width + c;
    const float *dlogit = a.dlogits + (t + lane) * f.num_experts + e0;
    float d[EIGHT];

#pragma unroll
    for (int i = 0; i < EIGHT; i++)
      d[i] = lane < n && e0 + i < f.num_experts ? dlogit[i] : 0.0f;
    shared[warp][lane][0] = make_float4(d[0], d[1], d[2], d[3]);
    shared[warp][lane][1] = make_float4(d[4], d[5], d[6], d[7]);
    __syncwarp();
    if (c < f.width) {
#pragma unroll 4
      for (int i = 0; i < n; i++) {
        float row[N];

        mz_unpack(*(const unit *)(x + i * f.width), row);
        if constexpr (JITTER)
          mz_gate_jitter<N>(f, mz_gate_number(f, t + i, f.width) + (uint64_t)c,
                            row);
        add_outer<N>(acc, shared[warp][i], row);
      }
    }
    __syncwarp();
  }
  mz_sum_warps(acc, w, warps, tree + group * (warps / 2) * EIGHT * N * 32);
  if (w > 0 || c >= f.width) return;
#pragma unroll
  for (int i = 0; i < EIGHT; i++) {
    int64_t at = ((int64_t)blockIdx.z * f.num_experts + e0 + i) * f.width + c;

    if (e0 + i >= f.num_experts) break;
#pragma unroll
    for (int n = 0; n < N; n++)
      sums[at + n] = acc[i * N + n];
  }
}

static __global__ void __launch_bounds__(THREADS)
    gate_dw_sum(const float *sums, int64_t stretches, int64_t size,
                int accumulate, float *dw)
{
  int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  float sum = 0.0f;

  if (i >= size) return;
#pragma unroll 8
  for (int64_t s = 0; s < stretches; s++)
    sum += sums[s * size + i];
  dw[i] = accumulate ? dw[i] + sum : sum;
}

/* --- launch --- */

template <typename T, int N, bool JITTER>
static mz_status_t products(const mz_kernels_t *kernels,
                            const mz_gate_grad_t *a, cudaStream_t stream)
{
  const mz_gate_t *f = &a->forward;
  cut_t cut = cut_of(f, 32 * N);
  int64_t at = 0, size = f->num_experts * f->width;
  dim3 dx_grid((unsigned)mz_div_up(f->num_tokens, WARPS * EIGHT),
               (unsigned)cut.columns);
  dim3 dw_grid((unsigned)cut.columns, (unsigned)cut.experts,
               (unsigned)cut.stretches);
  float *sums;

  MZ_TRY(mz_cuda_scratch(kernels, &at, cut.stretches * size,
                         "gradient of the gate's weight", &sums));
  gate_dx<T, N, JITTER><<<dx_grid, THREADS, 0, stream>>>(*a);
  MZ_LAUNCHED("gate_dx");
  gate_dw<T, N, JITTER><<<dw_grid, THREADS, 0, stream>>>(*a, cut, sums);
  MZ_LAUNCHED("gate_dw");
  gate_dw_sum<<<(unsigned)mz_div_up(size, THREADS), THREADS, 0, stream>>>(
      sums, cut.stretches, size, a->accumulate, a->dw);
  MZ_LAUNCHED("gate_dw_sum");
  return MZ_OK;
}

template <typename T, bool JITTER>
static mz_status_t aligned_products(const mz_kernels_t *kernels,
                                    const mz_gate_grad_t *a,
                                    cudaStream_t stream)
{
  const mz_gate_t *f = &a->forward;

  if (f->width % mz_pack<T>::N == 0 && mz_unit_aligned(f->x) &&
      mz_unit_aligned(f->w) && mz_unit_aligned(a->dx))
    return products<T, mz_pack<T>::N, JITTER>(kernels, a, stream);
  return products<T, 1, JITTER>(kernels, a, stream);
}

template <typename T>
static mz_status_t gate_products(const mz_kernels_t *kernels,
                                 const mz_gate_grad_t *a, cudaStream_t stream)
{
  if (a->forward.jitter > 0.0f)
    return aligned_products<T, true>(kernels, a, stream);
  return aligned_products<T, false>(kernels, a, stream);
}

extern "C" mz_status_t mz_k_gate_grad_cuda(const mz_kernels_t *kernels,
                                           const mz_gate_grad_t *a,
                                           mz_stream_t stream)
{
  const mz_gate_t *f = &a->forward;
  cudaStream_t s = mz_cuda_stream(stream);
  size_t dw_bytes;

  MZ_TRY(mz_cuda_gate_check(f));
  if (f->num_tokens > 0) {
    gate_dlogits<<<(unsigned)mz_div_up(f->num_tokens, MZ_GATE_TILE), THREADS, 0,
                   s>>>(*a);
    MZ_LAUNCHED("gate_dlogits");
  }
  if (f->num_tokens > 0 && !f->fixed_logits)
    return MZ_TRACE(MZ_BY_DTYPE(kernels, gate_products, kernels, a, s));
  /* Logits that do not come from x and w send them nothing. */
  if (a->accumulate) return MZ_OK;
  dw_bytes = (size_t)f->num_experts * (size_t)f->width * sizeof(float);
  MZ_CUDA(cudaMemsetAsync(a->dw, 0, dw_bytes, s));
  return MZ_OK;
}
