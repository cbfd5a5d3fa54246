/* SPDX-License-Identifier: Apache-2.0 */
/* The gate, first half: logits, gates and choices of a tile of tokens by one
 * block, which also leaves the tile's counts and sums. Letters, tiles:
 * kernels/cuda/gate.h; formulas: kernels/gate.h.
 *
 * x is read once where E <= 64 (in bf16; 8 otherwise), from then on out of the
 * cache. Logits take the way through probs: a block reads there only what it
 * has written itself. */
#include "kernels/cuda/gate.h"

enum {
  THREADS = 256,
  WARPS = THREADS / 32,
  LANES = THREADS / MZ_GATE_TILE, /* of a token while it chooses */
  TOKENS = MZ_GATE_TILE / WARPS,  /* of a warp in plain products */
  EXPERTS = 32 / TOKENS           /* at a time: a logit for each lane */
};

/* How logits are computed. From 1 on: tensor cores, and so many groups of 8
 * experts at a time. */
enum { SCALARS = -1, PACKS = 0 };

/* --- logits --- */

static __device__ void copy_fixed_logits(const mz_gate_t &a, int64_t first)
{
  int64_t begin = first * a.num_experts;
  int64_t last = first + MZ_GATE_TILE;
  int64_t end = (last < a.num_tokens ? last : a.num_tokens) * a.num_experts;

  for (int64_t i = begin + threadIdx.x; i < end; i += THREADS)
    a.probs[i] = a.fixed_logits[i % a.num_experts];
}

/* acc[i][e] += x[t_i, c..] . w[e, c..] for N columns; rows past the end stand
 * for the last one, and their sums are not used. */
template <typename T, int N>
static __device__ __forceinline__ void
add_products(const mz_gate_t &a, int64_t t, int32_t expert, int64_t c,
             float (&acc)[TOKENS][EXPERTS])
{
  typedef mz_unit<T, N> unit;
  unit x[TOKENS], w[EXPERTS];

#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    int64_t row = t + i < a.num_tokens ? t + i : a.num_tokens - 1;

    x[i] = *(const unit *)((const T *)a.x + row * a.width + c);
  }
#pragma unroll
  for (int e = 0; e < EXPERTS; e++) {
    int32_t row = expert + e < a.num_experts ? expert + e : a.num_experts - 1;

    w[e] = *(const unit *)((const T *)a.w + row * a.width + c);
  }
#pragma unroll
  for (int e = 0; e < EXPERTS; e++)
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
      float left[N], right[N];

      mz_unpack(x[i], left);
      mz_unpack(w[e], right);
#pragma unroll
      for (int n = 0; n < N; n++)
        acc[i][e] += left[n] * right[n];
    }
}

/* A warp takes TOKENS tokens; its lanes share the columns. */
template <typename T, int N>
static __device__ void plain_logits(const mz_gate_t &a, int64_t first)
{
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
  int64_t t = first + warp * TOKENS, token = t + lane / EXPERTS;

  if (t >= a.num_tokens) return;
  for (int32_t e0 = 0; e0 < a.num_experts; e0 += EXPERTS) {
    int32_t expert = e0 + lane % EXPERTS;
    float acc[TOKENS][EXPERTS] = {}, mine = 0.0f;

#pragma unroll 1
    for (int64_t c = lane * N; c < a.width; c += 32 * N)
      add_products<T, N>(a, t, e0, c, acc);
#pragma unroll
    for (int i = 0; i < TOKENS; i++)
#pragma unroll
      for (int e = 0; e < EXPERTS; e++) {
        float sum = mz_warp_sum(acc[i][e]);

        if (lane == i * EXPERTS + e) mine = sum;
      }
    if (token < a.num_tokens && expert < a.num_experts)
      a.probs[token * a.num_experts + expert] = mine;
  }
}

/* c += a b for a 16 x 16 and a 16 x 8 block of bf16, in fp32. */
static __device__ __forceinline__ void
multiply(float &c0, float &c1, float &c2, float &c3, uint32_t a0, uint32_t a1,
         uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Products of 32 columns from c - 8 q on: token rows g, g + 8, g + 16, g + 24
 * of the tile with GROUPS groups of 8 experts. The instruction wants columns
 * 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of 16 from lane (g, q). Which column has which
 * number does not change the sum, as long as x and w agree, so each lane takes
 * the 8 from 8 q on: 16 bytes of each row. */
template <int GROUPS>
static __device__ __forceinline__ void
multiply_columns(const uint4 *const (&x)[4], const __nv_bfloat16 *w,
                 int64_t width, int32_t expert, int32_t num_experts, int64_t c,
                 float (&acc)[GROUPS * 8])
{
  uint4 rows[4], column[GROUPS];

#pragma unroll
  for (int i = 0; i < 4; i++)
    rows[i] = x[i][c / 8];
#pragma unroll
  for (int n = 0; n < GROUPS; n++) {
    int32_t e = expert + n * 8 < num_experts ? expert + n * 8 : num_experts - 1;

    column[n] = *(const uint4 *)(w + e * width + c);
  }
#pragma unroll
  for (int n = 0; n < GROUPS; n++)
#pragma unroll
    for (int m = 0; m < 2; m++) {
      float *sum = acc + (n * 2 + m) * 4;
      const uint4 &low = rows[2 * m], &high = rows[2 * m + 1];

      multiply(sum[0], sum[1], sum[2], sum[3], low.x, high.x, low.y, high.y,
               column[n].x, column[n].y);
      multiply(sum[0], sum[1], sum[2], sum[3], low.z, high.z, low.w, high.w,
               column[n].z, column[n].w);
    }
}

/* All warps have the whole tile and share the columns, 32 at a time (H is a
 * multiple); their sums meet in warp 0. */
template <int GROUPS>
static __device__ void tensor_logits(const mz_gate_t &a, int64_t first)
{
  __shared__ float shared[WARPS / 2 * GROUPS * 8 * 32];
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
  int g = lane / 4, q = lane % 4;
  const uint4 *x[4];

#pragma unroll
  for (int i = 0; i < 4; i++) {
    int64_t t = first + g + 8 * i;

    t = t < a.num_tokens ? t : a.num_tokens - 1;
    x[i] = (const uint4 *)((const __nv_bfloat16 *)a.x + t * a.width);
  }
  for (int32_t e0 = 0; e0 < a.num_experts; e0 += GROUPS * 8) {
    float acc[GROUPS * 8] = {};

#pragma unroll(GROUPS == 2 || GROUPS == 4 ? 2 : 1)
    for (int64_t c = warp * 32 + q * 8; c < a.width; c += WARPS * 32)
      multiply_columns<GROUPS>(x, (const __nv_bfloat16 *)a.w, a.width, e0 + g,
                               a.num_experts, c, acc);
    mz_sum_warps(acc, warp, WARPS, shared);
    if (warp > 0) continue;
#pragma unroll
    for (int i = 0; i < GROUPS * 8; i++) {
      int64_t t = first + g + i / 4 % 2 * 16 + i % 4 / 2 * 8;
      int32_t e = e0 + i / 8 * 8 + q * 2 + i % 2;

      if (t < a.num_tokens && e < a.num_experts)
        a.probs[t * a.num_experts + e] = acc[i];
    }
  }
}

/* --- gates and choices: LANES lanes a token, each with every LANES-th expert.
 * Each reads and writes its own logits alone. --- */

static __device__ __forceinline__ float group_sum(float x)
{
  for (int offset = LANES / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

static __device__ __forceinline__ float group_max(float x)
{
  for (int offset = LANES / 2; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

/* NaN ranks last, so that a broken model still gives K distinct experts. */
static __device__ __forceinline__ float rank_of(float logit)
{
  return isnan(logit) ? -INFINITY : logit;
}

typedef struct candidate {
  float logit;
  int32_t id;
} candidate_t;

static __device__ __forceinline__ bool better(candidate_t a, candidate_t b)
{
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

/* The best expert that comes after @p last; id INT32_MAX: none is left. */
static __device__ candidate_t next_best(const float *logits, int32_t experts,
                                        int lane, candidate_t last)
{
  candidate_t best = {-INFINITY, INT32_MAX};

  for (int32_t e = lane; e < experts; e += LANES) {
    candidate_t next = {rank_of(logits[e]), e};

    if (better(last, next) && better(next, best)) best = next;
  }
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    candidate_t other = {__shfl_xor_sync(0xffffffffu, best.logit, offset),
                         __shfl_xor_sync(0xffffffffu, best.id, offset)};

    if (better(other, best)) best = other;
  }
  return best;
}

static __device__ __forceinline__ bool has_choice(const mz_gate_t &a)
{
  return !a.fixed_logits && !a.route_table && a.k < a.num_experts;
}

/* Every lane of the warp comes here; those of a token past the end have no
 * experts. Returns the distance from the last one chosen to the best one left,
 * infinity where that is not a choice. */
static __device__ float choose(const mz_gate_t &a, int64_t t, int32_t experts,
                               int lane, int32_t *counts)
{
  const float *logits = a.probs + t * a.num_experts;
  bool writes = experts > 0 && lane == 0;
  int64_t table = a.route_table && writes ? a.route_table[a.tokens[t]] : 0;
  candidate_t last = {INFINITY, -1}, left;

  for (int32_t j = 0; j < a.k; j++) {
    if (a.route_table)
      last.id = (int32_t)((table + j) % a.num_experts);
    else
      last = next_best(logits, experts, lane, last);
    if (!writes) continue;
    a.expert[t * a.k + j] = last.id;
    atomicAdd(&counts[last.id], 1);
  }
  if (!has_choice(a)) return INFINITY;
  left = next_best(logits, experts, lane, last);
  return last.logit - left.logit;
}

/* Logits of token t to gates, log-sum-exp and choices; zero and infinity for a
 * token past the end. */
static __device__ void finish_token(const mz_gate_t &a, int64_t t, int lane,
                                    int32_t *counts, float *lse, float *gap)
{
  int32_t experts = t < a.num_tokens ? a.num_experts : 0;
  float *row = a.probs + t * a.num_experts;
  float top = -INFINITY, sum = 0.0f, distance, scale;

  for (int32_t e = lane; e < experts; e += LANES)
    top = fmaxf(top, row[e]);
  top = group_max(top);
  for (int32_t e = lane; e < experts; e += LANES)
    sum += expf(row[e] - top);
  sum = group_sum(sum);
  distance = choose(a, t, experts, lane, counts);
  scale = 1.0f / sum;
  for (int32_t e = lane; e < experts; e += LANES)
    row[e] = expf(row[e] - top) * scale;
  if (lane > 0) return;
  *lse = experts > 0 ? top + logf(sum) : 0.0f;
  *gap = experts > 0 ? distance : INFINITY;
  if (experts > 0) a.lse[t] = *lse;
}

/* --- the tile --- */

static __device__ void write_partials(const mz_cuda_gate_t &g, int64_t first,
                                      const int32_t *counts, const float *lse,
                                      const float *gap)
{
  const mz_gate_t &a = g.a;
  int64_t left = a.num_tokens - first, tile = blockIdx.x;
  int n = (int)(left < MZ_GATE_TILE ? left : MZ_GATE_TILE);
  double z;
  float distance;

  for (int32_t e = (int32_t)threadIdx.x; e < a.num_experts; e += THREADS) {
    const float *gate = a.probs + first * a.num_experts + e;
    double sum = 0.0;

    for (int i = 0; i < n; i++)
      sum += (double)gate[(int64_t)i * a.num_experts];
    g.sums[e * g.tiles + tile] = sum;
    g.counts[e * g.tiles + tile] = counts[e];
  }
  if (threadIdx.x >= MZ_GATE_TILE) return;
  z = (double)lse[threadIdx.x] * (double)lse[threadIdx.x];
  distance = gap[threadIdx.x];
  for (int offset = MZ_GATE_TILE / 2; offset > 0; offset /= 2) {
    z += __shfl_xor_sync(0xffffffffu, z, offset);
    distance = fminf(distance, __shfl_xor_sync(0xffffffffu, distance, offset));
  }
  if (threadIdx.x > 0) return;
  g.z[tile] = z;
  g.gap[tile] = distance;
}

/* Blocks that a processor holds at once: while some wait for x, others choose.
 */
static constexpr int blocks_at_once(int how) { return how == 1 ? 4 : 2; }

template <typename T, int HOW>
static __global__ void __launch_bounds__(THREADS, blocks_at_once(HOW))
    gate_tile(mz_cuda_gate_t g)
{
  extern __shared__ int32_t counts[];
  __shared__ float lse[MZ_GATE_TILE], gap[MZ_GATE_TILE];
  int64_t first = (int64_t)blockIdx.x * MZ_GATE_TILE;
  int token = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES;

  for (int32_t e = (int32_t)threadIdx.x; e < g.a.num_experts; e += THREADS)
    counts[e] = 0;
  if (g.a.fixed_logits)
    copy_fixed_logits(g.a, first);
  else if constexpr (HOW > 0)
    tensor_logits<HOW>(g.a, first);
  else
    plain_logits<T, HOW == PACKS ? mz_pack<T>::N : 1>(g.a, first);
  __syncthreads();
  finish_token(g.a, first + token, lane, counts, &lse[token], &gap[token]);
  __syncthreads();
  write_partials(g, first, counts, lse, gap);
}

/* --- launch --- */

mz_status_t mz_cuda_gate_check(const mz_gate_t *a)
{
  int64_t routes;
  int narrow;

  MZ_REQUIRE(a->k >= 1 && a->k <= a->num_experts, MZ_ERR_ARG,
             "k is %" PRId32 ", need 1..num_experts=%" PRId32, a->k,
             a->num_experts);
  MZ_REQUIRE(a->num_experts <= MZ_GATE_MAX_EXPERTS, MZ_ERR_UNSUPPORTED,
             "num_experts is %" PRId32 ", at most %d on " MZ_BACKEND_CUDA,
             a->num_experts, (int)MZ_GATE_MAX_EXPERTS);
  MZ_TRY(mz_int_from_i64(a->num_tokens, &narrow));
  MZ_TRY(mz_int_from_i64(a->width, &narrow));
  MZ_TRY(mz_mul_i64(a->num_tokens, a->k, &routes));
  return MZ_TRACE(mz_int_from_i64(routes, &narrow));
}

static mz_status_t take_scratch(const mz_kernels_t *kernels, const mz_gate_t *a,
                                mz_cuda_gate_t *g)
{
  int64_t at = 0, routes = a->capacity > 0 ? a->num_tokens * a->k : 0;

  g->a = *a;
  g->tiles = mz_div_up(a->num_tokens, MZ_GATE_TILE);
  MZ_TRY(mz_cuda_scratch(kernels, &at, a->num_experts * g->tiles, "gate counts",
                         &g->counts));
  MZ_TRY(mz_cuda_scratch(kernels, &at, a->num_experts * g->tiles, "gate sums",
                         &g->sums));
  MZ_TRY(mz_cuda_scratch(kernels, &at, g->tiles, "gate z", &g->z));
  MZ_TRY(mz_cuda_scratch(kernels, &at, g->tiles, "gate gaps", &g->gap));
  MZ_TRY(mz_cuda_scratch(kernels, &at, (int64_t)a->num_experts, "gate totals",
                         &g->totals));
  MZ_TRY(mz_cuda_scratch(kernels, &at, routes, "gate keys", &g->keys));
  return MZ_TRACE(
      mz_cuda_scratch(kernels, &at, routes, "gate routes", &g->routes));
}

template <typename T, int HOW>
static mz_status_t launch_tiles(const mz_cuda_gate_t *g, cudaStream_t stream)
{
  size_t shared_bytes = (size_t)g->a.num_experts * sizeof(int32_t);

  gate_tile<T, HOW><<<(unsigned)g->tiles, THREADS, shared_bytes, stream>>>(*g);
  MZ_LAUNCHED("gate_tile");
  return MZ_OK;
}

static mz_status_t launch_tensor_tiles(const mz_cuda_gate_t *g,
                                       cudaStream_t stream)
{
  if (g->a.num_experts <= 8) return launch_tiles<__nv_bfloat16, 1>(g, stream);
  if (g->a.num_experts <= 16) return launch_tiles<__nv_bfloat16, 2>(g, stream);
  if (g->a.num_experts <= 32) return launch_tiles<__nv_bfloat16, 4>(g, stream);
  return launch_tiles<__nv_bfloat16, 8>(g, stream);
}

template <typename T>
static mz_status_t gate(const mz_cuda_gate_t *g, cudaStream_t stream)
{
  bool aligned = mz_unit_aligned(g->a.x) && mz_unit_aligned(g->a.w);

  if (sizeof(T) == 2 && aligned && g->a.width % 32 == 0)
    return launch_tensor_tiles(g, stream);
  if (aligned && g->a.width % mz_pack<T>::N == 0)
    return launch_tiles<T, PACKS>(g, stream);
  return launch_tiles<T, SCALARS>(g, stream);
}

extern "C" mz_status_t mz_k_gate_cuda(const mz_kernels_t *kernels,
                                      const mz_gate_t *a, mz_stream_t stream)
{
  cudaStream_t s = mz_cuda_stream(stream);
  mz_cuda_gate_t g;

  MZ_TRY(mz_cuda_gate_check(a));
  if (a->num_tokens == 0) {
    MZ_CUDA(cudaMemsetAsync(a->kept, 0,
                            (size_t)a->num_experts * sizeof *a->kept, s));
    return MZ_OK;
  }
  MZ_TRY(take_scratch(kernels, a, &g));
  MZ_TRY(MZ_BY_DTYPE(kernels, gate, &g, s));
  return MZ_TRACE(mz_cuda_gate_route(&g, s));
}
