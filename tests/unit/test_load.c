/* SPDX-License-Identifier: Apache-2.0 */
#include "train/load.h"

#include "plan_case.h"

enum { EXPERTS = 4, TOKENS = 16, K = 2 };

static mz_expert_load_t load_of(const int64_t *routed, const int64_t *kept)
{
  return (mz_expert_load_t){
      .num_experts = EXPERTS, .routed = routed, .kept = kept};
}

Test(load, numbers_are_those_worked_by_hand)
{
  static const int64_t routed[EXPERTS] = {10, 2, 4, 0}, kept[] = {4, 2, 4, 0};
  mz_expert_load_t load = load_of(routed, kept);

  cr_assert_eq(mz_load_dropped(&load), 6.0 / 16);
  /* mean 4: 1.5^2 + 0.5^2 + 0 + 1 */
  cr_assert_eq(mz_load_variance(&load), 3.5 / EXPERTS);
  cr_assert_eq(mz_load_largest(&load), 2.5);
}

Test(load, all_to_one_expert_is_a_variance_of_experts_less_one)
{
  static const int64_t routed[EXPERTS] = {0, 7, 0, 0};
  mz_expert_load_t load = load_of(routed, routed);

  cr_assert_eq(mz_load_variance(&load), EXPERTS - 1);
  cr_assert_eq(mz_load_largest(&load), EXPERTS);
}

Test(load, nothing_routed_is_balanced)
{
  static const int64_t none[EXPERTS];
  mz_expert_load_t load = load_of(none, none);

  cr_assert_eq(mz_load_dropped(&load), 0);
  cr_assert_eq(mz_load_variance(&load), 0);
  cr_assert_eq(mz_load_largest(&load), 1);
}

/* --- with a plan: two layers of 4 and 8 experts --- */

typedef struct watched {
  mz_decl_t *decl;
  mz_plan_t *plan;
  mz_loads_t *loads;
  int64_t counts[2][2 * EXPERTS];
  mz_moe_result_t moes[2];
  mz_step_result_t result;
} watched_t;

static void make(watched_t *w, int world, int32_t ep)
{
  mz_config_values_t c = tiny_config(ep, ep, EXPERTS, 2 * EXPERTS);
  mz_plan_opts_t opts = tiny_opts(world, 0, 1);

  *w = (watched_t){.decl = declare(&c)};
  w->plan = make_plan(w->decl, &opts);
  cr_assert_eq(mz_loads_create(w->plan, &w->loads), MZ_OK);
  for (int m = 0; m < 2; m++)
    w->moes[m] = (mz_moe_result_t){.num_experts = (m + 1) * EXPERTS,
                                   .routed = w->counts[m],
                                   .kept = w->counts[m]};
  w->result = (mz_step_result_t){.num_moes = 2, .moes = w->moes};
}

static void destroy(watched_t *w)
{
  mz_loads_destroy(&w->loads);
  cr_assert_null(w->loads);
  mz_loads_destroy(&w->loads); /* NULL is fine */
  mz_plan_destroy(&w->plan);
  mz_decl_destroy(&w->decl);
}

/* Steps in which expert `used` of layer 0 has a token, and no other. */
static void take(watched_t *w, int steps, int used)
{
  for (int i = 0; i < steps; i++) {
    memset(w->counts, 0, sizeof w->counts);
    w->counts[0][used] = 1;
    w->counts[1][0] = w->counts[1][2 * EXPERTS - 1] = 5;
    mz_loads_take(w->loads, &w->result);
  }
}

Test(load, an_expert_is_dead_after_a_window_without_a_token)
{
  watched_t w;
  const mz_expert_load_t *all;

  make(&w, 1, 1);
  all = mz_loads_all(w.loads);
  take(&w, 1, 0);
  cr_assert_eq(mz_loads_window(w.loads), 1);
  cr_assert_eq(all[0].dead, 3);
  cr_assert_eq(all[1].dead, 6);
  take(&w, MZ_LOAD_WINDOW - 1, 1); /* expert 0 had its token in the window */
  cr_assert_eq(mz_loads_window(w.loads), MZ_LOAD_WINDOW);
  cr_assert_eq(all[0].dead, 2);
  take(&w, 1, 1);
  cr_assert_eq(mz_loads_window(w.loads), MZ_LOAD_WINDOW);
  cr_assert_eq(all[0].dead, 3);
  take(&w, 1, 2); /* it comes to life */
  cr_assert_eq(all[0].dead, 2);
  cr_assert_eq(all[1].dead, 6);
  destroy(&w);
}

/* 4 bytes each of gates [T, E], log-sum-exp [T], counts [E], and [T, k] of
 * expert, weight and row. */
Test(load, routing_bytes_are_what_backward_needs_of_forward)
{
  watched_t w;
  const mz_expert_load_t *all;

  make(&w, 1, 1);
  all = mz_loads_all(w.loads);
  cr_assert_eq(all[0].routing_bytes,
               4 * (TOKENS * (EXPERTS + 1 + 3 * K) + EXPERTS));
  cr_assert_eq(all[1].routing_bytes,
               4 * (TOKENS * (2 * EXPERTS + 1 + 3 * K) + 2 * EXPERTS));
  destroy(&w);
}

/* With ep_size 2: dispatch of T k rows of 32 numbers forward, in backward the
 * gradients' and, sent again, the inputs'; and in each pass the return of as
 * many as two ranks can send to one. */
Test(load, planned_bytes_are_the_bounds_of_all_ranks)
{
  const int64_t row = 4 * 32, sent = TOKENS * K * row, got = 2 * sent;
  watched_t w;

  make(&w, 2, 2);
  cr_assert_eq(mz_load_planned_bytes(w.plan),
               2 * 2 * (3 * sent + 2 * got)); /* layers, ranks */
  destroy(&w);
  make(&w, 2, 1);
  cr_assert_eq(mz_load_planned_bytes(w.plan), 0);
  destroy(&w);
}
