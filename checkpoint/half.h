/* SPDX-License-Identifier: Apache-2.0 */
/* 16-bit floating point in files: bfloat16 and IEEE 754 binary16. */
#ifndef MZ_CHECKPOINT_HALF_H
#define MZ_CHECKPOINT_HALF_H

#include <moezero/types.h>

/**
 * Rounds to nearest, ties to even; NaN stays NaN. A finite value beyond the
 * range becomes infinite.
 * @param dtype  MZ_BF16 or MZ_F16.
 * @return the first such value's index; -1: none.
 */
int64_t mz_half_from_f32(mz_dtype_t dtype, int64_t num, const float *values,
                         uint16_t *half_out);

/** Exact. */
void mz_half_to_f32(mz_dtype_t dtype, int64_t num, const uint16_t *half,
                    float *values_out);

#endif
