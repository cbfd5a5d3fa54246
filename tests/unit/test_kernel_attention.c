/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_test.h"
#include "kernels/cpu/cpu.h"

/* batch, sequence, heads, kv_heads, head_width: no sequence, one token, less
 * than a tile, exactly one and two, a tile and a little, shared keys. */
static const int32_t shapes[][5] = {{0, 4, 2, 1, 4},    {2, 1, 3, 3, 5},
                                    {3, 7, 2, 2, 3},    {1, 64, 1, 1, 8},
                                    {1, 128, 2, 1, 4},  {2, 65, 4, 2, 6},
                                    {1, 70, 1, 1, 256}, {1, 150, 6, 2, 16}};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

typedef struct problem {
  mz_attention_t a;
  int64_t tokens, ld, ldo;
  double *qkv64;
  float *dout;
} problem_t;

static problem_t setup(const int32_t shape[5], double sigma)
{
  problem_t p = {.a = {.batch = shape[0],
                       .sequence = shape[1],
                       .heads = shape[2],
                       .kv_heads = shape[3],
                       .head_width = shape[4]}};

  p.tokens = (int64_t)shape[0] * shape[1];
  p.ld = (int64_t)(shape[2] + 2 * shape[3]) * shape[4];
  p.ldo = (int64_t)shape[2] * shape[4];
  p.a.qkv = normals(p.tokens * p.ld, 21, sigma);
  p.a.out = floats(p.tokens * p.ldo);
  p.a.lse = floats(p.tokens * shape[2]);
  p.qkv64 = widen(p.a.qkv, p.tokens * p.ld);
  p.dout = normals(p.tokens * p.ldo, 22, 1.0);
  return p;
}

static void teardown(problem_t *p)
{
  mz_free((void *)(uintptr_t)p->a.qkv);
  mz_free(p->a.out);
  mz_free(p->a.lse);
  mz_free(p->qkv64);
  mz_free(p->dout);
}

/* One query of one head: out [D] and the log-sum-exp. */
static double attend(const problem_t *p, int64_t b, int32_t head, int32_t query,
                     double *out)
{
  int64_t d = p->a.head_width;
  int32_t kv = head / (p->a.heads / p->a.kv_heads);
  const double *base = p->qkv64 + b * p->a.sequence * p->ld;
  const double *q = base + query * p->ld + head * d;
  const double *k = base + (p->a.heads + kv) * d;
  const double *v = base + (p->a.heads + p->a.kv_heads + kv) * d;
  double score[256], top = -INFINITY, sum = 0;

  for (int32_t j = 0; j <= query; j++) {
    score[j] = 0;
    for (int64_t i = 0; i < d; i++)
      score[j] += q[i] * k[j * p->ld + i];
    score[j] /= sqrt((double)d);
    top = fmax(top, score[j]);
  }
  for (int32_t j = 0; j <= query; j++)
    sum += exp(score[j] - top);
  memset(out, 0, (size_t)d * sizeof *out);
  for (int32_t j = 0; j <= query; j++)
    for (int64_t i = 0; i < d; i++)
      out[i] += exp(score[j] - top) / sum * v[j * p->ld + i];
  return top + log(sum);
}

static void reference(const problem_t *p, double *out, double *lse)
{
  int32_t s = p->a.sequence, d = p->a.head_width;

  for (int64_t b = 0; b < p->a.batch; b++)
    for (int32_t h = 0; h < p->a.heads; h++)
      for (int32_t i = 0; i < s; i++) {
        int64_t t = b * s + i;
        lse[h * p->tokens + t] =
            attend(p, b, h, i, out + t * p->ldo + (int64_t)h * d);
      }
}

static double loss_of(const void *context)
{
  const problem_t *p = context;
  double *out = doubles(p->tokens * p->ldo);
  double *lse = doubles(p->tokens * p->a.heads);
  double sum;

  reference(p, out, lse);
  sum = dot(p->dout, out, p->tokens * p->ldo);
  mz_free(out);
  mz_free(lse);
  return sum;
}

/* Scores are sums of D products of size sigma^2 / sqrt(D), so they and what
 * follows err by some 1e-7 of their size (the largest, about 5 sigma^2, counts
 * as an exponent); out is a mean of numbers of size 4 sigma. */
static void check_forward(const int32_t shape[5], double sigma)
{
  problem_t p = setup(shape, sigma);
  int64_t size = p.tokens * p.ldo, stats = p.tokens * p.a.heads;
  double *out = doubles(size), *lse = doubles(stats);
  float *first = p.a.out, *first_lse = p.a.lse;
  double bound = 5e-7 * (1 + 5 * sigma * sigma);

  reference(&p, out, lse);
  memset(p.a.out, 0xff, (size_t)size * sizeof(float)); /* NaN: not read */
  cr_assert_eq(mz_k_attention_cpu(NULL, &p.a, NULL), MZ_OK);
  expect_close("out", first, out, size, bound * 4 * sigma);
  expect_close("lse", first_lse, lse, stats, bound);
  p.a.out = floats(size);
  p.a.lse = floats(stats);
  cr_assert_eq(mz_k_attention_cpu(NULL, &p.a, NULL), MZ_OK);
  expect_same_bits("out", first, p.a.out, size);
  expect_same_bits("lse", first_lse, p.a.lse, stats);
  mz_free(first);
  mz_free(first_lse);
  mz_free(out);
  mz_free(lse);
  teardown(&p);
}

Test(attention, equals_double_precision)
{
  for (int threads = 1; threads <= 2; threads++) {
    omp_set_num_threads(threads);
    for (int s = 0; s < NUM_SHAPES; s++)
      check_forward(shapes[s], 1.0);
  }
}

/* Maxima that rise by tens from tile to tile, where a sum of plain
 * exponentials would overflow fp32. */
Test(attention, large_scores_stay_finite) { check_forward(shapes[7], 6.0); }

static void check_backward(const int32_t shape[5])
{
  problem_t p = setup(shape, 1.0);
  int64_t size = p.tokens * p.ld;
  float *dqkv = floats(size), *again = floats(size);
  mz_attention_grad_t g = {p.a, p.dout, dqkv, floats(p.tokens * p.a.heads)};

  cr_assert_eq(mz_k_attention_cpu(NULL, &p.a, NULL), MZ_OK);
  memset(dqkv, 0xff, (size_t)size * sizeof *dqkv);
  cr_assert_eq(mz_k_attention_grad_cpu(NULL, &g, NULL), MZ_OK);
  /* a key sums over up to 150 queries and 3 heads, terms of size 1 */
  expect_gradient("dqkv", loss_of, &p, p.qkv64, size, dqkv, 1e-5);
  g.dqkv = again;
  cr_assert_eq(mz_k_attention_grad_cpu(NULL, &g, NULL), MZ_OK);
  expect_same_bits("dqkv", dqkv, again, size);
  mz_free(dqkv);
  mz_free(again);
  mz_free(g.delta);
  teardown(&p);
}

Test(attention_grad, equals_central_differences)
{
  for (int threads = 1; threads <= 2; threads++) {
    omp_set_num_threads(threads);
    for (int s = 0; s < NUM_SHAPES; s++)
      check_backward(shapes[s]);
  }
}

Test(attention, bits_do_not_depend_on_threads)
{
  problem_t p = setup(shapes[7], 1.0);
  int64_t size = p.tokens * p.ldo;
  float *first = p.a.out;

  omp_set_num_threads(1);
  cr_assert_eq(mz_k_attention_cpu(NULL, &p.a, NULL), MZ_OK);
  omp_set_num_threads(2);
  p.a.out = floats(size);
  cr_assert_eq(mz_k_attention_cpu(NULL, &p.a, NULL), MZ_OK);
  expect_same_bits("out", first, p.a.out, size);
  mz_free(first);
  teardown(&p);
}

Test(attention, refuses_heads_that_do_not_divide)
{
  mz_attention_t a = {1, 4, 3, 2, 8, NULL, NULL, NULL};
  mz_attention_grad_t g = {a, NULL, NULL, NULL};
  mz_rope_t rope = {1, 4, 2, 2, 7, 1e4, 0, NULL};

  cr_assert_eq(mz_k_attention_cpu(NULL, &a, NULL), MZ_ERR_SHAPE);
  cr_assert_str_eq(mz_error_message(), "3 heads not divisible by 2 kv heads");
  cr_assert_eq(mz_k_attention_grad_cpu(NULL, &g, NULL), MZ_ERR_SHAPE);
  cr_assert_eq(mz_k_rope_cpu(NULL, &rope, NULL), MZ_ERR_SHAPE);
  a.sequence = 0;
  cr_assert_eq(mz_k_attention_cpu(NULL, &a, NULL), MZ_ERR_ARG);
  a.sequence = 1;
  a.kv_heads = 3;
  a.head_width = 257;
  cr_assert_eq(mz_k_attention_cpu(NULL, &a, NULL), MZ_ERR_UNSUPPORTED);
  cr_assert_str_eq(mz_error_message(), "head width 257, at most 256");
  a.heads = a.kv_heads = INT32_MAX;
  a.head_width = 256;
  cr_assert_eq(mz_k_attention_cpu(NULL, &a, NULL), MZ_ERR_OVERFLOW);
}

/* Two positions by hand, then the definition at a width above one chunk of
 * pairs. */
Test(rope, turns_queries_and_keys_and_turns_back)
{
  float hand[2][6] = {{1, 2, 3, 4, 5, 6}, {1, 0, 0, 1, 5, 6}};
  mz_rope_t two = {1, 2, 1, 1, 2, 1e4, 0, hand};
  mz_rope_t a = {2, 9, 3, 1, 140, 1e4, 0, NULL};
  int64_t ld = 5 * 140, n = 18 * ld;
  float *x = normals(n, 31, 1.0), *before = copy_of(x, n);

  cr_assert_eq(mz_k_rope_cpu(NULL, &two, NULL), MZ_OK);
  cr_assert_eq(hand[0][1], 2.0f); /* position 0 stays */
  cr_assert_float_eq(hand[1][0], 0.540302306, 1e-7);
  cr_assert_float_eq(hand[1][1], 0.841470985, 1e-7);
  cr_assert_float_eq(hand[1][2], -0.841470985, 1e-7);
  cr_assert_float_eq(hand[1][3], 0.540302306, 1e-7);
  cr_assert_eq(hand[1][5], 6.0f); /* values stay */

  a.qkv = x;
  cr_assert_eq(mz_k_rope_cpu(NULL, &a, NULL), MZ_OK);
  for (int64_t i = 0; i < n; i++) {
    int64_t position = i / ld % 9, c = i % ld % 140, pair = c % 70;
    double angle = (double)position * pow(1e4, -2.0 * (double)pair / 140);
    double mate = (double)before[c < 70 ? i + 70 : i - 70];
    double want = (double)before[i];

    if (i % ld < 4 * 140)
      want = want * cos(angle) + (c < 70 ? -mate : mate) * sin(angle);
    /* two products and a sum of numbers up to 5 */
    cr_assert_float_eq((double)x[i], want, 1e-6);
  }
  a.inverse = 1;
  cr_assert_eq(mz_k_rope_cpu(NULL, &a, NULL), MZ_OK);
  for (int64_t i = 0; i < n; i++)
    cr_assert_float_eq(x[i], before[i], 2e-6f);
  mz_free(x);
  mz_free(before);
}
