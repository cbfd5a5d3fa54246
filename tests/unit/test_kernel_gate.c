/* SPDX-License-Identifier: Apache-2.0 */
/* The gate on the CPU: cases worked by hand and a plain reference. */
#include "gate_case.h"

#include "plan/plan.h"

#include <omp.h>

Test(gate_golden, top1_by_position_drops_the_later_tokens)
{
  static const route_t two[6] = {{0, 0, .6}, {1, 0, .7}, {0, 1, .5},
                                 DROP,       {3, 0, .6}, DROP};
  static const route_t four[6] = {{0, 0, .6}, {1, 0, .7}, {0, 1, .5},
                                  {0, 2, .7}, {3, 0, .6}, {0, 3, .4}};
  static const int routed[4] = {4, 1, 0, 1}, kept[4] = {2, 1, 0, 1};
  static const double mean[4] = {.4, .3, .7 / 6, 1.1 / 6};
  gate_case_t c;

  setup_rows(&c, TOP1, 6, 1);
  c.gate.policy = MZ_DROP_POSITION;
  c.gate.capacity = 2;
  run(&c);
  check_routes(&c, two);
  check_counts(&c, routed, kept, mean);
  /* t5: ln 4 - ln 3 is the smallest distance of first and second. */
  cr_assert_float_eq(c.min_gap, log(4.0 / 3.0), 1e-6);
  cr_assert_float_eq(c.gate.lse[3], log(10.0), 1e-6);
  c.gate.capacity = 4;
  run(&c);
  check_routes(&c, four);
  teardown(&c);
}

Test(gate_golden, top2_by_position_ranks_first_choices_first)
{
  static const route_t routes[16] = {{0, 0, 1},   DROP,        {0, 1, 1}, DROP,
                                     DROP,        {2, 0, 1},   {1, 0, 1}, DROP,
                                     {3, 0, .75}, {2, 1, .25}, {1, 1, 1}, DROP,
                                     DROP,        DROP,        {3, 1, 1}, DROP};
  static const int routed[4] = {5, 6, 3, 2}, kept[4] = {2, 2, 2, 2};
  static const double mean[4] = {.3125, .275, .175, .2375};
  gate_case_t c;

  setup_rows(&c, TOP2, 8, 2);
  c.gate.policy = MZ_DROP_POSITION;
  c.gate.capacity = 2;
  run(&c);
  check_routes(&c, routes);
  check_counts(&c, routed, kept, mean);
  teardown(&c);
}

Test(gate_golden, top2_by_probability)
{
  static const route_t routes[16] = {
      {0, 0, 1}, DROP, {0, 1, 1}, DROP, DROP,         {2, 0, 1},
      {1, 0, 1}, DROP, {3, 0, 1}, DROP, {1, 1, .625}, {2, 1, .375},
      DROP,      DROP, {3, 1, 1}, DROP};
  gate_case_t c;

  setup_rows(&c, TOP2, 8, 2);
  c.gate.policy = MZ_DROP_PROBS;
  c.gate.capacity = 2;
  run(&c);
  check_routes(&c, routes);
  teardown(&c);
}

Test(gate_golden, top2_dropless_rows_ascend_by_route)
{
  /* A dropless expert's rows follow the routes; the published slots put first
   * choices first, which only matters where something is dropped. */
  static const route_t routes[16] = {
      {0, 0, .625},   {1, 0, .375},   {0, 1, .75},  {1, 1, .25},
      {0, 2, 4. / 7}, {2, 0, 3. / 7}, {1, 2, .625}, {0, 3, .375},
      {3, 0, .75},    {2, 1, .25},    {1, 3, .625}, {2, 2, .375},
      {0, 4, 4. / 7}, {1, 4, 3. / 7}, {3, 1, .75},  {1, 5, .25}};
  gate_case_t c;

  setup_rows(&c, TOP2, 8, 2);
  run(&c);
  check_routes(&c, routes);
  teardown(&c);
}

Test(gate_golden, top3_by_probability)
{
  static const route_t routes[18] = {{0, 0, 4. / 7},
                                     {1, 0, 3. / 7},
                                     DROP,
                                     {0, 1, 1},
                                     DROP,
                                     DROP,
                                     {0, 2, 38. / 87},
                                     {1, 1, 28. / 87},
                                     {2, 0, 21. / 87},
                                     {1, 2, 41. / 65},
                                     {2, 1, 24. / 65},
                                     DROP,
                                     {2, 2, 1},
                                     DROP,
                                     DROP,
                                     DROP,
                                     {3, 0, 1},
                                     DROP};
  static const int routed[4] = {6, 6, 5, 1}, kept[4] = {3, 3, 3, 1};
  static const double mean[4] = {1.96 / 6, 1.69 / 6, 1.37 / 6, .98 / 6};
  gate_case_t c;

  setup_rows(&c, TOP3, 6, 3);
  c.gate.policy = MZ_DROP_PROBS;
  c.gate.capacity = 3;
  run(&c);
  check_routes(&c, routes);
  check_counts(&c, routed, kept, mean);
  teardown(&c);
}

Test(gate_golden, top3_by_position_is_token_major)
{
  static const route_t routes[18] = {{0, 0, 4. / 9},
                                     {1, 0, 3. / 9},
                                     {2, 0, 2. / 9},
                                     {0, 1, 45. / 88},
                                     {1, 1, 25. / 88},
                                     {2, 1, 18. / 88},
                                     {0, 2, 38. / 87},
                                     {1, 2, 28. / 87},
                                     {2, 2, 21. / 87},
                                     DROP,
                                     DROP,
                                     DROP,
                                     DROP,
                                     DROP,
                                     DROP,
                                     DROP,
                                     {3, 0, 1},
                                     DROP};
  gate_case_t c;

  setup_rows(&c, TOP3, 6, 3);
  c.gate.policy = MZ_DROP_POSITION;
  c.gate.capacity = 3;
  run(&c);
  check_routes(&c, routes);
  teardown(&c);
}

Test(gate_golden, undivided_weights_are_the_gates)
{
  gate_case_t c;

  setup_rows(&c, TOP3, 6, 3);
  c.gate.norm_topk = 0;
  run(&c);
  cr_assert_float_eq(c.gate.weight[0], .40, 1e-6);
  cr_assert_float_eq(c.gate.weight[1], .30, 1e-6);
  cr_assert_float_eq(c.gate.weight[2], .20, 1e-6);
  cr_assert_float_eq(c.gate.weight[17], .19, 1e-6);
  teardown(&c);
}

/* f = counts / (T k), P = mean gate: E * sum f P. */
static double aux_value(const gate_case_t *c)
{
  int32_t experts = c->gate.num_experts;
  double tokens = (double)c->gate.num_tokens, sum = 0.0;

  for (int32_t e = 0; e < experts; e++)
    sum += (double)c->stats[MZ_STATS_ROUTED(experts) + e] /
           (tokens * c->gate.k) * prob_sum(c, e) / tokens;
  return experts * sum;
}

static void check_fixed(const float *logits, int32_t k, double aux, double z)
{
  gate_case_t c;

  setup(&c, 32, 4, k, 4);
  c.gate.x = c.gate.w = NULL;
  c.gate.fixed_logits = logits;
  run(&c);
  for (int32_t e = 0; e < 4; e++)
    cr_assert_eq(c.stats[MZ_STATS_ROUTED(4) + e], e < k ? 32 : 0);
  cr_assert_float_eq(aux_value(&c), aux, 2e-6);
  cr_assert_float_eq(((double *)c.stats)[MZ_STATS_Z(4)] / 32, z, 1e-5 * z);
  cr_assert_eq(c.min_gap, INFINITY);
  teardown(&c);
}

Test(gate, fixed_logits_give_the_published_losses)
{
  static const float zero[4] = {0}, ten[4] = {10};

  check_fixed(zero, 2, 1.0, 1.921812);
  check_fixed(ten, 1, 3.999455, 100.0027);
  check_fixed(ten, 2, 1.999818, 100.0027);
}

Test(gate, route_table_chooses_cyclically_with_the_actual_gates)
{
  static const int32_t table[3] = {3, 0, 2};
  static const int32_t tokens[6] = {0, 1, 2, 2, 1, 0};
  gate_case_t c;

  setup_rows(&c, TOP1, 6, 2);
  c.gate.norm_topk = 0;
  c.gate.route_table = table;
  c.gate.tokens = tokens;
  run(&c);
  for (int t = 0; t < 6; t++)
    for (int j = 0; j < 2; j++) {
      int e = (table[tokens[t]] + j) % 4;

      cr_assert_eq(c.gate.expert[2 * t + j], e);
      cr_assert_float_eq(c.gate.weight[2 * t + j], TOP1[4 * t + e] / 10.0,
                         1e-6);
    }
  cr_assert_eq(c.min_gap, INFINITY);
  teardown(&c);
}

/* How many routes of the same expert are kept before route r. */
static int32_t routes_before(const gate_case_t *c, int64_t r, const float *key)
{
  const mz_gate_t *g = &c->gate;
  int32_t before = 0;

  for (int64_t q = 0; q < g->num_tokens * g->k; q++) {
    if (q == r || g->expert[q] != g->expert[r]) continue;
    if (g->policy != MZ_DROP_POSITION && key[q] != key[r])
      before += key[q] > key[r];
    else if (g->policy == MZ_DROP_POSITION && g->k == 2 && q % 2 != r % 2)
      before += q % 2 < r % 2;
    else
      before += q < r;
  }
  return before;
}

static void reference_keys(const gate_case_t *c, float *key)
{
  const mz_gate_t *g = &c->gate;

  for (int64_t r = 0; r < g->num_tokens * g->k; r++) {
    int64_t t = r / g->k, s = g->sequence;
    int64_t place = g->samples[t / s] * s + t % s;

    key[r] =
        g->policy == MZ_DROP_RANDOM
            ? mz_random_uniform(&g->random, (uint64_t)(place * g->k + r % g->k))
            : g->probs[t * g->num_experts + g->expert[r]];
  }
}

static void check_token(const gate_case_t *c, const double *x, const double *w,
                        int64_t t)
{
  const mz_gate_t *g = &c->gate;
  double gate[64], lse = reference_gates(c, x, w, t, gate);

  cr_assert_float_eq(g->lse[t], lse, 2e-6 + 1e-6 * fabs(lse));
  for (int32_t e = 0; e < g->num_experts; e++) {
    int32_t better = 0, place = -1;
    double mine = reference_logit(c, x, w, t, e);

    cr_assert_float_eq(g->probs[t * g->num_experts + e], gate[e], 1e-6);
    for (int32_t o = 0; o < g->num_experts; o++) {
      double other = reference_logit(c, x, w, t, o);

      better += other > mine || (other == mine && o < e);
    }
    for (int32_t j = 0; j < g->k; j++)
      if (g->expert[t * g->k + j] == e) place = j;
    cr_assert_eq(place, better < g->k ? better : -1);
  }
}

static void check_rows(const gate_case_t *c)
{
  const mz_gate_t *g = &c->gate;
  int64_t routes = g->num_tokens * g->k;
  int32_t row = 0;
  float *key = NULL;

  cr_assert_eq(mz_new(routes, "keys", &key), MZ_OK);
  reference_keys(c, key);
  for (int32_t e = 0; e < g->num_experts; e++) {
    int32_t first = row, routed = 0;

    for (int64_t r = 0; r < routes; r++) {
      if (g->expert[r] != e) continue;
      routed++;
      if (g->capacity > 0 && routes_before(c, r, key) >= g->capacity)
        cr_assert_eq(g->row[r], -1);
      else
        cr_assert_eq(g->row[r], row++);
    }
    cr_assert_eq(g->kept[e], row - first);
    cr_assert_eq(c->stats[MZ_STATS_ROUTED(g->num_experts) + e], routed);
    cr_assert_eq(c->stats[MZ_STATS_KEPT(g->num_experts) + e], row - first);
  }
  mz_free(key);
}

static void check_random(int64_t tokens, int32_t experts, int32_t k,
                         int64_t width, mz_drop_policy_t policy, int32_t cap)
{
  gate_case_t c;
  double *x, *w;

  setup_random(&c, tokens, experts, k, width);
  c.gate.policy = policy;
  c.gate.capacity = cap;
  c.gate.sequence = 5;
  c.gate.random = mz_random_make(7, 3, MZ_PURPOSE_TOKEN_SELECTION, 2);
  x = doubles_of(c.x, tokens * width);
  w = doubles_of(c.w, experts * width);
  run(&c);
  for (int64_t t = 0; t < tokens; t++)
    check_token(&c, x, w, t);
  check_rows(&c);
  mz_free(x);
  mz_free(w);
  teardown(&c);
}

Test(gate, equals_a_plain_reference)
{
  static const int64_t tokens[] = {0, 1, 2, 33, 60};
  static const int32_t shapes[][3] = {{1, 1, 3}, {4, 1, 4},  {4, 2, 2},
                                      {8, 3, 7}, {5, 5, 16}, {33, 8, 20}};

  for (int i = 0; i < 5; i++)
    for (int s = 0; s < 6; s++)
      for (int32_t cap = 0; cap <= 6; cap += 3)
        for (int policy = MZ_DROP_PROBS; policy <= MZ_DROP_RANDOM; policy++)
          check_random(tokens[i], shapes[s][0], shapes[s][1], shapes[s][2],
                       (mz_drop_policy_t)policy, cap);
}

Test(gate, all_tokens_to_one_expert)
{
  static const float logits[4] = {2, -1, -1, -1};
  gate_case_t c;

  for (int policy = MZ_DROP_PROBS; policy <= MZ_DROP_RANDOM; policy++) {
    setup(&c, 20, 4, 1, 4);
    c.gate.fixed_logits = logits;
    c.gate.capacity = 5;
    c.gate.policy = (mz_drop_policy_t)policy;
    run(&c);
    check_rows(&c);
    cr_assert_eq(c.gate.kept[0], 5);
    cr_assert_eq(c.stats[MZ_STATS_ROUTED(4)], 20);
    for (int t = 0; t < 20; t++) /* equal keys: the earlier token stays */
      if (policy != MZ_DROP_RANDOM) cr_assert_eq(c.gate.row[t], t < 5 ? t : -1);
    teardown(&c);
  }
}

/* --- dropping by probability where every logit is negative --- */

enum { MANY = 64, OF = 8, TWO = 2 };

/* Logits in [-9, -5), plus a shift; multiples of 2^-10, so that the shift does
 * not round them. */
static void setup_negative(gate_case_t *c, double factor, float shift)
{
  mz_random_t random = {18, 0, 0};

  setup(c, MANY, OF, TWO, OF);
  for (int64_t i = 0; i < MANY * OF; i++) {
    float u = mz_random_uniform(&random, (uint64_t)i);
    c->x[i] = -9.0f + floorf(u * 4096.0f) / 1024.0f + shift;
  }
  for (int e = 0; e < OF; e++)
    c->w[(OF + 1) * e] = 1.0f;
  c->gate.policy = MZ_DROP_PROBS;
  c->gate.capacity = (int32_t)mz_route_capacity(MANY, OF, TWO, factor, 0);
}

/* Routes of the same expert that have the better gate, or an equal one of an
 * earlier token. */
static int before(const mz_gate_t *g, int64_t r)
{
  int32_t e = g->expert[r];
  float gate = g->probs[r / TWO * OF + e];
  int num = 0;

  for (int64_t o = 0; o < MANY * TWO; o++) {
    float other = g->probs[o / TWO * OF + e];

    num += g->expert[o] == e && (other > gate || (other == gate && o < r));
  }
  return num;
}

static void expect_most_probable(const gate_case_t *c)
{
  const mz_gate_t *g = &c->gate;
  int64_t kept = 0, wanted = 0;

  for (int64_t r = 0; r < MANY * TWO; r++) {
    cr_assert_eq(g->row[r] >= 0, before(g, r) < g->capacity, "route %d",
                 (int)r);
    kept += g->row[r] >= 0;
  }
  for (int e = 0; e < OF; e++) {
    int64_t routed = c->stats[MZ_STATS_ROUTED(OF) + e];
    wanted += routed < g->capacity ? routed : g->capacity;
  }
  cr_assert_eq(kept, wanted);
}

Test(gate, negative_logits_drop_the_least_probable_alone)
{
  static const double factors[] = {8.0, 1.0};
  static const int32_t capacities[] = {128, 16};

  for (int i = 0; i < 2; i++) {
    gate_case_t c, shifted;
    int64_t kept = 0;

    setup_negative(&c, factors[i], 0);
    setup_negative(&shifted, factors[i], 100);
    cr_assert_eq(c.gate.capacity, capacities[i]);
    run(&c);
    run(&shifted);
    expect_most_probable(&c);
    for (int e = 0; e < OF; e++)
      kept += c.gate.kept[e];
    cr_assert(i == 0 ? kept == MANY * TWO : kept < MANY * TWO, "%d kept",
              (int)kept);
    cr_assert_arr_eq(shifted.gate.expert, c.gate.expert,
                     MANY * TWO * sizeof(int32_t));
    cr_assert_arr_eq(shifted.gate.row, c.gate.row,
                     MANY * TWO * sizeof(int32_t));
    cr_assert_arr_eq(shifted.gate.weight, c.gate.weight,
                     MANY * TWO * sizeof(float));
    teardown(&c);
    teardown(&shifted);
  }
}

Test(gate, statistics_and_gap_are_added_to)
{
  gate_case_t c;

  setup_rows(&c, TOP1, 6, 1);
  run(&c);
  run(&c);
  cr_assert_eq(c.stats[MZ_STATS_ROUTED(4)], 8);
  cr_assert_eq(c.stats[MZ_STATS_TOKENS(4)], 12);
  cr_assert_float_eq(prob_sum(&c, 0), 4.8, 1e-5);
  c.min_gap = 0.125f;
  run(&c);
  cr_assert_eq(c.min_gap, 0.125f);
  teardown(&c);
}

Test(gate, k_equal_to_e_leaves_the_gap_alone)
{
  gate_case_t c;

  setup_rows(&c, TOP1, 6, 4);
  run(&c);
  cr_assert_eq(c.min_gap, INFINITY);
  for (int e = 0; e < 4; e++)
    cr_assert_eq(c.gate.kept[e], 6);
  teardown(&c);
}

Test(gate, nan_still_gives_distinct_experts)
{
  gate_case_t c;

  setup_random(&c, 9, 5, 3, 4);
  for (int i = 0; i < 20; i++)
    c.x[i] = NAN;
  c.gate.capacity = 2;
  run(&c);
  for (int t = 0; t < 9; t++) {
    const int32_t *e = c.gate.expert + 3 * t;

    for (int j = 0; j < 3; j++)
      cr_assert(e[j] >= 0 && e[j] < 5);
    cr_assert(e[0] != e[1] && e[1] != e[2] && e[0] != e[2]);
  }
  for (int e = 0; e < 5; e++)
    cr_assert_leq(c.gate.kept[e], 2);
  teardown(&c);
}

Test(gate, no_tokens_need_no_buffers)
{
  gate_case_t c;

  setup(&c, 0, 4, 2, 8);
  c.gate.samples = NULL;
  c.gate.kept[2] = 7;
  c.gate.capacity = 3;
  run(&c);
  for (int e = 0; e < 4; e++)
    cr_assert_eq(c.gate.kept[e], 0);
  for (int i = 0; i < MZ_STATS_ELEMENTS(4); i++)
    cr_assert_eq(c.stats[i], 0);
  cr_assert_eq(c.min_gap, INFINITY);
  teardown(&c);
}

Test(gate, refuses_what_it_cannot_count)
{
  gate_case_t c;

  setup(&c, 0, 4, 2, 8);
  c.gate.k = 5;
  cr_assert_eq(mz_k_gate_cpu(NULL, &c.gate, NULL), MZ_ERR_ARG);
  c.gate.k = 2;
  c.gate.num_tokens = INT64_C(1) << 30; /* 2^31 routes */
  cr_assert_eq(mz_k_gate_cpu(NULL, &c.gate, NULL), MZ_ERR_OVERFLOW);
  teardown(&c);
}

Test(gate, bits_do_not_depend_on_threads)
{
  gate_case_t one, two;
  gate_case_t *both[2] = {&one, &two};

  for (int i = 0; i < 2; i++) {
    setup_random(both[i], 5000, 8, 2, 6);
    both[i]->gate.capacity = 700;
    both[i]->gate.policy = MZ_DROP_PROBS;
    omp_set_num_threads(i + 1);
    run(both[i]);
  }
  cr_assert_arr_eq(one.gate.probs, two.gate.probs, 5000 * 8 * sizeof(float));
  cr_assert_arr_eq(one.gate.row, two.gate.row, 10000 * sizeof(int32_t));
  cr_assert_arr_eq(one.gate.weight, two.gate.weight, 10000 * sizeof(float));
  cr_assert_arr_eq(one.stats, two.stats,
                   MZ_STATS_ELEMENTS(8) * sizeof(int64_t));
  cr_assert_eq(one.gate.kept[0], 700); /* so something was dropped */
  cr_assert_eq(one.min_gap, two.min_gap);
  teardown(&one);
  teardown(&two);
}
