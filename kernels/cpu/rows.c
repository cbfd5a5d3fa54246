/* SPDX-License-Identifier: Apache-2.0 */
/* The loops are static, for clang 14 does not export a cloned function. */
#include "kernels/cpu/rows.h"

#include "kernels/cpu/simd.h"

MZ_CLONES static void add(const float *x, const float *y, float *s, int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    s[i] = x[i] + y[i];
}

MZ_CLONES static void add_masked(const float *x, const float *y,
                                 const float *mask, float *s, int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    s[i] = x[i] + y[i] * mask[i];
}

MZ_CLONES static void multiply(const float *x, const float *mask, float *y,
                               int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    y[i] = x[i] * mask[i];
}

MZ_CLONES static void scale(float *x, float factor, int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    x[i] *= factor;
}

void mz_row_add(const float *x, const float *y, float *s, int64_t n)
{
  add(x, y, s, n);
}

void mz_row_add_masked(const float *x, const float *y, const float *mask,
                       float *s, int64_t n)
{
  add_masked(x, y, mask, s, n);
}

void mz_row_mask(const float *x, const float *mask, float *y, int64_t n)
{
  multiply(x, mask, y, n);
}

void mz_row_scale(float *x, float factor, int64_t n) { scale(x, factor, n); }
