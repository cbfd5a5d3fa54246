/* SPDX-License-Identifier: Apache-2.0 */
/* How the gate on the CPU chooses: noise, temperature, sigmoids, a bias, pads.
 * Published cases with given random numbers are run with numbers of our own
 * that lead to the same order: seeds are tried until a reference says so. */
#include "gate_case.h"

/* logits + noise as the contract says, in double. */
static double drawn_key(const gate_case_t *c, int64_t t, int32_t e,
                        double logit)
{
  const mz_gate_t *g = &c->gate;
  uint64_t i = (uint64_t)(place_of(g, t) * g->num_experts + e);
  double u =
      ((double)(mz_random_u32(&g->choice_random, i) >> 9) + 0.5) / 0x1p23;

  return logit - log(-log(u));
}

/* The expert of the largest key, without one of them (-1: with all). */
static int32_t drawn(const gate_case_t *c, const int *row, int64_t t,
                     int32_t without)
{
  int32_t best = -1;

  for (int32_t e = 0; e < 4; e++) {
    double key = drawn_key(c, t, e, log(row[e]));

    if (e != without &&
        (best < 0 || key > drawn_key(c, t, best, log(row[best]))))
      best = e;
  }
  return best;
}

static bool all_drawn(const gate_case_t *c, const int *rows,
                      const int32_t *first, const int32_t *wanted)
{
  for (int64_t t = 0; t < c->gate.num_tokens; t++)
    if (drawn(c, rows + 4 * t, t, first ? first[t] : -1) != wanted[t])
      return false;
  return true;
}

static void find_seed(gate_case_t *c, const int *rows, const int32_t *first,
                      const int32_t *wanted)
{
  uint64_t seed = 1;

  do {
    c->gate.choice_random = mz_random_make(seed++, 5, MZ_PURPOSE_GATE_NOISE, 2);
    cr_assert_lt(seed, 200000);
  } while (!all_drawn(c, rows, first, wanted));
}

static void number_samples(gate_case_t *c)
{
  for (int64_t t = 0; t < c->gate.num_tokens; t++)
    c->samples[t] = t;
}

/* The best two of expert 0's tokens t0, t2, t3, t5 are t2 and t3. */
static bool keeps_t2_and_t3(const mz_random_t *r)
{
  float t0 = mz_random_uniform(r, 0), t2 = mz_random_uniform(r, 2);
  float t3 = mz_random_uniform(r, 3), t5 = mz_random_uniform(r, 5);

  return fminf(t2, t3) > fmaxf(t0, t5);
}

Test(gate_golden, random_selection_keeps_by_draws_and_fills_in_token_order)
{
  static const route_t routes[6] = {DROP,       {1, 0, .7}, {0, 0, .5},
                                    {0, 1, .7}, {3, 0, .6}, DROP};
  static const int routed[4] = {4, 1, 0, 1}, kept[4] = {2, 1, 0, 1};
  static const double mean[4] = {.4, .3, .7 / 6, 1.1 / 6};
  gate_case_t c;
  uint64_t seed = 1;

  setup_rows(&c, TOP1, 6, 1);
  number_samples(&c);
  c.gate.policy = MZ_DROP_RANDOM;
  c.gate.capacity = 2;
  do
    c.gate.random = mz_random_make(seed++, 0, MZ_PURPOSE_TOKEN_SELECTION, 1);
  while (!keeps_t2_and_t3(&c.gate.random));
  run(&c);
  check_routes(&c, routes);
  check_counts(&c, routed, kept, mean);
  teardown(&c);
}

Test(gate_golden, pads_have_no_route_but_count_as_tokens)
{
  static const int32_t used[6] = {1, 1, 1, 1, 1, 0};
  static const route_t routes[6] = {{0, 0, .6}, {1, 0, .7}, {0, 1, .5},
                                    {0, 2, .7}, {3, 0, .6}, DROP};
  static const int counts[4] = {3, 1, 0, 1};
  static const double mean[4] = {.4, .3, .7 / 6, 1.1 / 6};
  mz_moe_opts_t opts = {
      .num_experts = 4, .k = 1, .aux_loss = MZ_AUX_LOAD_BALANCING};
  gate_case_t c;

  setup_rows(&c, TOP1, 6, 1);
  c.gate.used = used;
  run(&c);
  check_routes(&c, routes);
  check_counts(&c, counts, counts, mean);
  cr_assert_float_eq(mz_moe_aux_value(&opts, c.stats, 1, 0), 1.122222222, 1e-6);
  teardown(&c);
}

Test(gate_golden, rsample_moves_the_pick_and_leaves_the_gates)
{
  static const int32_t picks[6] = {0, 1, 1, 0, 3, 1};
  static const route_t routes[6] = {{0, 0, .6}, {1, 0, .7}, {1, 1, .3},
                                    {0, 1, .7}, {3, 0, .6}, DROP};
  static const int routed[4] = {2, 3, 0, 1}, kept[4] = {2, 2, 0, 1};
  static const double mean[4] = {.4, .3, .7 / 6, 1.1 / 6};
  mz_moe_opts_t opts = {
      .num_experts = 4, .k = 1, .aux_loss = MZ_AUX_LOAD_BALANCING};
  gate_case_t c;

  setup_rows(&c, TOP1, 6, 1);
  number_samples(&c);
  c.gate.policy = MZ_DROP_POSITION;
  c.gate.capacity = 2;
  c.gate.choice_noise = MZ_CHOICE_DRAWN;
  find_seed(&c, TOP1, NULL, picks);
  run(&c);
  check_routes(&c, routes);
  check_counts(&c, routed, kept, mean);
  cr_assert_float_eq(mz_moe_aux_value(&opts, c.stats, 1, 0), 1.255555556, 1e-6);
  teardown(&c);
}

Test(gate_golden, a_drawn_second_choice_has_its_clean_weight)
{
  static const int rows[16] = {5, 3, 1, 1, 6, 2, 1, 1, 1, 1, 2, 6, 3, 5, 1, 1};
  static const int32_t first[4] = {0, 0, 3, 1}, second[4] = {3, 1, 1, 0};
  static const route_t routes[8] = {
      {0, 0, 5. / 6}, {3, 0, 1. / 6}, {0, 1, .75},  {1, 0, .25},
      {3, 1, 6. / 7}, {1, 1, 1. / 7}, {1, 2, .625}, {0, 2, .375}};
  static const int counts[4] = {3, 3, 0, 2}, firsts[4] = {2, 1, 0, 1};
  static const double mean[4] = {.375, .275, .125, .225};
  mz_moe_opts_t opts = {
      .num_experts = 4, .k = 2, .aux_loss = MZ_AUX_FIRST_CHOICE};
  gate_case_t c;

  setup_rows(&c, rows, 4, 2);
  number_samples(&c);
  c.gate.policy = MZ_DROP_POSITION;
  c.gate.capacity = 4;
  c.gate.choice_noise = MZ_CHOICE_DRAWN_SECOND;
  find_seed(&c, rows, first, second);
  run(&c);
  check_routes(&c, routes);
  check_counts(&c, counts, counts, mean);
  for (int e = 0; e < 4; e++)
    cr_assert_eq(c.stats[MZ_STATS_FIRST(4) + e], firsts[e]);
  cr_assert_float_eq(mz_moe_aux_value(&opts, c.stats, 1, 0), 1.25, 1e-6);
  teardown(&c);
}

Test(gate_golden, temperatures)
{
  static const int rows[8] = {6, 2, 1, 1, 4, 3, 2, 1};
  static const double hot[8] = {.540643496, .216426251, .121465127, .121465127,
                                .375509625, .295464603, .210747651, .11827812};
  static const double cold[8] = {.682007471, .172737872, .072627328, .072627328,
                                 .435695951, .304095577, .183187582, .07702089};
  gate_case_t c;

  setup_rows(&c, rows, 2, 1);
  c.gate.temperature = 1.2f;
  run(&c);
  for (int i = 0; i < 8; i++)
    cr_assert_float_eq(c.gate.probs[i], hot[i], 1e-6);
  c.gate.temperature = 0.8f;
  run(&c);
  for (int i = 0; i < 8; i++)
    cr_assert_float_eq(c.gate.probs[i], cold[i], 1e-6);
  cr_assert_float_eq(c.gate.lse[1],
                     log(pow(4, 1.25) + pow(3, 1.25) + pow(2, 1.25) + 1), 1e-6);
  teardown(&c);
}

Test(gate_golden, losses_of_top1_to_top3)
{
  mz_moe_opts_t opts = {
      .num_experts = 4, .k = 1, .aux_loss = MZ_AUX_LOAD_BALANCING};
  gate_case_t c;

  setup_rows(&c, TOP1, 6, 1);
  run(&c);
  cr_assert_float_eq(mz_moe_aux_value(&opts, c.stats, 1, 0), 1.388888889, 1e-6);
  teardown(&c);
  setup_rows(&c, TOP2, 8, 2);
  opts.k = 2;
  opts.aux_loss = MZ_AUX_FIRST_CHOICE;
  run(&c);
  cr_assert_float_eq(mz_moe_aux_value(&opts, c.stats, 1, 0), 1.1375, 1e-6);
  opts.aux_loss = MZ_AUX_LOAD_BALANCING;
  cr_assert_float_eq(mz_moe_aux_value(&opts, c.stats, 1, 0), 1.053125, 1e-6);
  teardown(&c);
  setup_rows(&c, TOP3, 6, 3);
  opts.k = 3;
  run(&c);
  cr_assert_float_eq(mz_moe_aux_value(&opts, c.stats, 1, 0), 1.101111111, 1e-6);
  teardown(&c);
}

/* With a target of 1/k = 1/2 instead of 1/E = 1/4 every sum of squares is
 * larger by E (1/E - 1/k)^2, whatever the shares, for they sum to 1. */
Test(gate_golden, squared_shares_of_top1)
{
  static const double lambda[3] = {.01, .08, .1};
  static const double of_experts[3] = {.000472222, .003777778, .004722222};
  static const double of_choices[3] = {.002972222, .023777778, .029722222};
  mz_moe_opts_t opts = {.num_experts = 4, .k = 1, .aux_loss = MZ_AUX_SQUARED};
  gate_case_t c;
  double value;

  setup_rows(&c, TOP1, 6, 1);
  run(&c);
  value = mz_moe_aux_value(&opts, c.stats, 1, 0);
  for (int i = 0; i < 3; i++) {
    cr_assert_float_eq(lambda[i] * value, of_experts[i], 1e-8);
    cr_assert_float_eq(lambda[i] * (value + 4 * .25 * .25), of_choices[i],
                       1e-8);
  }
  teardown(&c);
}

/* Shares of the draws; the bound is five standard deviations. */
Test(gate, draws_follow_the_gates)
{
  enum { TOKENS = 40000 };
  static const float logits[4] = {1, 0, -1, -2};
  gate_case_t c;

  setup(&c, TOKENS, 4, 1, 4);
  number_samples(&c);
  c.gate.fixed_logits = logits;
  c.gate.choice_noise = MZ_CHOICE_DRAWN;
  c.gate.choice_random = mz_random_make(4, 1, MZ_PURPOSE_GATE_NOISE, 0);
  run(&c);
  for (int e = 0; e < 4; e++) {
    double p = (double)c.gate.probs[e];

    cr_assert_float_eq((double)c.stats[MZ_STATS_ROUTED(4) + e] / TOKENS, p,
                       5 * sqrt(p * (1 - p) / TOKENS));
  }
  teardown(&c);
}

/* Of 40 tokens that want one expert each stays with 8 / 40. */
Test(gate, random_selection_treats_tokens_alike_for_every_k)
{
  enum { TOKENS = 40, ROUNDS = 2000 };
  static const float logits[4] = {3, 2, 1, 0};
  gate_case_t c;

  for (int32_t k = 1; k <= 3; k++) {
    int stayed[TOKENS] = {0};

    setup(&c, TOKENS, 4, k, 4);
    number_samples(&c);
    c.gate.fixed_logits = logits;
    c.gate.policy = MZ_DROP_RANDOM;
    c.gate.capacity = 8;
    for (uint32_t i = 0; i < ROUNDS; i++) {
      c.gate.random = mz_random_make(4, i, MZ_PURPOSE_TOKEN_SELECTION, 0);
      run(&c);
      for (int t = 0; t < TOKENS; t++)
        stayed[t] += c.gate.row[t * k + k - 1] >= 0;
    }
    for (int t = 0; t < TOKENS; t++)
      cr_assert_float_eq(stayed[t] / (double)ROUNDS, .2,
                         5 * sqrt(.2 * .8 / ROUNDS));
    teardown(&c);
  }
}

Test(gate, a_pad_takes_nobodys_place)
{
  static const int32_t used[13] = {1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1};

  for (int policy = MZ_DROP_PROBS; policy <= MZ_DROP_RANDOM; policy++)
    for (int32_t k = 1; k <= 4; k++)
      for (int32_t capacity = 0; capacity <= 4; capacity += 2) {
        gate_case_t all, part;
        int64_t at = 0;

        setup_random(&all, 13, 5, k, 3);
        setup_random(&part, 13, 5, k, 3);
        all.gate.policy = part.gate.policy = (mz_drop_policy_t)policy;
        all.gate.capacity = part.gate.capacity = capacity;
        all.gate.used = used;
        for (int t = 0; t < 13; t++) { /* the same without the pads */
          if (!used[t]) continue;
          memcpy(part.x + 3 * at, all.x + 3 * t, 3 * sizeof(float));
          part.samples[at++] = all.samples[t];
        }
        part.gate.num_tokens = at;
        run(&all);
        run(&part);
        at = 0;
        for (int t = 0; t < 13; t++, at += used[t - 1])
          for (int j = 0; j < k; j++) {
            int32_t row = used[t] ? part.gate.row[at * k + j] : -1;
            float weight = used[t] ? part.gate.weight[at * k + j] : 0;

            cr_assert_eq(all.gate.row[t * k + j], row);
            cr_assert_eq(all.gate.weight[t * k + j], weight);
          }
        cr_assert_arr_eq(all.stats, part.stats, 15 * sizeof(int64_t));
        cr_assert_eq(all.stats[MZ_STATS_TOKENS(5)], 13);
        teardown(&all);
        teardown(&part);
      }
}

Test(gate, sigmoids_are_shared_in_the_statistics_alone)
{
  gate_case_t c;
  double *x, *w, gate[6], share[6] = {0};

  setup_random(&c, 21, 6, 2, 5);
  c.gate.score = MZ_SCORE_SIGMOID;
  run(&c);
  x = doubles_of(c.x, 21 * 5);
  w = doubles_of(c.w, 6 * 5);
  for (int64_t t = 0; t < 21; t++) {
    const int32_t *expert = c.gate.expert + 2 * t;
    double lse = reference_gates(&c, x, w, t, gate), sum = 0;

    cr_assert_float_eq(c.gate.lse[t], lse, 2e-6);
    for (int e = 0; e < 6; e++) {
      cr_assert_float_eq(c.gate.probs[6 * t + e], gate[e], 1e-6);
      sum += gate[e];
    }
    for (int e = 0; e < 6; e++)
      share[e] += gate[e] / sum;
    for (int j = 0; j < 2; j++)
      cr_assert_float_eq(c.gate.weight[2 * t + j],
                         gate[expert[j]] / (gate[expert[0]] + gate[expert[1]]),
                         1e-6);
  }
  for (int e = 0; e < 6; e++)
    cr_assert_float_eq(prob_sum(&c, e), share[e], 1e-5);
  mz_free(x);
  mz_free(w);
  teardown(&c);
}

/* A bias moves choices, by gates, and leaves gates and weights alone. */
static void check_bias(mz_score_t score)
{
  static const float bias[4] = {0, .25f, -.125f, .375f};
  gate_case_t c;

  setup_rows(&c, TOP2, 8, 2);
  c.gate.score = score;
  c.gate.norm_topk = 0;
  c.gate.bias = bias;
  run(&c);
  for (int64_t t = 0; t < 8; t++) {
    const float *gate = c.gate.probs + 4 * t;
    const int32_t *expert = c.gate.expert + 2 * t;

    for (int e = 0; e < 4; e++) {
      double odds = TOP2[4 * t + e];
      int better = 0;

      cr_assert_float_eq(
          gate[e], score == MZ_SCORE_SIGMOID ? odds / (1 + odds) : odds / 10,
          1e-6);
      for (int o = 0; o < 4; o++)
        better += gate[o] + bias[o] > gate[e] + bias[e] ||
                  (gate[o] + bias[o] == gate[e] + bias[e] && o < e);
      if (better < 2) cr_assert_eq(expert[better], e);
    }
    for (int j = 0; j < 2; j++)
      cr_assert_eq(c.gate.weight[2 * t + j], gate[expert[j]]);
  }
  teardown(&c);
}

Test(gate, a_bias_moves_choices_and_no_weight)
{
  check_bias(MZ_SCORE_SOFTMAX);
  check_bias(MZ_SCORE_SIGMOID);
}

Test(gate, jitter_is_a_factor_of_every_input)
{
  enum { TOKENS = 70, EXPERTS = 5, WIDTH = 300 };
  gate_case_t c;
  double *x, *w, gate[EXPERTS];

  setup_random(&c, TOKENS, EXPERTS, 2, WIDTH);
  for (int i = 0; i < EXPERTS * WIDTH; i++)
    c.w[i] *= 0.125f;
  c.gate.sequence = 7;
  c.gate.jitter = 0.25f;
  c.gate.jitter_random = mz_random_make(9, 8, MZ_PURPOSE_GATE_NOISE, 7);
  run(&c);
  x = doubles_of(c.x, TOKENS * WIDTH);
  w = doubles_of(c.w, EXPERTS * WIDTH);
  for (int64_t t = 0; t < TOKENS; t++) {
    reference_gates(&c, x, w, t, gate);
    for (int e = 0; e < EXPERTS; e++)
      cr_assert_float_eq(c.gate.probs[EXPERTS * t + e], gate[e], 2e-6);
  }
  mz_free(x);
  mz_free(w);
  teardown(&c);
}

/* What decides is in what the choice is made by: the draws, or the bias. */
Test(gate, the_gap_is_that_of_the_choice)
{
  static const int rows[4] = {5, 3, 1, 1};
  static const float bias[4] = {0, .125f, 0, 0};
  gate_case_t c;
  double key[4], best = -INFINITY, next = -INFINITY;

  setup_rows(&c, rows, 1, 1);
  c.gate.choice_noise = MZ_CHOICE_DRAWN;
  c.gate.choice_random = mz_random_make(1, 2, MZ_PURPOSE_GATE_NOISE, 3);
  run(&c);
  for (int e = 0; e < 4; e++) {
    key[e] = drawn_key(&c, 0, e, log(rows[e]));
    next = fmax(next, fmin(best, key[e]));
    best = fmax(best, key[e]);
  }
  cr_assert_float_eq(c.min_gap, best - next, 1e-5);
  c.gate.choice_noise = MZ_CHOICE_GREEDY;
  c.gate.bias = bias;
  c.min_gap = INFINITY;
  run(&c);
  cr_assert_float_eq(c.min_gap, .5 - .425, 1e-6);
  teardown(&c);
}

Test(gate, refuses_options_out_of_range)
{
  static const float bias[4] = {0};
  gate_case_t c;

  setup_rows(&c, TOP1, 6, 1);
  c.gate.temperature = -1;
  cr_assert_eq(mz_k_gate_cpu(NULL, &c.gate, NULL), MZ_ERR_ARG);
  c.gate.temperature = 0;
  c.gate.jitter = 1;
  cr_assert_eq(mz_k_gate_cpu(NULL, &c.gate, NULL), MZ_ERR_ARG);
  c.gate.jitter = 0;
  c.gate.bias = bias;
  c.gate.choice_noise = MZ_CHOICE_DRAWN;
  cr_assert_eq(mz_k_gate_cpu(NULL, &c.gate, NULL), MZ_ERR_ARG);
  teardown(&c);
}
