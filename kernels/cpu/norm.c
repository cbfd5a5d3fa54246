/* SPDX-License-Identifier: Apache-2.0 */
/* Residual add and normalisation. Letters: kernels/norm.h. RMSNorm is the same
 * code with a mean of 0. */
#include "kernels/cpu/cpu.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/dropout.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/simd.h"

#include <string.h>

enum { PARTIALS = 32 }; /* blocks of rows: fixed, whatever the threads */

MZ_CLONES static float sum_row(const float *restrict s, int64_t n)
{
  float sum = 0;

#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++)
    sum += s[i];
  return sum;
}

/* sum of (s - mean)^2 */
MZ_CLONES static float square_row(const float *restrict s, float mean,
                                  int64_t n)
{
  float sum = 0;

#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++)
    sum += (s[i] - mean) * (s[i] - mean);
  return sum;
}

MZ_CLONES static void normalise_row(const float *restrict s, float mean,
                                    float rstd, const float *restrict w,
                                    const float *restrict b, float *restrict h,
                                    int64_t n)
{
  if (b) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
      h[i] = (s[i] - mean) * rstd * w[i] + b[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
      h[i] = (s[i] - mean) * rstd * w[i];
  }
}

/* s = x + dropout(y) of one row. */
static void add_dropped(const mz_dropout_t *dropout, int64_t row,
                        const float *x, const float *y, float *s, int64_t width)
{
  uint64_t first = mz_dropout_first(dropout, row, width);
  float mask[MZ_MASK_COLUMNS];

  for (int64_t c = 0; c < width; c += MZ_MASK_COLUMNS) {
    int64_t n = mz_min_i64(MZ_MASK_COLUMNS, width - c);

    mz_dropout_mask(dropout, first + (uint64_t)c, n, mask);
    mz_row_add_masked(x + c, y + c, mask, s + c, n);
  }
}

static void forward_row(const mz_add_norm_t *a, int64_t row)
{
  int64_t n = a->width, at = row * n;
  const float *x = (const float *)a->x + at;
  const float *s = a->sum ? (float *)a->sum + at : x;
  float mean = 0;
  double variance;

  if (a->y && a->dropout.p > 0)
    add_dropped(&a->dropout, row, x, (const float *)a->y + at,
                (float *)a->sum + at, n);
  else if (a->y)
    mz_row_add(x, (const float *)a->y + at, (float *)a->sum + at, n);
  else if (s != x)
    memcpy((float *)a->sum + at, x, (size_t)n * sizeof *x);
  if (!a->h) return;

  if (a->kind == MZ_NORM_LAYER) {
    mean = sum_row(s, n) / (float)n;
    a->mean[row] = mean;
  }
  variance = (double)square_row(s, mean, n) / (double)n;
  a->rstd[row] = (float)(1.0 / sqrt(variance + a->eps));
  normalise_row(s, mean, a->rstd[row], a->w, a->b, (float *)a->h + at, n);
}

mz_status_t mz_k_add_norm_cpu(const mz_kernels_t *kernels,
                              const mz_add_norm_t *a, mz_stream_t stream)
{
  MZ_TRY(mz_dropout_check(&a->dropout));
  MZ_REQUIRE(!a->y || a->sum, MZ_ERR_ARG, "a residual add without a sum");
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < a->rows; row++)
    forward_row(a, row);
  return MZ_OK;
}

typedef struct moments {
  float plain, centred; /* means of dh w and of dh w xhat */
} moments_t;

/* Adds the row's part of dw and db. */
MZ_CLONES static moments_t reduce_row(const float *restrict s,
                                      const float *restrict dh,
                                      const float *restrict w, float mean,
                                      float rstd, float *restrict dw,
                                      float *restrict db, int64_t n)
{
  float plain = 0, centred = 0;
  moments_t m;

#pragma omp simd reduction(+ : plain, centred)
  for (int64_t i = 0; i < n; i++) {
    float xhat = (s[i] - mean) * rstd, g = dh[i] * w[i];

    plain += g;
    centred += g * xhat;
    dw[i] += dh[i] * xhat;
    db[i] += dh[i];
  }
  m.plain = plain / (float)n;
  m.centred = centred / (float)n;
  return m;
}

/* d (+)= rstd (dh w - plain - xhat centred): the derivative of
 * (s - mean) rstd w. */
MZ_CLONES static void input_row(const float *restrict s,
                                const float *restrict dh,
                                const float *restrict w, float mean, float rstd,
                                moments_t m, int add, float *restrict d,
                                int64_t n)
{
  if (add) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
      d[i] +=
          rstd * (dh[i] * w[i] - m.plain - (s[i] - mean) * rstd * m.centred);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
      d[i] = rstd * (dh[i] * w[i] - m.plain - (s[i] - mean) * rstd * m.centred);
  }
}

/* The rows of one partial sum: a fixed share of all, whatever the threads. */
static void backward_block(const mz_add_norm_grad_t *a, int64_t block)
{
  int64_t n = a->width;
  int64_t end = (block + 1) * a->rows / PARTIALS;
  float *dw = a->partial + block * 2 * n, *db = dw + n;

  memset(dw, 0, (size_t)(2 * n) * sizeof *dw);
  for (int64_t row = block * a->rows / PARTIALS; row < end; row++) {
    const float *s = (const float *)a->sum + row * n;
    const float *dh = (const float *)a->dh + row * n;
    float mean = a->kind == MZ_NORM_LAYER ? a->mean[row] : 0;
    float *d = (float *)a->d_sum + row * n;
    moments_t m = reduce_row(s, dh, a->w, mean, a->rstd[row], dw, db, n);

    if (a->kind == MZ_NORM_RMS) m.plain = 0;
    input_row(s, dh, a->w, mean, a->rstd[row], m, a->add, d, n);
    if (a->dropout.p > 0)
      mz_dropout_row(&a->dropout, row, n, d, (float *)a->dy + row * n);
  }
}

/* out (+)= the partial sums in order of the blocks. */
static void add_partials(const float *partial, int64_t width, int accumulate,
                         float *out)
{
  if (!accumulate) memset(out, 0, (size_t)width * sizeof *out);
  for (int block = 0; block < PARTIALS; block++)
    mz_row_add(out, partial + block * 2 * width, out, width);
}

mz_status_t mz_k_add_norm_grad_cpu(const mz_kernels_t *kernels,
                                   const mz_add_norm_grad_t *a,
                                   mz_stream_t stream)
{
  MZ_TRY(mz_dropout_check(&a->dropout));
#pragma omp parallel for schedule(dynamic)
  for (int64_t block = 0; block < PARTIALS; block++)
    backward_block(a, block);
  add_partials(a->partial, a->width, a->accumulate_w, a->dw);
  if (a->db)
    add_partials(a->partial + a->width, a->width, a->accumulate_b, a->db);
  return MZ_OK;
}
