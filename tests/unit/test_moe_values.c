/* SPDX-License-Identifier: Apache-2.0 */
/* Values of the balance losses from statistics given by hand. */
#include <moezero/moe.h>

#include <criterion/criterion.h>
#include <math.h>

typedef struct stats4 {
  int64_t routed[4], kept[4], first[4], tokens;
  double probs[4], z;
} stats4_t;

/* Case C13: two ranks of 16 tokens with constant logits. */
static stats4_t constant_logits(const double logits[4], int64_t tokens,
                                const int64_t routed[4])
{
  stats4_t s = {.tokens = tokens};
  double sum = 0;

  for (int e = 0; e < 4; e++)
    sum += exp(logits[e]);
  for (int e = 0; e < 4; e++) {
    s.routed[e] = s.kept[e] = routed[e];
    s.probs[e] = (double)tokens * exp(logits[e]) / sum;
  }
  s.z = (double)tokens * log(sum) * log(sum);
  return s;
}

Test(moe_values, constant_logits_give_the_values_by_hand)
{
  mz_moe_opts_t opts = {.num_experts = 4,
                        .k = 2,
                        .aux_loss = MZ_AUX_LOAD_BALANCING,
                        .aux_scope = MZ_SCOPE_GROUP};
  const double even[4] = {0}, ten[4] = {10, 0, 0, 0};
  stats4_t a = constant_logits(even, 16, (int64_t[4]){16, 16, 0, 0});
  stats4_t b = constant_logits(ten, 16, (int64_t[4]){16, 0, 0, 0});
  stats4_t c = constant_logits(ten, 16, (int64_t[4]){16, 16, 0, 0});
  stats4_t two[2] = {a, a};

  cr_assert_eq(sizeof(stats4_t), 8 * MZ_STATS_ELEMENTS(4));
  cr_expect_float_eq(mz_moe_aux_value(&opts, two, 2, 18), 1.0, 1e-12);
  cr_expect_float_eq(mz_moe_z_value(&opts, two, 2, 18), 1.921812, 1e-6);
  two[0] = two[1] = c;
  cr_expect_float_eq(mz_moe_aux_value(&opts, two, 2, 18), 1.999818, 1e-6);
  opts.k = 1;
  two[0] = two[1] = b;
  cr_expect_float_eq(mz_moe_aux_value(&opts, two, 2, 18), 3.999455, 1e-6);
  cr_expect_float_eq(mz_moe_z_value(&opts, two, 2, 18), 100.0027, 1e-4);
  opts.aux_loss = MZ_AUX_NONE;
  cr_expect_eq(mz_moe_aux_value(&opts, two, 2, 18), 0);
}

/* Rank 0 sends its 12 tokens to expert 0, rank 1 its 4 to expert 1; gates are
 * even. Together f = (3/4, 1/4), P = 1/4: 4 * 1/4 = 1. */
Test(moe_values, scopes_differ_in_what_they_average)
{
  mz_moe_opts_t opts = {
      .num_experts = 4, .k = 1, .aux_loss = MZ_AUX_LOAD_BALANCING};
  const double even[4] = {0}, ten[4] = {10, 0, 0, 0};
  stats4_t all[3] = {constant_logits(ten, 12, (int64_t[4]){12, 0, 0, 0}),
                     constant_logits(even, 4, (int64_t[4]){0, 4, 0, 0}),
                     {{0}, {0}, {0}, 0, {0}, 0}};
  double p0 = exp(10) / (exp(10) + 3), p1 = 1 / (exp(10) + 3);
  double group = 4 * (0.75 * (12 * p0 + 1) / 16 + 0.25 * (12 * p1 + 1) / 16);
  double z = log(exp(10) + 3);

  opts.aux_scope = MZ_SCOPE_GROUP;
  cr_expect_float_eq(mz_moe_aux_value(&opts, all, 3, 18), group, 1e-12);
  cr_expect_float_eq(mz_moe_z_value(&opts, all, 3, 18),
                     (12 * z * z + 4 * log(4) * log(4)) / 16, 1e-10);
  opts.aux_scope = MZ_SCOPE_RANK; /* the rank without a token counts as 0 */
  cr_expect_float_eq(mz_moe_aux_value(&opts, all, 3, 18), (4 * p0 + 1) / 3,
                     1e-12);
  cr_expect_float_eq(mz_moe_z_value(&opts, all, 3, 18),
                     (z * z + log(4) * log(4)) / 3, 1e-10);
}

Test(moe_values, no_token_at_all_is_zero)
{
  mz_moe_opts_t opts = {
      .num_experts = 4, .k = 2, .aux_loss = MZ_AUX_LOAD_BALANCING};
  stats4_t none = {.tokens = 0};

  cr_expect_eq(mz_moe_aux_value(&opts, &none, 1, 18), 0);
  cr_expect_eq(mz_moe_z_value(&opts, &none, 1, 18), 0);
}
