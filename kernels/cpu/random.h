/* SPDX-License-Identifier: Apache-2.0 */
/* Many random numbers of moezero/random.h at once, on the calling thread. */
#ifndef MZ_KERNELS_CPU_RANDOM_H
#define MZ_KERNELS_CPU_RANDOM_H

#include <moezero/random.h>

/** words[4 i ...] = block first + i of Philox, for n blocks. */
void mz_cpu_draw(const mz_random_t *random, uint64_t first, int n,
                 uint32_t *restrict words);

/** out[i] = (float)(scale * mz_random_normal(random, first + i)): those bits,
 * ten times faster and more. */
void mz_cpu_normals(const mz_random_t *random, uint64_t first, int64_t n,
                    double scale, float *out);

#endif
