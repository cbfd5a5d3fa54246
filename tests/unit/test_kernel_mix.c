/* SPDX-License-Identifier: Apache-2.0 */
/* Experts mixed with a dense map on the CPU: both tables against plain loops in
 * double, and gradients against central differences of <dy, y>. */
#include "kernel_test.h"

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu.h"

enum { MAX_T = 9, MAX_H = 300 };

/* T tokens, H width, M rows of W. */
typedef struct mix_case {
  mz_mix_kind_t kind;
  int64_t T, H, M;
  double *x, *w, *b, *moe, *side, *dy; /* what the table's dtype can hold */
} mix_case_t;

/* Numbers of 8 bits, so that bf16 holds them too. */
static double *rounded(int64_t n, uint32_t seed, double sigma)
{
  float *x = normals(n, seed, sigma);
  double *y;
  char half[2 * MAX_T * MAX_H + 2];

  cr_assert(n <= MAX_T * MAX_H);
  mz_cpu_narrow(MZ_BF16, half, 0, x, n);
  mz_cpu_widen(MZ_BF16, x, half, 0, n);
  y = widen(x, n);
  mz_free(x);
  return y;
}

static mix_case_t make_case(mz_mix_kind_t kind, int64_t T, int64_t H)
{
  mix_case_t c = {.kind = kind, .T = T, .H = H};

  c.M = kind == MZ_MIX_SOFTMAX ? 2 : kind == MZ_MIX_SIGMOID;
  c.x = rounded(T * H, 1, 1);
  c.w = rounded(c.M * H, 2, 0.3);
  c.b = rounded(2, 3, 1);
  c.moe = rounded(T * H, 4, 1);
  c.side = rounded(T * H, 5, 1);
  c.dy = rounded(T * H, 6, 1);
  return c;
}

static void free_case(mix_case_t *c)
{
  mz_free(c->x);
  mz_free(c->w);
  mz_free(c->b);
  mz_free(c->moe);
  mz_free(c->side);
  mz_free(c->dy);
}

/* (c0, c1) of a token, in double. */
static void coefficients(const mix_case_t *c, int64_t t, double coef[2])
{
  double z[2] = {0, 0};

  for (int64_t m = 0; m < c->M; m++)
    for (int64_t h = 0; h < c->H; h++)
      z[m] += c->x[t * c->H + h] * c->w[m * c->H + h];
  coef[0] = coef[1] = 1;
  if (c->kind == MZ_MIX_SIGMOID) coef[1] = 1 / (1 + exp(-z[0]));
  if (c->kind != MZ_MIX_SOFTMAX) return;
  coef[0] = exp(z[0] + c->b[0]) / (exp(z[0] + c->b[0]) + exp(z[1] + c->b[1]));
  coef[1] = exp(z[1] + c->b[1]) / (exp(z[0] + c->b[0]) + exp(z[1] + c->b[1]));
}

/* Writes y unless NULL. @return <dy, y>. */
static double mix_in_double(const mix_case_t *c, double *y)
{
  double loss = 0, coef[2];

  for (int64_t t = 0; t < c->T; t++) {
    coefficients(c, t, coef);
    for (int64_t i = t * c->H; i < (t + 1) * c->H; i++) {
      double value = coef[0] * c->moe[i] + coef[1] * c->side[i];

      if (y) y[i] = value;
      loss += c->dy[i] * value;
    }
  }
  return loss;
}

static double loss_of(const void *context)
{
  return mix_in_double(context, NULL);
}

/* --- what the kernels get and give, as fp32 arrays --- */

typedef struct mixed {
  float *y, *coef, *d_moe, *d_side, *d, *dw, *db, *dx;
} mixed_t;

static void *narrow(mz_dtype_t dtype, const double *x, int64_t n)
{
  float *single = floats(n);
  char *out = NULL;

  for (int64_t i = 0; i < n; i++)
    single[i] = (float)x[i];
  cr_assert_eq(mz_new(4 * n + 1, "numbers", &out), MZ_OK);
  mz_cpu_narrow(dtype, out, 0, single, n);
  mz_free(single);
  return out;
}

/* The array in fp32; the other one is freed. */
static float *widened(mz_dtype_t dtype, void *x, int64_t n)
{
  float *out = floats(n);

  mz_cpu_widen(dtype, out, x, 0, n);
  mz_free(x);
  return out;
}

static const mz_kernels_ops_t *table(mz_dtype_t dtype)
{
  return dtype == MZ_F32 ? &mz_kernels_ops_cpu : &mz_kernels_ops_cpu_bf16;
}

/* Forward, backward and dx += with d_side taken for the map's own gradient; dx
 * is dy before, and dw, db start at 1. */
static mixed_t run(const mix_case_t *c, mz_dtype_t dtype, int accumulate)
{
  int64_t n = c->T * c->H;
  void *x = narrow(dtype, c->x, n), *w = narrow(dtype, c->w, c->M * c->H);
  void *b = narrow(dtype, c->b, 2), *moe = narrow(dtype, c->moe, n);
  void *side = narrow(dtype, c->side, n), *dy = narrow(dtype, c->dy, n);
  void *y = narrow(dtype, c->moe, n), *dx = narrow(dtype, c->dy, n);
  void *d_moe = narrow(dtype, c->dy, n), *d_side = narrow(dtype, c->dy, n);
  mixed_t r = {.coef = floats(2 * c->T),
               .d = floats(c->T),
               .dw = floats(2 * c->H),
               .db = floats(2)};
  mz_mix_t forward = {c->kind, c->T, c->H, x, w, b, y, side, r.coef, y};
  mz_mix_grad_t grad = {.forward = forward,
                        .dy = dy,
                        .d_moe = d_moe,
                        .d_side = d_side,
                        .d = r.d,
                        .dw = r.dw,
                        .db = c->kind == MZ_MIX_SOFTMAX ? r.db : NULL,
                        .accumulate_w = accumulate,
                        .accumulate_b = accumulate};
  mz_mix_dgrad_t dgrad = {c->kind, c->T, c->H, w, r.d, d_side, dx};

  for (int64_t i = 0; i < 2 * c->H; i++)
    r.dw[i] = 1;
  r.db[0] = r.db[1] = 1;
  grad.forward.moe = moe; /* y has taken its place */
  cr_assert_eq(table(dtype)->mix(NULL, &forward, NULL), MZ_OK);
  if (c->kind != MZ_MIX_SUM)
    cr_assert_eq(table(dtype)->mix_grad(NULL, &grad, NULL), MZ_OK);
  cr_assert_eq(table(dtype)->mix_dgrad(NULL, &dgrad, NULL), MZ_OK);
  r.y = widened(dtype, y, n);
  r.dx = widened(dtype, dx, n);
  r.d_moe = widened(dtype, d_moe, n);
  r.d_side = widened(dtype, d_side, n);
  mz_free(x);
  mz_free(w);
  mz_free(b);
  mz_free(moe);
  mz_free(side);
  mz_free(dy);
  return r;
}

static void free_mixed(mixed_t *r)
{
  mz_free(r->y);
  mz_free(r->coef);
  mz_free(r->d_moe);
  mz_free(r->d_side);
  mz_free(r->d);
  mz_free(r->dw);
  mz_free(r->db);
  mz_free(r->dx);
}

/* bf16 results are rounded once: 2^-9 of numbers below 8. */
static double bound_of(mz_dtype_t dtype)
{
  return dtype == MZ_F32 ? 1e-5 : 8 * 0x1p-9;
}

static void check_forward(mz_mix_kind_t kind, mz_dtype_t dtype, int64_t T,
                          int64_t H)
{
  mix_case_t c = make_case(kind, T, H);
  mixed_t r = run(&c, dtype, 0);
  double *y = doubles(T * H), coef[2];

  mix_in_double(&c, y);
  expect_close("y", r.y, y, T * H, bound_of(dtype));
  for (int64_t t = 0; t < T && kind != MZ_MIX_SUM; t++) {
    coefficients(&c, t, coef);
    expect_close("coef", r.coef + 2 * t, coef, 2, 1e-5);
  }
  mz_free(y);
  free_mixed(&r);
  free_case(&c);
}

Test(mix, equals_plain_loops)
{
  static const int64_t tokens[] = {0, 1, 9}, widths[] = {1, 15, 33, 300};

  for (int kind = MZ_MIX_SOFTMAX; kind <= MZ_MIX_SUM; kind++)
    for (int t = 0; t < 3; t++)
      for (int w = 0; w < 4; w++) {
        check_forward((mz_mix_kind_t)kind, MZ_F32, tokens[t], widths[w]);
        check_forward((mz_mix_kind_t)kind, MZ_BF16, tokens[t], widths[w]);
      }
}

/* dx - dy - d_side is what the logits give to x. */
static void check_gradients(mz_mix_kind_t kind, mz_dtype_t dtype)
{
  mix_case_t c = make_case(kind, 7, 21);
  mixed_t r = run(&c, dtype, 0);
  int64_t n = c.T * c.H;
  double bound = bound_of(dtype);

  for (int64_t i = 0; i < n; i++)
    r.dx[i] -= (float)c.dy[i] + r.d_side[i];
  if (kind == MZ_MIX_SOFTMAX) {
    expect_gradient("d_moe", loss_of, &c, c.moe, n, r.d_moe, bound);
    expect_gradient("db", loss_of, &c, c.b, 2, r.db, 5e-5);
  }
  expect_gradient("d_side", loss_of, &c, c.side, n, r.d_side, bound);
  expect_gradient("x", loss_of, &c, c.x, n, r.dx, 2 * bound);
  expect_gradient("dw", loss_of, &c, c.w, c.M * c.H, r.dw, 5e-5);
  free_mixed(&r);
  free_case(&c);
}

Test(mix, gradients_equal_central_differences)
{
  check_gradients(MZ_MIX_SOFTMAX, MZ_F32);
  check_gradients(MZ_MIX_SIGMOID, MZ_F32);
  check_gradients(MZ_MIX_SOFTMAX, MZ_BF16);
  check_gradients(MZ_MIX_SIGMOID, MZ_BF16);
}

Test(mix, a_sum_passes_gradients_on)
{
  mix_case_t c = make_case(MZ_MIX_SUM, 3, 20);
  mz_mix_grad_t grad = {.forward = {.kind = MZ_MIX_SUM}};
  mixed_t r = run(&c, MZ_F32, 0);

  for (int i = 0; i < 60; i++)
    cr_assert_eq(r.dx[i], 2 * (float)c.dy[i]);
  cr_assert_eq(mz_k_mix_grad_cpu(NULL, &grad, NULL), MZ_ERR_ARG);
  free_mixed(&r);
  free_case(&c);
}

Test(mix, gradients_of_weights_accumulate)
{
  mix_case_t c = make_case(MZ_MIX_SOFTMAX, 5, 12);
  mixed_t written = run(&c, MZ_F32, 0), added = run(&c, MZ_F32, 1);

  for (int i = 0; i < 24; i++)
    cr_assert_eq(added.dw[i], 1 + written.dw[i]);
  for (int i = 0; i < 2; i++)
    cr_assert_eq(added.db[i], 1 + written.db[i]);
  free_mixed(&written);
  free_mixed(&added);
  free_case(&c);
}

Test(mix, no_tokens_write_zero_gradients)
{
  mix_case_t c = make_case(MZ_MIX_SOFTMAX, 0, 12);
  mixed_t r = run(&c, MZ_F32, 0);

  for (int i = 0; i < 24; i++)
    cr_assert_eq(r.dw[i], 0.0f);
  cr_assert_eq(r.db[0], 0.0f);
  cr_assert_eq(r.db[1], 0.0f);
  free_mixed(&r);
  free_case(&c);
}

/* Far from 0 the softmax is 0 and 1, and nothing is lost on the way. */
Test(mix, large_logits_are_no_trouble)
{
  static const float x[2] = {100, -100}, w[2] = {-5, 5}, one = 1, two = 2;
  float coef[2], y;

  for (int t = 0; t < 2; t++) {
    mz_mix_t a = {MZ_MIX_SOFTMAX, 1, 1, x + t, w, NULL, &one, &two, coef, &y};

    cr_assert_eq(mz_k_mix_cpu(NULL, &a, NULL), MZ_OK);
    cr_assert_eq(coef[t], 0.0f);
    cr_assert_eq(coef[1 - t], 1.0f);
    cr_assert_eq(y, t == 0 ? two : one);
  }
}

Test(mix, bits_do_not_depend_on_threads)
{
  enum { T = 700, H = 300 };
  float *in[6], *one[4], *two[4];
  static const int64_t size[4] = {T * H, T, 2 * H, 2};

  for (int i = 0; i < 6; i++)
    in[i] = normals(T * H, 10 + (uint32_t)i, 0.3);
  for (int threads = 1; threads <= 2; threads++) {
    float **out = threads == 1 ? one : two;
    float *coef = floats(2 * T), *d_moe = floats(T * H);
    mz_mix_t a = {MZ_MIX_SOFTMAX, T,     H,     in[0], in[1],
                  in[2],          in[3], in[4], coef,  NULL};
    mz_mix_grad_t grad = {.dy = in[5]};

    for (int i = 0; i < 4; i++)
      out[i] = floats(size[i]);
    a.y = out[0];
    omp_set_num_threads(threads);
    cr_assert_eq(mz_k_mix_cpu(NULL, &a, NULL), MZ_OK);
    grad.forward = a;
    grad.d_moe = d_moe;
    grad.d_side = out[0];
    grad.d = out[1];
    grad.dw = out[2];
    grad.db = out[3];
    cr_assert_eq(mz_k_mix_grad_cpu(NULL, &grad, NULL), MZ_OK);
    mz_free(coef);
    mz_free(d_moe);
  }
  for (int i = 0; i < 4; i++) {
    expect_same_bits("a result", one[i], two[i], size[i]);
    mz_free(one[i]);
    mz_free(two[i]);
  }
  for (int i = 0; i < 6; i++)
    mz_free(in[i]);
}
