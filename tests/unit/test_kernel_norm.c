/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_test.h"
#include "kernels/cpu/cpu.h"

/* rows, width: none, one row, fewer and more rows than partial sums, a width
 * of more than one piece of a mask. */
static const int64_t shapes[][2] = {
    {0, 5}, {1, 1}, {1, 9}, {24, 37}, {40, 270}};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes, SEQUENCE = 6 };

/* Rows belong to these samples of the global batch, SEQUENCE rows each. */
static const int64_t samples[] = {5, 2, 9, 0, 7, 3, 11, 4, 1, 6, 8, 10};

static mz_dropout_t dropout_of(double p)
{
  mz_dropout_t d = {p, mz_random_make(42, 3, MZ_PURPOSE_DROPOUT, 1), samples,
                    SEQUENCE};
  return d;
}

/* The factor of element (row, c) by the contract. */
static double mask_of(const mz_dropout_t *d, int64_t row, int64_t width,
                      int64_t c)
{
  int64_t i = (samples[row / SEQUENCE] * SEQUENCE + row % SEQUENCE) * width + c;

  if (d->p == 0) return 1;
  return (double)mz_random_uniform(&d->random, (uint64_t)i) >= d->p
             ? 1 / (1 - d->p)
             : 0;
}

/* loss = <c_sum, s> + <c_h, norm(s)>, s = x + dropout(y). */
typedef struct problem {
  mz_norm_kind_t kind;
  int64_t rows, width;
  mz_dropout_t dropout;
  int use_y, use_b;
  double *x, *y, *w, *b;
  float *c_sum, *c_h;
} problem_t;

static const double epsilon = 1e-3;

static void reference(const problem_t *p, double *s, double *h)
{
  for (int64_t r = 0; r < p->rows; r++) {
    double mean = 0, square = 0, rstd, *row = s + r * p->width;
    int64_t n = p->width;

    for (int64_t c = 0; c < n; c++) {
      row[c] = p->x[r * n + c];
      if (p->use_y) row[c] += p->y[r * n + c] * mask_of(&p->dropout, r, n, c);
      if (p->kind == MZ_NORM_LAYER) mean += row[c] / (double)n;
    }
    for (int64_t c = 0; c < n; c++)
      square += (row[c] - mean) * (row[c] - mean) / (double)n;
    rstd = 1 / sqrt(square + epsilon);
    for (int64_t c = 0; c < n; c++)
      h[r * n + c] =
          (row[c] - mean) * rstd * p->w[c] + (p->use_b ? p->b[c] : 0);
  }
}

static double loss_of(const void *context)
{
  const problem_t *p = context;
  int64_t size = p->rows * p->width;
  double *s = doubles(size), *h = doubles(size);
  double sum;

  reference(p, s, h);
  sum = dot(p->c_sum, s, size) + dot(p->c_h, h, size);
  mz_free(s);
  mz_free(h);
  return sum;
}

typedef struct buffers {
  float *x, *y, *w, *b, *sum, *h, *mean, *rstd;
} buffers_t;

static void setup(problem_t *p, buffers_t *f)
{
  int64_t size = p->rows * p->width;

  f->x = normals(size, 41, 1.0);
  f->y = normals(size, 42, 1.0);
  f->w = normals(p->width, 43, 1.0);
  f->b = normals(p->width, 44, 1.0);
  f->sum = floats(size);
  f->h = floats(size);
  f->mean = floats(p->rows);
  f->rstd = floats(p->rows);
  p->x = widen(f->x, size);
  p->y = widen(f->y, size);
  p->w = widen(f->w, p->width);
  p->b = widen(f->b, p->width);
  p->c_sum = normals(size, 45, 1.0);
  p->c_h = normals(size, 46, 1.0);
}

static void teardown(problem_t *p, buffers_t *f)
{
  float *single[] = {f->x, f->y,    f->w,    f->b,     f->sum,
                     f->h, f->mean, f->rstd, p->c_sum, p->c_h};
  double *twice[] = {p->x, p->y, p->w, p->b};

  for (size_t i = 0; i < sizeof single / sizeof *single; i++)
    mz_free(single[i]);
  for (size_t i = 0; i < sizeof twice / sizeof *twice; i++)
    mz_free(twice[i]);
}

static mz_add_norm_t forward_args(const problem_t *p, const buffers_t *f)
{
  mz_add_norm_t a = {.kind = p->kind,
                     .rows = p->rows,
                     .width = p->width,
                     .eps = epsilon,
                     .x = f->x,
                     .y = p->use_y ? f->y : NULL,
                     .dropout = p->dropout,
                     .sum = f->sum,
                     .h = f->h,
                     .w = f->w,
                     .b = p->use_b ? f->b : NULL,
                     .mean = f->mean,
                     .rstd = f->rstd};
  return a;
}

/* fp32 on numbers up to about 20 (5 deviations times a weight up to 4), a few
 * roundings each; at a width of 1 rstd reaches 1 / sqrt(eps) = 32. */
static const double forward_bound = 1e-5;

static void check_forward(problem_t p)
{
  buffers_t f;
  int64_t size = p.rows * p.width;
  double *s = doubles(size), *h = doubles(size);
  float *again;
  mz_add_norm_t a;

  setup(&p, &f);
  again = floats(size);
  a = forward_args(&p, &f);
  reference(&p, s, h);
  cr_assert_eq(mz_k_add_norm_cpu(NULL, &a, NULL), MZ_OK);
  expect_close("sum", f.sum, s, size, 1e-6 * 5);
  expect_close("h", f.h, h, size, forward_bound);
  if (!p.use_y) { /* the sum need not be stored */
    a.sum = NULL;
    a.h = again;
    cr_assert_eq(mz_k_add_norm_cpu(NULL, &a, NULL), MZ_OK);
    expect_same_bits("h", f.h, again, size);
  }
  a.sum = f.x; /* in place, and the sum alone */
  a.h = NULL;
  a.rstd = NULL;
  a.mean = NULL;
  cr_assert_eq(mz_k_add_norm_cpu(NULL, &a, NULL), MZ_OK);
  expect_same_bits("sum", f.sum, f.x, size);
  mz_free(s);
  mz_free(h);
  mz_free(again);
  teardown(&p, &f);
}

/* Every kind, with and without residual, bias and dropout, on 1 and 2
 * threads. */
static void for_all(void (*check)(problem_t))
{
  for (int threads = 1; threads <= 2; threads++)
    for (int s = 0; s < NUM_SHAPES; s++)
      for (int v = 0; v < 12; v++) {
        int residual = v / 2 % 3; /* none, plain, dropped */
        problem_t p = {.kind = v / 6 ? MZ_NORM_RMS : MZ_NORM_LAYER,
                       .rows = shapes[s][0],
                       .width = shapes[s][1],
                       .dropout = dropout_of(residual == 2 ? 0.3 : 0.0),
                       .use_y = residual > 0,
                       .use_b = v % 2};

        omp_set_num_threads(threads);
        check(p);
      }
}

Test(add_norm, equals_double_precision) { for_all(check_forward); }

/* LayerNorm of (1, 3): mean 2, deviation 1. RMSNorm of (3, 4): 5 / sqrt 2. */
Test(add_norm, by_hand)
{
  float x[] = {0, 1}, y[] = {1, 2}, w[] = {2, 3}, b[] = {10, 20}, h[2], sum[2];
  float mean, rstd;
  mz_add_norm_t a = {.kind = MZ_NORM_LAYER,
                     .rows = 1,
                     .width = 2,
                     .x = x,
                     .y = y,
                     .sum = sum,
                     .h = h,
                     .w = w,
                     .b = b,
                     .mean = &mean,
                     .rstd = &rstd};
  float z[] = {3, 4};

  cr_assert_eq(mz_k_add_norm_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_eq(mean, 2.0f);
  cr_assert_eq(rstd, 1.0f);
  cr_assert_eq(h[0], 8.0f);
  cr_assert_eq(h[1], 23.0f);
  a.kind = MZ_NORM_RMS;
  a.x = z;
  a.y = NULL;
  a.b = NULL;
  a.mean = NULL;
  cr_assert_eq(mz_k_add_norm_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_float_eq(h[0], 6 * sqrt(2.0) / 5, 1e-6);
  cr_assert_float_eq(h[1], 12 * sqrt(2.0) / 5, 1e-6);
}

static void check_backward(problem_t p)
{
  buffers_t f;
  mz_add_norm_t a;
  mz_add_norm_grad_t g;
  int64_t size = p.rows * p.width, n = p.width;
  float *d, *dy = floats(size), *dw = floats(n), *db = floats(n);
  float *d2, *dw2 = floats(n), *db2 = floats(n);
  float *partial = normals(MZ_NORM_PARTIALS * 2 * n, 47, 1.0);
  int dropped = p.dropout.p > 0;
  /* rows of width 1 have deviation 0, so rstd = 1 / sqrt(eps) there */
  double bound = (n == 1 ? 30 : 1) * 1e-5 * sqrt((double)p.rows + 1);

  setup(&p, &f);
  a = forward_args(&p, &f);
  cr_assert_eq(mz_k_add_norm_cpu(NULL, &a, NULL), MZ_OK);
  d = copy_of(p.c_sum, size);
  d2 = copy_of(p.c_sum, size);
  g = (mz_add_norm_grad_t){.kind = p.kind,
                           .rows = p.rows,
                           .width = n,
                           .sum = f.sum,
                           .dh = p.c_h,
                           .w = f.w,
                           .mean = f.mean,
                           .rstd = f.rstd,
                           .add = 1,
                           .d_sum = d,
                           .dropout = p.dropout,
                           .dy = dropped ? dy : NULL,
                           .dw = dw,
                           .db = p.use_b ? db : NULL,
                           .partial = partial};
  cr_assert_eq(mz_k_add_norm_grad_cpu(NULL, &g, NULL), MZ_OK);
  expect_gradient("dx", loss_of, &p, p.x, size, d, bound);
  expect_gradient("dw", loss_of, &p, p.w, n, dw, bound);
  if (p.use_y)
    expect_gradient("dy", loss_of, &p, p.y, size, dropped ? dy : d,
                    bound * 1.5);
  if (p.use_b) expect_gradient("db", loss_of, &p, p.b, n, db, bound);

  g.d_sum = d2; /* again, onto what is there */
  g.dw = dw2;
  g.db = p.use_b ? db2 : NULL;
  g.accumulate_w = g.accumulate_b = 1;
  cr_assert_eq(mz_k_add_norm_grad_cpu(NULL, &g, NULL), MZ_OK);
  expect_same_bits("d_sum", d, d2, size);
  expect_same_bits("dw onto zero", dw, dw2, n);
  expect_same_bits("db onto zero", db, db2, n);
  g.add = 0;
  memset(d2, 0xff, (size_t)size * sizeof *d2);
  cr_assert_eq(mz_k_add_norm_grad_cpu(NULL, &g, NULL), MZ_OK);
  for (int64_t i = 0; i < size; i++)
    cr_assert_float_eq(d2[i] + p.c_sum[i], d[i], bound);
  for (int64_t i = 0; i < n; i++)
    cr_assert_float_eq(dw2[i], 2 * dw[i], bound);
  mz_free(d);
  mz_free(d2);
  mz_free(dy);
  mz_free(dw);
  mz_free(db);
  mz_free(dw2);
  mz_free(db2);
  mz_free(partial);
  teardown(&p, &f);
}

Test(add_norm_grad, equals_central_differences) { for_all(check_backward); }

Test(add_norm_grad, bits_do_not_depend_on_threads)
{
  problem_t p = {.kind = MZ_NORM_LAYER, .rows = 72, .width = 300};
  float *partial = floats(MZ_NORM_PARTIALS * 2 * 300);
  float *out[2], dw[2][300], db[2][300];
  buffers_t f;
  mz_add_norm_t a;

  setup(&p, &f);
  a = forward_args(&p, &f);
  cr_assert_eq(mz_k_add_norm_cpu(NULL, &a, NULL), MZ_OK);
  for (int t = 0; t < 2; t++) {
    mz_add_norm_grad_t g = {.kind = p.kind,
                            .rows = p.rows,
                            .width = p.width,
                            .sum = f.sum,
                            .dh = p.c_h,
                            .w = f.w,
                            .mean = f.mean,
                            .rstd = f.rstd,
                            .dw = dw[t],
                            .db = db[t],
                            .partial = partial};
    out[t] = floats(72 * 300);
    g.d_sum = out[t];
    omp_set_num_threads(1 + 2 * t);
    cr_assert_eq(mz_k_add_norm_grad_cpu(NULL, &g, NULL), MZ_OK);
  }
  expect_same_bits("d_sum", out[0], out[1], 72 * 300);
  expect_same_bits("dw", dw[0], dw[1], 300);
  expect_same_bits("db", db[0], db[1], 300);
  mz_free(out[0]);
  mz_free(out[1]);
  mz_free(partial);
  teardown(&p, &f);
}

/* The mask of every element is that of the contract, bit for bit, at widths
 * where rows start at any component of a block. */
Test(dropout, follows_the_global_element_number)
{
  for (int64_t width = 1; width < 600; width = width * 2 + 1) {
    int64_t rows = 12, n = rows * width;
    mz_dropout_apply_t a = {rows, width, dropout_of(0.25), NULL};
    float *x = floats(n);

    for (int64_t i = 0; i < n; i++)
      x[i] = 1;
    a.x = x;
    cr_assert_eq(mz_k_dropout_cpu(NULL, &a, NULL), MZ_OK);
    for (int64_t i = 0; i < n; i++)
      cr_assert_eq(x[i],
                   (float)mask_of(&a.dropout, i / width, width, i % width));
    mz_free(x);
  }
}

Test(dropout, keeps_the_share_it_should_and_refuses_p_outside)
{
  int64_t n = 72 * 300, kept = 0;
  float *x = floats(n);
  mz_dropout_apply_t a = {72, 300, dropout_of(0.1), x};

  for (int64_t i = 0; i < n; i++)
    x[i] = 1;
  cr_assert_eq(mz_k_dropout_cpu(NULL, &a, NULL), MZ_OK);
  for (int64_t i = 0; i < n; i++)
    kept += x[i] > 0;
  /* five standard errors of a binomial count */
  cr_assert_float_eq((double)kept / (double)n, 0.9, 5 * sqrt(0.09 / (double)n));
  a.dropout.p = 1;
  cr_assert_eq(mz_k_dropout_cpu(NULL, &a, NULL), MZ_ERR_ARG);
  cr_assert_str_eq(mz_error_message(), "dropout p is 1, need 0 <= p < 1");
  a.dropout.p = -0.5;
  cr_assert_eq(mz_k_dropout_cpu(NULL, &a, NULL), MZ_ERR_ARG);
  a.dropout.p = 0.5;
  a.dropout.samples = NULL;
  cr_assert_eq(mz_k_dropout_cpu(NULL, &a, NULL), MZ_ERR_ARG);
  a.dropout.p = 0; /* then nothing else is read */
  cr_assert_eq(mz_k_dropout_cpu(NULL, &a, NULL), MZ_OK);
  mz_free(x);
}
