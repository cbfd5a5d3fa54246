/* SPDX-License-Identifier: Apache-2.0 */
/* Linear maps and the activations between them. Letters: kernels/linear.h. */
#include "kernels/cpu/linear.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/simd.h"

#include <cblas.h>
#include <string.h>

/* Rows (forward, dgrad) or outputs (wgrad) of one task when several groups
 * share the threads, and columns of one task of a column sum. */
enum {
  TASK_ROWS = 256,
  PIECE_ROWS = 32,
  TASK_COLUMNS = 64,
  TASK_ELEMENTS = 4096
};

/* gelu_tanh(u) = u * sigmoid(2 z), z = sqrt(2 / pi) (u + 0.044715 u^3)
 * (Hendrycks and Gimpel 2016, arXiv:1606.08415, sec. 2), because
 * 1 + tanh(z) = 2 sigmoid(2 z). */
static const float gelu_linear = 1.59576912f;  /* 2 sqrt(2 / pi) */
static const float gelu_cubic = 0.0713548163f; /* 0.044715 of it */

MZ_CLONES static void gelu_row(const float *restrict u, float *restrict y,
                               int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    y[i] =
        u[i] * mz_simd_sigmoid(u[i] * (gelu_linear + gelu_cubic * u[i] * u[i]));
}

/* d *= gelu_tanh'(u) */
MZ_CLONES static void dgelu_row(const float *restrict u, float *restrict d,
                                int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float square = gelu_cubic * u[i] * u[i];
    float s = mz_simd_sigmoid(u[i] * (gelu_linear + square));
    float slope = gelu_linear + 3.0f * square;
    d[i] *= s + u[i] * s * (1.0f - s) * slope;
  }
}

MZ_CLONES static void swiglu_row(const float *gate, const float *up, float *a,
                                 int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    a[i] = gate[i] * mz_simd_sigmoid(gate[i]) * up[i];
}

MZ_CLONES static void dswiglu_row(const float *gate, const float *up,
                                  const float *da, float *dgate, float *dup,
                                  float *a, int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float g = gate[i], u = up[i], d = da[i], s = mz_simd_sigmoid(g);
    dgate[i] = d * u * s * (1.0f + g * (1.0f - s));
    dup[i] = d * g * s;
    a[i] = g * s * u;
  }
}

/* Row-major C = op(A) op(B) + beta C; extents were checked to fit into int. */
static void product(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int64_t m,
                    int64_t n, int64_t k, const float *a, int64_t lda,
                    const float *b, int64_t ldb, int beta, float *c,
                    int64_t ldc)
{
  cblas_sgemm(CblasRowMajor, ta, tb, (int)m, (int)n, (int)k, 1.0f, a, (int)lda,
              b, (int)ldb, (float)beta, c, (int)ldc);
}

mz_status_t mz_cpu_linear_check(int32_t num_groups, const int32_t *offsets,
                                int64_t max_rows, int64_t n, int64_t k)
{
  int narrow;

  MZ_REQUIRE(num_groups >= 1 && n >= 1 && k >= 1, MZ_ERR_ARG,
             "%" PRId32 " groups of [%" PRId64 ", %" PRId64 "]", num_groups, n,
             k);
  MZ_TRY(mz_int_from_i64(n, &narrow));
  MZ_TRY(mz_int_from_i64(k, &narrow));
  MZ_REQUIRE(offsets[0] == 0, MZ_ERR_ARG, "first offset is %" PRId32,
             offsets[0]);
  for (int32_t g = 0; g < num_groups; g++)
    MZ_REQUIRE(offsets[g] <= offsets[g + 1], MZ_ERR_ARG,
               "group %" PRId32 " has rows %" PRId32 " to %" PRId32, g,
               offsets[g], offsets[g + 1]);
  MZ_REQUIRE(offsets[num_groups] <= max_rows, MZ_ERR_ARG,
             "%" PRId32 " rows, bound %" PRId64, offsets[num_groups], max_rows);
  return MZ_OK;
}

/* One step of a product on the rows [first, first + count) of a group. */
typedef void (*rows_fn)(const void *a, int32_t group, int64_t first,
                        int64_t count);

/* All rows of the only group, a few at a time. */
static void walk_pieces(int64_t rows, const void *a, rows_fn step)
{
  if (!step) return;
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r += PIECE_ROWS)
    step(a, 0, r, mz_min_i64(PIECE_ROWS, rows - r));
}

/* Walks the rows. Whole, a single group: the product with all threads inside,
 * which is the fastest for many rows. Otherwise threads take blocks of rows,
 * for a product of few rows does not scale, and `after` finds its block in
 * cache. before and after may be NULL. */
static void walk_rows(bool whole, int32_t num_groups, const int32_t *offsets,
                      const void *a, rows_fn before, rows_fn multiply,
                      rows_fn after)
{
  int64_t num_tasks = 0;

  if (whole) {
    int64_t rows = offsets[1];

    if (rows == 0) return;
    walk_pieces(rows, a, before);
    multiply(a, 0, 0, rows);
    walk_pieces(rows, a, after);
    return;
  }
  for (int32_t g = 0; g < num_groups; g++)
    num_tasks += mz_div_up(offsets[g + 1] - offsets[g], TASK_ROWS);
#pragma omp parallel for schedule(dynamic)
  for (int64_t task = 0; task < num_tasks; task++) {
    int64_t block = task, first, count;
    int32_t g = 0;

    for (;; g++) {
      int64_t blocks = mz_div_up(offsets[g + 1] - offsets[g], TASK_ROWS);
      if (block < blocks) break;
      block -= blocks;
    }
    first = offsets[g] + block * TASK_ROWS;
    count = mz_min_i64(TASK_ROWS, offsets[g + 1] - first);
    if (before) before(a, g, first, count);
    multiply(a, g, first, count);
    if (after) after(a, g, first, count);
  }
}

/* The product's output: where u = x W^T + b goes. */
static float *linear_target(const mz_linear_t *a)
{
  return a->epilogue == MZ_EPI_GELU ? a->pre : a->y;
}

/* The bias is laid down first and the product added to it: the product has to
 * write its output once before it adds anyway. */
static void linear_before(const void *args, int32_t g, int64_t first,
                          int64_t count)
{
  const mz_linear_t *a = args;
  float *out = linear_target(a) + first * a->n;

  for (int64_t r = 0; r < count; r++)
    memcpy(out + r * a->n, a->b[g], (size_t)a->n * sizeof *out);
}

static void linear_multiply(const void *args, int32_t g, int64_t first,
                            int64_t count)
{
  const mz_linear_t *a = args;
  const float *x = a->x;

  product(CblasNoTrans, CblasTrans, count, a->n, a->k, x + first * a->k, a->k,
          a->w[g], a->k, a->b != NULL, linear_target(a) + first * a->n, a->n);
}

static void linear_after(const void *args, int32_t g, int64_t first,
                         int64_t count)
{
  const mz_linear_t *a = args;

  gelu_row((const float *)a->pre + first * a->n, (float *)a->y + first * a->n,
           count * a->n);
}

mz_status_t mz_k_linear_cpu(const mz_kernels_t *kernels, const mz_linear_t *a,
                            mz_stream_t stream)
{
  MZ_TRY(
      mz_cpu_linear_check(a->num_groups, a->offsets, a->max_rows, a->n, a->k));
  MZ_REQUIRE(a->epilogue != MZ_EPI_DGELU, MZ_ERR_ARG,
             "DGELU is an epilogue of linear_dgrad");
  walk_rows(a->num_groups == 1 && !a->experts, a->num_groups, a->offsets, a,
            a->b ? linear_before : NULL, linear_multiply,
            a->epilogue == MZ_EPI_GELU ? linear_after : NULL);
  return MZ_OK;
}

static void dgrad_multiply(const void *args, int32_t g, int64_t first,
                           int64_t count)
{
  const mz_linear_dgrad_t *a = args;
  const float *dy = a->dy;
  float *dx = a->dx;

  product(CblasNoTrans, CblasNoTrans, count, a->k, a->n, dy + first * a->n,
          a->n, a->w[g], a->k, a->add != 0, dx + first * a->k, a->k);
}

static void dgrad_after(const void *args, int32_t g, int64_t first,
                        int64_t count)
{
  const mz_linear_dgrad_t *a = args;

  dgelu_row((const float *)a->pre + first * a->k, (float *)a->dx + first * a->k,
            count * a->k);
}

mz_status_t mz_k_linear_dgrad_cpu(const mz_kernels_t *kernels,
                                  const mz_linear_dgrad_t *a,
                                  mz_stream_t stream)
{
  MZ_TRY(
      mz_cpu_linear_check(a->num_groups, a->offsets, a->max_rows, a->n, a->k));
  MZ_REQUIRE(a->epilogue != MZ_EPI_GELU, MZ_ERR_ARG,
             "GELU is an epilogue of linear");
  MZ_REQUIRE(!a->add || a->epilogue == MZ_EPI_NONE, MZ_ERR_ARG,
             "dgrad cannot add behind an epilogue");
  walk_rows(a->num_groups == 1 && !a->experts, a->num_groups, a->offsets, a,
            NULL, dgrad_multiply,
            a->epilogue == MZ_EPI_DGELU ? dgrad_after : NULL);
  return MZ_OK;
}

/* dW rows [n0, n0 + count) of a group. */
static void wgrad_weight(const mz_linear_wgrad_t *a, int32_t g, int64_t n0,
                         int64_t count)
{
  int64_t first = a->offsets[g], rows = a->offsets[g + 1] - first;
  const float *x = a->x, *dy = a->dy;
  float *dw = (float *)a->dw[g] + n0 * a->k;

  if (rows == 0) {
    if (!a->accumulate[g]) memset(dw, 0, (size_t)(count * a->k) * sizeof *dw);
    return;
  }
  product(CblasTrans, CblasNoTrans, count, a->k, rows, dy + first * a->n + n0,
          a->n, x + first * a->k, a->k, a->accumulate[g] != 0, dw, a->k);
}

/* db columns [n0, n0 + count), count <= TASK_COLUMNS, in blocks of rows so
 * that the rounding errors of many rows do not pile up in one sum. */
static void wgrad_bias(const mz_linear_wgrad_t *a, int32_t g, int64_t n0,
                       int64_t count)
{
  const float *dy = (const float *)a->dy + n0;
  float *db = (float *)a->db[g] + n0;
  float part[TASK_COLUMNS];
  int64_t end = a->offsets[g + 1];

  if (!a->accumulate_bias[g]) memset(db, 0, (size_t)count * sizeof *db);
  for (int64_t r0 = a->offsets[g]; r0 < end; r0 += TASK_ROWS) {
    memset(part, 0, sizeof part);
    for (int64_t r = r0; r < mz_min_i64(r0 + TASK_ROWS, end); r++)
      mz_row_add(part, dy + r * a->n, part, count);
    mz_row_add(db, part, db, count);
  }
}

mz_status_t mz_k_linear_wgrad_cpu(const mz_kernels_t *kernels,
                                  const mz_linear_wgrad_t *a,
                                  mz_stream_t stream)
{
  int64_t blocks = mz_div_up(a->n, TASK_ROWS);
  int64_t stripes = mz_div_up(a->n, TASK_COLUMNS);

  MZ_TRY(
      mz_cpu_linear_check(a->num_groups, a->offsets, a->max_rows, a->n, a->k));
  if (a->num_groups == 1 && !a->experts) {
    wgrad_weight(a, 0, 0, a->n);
  } else {
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = 0; task < a->num_groups * blocks; task++) {
      int64_t n0 = task % blocks * TASK_ROWS;
      wgrad_weight(a, (int32_t)(task / blocks), n0,
                   mz_min_i64(TASK_ROWS, a->n - n0));
    }
  }
  if (!a->db) return MZ_OK;
#pragma omp parallel for schedule(static)
  for (int64_t task = 0; task < a->num_groups * stripes; task++) {
    int64_t n0 = task % stripes * TASK_COLUMNS;
    wgrad_bias(a, (int32_t)(task / stripes), n0,
               mz_min_i64(TASK_COLUMNS, a->n - n0));
  }
  return MZ_OK;
}

mz_status_t mz_cpu_rows_check(const int32_t *rows, int64_t max_rows,
                              int64_t width, int64_t *elements_out)
{
  MZ_REQUIRE(rows[0] >= 0 && rows[0] <= max_rows, MZ_ERR_ARG,
             "%" PRId32 " rows, bound %" PRId64, rows[0], max_rows);
  return MZ_TRACE(mz_mul_i64(rows[0], width, elements_out));
}

mz_status_t mz_k_gelu_cpu(const mz_kernels_t *kernels, const mz_gelu_t *a,
                          mz_stream_t stream)
{
  const float *pre = a->pre;
  float *out = a->a;
  int64_t n = 0;

  MZ_TRY(mz_cpu_rows_check(a->rows, a->max_rows, a->width, &n));
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; i += TASK_ELEMENTS)
    gelu_row(pre + i, out + i, mz_min_i64(TASK_ELEMENTS, n - i));
  return MZ_OK;
}

mz_status_t mz_k_swiglu_cpu(const mz_kernels_t *kernels, const mz_swiglu_t *a,
                            mz_stream_t stream)
{
  const float *gate = a->gate, *up = a->up;
  float *out = a->a;
  int64_t n = 0;

  MZ_TRY(mz_cpu_rows_check(a->rows, a->max_rows, a->width, &n));
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; i += TASK_ELEMENTS)
    swiglu_row(gate + i, up + i, out + i, mz_min_i64(TASK_ELEMENTS, n - i));
  return MZ_OK;
}

mz_status_t mz_k_swiglu_grad_cpu(const mz_kernels_t *kernels,
                                 const mz_swiglu_t *a, mz_stream_t stream)
{
  const float *gate = a->gate, *up = a->up, *da = a->da;
  float *dgate = a->dgate, *dup = a->dup, *again = a->a;
  int64_t n = 0;

  MZ_TRY(mz_cpu_rows_check(a->rows, a->max_rows, a->width, &n));
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; i += TASK_ELEMENTS)
    dswiglu_row(gate + i, up + i, da + i, dgate + i, dup + i, again + i,
                mz_min_i64(TASK_ELEMENTS, n - i));
  return MZ_OK;
}
