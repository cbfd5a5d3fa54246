/* SPDX-License-Identifier: Apache-2.0 */
/* The residual stream is never copied: every norm adds the branch before it and
 * keeps the sum, which its backward reads; the gradient of the stream is one
 * buffer that backward passes through all norms. A dense branch writes the
 * gradient of its input over that input. */
#include <moezero/gpt.h>

#include "base/alloc.h"
#include "base/check.h"
#include "model/common.h"
#include "model/layers.h"
#include "moe/declare.h"

#include <math.h>

typedef struct gpt {
  const mz_config_values_t *config;
  mz_decl_t *decl;
  int32_t d_stream; /* gradient of the residual stream */
  int32_t x;        /* the stream so far */
  int32_t y, d_y;   /* the branch to be added to it; -1: none, no dropout */
  double output_init_std;
  float *logits_out; /* NULL: the model has a loss */
} gpt_t;

/* Gradient of the last branch: the stream's own, unless dropout masks it. */
static int32_t branch_grad(const gpt_t *g)
{
  return g->d_y < 0 ? g->d_stream : g->d_y;
}

static mz_status_t declare_shared(gpt_t *g)
{
  return MZ_TRACE(mz_activation_buffer(
      g->decl, "gpt", "d_stream", g->config->model.hidden_size, &g->d_stream));
}

static mz_status_t add_embedding(gpt_t *g)
{
  const mz_model_config_t *m = &g->config->model;
  mz_embedding_opts_t opts = {.vocab_size = m->vocab_size,
                              .hidden_size = m->hidden_size,
                              .positions =
                                  m->position_embedding == MZ_POS_LEARNED
                                      ? m->max_position_embeddings
                                      : 0,
                              .block = 0,
                              .init_std = m->initializer_range,
                              .dropout = m->dropout,
                              .d_x = g->d_stream};

  MZ_TRY(mz_activation_buffer(g->decl, "gpt", "embedding", m->hidden_size,
                              &opts.x));
  MZ_TRY(mz_embedding_declare(g->decl, &opts));
  g->x = opts.x;
  g->y = g->d_y = -1;
  return MZ_OK;
}

/* Adds the pending branch to the stream and normalises: h. d_h -1: h itself. */
static mz_status_t add_norm(gpt_t *g, const char *prefix, int32_t block,
                            bool last, int32_t d_h, int32_t *h_out)
{
  const mz_model_config_t *m = &g->config->model;
  mz_norm_opts_t opts = {.prefix = prefix,
                         .hidden_size = m->hidden_size,
                         .kind = (mz_norm_kind_t)m->norm,
                         .eps = m->norm_eps,
                         .bias = m->bias,
                         .block = block,
                         .dropout = m->dropout,
                         .x = g->x,
                         .y = g->y,
                         .sum = g->x,
                         .d_sum = g->d_stream,
                         .d_y = g->d_y,
                         .last = last};

  if (g->y >= 0)
    MZ_TRY(mz_activation_buffer(g->decl, prefix, "sum", m->hidden_size,
                                &opts.sum));
  MZ_TRY(mz_activation_buffer(g->decl, prefix, "h", m->hidden_size, &opts.h));
  opts.d_h = d_h < 0 ? opts.h : d_h;
  MZ_TRY(mz_norm_declare(g->decl, &opts));
  g->x = opts.sum;
  g->y = g->d_y = -1;
  *h_out = opts.h;
  return MZ_OK;
}

/* The output of a branch, and its gradient where dropout makes one. */
static mz_status_t begin_branch(gpt_t *g, const char *prefix)
{
  int64_t H = g->config->model.hidden_size;

  MZ_TRY(mz_activation_buffer(g->decl, prefix, "y", H, &g->y));
  if (g->config->model.dropout > 0)
    MZ_TRY(mz_activation_buffer(g->decl, prefix, "d_y", H, &g->d_y));
  return MZ_OK;
}

static mz_status_t add_attention(gpt_t *g, int32_t l)
{
  const mz_model_config_t *m = &g->config->model;
  char name[MZ_NAME_MAX];
  mz_attention_opts_t opts = {
      .prefix = name,
      .hidden_size = m->hidden_size,
      .rope_theta = m->position_embedding == MZ_POS_ROPE ? m->rope_theta : 0,
      .qkv_bias = m->attention_bias,
      .proj_bias = m->bias,
      .block = l + 1,
      .init_std = m->initializer_range,
      .output_init_std = g->output_init_std};

  MZ_TRY(mz_int_from_i64(m->num_attention_heads, &opts.heads));
  MZ_TRY(mz_int_from_i64(m->num_key_value_heads, &opts.kv_heads));
  MZ_TRY(mz_format_name(name, "h.%d.ln_1", l));
  MZ_TRY(add_norm(g, name, l + 1, false, -1, &opts.in));
  MZ_TRY(mz_format_name(name, "h.%d.attn", l));
  MZ_TRY(begin_branch(g, name));
  opts.d_in = opts.in;
  opts.out = g->y;
  opts.d_out = branch_grad(g);
  return MZ_TRACE(mz_attention_declare(g->decl, &opts));
}

static mz_ffn_opts_t ffn_opts(const gpt_t *g, int64_t intermediate_size)
{
  const mz_model_config_t *m = &g->config->model;
  mz_ffn_opts_t opts = {.hidden_size = m->hidden_size,
                        .intermediate_size = intermediate_size,
                        .activation = m->hidden_act,
                        .bias = m->bias,
                        .init_std = m->initializer_range,
                        .output_init_std = g->output_init_std};
  return opts;
}

static mz_status_t add_mlp(gpt_t *g, int32_t l)
{
  char name[MZ_NAME_MAX];
  mz_mlp_opts_t opts = {.prefix = name,
                        .ffn = ffn_opts(g, g->config->model.intermediate_size),
                        .block = l + 1};

  MZ_TRY(mz_format_name(name, "h.%d.ln_2", l));
  MZ_TRY(add_norm(g, name, l + 1, false, -1, &opts.in));
  MZ_TRY(mz_format_name(name, "h.%d.mlp", l));
  MZ_TRY(begin_branch(g, name));
  opts.d_in = opts.in;
  opts.out = g->y;
  opts.d_out = branch_grad(g);
  return MZ_TRACE(mz_mlp_declare(g->decl, &opts));
}

/* The hooks of the debug section must fit the layer they are used in. */
static mz_status_t set_hooks(const gpt_t *g, mz_moe_layer_opts_t *opts)
{
  const mz_debug_config_t *debug = &g->config->debug;
  int64_t vocab_size = g->config->model.vocab_size;

  MZ_REQUIRE(
      !debug->fixed_logits || debug->num_fixed_logits == opts->moe.num_experts,
      MZ_ERR_CONFIG, "debug.fixed_logits has %d values, %s has %d experts",
      debug->num_fixed_logits, opts->moe.name, opts->moe.num_experts);
  MZ_REQUIRE(!debug->route_table || debug->num_route_table == vocab_size,
             MZ_ERR_CONFIG,
             "debug.route_table has %d values, the vocabulary %" PRId64,
             debug->num_route_table, vocab_size);
  opts->fixed_logits = debug->fixed_logits;
  opts->route_table = debug->route_table;
  opts->route_tokens = debug->num_route_table;
  return MZ_OK;
}

static mz_status_t moe_opts(const gpt_t *g, int32_t i, mz_moe_opts_t *out)
{
  const mz_moe_config_t *c = &g->config->moe;

  *out = (mz_moe_opts_t){.num_experts = c->num_experts[i],
                         .ep_size = c->ep_size[i],
                         .drop_tokens = c->drop_tokens && !g->logits_out,
                         .eval_drop = c->eval_drop_tokens && !g->logits_out
                                          ? MZ_EVAL_DROPS
                                          : MZ_EVAL_DROPLESS,
                         .capacity_factor = c->capacity_factor,
                         .eval_capacity_factor = c->eval_capacity_factor,
                         .aux_loss = c->aux_loss,
                         .aux_scope = c->aux_loss_scope,
                         .aux_coef = c->aux_loss_coef,
                         .z_coef = c->z_loss_coef,
                         .bias_update_rate = c->bias_update_rate};
  MZ_TRY(mz_int_from_i64(c->expert_capacity, &out->expert_capacity));
  MZ_TRY(mz_int_from_i64(c->k, &out->k));
  return MZ_TRACE(mz_int_from_i64(c->min_capacity, &out->min_capacity));
}

static mz_choice_noise_t choice_noise(const mz_moe_config_t *c)
{
  if (c->noisy_gate_policy == MZ_NOISE_RSAMPLE) return MZ_CHOICE_DRAWN;
  return c->top2_2nd_expert_sampling ? MZ_CHOICE_DRAWN_SECOND
                                     : MZ_CHOICE_GREEDY;
}

/* N shared experts of width F are one map of width N F: what they add up to. */
static void set_beside(const gpt_t *g, mz_moe_layer_opts_t *opts)
{
  const mz_moe_config_t *c = &g->config->moe;

  opts->beside_ffn = ffn_opts(g, c->expert_intermediate_size);
  opts->beside_ffn.bias = c->expert_bias;
  if (c->use_residual) opts->beside = MZ_BESIDE_RESIDUAL;
  if (c->num_shared_experts == 0) return;
  opts->beside =
      c->shared_expert_gate ? MZ_BESIDE_SHARED_GATED : MZ_BESIDE_SHARED;
  opts->beside_ffn.intermediate_size =
      c->num_shared_experts * c->shared_expert_intermediate_size;
}

/* Block l is MoE number i of the configuration. */
static mz_status_t add_moe(gpt_t *g, int32_t l, int32_t i)
{
  const mz_config_values_t *c = g->config;
  int64_t H = c->model.hidden_size;
  char norm[MZ_NAME_MAX], name[MZ_NAME_MAX];
  mz_ffn_opts_t ffn = ffn_opts(g, c->moe.expert_intermediate_size);
  mz_expert_ops_t expert;
  mz_moe_layer_opts_t opts = {.hidden_size = H,
                              .block = l + 1,
                              .init_std = c->model.initializer_range,
                              .drop_policy = c->moe.drop_policy,
                              .norm_topk = c->moe.norm_topk_prob,
                              .score = c->moe.score,
                              .temperature = c->moe.temperature,
                              .temperature_end = c->moe.temperature_end,
                              .temperature_steps = c->moe.temperature_steps,
                              .jitter = c->moe.gate_noise,
                              .choice_noise = choice_noise(&c->moe),
                              .expert = &expert};

  MZ_TRY(moe_opts(g, i, &opts.moe));
  MZ_TRY(mz_format_name(norm, "h.%d.ln_2", l));
  MZ_TRY(mz_format_name(name, "h.%d.moe", l));
  opts.moe.name = name;
  MZ_TRY(set_hooks(g, &opts));
  MZ_TRY(mz_activation_buffer(g->decl, norm, "d_h", H, &opts.d_in));
  MZ_TRY(add_norm(g, norm, l + 1, false, opts.d_in, &opts.in));
  MZ_TRY(begin_branch(g, name));
  opts.out = g->y;
  opts.d_out = branch_grad(g);
  set_beside(g, &opts);
  ffn.bias = c->moe.expert_bias;
  if (c->debug.identity_experts) ffn.activation = MZ_ACT_IDENTITY_TIMES;
  MZ_TRY(mz_ffn_expert(&ffn, &expert, &opts.expert_self));
  return MZ_TRACE(mz_moe_layer(g->decl, &opts));
}

/* Tokens whose logits exist at a time: what stays in the caches of a CPU; on a
 * GPU what keeps it busy. */
static int64_t logits_rows(const mz_config_values_t *config)
{
  enum { CPU_ROWS = 128, CUDA_ROWS = 8192 };
  int64_t tokens =
      config->train_micro_batch_size_per_gpu * config->data.sequence_length;

  if (!mz_config_uses_cuda(config)) return CPU_ROWS;
  return mz_max_i64(CPU_ROWS, mz_min_i64(tokens, CUDA_ROWS));
}

static mz_status_t add_head(gpt_t *g, int32_t block)
{
  const mz_model_config_t *m = &g->config->model;
  mz_head_opts_t opts = {.tied = m->tie_word_embeddings ? "wte.weight" : NULL,
                         .vocab_size = m->vocab_size,
                         .hidden_size = m->hidden_size,
                         .block = block,
                         .init_std = m->initializer_range,
                         .chunk_rows = logits_rows(g->config),
                         .logits_out = g->logits_out};

  MZ_TRY(add_norm(g, "ln_f", block, true, -1, &opts.in));
  opts.d_in = opts.in;
  return MZ_TRACE(mz_head_declare(g->decl, &opts));
}

static mz_status_t declare(const mz_config_values_t *config, float *logits_out,
                           mz_decl_t *decl)
{
  gpt_t g = {.config = config, .decl = decl, .logits_out = logits_out};
  int32_t num_layers, next_moe = 0;
  mz_dtype_t dtype;

  MZ_REQUIRE(config && decl, MZ_ERR_ARG, "config or decl is NULL");
  MZ_REQUIRE(config->model.hidden_size > 0, MZ_ERR_CONFIG,
             "model: required: the section that describes the GPT");
  dtype = config->bf16 ? MZ_BF16 : MZ_F32;
  if (dtype != mz_decl_dtype(decl)) MZ_TRY(mz_decl_set_dtype(decl, dtype));
  MZ_TRY(mz_int_from_i64(config->model.num_hidden_layers, &num_layers));
  /* Radford et al. 2019 (GPT-2), sec. 2.3: the 2 L branches that end in the
   * stream start smaller, so that its variance does not grow with depth. */
  g.output_init_std = config->model.initializer_range;
  if (num_layers > 0) g.output_init_std /= sqrt(2.0 * num_layers);

  MZ_TRY(declare_shared(&g));
  MZ_TRY(add_embedding(&g));
  for (int32_t l = 0; l < num_layers; l++) {
    MZ_TRY(add_attention(&g, l));
    if (next_moe < config->moe.num_layers && config->moe.layer[next_moe] == l)
      MZ_TRY(add_moe(&g, l, next_moe++));
    else
      MZ_TRY(add_mlp(&g, l));
  }
  MZ_REQUIRE(next_moe == config->moe.num_layers, MZ_ERR_CONFIG,
             "moe.layers names block %d, the model has blocks 0..%d in "
             "ascending order",
             config->moe.layer[next_moe], num_layers - 1);
  MZ_TRY(add_head(&g, num_layers + 1));
  return MZ_TRACE(mz_decl_apply_groups(decl, &config->optimizer));
}

mz_status_t mz_gpt_declare(const mz_config_values_t *config, mz_decl_t *decl)
{
  return MZ_TRACE(declare(config, NULL, decl));
}

mz_status_t mz_gpt_declare_generation(const mz_config_values_t *config,
                                      float *logits_out, mz_decl_t *decl)
{
  MZ_REQUIRE(logits_out, MZ_ERR_ARG, "logits_out is NULL");
  return MZ_TRACE(declare(config, logits_out, decl));
}
