/* SPDX-License-Identifier: Apache-2.0 */
/* The MoE layers: which blocks, how many experts each, shared by how many. */
#include "config/config_impl.h"

#include "base/check.h"
#include "config/keys.h"

static bool int32_value(const json_t *value, int32_t min, int32_t *out)
{
  json_int_t x = json_integer_value(value);

  if (!json_is_integer(value) || x < min || x > INT32_MAX) return false;
  *out = (int32_t)x;
  return true;
}

static mz_status_t refuse(const char *path, const json_t *value)
{
  return MZ_TRACE(mz_key_refuse(mz_key_find(path), value));
}

/* {"every": n}: blocks n-1, 2n-1, ... */
static mz_status_t every_block(const json_t *value, int64_t num_blocks,
                               mz_moe_config_t *moe)
{
  int32_t every;

  if (json_object_size(value) != 1 ||
      !int32_value(json_object_get(value, "every"), 1, &every))
    return MZ_TRACE(refuse("moe.layers", value));
  MZ_REQUIRE(every <= num_blocks, MZ_ERR_CONFIG,
             "moe.layers: every %" PRId32 " names no block, "
             "model.num_hidden_layers is %" PRId64,
             every, num_blocks);
  for (int64_t block = every - 1; block < num_blocks; block += every)
    moe->layer[moe->num_layers++] = (int32_t)block;
  return MZ_OK;
}

static mz_status_t listed_blocks(const json_t *value, int64_t num_blocks,
                                 mz_moe_config_t *moe)
{
  int32_t block, before = -1;

  for (size_t i = 0; i < json_array_size(value); i++) {
    if (!int32_value(json_array_get(value, i), before + 1, &block))
      return MZ_TRACE(refuse("moe.layers", value));
    MZ_REQUIRE(block < num_blocks, MZ_ERR_CONFIG,
               "moe.layers: block %" PRId32 " is not below "
               "model.num_hidden_layers %" PRId64,
               block, num_blocks);
    moe->layer[moe->num_layers++] = block;
    before = block;
  }
  return MZ_OK;
}

static mz_status_t find_blocks(const mz_config_t *config, int64_t num_blocks,
                               mz_moe_config_t *moe)
{
  const json_t *value = mz_config_given(config, "moe.layers");

  if (json_is_object(value))
    return MZ_TRACE(every_block(value, num_blocks, moe));
  if (json_is_array(value))
    return MZ_TRACE(listed_blocks(value, num_blocks, moe));
  if (value) return MZ_TRACE(refuse("moe.layers", value));
  for (int32_t block = 0; block < num_blocks; block++)
    moe->layer[moe->num_layers++] = block;
  return MZ_OK;
}

/* A number for all layers or a list with one a layer. */
static mz_status_t read_per_layer(const char *path, const json_t *value,
                                  int32_t min, int32_t num_layers, int32_t *out)
{
  if (!json_is_array(value)) {
    int32_t same;
    if (!int32_value(value, min, &same)) return MZ_TRACE(refuse(path, value));
    for (int32_t i = 0; i < num_layers; i++)
      out[i] = same;
    return MZ_OK;
  }
  MZ_REQUIRE(json_array_size(value) == (size_t)num_layers, MZ_ERR_CONFIG,
             "%s: a list of %zu for %" PRId32
             " blocks (moe.layers, all by default)",
             path, json_array_size(value), num_layers);
  for (int32_t i = 0; i < num_layers; i++)
    if (!int32_value(json_array_get(value, (size_t)i), min, &out[i]))
      return MZ_TRACE(refuse(path, value));
  return MZ_OK;
}

static mz_status_t read_ep_size(const mz_config_t *config, mz_moe_config_t *moe)
{
  const json_t *value = mz_config_given(config, "moe.ep_size");
  const json_t *other =
      mz_config_given(config, "moe.expert_model_parallel_size");

  MZ_REQUIRE(!value || !other, MZ_ERR_CONFIG,
             "moe.expert_model_parallel_size: moe.ep_size is given too; they "
             "are two names of one key");
  if (value || other)
    return MZ_TRACE(read_per_layer("moe.ep_size", value ? value : other, 1,
                                   moe->num_layers, moe->ep_size));
  for (int32_t i = 0; i < moe->num_layers; i++)
    moe->ep_size[i] = 1;
  return MZ_OK;
}

/* A layer with 0 experts is a dense one. */
static void drop_dense_layers(mz_moe_config_t *moe)
{
  int32_t kept = 0;

  for (int32_t i = 0; i < moe->num_layers; i++) {
    if (moe->num_experts[i] == 0) continue;
    moe->layer[kept] = moe->layer[i];
    moe->num_experts[kept] = moe->num_experts[i];
    moe->ep_size[kept] = moe->ep_size[i];
    kept++;
  }
  for (int32_t i = kept; i < moe->num_layers; i++)
    moe->layer[i] = moe->num_experts[i] = moe->ep_size[i] = 0;
  moe->num_layers = kept;
}

static mz_status_t resolve_noise(const mz_config_t *config,
                                 mz_moe_config_t *moe)
{
  bool policy = mz_config_given(config, "moe.noisy_gate_policy") != NULL;

  if (!mz_config_given(config, "moe.gate_noise"))
    moe->gate_noise = moe->noisy_gate_policy == MZ_NOISE_JITTER ? 0.01 : 0;
  else if (!policy && moe->gate_noise > 0)
    moe->noisy_gate_policy = MZ_NOISE_JITTER;
  MZ_REQUIRE(
      moe->gate_noise == 0 || moe->noisy_gate_policy == MZ_NOISE_JITTER,
      MZ_ERR_CONFIG,
      "moe.gate_noise: %g is of Jitter; moe.noisy_gate_policy is another",
      moe->gate_noise);
  return MZ_OK;
}

/* What means something only together with something else. */
static mz_status_t check_choice(const mz_moe_config_t *moe)
{
  bool rsample = moe->noisy_gate_policy == MZ_NOISE_RSAMPLE;

  MZ_REQUIRE(!rsample || moe->k == 1, MZ_ERR_CONFIG,
             "moe.noisy_gate_policy: RSample draws the only choice, moe.k is "
             "%" PRId64,
             moe->k);
  MZ_REQUIRE(!moe->top2_2nd_expert_sampling || moe->k == 2, MZ_ERR_CONFIG,
             "moe.top2_2nd_expert_sampling: draws the second choice of 2, "
             "moe.k is %" PRId64,
             moe->k);
  MZ_REQUIRE(moe->bias_update_rate == 0 ||
                 !(rsample || moe->top2_2nd_expert_sampling),
             MZ_ERR_CONFIG,
             "moe.bias_update_rate: a bias moves choices by the gates; they "
             "cannot be drawn too");
  MZ_REQUIRE(moe->z_loss_coef == 0 || moe->score == MZ_SCORE_SOFTMAX,
             MZ_ERR_CONFIG,
             "moe.z_loss_coef: %g, but the z-loss is of softmax and moe.score "
             "is sigmoid",
             moe->z_loss_coef);
  return MZ_OK;
}

/* The dense map beside the experts. */
static mz_status_t check_beside(const mz_moe_config_t *moe)
{
  MZ_REQUIRE(!moe->use_residual || moe->num_shared_experts == 0, MZ_ERR_CONFIG,
             "moe.use_residual: %" PRId64 " shared experts are given too; a "
             "layer has one dense feed-forward beside its experts, mixed in "
             "(use_residual) or added (num_shared_experts)",
             moe->num_shared_experts);
  MZ_REQUIRE(!moe->shared_expert_gate || moe->num_shared_experts > 0,
             MZ_ERR_CONFIG,
             "moe.shared_expert_gate: moe.num_shared_experts is 0, there is "
             "nothing to multiply");
  MZ_REQUIRE(moe->num_shared_experts == 0 ||
                 moe->shared_expert_intermediate_size <=
                     INT64_MAX / moe->num_shared_experts,
             MZ_ERR_CONFIG,
             "moe.num_shared_experts: %" PRId64 " of width %" PRId64
             " are more than can be counted",
             moe->num_shared_experts, moe->shared_expert_intermediate_size);
  return MZ_OK;
}

mz_status_t mz_config_derive_moe(mz_config_t *config)
{
  mz_moe_config_t *moe = &config->values.moe;
  const json_t *section = mz_config_given(config, "moe");
  const json_t *experts = mz_config_given(config, "moe.num_experts");

  if (!mz_config_given(config, "moe.use_rts")) moe->use_rts = moe->k == 1;
  if (moe->use_rts) moe->drop_policy = MZ_DROP_RANDOM;
  if (!mz_config_given(config, "moe.eval_drop_tokens"))
    moe->eval_drop_tokens = moe->drop_tokens;
  MZ_TRY(resolve_noise(config, moe));
  MZ_TRY(check_choice(moe));
  if (!mz_config_given(config, "moe.expert_intermediate_size"))
    moe->expert_intermediate_size = config->values.model.intermediate_size;
  if (!mz_config_given(config, "moe.shared_expert_intermediate_size"))
    moe->shared_expert_intermediate_size = moe->expert_intermediate_size;
  MZ_TRY(check_beside(moe));
  if (!mz_config_given(config, "moe.expert_bias"))
    moe->expert_bias = config->values.model.bias;
  if (!experts) {
    /* an application's own layers take their numbers from its program */
    MZ_REQUIRE(json_object_size(section) == 0 ||
                   !mz_config_given(config, "model"),
               MZ_ERR_CONFIG,
               "moe.num_experts: required where the section moe is given");
    return MZ_OK;
  }
  MZ_TRY(find_blocks(config, config->values.model.num_hidden_layers, moe));
  MZ_TRY(read_per_layer("moe.num_experts", experts, 0, moe->num_layers,
                        moe->num_experts));
  MZ_TRY(read_ep_size(config, moe));
  drop_dense_layers(moe);
  for (int32_t i = 0; i < moe->num_layers; i++)
    MZ_REQUIRE(moe->k <= moe->num_experts[i], MZ_ERR_CONFIG,
               "moe.k: %" PRId64 " choices of %" PRId32 " experts (block "
               "%" PRId32 "); k is at most moe.num_experts",
               moe->k, moe->num_experts[i], moe->layer[i]);
  return MZ_OK;
}

json_t *mz_key_write_moe_list(const mz_key_t *key,
                              const mz_config_values_t *values)
{
  const void *field = (const char *)values + key->offset;
  const int32_t *numbers = field;
  json_t *list = json_array();

  for (int32_t i = 0; list && i < values->moe.num_layers; i++) {
    if (json_array_append_new(list, json_integer(numbers[i])) == 0) continue;
    json_decref(list);
    list = NULL;
  }
  return list;
}

static bool above_zero(const json_t *value, double *out)
{
  *out = json_number_value(value);
  return json_is_number(value) && isfinite(*out) && *out > 0;
}

mz_status_t mz_key_read_temperature(const mz_key_t *key, const json_t *value,
                                    mz_config_values_t *values)
{
  mz_moe_config_t *moe = &values->moe;
  const json_t *steps = json_object_get(value, "steps");
  int32_t num = 0;
  bool good;

  if (json_is_object(value)) {
    good = json_object_size(value) == 3 && int32_value(steps, 1, &num) &&
           above_zero(json_object_get(value, "start"), &moe->temperature) &&
           above_zero(json_object_get(value, "end"), &moe->temperature_end);
  } else {
    good = above_zero(value, &moe->temperature);
    moe->temperature_end = moe->temperature;
  }
  moe->temperature_steps = num;
  return good ? MZ_OK : MZ_TRACE(mz_key_refuse(key, value));
}

json_t *mz_key_write_temperature(const mz_key_t *key,
                                 const mz_config_values_t *values)
{
  const mz_moe_config_t *moe = &values->moe;

  if (moe->temperature_steps == 0) return json_real(moe->temperature);
  return json_pack("{s:f, s:f, s:I}", "start", moe->temperature, "end",
                   moe->temperature_end, "steps",
                   (json_int_t)moe->temperature_steps);
}
