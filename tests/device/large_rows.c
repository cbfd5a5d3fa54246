/* SPDX-License-Identifier: Apache-2.0 */
/* Rows and tables whose elements are more than 2^31. */
#include "large.h"

#include "base/alloc.h"

#include <stdio.h>

/* --- rows --- */

/* Inputs [rows, LARGE_WIDTH], output [rows, LARGE_WIDTH] bf16, and what some
 * need. */
typedef struct rows {
  large_t *l;
  int64_t n; /* rows of this call */
  const char *a, *b;
  char *out;
  char *other;      /* [rows, LARGE_WIDTH] or NULL: a second output */
  float *numbers;   /* [2 T] statistics */
  int32_t *ids;     /* [T] 0, 1, 2 ... */
  float *halves;    /* [T] 0.5 */
  int32_t *offsets; /* [2] 0, n: backend memory */
  int32_t host_offsets[2];
} rows_t;

static mz_status_t run_norm(rows_t *r)
{
  mz_kernels_t *k = r->l->kernels;
  mz_add_norm_t a = {.kind = MZ_NORM_LAYER,
                     .rows = r->n,
                     .width = LARGE_WIDTH,
                     .eps = 1e-5,
                     .x = r->a,
                     .y = r->b,
                     .sum = r->other,
                     .h = r->out,
                     .w = r->l->pattern[0],
                     .b = r->l->pattern[0] + 2 * LARGE_WIDTH,
                     .mean = r->numbers,
                     .rstd = r->numbers + LARGE_ROWS};

  return MZ_TRACE(k->ops->add_norm(k, &a, r->l->device->stream));
}

static mz_status_t run_swiglu(rows_t *r)
{
  mz_kernels_t *k = r->l->kernels;
  mz_swiglu_t a = {.rows = r->offsets + 1,
                   .max_rows = r->n,
                   .width = LARGE_WIDTH,
                   .gate = r->a,
                   .up = r->b,
                   .a = r->out};

  return MZ_TRACE(k->ops->swiglu(k, &a, r->l->device->stream));
}

static mz_status_t run_permute(rows_t *r)
{
  mz_kernels_t *k = r->l->kernels;
  mz_permute_t a = {.num_tokens = r->n,
                    .width = LARGE_WIDTH,
                    .k = 1,
                    .row = r->ids,
                    .x = r->a,
                    .send = r->out};

  return MZ_TRACE(k->ops->permute(k, &a, r->l->device->stream));
}

static mz_status_t run_combine(rows_t *r)
{
  mz_kernels_t *k = r->l->kernels;
  mz_combine_t a = {.num_tokens = r->n,
                    .width = LARGE_WIDTH,
                    .k = 1,
                    .row = r->ids,
                    .weight = r->halves,
                    .back = r->a,
                    .y = r->out};

  return MZ_TRACE(k->ops->combine(k, &a, r->l->device->stream));
}

/* 64 numbers a row to LARGE_WIDTH. */
static mz_status_t run_linear(rows_t *r)
{
  mz_kernels_t *k = r->l->kernels;
  const void *w[] = {r->l->pattern[0]};
  mz_linear_t a = {.num_groups = 1,
                   .offsets = r->offsets,
                   .host_offsets = r->host_offsets,
                   .max_rows = r->n,
                   .n = LARGE_WIDTH,
                   .k = 64,
                   .w = w,
                   .x = r->a,
                   .y = r->out};

  return MZ_TRACE(k->ops->linear(k, &a, r->l->device->stream));
}

static const struct {
  const char *name;
  mz_status_t (*run)(rows_t *r);
  int64_t in_width; /* of a and b */
  bool has_b, has_other;
  double bound; /* 0: equal bits */
} row_ops[] = {
    {"norm", run_norm, LARGE_WIDTH, true, true, 0},
    {"swiglu", run_swiglu, LARGE_WIDTH, true, false, 0},
    {"permute", run_permute, LARGE_WIDTH, false, false, 0},
    {"combine", run_combine, LARGE_WIDTH, false, false, 0},
    /* few rows may take another algorithm: one rounding of 2^-9 */
    {"linear", run_linear, 64, false, false, 1e-2},
};

static void run_rows(rows_t *r, int op, int64_t n)
{
  large_t *l = r->l;

  r->n = n;
  r->host_offsets[0] = 0;
  r->host_offsets[1] = (int32_t)n;
  must(mz_device_upload(l->device, r->offsets, r->host_offsets,
                        sizeof r->host_offsets, l->device->stream));
  must(row_ops[op].run(r));
}

static bool window_agrees(const rows_t *whole, int op, int64_t first, char *out,
                          char *other)
{
  large_t *l = whole->l;
  const int64_t n = (int64_t)LARGE_WINDOW * LARGE_WIDTH,
                at = first * LARGE_WIDTH * 2;
  rows_t r = *whole;

  r.a += first * row_ops[op].in_width * 2;
  if (r.b) r.b += first * row_ops[op].in_width * 2;
  r.out = out;
  if (r.other) r.other = other;
  run_rows(&r, op, LARGE_WINDOW);
  if (row_ops[op].bound > 0)
    return large_apart(l, MZ_BF16, whole->out + at, out, n) <=
           row_ops[op].bound;
  return large_same(l, whole->out + at, out, 2 * n) &&
         (!r.other || large_same(l, whole->other + at, other, 2 * n));
}

static void make_rows(large_t *l, int op, rows_t *r)
{
  int64_t n = LARGE_ROWS * row_ops[op].in_width;
  int32_t *ids = NULL;
  float *halves = NULL;

  *r = (rows_t){.l = l};
  must(mz_new(LARGE_ROWS, "ids", &ids));
  must(mz_new(LARGE_ROWS, "halves", &halves));
  for (int64_t i = 0; i < LARGE_ROWS; i++)
    ids[i] = (int32_t)i, halves[i] = 0.5f;
  r->a = large_pattern(l, MZ_BF16, n, 0);
  if (row_ops[op].has_b) r->b = large_pattern(l, MZ_BF16, n, 77777);
  r->out = large_unwritten(l, LARGE_ROWS * LARGE_WIDTH * 2);
  if (row_ops[op].has_other)
    r->other = large_unwritten(l, LARGE_ROWS * LARGE_WIDTH * 2);
  r->numbers = (float *)large_take(l, 8 * LARGE_ROWS);
  r->ids = (int32_t *)large_take(l, 4 * LARGE_ROWS);
  r->halves = (float *)large_take(l, 4 * LARGE_ROWS);
  r->offsets = (int32_t *)large_take(l, 8);
  large_copy(l, r->ids, ids, 4 * LARGE_ROWS);
  large_copy(l, r->halves, halves, 4 * LARGE_ROWS);
  mz_free(ids);
  mz_free(halves);
}

void large_check_rows(large_t *l)
{
  const int64_t firsts[LARGE_NUM_WINDOWS] = {
      0, (INT64_C(1) << 20) - LARGE_WINDOW / 2, LARGE_ROWS - LARGE_WINDOW};

  for (int op = 0; op < (int)(sizeof row_ops / sizeof *row_ops); op++) {
    rows_t r;
    char *out, *other, what[96];
    bool good = true;

    l->at = 0;
    make_rows(l, op, &r);
    out = large_take(l, (int64_t)LARGE_WINDOW * LARGE_WIDTH * 2);
    other = large_take(l, (int64_t)LARGE_WINDOW * LARGE_WIDTH * 2);
    run_rows(&r, op, LARGE_ROWS);
    for (int i = 0; i < LARGE_NUM_WINDOWS; i++)
      good = window_agrees(&r, op, firsts[i], out, other) && good;
    snprintf(what, sizeof what, "%s of [%lld, %d]", row_ops[op].name,
             (long long)LARGE_ROWS, LARGE_WIDTH);
    large_report(l, good, what);
  }
}

/* --- a vocabulary --- */

/* The last rows of the table, and back into the gradient's last rows. */
void large_check_embedding(large_t *l)
{
  int32_t ids[LARGE_WINDOW], *tokens;
  const int64_t n = (int64_t)LARGE_WINDOW * LARGE_WIDTH,
                first = LARGE_ROWS - LARGE_WINDOW;
  char *wte, *x, *dwte, *wide;
  mz_embedding_t a = {.num_tokens = LARGE_WINDOW,
                      .width = LARGE_WIDTH,
                      .vocab = LARGE_ROWS,
                      .sequence = LARGE_WINDOW};
  mz_embedding_grad_t grad;
  mz_convert_t widen = {.n = n, .src_dtype = MZ_BF16, .dst_dtype = MZ_F32};
  mz_kernels_t *k = l->kernels;

  l->at = 0;
  for (int i = 0; i < LARGE_WINDOW; i++)
    ids[i] = (int32_t)(first + i);
  wte = large_pattern(l, MZ_BF16, LARGE_ROWS * LARGE_WIDTH, 0);
  x = large_unwritten(l, 2 * n);
  dwte = large_unwritten(l, LARGE_ROWS * LARGE_WIDTH * 4);
  wide = large_take(l, 4 * n);
  tokens = (int32_t *)large_take(l, sizeof ids);
  large_copy(l, tokens, ids, sizeof ids);
  a.tokens = tokens;
  a.wte = wte;
  a.x = x;
  must(k->ops->embedding(k, &a, l->device->stream));
  large_report(l, large_same(l, x, wte + first * LARGE_WIDTH * 2, 2 * n),
               "embedding");
  grad = (mz_embedding_grad_t){.forward = a, .dx = x, .dwte = (float *)dwte};
  must(k->ops->embedding_grad(k, &grad, l->device->stream));
  widen.src = x;
  widen.dst = wide;
  must(k->ops->convert(k, &widen, l->device->stream));
  large_report(
      l,
      large_same(l, dwte + first * LARGE_WIDTH * 4, wide, 4 * n) &&
          large_is_zero(l, dwte, 4 * n) &&
          large_is_zero(l, dwte + (first - LARGE_WINDOW) * LARGE_WIDTH * 4,
                        4 * n),
      "embedding's gradient");
}
