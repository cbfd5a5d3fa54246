/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations of the model: names, shapes and counts by hand, and a plan of
 * each, which refuses a step that reads what nobody wrote and a tensor that
 * gets no gradient. */
#include "base/alloc.h"
#include "base/check.h"
#include "kernels/norm.h"
#include <moezero/gpt.h>
#include "plan/decl_impl.h"
#include "plan/plan.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

/* H 32, 4 heads of 8, V 64, 2 blocks, F 48, positions 16. */
static mz_config_values_t gpt2_config(void)
{
  mz_config_values_t c = {.model = {.architecture = MZ_ARCH_GPT2,
                                    .vocab_size = 64,
                                    .hidden_size = 32,
                                    .num_hidden_layers = 2,
                                    .num_attention_heads = 4,
                                    .num_key_value_heads = 4,
                                    .intermediate_size = 48,
                                    .max_position_embeddings = 16,
                                    .hidden_act = MZ_ACT_GELU,
                                    .norm = MZ_NORM_LAYER,
                                    .norm_eps = 1e-5,
                                    .position_embedding = MZ_POS_LEARNED,
                                    .bias = true,
                                    .attention_bias = true,
                                    .tie_word_embeddings = true,
                                    .initializer_range = 0.02},
                          .moe = {.k = 2,
                                  .expert_intermediate_size = 40,
                                  .expert_bias = true,
                                  .capacity_factor = 1,
                                  .eval_capacity_factor = 1,
                                  .norm_topk_prob = true,
                                  .aux_loss = MZ_AUX_LOAD_BALANCING,
                                  .aux_loss_coef = 0.01}};
  return c;
}

static mz_config_values_t llama_config(void)
{
  mz_config_values_t c = gpt2_config();

  c.model.architecture = MZ_ARCH_LLAMA;
  c.model.num_key_value_heads = 2;
  c.model.hidden_act = MZ_ACT_SWIGLU;
  c.model.norm = MZ_NORM_RMS;
  c.model.position_embedding = MZ_POS_ROPE;
  c.model.rope_theta = 10000;
  c.model.bias = c.model.attention_bias = c.moe.expert_bias = false;
  c.model.tie_word_embeddings = false;
  return c;
}

static void add_moe(mz_config_values_t *c, int32_t layer, int32_t num_experts,
                    int32_t ep_size)
{
  int32_t i = c->moe.num_layers++;

  c->moe.layer[i] = layer;
  c->moe.num_experts[i] = num_experts;
  c->moe.ep_size[i] = ep_size;
}

static mz_decl_t *declare(const mz_config_values_t *c)
{
  mz_decl_t *decl = NULL;

  cr_assert_eq(mz_decl_create(&decl), MZ_OK);
  cr_assert_eq(mz_gpt_declare(c, decl), MZ_OK, "%s", mz_error_last());
  return decl;
}

static void expect_error(const mz_config_values_t *c, mz_status_t status,
                         const char *text)
{
  mz_decl_t *decl = NULL;

  cr_assert_eq(mz_decl_create(&decl), MZ_OK);
  cr_expect_eq(mz_gpt_declare(c, decl), status);
  cr_expect(strstr(mz_error_message(), text), "%s", mz_error_message());
  mz_decl_destroy(&decl);
}

static const mz_tensor_t *tensor(const mz_decl_t *decl, const char *name)
{
  int32_t t = mz_decl_find_tensor(decl, name);

  cr_assert(t >= 0, "no tensor %s", name);
  return &decl->tensors[t];
}

static void expect_shape(const mz_decl_t *decl, const char *name, int64_t rows,
                         int64_t columns)
{
  const mz_tensor_t *t = tensor(decl, name);

  cr_expect_eq(t->ndim, columns ? 2 : 1, "%s", name);
  cr_expect_eq(t->shape[0], rows, "%s", name);
  if (columns) cr_expect_eq(t->shape[1], columns, "%s", name);
}

static int64_t elements(const mz_decl_t *decl)
{
  int64_t sum = 0;

  for (int32_t t = 0; t < mz_decl_num_tensors(decl); t++)
    sum += mz_decl_tensor_elements(decl, t);
  return sum;
}

static mz_plan_t *plan_of(const mz_decl_t *decl, int64_t stage, int world)
{
  mz_plan_t *plan = NULL;
  mz_plan_opts_t opts = {.world_size = world,
                         .stage = stage,
                         .micro_sequences = 2,
                         .sequence_length = 16,
                         .accumulation = 1,
                         .reduce_bucket_size = 1 << 20,
                         .allgather_bucket_size = 1 << 20,
                         .prefetch_bucket_size = 1 << 20,
                         .max_live_parameters = 1 << 24,
                         .piece_bytes = 1 << 20,
                         .saved_rows = 1.25,
                         .overlap_chunks = 1};

  cr_assert_eq(mz_plan_create(decl, &opts, &plan), MZ_OK, "%s",
               mz_error_last());
  return plan;
}

static void expect_plans(const mz_config_values_t *c)
{
  mz_decl_t *decl = declare(c);

  for (int64_t stage = 0; stage <= 3; stage++) {
    mz_plan_t *plan = plan_of(decl, stage, 2);
    mz_plan_destroy(&plan);
  }
  mz_decl_destroy(&decl);
}

Test(gpt, gpt2_has_the_tensors_of_gpt2)
{
  mz_config_values_t c = gpt2_config();
  mz_decl_t *decl = declare(&c);

  expect_shape(decl, "wte.weight", 64, 32);
  expect_shape(decl, "wpe.weight", 16, 32);
  expect_shape(decl, "h.0.ln_1.weight", 32, 0);
  expect_shape(decl, "h.0.ln_1.bias", 32, 0);
  expect_shape(decl, "h.1.attn.qkv.weight", 96, 32);
  expect_shape(decl, "h.1.attn.qkv.bias", 96, 0);
  expect_shape(decl, "h.1.attn.proj.weight", 32, 32);
  expect_shape(decl, "h.1.attn.proj.bias", 32, 0);
  expect_shape(decl, "h.0.ln_2.weight", 32, 0);
  expect_shape(decl, "h.0.mlp.up.weight", 48, 32);
  expect_shape(decl, "h.0.mlp.up.bias", 48, 0);
  expect_shape(decl, "h.0.mlp.down.weight", 32, 48);
  expect_shape(decl, "h.0.mlp.down.bias", 32, 0);
  expect_shape(decl, "ln_f.weight", 32, 0);
  expect_shape(decl, "ln_f.bias", 32, 0);
  /* 2 tables, 12 tensors a block, 2 of the last norm; no lm_head */
  cr_expect_eq(mz_decl_num_tensors(decl), 2 + 2 * 12 + 2);
  cr_expect_eq(elements(decl),
               80 * 32 + 2 * (4 * 32 + 96 * 33 + 32 * 33 + 48 * 33 + 32 * 49) +
                   2 * 32);
  cr_expect_eq(mz_decl_find_tensor(decl, "lm_head.weight"), -1);
  cr_expect(tensor(decl, "wte.weight")->shared);
  mz_decl_destroy(&decl);
}

Test(gpt, an_untied_head_has_a_matrix_of_its_own)
{
  mz_config_values_t c = gpt2_config();
  mz_decl_t *decl;

  c.model.tie_word_embeddings = false;
  decl = declare(&c);
  expect_shape(decl, "lm_head.weight", 64, 32);
  cr_expect_not(tensor(decl, "wte.weight")->shared);
  cr_expect_eq(tensor(decl, "lm_head.weight")->block, 3);
  mz_decl_destroy(&decl);
}

Test(gpt, llama_has_no_biases_and_no_position_table)
{
  mz_config_values_t c = llama_config();
  mz_decl_t *decl = declare(&c);

  for (int32_t t = 0; t < mz_decl_num_tensors(decl); t++)
    cr_expect_not(strstr(mz_decl_tensor_name(decl, t), "bias"));
  cr_expect_eq(mz_decl_find_tensor(decl, "wpe.weight"), -1);
  expect_shape(decl, "h.0.attn.qkv.weight", (4 + 2 * 2) * 8, 32);
  expect_shape(decl, "h.0.attn.proj.weight", 32, 32);
  expect_shape(decl, "h.0.mlp.gate.weight", 48, 32);
  expect_shape(decl, "h.0.mlp.up.weight", 48, 32);
  expect_shape(decl, "h.0.mlp.down.weight", 32, 48);
  /* wte, 7 a block, ln_f, lm_head */
  cr_expect_eq(mz_decl_num_tensors(decl), 1 + 2 * 7 + 2);
  mz_decl_destroy(&decl);
}

Test(gpt, keys_mix_freely)
{
  mz_config_values_t c = llama_config();
  mz_decl_t *decl;

  c.model.bias = true;
  c.model.norm = MZ_NORM_LAYER;
  c.model.position_embedding = MZ_POS_LEARNED;
  decl = declare(&c);
  expect_shape(decl, "wpe.weight", 16, 32);
  expect_shape(decl, "h.0.ln_1.bias", 32, 0);
  expect_shape(decl, "h.0.mlp.gate.bias", 48, 0);
  expect_shape(decl, "h.0.attn.proj.bias", 32, 0);
  cr_expect_eq(mz_decl_find_tensor(decl, "h.0.attn.qkv.bias"), -1);
  mz_decl_destroy(&decl);
}

Test(gpt, experts_have_biases_of_their_own_key)
{
  mz_config_values_t c = gpt2_config();
  mz_decl_t *decl;

  c.moe.expert_bias = false;
  add_moe(&c, 1, 4, 1);
  decl = declare(&c);
  expect_shape(decl, "h.0.mlp.up.bias", 48, 0);
  expect_shape(decl, "h.1.moe.experts.3.up.weight", 40, 32);
  cr_expect_eq(mz_decl_find_tensor(decl, "h.1.moe.experts.3.up.bias"), -1);
  cr_expect_eq(mz_decl_find_tensor(decl, "h.1.moe.experts.3.down.bias"), -1);
  mz_decl_destroy(&decl);
}

Test(gpt, a_residual_mlp_is_like_an_expert_and_dense)
{
  mz_config_values_t c = gpt2_config();
  mz_decl_t *decl;

  add_moe(&c, 1, 4, 1);
  c.moe.use_residual = true;
  decl = declare(&c);
  expect_shape(decl, "h.1.moe.residual.up.weight", 40, 32);
  expect_shape(decl, "h.1.moe.residual.up.bias", 40, 0);
  expect_shape(decl, "h.1.moe.residual.down.weight", 32, 40);
  expect_shape(decl, "h.1.moe.coefficient.weight", 2, 32);
  expect_shape(decl, "h.1.moe.coefficient.bias", 2, 0);
  cr_expect_eq(tensor(decl, "h.1.moe.coefficient.weight")->moe, -1);
  cr_expect_eq(tensor(decl, "h.1.moe.residual.up.weight")->block, 2);
  cr_expect_eq(mz_decl_find_tensor(decl, "h.1.moe.shared.up.weight"), -1);
  cr_expect_eq(mz_decl_find_tensor(decl, "h.0.moe.residual.up.weight"), -1);
  mz_decl_destroy(&decl);
}

Test(gpt, shared_experts_are_one_map_with_a_gate_on_request)
{
  mz_config_values_t c = llama_config();
  mz_decl_t *decl;

  add_moe(&c, 1, 4, 1);
  c.moe.num_shared_experts = 3;
  c.moe.shared_expert_intermediate_size = 8;
  decl = declare(&c);
  expect_shape(decl, "h.1.moe.shared.up.weight", 24, 32);
  expect_shape(decl, "h.1.moe.shared.gate.weight", 24, 32);
  expect_shape(decl, "h.1.moe.shared.down.weight", 32, 24);
  cr_expect_eq(mz_decl_find_tensor(decl, "h.1.moe.shared_gate.weight"), -1);
  mz_decl_destroy(&decl);
  c.moe.shared_expert_gate = true;
  decl = declare(&c);
  expect_shape(decl, "h.1.moe.shared_gate.weight", 1, 32);
  cr_expect_eq(mz_decl_find_tensor(decl, "h.1.moe.shared_gate.bias"), -1);
  mz_decl_destroy(&decl);
}

/* So that the exchange of tokens may run under it. */
Test(gpt, the_map_beside_stands_between_the_counts_and_the_runs)
{
  mz_config_values_t c = gpt2_config();
  mz_decl_t *decl;

  add_moe(&c, 1, 4, 1);
  c.moe.use_residual = true;
  decl = declare(&c);
  for (int pass = 0; pass < 2; pass++) {
    const char *name = pass == MZ_FORWARD ? "beside" : "beside_grad";
    const char *before = pass == MZ_FORWARD ? NULL : "combine_grad";
    int num_found = 0;

    for (int64_t i = 1; i + 1 < decl->num_steps[pass]; i++) {
      const mz_step_t *s = &decl->steps[pass][i];

      if (s->kind != MZ_STEP_COMPUTE || strcmp(s->compute.name, name) != 0)
        continue;
      num_found++;
      cr_expect_eq(s[1].kind, MZ_STEP_RUNS);
      if (before)
        cr_expect_str_eq(s[-1].compute.name, before);
      else
        cr_expect_eq(s[-1].kind, MZ_STEP_COUNTS);
      for (int32_t b = 0; b < s->compute.num_reads; b++)
        cr_expect_neq(decl->buffers[s->compute.reads[b]].category,
                      MZ_CAT_DISPATCH);
      for (int32_t b = 0; b < s->compute.num_writes; b++)
        cr_expect_neq(decl->buffers[s->compute.writes[b]].category,
                      MZ_CAT_DISPATCH);
    }
    cr_expect_eq(num_found, 1);
  }
  mz_decl_destroy(&decl);
}

Test(gpt, moe_blocks_differ_in_experts_and_groups)
{
  mz_config_values_t c = gpt2_config();
  mz_decl_t *decl;
  const mz_tensor_t *t;

  c.model.num_hidden_layers = 3;
  add_moe(&c, 0, 4, 2);
  add_moe(&c, 2, 8, 1);
  decl = declare(&c);
  cr_assert_eq(mz_decl_num_moes(decl), 2);
  cr_expect_str_eq(mz_decl_moe_opts(decl, 0)->name, "h.0.moe");
  cr_expect_eq(mz_decl_moe_opts(decl, 0)->ep_size, 2);
  cr_expect_eq(mz_decl_moe_opts(decl, 1)->num_experts, 8);
  cr_expect_eq(mz_decl_moe_opts(decl, 1)->k, 2);
  expect_shape(decl, "h.0.moe.gate.weight", 4, 32);
  expect_shape(decl, "h.2.moe.gate.weight", 8, 32);
  expect_shape(decl, "h.2.moe.experts.7.up.weight", 40, 32);
  expect_shape(decl, "h.2.moe.experts.7.down.bias", 32, 0);
  expect_shape(decl, "h.1.mlp.up.weight", 48, 32);
  cr_expect_eq(mz_decl_find_tensor(decl, "h.0.mlp.up.weight"), -1);
  cr_expect_eq(mz_decl_find_tensor(decl, "h.0.moe.experts.4.up.weight"), -1);
  t = tensor(decl, "h.2.moe.experts.3.down.weight");
  cr_expect_eq(t->moe, 1);
  cr_expect_eq(t->expert, 3);
  mz_decl_destroy(&decl);
}

Test(gpt, only_matrices_decay_and_branch_outputs_start_smaller)
{
  mz_config_values_t c = gpt2_config();
  mz_decl_t *decl;

  add_moe(&c, 1, 4, 1);
  c.moe.use_residual = true;
  decl = declare(&c);
  for (int32_t i = 0; i < mz_decl_num_tensors(decl); i++) {
    const mz_tensor_t *t = &decl->tensors[i];
    bool matrix = t->ndim == 2;
    bool output = strstr(t->name, "proj.weight") || strstr(t->name, "down.w");

    cr_expect_eq(t->param_group, matrix ? MZ_GROUP_DECAY : MZ_GROUP_NO_DECAY,
                 "%s", t->name);
    if (matrix)
      cr_expect_float_eq(t->init_std, output ? 0.02 / sqrt(4.0) : 0.02, 1e-15,
                         "%s", t->name);
    else
      cr_expect_eq(t->init,
                   strstr(t->name, "bias") ? MZ_INIT_ZERO : MZ_INIT_ONE, "%s",
                   t->name);
  }
  mz_decl_destroy(&decl);
}

Test(gpt, dense_tensors_belong_to_the_unit_of_their_block)
{
  mz_config_values_t c = gpt2_config();
  mz_decl_t *decl;

  add_moe(&c, 1, 4, 1);
  decl = declare(&c);
  cr_expect_eq(tensor(decl, "wpe.weight")->block, 0);
  cr_expect_eq(tensor(decl, "h.0.mlp.up.weight")->block, 1);
  cr_expect_eq(tensor(decl, "h.1.ln_1.bias")->block, 2);
  cr_expect_eq(tensor(decl, "h.1.moe.gate.weight")->block, 2);
  cr_expect_eq(tensor(decl, "ln_f.weight")->block, 3);
  mz_decl_destroy(&decl);
}

Test(gpt, every_declaration_can_be_planned_at_every_stage)
{
  mz_config_values_t c = gpt2_config();

  expect_plans(&c);
  add_moe(&c, 0, 4, 2);
  add_moe(&c, 1, 6, 1);
  expect_plans(&c);
  c.model.dropout = 0.1;
  c.moe.z_loss_coef = 0.001;
  expect_plans(&c);
  c.moe.drop_tokens = true;
  c.debug.identity_experts = true;
  expect_plans(&c);
  c.moe.use_residual = true;
  expect_plans(&c);
  c = llama_config();
  add_moe(&c, 1, 4, 2);
  expect_plans(&c);
  c.moe.num_shared_experts = 1;
  c.moe.shared_expert_intermediate_size = 20;
  expect_plans(&c);
  c.moe.shared_expert_gate = true;
  expect_plans(&c);
}

Test(gpt, a_model_without_blocks_is_a_model)
{
  mz_config_values_t c = gpt2_config();
  mz_decl_t *decl;

  c.model.num_hidden_layers = 0;
  decl = declare(&c);
  cr_expect_eq(mz_decl_num_tensors(decl), 4);
  mz_decl_destroy(&decl);
}

Test(gpt, sizes_that_are_missing_or_do_not_divide_are_refused)
{
  mz_config_values_t c = gpt2_config();

  c.model.hidden_size = 0;
  expect_error(&c, MZ_ERR_CONFIG, "model: required");
  c = gpt2_config();
  c.model.num_attention_heads = 5;
  expect_error(&c, MZ_ERR_CONFIG, "hidden_size 32 is not divisible by 5 heads");
  c = gpt2_config();
  c.model.num_key_value_heads = 3;
  expect_error(&c, MZ_ERR_CONFIG, "4 heads are not divisible by 3");
  c = llama_config();
  c.model.num_attention_heads = 32;
  expect_error(&c, MZ_ERR_CONFIG, "even head width, not 1");
  c = gpt2_config();
  add_moe(&c, 0, 4, 3);
  expect_error(&c, MZ_ERR_ARG, "num_experts 4 is not divisible by ep_size 3");
}

Test(gpt, a_moe_block_that_is_not_there_is_refused)
{
  mz_config_values_t c = gpt2_config();

  add_moe(&c, 2, 4, 1);
  expect_error(&c, MZ_ERR_CONFIG, "moe.layers names block 2");
}

Test(gpt, hooks_must_fit_the_layer)
{
  mz_config_values_t c = gpt2_config();
  float logits[4] = {10, 0, 0, 0};
  int32_t table[64] = {0};

  add_moe(&c, 0, 4, 1);
  c.debug.fixed_logits = logits;
  c.debug.num_fixed_logits = 3;
  expect_error(&c, MZ_ERR_CONFIG, "debug.fixed_logits has 3 values");
  c.debug.num_fixed_logits = 4;
  c.debug.route_table = table;
  c.debug.num_route_table = 63;
  expect_error(&c, MZ_ERR_CONFIG, "debug.route_table has 63 values");
  c.debug.num_route_table = 64;
  table[63] = 4;
  expect_error(&c, MZ_ERR_ARG, "sends token id 63 to expert 4 of 4");
  table[63] = 3;
  expect_plans(&c);
}

Test(gpt, gates_that_cannot_be_are_refused)
{
  mz_config_values_t c = gpt2_config();

  add_moe(&c, 0, 4, 1);
  c.moe.temperature = -1;
  expect_error(&c, MZ_ERR_ARG, "temperature -1 to 0 in 0 steps");
  c.moe.temperature = 1;
  c.moe.temperature_steps = 3;
  expect_error(&c, MZ_ERR_ARG, "temperature 1 to 0 in 3 steps");
  c.moe.temperature_end = 2;
  c.moe.gate_noise = 1;
  expect_error(&c, MZ_ERR_ARG, "jitter is 1, need 0 <= jitter < 1");
  c.moe.gate_noise = 0;
  c.moe.noisy_gate_policy = MZ_NOISE_RSAMPLE;
  c.moe.bias_update_rate = 0.5;
  expect_error(&c, MZ_ERR_ARG, "a bias and drawn choices exclude each other");
  c.moe.noisy_gate_policy = MZ_NOISE_NONE;
  c.moe.score = MZ_SCORE_SIGMOID;
  c.moe.z_loss_coef = 0.25;
  expect_error(&c, MZ_ERR_ARG, "the z-loss is of softmax");
  c.moe.z_loss_coef = 0;
  expect_plans(&c);
}

Test(gpt, no_memory_at_any_allocation_is_an_error_without_a_leak)
{
  mz_config_values_t c = gpt2_config();
  mz_status_t st = MZ_ERR_NOMEM;
  float logits[4] = {0};
  int64_t n;

  add_moe(&c, 1, 4, 1);
  c.moe.use_residual = true;
  c.debug.fixed_logits = logits;
  c.debug.num_fixed_logits = 4;
  for (n = 1; st != MZ_OK && n < 200; n++) {
    mz_decl_t *decl = NULL;

    cr_assert_eq(mz_decl_create(&decl), MZ_OK);
    mz_alloc_fail_at(n);
    st = mz_gpt_declare(&c, decl);
    mz_alloc_fail_at(0);
    cr_assert(st == MZ_OK || st == MZ_ERR_NOMEM);
    mz_decl_destroy(&decl);
  }
  cr_expect_eq(st, MZ_OK);
  cr_expect_gt(n, 20);
}

/* What backward needs is one buffer from the gate to the last return. */
Test(moe_layer, one_buffer_of_routes_lives_from_forward_to_backward)
{
  mz_config_values_t c = gpt2_config();
  mz_decl_t *decl;
  mz_plan_t *plan;
  int found = 0;

  add_moe(&c, 0, 4, 1);
  add_moe(&c, 1, 4, 1);
  decl = declare(&c);
  plan = plan_of(decl, 0, 1);
  for (int32_t b = 0; b < plan->num_buffers; b++) {
    const mz_plan_buffer_t *p = &plan->buffers[b];
    int32_t span = p->life[MZ_WALK_MICRO].last - p->life[MZ_WALK_MICRO].first;
    bool spans = span > plan->num_ops[MZ_WALK_MICRO] / 4;

    if (p->category != MZ_CAT_DISPATCH) continue;
    found += spans;
    cr_expect_eq(spans, strstr(p->name, ".send") != NULL, "%s", p->name);
  }
  cr_expect_eq(found, 2);
  mz_plan_destroy(&plan);
  mz_decl_destroy(&decl);
}
