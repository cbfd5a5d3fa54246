/* SPDX-License-Identifier: Apache-2.0 */
/* Logits of a tile of tokens, by one block, to probs. Letters, tiles:
 * kernels/cuda/gate.h. */
#ifndef MZ_KERNELS_CUDA_GATE_LOGITS_CUH
#define MZ_KERNELS_CUDA_GATE_LOGITS_CUH

#include "kernels/cuda/gate.h"

enum {
  THREADS = 256,
  WARPS = THREADS / 32,
  TOKENS = MZ_GATE_TILE / WARPS, /* of a warp in plain products */
  EXPERTS = 32 / TOKENS          /* at a time: a logit for each lane */
};

/* How logits are computed. From 1 on: tensor cores, and so many groups of 8
 * experts at a time. */
enum { SCALARS = -1, PACKS = 0 };

/* What a kernel knows: softmax of the logits alone, all options, jitter too. */
enum { PLAIN, OPTIONS, JITTER };

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

/* The same of x with jitter; numbers are those of the tokens' first elements.
 */
template <typename T, int N>
static __device__ __forceinline__ void
add_jittered(const mz_gate_t &a, int64_t t, int32_t expert, int64_t c,
             const uint64_t (&numbers)[TOKENS], float (&acc)[TOKENS][EXPERTS])
{
  typedef mz_unit<T, N> unit;

#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    int64_t token = t + i < a.num_tokens ? t + i : a.num_tokens - 1;
    float left[N];

    mz_unpack(*(const unit *)((const T *)a.x + token * a.width + c), left);
    mz_gate_jitter<N>(a, numbers[i] + (uint64_t)c, left);
#pragma unroll
    for (int e = 0; e < EXPERTS; e++) {
      int32_t row = expert + e < a.num_experts ? expert + e : a.num_experts - 1;
      float right[N];

      mz_unpack(*(const unit *)((const T *)a.w + row * a.width + c), right);
#pragma unroll
      for (int n = 0; n < N; n++)
        acc[i][e] += left[n] * right[n];
    }
  }
}

static __device__ __forceinline__ void
number_tokens(const mz_gate_t &a, int64_t t, uint64_t (&numbers)[TOKENS])
{
  for (int i = 0; i < TOKENS; i++)
    numbers[i] = t + i < a.num_tokens ? mz_gate_number(a, t + i, a.width) : 0;
}

/* A warp takes TOKENS tokens; its lanes share the columns. */
template <typename T, int N, int KNOWS>
static __device__ void plain_logits(const mz_gate_t &a, int64_t first)
{
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
  int64_t t = first + warp * TOKENS, token = t + lane / EXPERTS;

  uint64_t numbers[TOKENS];

  if (t >= a.num_tokens) return;
  if constexpr (KNOWS == JITTER) number_tokens(a, t, numbers);
  for (int32_t e0 = 0; e0 < a.num_experts; e0 += EXPERTS) {
    int32_t expert = e0 + lane % EXPERTS;
    float acc[TOKENS][EXPERTS] = {}, mine = 0.0f;

#pragma unroll 1
    for (int64_t c = lane * N; c < a.width; c += 32 * N)
      if constexpr (KNOWS == JITTER)
        add_jittered<T, N>(a, t, e0, c, numbers, acc);
      else
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

#endif
