/* SPDX-License-Identifier: Apache-2.0 */
/* Steps on the n numbers of a row that several families use. Arrays are equal
 * or do not overlap. */
#ifndef MZ_KERNELS_CPU_ROWS_H
#define MZ_KERNELS_CPU_ROWS_H

#include <moezero/types.h>
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

/** <a, b> of n elements of @p dtype from element at_a and at_b on. */
float mz_row_dot(mz_dtype_t dtype, const void *a, int64_t at_a, const void *b,
                 int64_t at_b, int64_t n);

/** n elements of dst from @p to on = factor * those of src from @p from on. */
void mz_row_scaled(mz_dtype_t dtype, void *dst, int64_t to, const void *src,
                   int64_t from, float factor, int64_t n);

#endif
