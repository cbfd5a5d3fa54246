/* SPDX-License-Identifier: Apache-2.0 */
/* Reading: syntax, names, types, --set, and keys that are noted or refused. */
#include "config_base.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void expect_notes(const char *assignment, int num, const char *first)
{
  mz_config_t *config = load(assignment);

  cr_expect_eq(mz_config_num_notes(config), num, "%s", assignment);
  if (num > 0 && mz_config_num_notes(config) > 0)
    cr_expect_str_eq(mz_config_note(config, 0), first);
  mz_config_destroy(&config);
}

Test(config_syntax, has_file_line_and_column)
{
  EXPECT_ERROR(PARSE("{\n  \"a\": 1,\n  \"b\" 2\n}"), MZ_ERR_CONFIG,
               "x.json:3:7: ':' expected near '2'");
  EXPECT_ERROR(PARSE("{\"train_batch_size\": 1,\n \"train_batch_size\": 2}"),
               MZ_ERR_CONFIG,
               "x.json:2:19: duplicate object key near "
               "'\"train_batch_size\"'");
  EXPECT_ERROR(PARSE("{\"model\": {"), MZ_ERR_CONFIG,
               "x.json:1:11: string or '}' expected near end of file");
}

Test(config_syntax, empty_and_other_documents_are_refused)
{
  EXPECT_ERROR(PARSE(""), MZ_ERR_CONFIG, "x.json: the configuration is empty");
  EXPECT_ERROR(PARSE(" \n\t"), MZ_ERR_CONFIG,
               "x.json: the configuration is empty");
  EXPECT_ERROR(PARSE("[1]"), MZ_ERR_CONFIG,
               "x.json:1:1: the configuration is not an object");
  EXPECT_ERROR(PARSE("{}"), MZ_ERR_CONFIG,
               "model: required; a program with a model of its own gives "
               "data.sequence_length instead");
  EXPECT_ERROR(PARSE("{\"model\": {}, \"train_batch_size\": 1}"), MZ_ERR_CONFIG,
               "model.hidden_size: required");
  EXPECT_ERROR(PARSE(NULL), MZ_ERR_ARG, "text, name or assignments is NULL");
}

Test(config_read, reads_a_file_and_names_a_missing_one)
{
  char path[] = "/tmp/test_config_XXXXXX";
  FILE *file = fdopen(mkstemp(path), "w");
  mz_config_t *read = NULL;
  char text[128];

  EXPECT_ERROR(mz_config_read("/none/x.json", NULL, 0, none), MZ_ERR_IO,
               "/none/x.json: No such file or directory");
  EXPECT_ERROR(mz_config_read("/tmp", NULL, 0, none), MZ_ERR_IO,
               "/tmp: Is a directory");
  snprintf(text, sizeof text, "%s: the configuration is empty", path);
  EXPECT_ERROR(mz_config_read(path, NULL, 0, none), MZ_ERR_CONFIG, text);

  fputs(BASE, file);
  fflush(file);
  cr_assert_eq(mz_config_read(path, NULL, 0, &read), MZ_OK);
  cr_expect_eq(mz_config_values(read)->model.hidden_size, 32);
  mz_config_destroy(&read);
  cr_expect_null(read);

  fputc('\0', file);
  fclose(file);
  snprintf(text, sizeof text,
           "%s: a zero byte after %zu bytes: not a configuration", path,
           strlen(BASE));
  EXPECT_ERROR(mz_config_read(path, NULL, 0, none), MZ_ERR_CONFIG, text);
  unlink(path);
}

Test(config_names, unknown_key_has_the_nearest_name)
{
  REFUSED("zero_optimization.stge=3",
          "zero_optimization.stge: unknown key; did you mean \"stage\"?");
  REFUSED("modle={}", "modle: unknown key; did you mean \"model\"?");
  REFUSED("optimizer.params.beta=[0.9,0.9]",
          "optimizer.params.beta: unknown key; did you mean \"betas\"?");
  REFUSED("moe.experts=4",
          "moe.experts: unknown key; did you mean \"num_experts\"?");
  REFUSED("zero_optimization.offload_param.dvice=cpu",
          "zero_optimization.offload_param.dvice: unknown key; did you mean "
          "\"device\"?");
}

Test(config_names, a_name_with_a_dot_is_not_a_path)
{
  EXPECT_ERROR(PARSE("{\"train.steps\": 3, \"model\": {\"vocab_size\": 64, "
                     "\"hidden_size\": 32, \"num_hidden_layers\": 4, "
                     "\"num_attention_heads\": 2}}"),
               MZ_ERR_CONFIG,
               "train.steps: unknown key; did you mean \"train\"?");
}

Test(config_names, a_section_must_be_an_object)
{
  REFUSED("zero_optimization=3",
          "zero_optimization: found 3, allowed: an object that holds keys");
  expect_notes("zero_optimization=null", 0, NULL);
  expect_notes("zero_optimization.offload_param=null", 0, NULL);
}

Test(config_types, path_found_and_allowed_are_named)
{
  REFUSED("zero_optimization.stage=7",
          "zero_optimization.stage: found 7, allowed: an integer from 0 to 3");
  REFUSED("zero_optimization.stage=two",
          "zero_optimization.stage: found \"two\", allowed: an integer from 0 "
          "to 3");
  REFUSED("model.hidden_size=x",
          "model.hidden_size: found \"x\", allowed: an integer from 1 to "
          "2147483647");
  REFUSED("train.steps=1.5",
          "train.steps: found 1.5, allowed: an integer of at least 0");
  REFUSED("optimizer.params.lr=-0.1", "optimizer.params.lr: found -0.1, "
                                      "allowed: a number of at least 0");
  REFUSED("moe.capacity_factor=0",
          "moe.capacity_factor: found 0, allowed: a number above 0");
  REFUSED("model.dropout=1",
          "model.dropout: found 1, allowed: a number from 0 to below 1");
  REFUSED("model.tie_word_embeddings=1",
          "model.tie_word_embeddings: found 1, allowed: true or false");
  REFUSED("monitor.jsonl=\"\"",
          "monitor.jsonl: found \"\", allowed: a string that is not empty");
  REFUSED("model.architecture=bert",
          "model.architecture: found \"bert\", allowed: one of \"gpt2\", "
          "\"llama\"");
  REFUSED("train.device=tpu", "train.device: found \"tpu\", allowed: one of "
                              "\"auto\", \"cpu\", \"cuda\"");
  REFUSED("steps_per_print=0", "steps_per_print: found 0, allowed: an integer "
                               "from 1 to 2147483647 or null");
  REFUSED("train.steps=null",
          "train.steps: found null, allowed: an integer of at least 0");
}

Test(config_types, long_values_are_cut)
{
  char assignment[256], found[256];

  memset(found, 'a', sizeof found);
  snprintf(assignment, sizeof assignment, "train.steps=%.200s", found);
  snprintf(found, sizeof found,
           "train.steps: found \"%.79s..., allowed: an integer of at least 0",
           assignment + 12);
  REFUSED(assignment, found);
}

Test(config_types, booleans_are_no_numbers)
{
  REFUSED("train.steps=true",
          "train.steps: found true, allowed: an integer of at least 0");
  REFUSED("optimizer.params.lr=false",
          "optimizer.params.lr: found false, allowed: a number of at least 0");
  REFUSED("moe={\"num_experts\": true}",
          "moe.num_experts: found true, allowed: an integer or a list of "
          "integers, one a MoE layer, each of at least 0");
}

Test(config_types, integral_reals_are_integers)
{
  mz_config_t *config = load("zero_optimization.reduce_bucket_size=2e8");

  cr_expect_eq(mz_config_values(config)->zero.reduce_bucket_size, 200000000);
  mz_config_destroy(&config);
  REFUSED("zero_optimization.reduce_bucket_size=1e30",
          "zero_optimization.reduce_bucket_size: found 1e+30, allowed: an "
          "integer of at least 1");
  REFUSED("zero_optimization.allgather_bucket_size=7",
          "zero_optimization.allgather_bucket_size: found 7, allowed: an even "
          "number");
}

Test(config_types, auto_is_not_given)
{
  mz_config_t *config = NULL;

  cr_assert_eq(LOAD(&config, "train.steps=auto", "scheduler=auto",
                    "scheduler.params=auto", "train_batch_size=auto",
                    "train_micro_batch_size_per_gpu=3", "fp16.enabled=auto"),
               MZ_ERR_CONFIG);
  cr_expect_str_eq(mz_error_message(),
                   "scheduler.params: scheduler holds a value, not keys");
  cr_assert_eq(LOAD(&config, "train.steps=auto", "scheduler=auto",
                    "train_batch_size=auto", "train_micro_batch_size_per_gpu=3",
                    "fp16.enabled=auto", "optimizer.params.lr=auto"),
               MZ_OK);
  cr_expect_eq(mz_config_values(config)->train.steps, 100);
  cr_expect_eq(mz_config_values(config)->optimizer.lr, 1e-3);
  cr_assert_eq(mz_config_resolve(config, 2), MZ_OK);
  cr_expect_eq(mz_config_values(config)->train_batch_size, 6);
  cr_expect_eq(mz_config_num_notes(config), 0);
  mz_config_destroy(&config);
}

Test(config_set, takes_json_or_a_bare_word_and_the_last_wins)
{
  mz_config_t *config = NULL;
  const mz_config_values_t *values;

  cr_assert_eq(LOAD(&config, "train.steps=5", "train.steps=7",
                    "data.train=/a=b.txt", "checkpoint.dir=\"two words\"",
                    "moe.num_experts=4", "moe.layers.every=2",
                    "optimizer.params.betas=[0.8, 0.9]"),
               MZ_OK, "%s", mz_error_last());
  values = mz_config_values(config);
  cr_expect_eq(values->train.steps, 7);
  cr_expect_eq(values->data.num_train, 1);
  cr_expect_str_eq(values->data.train[0], "/a=b.txt");
  cr_expect_str_eq(values->checkpoint.dir, "two words");
  cr_expect_eq(values->moe.num_layers, 2);
  cr_expect_eq(values->optimizer.beta1, 0.8);
  cr_expect_eq(values->optimizer.beta2, 0.9);
  mz_config_destroy(&config);
}

Test(config_set, errors_name_the_assignment)
{
  REFUSED("train.steps", "--set \"train.steps\": expected KEY=VALUE");
  REFUSED("=3", "--set \"=3\": expected KEY=VALUE");
  REFUSED("data.train=\xff", "--set \"data.train=\xff\": the value is not "
                             "UTF-8");
  REFUSED("train_batch_size.x=3",
          "train_batch_size.x: train_batch_size holds a value, not keys");
  REFUSED("train.stepps=3",
          "train.stepps: unknown key; did you mean \"steps\"?");
}

Test(config_set, the_stream_waits_with_a_thread_only)
{
  mz_config_t *config = load("comm.wait=stream");

  cr_expect_eq(mz_config_values(config)->comm.wait, MZ_WAIT_STREAM);
  mz_config_destroy(&config);
  EXPECT_ERROR(LOAD(none, "comm.wait=stream", "comm.thread=false"),
               MZ_ERR_CONFIG,
               "comm.wait \"stream\" needs comm.thread true: while the stream "
               "waits nobody else would make progress");
}

Test(config_sorts, later_keys_are_refused_by_name)
{
  LATER("fp16.enabled=true", "not supported yet: fp16.enabled (found true)");
  LATER("bf16.bf16_optimizer_states=true",
        "not supported yet: bf16.bf16_optimizer_states (found true)");
  LATER("zero_optimization.offload_param.device=cpu",
        "not supported yet: zero_optimization.offload_param.device (found "
        "\"cpu\")");
  LATER("zero_optimization.cpu_offload=true",
        "not supported yet: zero_optimization.cpu_offload (found true)");
  LATER("zero_optimization.zero_quantized_weights=true",
        "not supported yet: zero_optimization.zero_quantized_weights (found "
        "true)");
  LATER("scheduler.type=OneCycle",
        "not supported yet: scheduler.type (found \"OneCycle\")");
  LATER("scheduler.params.warmup_max_lr=[1e-3, 1e-4]",
        "not supported yet: scheduler.params.warmup_max_lr as a list, a value "
        "by parameter group");
  LATER("optimizer.type=lamb",
        "not supported yet: optimizer.type (found \"lamb\")");
  LATER("train.recompute=full",
        "not supported yet: train.recompute (found \"full\")");
  LATER("moe.expert_cache=8", "not supported yet: moe.expert_cache (found 8)");
  LATER("comm.flat_limit=8", "not supported yet: comm.flat_limit (found 8)");
  LATER("checkpoint.async=true",
        "not supported yet: checkpoint.async (found true)");
  LATER("monitor.csv=x.csv",
        "not supported yet: monitor.csv (found \"x.csv\")");
  LATER("tensorboard.enabled=true",
        "not supported yet: tensorboard.enabled (found true)");
  LATER("data.format=hdf5", "not supported yet: data.format (found \"hdf5\")");
  LATER("data_types.grad_accum_dtype=bf16",
        "not supported yet: data_types.grad_accum_dtype (found \"bf16\")");
  LATER("communication_data_type=fp16",
        "not supported yet: communication_data_type (found \"fp16\")");
}

Test(config_sorts, later_keys_are_silent_at_their_default)
{
  expect_notes("fp16.enabled=false", 0, NULL);
  expect_notes("fp16.loss_scale=0", 0, NULL);
  expect_notes("zero_optimization.offload_param.device=none", 0, NULL);
  expect_notes("zero_optimization.zero_quantized_weights=false", 0, NULL);
  expect_notes("optimizer.type=aDaM", 0, NULL);
  expect_notes("data_types.grad_accum_dtype=fp32", 0, NULL);
  expect_notes("communication_data_type=fp32", 0, NULL);
  expect_notes("communication_data_type=null", 0, NULL);
  expect_notes("gradient_predivide_factor=1", 0, NULL);
  expect_notes("amp={\"enabled\": false, \"opt_level\": \"O1\"}", 0, NULL);
  expect_notes("wandb={}", 0, NULL);
}

Test(config_sorts, what_has_nothing_to_do_is_noted)
{
  expect_notes("zero_optimization.allgather_partitions=true", 1,
               "zero_optimization.allgather_partitions: nothing to do: "
               "parameters are always gathered from their shards");
  expect_notes("zero_optimization.overlap_comm=false", 1,
               "zero_optimization.overlap_comm: nothing to do: the plan "
               "overlaps wherever it can (see comm.thread)");
  expect_notes("zero_optimization.reduce_scatter=true", 1,
               "zero_optimization.reduce_scatter: nothing to do: gradients "
               "always go to their owner only");
  expect_notes("fp16.hysteresis=3", 1,
               "fp16.hysteresis: nothing to do: no effect: fp16 is not "
               "enabled");
  expect_notes("bf16.check_grad_overflow=true", 1,
               "bf16.check_grad_overflow: nothing to do: a step with a "
               "gradient that is not finite is skipped");
  expect_notes("checkpoint.tag_validation=fail", 1,
               "checkpoint.tag_validation: nothing to do: one tag is chosen "
               "by rank 0 for all");
  LATER("zero_optimization.contiguous_gradients=false",
        "zero_optimization.contiguous_gradients: found false, refused: "
        "gradients always lie in planned buckets");
}

Test(config_sorts, other_products_are_refused_with_the_reason)
{
  LATER("elasticity={\"enabled\": true}",
        "elasticity: found {\"enabled\": true}, refused: any checkpoint loads "
        "at any number of ranks");
  LATER("expert_parallel={\"autoep_size\": 2}",
        "expert_parallel: found {\"autoep_size\": 2}, refused: use the section "
        "moe");
  LATER("zero_optimization.legacy_stage1=true",
        "zero_optimization.legacy_stage1: found true, refused: DeepSpeed "
        "refuses it too");
}

Test(config_sorts, a_type_error_comes_before_the_refusal)
{
  REFUSED("fp16.enabled=1", "fp16.enabled: found 1, allowed: true or false");
  REFUSED("moe.score=relu", "moe.score: found \"relu\", allowed: one of "
                            "\"softmax\", \"sigmoid\"");
}

#define DEEPSPEED                                                              \
  "{\"model\": {\"vocab_size\": 64, \"hidden_size\": 32, "                     \
  "\"num_hidden_layers\": 2, \"num_attention_heads\": 2, "                     \
  "\"max_position_embeddings\": 16}, "                                         \
  "\"train_batch_size\": \"auto\", "                                           \
  "\"train_micro_batch_size_per_gpu\": 2, "                                    \
  "\"gradient_accumulation_steps\": \"auto\", \"steps_per_print\": 2000, "     \
  "\"gradient_clipping\": \"auto\", \"wall_clock_breakdown\": false, "         \
  "\"fp16\": {\"enabled\": \"auto\", \"loss_scale\": 0, "                      \
  "\"loss_scale_window\": 1000, \"initial_scale_power\": 16, "                 \
  "\"hysteresis\": 2, \"min_loss_scale\": 1}, "                                \
  "\"bf16\": {\"enabled\": false}, "                                           \
  "\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 3e-5, "           \
  "\"betas\": \"auto\", \"eps\": \"auto\", \"weight_decay\": 0.1}}, "          \
  "\"scheduler\": {\"type\": \"WarmupLR\", \"params\": "                       \
  "{\"warmup_min_lr\": 0, \"warmup_max_lr\": \"auto\", "                       \
  "\"warmup_num_steps\": 500}}, "                                              \
  "\"zero_optimization\": {\"stage\": 2, "                                     \
  "\"offload_optimizer\": {\"device\": \"none\", \"pin_memory\": true}, "      \
  "\"allgather_partitions\": true, \"allgather_bucket_size\": 2e8, "           \
  "\"overlap_comm\": true, \"reduce_scatter\": true, "                         \
  "\"reduce_bucket_size\": 2e8, \"contiguous_gradients\": true}}"

Test(config_parse, a_file_written_for_deepspeed_loads)
{
  mz_config_t *config = NULL;
  const mz_config_values_t *values;

  cr_assert_eq(mz_config_parse(DEEPSPEED, "ds.json", NULL, 0, &config), MZ_OK,
               "%s", mz_error_last());
  cr_assert_eq(mz_config_resolve(config, 4), MZ_OK);
  values = mz_config_values(config);
  cr_expect_eq(values->train_batch_size, 8);
  cr_expect_eq(values->gradient_clipping, 1);
  cr_expect_eq(values->steps_per_print, 2000);
  cr_expect_eq(values->optimizer.weight_decay, 0.1);
  cr_expect_eq(values->optimizer.beta2, 0.999);
  cr_expect_eq(values->scheduler.warmup_max_lr, 3e-5);
  cr_expect_eq(values->zero.stage, 2);
  cr_expect_eq(values->zero.allgather_bucket_size, 200000000);
  cr_expect_eq(mz_config_num_notes(config), 4);
  mz_config_destroy(&config);
}
