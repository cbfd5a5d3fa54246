/* SPDX-License-Identifier: Apache-2.0 */
/* The dense feed-forward map: the experts' functions on one group of rows. */
#include "model/layers.h"

#include "base/alloc.h"
#include "base/check.h"
#include "model/common.h"
#include "moe/declare.h"
#include "moe/ffn.h"

#include <stdio.h>

typedef struct mlp {
  mz_mlp_opts_t opts;
  mz_ffn_t ffn;
  int32_t saved;      /* [T, saved width] */
  int32_t scratch[2]; /* [T, scratch width] by pass */
} mlp_t;

static mz_status_t mlp_forward(const mz_call_t *call, void *self)
{
  const mlp_t *l = self;
  mz_window_t all = mz_token_window(call);
  mz_expert_rows_t rows = {.window = &all,
                           .x = call->buffers[l->opts.in],
                           .saved = call->buffers[l->saved],
                           .scratch = call->buffers[l->scratch[MZ_FORWARD]],
                           .y = call->buffers[l->opts.out]};

  return MZ_TRACE(mz_ffn_forward(&l->ffn, call, &rows));
}

static mz_status_t mlp_backward(const mz_call_t *call, void *self)
{
  const mlp_t *l = self;
  mz_window_t all = mz_token_window(call);
  mz_expert_rows_t rows = {.window = &all,
                           .x = call->buffers[l->opts.in],
                           .saved = call->buffers[l->saved],
                           .scratch = call->buffers[l->scratch[MZ_BACKWARD]],
                           .dy = call->buffers[l->opts.d_out],
                           .dx = call->buffers[l->opts.d_in]};

  return MZ_TRACE(mz_ffn_backward(&l->ffn, call, &rows));
}

static void mlp_describe(const void *self, int64_t num_tokens,
                         int64_t sequence_length, char *line, size_t line_bytes,
                         double *operations_out)
{
  const mlp_t *l = self;

  snprintf(line, line_bytes, "mlp: %s, inner width %" PRId64,
           l->opts.ffn.activation == MZ_ACT_SWIGLU ? "SwiGLU" : "GELU",
           l->opts.ffn.intermediate_size);
  *operations_out = (double)num_tokens * mz_ffn_operations(&l->ffn);
}

static mz_status_t declare_own(mlp_t *l, mz_decl_t *decl)
{
  const mz_mlp_opts_t *o = &l->opts;
  mz_dtype_t dtype = mz_decl_dtype(decl);
  int64_t scratch;

  l->ffn.opts = o->ffn;
  MZ_TRY(mz_ffn_check(&o->ffn));
  MZ_REQUIRE(o->ffn.activation != MZ_ACT_IDENTITY_TIMES, MZ_ERR_CONFIG,
             "%s: a dense map has no expert number to multiply by", o->prefix);
  MZ_TRY(mz_ffn_declare(&l->ffn, decl, o->prefix, o->block, -1));
  MZ_TRY(mz_activation_buffer(decl, o->prefix, "saved",
                              mz_ffn_saved_width(&l->ffn), &l->saved));
  scratch = mz_ffn_scratch_width(&l->ffn);
  MZ_TRY(mz_workspace_buffer(decl, o->prefix, "scratch", scratch, dtype,
                             &l->scratch[MZ_FORWARD]));
  return MZ_TRACE(mz_workspace_buffer(decl, o->prefix, "grad.scratch", scratch,
                                      dtype, &l->scratch[MZ_BACKWARD]));
}

static mz_status_t declare_steps(const mlp_t *l, mz_decl_t *decl)
{
  const mz_mlp_opts_t *o = &l->opts;
  const mz_map_t *up = &l->ffn.up, *gate = &l->ffn.gate, *down = &l->ffn.down;
  mz_compute_opts_t forward = {.name = "mlp", .fn = mlp_forward};
  mz_compute_opts_t backward = {.name = "mlp_grad", .fn = mlp_backward};

  MZ_REFS(&forward, reads, o->in);
  MZ_REFS(&forward, writes, l->saved, l->scratch[MZ_FORWARD], o->out);
  MZ_REFS(&forward, weights, up->weight, up->bias, gate->weight, gate->bias,
          down->weight, down->bias);
  MZ_REFS(&backward, reads, o->in, l->saved, o->d_out);
  MZ_REFS(&backward, writes, l->saved, l->scratch[MZ_BACKWARD], o->d_in);
  MZ_REFS(&backward, weights, up->weight, gate->weight, down->weight);
  MZ_REFS(&backward, grads, up->weight, up->bias, gate->weight, gate->bias,
          down->weight, down->bias);
  return MZ_TRACE(mz_decl_simple(decl, &forward, &backward));
}

mz_status_t mz_mlp_declare(mz_decl_t *decl, const mz_mlp_opts_t *opts)
{
  mlp_t *self = NULL, *owned;
  mz_status_t st;

  MZ_TRY(mz_new(1, "mlp", &self));
  owned = self;
  self->opts = *opts;
  MZ_TRY_GOTO(st, declare_own(self, decl), done);
  MZ_TRY_GOTO(st, mz_layer_begin(decl, opts->prefix, self, mlp_describe), done);
  owned = NULL;
  self->opts.prefix = NULL; /* borrowed during the declaration only */
  MZ_TRY_GOTO(st, declare_steps(self, decl), done);
done:
  mz_free(owned);
  return st;
}
