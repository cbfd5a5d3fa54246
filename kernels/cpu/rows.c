/* SPDX-License-Identifier: Apache-2.0 */
/* The loops are static, for clang 14 does not export a cloned function. */
#include "kernels/cpu/rows.h"

#include "base/alloc.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/simd.h"

/* Partial sums of a dot product: a fixed number of them, so that the bits do
 * not depend on the width of the machine's vectors. */
enum { LANES = 16 };

/* Columns of a row at a time: a multiple of LANES. */
enum { COLUMNS = 256 };

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

MZ_CLONES
static void add_products(float *restrict lane, const float *restrict a,
                         const float *restrict b, int64_t n)
{
  int64_t c = 0;

  for (; c + LANES <= n; c += LANES)
    for (int i = 0; i < LANES; i++)
      lane[i] += a[c + i] * b[c + i];
  for (; c < n; c++)
    lane[c % LANES] += a[c] * b[c];
}

float mz_row_dot(mz_dtype_t dtype, const void *a, int64_t at_a, const void *b,
                 int64_t at_b, int64_t n)
{
  float lane[LANES] = {0}, tile_a[COLUMNS], tile_b[COLUMNS], sum = 0.0f;

  for (int64_t c = 0; c < n; c += COLUMNS) {
    int64_t part = mz_min_i64(COLUMNS, n - c);

    add_products(lane, mz_cpu_read(dtype, a, at_a + c, part, tile_a),
                 mz_cpu_read(dtype, b, at_b + c, part, tile_b), part);
  }
  for (int i = 0; i < LANES; i++)
    sum += lane[i];
  return sum;
}

MZ_CLONES static void scaled(const float *x, float factor, float *y, int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    y[i] = factor * x[i];
}

void mz_row_scaled(mz_dtype_t dtype, void *dst, int64_t to, const void *src,
                   int64_t from, float factor, int64_t n)
{
  float in[COLUMNS], out[COLUMNS];

  for (int64_t c = 0; c < n; c += COLUMNS) {
    int64_t part = mz_min_i64(COLUMNS, n - c);

    scaled(mz_cpu_read(dtype, src, from + c, part, in), factor, out, part);
    mz_cpu_narrow(dtype, dst, to + c, out, part);
  }
}
