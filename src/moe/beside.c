/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/beside.h"

#include "base/check.h"
#include "moe/declare.h"

/* By mz_beside_t. */
static const struct {
  const char *text;
  const char *map;    /* its tensors */
  const char *logits; /* tensors of the mix; NULL: none */
  mz_mix_kind_t mix;
} kinds[] = {
    [MZ_BESIDE_NONE] = {"", NULL, NULL, MZ_MIX_SUM},
    [MZ_BESIDE_RESIDUAL] = {", residual MLP", "residual", "coefficient",
                            MZ_MIX_SOFTMAX},
    [MZ_BESIDE_SHARED] = {", shared expert", "shared", NULL, MZ_MIX_SUM},
    [MZ_BESIDE_SHARED_GATED] = {", gated shared expert", "shared",
                                "shared_gate", MZ_MIX_SIGMOID},
};

static mz_mix_kind_t mix_of(const mz_moe_beside_t *b)
{
  return kinds[b->kind].mix;
}

mz_status_t mz_beside_set(mz_moe_beside_t *b, const mz_moe_layer_opts_t *opts)
{
  const mz_map_t none = {.weight = -1, .bias = -1};

  *b = (mz_moe_beside_t){.kind = opts->beside,
                         .ffn = {opts->beside_ffn, none, none, none},
                         .in = opts->in,
                         .out = opts->out,
                         .d_in = opts->d_in,
                         .d_out = opts->d_out,
                         .weight = -1,
                         .bias = -1,
                         .saved = -1,
                         .scratch = {-1, -1},
                         .y = -1,
                         .moe = -1,
                         .coef = -1,
                         .d = -1,
                         .d_moe = -1,
                         .d_y = -1};
  MZ_REQUIRE(opts->beside >= MZ_BESIDE_NONE &&
                 opts->beside <= MZ_BESIDE_SHARED_GATED,
             MZ_ERR_ARG, "%s: no kind %d of a map beside the experts",
             opts->moe.name, (int)opts->beside);
  if (b->kind == MZ_BESIDE_NONE) return MZ_OK;
  MZ_TRY(mz_ffn_check(&b->ffn.opts));
  MZ_REQUIRE(b->ffn.opts.activation != MZ_ACT_IDENTITY_TIMES, MZ_ERR_ARG,
             "%s: a dense map has no expert number to multiply by",
             opts->moe.name);
  MZ_REQUIRE(b->ffn.opts.hidden_size == opts->hidden_size, MZ_ERR_ARG,
             "%s: the map beside the experts has width %" PRId64
             ", the layer %" PRId64,
             opts->moe.name, b->ffn.opts.hidden_size, opts->hidden_size);
  return MZ_OK;
}

/* "<name>.coefficient" [2, H] with a bias, "<name>.shared_gate" [1, H]. */
static mz_status_t declare_logits(mz_moe_beside_t *b, mz_decl_t *decl,
                                  const char *name, int32_t block)
{
  char prefix[MZ_NAME_MAX];
  mz_map_opts_t opts = {.prefix = prefix,
                        .n = mix_of(b) == MZ_MIX_SOFTMAX ? 2 : 1,
                        .k = b->ffn.opts.hidden_size,
                        .bias = mix_of(b) == MZ_MIX_SOFTMAX,
                        .init_std = b->ffn.opts.init_std,
                        .block = block,
                        .moe = -1};
  mz_map_t map;

  if (!kinds[b->kind].logits) return MZ_OK;
  MZ_TRY(mz_format_name(prefix, "%s.%s", name, kinds[b->kind].logits));
  MZ_TRY(mz_map_declare(decl, &opts, &map));
  b->weight = map.weight;
  b->bias = map.bias;
  return MZ_OK;
}

static mz_status_t declare_buffers(mz_moe_beside_t *b, mz_decl_t *decl,
                                   const char *prefix)
{
  int64_t H = b->ffn.opts.hidden_size;
  int64_t scratch = mz_ffn_scratch_width(&b->ffn);
  mz_dtype_t dtype = mz_decl_dtype(decl);
  bool logits = kinds[b->kind].logits, softmax = mix_of(b) == MZ_MIX_SOFTMAX;
  const struct {
    const char *suffix;
    int32_t *id;
    bool wanted;
    mz_category_t category;
    int64_t width;
    mz_dtype_t dtype;
  } list[] = {
      {"saved", &b->saved, true, MZ_CAT_ACTIVATIONS,
       mz_ffn_saved_width(&b->ffn), dtype},
      {"scratch", &b->scratch[MZ_FORWARD], true, MZ_CAT_WORKSPACE, scratch,
       dtype},
      {"grad.scratch", &b->scratch[MZ_BACKWARD], true, MZ_CAT_WORKSPACE,
       scratch, dtype},
      {"y", &b->y, true, MZ_CAT_ACTIVATIONS, H, dtype},
      {"d_y", &b->d_y, true, MZ_CAT_ACTIVATIONS, H, dtype},
      {"moe", &b->moe, softmax, MZ_CAT_ACTIVATIONS, H, dtype},
      {"d_moe", &b->d_moe, softmax, MZ_CAT_ACTIVATIONS, H, dtype},
      {"coef", &b->coef, logits, MZ_CAT_ROUTING, 2, MZ_F32},
      {"d", &b->d, logits, MZ_CAT_ROUTING, 1, MZ_F32},
  };

  for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
    if (list[i].wanted)
      MZ_TRY(mz_declare_buffer(decl, prefix, list[i].suffix,
                               (mz_buffer_opts_t){.category = list[i].category,
                                                  .kind = MZ_ROWS_TOKENS,
                                                  .rows = 1,
                                                  .width = list[i].width,
                                                  .dtype = list[i].dtype},
                               list[i].id));
  return MZ_OK;
}

mz_status_t mz_beside_declare(mz_moe_beside_t *b, mz_decl_t *decl,
                              const char *name, int32_t block)
{
  char prefix[MZ_NAME_MAX];

  if (b->kind == MZ_BESIDE_NONE) return MZ_OK;
  MZ_TRY(mz_format_name(prefix, "%s.%s", name, kinds[b->kind].map));
  MZ_TRY(mz_ffn_declare(&b->ffn, decl, prefix, block, -1));
  MZ_TRY(declare_logits(b, decl, name, block));
  return MZ_TRACE(declare_buffers(b, decl, prefix));
}

int32_t mz_beside_combined(const mz_moe_beside_t *b)
{
  return b->moe >= 0 ? b->moe : b->out;
}

int32_t mz_beside_d_combined(const mz_moe_beside_t *b)
{
  return b->d_moe >= 0 ? b->d_moe : b->d_out;
}

/* The gradient of the map's output: a plain sum passes on that of the layer. */
static int32_t d_output(const mz_moe_beside_t *b)
{
  return mix_of(b) == MZ_MIX_SUM ? b->d_out : b->d_y;
}

mz_status_t mz_beside_step(const mz_moe_beside_t *b, mz_decl_t *decl,
                           mz_pass_t pass, mz_compute_fn fn)
{
  const mz_map_t *up = &b->ffn.up, *gate = &b->ffn.gate, *down = &b->ffn.down;
  mz_compute_opts_t step = {
      .name = pass == MZ_FORWARD ? "beside" : "beside_grad", .fn = fn};

  if (b->kind == MZ_BESIDE_NONE) return MZ_OK;
  MZ_REFS(&step, reads, b->in);
  MZ_REFS(&step, writes, b->saved, b->scratch[pass]);
  MZ_REFS(&step, weights, up->weight, gate->weight, down->weight);
  if (pass == MZ_FORWARD) {
    MZ_REFS(&step, writes, b->y);
    MZ_REFS(&step, weights, up->bias, gate->bias, down->bias);
  } else {
    MZ_REFS(&step, reads, b->saved, d_output(b));
    MZ_REFS(&step, writes, b->d_y);
    MZ_REFS(&step, grads, up->weight, up->bias, gate->weight, gate->bias,
            down->weight, down->bias);
  }
  return MZ_TRACE(mz_decl_compute(decl, pass, &step));
}

void mz_beside_refs(const mz_moe_beside_t *b, mz_compute_opts_t *combine)
{
  MZ_REFS(combine, reads, b->y);
  MZ_REFS(combine, writes, b->moe, b->coef);
  if (b->weight >= 0) MZ_REFS(combine, reads, b->in);
  MZ_REFS(combine, weights, b->weight, b->bias);
}

void mz_beside_grad_refs(const mz_moe_beside_t *b,
                         mz_compute_opts_t *combine_grad)
{
  if (b->weight < 0) return;
  MZ_REFS(combine_grad, reads, b->y, b->moe, b->coef);
  MZ_REFS(combine_grad, writes, b->d_moe, b->d_y, b->d);
  MZ_REFS(combine_grad, grads, b->weight, b->bias);
}

void mz_beside_input_refs(const mz_moe_beside_t *b,
                          mz_compute_opts_t *route_grad)
{
  MZ_REFS(route_grad, reads, b->d_y, b->d);
  MZ_REFS(route_grad, weights, b->weight);
}

static mz_expert_rows_t rows_of(const mz_moe_beside_t *b, const mz_call_t *call,
                                const mz_window_t *all, mz_pass_t pass)
{
  mz_expert_rows_t rows = {.window = all,
                           .x = call->buffers[b->in],
                           .saved = call->buffers[b->saved],
                           .scratch = call->buffers[b->scratch[pass]]};
  return rows;
}

mz_status_t mz_beside_forward(const mz_moe_beside_t *b, const mz_call_t *call)
{
  mz_window_t all = mz_token_window(call);
  mz_expert_rows_t rows = rows_of(b, call, &all, MZ_FORWARD);

  rows.y = call->buffers[b->y];
  return MZ_TRACE(mz_ffn_forward(&b->ffn, call, &rows));
}

mz_status_t mz_beside_backward(const mz_moe_beside_t *b, const mz_call_t *call)
{
  mz_window_t all = mz_token_window(call);
  mz_expert_rows_t rows = rows_of(b, call, &all, MZ_BACKWARD);

  rows.dy = call->buffers[d_output(b)];
  rows.dx = call->buffers[b->d_y];
  return MZ_TRACE(mz_ffn_backward(&b->ffn, call, &rows));
}

static mz_mix_t mix_args(const mz_moe_beside_t *b, const mz_call_t *call)
{
  mz_mix_t a = {.kind = mix_of(b),
                .num_tokens = call->micro->num_tokens,
                .width = b->ffn.opts.hidden_size,
                .x = call->buffers[b->in],
                .moe = call->buffers[mz_beside_combined(b)],
                .side = call->buffers[b->y]};

  if (b->coef >= 0) a.coef = call->buffers[b->coef];
  if (b->weight >= 0) a.w = call->weights[b->weight];
  if (b->bias >= 0) a.b = call->weights[b->bias];
  return a;
}

mz_status_t mz_beside_mix(const mz_moe_beside_t *b, const mz_call_t *call)
{
  mz_mix_t a;

  if (b->kind == MZ_BESIDE_NONE) return MZ_OK;
  a = mix_args(b, call);
  a.y = call->buffers[b->out];
  return MZ_KERNEL(call, mix, &a);
}

mz_status_t mz_beside_mix_grad(const mz_moe_beside_t *b, const mz_call_t *call)
{
  mz_mix_grad_t a;

  if (b->weight < 0) return MZ_OK; /* no mix, or one without a gradient */
  a = (mz_mix_grad_t){.forward = mix_args(b, call),
                      .dy = call->buffers[b->d_out],
                      .d_side = call->buffers[b->d_y],
                      .d = call->buffers[b->d],
                      .dw = call->grads[b->weight],
                      .accumulate_w = call->accumulate[b->weight]};
  if (b->d_moe >= 0) a.d_moe = call->buffers[b->d_moe];
  if (b->bias >= 0) {
    a.db = call->grads[b->bias];
    a.accumulate_b = call->accumulate[b->bias];
  }
  return MZ_KERNEL(call, mix_grad, &a);
}

mz_status_t mz_beside_add_input(const mz_moe_beside_t *b, const mz_call_t *call)
{
  mz_mix_dgrad_t a;

  if (b->kind == MZ_BESIDE_NONE) return MZ_OK;
  a = (mz_mix_dgrad_t){.kind = mix_of(b),
                       .num_tokens = call->micro->num_tokens,
                       .width = b->ffn.opts.hidden_size,
                       .d_side = call->buffers[b->d_y],
                       .dx = call->buffers[b->d_in]};
  if (b->weight >= 0) a.w = call->weights[b->weight];
  if (b->d >= 0) a.d = call->buffers[b->d];
  return MZ_KERNEL(call, mix_dgrad, &a);
}

double mz_beside_operations(const mz_moe_beside_t *b)
{
  double logits = mix_of(b) == MZ_MIX_SOFTMAX ? 2 : b->weight >= 0;

  if (b->kind == MZ_BESIDE_NONE) return 0;
  return mz_ffn_operations(&b->ffn) + logits * (double)b->ffn.opts.hidden_size;
}

const char *mz_beside_text(const mz_moe_beside_t *b)
{
  return kinds[b->kind].text;
}
