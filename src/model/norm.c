/* SPDX-License-Identifier: Apache-2.0 */
#include "model/layers.h"

#include "base/alloc.h"
#include "base/check.h"
#include "model/common.h"
#include "moe/declare.h"
#include "moe/map.h"

#include <stdio.h>

typedef struct norm {
  mz_norm_opts_t opts;
  int32_t weight, bias; /* [H]; bias -1: none */
  int32_t mean, rstd;   /* fp32 [T]; mean -1 with RMSNorm */
  int32_t partial;      /* scratch of the weights' gradients */
} norm_t;

static mz_status_t norm_forward(const mz_call_t *call, void *self)
{
  const norm_t *l = self;
  const mz_norm_opts_t *o = &l->opts;
  mz_add_norm_t a = {.kind = o->kind,
                     .rows = call->micro->num_tokens,
                     .width = o->hidden_size,
                     .eps = o->eps,
                     .x = call->buffers[o->x],
                     .h = call->buffers[o->h],
                     .w = call->weights[l->weight],
                     .b = l->bias < 0 ? NULL : call->weights[l->bias],
                     .mean = l->mean < 0 ? NULL : call->buffers[l->mean],
                     .rstd = call->buffers[l->rstd]};

  if (o->y >= 0) {
    a.y = call->buffers[o->y];
    a.sum = call->buffers[o->sum];
    a.dropout = mz_call_dropout(call, o->dropout);
  }
  return MZ_KERNEL(call, add_norm, &a);
}

static mz_status_t norm_backward(const mz_call_t *call, void *self)
{
  const norm_t *l = self;
  const mz_norm_opts_t *o = &l->opts;
  mz_add_norm_grad_t a = {.kind = o->kind,
                          .rows = call->micro->num_tokens,
                          .width = o->hidden_size,
                          .sum = call->buffers[o->y < 0 ? o->x : o->sum],
                          .dh = call->buffers[o->d_h],
                          .w = call->weights[l->weight],
                          .mean = l->mean < 0 ? NULL : call->buffers[l->mean],
                          .rstd = call->buffers[l->rstd],
                          .add = !o->last,
                          .d_sum = call->buffers[o->d_sum],
                          .dw = call->grads[l->weight],
                          .accumulate_w = call->accumulate[l->weight],
                          .partial = call->buffers[l->partial]};

  if (l->bias >= 0) {
    a.db = call->grads[l->bias];
    a.accumulate_b = call->accumulate[l->bias];
  }
  if (o->d_y >= 0) {
    a.dropout = mz_call_dropout(call, o->dropout);
    a.dy = call->buffers[o->d_y];
  }
  return MZ_KERNEL(call, add_norm_grad, &a);
}

static void norm_describe(const void *self, int64_t num_tokens,
                          int64_t sequence_length, char *line,
                          size_t line_bytes, double *operations_out)
{
  const norm_t *l = self;

  snprintf(line, line_bytes, "%s, width %" PRId64,
           l->opts.kind == MZ_NORM_RMS ? "RMSNorm" : "LayerNorm",
           l->opts.hidden_size);
  *operations_out = 2 * (double)num_tokens * (double)l->opts.hidden_size;
}

static mz_status_t declare_own(norm_t *l, mz_decl_t *decl)
{
  const mz_norm_opts_t *o = &l->opts;
  mz_tensor_opts_t vector = {.ndim = 1,
                             .shape = {o->hidden_size},
                             .init = MZ_INIT_ONE,
                             .param_group = MZ_GROUP_NO_DECAY,
                             .block = o->block};

  l->bias = l->mean = -1;
  MZ_TRY(mz_declare_tensor(decl, o->prefix, "weight", vector, &l->weight));
  MZ_TRY(mz_stats_buffer(decl, o->prefix, "rstd", 1, &l->rstd));
  if (o->kind == MZ_NORM_LAYER) {
    vector.init = MZ_INIT_ZERO;
    if (o->bias)
      MZ_TRY(mz_declare_tensor(decl, o->prefix, "bias", vector, &l->bias));
    MZ_TRY(mz_stats_buffer(decl, o->prefix, "mean", 1, &l->mean));
  }
  return MZ_TRACE(mz_declare_buffer(
      decl, o->prefix, "partial",
      (mz_buffer_opts_t){.category = MZ_CAT_WORKSPACE,
                         .kind = MZ_ROWS_FIXED,
                         .rows = 2 * (int64_t)MZ_NORM_PARTIALS,
                         .width = o->hidden_size,
                         .dtype = MZ_F32},
      &l->partial));
}

static mz_status_t declare_steps(const norm_t *l, mz_decl_t *decl)
{
  const mz_norm_opts_t *o = &l->opts;
  mz_compute_opts_t forward = {.name = "add_norm", .fn = norm_forward};
  mz_compute_opts_t backward = {.name = "add_norm_grad", .fn = norm_backward};

  MZ_REFS(&forward, reads, o->x, o->y);
  MZ_REFS(&forward, writes, o->y < 0 ? -1 : o->sum, o->h, l->mean, l->rstd);
  MZ_REFS(&forward, weights, l->weight, l->bias);
  MZ_REFS(&backward, reads, o->y < 0 ? o->x : o->sum, o->d_h, l->mean, l->rstd,
          o->last ? -1 : o->d_sum);
  MZ_REFS(&backward, writes, o->d_sum, o->d_y, l->partial);
  MZ_REFS(&backward, weights, l->weight);
  MZ_REFS(&backward, grads, l->weight, l->bias);
  return MZ_TRACE(mz_decl_simple(decl, &forward, &backward));
}

mz_status_t mz_norm_declare(mz_decl_t *decl, const mz_norm_opts_t *opts)
{
  norm_t *self = NULL, *owned;
  mz_status_t st;

  MZ_TRY(mz_new(1, "norm", &self));
  owned = self;
  self->opts = *opts;
  MZ_TRY_GOTO(st, declare_own(self, decl), done);
  MZ_TRY_GOTO(st, mz_layer_begin(decl, opts->prefix, self, norm_describe),
              done);
  owned = NULL;
  self->opts.prefix = NULL; /* borrowed during the declaration only */
  MZ_TRY_GOTO(st, declare_steps(self, decl), done);
done:
  mz_free(owned);
  return st;
}
