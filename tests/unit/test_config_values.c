/* SPDX-License-Identifier: Apache-2.0 */
/* Values: defaults, presets, data files. */
#include "config_base.h"

#include <stdio.h>
#include <string.h>

Test(config_defaults, model_and_moe)
{
  mz_config_t *config = load("moe.num_experts=8");
  const mz_model_config_t *model = &mz_config_values(config)->model;
  const mz_moe_config_t *moe = &mz_config_values(config)->moe;

  cr_expect_eq(model->architecture, MZ_ARCH_GPT2);
  cr_expect_eq(model->norm_eps, 1e-5);
  cr_expect_eq(model->rope_theta, 10000);
  cr_expect_eq(model->initializer_range, 0.02);
  cr_expect_eq(model->dropout, 0);
  cr_expect_eq(model->num_key_value_heads, 2);
  cr_expect_eq(moe->num_layers, 4);
  for (int32_t i = 0; i < 4; i++) {
    cr_expect_eq(moe->layer[i], i);
    cr_expect_eq(moe->num_experts[i], 8);
    cr_expect_eq(moe->ep_size[i], 1);
  }
  cr_expect_eq(moe->k, 1);
  cr_expect_eq(moe->expert_intermediate_size, 128);
  cr_expect(moe->expert_bias);
  cr_expect_eq(moe->capacity_factor, 1);
  cr_expect_eq(moe->eval_capacity_factor, 1);
  cr_expect_eq(moe->min_capacity, 4);
  cr_expect_eq(moe->expert_capacity, 0);
  cr_expect(moe->drop_tokens);
  cr_expect(moe->eval_drop_tokens);
  cr_expect_eq(moe->score, MZ_SCORE_SOFTMAX);
  cr_expect_eq(moe->temperature, 1);
  cr_expect_eq(moe->temperature_steps, 0);
  cr_expect_eq(moe->noisy_gate_policy, MZ_NOISE_NONE);
  cr_expect_eq(moe->gate_noise, 0);
  cr_expect_not(moe->top2_2nd_expert_sampling);
  cr_expect_eq(moe->bias_update_rate, 0);
  cr_expect(moe->use_rts);
  cr_expect_eq(moe->drop_policy, MZ_DROP_RANDOM);
  cr_expect(moe->norm_topk_prob);
  cr_expect_eq(moe->aux_loss, MZ_AUX_LOAD_BALANCING);
  cr_expect_eq(moe->aux_loss_scope, MZ_SCOPE_GROUP);
  cr_expect_eq(moe->aux_loss_coef, 0.01);
  cr_expect_eq(moe->z_loss_coef, 0);
  cr_expect_eq(moe->saved_rows, 1.25);
  cr_expect_eq(moe->overlap_chunks, 1);
  mz_config_destroy(&config);
}

static void expect_types(const char *assignment, const char *second, bool bf16,
                         mz_dtype_t wire)
{
  mz_config_t *config = NULL;
  const mz_config_values_t *values;

  cr_assert_eq(LOAD(&config, assignment, second), MZ_OK, "%s", mz_error_last());
  values = mz_config_values(config);
  cr_expect_eq(values->bf16, bf16, "%s, %s", assignment, second);
  cr_expect_eq(values->communication_data_type, wire, "%s, %s", assignment,
               second);
  mz_config_destroy(&config);
}

Test(config_types, gradients_travel_in_the_models_type_unless_told)
{
  expect_types("bf16.enabled=false", "fp16.enabled=false", false, MZ_F32);
  expect_types("bf16.enabled=true", "fp16.enabled=false", true, MZ_BF16);
  expect_types("bfloat16.enabled=true", "bf16.enabled=auto", true, MZ_BF16);
  expect_types("bf16.enabled=true", "bfloat16.enabled=false", true, MZ_BF16);
  expect_types("bf16.enabled=true", "communication_data_type=null", true,
               MZ_BF16);
  expect_types("bf16.enabled=true", "communication_data_type=fp32", true,
               MZ_F32);
  expect_types("bf16.enabled=false", "communication_data_type=bfp16", false,
               MZ_BF16);
}

Test(config_defaults, zero_optimizer_and_scheduler)
{
  mz_config_t *config = load("scheduler.type=WarmupLR");
  const mz_config_values_t *values = mz_config_values(config);

  cr_expect_eq(values->zero.stage, 0);
  cr_expect_eq(values->zero.reduce_bucket_size, 500000000);
  cr_expect_eq(values->zero.allgather_bucket_size, 500000000);
  cr_expect_eq(values->zero.stage3_prefetch_bucket_size, 50000000);
  cr_expect_eq(values->zero.stage3_param_persistence_threshold, 100000);
  cr_expect_eq(values->zero.stage3_model_persistence_threshold, INT64_MAX);
  cr_expect_eq(values->zero.stage3_max_live_parameters, 1000000000);
  cr_expect_eq(values->zero.stage3_max_reuse_distance, 1000000000);
  cr_expect_eq(values->optimizer.lr, 1e-3);
  cr_expect_eq(values->optimizer.beta1, 0.9);
  cr_expect_eq(values->optimizer.beta2, 0.999);
  cr_expect_eq(values->optimizer.eps, 1e-8);
  cr_expect_eq(values->optimizer.weight_decay, 0);
  cr_expect(values->optimizer.bias_correction);
  cr_expect(values->optimizer.adam_w_mode);
  cr_expect_eq(values->scheduler.type, MZ_SCHED_WARMUP);
  cr_expect_eq(values->scheduler.warmup_min_lr, 0);
  cr_expect_eq(values->scheduler.warmup_max_lr, 1e-3);
  cr_expect_eq(values->scheduler.warmup_num_steps, 1000);
  cr_expect_eq(values->scheduler.warmup_type, MZ_WARMUP_LOG);
  mz_config_destroy(&config);
}

Test(config_defaults, run)
{
  mz_config_t *config = load(NULL);
  const mz_config_values_t *values = mz_config_values(config);
  static const mz_debug_config_t no_debug;

  cr_expect_eq(values->scheduler.type, MZ_SCHED_CONSTANT);
  cr_expect_eq(values->moe.num_layers, 0);
  cr_expect_eq(values->gradient_clipping, 1);
  cr_expect_eq(values->steps_per_print, 0);
  cr_expect_not(values->use_data_before_expert_parallelism);
  cr_expect_not(values->wall_clock_breakdown);
  cr_expect_eq(values->data.num_train, 0);
  cr_expect_eq(values->data.num_valid, 0);
  cr_expect_eq(values->data.format, MZ_DATA_AUTO);
  cr_expect_eq(values->data.sequence_length, 16);
  cr_expect_eq(values->data.seed, 1234);
  cr_expect_eq(values->train.steps, 100);
  cr_expect_eq(values->train.seed, 1234);
  cr_expect_eq(values->train.eval_interval, 0);
  cr_expect_eq(values->train.eval_steps, 0);
  cr_expect_str_eq(values->train.device, "auto");
  cr_expect(values->train.deterministic);
  cr_expect_eq(values->train.watchdog_s, 600);
  cr_expect_eq(values->train.max_minutes, 0);
  cr_expect(values->comm.thread);
  cr_expect_eq(values->comm.wait, MZ_WAIT_HOST);
  cr_expect_eq(values->comm.piece_bytes, 33554432);
  cr_expect_eq(values->comm.messages, MZ_FORM_AUTO);
  cr_expect_str_eq(values->checkpoint.dir, "checkpoint");
  cr_expect_eq(values->checkpoint.save_interval, 0);
  cr_expect_eq(values->checkpoint.keep, 0);
  cr_expect_not(values->checkpoint.gather_on_save);
  cr_expect_str_eq(values->checkpoint.gather_dtype, "fp32");
  cr_expect_str_eq(values->monitor_jsonl, "metrics.jsonl");
  cr_expect_not(values->monitor_param_hash);
  cr_expect_arr_eq(&values->debug, &no_debug, sizeof no_debug);
  mz_config_destroy(&config);
}

Test(config_defaults, data_seed_follows_the_run)
{
  mz_config_t *config = load("train.seed=7");

  cr_expect_eq(mz_config_values(config)->data.seed, 7);
  mz_config_destroy(&config);
}

Test(config_model, gpt2_preset)
{
  mz_config_t *config = load("model.architecture=gpt2");
  const mz_model_config_t *model = &mz_config_values(config)->model;

  cr_expect_eq(model->intermediate_size, 128);
  cr_expect_eq(model->hidden_act, MZ_ACT_GELU);
  cr_expect_eq(model->norm, 0);
  cr_expect_eq(model->position_embedding, MZ_POS_LEARNED);
  cr_expect(model->bias);
  cr_expect(model->attention_bias);
  cr_expect(model->tie_word_embeddings);
  mz_config_destroy(&config);
}

Test(config_model, llama_preset_and_overrides)
{
  mz_config_t *config = load("model.architecture=llama");
  const mz_model_config_t *model = &mz_config_values(config)->model;

  cr_expect_eq(model->intermediate_size, 128); /* 85.33 up to 128 */
  cr_expect_eq(model->hidden_act, MZ_ACT_SWIGLU);
  cr_expect_eq(model->norm, 1);
  cr_expect_eq(model->position_embedding, MZ_POS_ROPE);
  cr_expect_not(model->bias);
  cr_expect_not(model->attention_bias);
  cr_expect_not(model->tie_word_embeddings);
  mz_config_destroy(&config);

  cr_assert_eq(LOAD(&config, "model.architecture=llama", "model.hidden_size=48",
                    "model.hidden_act=gelu_new", "model.norm=layernorm",
                    "model.position_embedding=learned",
                    "model.attention_bias=true",
                    "model.tie_word_embeddings=true"),
               MZ_OK);
  model = &mz_config_values(config)->model;
  cr_expect_eq(model->intermediate_size, 128); /* 8/3 x 48 exactly */
  cr_expect_eq(model->hidden_act, MZ_ACT_GELU);
  cr_expect_eq(model->norm, 0);
  cr_expect_eq(model->position_embedding, MZ_POS_LEARNED);
  cr_expect_not(model->bias);
  cr_expect(model->attention_bias);
  cr_expect(model->tie_word_embeddings);
  mz_config_destroy(&config);
}

Test(config_model, sizes_must_fit_each_other)
{
  REFUSED("model.num_attention_heads=3",
          "model.hidden_size: 32 is not divisible by "
          "model.num_attention_heads 3");
  REFUSED("model.num_key_value_heads=4",
          "model.num_key_value_heads: 4 does not divide "
          "model.num_attention_heads 2");
  EXPECT_ERROR(LOAD(none, "model.position_embedding=rope",
                    "model.num_attention_heads=32"),
               MZ_ERR_CONFIG,
               "model.hidden_size: 32 / 32 heads is 1 wide; rope turns pairs, "
               "so the width must be even");
  REFUSED("data.sequence_length=64", "data.sequence_length: 64 is more than "
                                     "model.max_position_embeddings 16");
}

#define NO_VOCABULARY                                                          \
  "{\"model\": {\"hidden_size\": 32, \"num_hidden_layers\": 2, "               \
  "\"num_attention_heads\": 2}, \"data\": {\"sequence_length\": 8, "           \
  "\"format\": \"%s\"}}"

Test(config_model, vocabulary_of_a_text_is_its_bytes)
{
  char text[256];
  mz_config_t *text_config = NULL;

  snprintf(text, sizeof text, NO_VOCABULARY, "tokens");
  EXPECT_ERROR(PARSE(text), MZ_ERR_CONFIG,
               "model.vocab_size: required unless data.format is \"text\"");
  snprintf(text, sizeof text, NO_VOCABULARY, "text");
  cr_assert_eq(mz_config_parse(text, "x", NULL, 0, &text_config), MZ_OK);
  cr_expect_eq(mz_config_values(text_config)->model.vocab_size, 257);
  cr_expect_eq(mz_config_values(text_config)->model.max_position_embeddings, 8);
  mz_config_destroy(&text_config);
  EXPECT_ERROR(PARSE("{\"model\": {\"hidden_size\": 32, \"vocab_size\": 9, "
                     "\"num_hidden_layers\": 2, \"num_attention_heads\": 2}}"),
               MZ_ERR_CONFIG,
               "model.max_position_embeddings: required unless "
               "data.sequence_length is given");
}

#define NO_MODEL                                                               \
  "{\"train_batch_size\": 4, \"data\": {\"sequence_length\": 8}%s}"

static void refuse_without_model(const char *more, const char *text)
{
  char whole[256];

  snprintf(whole, sizeof whole, NO_MODEL, more);
  EXPECT_ERROR(PARSE(whole), MZ_ERR_CONFIG, text);
}

Test(config_model, is_left_out_with_all_that_depends_on_it)
{
  char whole[256];
  mz_config_t *own = NULL;

  snprintf(whole, sizeof whole, NO_MODEL, ", \"moe\": {\"saved_rows\": 2}");
  cr_assert_eq(mz_config_parse(whole, "x", NULL, 0, &own), MZ_OK);
  cr_expect_eq(mz_config_values(own)->model.hidden_size, 0);
  cr_expect_eq(mz_config_values(own)->moe.num_layers, 0);
  cr_expect_eq(mz_config_values(own)->moe.saved_rows, 2);
  cr_expect_eq(mz_config_values(own)->data.sequence_length, 8);
  mz_config_destroy(&own);
  refuse_without_model(", \"moe\": {\"num_experts\": 4}",
                       "moe.num_experts: the section model is not given");
  refuse_without_model(", \"moe\": {\"ep_size\": 2}",
                       "moe.ep_size: the section model is not given");
}

#define PATHS_FORM                                                             \
  ", allowed: a path or a list of at most 64 paths or {\"path\": P, "          \
  "\"weight\": W}, W above 0"

Test(config_data, paths_have_weights)
{
  mz_config_t *config = NULL;
  const mz_data_config_t *data;

  cr_assert_eq(LOAD(&config, "data.valid=[\"v\"]",
                    "data.train=[\"a\", {\"path\": \"b\", \"weight\": 0.5}, "
                    "{\"path\": \"c\"}]"),
               MZ_OK);
  data = &mz_config_values(config)->data;
  cr_expect_eq(data->num_train, 3);
  cr_expect_str_eq(data->train[0], "a");
  cr_expect_str_eq(data->train[1], "b");
  cr_expect_str_eq(data->train[2], "c");
  cr_expect_arr_eq(data->train_weight, ((double[]){1, 0.5, 1}), 24);
  cr_expect_eq(data->num_valid, 1);
  cr_expect_str_eq(data->valid[0], "v");
  mz_config_destroy(&config);
}

Test(config_data, bad_paths_are_refused)
{
  char many[64 + 5 * (MZ_MAX_PATHS + 1)] = "data.train=[\"a\"";
  char text[512];

  REFUSED("data.train=3", "data.train: found 3" PATHS_FORM);
  REFUSED("data.train=[\"\"]", "data.train: found [\"\"]" PATHS_FORM);
  REFUSED("data.valid=[{\"path\": \"b\", \"weight\": 0}]",
          "data.valid: found [{\"path\": \"b\", \"weight\": 0}]" PATHS_FORM);
  REFUSED("data.valid=[{\"path\": \"b\", \"size\": 1}]",
          "data.valid: found [{\"path\": \"b\", \"size\": 1}]" PATHS_FORM);
  for (int i = 0; i < MZ_MAX_PATHS; i++)
    strcat(many, ", \"a\"");
  strcat(many, "]");
  snprintf(text, sizeof text, "data.train: found %.80s...%s", many + 11,
           PATHS_FORM);
  REFUSED(many, text);
}

Test(config_optimizer, plain_adam_may_use_l2)
{
  mz_config_t *config = NULL;

  cr_assert_eq(LOAD(&config, "optimizer.type=Adam",
                    "optimizer.params.adam_w_mode=false"),
               MZ_OK);
  cr_expect_not(mz_config_values(config)->optimizer.adam_w_mode);
  mz_config_destroy(&config);
  REFUSED("optimizer.params.adam_w_mode=false",
          "optimizer.params.adam_w_mode: found false, but optimizer.type is "
          "AdamW; \"Adam\" allows false");
  REFUSED("optimizer.params.betas=[0.9, 1]",
          "optimizer.params.betas: found [0.9, 1], allowed: a list of two "
          "numbers from 0 to below 1");
  REFUSED("optimizer.params.betas=0.9",
          "optimizer.params.betas: found 0.9, allowed: a list of two numbers "
          "from 0 to below 1");
}

Test(config_scheduler, warm_up_ends_at_the_rate_of_the_optimizer)
{
  mz_config_t *config = NULL;

  cr_assert_eq(LOAD(&config, "optimizer.params.lr=0.25",
                    "scheduler.type=WarmupLR",
                    "scheduler.params.warmup_max_lr=null",
                    "scheduler.params.warmup_type=linear"),
               MZ_OK);
  cr_expect_eq(mz_config_values(config)->scheduler.warmup_max_lr, 0.25);
  cr_expect_eq(mz_config_values(config)->scheduler.warmup_type,
               MZ_WARMUP_LINEAR);
  mz_config_destroy(&config);
  REFUSED("scheduler.params.warmup_num_steps=5",
          "scheduler.params.warmup_num_steps: scheduler.type is not given");
  REFUSED("scheduler.params.warmup_num_steps=0",
          "scheduler.params.warmup_num_steps: found 0, allowed: an integer of "
          "at least 1");
}

#define GROUPS "optimizer.param_groups="

Test(config_param_groups, entries_are_read)
{
  mz_config_t *config =
      load(GROUPS "[{\"pattern\": \"*bias\", \"experts\": true, \"lr\": 1e-4}, "
                  "{\"experts\": false, \"betas\": [0.5, 0.75], \"eps\": 2, "
                  "\"weight_decay\": 0}]");
  const mz_optimizer_config_t *o = &mz_config_values(config)->optimizer;

  cr_assert_eq(o->num_groups, 2);
  cr_expect_str_eq(o->groups[0].pattern, "*bias");
  cr_expect_eq(o->groups[0].which, MZ_EXPERTS_ONLY);
  cr_expect_eq(o->groups[0].hyper.gives, MZ_GIVES_LR);
  cr_expect_eq(o->groups[0].hyper.lr, 1e-4);
  cr_expect_str_eq(o->groups[1].pattern, "*");
  cr_expect_eq(o->groups[1].which, MZ_DENSE_ONLY);
  cr_expect_eq(o->groups[1].hyper.gives,
               MZ_GIVES_BETAS | MZ_GIVES_EPS | MZ_GIVES_WEIGHT_DECAY);
  cr_expect_eq(o->groups[1].hyper.beta1, 0.5);
  cr_expect_eq(o->groups[1].hyper.beta2, 0.75);
  cr_expect_eq(o->groups[1].hyper.eps, 2);
  mz_config_destroy(&config);
}

Test(config_param_groups, bad_entries_are_refused_by_place)
{
  REFUSED(GROUPS "[{}, {\"lr\": -1}]",
          "optimizer.param_groups[1].lr: found -1, allowed: a number of at "
          "least 0");
  REFUSED(GROUPS "[{\"betas\": [0.9, 1]}]",
          "optimizer.param_groups[0].betas: found [0.9, 1], allowed: a list of "
          "two numbers from 0 to below 1");
  REFUSED(GROUPS "[{\"experts\": 1}]",
          "optimizer.param_groups[0].experts: found 1, allowed: true or false");
  REFUSED(GROUPS "[{\"pattern\": \"\"}]",
          "optimizer.param_groups[0].pattern: found \"\", allowed: a string of "
          "1 to 95 bytes");
  REFUSED(GROUPS "[{\"params\": 1}]",
          "optimizer.param_groups[0].params: unknown key; an entry has "
          "pattern, experts, lr, betas, eps, weight_decay");
  REFUSED(GROUPS "[3]",
          "optimizer.param_groups[0]: found 3, allowed: an object");
}

#define SCHEDULE(type, params)                                                 \
  "scheduler={\"type\": \"" type "\", \"params\": {" params "}}"

Test(config_scheduler, decay_and_cosine_need_their_last_step)
{
  mz_config_t *config = NULL;

  REFUSED(SCHEDULE("WarmupDecayLR", ""),
          "scheduler.params.total_num_steps: required");
  REFUSED(SCHEDULE("WarmupCosineLR", ""),
          "scheduler.params.total_num_steps: required");
  config = load(SCHEDULE("WarmupCosineLR",
                         "\"total_num_steps\": 1000, \"cos_min_ratio\": 0.5"));
  cr_expect_eq(mz_config_num_notes(config), 0);
  cr_expect_eq(mz_config_values(config)->scheduler.total_num_steps, 1000);
  cr_expect_eq(mz_config_values(config)->scheduler.warmup_min_ratio, 0);
  cr_expect_eq(mz_config_values(config)->scheduler.cos_min_ratio, 0.5);
  mz_config_destroy(&config);
  config = load(SCHEDULE("WarmupDecayLR", "\"total_num_steps\": 999"));
  cr_assert_eq(mz_config_num_notes(config), 1);
  cr_expect_str_eq(mz_config_note(config, 0),
                   "scheduler.params.total_num_steps: 999 is less than "
                   "warmup_num_steps 1000: the rate falls at once after the "
                   "warm-up");
  mz_config_destroy(&config);
}

Test(config_scheduler, parameters_of_another_type_are_refused)
{
  REFUSED(SCHEDULE("WarmupLR", "\"total_num_steps\": 10"),
          "scheduler.params.total_num_steps: scheduler.type WarmupLR has no "
          "such parameter");
  REFUSED(SCHEDULE("WarmupCosineLR",
                   "\"total_num_steps\": 10, \"warmup_max_lr\": 1"),
          "scheduler.params.warmup_max_lr: scheduler.type WarmupCosineLR has "
          "no such parameter");
}

/* DeepSpeed's defaults differ between its two classes. */
Test(config_scheduler, decay_starts_from_its_own_rate_unless_null)
{
  static const struct {
    const char *params;
    double rate;
  } rows[] = {
      {SCHEDULE("WarmupDecayLR", "\"total_num_steps\": 2000"), 1e-3},
      {SCHEDULE("WarmupDecayLR",
                "\"total_num_steps\": 2000, \"warmup_max_lr\": null"),
       0.25},
      {SCHEDULE("WarmupLR", ""), 0.25},
  };

  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    mz_config_t *config = NULL;

    cr_assert_eq(LOAD(&config, "optimizer.params.lr=0.25", rows[i].params),
                 MZ_OK, "%s", mz_error_last());
    cr_expect_eq(mz_config_values(config)->scheduler.warmup_max_lr,
                 rows[i].rate, "row %zu", i);
    mz_config_destroy(&config);
  }
}
