/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the gate share on CUDA: gate.cu (logits, gates, choices),
 * gate_route.cu (rows and weights of the choices), gate_grad.cu.
 *
 * T tokens, E experts, K choices, H width, C capacity; route r = t * K + j. A
 * *tile* is TILE tokens in a row, the work of one block. */
#ifndef MZ_KERNELS_CUDA_GATE_H
#define MZ_KERNELS_CUDA_GATE_H

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/unit.h"

#include <float.h>

enum {
  MZ_GATE_TILE = 32,
  /* Experts whose counts fit into a block's shared memory beside the rest. */
  MZ_GATE_MAX_EXPERTS = 2048
};

/* Smallest sum that weights are divided by: fp32's epsilon. */
#define MZ_GATE_MIN_SUM FLT_EPSILON

typedef struct mz_cuda_gate {
  mz_gate_t a;
  int64_t tiles;
  int32_t *counts; /* [E, tiles] routes; later those of the tiles before */
  int32_t *firsts; /* [E, tiles] routes of first choices */
  double *sums;    /* [E, tiles] of the shares of a tile */
  double *z;       /* [tiles] sum of squared log-sum-exps */
  float *gap;      /* [tiles] smallest distance to the best one not chosen */
  int32_t *totals; /* [E] routes */
  /* With a capacity, [T * K] sorted by (expert, route): */
  uint32_t *keys; /* the smaller, the better */
  int32_t *routes;
} mz_cuda_gate_t;

mz_status_t mz_cuda_gate_check(const mz_gate_t *a);

/* From the choices and sums of the tiles to rows, weights and statistics. */
mz_status_t mz_cuda_gate_route(const mz_cuda_gate_t *g, cudaStream_t stream);

static __device__ __forceinline__ bool mz_gate_is_pad(const mz_gate_t &a,
                                                      int64_t t)
{
  return a.used && !a.used[t];
}

/* Number of the first of the @p width random numbers of token t. */
static __device__ __forceinline__ uint64_t mz_gate_number(const mz_gate_t &a,
                                                          int64_t t,
                                                          int64_t width)
{
  int64_t place = a.samples[t / a.sequence] * a.sequence + t % a.sequence;

  return (uint64_t)place * (uint64_t)width;
}

/* The 32 bits of element i: moezero/random.h without an indexed array. */
static __device__ __forceinline__ uint32_t
mz_gate_bits(const mz_random_t &random, uint64_t i)
{
  uint32_t words[4];

  mz_philox_block(&random, i / 4, words);
  return i % 4 == 0   ? words[0]
         : i % 4 == 1 ? words[1]
         : i % 4 == 2 ? words[2]
                      : words[3];
}

/* The factor of jitter, with the CPU's rounding. */
static __device__ __forceinline__ float mz_gate_factor(const mz_gate_t &a,
                                                       uint32_t bits)
{
  float centred = 2.0f * mz_uniform_of(bits) - 1.0f; /* exact */

  return __fadd_rn(1.0f, __fmul_rn(a.jitter, centred));
}

/* x *= the factors of elements number .. number + N - 1; where N is a multiple
 * of 4, so must number be. */
template <int N>
static __device__ __forceinline__ void
mz_gate_jitter(const mz_gate_t &a, uint64_t number, float (&x)[N])
{
  uint32_t words[4];

  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      mz_philox_block(&a.jitter_random, number / 4 + (uint64_t)(i / 4), words);
#pragma unroll
      for (int j = 0; j < 4; j++)
        x[i + j] *= mz_gate_factor(a, words[j]);
    }
  } else {
    static_assert(N == 1, "no other number of elements");
    x[0] *= mz_gate_factor(a, mz_gate_bits(a.jitter_random, number));
  }
}

static __device__ __forceinline__ bool mz_gate_is_divided(const mz_gate_t &a)
{
  return a.k > 1 && a.norm_topk;
}

/* Sum of the gates of a token's kept routes, in order of j. */
static __device__ __forceinline__ float mz_gate_kept_sum(const mz_gate_t &a,
                                                         int64_t t)
{
  const float *gate = a.probs + t * a.num_experts;
  float sum = 0.0f;

  for (int64_t r = t * a.k; r < (t + 1) * a.k; r++)
    if (a.row[r] >= 0) sum += gate[a.expert[r]];
  return sum;
}

/* Sums acc over n warps (a power of two) into the one with w = 0, in a fixed
 * tree. Every thread of the block calls it; shared has room for n / 2 * N * 32
 * numbers of these warps alone, and may be used again on return. */
template <int N>
static __device__ __forceinline__ void mz_sum_warps(float (&acc)[N], int w,
                                                    int n, float *shared)
{
  int lane = (int)(threadIdx.x % 32);

  for (int half = n / 2; half > 0; half /= 2) {
    if (w >= half && w < 2 * half) {
#pragma unroll
      for (int i = 0; i < N; i++)
        shared[((w - half) * N + i) * 32 + lane] = acc[i];
    }
    __syncthreads();
    if (w < half) {
#pragma unroll
      for (int i = 0; i < N; i++)
        acc[i] += shared[(w * N + i) * 32 + lane];
    }
    __syncthreads();
  }
}

#endif
