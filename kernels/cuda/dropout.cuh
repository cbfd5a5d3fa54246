/* SPDX-License-Identifier: Apache-2.0 */
/* The dropout mask (mz_dropout_t) on the device. A block of Philox serves four
 * elements, so whoever can works on elements 4b .. 4b + 3 at once. */
#ifndef MZ_KERNELS_CUDA_DROPOUT_CUH
#define MZ_KERNELS_CUDA_DROPOUT_CUH

#include "kernels/cuda/cuda.h"

#include <math.h>

/* What kernels know of it. */
typedef struct mz_mask {
  mz_random_t random;
  const int64_t *samples;
  int32_t sequence;
  uint32_t threshold; /* of the upper 24 bits: below it falls; 0: off */
  float kept;         /* 1 / (1 - p) */
} mz_mask_t;

/* @return MZ_OK, MZ_ERR_ARG (p outside [0, 1); with p > 0 no samples or
 * sequence < 1). */
static inline mz_status_t mz_mask_make(const mz_dropout_t *dropout,
                                       mz_mask_t *mask_out)
{
  mz_mask_t mask = {};

  MZ_REQUIRE(dropout->p >= 0 && dropout->p < 1, MZ_ERR_ARG,
             "dropout p is %g, need 0 <= p < 1", dropout->p);
  MZ_REQUIRE(dropout->p == 0 || (dropout->samples && dropout->sequence >= 1),
             MZ_ERR_ARG, "dropout without samples or of sequence %" PRId32,
             dropout->sequence);
  mask.kept = 1.0f;
  if (dropout->p > 0) {
    mask.random = dropout->random;
    mask.samples = dropout->samples;
    mask.sequence = dropout->sequence;
    /* uniform >= p in integers: p rounded up to a multiple of 2^-24. */
    mask.threshold = (uint32_t)ceil(dropout->p * 16777216.0);
    mask.kept = (float)(1.0 / (1.0 - dropout->p));
  }
  *mask_out = mask;
  return MZ_OK;
}

/* Number in the random stream of the first element of a row. */
static __device__ __forceinline__ uint64_t mz_mask_first(const mz_mask_t &mask,
                                                         int64_t row,
                                                         int64_t width)
{
  int64_t sequence = mask.sequence;
  uint64_t sample = (uint64_t)mask.samples[row / sequence];

  return (sample * (uint64_t)sequence + (uint64_t)(row % sequence)) *
         (uint64_t)width;
}

static __device__ __forceinline__ float mz_mask_of(const mz_mask_t &mask,
                                                   uint32_t word)
{
  return word >> 8 >= mask.threshold ? mask.kept : 0.0f;
}

/* x *= the mask of elements first .. first + N - 1. Where N is a multiple of 4,
 * so must first be; where N is 2, first must be even. */
template <int N>
static __device__ __forceinline__ void mz_mask_apply(const mz_mask_t &mask,
                                                     uint64_t first, float *x)
{
  uint32_t words[4];

  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      mz_philox_block(&mask.random, first / 4 + (uint64_t)(i / 4), words);
#pragma unroll
      for (int j = 0; j < 4; j++)
        x[i + j] *= mz_mask_of(mask, words[j]);
    }
  } else {
    static_assert(N <= 2, "no other number of elements");
    uint32_t at = (uint32_t)(first % 4);

    mz_philox_block(&mask.random, first / 4, words);
    if constexpr (N == 2) {
      x[0] *= mz_mask_of(mask, at ? words[2] : words[0]);
      x[1] *= mz_mask_of(mask, at ? words[3] : words[1]);
    } else {
      uint32_t even = at & 2 ? words[2] : words[0];
      uint32_t odd = at & 2 ? words[3] : words[1];

      x[0] *= mz_mask_of(mask, at & 1 ? odd : even);
    }
  }
}

#endif
