/* SPDX-License-Identifier: Apache-2.0 */
/* Many normal numbers: initial values. */
#ifndef MZ_KERNELS_NORMALS_H
#define MZ_KERNELS_NORMALS_H

#include <moezero/random.h>

/* out[i] = (float)(scale * mz_random_normal(random, first + i)), those bits: a
 * tensor's values do not depend on where they are made. What the C library's
 * logarithm, sine and cosine round to is its own: where that decides about a
 * bit the element is in doubt (a few of a million), and out is the caller's to
 * write. The CPU has none in doubt. */
typedef struct mz_normals {
  mz_random_t random;
  uint64_t first;
  int64_t n; /* at most INT32_MAX, but for the CPU */
  double scale;
  float *out;     /* [n] */
  int32_t *doubt; /* [1 + n]: how many are in doubt, then which, in any order;
                     the CPU does not touch it */
} mz_normals_t;

#endif
