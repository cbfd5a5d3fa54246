/* SPDX-License-Identifier: Apache-2.0 */
/* Rows between token order, send order and expert order on the CPU. T tokens,
 * K choices, H width. Contracts: kernels/gate.h. Rows are fp32 or bf16; sums
 * and products are fp32, on a few columns at a time. */
#include "kernels/cpu/cpu.h"

#include "base/alloc.h"
#include "kernels/cpu/clones.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/rows.h"

#include <string.h>

/* Below this many elements a parallel region costs more than it saves. */
enum { MIN_PARALLEL = 16384 };

/* Columns of a row at a time. */
enum { COLUMNS = 256 };

MZ_CLONES
static void add_scaled_row(float *restrict dst, const float *restrict src,
                           float factor, int64_t n)
{
  for (int64_t c = 0; c < n; c++)
    dst[c] += factor * src[c];
}

MZ_CLONES
static void add_row(float *restrict dst, const float *restrict src, int64_t n)
{
  for (int64_t c = 0; c < n; c++)
    dst[c] += src[c];
}

static void copy_rows(mz_dtype_t dtype, void *dst, int64_t to, const void *src,
                      int64_t from, int64_t rows, int64_t width)
{
  int64_t row_bytes = width * (int64_t)mz_dtype_bytes(dtype);

  memcpy((char *)dst + to * row_bytes, (const char *)src + from * row_bytes,
         (size_t)(rows * row_bytes));
}

static mz_status_t permute(mz_dtype_t dtype, const mz_permute_t *a)
{
  int64_t routes = a->num_tokens * a->k;

#pragma omp parallel for schedule(static) if (routes * a->width >= MIN_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++)
    for (int64_t r = t * a->k; r < (t + 1) * a->k; r++)
      if (a->row[r] >= 0)
        copy_rows(dtype, a->send, a->row[r], a->x, t, 1, a->width);
  return MZ_OK;
}

/* y = sum of weight * the row of each kept route; without weights, of 1. */
static void sum_routes(mz_dtype_t dtype, int32_t k, const int32_t *row,
                       const float *weight, const void *rows, int64_t width,
                       void *y, int64_t at)
{
  float sum[COLUMNS], tile[COLUMNS];

  for (int64_t c = 0; c < width; c += COLUMNS) {
    int64_t n = mz_min_i64(COLUMNS, width - c);

    memset(sum, 0, sizeof sum);
    for (int32_t j = 0; j < k; j++) {
      const float *x;

      if (row[j] < 0) continue;
      x = mz_cpu_read(dtype, rows, row[j] * width + c, n, tile);
      if (weight)
        add_scaled_row(sum, x, weight[j], n);
      else
        add_row(sum, x, n);
    }
    mz_cpu_narrow(dtype, y, at + c, sum, n);
  }
}

static mz_status_t permute_grad(mz_dtype_t dtype, const mz_permute_grad_t *a)
{
  int64_t routes = a->num_tokens * a->k;

#pragma omp parallel for schedule(static) if (routes * a->width >= MIN_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++)
    sum_routes(dtype, a->k, a->row + t * a->k, NULL, a->d_row, a->width, a->dx,
               t * a->width);
  return MZ_OK;
}

static mz_status_t combine(mz_dtype_t dtype, const mz_combine_t *a)
{
  int64_t routes = a->num_tokens * a->k;

#pragma omp parallel for schedule(static) if (routes * a->width >= MIN_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++)
    sum_routes(dtype, a->k, a->row + t * a->k, a->weight + t * a->k, a->back,
               a->width, a->y, t * a->width);
  return MZ_OK;
}

static mz_status_t combine_grad(mz_dtype_t dtype, const mz_combine_grad_t *a)
{
  const mz_combine_t *f = &a->forward;
  int64_t routes = f->num_tokens * f->k;

#pragma omp parallel for schedule(static) if (routes * f->width >= MIN_PARALLEL)
  for (int64_t r = 0; r < routes; r++) {
    int64_t from = r / f->k * f->width, at = f->row[r] * f->width;

    if (f->row[r] < 0) {
      a->d_weight[r] = 0.0f;
      continue;
    }
    /* The product first: d_send may lie where back lies. */
    a->d_weight[r] = mz_row_dot(dtype, a->dy, from, f->back, at, f->width);
    mz_row_scaled(dtype, a->d_send, at, a->dy, from, f->weight[r], f->width);
  }
  return MZ_OK;
}

/* Rows of one expert: from each source rank in turn. Source-major rows of
 * (source, expert) start after all counts before it in row-major order. */
static void regroup_expert(mz_dtype_t dtype, const mz_regroup_t *a,
                           int32_t expert)
{
  int64_t by_expert = a->offsets[expert], by_source = 0;

  for (int32_t e = 0; e < expert; e++)
    by_source += a->counts[e];
  for (int32_t s = 0; s < a->num_sources; s++) {
    const int32_t *count = a->counts + (int64_t)s * a->num_experts + expert;
    int64_t from = a->to_source_major ? by_expert : by_source;
    int64_t to = a->to_source_major ? by_source : by_expert;

    if (*count > 0)
      copy_rows(dtype, a->dst, to, a->src, from, *count, a->width);
    by_expert += *count;
    if (s + 1 == a->num_sources) break;
    for (int32_t e = 0; e < a->num_experts; e++)
      by_source += count[e];
  }
}

static mz_status_t regroup(mz_dtype_t dtype, const mz_regroup_t *a)
{
  int64_t size = a->offsets[a->num_experts] * a->width;

#pragma omp parallel for schedule(dynamic, 1) if (size >= MIN_PARALLEL)
  for (int32_t e = 0; e < a->num_experts; e++)
    regroup_expert(dtype, a, e);
  return MZ_OK;
}

static mz_status_t scale_rows(mz_dtype_t dtype, const mz_scale_rows_t *a)
{
  for (int32_t e = 0; e < a->num_experts; e++) {
    float factor = (float)(a->first_expert + e + 1);
    int64_t begin = a->offsets[e] * a->width;
    int64_t size = a->offsets[e + 1] * a->width - begin;

    mz_row_scaled(dtype, a->y, begin, a->x, begin, factor, size);
  }
  return MZ_OK;
}

MZ_CPU_BOTH_TABLES(permute, mz_permute_t)
MZ_CPU_BOTH_TABLES(permute_grad, mz_permute_grad_t)
MZ_CPU_BOTH_TABLES(combine, mz_combine_t)
MZ_CPU_BOTH_TABLES(combine_grad, mz_combine_grad_t)
MZ_CPU_BOTH_TABLES(regroup, mz_regroup_t)
MZ_CPU_BOTH_TABLES(scale_rows, mz_scale_rows_t)
