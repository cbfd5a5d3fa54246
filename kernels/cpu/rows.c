/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/rows.h"

#include "kernels/cpu/simd.h"

MZ_CLONES void mz_row_add(const float *x, const float *y, float *s, int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    s[i] = x[i] + y[i];
}

MZ_CLONES void mz_row_add_masked(const float *x, const float *y,
                                 const float *mask, float *s, int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    s[i] = x[i] + y[i] * mask[i];
}

MZ_CLONES void mz_row_mask(const float *x, const float *mask, float *y,
                           int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    y[i] = x[i] * mask[i];
}

MZ_CLONES void mz_row_scale(float *x, float factor, int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    x[i] *= factor;
}
