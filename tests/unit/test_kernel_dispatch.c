/* SPDX-License-Identifier: Apache-2.0 */
/* Rows between token, send and expert order on the CPU, against plain loops in
 * double. Routes here are random rows with drops, not a gate's. */
#include "base/alloc.h"
#include "kernels/cpu/cpu.h"

#include <criterion/criterion.h>
#include <math.h>
#include <moezero/random.h>
#include <omp.h>
#include <string.h>

/* T tokens, K choices, H width; every third route or so is dropped, the others
 * have rows 0 .. rows - 1 in falling order of route. */
typedef struct rows_case {
  int64_t tokens, width, rows;
  int32_t k;
  int32_t *row;                /* [T, K] */
  float *weight, *d_weight;    /* [T, K] */
  float *x, *y, *dy, *dx;      /* [T, H] */
  float *send, *back, *d_send; /* [rows, H] */
} rows_case_t;

static void fill(float *x, int64_t n, uint32_t seed)
{
  mz_random_t r = {seed, 0, 0};

  for (int64_t i = 0; i < n; i++)
    x[i] = 2.0f * mz_random_uniform(&r, (uint64_t)i) - 1.0f;
}

static float *new_floats(int64_t n, uint32_t seed)
{
  float *x = NULL;

  cr_assert_eq(mz_new(n, "floats", &x), MZ_OK);
  fill(x, n, seed);
  return x;
}

static void setup(rows_case_t *c, int64_t tokens, int32_t k, int64_t width)
{
  mz_random_t r = {9, 0, 0};
  int64_t routes = tokens * k;

  memset(c, 0, sizeof *c);
  c->tokens = tokens;
  c->k = k;
  c->width = width;
  cr_assert_eq(mz_new(routes, "row", &c->row), MZ_OK);
  for (int64_t i = routes - 1; i >= 0; i--)
    c->row[i] =
        mz_random_uniform(&r, (uint64_t)i) < 0.3f ? -1 : (int32_t)c->rows++;
  c->weight = new_floats(routes, 1);
  c->d_weight = new_floats(routes, 2);
  c->x = new_floats(tokens * width, 3);
  c->y = new_floats(tokens * width, 4);
  c->dy = new_floats(tokens * width, 5);
  c->dx = new_floats(tokens * width, 6);
  c->send = new_floats(c->rows * width, 7);
  c->back = new_floats(c->rows * width, 8);
  c->d_send = new_floats(c->rows * width, 9);
}

static void teardown(rows_case_t *c)
{
  mz_free(c->row);
  mz_free(c->weight);
  mz_free(c->d_weight);
  mz_free(c->x);
  mz_free(c->y);
  mz_free(c->dy);
  mz_free(c->dx);
  mz_free(c->send);
  mz_free(c->back);
  mz_free(c->d_send);
}

static void run_all(rows_case_t *c)
{
  mz_permute_t permute = {c->tokens, c->width, c->k, c->row, c->x, c->send};
  mz_combine_t combine = {c->tokens, c->width, c->k, c->row,
                          c->weight, c->back,  c->y};
  mz_combine_grad_t combine_grad = {combine, c->dy, c->d_send, c->d_weight};
  mz_permute_grad_t permute_grad = {c->tokens, c->width,  c->k,
                                    c->row,    c->d_send, c->dx};

  cr_assert_eq(mz_k_permute_cpu(NULL, &permute, NULL), MZ_OK);
  cr_assert_eq(mz_k_combine_cpu(NULL, &combine, NULL), MZ_OK);
  cr_assert_eq(mz_k_combine_grad_cpu(NULL, &combine_grad, NULL), MZ_OK);
  cr_assert_eq(mz_k_permute_grad_cpu(NULL, &permute_grad, NULL), MZ_OK);
}

static void check_route(const rows_case_t *c, int64_t r)
{
  const float *x = c->x + r / c->k * c->width;
  const float *dy = c->dy + r / c->k * c->width;
  int64_t at = c->row[r] * c->width;
  double dot = 0.0;

  if (c->row[r] < 0) {
    cr_assert_eq(c->d_weight[r], 0.0f);
    return;
  }
  for (int64_t h = 0; h < c->width; h++) {
    dot += (double)dy[h] * (double)c->back[at + h];
    cr_assert_eq(c->send[at + h], x[h]);
    cr_assert_eq(c->d_send[at + h], c->weight[r] * dy[h]);
  }
  /* fp32 sums of H <= 100 products below 1 */
  cr_assert_float_eq(c->d_weight[r], dot, 1e-5);
}

static void check_token(const rows_case_t *c, int64_t t)
{
  for (int64_t h = 0; h < c->width; h++) {
    double y = 0.0, dx = 0.0;

    for (int64_t r = t * c->k; r < (t + 1) * c->k; r++) {
      if (c->row[r] < 0) continue;
      y += (double)c->weight[r] * (double)c->back[c->row[r] * c->width + h];
      dx += (double)c->d_send[c->row[r] * c->width + h];
    }
    cr_assert_float_eq(c->y[t * c->width + h], y, 1e-6);
    cr_assert_float_eq(c->dx[t * c->width + h], dx, 1e-6);
  }
}

Test(dispatch, equals_plain_loops)
{
  static const int64_t tokens[] = {0, 1, 2, 50};
  static const int64_t widths[] = {1, 15, 16, 33, 100};
  rows_case_t c;

  for (int i = 0; i < 4; i++)
    for (int w = 0; w < 5; w++)
      for (int32_t k = 1; k <= 4; k++) {
        setup(&c, tokens[i], k, widths[w]);
        run_all(&c);
        for (int64_t r = 0; r < c.tokens * k; r++)
          check_route(&c, r);
        for (int64_t t = 0; t < c.tokens; t++)
          check_token(&c, t);
        teardown(&c);
      }
}

Test(dispatch, a_token_without_a_route_gets_exact_zeros)
{
  rows_case_t c;

  setup(&c, 3, 2, 5);
  for (int r = 0; r < 6; r++)
    c.row[r] = r < 2 || r > 3 ? -1 : r - 2;
  run_all(&c);
  for (int h = 0; h < 5; h++) {
    cr_assert_eq(c.y[h], 0.0f);
    cr_assert_eq(c.dx[h], 0.0f);
    cr_assert_neq(c.y[5 + h], 0.0f);
  }
  teardown(&c);
}

/* The loss <dy, combine(back)> in double, by one element of back or weight. */
static double combine_loss(const rows_case_t *c, const double *weight,
                           const double *back)
{
  double loss = 0.0;

  for (int64_t r = 0; r < c->tokens * c->k; r++)
    for (int64_t h = 0; c->row[r] >= 0 && h < c->width; h++)
      loss += weight[r] * back[c->row[r] * c->width + h] *
              (double)c->dy[r / c->k * c->width + h];
  return loss;
}

static double slope(const rows_case_t *c, const double *weight,
                    const double *back, double *at)
{
  double here = *at, up, down;

  *at = here + 1e-4;
  up = combine_loss(c, weight, back);
  *at = here - 1e-4;
  down = combine_loss(c, weight, back);
  *at = here;
  return (up - down) / 2e-4;
}

Test(dispatch, combine_grad_equals_central_differences)
{
  double weight[7 * 3], back[7 * 3 * 6];
  rows_case_t c;

  setup(&c, 7, 3, 6);
  run_all(&c);
  for (int r = 0; r < 21; r++)
    weight[r] = (double)c.weight[r];
  for (int64_t i = 0; i < c.rows * 6; i++)
    back[i] = (double)c.back[i];
  for (int r = 0; r < 21; r++)
    cr_assert_float_eq(c.d_weight[r], slope(&c, weight, back, &weight[r]),
                       1e-6);
  for (int64_t i = 0; i < c.rows * 6; i++)
    cr_assert_float_eq(c.d_send[i], slope(&c, weight, back, &back[i]), 1e-6);
  teardown(&c);
}

Test(dispatch, combine_grad_may_write_over_back)
{
  rows_case_t apart, together;
  mz_combine_grad_t grad;

  setup(&apart, 20, 2, 37);
  setup(&together, 20, 2, 37);
  run_all(&apart);
  grad = (mz_combine_grad_t){
      {20, 37, 2, together.row, together.weight, together.back, together.y},
      together.dy,
      together.back,
      together.d_weight};
  cr_assert_eq(mz_k_combine_grad_cpu(NULL, &grad, NULL), MZ_OK);
  cr_assert_arr_eq(together.back, apart.d_send,
                   (size_t)(apart.rows * 37) * sizeof(float));
  cr_assert_arr_eq(together.d_weight, apart.d_weight, 40 * sizeof(float));
  teardown(&apart);
  teardown(&together);
}

Test(dispatch, bits_do_not_depend_on_threads)
{
  rows_case_t one, two;
  size_t tokens_bytes = 700 * 33 * sizeof(float);

  setup(&one, 700, 3, 33);
  setup(&two, 700, 3, 33);
  omp_set_num_threads(1);
  run_all(&one);
  omp_set_num_threads(2);
  run_all(&two);
  cr_assert_arr_eq(one.y, two.y, tokens_bytes);
  cr_assert_arr_eq(one.dx, two.dx, tokens_bytes);
  cr_assert_arr_eq(one.d_weight, two.d_weight, 2100 * sizeof(float));
  cr_assert_arr_eq(one.send, two.send, (size_t)one.rows * 33 * sizeof(float));
  cr_assert_arr_eq(one.d_send, two.d_send,
                   (size_t)one.rows * 33 * sizeof(float));
  teardown(&one);
  teardown(&two);
}

/* 3 sources, 2 experts; the row's first element is 100 source + 10 expert +
 * place, the second its negative. */
static const int32_t COUNTS[6] = {2, 1, 0, 3, 1, 0};
static const int32_t OFFSETS[3] = {0, 3, 7};
static const float BY_SOURCE[7] = {0, 1, 10, 110, 111, 112, 200};
static const float BY_EXPERT[7] = {0, 1, 200, 10, 110, 111, 112};

static void check_regroup(const float *from, const float *to, int to_source)
{
  float src[14], dst[14] = {0};
  mz_regroup_t a = {.num_sources = 3,
                    .num_experts = 2,
                    .counts = COUNTS,
                    .offsets = OFFSETS,
                    .max_rows = 9,
                    .width = 2,
                    .src = src,
                    .dst = dst,
                    .to_source_major = to_source};

  for (int i = 0; i < 14; i++)
    src[i] = i % 2 ? -from[i / 2] : from[i / 2];
  cr_assert_eq(mz_k_regroup_cpu(NULL, &a, NULL), MZ_OK);
  for (int i = 0; i < 14; i++)
    cr_assert_eq(dst[i], i % 2 ? -to[i / 2] : to[i / 2]);
}

Test(regroup, both_ways_by_hand)
{
  check_regroup(BY_SOURCE, BY_EXPERT, 0);
  check_regroup(BY_EXPERT, BY_SOURCE, 1);
}

Test(regroup, there_and_back_is_the_same_on_two_threads)
{
  enum { SOURCES = 5, EXPERTS = 7, WIDTH = 40 };
  int32_t counts[SOURCES * EXPERTS], offsets[EXPERTS + 1] = {0};
  mz_random_t r = {5, 0, 0};
  mz_regroup_t a = {SOURCES, EXPERTS, counts, offsets, 0, WIDTH, 0, 0, 0};
  float *x, *y, *z;
  int64_t size;

  for (int i = 0; i < SOURCES * EXPERTS; i++)
    counts[i] = (int32_t)(mz_random_u32(&r, (uint64_t)i) % 60) - 10;
  for (int i = 0; i < SOURCES * EXPERTS; i++)
    counts[i] = counts[i] < 0 ? 0 : counts[i];
  for (int e = 0; e < EXPERTS; e++) {
    offsets[e + 1] = offsets[e];
    for (int s = 0; s < SOURCES; s++)
      offsets[e + 1] += counts[s * EXPERTS + e];
  }
  size = offsets[EXPERTS] * (int64_t)WIDTH;
  x = new_floats(size, 1);
  y = new_floats(size, 2);
  z = new_floats(size, 3);
  omp_set_num_threads(2);
  a.max_rows = offsets[EXPERTS];
  a.src = x;
  a.dst = y;
  cr_assert_eq(mz_k_regroup_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_arr_neq(x, y, (size_t)size * sizeof(float));
  a.src = y;
  a.dst = z;
  a.to_source_major = 1;
  cr_assert_eq(mz_k_regroup_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_arr_eq(x, z, (size_t)size * sizeof(float));
  mz_free(x);
  mz_free(y);
  mz_free(z);
}

Test(regroup, no_rows_need_no_buffers)
{
  static const int32_t none[4] = {0};
  mz_regroup_t a = {2, 2, none, none, 0, 8, NULL, NULL, 0};
  mz_scale_rows_t b = {2, 0, none, 0, 8, NULL, NULL};

  cr_assert_eq(mz_k_regroup_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_eq(mz_k_scale_rows_cpu(NULL, &b, NULL), MZ_OK);
}

Test(scale_rows, multiplies_by_the_global_expert_plus_one)
{
  static const int32_t offsets[4] = {0, 1, 1, 3};
  static const float x[6] = {1, 2, 3, 4, 5, 6};
  static const float expected[6] = {5, 10, 21, 28, 35, 42};
  float y[6];
  mz_scale_rows_t a = {3, 4, offsets, 3, 2, x, y};

  cr_assert_eq(mz_k_scale_rows_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_arr_eq(y, expected, sizeof y);
}
