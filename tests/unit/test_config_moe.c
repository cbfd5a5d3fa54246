/* SPDX-License-Identifier: Apache-2.0 */
/* The section moe: which layers, and how they choose. */
#include "config_base.h"

#include <string.h>

Test(config_moe, layers_by_list_and_by_every)
{
  mz_config_t *config = NULL;
  const mz_moe_config_t *moe;

  cr_assert_eq(LOAD(&config, "moe.num_experts=[4, 8]", "moe.layers=[0, 3]",
                    "moe.ep_size=[1, 2]"),
               MZ_OK);
  moe = &mz_config_values(config)->moe;
  cr_expect_eq(moe->num_layers, 2);
  cr_expect_arr_eq(moe->layer, ((int32_t[]){0, 3}), 8);
  cr_expect_arr_eq(moe->num_experts, ((int32_t[]){4, 8}), 8);
  cr_expect_arr_eq(moe->ep_size, ((int32_t[]){1, 2}), 8);
  mz_config_destroy(&config);

  cr_assert_eq(LOAD(&config, "moe.num_experts=4", "moe.layers={\"every\": 2}",
                    "moe.expert_model_parallel_size=2"),
               MZ_OK);
  moe = &mz_config_values(config)->moe;
  cr_expect_eq(moe->num_layers, 2);
  cr_expect_arr_eq(moe->layer, ((int32_t[]){1, 3}), 8);
  cr_expect_arr_eq(moe->ep_size, ((int32_t[]){2, 2}), 8);
  mz_config_destroy(&config);
}

Test(config_moe, layers_without_experts_are_dense)
{
  mz_config_t *config = NULL;
  const mz_moe_config_t *moe;

  cr_assert_eq(LOAD(&config, "moe.num_experts=[0, 4, 0, 8]",
                    "moe.ep_size=[1, 2, 1, 4]", "moe.k=2"),
               MZ_OK, "%s", mz_error_last());
  moe = &mz_config_values(config)->moe;
  cr_expect_eq(moe->num_layers, 2);
  cr_expect_arr_eq(moe->layer, ((int32_t[]){1, 3, 0}), 12);
  cr_expect_arr_eq(moe->num_experts, ((int32_t[]){4, 8, 0}), 12);
  cr_expect_arr_eq(moe->ep_size, ((int32_t[]){2, 4, 0}), 12);
  mz_config_destroy(&config);
}

#define MOE_REFUSED(assignment, text)                                          \
  EXPECT_ERROR(LOAD(none, "moe.num_experts=4", assignment), MZ_ERR_CONFIG, text)
#define LAYERS_FORM                                                            \
  ", allowed: an ascending list of block indices or {\"every\": N}"
#define EP_FORM                                                                \
  ", allowed: an integer or a list of integers, one a MoE layer, each of at "  \
  "least 1"

Test(config_moe, bad_layers_and_sizes_are_refused)
{
  REFUSED("moe.k=2", "moe.num_experts: required where the section moe is "
                     "given");
  MOE_REFUSED("moe.k=9", "moe.k: 9 choices of 4 experts (block 0); k is at "
                         "most moe.num_experts");
  MOE_REFUSED("moe.layers=[1, 1]", "moe.layers: found [1, 1]" LAYERS_FORM);
  MOE_REFUSED("moe.layers=3", "moe.layers: found 3" LAYERS_FORM);
  MOE_REFUSED("moe.layers={\"each\": 2}",
              "moe.layers: found {\"each\": 2}" LAYERS_FORM);
  MOE_REFUSED("moe.layers={\"every\": 5}", "moe.layers: every 5 names no "
                                           "block, model.num_hidden_layers "
                                           "is 4");
  MOE_REFUSED("moe.layers=[4]", "moe.layers: block 4 is not below "
                                "model.num_hidden_layers 4");
  MOE_REFUSED(
      "moe.num_experts=[4, 4]",
      "moe.num_experts: a list of 2 for 4 blocks (moe.layers, all by default)");
  MOE_REFUSED("moe.ep_size=0", "moe.ep_size: found 0" EP_FORM);
  MOE_REFUSED("moe.ep_size=-1", "moe.ep_size: found -1" EP_FORM);
  EXPECT_ERROR(LOAD(none, "moe.num_experts=4", "moe.ep_size=2",
                    "moe.expert_model_parallel_size=2"),
               MZ_ERR_CONFIG,
               "moe.expert_model_parallel_size: moe.ep_size is given too; "
               "they are two names of one key");
}

Test(config_moe, drop_policy_is_resolved_with_use_rts)
{
  static const struct {
    const char *k, *rts, *policy;
    mz_drop_policy_t resolved;
  } rows[] = {
      {"moe.k=1", "moe.use_rts=true", "moe.drop_policy=position",
       MZ_DROP_RANDOM},
      {"moe.k=1", "moe.use_rts=false", "moe.drop_policy=position",
       MZ_DROP_POSITION},
      {"moe.k=1", "moe.use_rts=false", "moe.drop_policy=probs", MZ_DROP_PROBS},
      {"moe.k=1", "moe.use_rts=auto", "moe.drop_policy=probs", MZ_DROP_RANDOM},
      {"moe.k=2", "moe.use_rts=true", "moe.drop_policy=position",
       MZ_DROP_RANDOM},
      {"moe.k=2", "moe.use_rts=auto", "moe.drop_policy=position",
       MZ_DROP_POSITION},
      {"moe.k=2", "moe.use_rts=auto", "moe.drop_policy=probs", MZ_DROP_PROBS},
  };

  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    mz_config_t *config = NULL;
    cr_assert_eq(LOAD(&config, "moe.num_experts=4", rows[i].k, rows[i].rts,
                      rows[i].policy),
                 MZ_OK);
    cr_expect_eq(mz_config_values(config)->moe.drop_policy, rows[i].resolved,
                 "row %zu", i);
    mz_config_destroy(&config);
  }
}

static mz_moe_config_t moe_of(const char *first, const char *second)
{
  mz_config_t *config = NULL;
  mz_moe_config_t moe;

  cr_assert_eq(LOAD(&config, "moe.num_experts=4", first, second), MZ_OK, "%s",
               mz_error_last());
  moe = mz_config_values(config)->moe;
  mz_config_destroy(&config);
  return moe;
}

Test(config_moe, evaluation_drops_as_training_does_unless_told)
{
  cr_expect_not(moe_of("moe.k=1", "moe.drop_tokens=false").eval_drop_tokens);
  cr_expect_not(
      moe_of("moe.k=1", "moe.eval_drop_tokens=false").eval_drop_tokens);
  cr_expect(moe_of("moe.drop_tokens=false", "moe.eval_drop_tokens=true")
                .eval_drop_tokens);
}

Test(config_moe, noise_of_the_gate_is_resolved)
{
  mz_moe_config_t moe = moe_of("moe.k=1", "moe.noisy_gate_policy=Jitter");

  cr_expect_eq(moe.noisy_gate_policy, MZ_NOISE_JITTER);
  cr_expect_eq(moe.gate_noise, 0.01);
  moe = moe_of("moe.k=2", "moe.gate_noise=0.1");
  cr_expect_eq(moe.noisy_gate_policy, MZ_NOISE_JITTER);
  cr_expect_eq(moe.gate_noise, 0.1);
  moe = moe_of("moe.k=1", "moe.noisy_gate_policy=RSample");
  cr_expect_eq(moe.noisy_gate_policy, MZ_NOISE_RSAMPLE);
  cr_expect_eq(moe.gate_noise, 0);
  cr_expect(moe_of("moe.k=2", "moe.top2_2nd_expert_sampling=true")
                .top2_2nd_expert_sampling);
}

Test(config_moe, temperature_is_a_number_or_a_way)
{
  mz_moe_config_t moe = moe_of("moe.k=1", "moe.temperature=1.2");
  mz_config_t *config = NULL;
  char *text = NULL;

  cr_expect_eq(moe.temperature, 1.2);
  cr_expect_eq(moe.temperature_steps, 0);
  cr_assert_eq(LOAD(&config, "moe.num_experts=4",
                    "moe.temperature={\"start\": 2, \"end\": 0.5, \"steps\": "
                    "9}"),
               MZ_OK);
  moe = mz_config_values(config)->moe;
  cr_expect_eq(moe.temperature, 2);
  cr_expect_eq(moe.temperature_end, 0.5);
  cr_expect_eq(moe.temperature_steps, 9);
  cr_assert_eq(mz_config_to_json(config, &text), MZ_OK);
  cr_expect(strstr(text, "\"steps\": 9"), "%s", text);
  mz_config_free_text(&text);
  mz_config_destroy(&config);
}

#define TEMPERATURE                                                            \
  ", allowed: a number above 0 or {\"start\": A, \"end\": B, \"steps\": N}"

Test(config_moe, what_the_gate_cannot_do_at_once_is_refused)
{
  MOE_REFUSED("moe.temperature=0", "moe.temperature: found 0" TEMPERATURE);
  MOE_REFUSED("moe.temperature={\"start\": 2}",
              "moe.temperature: found {\"start\": 2}" TEMPERATURE);
  MOE_REFUSED("moe.expert_capacity=0",
              "moe.expert_capacity: found 0, allowed: an integer from 1 to "
              "2147483647 or null");
  EXPECT_ERROR(LOAD(none, "moe.num_experts=4", "moe.k=2",
                    "moe.noisy_gate_policy=RSample"),
               MZ_ERR_CONFIG,
               "moe.noisy_gate_policy: RSample draws the only choice, moe.k is "
               "2");
  MOE_REFUSED("moe.top2_2nd_expert_sampling=true",
              "moe.top2_2nd_expert_sampling: draws the second choice of 2, "
              "moe.k is 1");
  EXPECT_ERROR(LOAD(none, "moe.num_experts=4", "moe.bias_update_rate=0.001",
                    "moe.noisy_gate_policy=RSample"),
               MZ_ERR_CONFIG,
               "moe.bias_update_rate: a bias moves choices by the gates; they "
               "cannot be drawn too");
  EXPECT_ERROR(LOAD(none, "moe.num_experts=4", "moe.z_loss_coef=0.001",
                    "moe.score=sigmoid"),
               MZ_ERR_CONFIG,
               "moe.z_loss_coef: 0.001, but the z-loss is of softmax and "
               "moe.score is sigmoid");
  EXPECT_ERROR(LOAD(none, "moe.num_experts=4", "moe.gate_noise=0.1",
                    "moe.noisy_gate_policy=None"),
               MZ_ERR_CONFIG,
               "moe.gate_noise: 0.1 is of Jitter; moe.noisy_gate_policy is "
               "another");
}

Test(config_moe, shared_experts_are_as_wide_as_experts_unless_told)
{
  mz_moe_config_t moe =
      moe_of("moe.num_shared_experts=2", "moe.expert_intermediate_size=40");

  cr_expect_eq(moe.num_shared_experts, 2);
  cr_expect_eq(moe.shared_expert_intermediate_size, 40);
  cr_expect_not(moe.shared_expert_gate);
  cr_expect_not(moe.use_residual);
  moe = moe_of("moe.num_shared_experts=1",
               "moe.shared_expert_intermediate_size=24");
  cr_expect_eq(moe.shared_expert_intermediate_size, 24);
  cr_expect(moe_of("moe.num_shared_experts=1", "moe.shared_expert_gate=true")
                .shared_expert_gate);
  cr_expect(moe_of("moe.k=1", "moe.use_residual=true").use_residual);
}

/* What is resolved can be read again, also where nothing is shared. */
Test(config_moe, maps_beside_the_experts_are_written_back)
{
  static const char *const assignments[] = {"moe.use_residual=true",
                                            "moe.num_shared_experts=2"};

  for (int i = 0; i < 2; i++) {
    mz_config_t *config = NULL, *again = NULL;
    char *text = NULL;

    cr_assert_eq(LOAD(&config, "moe.num_experts=4", assignments[i]), MZ_OK);
    cr_assert_eq(mz_config_resolve(config, 1), MZ_OK);
    cr_assert_eq(mz_config_to_json(config, &text), MZ_OK);
    cr_assert_eq(mz_config_parse(text, "again.json", NULL, 0, &again), MZ_OK,
                 "%s", mz_error_last());
    cr_expect_eq(mz_config_values(again)->moe.use_residual, i == 0);
    cr_expect_eq(mz_config_values(again)->moe.num_shared_experts, 2 * i);
    mz_config_free_text(&text);
    mz_config_destroy(&config);
    mz_config_destroy(&again);
  }
}

Test(config_moe, one_map_stands_beside_the_experts)
{
  EXPECT_ERROR(LOAD(none, "moe.num_experts=4", "moe.use_residual=true",
                    "moe.num_shared_experts=1"),
               MZ_ERR_CONFIG,
               "moe.use_residual: 1 shared experts are given too; a layer has "
               "one dense feed-forward beside its experts, mixed in "
               "(use_residual) or added (num_shared_experts)");
  MOE_REFUSED("moe.shared_expert_gate=true",
              "moe.shared_expert_gate: moe.num_shared_experts is 0, there is "
              "nothing to multiply");
  EXPECT_ERROR(LOAD(none, "moe.num_experts=4",
                    "moe.num_shared_experts=2147483647",
                    "moe.shared_expert_intermediate_size=8589934588"),
               MZ_ERR_CONFIG,
               "moe.num_shared_experts: 2147483647 of width 8589934588 are "
               "more than can be counted");
}
