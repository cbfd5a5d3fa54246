/* SPDX-License-Identifier: Apache-2.0 */
#include "model/layers.h"

#include "base/alloc.h"
#include "base/check.h"
#include "model/common.h"
#include "moe/declare.h"
#include "moe/map.h"

#include <stdio.h>

typedef struct attention {
  mz_attention_opts_t opts;
  int32_t head_width; /* D */
  mz_map_t qkv, proj;
  int32_t qkv_rows; /* [T, (A + 2 G) D] after the rotation */
  int32_t heads;    /* [T, A D] */
  int32_t lse;      /* fp32 [A, T] */
  int32_t d_qkv_rows, d_heads;
  int32_t delta; /* fp32 [A, T] */
} attention_t;

static mz_attention_t attention_args(const attention_t *l,
                                     const mz_call_t *call)
{
  mz_attention_t a = {.batch = call->micro->sequences,
                      .sequence = call->micro->sequence_length,
                      .heads = l->opts.heads,
                      .kv_heads = l->opts.kv_heads,
                      .head_width = l->head_width,
                      .qkv = call->buffers[l->qkv_rows],
                      .out = call->buffers[l->heads],
                      .lse = call->buffers[l->lse]};
  return a;
}

/* The rotation is orthogonal, so its gradient is the inverse rotation. */
static mz_status_t rotate(const attention_t *l, const mz_call_t *call,
                          void *rows, int inverse)
{
  mz_rope_t a = {.batch = call->micro->sequences,
                 .sequence = call->micro->sequence_length,
                 .heads = l->opts.heads,
                 .kv_heads = l->opts.kv_heads,
                 .head_width = l->head_width,
                 .theta = l->opts.rope_theta,
                 .inverse = inverse,
                 .qkv = rows};

  if (l->opts.rope_theta <= 0) return MZ_OK;
  return MZ_KERNEL(call, rope, &a);
}

static mz_status_t attention_forward(const mz_call_t *call, void *self)
{
  const attention_t *l = self;
  mz_window_t all = mz_token_window(call);
  mz_attention_t a = attention_args(l, call);
  void *qkv = call->buffers[l->qkv_rows];

  MZ_TRY(mz_map_forward(&l->qkv, call, &all, call->buffers[l->opts.in], qkv,
                        MZ_EPI_NONE, NULL));
  MZ_TRY(rotate(l, call, qkv, 0));
  MZ_TRY(MZ_KERNEL(call, attention, &a));
  return MZ_TRACE(mz_map_forward(&l->proj, call, &all, a.out,
                                 call->buffers[l->opts.out], MZ_EPI_NONE,
                                 NULL));
}

static mz_status_t attention_backward(const mz_call_t *call, void *self)
{
  const attention_t *l = self;
  mz_window_t all = mz_token_window(call);
  const void *d_out = call->buffers[l->opts.d_out];
  void *d_qkv = call->buffers[l->d_qkv_rows];
  void *d_heads = call->buffers[l->d_heads];
  mz_attention_grad_t a = {.forward = attention_args(l, call),
                           .dout = d_heads,
                           .dqkv = d_qkv,
                           .delta = call->buffers[l->delta]};

  MZ_TRY(mz_map_wgrad(&l->proj, call, &all, a.forward.out, d_out));
  MZ_TRY(mz_map_dgrad(&l->proj, call, &all, d_out, d_heads));
  MZ_TRY(MZ_KERNEL(call, attention_grad, &a));
  MZ_TRY(rotate(l, call, d_qkv, 1));
  MZ_TRY(mz_map_wgrad(&l->qkv, call, &all, call->buffers[l->opts.in], d_qkv));
  return MZ_TRACE(
      mz_map_dgrad(&l->qkv, call, &all, d_qkv, call->buffers[l->opts.d_in]));
}

/* Products of the two maps, and two products of T x S x H for the scores, of
 * which causality leaves (S + 1) / 2S. */
static void attention_describe(const void *self, int64_t num_tokens,
                               int64_t sequence_length, char *line,
                               size_t line_bytes, double *operations_out)
{
  const attention_t *l = self;

  snprintf(line, line_bytes, "attention: %d heads of %d, %d key/value heads%s",
           l->opts.heads, l->head_width, l->opts.kv_heads,
           l->opts.rope_theta > 0 ? ", rotary" : "");
  *operations_out =
      (double)num_tokens *
      ((double)l->qkv.n * (double)l->qkv.k +
       (double)l->proj.n * (double)l->proj.k +
       (double)(sequence_length + 1) * (double)l->opts.hidden_size);
}

static mz_status_t check_opts(const mz_attention_opts_t *opts)
{
  MZ_REQUIRE(opts->heads >= 1 && opts->hidden_size % opts->heads == 0,
             MZ_ERR_CONFIG,
             "%s: hidden_size %" PRId64 " is not divisible by %d heads",
             opts->prefix, opts->hidden_size, opts->heads);
  MZ_REQUIRE(opts->kv_heads >= 1 && opts->heads % opts->kv_heads == 0,
             MZ_ERR_CONFIG, "%s: %d heads are not divisible by %d kv_heads",
             opts->prefix, opts->heads, opts->kv_heads);
  MZ_REQUIRE(opts->rope_theta <= 0 || opts->hidden_size / opts->heads % 2 == 0,
             MZ_ERR_CONFIG,
             "%s: rotary positions need an even head width, not %" PRId64,
             opts->prefix, opts->hidden_size / opts->heads);
  return MZ_OK;
}

static mz_status_t declare_maps(attention_t *l, mz_decl_t *decl)
{
  const mz_attention_opts_t *o = &l->opts;
  int64_t D = o->hidden_size / o->heads;
  char name[MZ_NAME_MAX];
  mz_map_opts_t map = {.prefix = name, .block = o->block, .moe = -1};

  MZ_TRY(mz_int_from_i64(D, &l->head_width));
  MZ_TRY(mz_format_name(name, "%s.qkv", o->prefix));
  map.n = (o->heads + 2 * (int64_t)o->kv_heads) * D;
  map.k = o->hidden_size;
  map.bias = o->qkv_bias;
  map.init_std = o->init_std;
  MZ_TRY(mz_map_declare(decl, &map, &l->qkv));
  MZ_TRY(mz_format_name(name, "%s.proj", o->prefix));
  map.n = o->hidden_size;
  map.k = o->heads * D;
  map.bias = o->proj_bias;
  map.init_std = o->output_init_std;
  return MZ_TRACE(mz_map_declare(decl, &map, &l->proj));
}

static mz_status_t declare_buffers(attention_t *l, mz_decl_t *decl)
{
  const char *prefix = l->opts.prefix;
  mz_dtype_t dtype = mz_decl_dtype(decl);

  MZ_TRY(mz_activation_buffer(decl, prefix, "qkv", l->qkv.n, &l->qkv_rows));
  MZ_TRY(mz_activation_buffer(decl, prefix, "heads", l->proj.k, &l->heads));
  MZ_TRY(mz_stats_buffer(decl, prefix, "lse", l->opts.heads, &l->lse));
  MZ_TRY(mz_workspace_buffer(decl, prefix, "d_qkv", l->qkv.n, dtype,
                             &l->d_qkv_rows));
  MZ_TRY(mz_workspace_buffer(decl, prefix, "d_heads", l->proj.k, dtype,
                             &l->d_heads));
  return MZ_TRACE(mz_workspace_buffer(decl, prefix, "delta", l->opts.heads,
                                      MZ_F32, &l->delta));
}

static mz_status_t declare_steps(const attention_t *l, mz_decl_t *decl)
{
  const mz_attention_opts_t *o = &l->opts;
  mz_compute_opts_t forward = {.name = "attention", .fn = attention_forward};
  mz_compute_opts_t backward = {.name = "attention_grad",
                                .fn = attention_backward};

  MZ_REFS(&forward, reads, o->in);
  MZ_REFS(&forward, writes, l->qkv_rows, l->heads, l->lse, o->out);
  MZ_REFS(&forward, weights, l->qkv.weight, l->qkv.bias, l->proj.weight,
          l->proj.bias);
  MZ_REFS(&backward, reads, o->in, l->qkv_rows, l->heads, l->lse, o->d_out);
  MZ_REFS(&backward, writes, l->d_qkv_rows, l->d_heads, l->delta, o->d_in);
  MZ_REFS(&backward, weights, l->qkv.weight, l->proj.weight);
  MZ_REFS(&backward, grads, l->qkv.weight, l->qkv.bias, l->proj.weight,
          l->proj.bias);
  return MZ_TRACE(mz_decl_simple(decl, &forward, &backward));
}

mz_status_t mz_attention_declare(mz_decl_t *decl,
                                 const mz_attention_opts_t *opts)
{
  attention_t *self = NULL, *owned;
  mz_status_t st;

  MZ_TRY(check_opts(opts));
  MZ_TRY(mz_new(1, "attention", &self));
  owned = self;
  self->opts = *opts;
  MZ_TRY_GOTO(st, declare_maps(self, decl), done);
  MZ_TRY_GOTO(st, declare_buffers(self, decl), done);
  MZ_TRY_GOTO(st, mz_layer_begin(decl, opts->prefix, self, attention_describe),
              done);
  owned = NULL;
  self->opts.prefix = NULL; /* borrowed during the declaration only */
  MZ_TRY_GOTO(st, declare_steps(self, decl), done);
done:
  mz_free(owned);
  return st;
}
