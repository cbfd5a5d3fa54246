/* SPDX-License-Identifier: Apache-2.0 */
/* Parameter groups: what each gives, which entry takes which tensor, and their
 * order in a unit. */
#include "plan/plan.h"

#include "base/check.h"

#include <criterion/criterion.h>
#include <moezero/config.h>
#include <stdio.h>
#include <string.h>

/* Two dense tensors of block 0, and two experts of a matrix and a bias. */
static mz_decl_t *declare(void)
{
  mz_tensor_opts_t weight = {
      .name = "a.weight", .ndim = 2, .shape = {4, 8}, .block = 0};
  mz_tensor_opts_t bias = {.name = "a.bias",
                           .ndim = 1,
                           .shape = {4},
                           .param_group = MZ_GROUP_NO_DECAY,
                           .block = 0};
  mz_moe_opts_t moe = {.name = "moe", .num_experts = 2, .ep_size = 1, .k = 1};
  mz_decl_t *decl = NULL;
  int32_t id;

  cr_assert_eq(mz_decl_create(&decl), MZ_OK);
  cr_assert_eq(mz_decl_tensor(decl, &weight, &id), MZ_OK);
  cr_assert_eq(mz_decl_tensor(decl, &bias, &id), MZ_OK);
  cr_assert_eq(mz_decl_moe(decl, &moe, &id), MZ_OK);
  weight.name = "up.weight";
  bias.name = "up.bias";
  cr_assert_eq(mz_decl_expert_tensor(decl, 0, &weight, &id), MZ_OK);
  cr_assert_eq(mz_decl_expert_tensor(decl, 0, &bias, &id), MZ_OK);
  return decl;
}

static mz_param_group_config_t entry(const char *pattern, mz_which_t which,
                                     mz_hyper_t hyper)
{
  mz_param_group_config_t e = {.which = which, .hyper = hyper};

  snprintf(e.pattern, sizeof e.pattern, "%s", pattern);
  return e;
}

static const mz_hyper_t *hyper_of(const mz_decl_t *decl, const char *name)
{
  int32_t t = mz_decl_find_tensor(decl, name);

  cr_assert_geq(t, 0, "%s", name);
  return mz_decl_group_hyper(decl, mz_decl_tensor_group(decl, t));
}

static const mz_hyper_t rate = {.gives = MZ_GIVES_LR, .lr = 0.5};
static const mz_hyper_t decay = {.gives = MZ_GIVES_WEIGHT_DECAY,
                                 .weight_decay = 0.25};

Test(param_groups, every_declaration_has_one_with_and_one_without_decay)
{
  mz_decl_t *decl = declare();

  cr_expect_eq(mz_decl_num_param_groups(decl), 2);
  cr_expect_eq(mz_decl_group_hyper(decl, MZ_GROUP_DECAY)->gives, 0);
  cr_expect_eq(mz_decl_group_hyper(decl, MZ_GROUP_NO_DECAY)->gives,
               MZ_GIVES_WEIGHT_DECAY);
  cr_expect_eq(mz_decl_group_hyper(decl, MZ_GROUP_NO_DECAY)->weight_decay, 0);
  mz_decl_destroy(&decl);
}

Test(param_groups, the_first_entry_that_matches_wins)
{
  mz_optimizer_config_t o = {.num_groups = 2};
  mz_decl_t *decl = declare();

  o.groups[0] = entry("moe.experts.1.*", MZ_ALL, rate);
  o.groups[1] = entry("*weight", MZ_ALL, decay);
  cr_assert_eq(mz_decl_apply_groups(decl, &o), MZ_OK, "%s", mz_error_last());
  cr_expect_eq(hyper_of(decl, "moe.experts.1.up.weight")->gives, MZ_GIVES_LR);
  cr_expect_eq(hyper_of(decl, "moe.experts.1.up.weight")->lr, 0.5);
  cr_expect_eq(hyper_of(decl, "moe.experts.0.up.weight")->weight_decay, 0.25);
  cr_expect_eq(hyper_of(decl, "a.weight")->weight_decay, 0.25);
  cr_expect_eq(hyper_of(decl, "moe.experts.0.up.bias")->weight_decay, 0);
  cr_expect_eq(mz_decl_tensor_group(decl, 1), MZ_GROUP_NO_DECAY);
  mz_decl_destroy(&decl);
}

Test(param_groups, biases_have_no_decay_unless_the_entry_gives_it)
{
  mz_optimizer_config_t o = {.num_groups = 2};
  mz_decl_t *decl = declare();

  o.groups[0] = entry("a.*", MZ_ALL, rate);
  o.groups[1] = entry("*", MZ_ALL, decay);
  cr_assert_eq(mz_decl_apply_groups(decl, &o), MZ_OK, "%s", mz_error_last());
  cr_expect_eq(hyper_of(decl, "a.bias")->gives,
               MZ_GIVES_LR | MZ_GIVES_WEIGHT_DECAY);
  cr_expect_eq(hyper_of(decl, "a.bias")->weight_decay, 0);
  cr_expect_eq(hyper_of(decl, "a.weight")->gives, MZ_GIVES_LR);
  cr_expect_eq(hyper_of(decl, "moe.experts.0.up.bias")->weight_decay, 0.25);
  mz_decl_destroy(&decl);
}

Test(param_groups, experts_and_dense_tensors_are_told_apart)
{
  mz_optimizer_config_t o = {.num_groups = 2};
  mz_decl_t *decl = declare();

  o.groups[0] = entry("*", MZ_EXPERTS_ONLY, rate);
  o.groups[1] = entry("*", MZ_DENSE_ONLY, decay);
  cr_assert_eq(mz_decl_apply_groups(decl, &o), MZ_OK, "%s", mz_error_last());
  cr_expect_eq(hyper_of(decl, "moe.experts.0.up.bias")->lr, 0.5);
  cr_expect_eq(hyper_of(decl, "moe.experts.1.up.weight")->lr, 0.5);
  cr_expect_eq(hyper_of(decl, "a.bias")->weight_decay, 0.25);
  mz_decl_destroy(&decl);
}

Test(param_groups, an_own_group_takes_the_rest_from_its_base)
{
  mz_param_group_opts_t first = {.base = MZ_GROUP_NO_DECAY, .hyper = rate};
  mz_param_group_opts_t second = {
      .hyper = {.gives = MZ_GIVES_BETAS, .beta1 = 0.5, .beta2 = 0.75}};
  mz_optimizer_config_t o = {.num_groups = 1};
  mz_tensor_opts_t t = {.name = "b", .ndim = 1, .shape = {3}};
  mz_decl_t *decl = declare();
  const mz_hyper_t *h;
  int32_t id;

  cr_assert_eq(mz_decl_param_group(decl, &first, &second.base), MZ_OK);
  cr_assert_eq(mz_decl_param_group(decl, &second, &t.param_group), MZ_OK);
  cr_expect_eq(t.param_group, 3);
  cr_assert_eq(mz_decl_tensor(decl, &t, &id), MZ_OK);
  h = hyper_of(decl, "b");
  cr_expect_eq(h->gives, MZ_GIVES_LR | MZ_GIVES_BETAS | MZ_GIVES_WEIGHT_DECAY);
  cr_expect_eq(h->lr, 0.5);
  cr_expect_eq(h->beta2, 0.75);
  cr_expect_eq(h->weight_decay, 0);
  o.groups[0] = entry("b", MZ_ALL, decay);
  cr_assert_eq(mz_decl_apply_groups(decl, &o), MZ_OK, "%s", mz_error_last());
  h = hyper_of(decl, "b");
  cr_expect_eq(h->lr, 0.5);
  cr_expect_eq(h->weight_decay, 0.25);
  mz_decl_destroy(&decl);
}

static void expect_refused(mz_status_t st, mz_status_t code, const char *text)
{
  cr_expect_eq(st, code);
  cr_expect_str_eq(mz_error_message(), text);
}

Test(param_groups, what_cannot_be_a_group_is_refused)
{
  mz_param_group_opts_t opts = {.base = 2};
  mz_tensor_opts_t t = {.name = "b", .ndim = 1, .shape = {3}, .param_group = 2};
  mz_optimizer_config_t o = {.num_groups = 1};
  mz_decl_t *decl = declare();
  int32_t id;

  expect_refused(mz_decl_param_group(decl, &opts, &id), MZ_ERR_ARG,
                 "parameter group on base 2, need 0..1");
  opts = (mz_param_group_opts_t){.hyper = {.gives = MZ_GIVES_LR, .lr = -1}};
  expect_refused(mz_decl_param_group(decl, &opts, &id), MZ_ERR_ARG,
                 "parameter group: lr is -1, need at least 0");
  opts.hyper = (mz_hyper_t){.gives = MZ_GIVES_BETAS, .beta1 = 0.5, .beta2 = 1};
  expect_refused(mz_decl_param_group(decl, &opts, &id), MZ_ERR_ARG,
                 "parameter group: betas are 0.5 and 1, need 0 to below 1");
  opts.hyper = (mz_hyper_t){.gives = MZ_GIVES_EPS, .eps = -1};
  expect_refused(mz_decl_param_group(decl, &opts, &id), MZ_ERR_ARG,
                 "parameter group: eps is -1, need at least 0");
  opts.hyper = (mz_hyper_t){.gives = MZ_GIVES_WEIGHT_DECAY, .weight_decay = -2};
  expect_refused(mz_decl_param_group(decl, &opts, &id), MZ_ERR_ARG,
                 "parameter group: weight_decay is -2, need at least 0");
  expect_refused(mz_decl_tensor(decl, &t, &id), MZ_ERR_ARG,
                 "b: parameter group 2, need 0..1");
  o.groups[0] = entry("moe.*", MZ_DENSE_ONLY, rate);
  expect_refused(mz_decl_apply_groups(decl, &o), MZ_ERR_CONFIG,
                 "optimizer.param_groups[0]: no tensor is left for pattern "
                 "\"moe.*\" outside of experts");
  mz_decl_destroy(&decl);
  decl = declare();
  o.num_groups = 0;
  cr_assert_eq(mz_decl_apply_groups(decl, &o), MZ_OK);
  expect_refused(mz_decl_apply_groups(decl, &o), MZ_ERR_ARG,
                 "optimizer.param_groups was applied before");
  mz_decl_destroy(&decl);
}

static mz_status_t compute(const struct mz_call *call, void *self)
{
  return MZ_OK;
}

/* Experts of one layer may differ: the order is each one's own. */
Test(param_groups, tensors_lie_in_a_unit_in_order_of_group)
{
  mz_optimizer_config_t o = {.num_groups = 1};
  mz_plan_opts_t opts = {.world_size = 1,
                         .micro_sequences = 1,
                         .sequence_length = 1,
                         .accumulation = 1,
                         .reduce_bucket_size = 1000,
                         .allgather_bucket_size = 1000,
                         .max_live_parameters = 1000,
                         .piece_bytes = 1000,
                         .saved_rows = 1,
                         .overlap_chunks = 1};
  mz_compute_opts_t step = {
      .name = "step", .fn = compute, .grads = {0, 1}, .num_grads = 2};
  static const char *const order[] = {
      "a.weight",
      "a.bias",
      "moe.experts.0.up.weight",
      "moe.experts.0.up.bias",
      "moe.experts.1.up.bias",
      "moe.experts.1.up.weight",
  };
  mz_decl_t *decl = declare();
  mz_plan_t *plan = NULL;

  o.groups[0] = entry("*.1.up.weight", MZ_ALL, rate);
  cr_assert_eq(mz_decl_apply_groups(decl, &o), MZ_OK);
  cr_assert_eq(mz_decl_layer(decl, &(mz_layer_opts_t){.name = "a"}), MZ_OK);
  cr_assert_eq(mz_decl_compute(decl, MZ_BACKWARD, &step), MZ_OK);
  cr_assert_eq(mz_plan_create(decl, &opts, &plan), MZ_OK, "%s",
               mz_error_last());
  cr_assert_eq(plan->num_unit_tensors, 6);
  for (int i = 0; i < 6; i++)
    cr_expect_str_eq(mz_decl_tensor_name(decl, plan->unit_tensors[i].tensor),
                     order[i]);
  cr_expect_eq(plan->segments[MZ_SHARE_UPDATED][5].param_group, 2);
  mz_plan_destroy(&plan);
  mz_decl_destroy(&decl);
}
