/* SPDX-License-Identifier: Apache-2.0 */
/* The gate's gradient on the CPU: cases worked by hand, and central
 * differences of a forward pass in double with the selection held fixed. */
#include "gate_case.h"

#include <omp.h>

typedef struct grad_case {
  gate_case_t c;
  mz_gate_grad_t grad;
  float *d_weight, *dx, *dw;
  int64_t *counts;
  double *sums;
} grad_case_t;

/* Of a forward call that has run. */
static void setup_grad(grad_case_t *g)
{
  const mz_gate_t *f = &g->c.gate;
  int64_t tokens = f->num_tokens, experts = f->num_experts;

  memset(&g->grad, 0, sizeof g->grad);
  cr_assert_eq(mz_new(tokens * f->k, "d_weight", &g->d_weight), MZ_OK);
  cr_assert_eq(mz_new(tokens * experts, "dlogits", &g->grad.dlogits), MZ_OK);
  cr_assert_eq(mz_new(tokens * f->width, "dx", &g->dx), MZ_OK);
  cr_assert_eq(mz_new(experts * f->width, "dw", &g->dw), MZ_OK);
  cr_assert_eq(mz_new(experts, "counts", &g->counts), MZ_OK);
  cr_assert_eq(mz_new(experts, "sums", &g->sums), MZ_OK);
  g->grad.aux_sums = g->sums;
  g->grad.forward = *f;
  g->grad.d_weight = g->d_weight;
  g->grad.aux_counts = g->counts;
  g->grad.dx = g->dx;
  g->grad.dw = g->dw;
}

static void teardown_grad(grad_case_t *g)
{
  mz_free(g->d_weight);
  mz_free(g->grad.dlogits);
  mz_free(g->dx);
  mz_free(g->dw);
  mz_free(g->counts);
  mz_free(g->sums);
  teardown(&g->c);
}

static void run_grad(grad_case_t *g)
{
  cr_assert_eq(mz_k_gate_grad_cpu(NULL, &g->grad, NULL), MZ_OK);
}

static void setup_golden(grad_case_t *g, const int *rows, int64_t tokens,
                         int32_t k, int32_t capacity)
{
  setup_rows(&g->c, rows, tokens, k);
  g->c.gate.policy = MZ_DROP_POSITION;
  g->c.gate.capacity = capacity;
  run(&g->c);
  setup_grad(g);
}

/* With w the identity, dx equals dlogits. */
static void check_dlogits(const grad_case_t *g, const double *expected,
                          int64_t tokens)
{
  for (int64_t i = 0; i < tokens * 4; i++) {
    cr_assert_float_eq(g->grad.dlogits[i], expected[i], 1e-6, "at %d", (int)i);
    cr_assert_eq(g->dx[i], g->grad.dlogits[i]);
  }
}

Test(gate_grad_golden, balance_loss_of_top1)
{
  static const double expected[24] = {
      .086666667,  -.037777778, -.03,        -.018888889, .031111111,
      -.015555556, -.013333333, -.002222222, .088888889,  -.046666667,
      -.026666667, -.015555556, .077777778,  -.022222222, -.033333333,
      -.022222222, .031111111,  -.004444444, -.013333333, -.013333333,
      .088888889,  -.033333333, -.044444444, -.011111111};
  static const int64_t counts[4] = {4, 1, 0, 1};
  grad_case_t g;

  setup_golden(&g, TOP1, 6, 1, 2);
  memcpy(g.counts, counts, sizeof counts);
  g.grad.aux_scale = 4.0 / (6.0 * 6.0); /* E ce / S = E counts / S^2 */
  run_grad(&g);
  check_dlogits(&g, expected, 6);
  teardown_grad(&g);
}

Test(gate_grad_golden, balance_loss_of_first_choices)
{
  static const double t0[4] = {.0375, -.015, -.0175, -.005};
  static const double t4[4] = {.01375, .00125, -.0225, .0075};
  static const int64_t counts[4] = {4, 2, 0, 2};
  grad_case_t g;

  setup_golden(&g, TOP2, 8, 2, 2);
  memcpy(g.counts, counts, sizeof counts);
  g.grad.aux_scale = 4.0 / 64.0;
  run_grad(&g);
  for (int e = 0; e < 4; e++) {
    cr_assert_float_eq(g.grad.dlogits[e], t0[e], 1e-7);
    cr_assert_float_eq(g.grad.dlogits[16 + e], t4[e], 1e-7);
  }
  teardown_grad(&g);
}

Test(gate_grad_golden, weights_of_top1_are_gates)
{
  static const double expected[24] = {
      .24, -.12, -.06, -.06, -.14, .42, -.14, -.14, .75, -.45, -.15, -.15,
      0.0, 0.0,  0.0,  0.0,  -.3,  -.6, -.3,  1.2,  0.0, 0.0,  0.0,  0.0};
  grad_case_t g;

  setup_golden(&g, TOP1, 6, 1, 2);
  for (int t = 0; t < 6; t++)
    g.d_weight[t] = (float)(t + 1);
  run_grad(&g);
  check_dlogits(&g, expected, 6);
  teardown_grad(&g);
}

Test(gate_grad_golden, divided_weights_of_top2)
{
  static const double expected[32] = {
      .46875,     -.46875, 0,           0,   .46875, -.46875,   0,          0,
      .734693878, 0,       -.734693878, 0,   0,      0,         0,          0,
      0,          0,       -.75,        .75, 0,      1.0546875, -1.0546875, 0,
      0,          0,       0,           0,   0,      0,         0,          0};
  grad_case_t g;

  setup_golden(&g, TOP2, 8, 2, 4);
  for (int t = 0; t < 8; t++) {
    g.d_weight[2 * t] = (float)(1 + t);
    g.d_weight[2 * t + 1] = 0.5f * (float)t - 1.0f;
  }
  run_grad(&g);
  check_dlogits(&g, expected, 8);
  for (int e = 0; e < 4; e++) /* one survivor: its weight is the constant 1 */
    cr_assert_eq(g.grad.dlogits[3 * 4 + e], 0.0f);
  teardown_grad(&g);
}

/* The loss whose gradient is asked for, in double, routes held fixed. */
static double token_loss(const grad_case_t *g, const double *x, const double *w,
                         int64_t t)
{
  const mz_gate_t *f = &g->c.gate;
  double gate[64], lse = reference_gates(&g->c, x, w, t, gate);
  double loss = g->grad.z_scale * lse * lse, all = 0.0, sum = 0.0;

  for (int32_t e = 0; e < f->num_experts; e++)
    all += gate[e];
  for (int32_t e = 0; e < f->num_experts; e++)
    loss += (g->grad.aux_scale * (double)g->counts[e] +
             g->grad.sums_scale * (g->sums[e] - g->grad.sums_mean)) *
            gate[e] / all;
  for (int64_t r = t * f->k; r < (t + 1) * f->k; r++)
    if (f->row[r] >= 0) sum += gate[f->expert[r]];
  if (f->k == 1 || !f->norm_topk) sum = 1.0;
  for (int64_t r = t * f->k; r < (t + 1) * f->k; r++)
    if (f->row[r] >= 0)
      loss += (double)g->d_weight[r] * gate[f->expert[r]] / sum;
  return loss;
}

static double loss_of(const grad_case_t *g, const double *x, const double *w)
{
  double loss = 0.0;

  for (int64_t t = 0; t < g->c.gate.num_tokens; t++)
    loss += token_loss(g, x, w, t);
  return loss;
}

/* Central difference for element *at of x or w. */
static double slope(const grad_case_t *g, const double *x, const double *w,
                    double *at)
{
  const double step = 1e-5;
  double here = *at, up, down;

  *at = here + step;
  up = loss_of(g, x, w);
  *at = here - step;
  down = loss_of(g, x, w);
  *at = here;
  return (up - down) / (2 * step);
}

/* fp32 arithmetic on numbers around 1: 2e-5 leaves a factor of ten. */
static void check_slopes(grad_case_t *g, float dx_before, float dw_before)
{
  const mz_gate_t *f = &g->c.gate;
  double *x = doubles_of(g->c.x, f->num_tokens * f->width);
  double *w = doubles_of(g->c.w, f->num_experts * f->width);

  for (int64_t i = 0; i < f->num_tokens * f->width; i++)
    cr_assert_float_eq(g->dx[i], slope(g, x, w, &x[i]) + (double)dx_before,
                       2e-5);
  for (int64_t i = 0; i < f->num_experts * f->width; i++)
    cr_assert_float_eq(g->dw[i], slope(g, x, w, &w[i]) + (double)dw_before,
                       2e-5);
  mz_free(x);
  mz_free(w);
}

typedef struct terms {
  double aux, sums, z; /* scales */
} terms_t;

/* The gate of @p like's options on random inputs. */
static void check_random(const mz_gate_t *like, terms_t terms)
{
  const int64_t tokens = 13, width = 5;
  const int32_t experts = 6;
  int32_t k = like->k;
  grad_case_t g;

  setup_random(&g.c, tokens, experts, k, width);
  g.c.gate.norm_topk = like->norm_topk;
  g.c.gate.capacity = like->capacity;
  g.c.gate.score = like->score;
  g.c.gate.temperature = like->temperature;
  g.c.gate.jitter = like->jitter;
  g.c.gate.jitter_random = mz_random_make(3, 2, MZ_PURPOSE_GATE_NOISE, 1);
  g.c.gate.used = like->used;
  run(&g.c);
  setup_grad(&g);
  fill(g.d_weight, tokens * k, 3);
  for (int64_t e = 0; e < experts; e++) {
    g.counts[e] = g.c.stats[MZ_STATS_ROUTED(experts) + e];
    g.sums[e] = ((double *)g.c.stats)[MZ_STATS_PROBS(experts) + e];
  }
  g.grad.aux_scale = terms.aux;
  g.grad.z_scale = terms.z;
  g.grad.sums_scale = terms.sums;
  g.grad.sums_mean = (double)tokens / experts;
  for (int64_t i = 0; i < tokens * width; i++)
    g.dx[i] = 2.0f;
  for (int64_t i = 0; i < experts * width; i++)
    g.dw[i] = NAN; /* written, not added to */
  run_grad(&g);
  check_slopes(&g, 2.0f, 0.0f);
  for (int64_t i = 0; i < experts * width; i++)
    g.dw[i] = 3.0f;
  g.grad.accumulate = 1;
  for (int64_t i = 0; i < tokens * width; i++)
    g.dx[i] = -1.0f;
  run_grad(&g);
  check_slopes(&g, -1.0f, 3.0f);
  teardown_grad(&g);
}

static void check_capacities(mz_gate_t like, terms_t terms)
{
  for (like.k = 1; like.k <= 6; like.k++)
    for (like.norm_topk = 0; like.norm_topk <= 1; like.norm_topk++)
      for (like.capacity = 0; like.capacity <= 4; like.capacity += 2)
        check_random(&like, terms);
}

Test(gate_grad, equals_central_differences)
{
  check_capacities((mz_gate_t){0}, (terms_t){0});
  check_capacities((mz_gate_t){0}, (terms_t){.aux = 0.02});
  check_capacities((mz_gate_t){0}, (terms_t){.aux = 0.03, .z = 0.01});
}

Test(gate_grad, of_squared_shares_equals_central_differences)
{
  check_capacities((mz_gate_t){0}, (terms_t){.sums = 0.05});
  check_capacities((mz_gate_t){0}, (terms_t){.aux = 0.02, .sums = 0.05});
}

Test(gate_grad, with_sigmoids_equals_central_differences)
{
  mz_gate_t like = {.score = MZ_SCORE_SIGMOID};

  check_capacities(like, (terms_t){0});
  check_capacities(like, (terms_t){.aux = 0.03, .sums = 0.05});
}

Test(gate_grad, at_a_temperature_equals_central_differences)
{
  mz_gate_t like = {.temperature = 0.8f};

  check_capacities(like, (terms_t){.aux = 0.03, .sums = 0.05, .z = 0.01});
  like.score = MZ_SCORE_SIGMOID;
  like.temperature = 1.7f;
  check_capacities(like, (terms_t){.aux = 0.03});
}

Test(gate_grad, with_jitter_equals_central_differences)
{
  mz_gate_t like = {.jitter = 0.3f, .temperature = 1.2f};

  check_capacities(like, (terms_t){.aux = 0.03, .z = 0.01});
}

Test(gate_grad, of_pads_comes_from_the_balance_alone)
{
  static const int32_t used[13] = {1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0};
  mz_gate_t like = {.used = used};

  check_capacities(like, (terms_t){.aux = 0.03, .z = 0.01});
}

/* More tokens and channels than one tile of the jittered products has. */
Test(gate_grad, with_jitter_on_many_tiles_equals_central_differences)
{
  enum { TOKENS = 70, EXPERTS = 3, WIDTH = 300 };
  grad_case_t g;
  double *x, *w;

  setup_random(&g.c, TOKENS, EXPERTS, 2, WIDTH);
  for (int64_t i = 0; i < EXPERTS * WIDTH; i++)
    g.c.w[i] *= 0.125f;
  g.c.gate.sequence = 7;
  g.c.gate.jitter = 0.01f;
  g.c.gate.jitter_random = mz_random_make(9, 8, MZ_PURPOSE_GATE_NOISE, 7);
  run(&g.c);
  setup_grad(&g);
  fill(g.d_weight, TOKENS * 2, 3);
  run_grad(&g);
  x = doubles_of(g.c.x, TOKENS * WIDTH);
  w = doubles_of(g.c.w, EXPERTS * WIDTH);
  for (int64_t i = 0; i < TOKENS * WIDTH; i += 97)
    cr_assert_float_eq(g.dx[i], slope(&g, x, w, &x[i]), 2e-5);
  for (int64_t i = 0; i < EXPERTS * WIDTH; i += 41)
    cr_assert_float_eq(g.dw[i], slope(&g, x, w, &w[i]), 5e-5);
  mz_free(x);
  mz_free(w);
  teardown_grad(&g);
}

/* lambda sum (P_e - 1/E)^2 with lambda 0.08. */
Test(gate_grad_golden, squared_shares)
{
  static const double expected[24] = {
      .00112,      -.00016,     -.000568889, -.000391111, .00032,
      .000373333,  -.000435556, -.000257778, .001066667,  -.00016,
      -.000542222, -.000364444, .00112,      -.000106667, -.000595556,
      -.000417778, .000475556,  .000417778,  -.00028,     -.000613333,
      .001155556,  .000066667,  -.000933333, -.000288889};
  grad_case_t g;

  setup_golden(&g, TOP1, 6, 1, 2);
  for (int e = 0; e < 4; e++)
    g.sums[e] = prob_sum(&g.c, e);
  g.grad.sums_scale = 0.08 * 2 / 36;
  g.grad.sums_mean = 6.0 / 4;
  run_grad(&g);
  check_dlogits(&g, expected, 6);
  for (int i = 0; i < 24; i++)
    cr_assert_float_eq(g.grad.dlogits[i], expected[i], 1e-8);
  teardown_grad(&g);
}

Test(gate_grad, fixed_logits_send_nothing_to_x_and_w)
{
  static const float logits[4] = {2, 1, 0, 0};
  grad_case_t g;

  setup(&g.c, 3, 4, 2, 2);
  g.c.gate.fixed_logits = logits;
  run(&g.c);
  setup_grad(&g);
  for (int i = 0; i < 6; i++)
    g.d_weight[i] = (float)i;
  for (int i = 0; i < 8; i++)
    g.dw[i] = NAN;
  run_grad(&g);
  for (int i = 0; i < 6; i++)
    cr_assert_eq(g.dx[i], 0.0f);
  for (int i = 0; i < 8; i++)
    cr_assert_eq(g.dw[i], 0.0f);
  cr_assert_neq(g.grad.dlogits[0], 0.0f);
  teardown_grad(&g);
}

Test(gate_grad, no_tokens_write_a_zero_gradient)
{
  grad_case_t g;

  setup(&g.c, 0, 4, 2, 2);
  run(&g.c);
  setup_grad(&g);
  for (int i = 0; i < 8; i++)
    g.dw[i] = 5.0f;
  g.grad.accumulate = 1;
  run_grad(&g);
  for (int i = 0; i < 8; i++)
    cr_assert_eq(g.dw[i], 5.0f);
  g.grad.accumulate = 0;
  run_grad(&g);
  for (int i = 0; i < 8; i++)
    cr_assert_eq(g.dw[i], 0.0f);
  teardown_grad(&g);
}

Test(gate_grad, dlogits_do_not_depend_on_threads)
{
  grad_case_t one, two;
  grad_case_t *both[2] = {&one, &two};

  for (int i = 0; i < 2; i++) {
    omp_set_num_threads(i + 1);
    setup_random(&both[i]->c, 5000, 8, 2, 6);
    run(&both[i]->c);
    setup_grad(both[i]);
    fill(both[i]->d_weight, 10000, 4);
    both[i]->grad.z_scale = 0.001;
    run_grad(both[i]);
  }
  cr_assert_arr_eq(one.grad.dlogits, two.grad.dlogits,
                   5000 * 8 * sizeof(float));
  teardown_grad(&one);
  teardown_grad(&two);
}
