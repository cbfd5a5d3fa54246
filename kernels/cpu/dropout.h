/* SPDX-License-Identifier: Apache-2.0 */
/* The dropout mask of a row (mz_dropout_t), a few columns at a time. */
#ifndef MZ_KERNELS_CPU_DROPOUT_H
#define MZ_KERNELS_CPU_DROPOUT_H

#include "kernels/norm.h"

#include <moezero/status.h>

/* Columns of one call: a mask of this many floats stays in first-level cache.
 */
enum { MZ_MASK_COLUMNS = 256 };

/** @return MZ_OK or MZ_ERR_ARG (p outside [0, 1); with p > 0 no samples or
 * sequence < 1). */
mz_status_t mz_dropout_check(const mz_dropout_t *dropout);

/** Number in the random stream of the first element of row t, rows of H. */
uint64_t mz_dropout_first(const mz_dropout_t *dropout, int64_t row,
                          int64_t width);

/** mask[i] = 1 / (1 - p) where element first + i stays, 0 elsewhere.
 * n <= MZ_MASK_COLUMNS. */
void mz_dropout_mask(const mz_dropout_t *dropout, uint64_t first, int64_t n,
                     float *mask);

/** y = x * mask on one row of H; y may be x. */
void mz_dropout_row(const mz_dropout_t *dropout, int64_t row, int64_t width,
                    const float *x, float *y);

#endif
