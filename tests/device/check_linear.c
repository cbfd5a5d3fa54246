/* SPDX-License-Identifier: Apache-2.0 */
/* Linear maps of "/cuda" against "/cpu": groups with and without rows, odd
 * sizes (weights of a group then begin on any element), tuned and spread. */
#include "check.h"

#include "base/alloc.h"
#include "kernels/cuda/products.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_GROUPS = 130, SPARE_ROWS = 3, RANDOM_SHAPES = 12 };

typedef struct shape {
  int32_t groups;
  int64_t rows, n, k;
} shape_t;

/* One shape's arrays. Rows behind the last group must stay as they are. */
typedef struct maps {
  shape_t shape;
  int64_t max_rows;
  int32_t host_offsets[MAX_GROUPS + 1];
  uint8_t accumulate[MAX_GROUPS], accumulate_bias[MAX_GROUPS];
  dual_t offsets, w, b, x, y, pre, dy, dx, pre_x, dw, db;
} maps_t;

typedef struct pointers {
  void *of[MAX_GROUPS];
} pointers_t;

static void report(sides_t *s, const char *what, bool ok)
{
  printf("%s %s %s\n", ok ? "ok" : "FAILED",
         s->dtype == MZ_BF16 ? "bf16" : "fp32", what);
  if (ok)
    s->passed++;
  else
    s->failed++;
}

/* Where each group's part of an array begins. */
static void split(void *base, mz_dtype_t dtype, int32_t groups,
                  int64_t elements, pointers_t *out)
{
  for (int32_t g = 0; g < groups; g++)
    out->of[g] = (char *)base + g * elements * (int64_t)mz_dtype_bytes(dtype);
}

/* Rows fall on groups at random; a quarter of the groups gets none. */
static void deal_rows(maps_t *m)
{
  int32_t groups = m->shape.groups;
  int64_t left = m->shape.rows;

  for (int32_t g = 0; g < groups; g++) {
    int64_t take = mz_min_i64(left, pick(0, 3 * left / (groups - g)));

    if (pick(0, 3) == 0) take = 0;
    if (g == groups - 1) take = left;
    left -= take;
    m->host_offsets[g + 1] = m->host_offsets[g] + (int32_t)take;
    m->accumulate[g] = (uint8_t)pick(0, 1);
    m->accumulate_bias[g] = (uint8_t)pick(0, 1);
  }
}

static void make(sides_t *s, shape_t shape, maps_t *m)
{
  int64_t rows = shape.rows + SPARE_ROWS, n = shape.n, k = shape.k;
  int64_t groups = shape.groups;

  memset(m, 0, sizeof *m);
  m->shape = shape;
  m->max_rows = rows;
  deal_rows(m);
  m->offsets = dual_of(s, MZ_I32, groups + 1, m->host_offsets);
  m->w = dual_random(s, s->dtype, groups * n * k, 1);
  m->b = dual_random(s, s->dtype, groups * n, 1);
  m->x = dual_random(s, s->dtype, rows * k, 1);
  m->y = dual_random(s, s->dtype, rows * n, 1);
  m->pre = dual_random(s, s->dtype, rows * n, 1);
  m->dy = dual_random(s, s->dtype, rows * n, 1);
  m->dx = dual_random(s, s->dtype, rows * k, 1);
  m->pre_x = dual_random(s, s->dtype, rows * k, 3);
  m->dw = dual_random(s, MZ_F32, groups * n * k, 1);
  m->db = dual_random(s, MZ_F32, groups * n, 1);
}

/* Outputs of the table's dtype. fp32: sums of up to thousands of products in
 * another order, some sqrt(k) 2^-24 of the largest. bf16: equal operands, and
 * at most three roundings of 2^-9 on the two sides together. */
static double output_bound(const sides_t *s)
{
  return s->dtype == MZ_BF16 ? 1e-2 : 1e-5;
}

/* Gradients of weights are fp32 sums; tensor cores cut bits off the running
 * sum, up to 2^-23 of it at each of some hundred steps. */
static double weight_bound(const sides_t *s)
{
  return s->dtype == MZ_BF16 ? 2e-4 : 1e-5;
}

static void check_forward(sides_t *s, maps_t *m, bool bias, bool gelu)
{
  shape_t shape = m->shape;
  pointers_t w[2], b[2];
  mz_linear_t a = {.num_groups = shape.groups,
                   .offsets = m->offsets.cpu,
                   .host_offsets = m->host_offsets,
                   .max_rows = m->max_rows,
                   .n = shape.n,
                   .k = shape.k,
                   .w = (const void *const *)w[0].of,
                   .b = bias ? (const void *const *)b[0].of : NULL,
                   .x = m->x.cpu,
                   .y = m->y.cpu,
                   .epilogue = gelu ? MZ_EPI_GELU : MZ_EPI_NONE,
                   .pre = gelu ? m->pre.cpu : NULL};
  mz_linear_t c = a;

  split(m->w.cpu, s->dtype, shape.groups, shape.n * shape.k, &w[0]);
  split(m->w.cuda, s->dtype, shape.groups, shape.n * shape.k, &w[1]);
  split(m->b.cpu, s->dtype, shape.groups, shape.n, &b[0]);
  split(m->b.cuda, s->dtype, shape.groups, shape.n, &b[1]);
  c.offsets = m->offsets.cuda;
  c.w = (const void *const *)w[1].of;
  c.b = bias ? (const void *const *)b[1].of : NULL;
  c.x = m->x.cuda;
  c.y = m->y.cuda;
  c.pre = gelu ? m->pre.cuda : NULL;
  RUN_BOTH(s, linear, &a, &c);
  compare(s, gelu ? "linear y with gelu" : "linear y", &m->y, output_bound(s));
  if (gelu) compare(s, "linear pre", &m->pre, output_bound(s));
}

static void check_dgrad(sides_t *s, maps_t *m, mz_epilogue_t epilogue, int add)
{
  shape_t shape = m->shape;
  pointers_t w[2];
  mz_linear_dgrad_t a = {.num_groups = shape.groups,
                         .offsets = m->offsets.cpu,
                         .host_offsets = m->host_offsets,
                         .max_rows = m->max_rows,
                         .n = shape.n,
                         .k = shape.k,
                         .w = (const void *const *)w[0].of,
                         .dy = m->dy.cpu,
                         .dx = m->dx.cpu,
                         .epilogue = epilogue,
                         .pre = m->pre_x.cpu,
                         .add = add};
  mz_linear_dgrad_t c = a;

  split(m->w.cpu, s->dtype, shape.groups, shape.n * shape.k, &w[0]);
  split(m->w.cuda, s->dtype, shape.groups, shape.n * shape.k, &w[1]);
  c.offsets = m->offsets.cuda;
  c.w = (const void *const *)w[1].of;
  c.dy = m->dy.cuda;
  c.dx = m->dx.cuda;
  c.pre = m->pre_x.cuda;
  dual_renew(s, &m->dx);
  RUN_BOTH(s, linear_dgrad, &a, &c);
  compare(s,
          epilogue == MZ_EPI_DGELU ? "dgrad with dgelu"
          : add                    ? "dgrad that adds"
                                   : "dgrad",
          &m->dx, output_bound(s));
}

static void check_wgrad(sides_t *s, maps_t *m, bool bias)
{
  shape_t shape = m->shape;
  pointers_t dw[2], db[2];
  mz_linear_wgrad_t a = {.num_groups = shape.groups,
                         .offsets = m->offsets.cpu,
                         .host_offsets = m->host_offsets,
                         .max_rows = m->max_rows,
                         .n = shape.n,
                         .k = shape.k,
                         .x = m->x.cpu,
                         .dy = m->dy.cpu,
                         .dw = dw[0].of,
                         .db = bias ? db[0].of : NULL,
                         .accumulate = m->accumulate,
                         .accumulate_bias = m->accumulate_bias};
  mz_linear_wgrad_t c = a;

  split(m->dw.cpu, MZ_F32, shape.groups, shape.n * shape.k, &dw[0]);
  split(m->dw.cuda, MZ_F32, shape.groups, shape.n * shape.k, &dw[1]);
  split(m->db.cpu, MZ_F32, shape.groups, shape.n, &db[0]);
  split(m->db.cuda, MZ_F32, shape.groups, shape.n, &db[1]);
  c.offsets = m->offsets.cuda;
  c.x = m->x.cuda;
  c.dy = m->dy.cuda;
  c.dw = dw[1].of;
  c.db = bias ? db[1].of : NULL;
  dual_renew(s, &m->dw);
  dual_renew(s, &m->db);
  RUN_BOTH(s, linear_wgrad, &a, &c);
  compare(s, "wgrad dw", &m->dw, weight_bound(s));
  /* The same fp32 sums on both sides, in another order. */
  compare(s, bias ? "wgrad db" : "wgrad db left alone", &m->db,
          bias ? 1e-5 : 0);
}

static bool too_large(const sides_t *s, shape_t shape)
{
  return sides_skip_products(s, shape.rows * shape.n * shape.k);
}

static void check_maps(sides_t *s, maps_t *m)
{
  printf("%d groups, %lld rows, n %lld, k %lld\n", (int)m->shape.groups,
         (long long)m->shape.rows, (long long)m->shape.n,
         (long long)m->shape.k);
  check_forward(s, m, false, false);
  check_forward(s, m, true, false);
  check_forward(s, m, false, true);
  check_forward(s, m, true, true);
  check_dgrad(s, m, MZ_EPI_NONE, 0);
  check_dgrad(s, m, MZ_EPI_NONE, 1);
  check_dgrad(s, m, MZ_EPI_DGELU, 0);
  check_wgrad(s, m, true);
  check_wgrad(s, m, false);
}

/* Two calls must give the same bits. */
static void check_repeats(sides_t *s, maps_t *m)
{
  size_t bytes = (size_t)(m->dw.n * (int64_t)sizeof(float));
  void *first;

  must(mz_alloc_zeroed((int64_t)bytes, 1, "first dw", &first));
  memset(m->accumulate, 0, sizeof m->accumulate);
  check_wgrad(s, m, true);
  memcpy(first, dual_read(s, &m->dw), bytes);
  check_wgrad(s, m, true);
  report(s, "the same bits again",
         memcmp(first, dual_read(s, &m->dw), bytes) == 0);
  mz_free(first);
}

/* Choices that were guessed, not timed. Afterwards, as if all were timed. */
static int take_guesses(char *text)
{
  int guesses = 0;

  for (char *at = text; (at = strstr(at, "\ng ")); guesses++)
    at[1] = 't';
  return guesses;
}

/* What was chosen by timing computes the same, goes out as text and back. */
static void check_table(sides_t *s, mz_cuda_products_t *products, maps_t *m)
{
  char *guessed = NULL, *before = NULL, *after = NULL;
  int guesses;

  check_maps(s, m);
  must(mz_cuda_products_export(products, &guessed));
  must(mz_cuda_products_tune(products, true));
  check_maps(s, m);
  must(mz_cuda_products_tune(products, false));
  must(mz_cuda_products_export(products, &before));
  guesses = take_guesses(before);
  report(s, "guesses are made again by timing",
         guesses < take_guesses(guessed));
  must(mz_cuda_products_import(products, before));
  must(mz_cuda_products_export(products, &after));
  report(s, "table of products out, in, out", strcmp(before, after) == 0);
  report(s, "table of products has choices",
         strchr(strchr(before, '\n') + 1, '\n') != NULL);
  check_maps(s, m);
  report(s, "another text is no table",
         mz_cuda_products_import(products, "table") == MZ_ERR_ARG);
  before[strlen(before) - 2] = 'x';
  report(s, "a broken line is refused",
         mz_cuda_products_import(products, before) == MZ_ERR_ARG);
  mz_free(guessed);
  mz_free(before);
  mz_free(after);
}

static void check_choices(sides_t *s, maps_t *m)
{
  static const shape_t tuned[] = {
      {1, 1000, 768, 512}, {4, 900, 256, 384}, {3, 90, 33, 65}};
  mz_cuda_products_t *products = mz_cuda_products_of(s->cuda);

  for (size_t i = 0; i < sizeof tuned / sizeof *tuned; i++) {
    if (too_large(s, tuned[i])) continue;
    make(s, tuned[i], m);
    check_table(s, products, m);
  }
  make(s, (shape_t){8, s->quick ? 300 : 2000, 320, 256}, m);
  printf("spread over 4 streams\n");
  must(mz_cuda_products_spread(products, 4));
  check_maps(s, m);
  check_repeats(s, m);
  report(s, "no streams", mz_cuda_products_spread(products, 0) == MZ_ERR_ARG);
  must(mz_cuda_products_spread(products, 1));
}

void check_linear(sides_t *s)
{
  static const shape_t shapes[] = {
      {1, 0, 5, 7},        {1, 1, 1, 1},         {1, 1, 768, 256},
      {1, 37, 13, 29},     {1, 300, 64, 96},     {1, 258, 40, 1},
      {3, 100, 33, 65},    {8, 0, 16, 24},       {8, 257, 40, 72},
      {130, 600, 24, 40},  {64, 5000, 128, 256}, {8, 4096, 1024, 512},
      {1, 4096, 2304, 768}};
  maps_t *m = NULL;

  must(mz_new(1, "maps", &m));
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    if (too_large(s, shapes[i])) continue;
    make(s, shapes[i], m);
    check_maps(s, m);
  }
  for (int i = 0; i < RANDOM_SHAPES; i++) {
    shape_t shape = {(int32_t)pick(1, 9), pick(0, 700), pick(1, 300),
                     pick(1, 300)};

    if (too_large(s, shape)) continue;
    make(s, shape, m);
    check_maps(s, m);
  }
  check_repeats(s, m);
  if (!s->tiny) check_choices(s, m);
  mz_free(m);
}
