/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The global order of samples: a function of (seed, position) alone, so that it
 * depends neither on the number of ranks nor on where a run was interrupted.
 *
 * Position g counts samples from the start of training. Epoch e = g / n passes
 * every sample once, in an order of its own: a keyed permutation of [0, n) by a
 * Feistel network (Luby and Rackoff 1988) over the next power of four, walking
 * the cycle until the value lies below n (Black and Rogaway 2002, sec. 3). The
 * round function is Philox with purpose MZ_PURPOSE_SAMPLER. No table.
 */
#ifndef MZ_DATA_SAMPLER_H
#define MZ_DATA_SAMPLER_H

#include <stdint.h>

typedef struct mz_sampler {
  uint64_t seed;
  int64_t num_samples; /* n in [1, 2^62] */
} mz_sampler_t;

/** The sample in [0, n) at position @p g >= 0. */
int64_t mz_sampler_index(const mz_sampler_t *sampler, int64_t g);

#endif
