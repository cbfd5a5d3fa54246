/* SPDX-License-Identifier: Apache-2.0 */
/* Defaults that depend on other keys, and keys checked against each other. */
#include "config/config_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "config/keys.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

enum { BYTE_VOCABULARY = 257 }; /* 256 bytes and the end of text */

static bool given(const mz_config_t *config, const char *path)
{
  return mz_config_given(config, path) != NULL;
}

static void apply_preset(const mz_config_t *config, mz_model_config_t *model)
{
  bool llama = model->architecture == MZ_ARCH_LLAMA;

  if (!given(config, "model.intermediate_size"))
    model->intermediate_size =
        llama ? mz_round_up(mz_div_up(8 * model->hidden_size, 3), 64)
              : 4 * model->hidden_size;
  if (!given(config, "model.hidden_act"))
    model->hidden_act = llama ? MZ_ACT_SWIGLU : MZ_ACT_GELU;
  if (!given(config, "model.norm")) model->norm = llama;
  if (!given(config, "model.position_embedding"))
    model->position_embedding = llama ? MZ_POS_ROPE : MZ_POS_LEARNED;
  if (!given(config, "model.bias")) model->bias = !llama;
  if (!given(config, "model.attention_bias"))
    model->attention_bias = model->bias;
  if (!given(config, "model.tie_word_embeddings"))
    model->tie_word_embeddings = !llama;
  if (!given(config, "model.num_key_value_heads"))
    model->num_key_value_heads = model->num_attention_heads;
}

static mz_status_t check_heads(const mz_model_config_t *model)
{
  int64_t heads = model->num_attention_heads;

  MZ_REQUIRE(model->hidden_size % heads == 0, MZ_ERR_CONFIG,
             "model.hidden_size: %" PRId64 " is not divisible by "
             "model.num_attention_heads %" PRId64,
             model->hidden_size, heads);
  MZ_REQUIRE(heads % model->num_key_value_heads == 0, MZ_ERR_CONFIG,
             "model.num_key_value_heads: %" PRId64 " does not divide "
             "model.num_attention_heads %" PRId64,
             model->num_key_value_heads, heads);
  MZ_REQUIRE(model->position_embedding != MZ_POS_ROPE ||
                 model->hidden_size / heads % 2 == 0,
             MZ_ERR_CONFIG,
             "model.hidden_size: %" PRId64 " / %" PRId64 " heads is %" PRId64
             " wide; rope turns pairs, so the width must be even",
             model->hidden_size, heads, model->hidden_size / heads);
  return MZ_OK;
}

static mz_status_t derive_model(mz_config_t *config)
{
  mz_model_config_t *model = &config->values.model;

  if (!given(config, "model.vocab_size")) {
    MZ_REQUIRE(config->values.data.format == MZ_DATA_TEXT, MZ_ERR_CONFIG,
               "model.vocab_size: required unless data.format is \"text\"");
    model->vocab_size = BYTE_VOCABULARY;
  }
  apply_preset(config, model);
  return MZ_TRACE(check_heads(model));
}

static mz_status_t check_absent_model(const mz_config_t *config)
{
  const mz_key_t *key;

  for (int i = 0; (key = mz_key_at(i)); i++)
    MZ_REQUIRE(!mz_key_needs_model(key) || !given(config, key->path),
               MZ_ERR_CONFIG, "%s: the section model is not given", key->path);
  MZ_REQUIRE(given(config, "data.sequence_length"), MZ_ERR_CONFIG,
             "model: required; a program with a model of its own gives "
             "data.sequence_length instead");
  return MZ_OK;
}

static mz_status_t derive_length(mz_config_t *config)
{
  mz_model_config_t *model = &config->values.model;
  mz_data_config_t *data = &config->values.data;
  bool length = given(config, "data.sequence_length");

  if (!given(config, "model.max_position_embeddings")) {
    MZ_REQUIRE(length, MZ_ERR_CONFIG,
               "model.max_position_embeddings: required unless "
               "data.sequence_length is given");
    model->max_position_embeddings = data->sequence_length;
  }
  if (!length) data->sequence_length = model->max_position_embeddings;
  MZ_REQUIRE(data->sequence_length <= model->max_position_embeddings,
             MZ_ERR_CONFIG,
             "data.sequence_length: %" PRId64 " is more than "
             "model.max_position_embeddings %" PRId64,
             data->sequence_length, model->max_position_embeddings);
  return MZ_OK;
}

static mz_status_t derive_optimizer(mz_config_t *config)
{
  mz_config_values_t *values = &config->values;
  const json_t *type = mz_config_given(config, "optimizer.type");
  const char *name = type ? json_string_value(type) : "AdamW";

  MZ_REQUIRE(values->optimizer.adam_w_mode || strcasecmp(name, "Adam") == 0,
             MZ_ERR_CONFIG,
             "optimizer.params.adam_w_mode: found false, but optimizer.type "
             "is AdamW; \"Adam\" allows false");
  return MZ_OK;
}

/* DeepSpeed's default of WarmupDecayLR, where null is the optimizer's rate. */
static double default_max_lr(const mz_config_t *config)
{
  bool absent = !mz_config_at(config->root, "scheduler.params.warmup_max_lr");

  if (absent && config->values.scheduler.type == MZ_SCHED_WARMUP_DECAY)
    return 1e-3;
  return config->values.optimizer.lr;
}

static mz_status_t derive_scheduler(mz_config_t *config)
{
  mz_scheduler_config_t *s = &config->values.scheduler;
  bool ends =
      s->type == MZ_SCHED_WARMUP_DECAY || s->type == MZ_SCHED_WARMUP_COSINE;
  const mz_key_t *key;

  if (!given(config, "scheduler.params.warmup_max_lr"))
    s->warmup_max_lr = default_max_lr(config);
  for (int i = 0; (key = mz_key_at(i)); i++) {
    if (!given(config, key->path) || mz_key_fits_schedule(key, s->type))
      continue;
    MZ_REQUIRE(s->type != MZ_SCHED_CONSTANT, MZ_ERR_CONFIG,
               "%s: scheduler.type is not given", key->path);
    MZ_FAIL(MZ_ERR_CONFIG, "%s: scheduler.type %s has no such parameter",
            key->path,
            json_string_value(mz_config_given(config, "scheduler.type")));
  }
  MZ_REQUIRE(!ends || s->total_num_steps > 0, MZ_ERR_CONFIG,
             "scheduler.params.total_num_steps: required");
  if (!ends || s->total_num_steps >= s->warmup_num_steps) return MZ_OK;
  return MZ_TRACE(mz_config_add_note(
      config,
      "scheduler.params.total_num_steps: %" PRId64 " is less than "
      "warmup_num_steps %" PRId64 ": the rate falls at once after the warm-up",
      s->total_num_steps, s->warmup_num_steps));
}

static mz_status_t check_zero(const mz_zero_config_t *zero)
{
  MZ_REQUIRE(zero->allgather_bucket_size % 2 == 0, MZ_ERR_CONFIG,
             "zero_optimization.allgather_bucket_size: found %" PRId64
             ", allowed: an even number",
             zero->allgather_bucket_size);
  return MZ_OK;
}

static mz_status_t check_comm(const mz_comm_config_t *comm)
{
  MZ_REQUIRE(comm->wait == MZ_WAIT_HOST || comm->thread, MZ_ERR_CONFIG,
             "comm.wait \"stream\" needs comm.thread true: while the stream "
             "waits nobody else would make progress");
  return MZ_OK;
}

static mz_status_t check_fault(const char *fault)
{
  static const char *const kinds[] = {"oom", "late", "stall", "exit"};
  size_t length = fault ? strcspn(fault, ":") : 0;
  unsigned rank, step;
  int end = 0;

  if (!fault) return MZ_OK;
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
    if (strlen(kinds[i]) == length && strncmp(fault, kinds[i], length) == 0 &&
        sscanf(fault + length, ":rank%9u:step%9u%n", &rank, &step, &end) == 2 &&
        fault[length + (size_t)end] == '\0')
      return MZ_OK;
  MZ_FAIL(MZ_ERR_CONFIG,
          "debug.fault: found \"%s\", allowed: KIND:rank<R>:step<N>, KIND one "
          "of oom, late, stall, exit",
          fault);
}

static void derive_types(mz_config_t *config)
{
  mz_config_values_t *values = &config->values;

  if (!given(config, "communication_data_type"))
    values->communication_data_type = values->bf16 ? MZ_BF16 : MZ_F32;
}

mz_status_t mz_config_derive(mz_config_t *config)
{
  if (given(config, "model")) {
    MZ_TRY(derive_length(config));
    MZ_TRY(derive_model(config));
  } else {
    MZ_TRY(check_absent_model(config));
  }
  if (!given(config, "data.seed"))
    config->values.data.seed = config->values.train.seed;
  MZ_TRY(mz_config_derive_moe(config));
  MZ_TRY(derive_optimizer(config));
  MZ_TRY(derive_scheduler(config));
  derive_types(config);
  MZ_TRY(check_zero(&config->values.zero));
  MZ_TRY(check_comm(&config->values.comm));
  return MZ_TRACE(check_fault(config->values.debug.fault));
}
