/* SPDX-License-Identifier: Apache-2.0 */
/* Elementwise steps on n floats that several families use. Arrays are equal or
 * do not overlap. */
#ifndef MZ_KERNELS_CPU_ROWS_H
#define MZ_KERNELS_CPU_ROWS_H

#include <stdint.h>

/** s = x + y */
void mz_row_add(const float *x, const float *y, float *s, int64_t n);

/** s = x + y * mask */
void mz_row_add_masked(const float *x, const float *y, const float *mask,
                       float *s, int64_t n);

/** y = x * mask */
void mz_row_mask(const float *x, const float *mask, float *y, int64_t n);

/** x *= factor */
void mz_row_scale(float *x, float factor, int64_t n);

#endif
