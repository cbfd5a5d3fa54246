/* SPDX-License-Identifier: Apache-2.0 */
#include "data/sampler.h"

#include <moezero/random.h>

/* Four rounds already give a pseudo-random permutation; two more cost nothing
 * here and help when a half has only a few bits. */
enum { ROUNDS = 6 };

/* Bits of one half: the smallest h with 4^h >= n. */
static int half_bits(uint64_t n)
{
  int h = 0;

  while (h < 31 && (UINT64_C(1) << (2 * h)) < n)
    h++;
  return h;
}

static uint64_t permute(const mz_sampler_t *sampler, uint32_t epoch, int h,
                        uint64_t value)
{
  uint32_t mask = (uint32_t)((UINT64_C(1) << h) - 1);
  uint32_t left = (uint32_t)(value >> h), right = (uint32_t)value & mask;

  for (uint32_t round = 0; round < ROUNDS; round++) {
    mz_random_t random =
        mz_random_make(sampler->seed, epoch, MZ_PURPOSE_SAMPLER, round);
    uint32_t next = left ^ (mz_random_u32(&random, right) & mask);
    left = right;
    right = next;
  }
  return (uint64_t)left << h | right;
}

int64_t mz_sampler_index(const mz_sampler_t *sampler, int64_t g)
{
  uint64_t n = (uint64_t)sampler->num_samples;
  uint64_t value = (uint64_t)g % n;
  uint32_t epoch = (uint32_t)((uint64_t)g / n);
  int h = half_bits(n);

  /* The permutation's cycle through value < n comes back below n, so this
   * ends; fewer than four tries on average, as 4^h < 4 n. */
  do
    value = permute(sampler, epoch, h, value);
  while (value >= n);
  return (int64_t)value;
}
