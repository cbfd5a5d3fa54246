/* SPDX-License-Identifier: Apache-2.0 */
/* Experts' output mixed with a dense map's on the CPU. Letters and formulas:
 * kernels/mix.h. Rows are fp32 or bf16; sums and products are fp32, on a few
 * columns at a time. */
#include "kernels/cpu/cpu.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/simd.h"

#include <math.h>
#include <string.h>

/* Below this many elements a parallel region costs more than it saves. */
enum { MIN_PARALLEL = 16384 };

/* Columns of a row at a time. */
enum { COLUMNS = 256 };

static float sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }

/* The logit of c1, less that of c0 under softmax. */
static float logit(mz_dtype_t dtype, const mz_mix_t *a, int64_t t)
{
  int64_t at = t * a->width;
  float first = mz_row_dot(dtype, a->x, at, a->w, 0, a->width);
  float second, b[2] = {0.0f, 0.0f};

  if (a->kind == MZ_MIX_SIGMOID) return first;
  second = mz_row_dot(dtype, a->x, at, a->w, a->width, a->width);
  if (a->b) mz_cpu_widen(dtype, b, a->b, 0, 2);
  return second - first + (b[1] - b[0]);
}

/* y may be a or b. */
MZ_CLONES
static void mix_columns(float *y, const float *a, float c0, const float *b,
                        float c1, int64_t n)
{
#pragma omp simd
  for (int64_t c = 0; c < n; c++)
    y[c] = c0 * a[c] + c1 * b[c];
}

/* dst = c0 a + c1 b; dst may be a. */
static void mix_row(mz_dtype_t dtype, void *dst, const void *a, float c0,
                    const void *b, float c1, int64_t at, int64_t width)
{
  float sum[COLUMNS], tile_a[COLUMNS], tile_b[COLUMNS];

  for (int64_t c = 0; c < width; c += COLUMNS) {
    int64_t n = mz_min_i64(COLUMNS, width - c);

    mix_columns(sum, mz_cpu_read(dtype, a, at + c, n, tile_a), c0,
                mz_cpu_read(dtype, b, at + c, n, tile_b), c1, n);
    mz_cpu_narrow(dtype, dst, at + c, sum, n);
  }
}

static mz_status_t mix(mz_dtype_t dtype, const mz_mix_t *a)
{
  int64_t size = a->num_tokens * a->width;

#pragma omp parallel for schedule(static) if (size >= MIN_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++) {
    float c[2] = {1.0f, 1.0f};

    if (a->kind != MZ_MIX_SUM) {
      float z = logit(dtype, a, t);

      c[1] = sigmoid(z);
      if (a->kind == MZ_MIX_SOFTMAX) c[0] = sigmoid(-z);
      memcpy(a->coef + 2 * t, c, sizeof c);
    }
    mix_row(dtype, a->y, a->moe, c[0], a->side, c[1], t * a->width, a->width);
  }
  return MZ_OK;
}

static void token_grad(mz_dtype_t dtype, const mz_mix_grad_t *a, int64_t t)
{
  const mz_mix_t *f = &a->forward;
  bool softmax = f->kind == MZ_MIX_SOFTMAX;
  float c1 = f->coef[2 * t + 1], c0 = softmax ? f->coef[2 * t] : 1.0f - c1;
  int64_t at = t * f->width;
  float dot = mz_row_dot(dtype, a->dy, at, f->side, at, f->width);

  if (softmax) {
    dot -= mz_row_dot(dtype, a->dy, at, f->moe, at, f->width);
    mz_row_scaled(dtype, a->d_moe, at, a->dy, at, c0, f->width);
  }
  mz_row_scaled(dtype, a->d_side, at, a->dy, at, c1, f->width);
  a->d[t] = c1 * c0 * dot;
}

/* sum = sum of d x over the tokens, in their order. */
static void sum_columns(mz_dtype_t dtype, const mz_mix_grad_t *a, int64_t first,
                        int64_t n, float *sum)
{
  const mz_mix_t *f = &a->forward;
  float tile[COLUMNS];

  memset(sum, 0, (size_t)n * sizeof *sum);
  for (int64_t t = 0; t < f->num_tokens; t++) {
    int64_t at = t * f->width + first;

    mix_columns(sum, sum, 1.0f, mz_cpu_read(dtype, f->x, at, n, tile), a->d[t],
                n);
  }
}

static void put(float *dst, float value, int accumulate)
{
  *dst = accumulate ? *dst + value : value;
}

static void weight_grad(mz_dtype_t dtype, const mz_mix_grad_t *a)
{
  int64_t width = a->forward.width, size = a->forward.num_tokens * width;
  bool softmax = a->forward.kind == MZ_MIX_SOFTMAX;
  float *row = a->dw + (softmax ? width : 0);

#pragma omp parallel for schedule(static) if (size >= MIN_PARALLEL)
  for (int64_t c = 0; c < width; c += COLUMNS) {
    int64_t n = mz_min_i64(COLUMNS, width - c);
    float sum[COLUMNS];

    sum_columns(dtype, a, c, n, sum);
    for (int64_t i = 0; i < n; i++) {
      put(row + c + i, sum[i], a->accumulate_w);
      if (softmax) put(a->dw + c + i, -sum[i], a->accumulate_w);
    }
  }
}

static mz_status_t mix_grad(mz_dtype_t dtype, const mz_mix_grad_t *a)
{
  const mz_mix_t *f = &a->forward;
  int64_t size = f->num_tokens * f->width;
  float sum = 0.0f;

  MZ_REQUIRE(f->kind != MZ_MIX_SUM, MZ_ERR_ARG,
             "a plain sum has no gradient of its own");
#pragma omp parallel for schedule(static) if (size >= MIN_PARALLEL)
  for (int64_t t = 0; t < f->num_tokens; t++)
    token_grad(dtype, a, t);
  weight_grad(dtype, a);
  if (!a->db) return MZ_OK;
  for (int64_t t = 0; t < f->num_tokens; t++)
    sum += a->d[t];
  put(a->db, -sum, a->accumulate_b);
  put(a->db + 1, sum, a->accumulate_b);
  return MZ_OK;
}

/* d (W of c1 - W of c0) on columns. */
static void add_logit(mz_dtype_t dtype, const mz_mix_dgrad_t *a, float d,
                      int64_t first, int64_t n, float *sum)
{
  float tile[COLUMNS];

  if (a->kind == MZ_MIX_SOFTMAX) {
    mix_columns(sum, sum, 1.0f, mz_cpu_read(dtype, a->w, first, n, tile), -d,
                n);
    first += a->width;
  }
  mix_columns(sum, sum, 1.0f, mz_cpu_read(dtype, a->w, first, n, tile), d, n);
}

static void token_dgrad(mz_dtype_t dtype, const mz_mix_dgrad_t *a, int64_t t)
{
  float sum[COLUMNS], tile[2][COLUMNS];

  for (int64_t c = 0; c < a->width; c += COLUMNS) {
    int64_t n = mz_min_i64(COLUMNS, a->width - c), at = t * a->width + c;

    mix_columns(sum, mz_cpu_read(dtype, a->dx, at, n, tile[0]), 1.0f,
                mz_cpu_read(dtype, a->d_side, at, n, tile[1]), 1.0f, n);
    if (a->kind != MZ_MIX_SUM) add_logit(dtype, a, a->d[t], c, n, sum);
    mz_cpu_narrow(dtype, a->dx, at, sum, n);
  }
}

static mz_status_t mix_dgrad(mz_dtype_t dtype, const mz_mix_dgrad_t *a)
{
  int64_t size = a->num_tokens * a->width;

#pragma omp parallel for schedule(static) if (size >= MIN_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++)
    token_dgrad(dtype, a, t);
  return MZ_OK;
}

MZ_CPU_BOTH_TABLES(mix, mz_mix_t)
MZ_CPU_BOTH_TABLES(mix_grad, mz_mix_grad_t)
MZ_CPU_BOTH_TABLES(mix_dgrad, mz_mix_dgrad_t)
