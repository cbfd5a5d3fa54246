/* SPDX-License-Identifier: Apache-2.0 */
#include "model/layers.h"

#include "base/alloc.h"
#include "base/check.h"
#include "model/common.h"
#include "moe/declare.h"
#include "moe/map.h"

#include <stdio.h>

typedef struct head {
  mz_head_opts_t opts;
  int32_t weight;    /* [V, H] */
  int32_t logits[2]; /* fp32 [chunk_rows, V] by pass */
} head_t;

static mz_xent_t xent_args(const head_t *l, const mz_call_t *call,
                           mz_pass_t pass)
{
  mz_xent_t a = {.rows = call->micro->num_tokens,
                 .width = l->opts.hidden_size,
                 .vocab = l->opts.vocab_size,
                 .x = call->buffers[l->opts.in],
                 .w = call->weights[l->weight],
                 .labels = call->micro->labels,
                 .scale = call->micro->token_scale,
                 .loss = call->scalars + MZ_SCALAR_LOSS_SUM,
                 .chunk_rows = l->opts.chunk_rows,
                 .logits = call->buffers[l->logits[pass]]};
  return a;
}

static mz_status_t head_loss(const mz_call_t *call, void *self)
{
  mz_xent_t a = xent_args(self, call, MZ_FORWARD);

  return MZ_KERNEL(call, xent, &a);
}

/* A rank without a token has none to give. */
static mz_status_t head_logits(const mz_call_t *call, void *self)
{
  const head_t *l = self;
  int64_t last = call->micro->num_tokens - 1;
  size_t bytes = mz_dtype_bytes(call->kernels->dtype);
  mz_xent_t a = xent_args(l, call, MZ_FORWARD);

  if (last < 0) return MZ_OK;
  a.rows = a.chunk_rows = 1;
  a.x = (const char *)a.x + (size_t)(last * l->opts.hidden_size) * bytes;
  a.labels = NULL;
  MZ_TRY(MZ_KERNEL(call, xent, &a));
  return MZ_TRACE(mz_device_copy(
      call->kernels->device, l->opts.logits_out, a.logits,
      l->opts.vocab_size * (int64_t)sizeof(float), call->stream));
}

static mz_status_t head_grad(const mz_call_t *call, void *self)
{
  const head_t *l = self;
  mz_xent_t a = xent_args(l, call, MZ_BACKWARD);

  a.dx = call->buffers[l->opts.d_in];
  a.dw = call->grads[l->weight];
  a.accumulate = call->accumulate[l->weight];
  return MZ_KERNEL(call, xent, &a);
}

static void head_describe(const void *self, int64_t num_tokens,
                          int64_t sequence_length, char *line,
                          size_t line_bytes, double *operations_out)
{
  const head_t *l = self;

  snprintf(line, line_bytes, "head: vocabulary %" PRId64 "%s",
           l->opts.vocab_size, l->opts.tied ? ", tied" : "");
  *operations_out = (double)num_tokens * (double)l->opts.vocab_size *
                    (double)l->opts.hidden_size;
}

static mz_status_t declare_own(head_t *l, mz_decl_t *decl)
{
  const mz_head_opts_t *o = &l->opts;
  mz_buffer_opts_t logits = {.category = MZ_CAT_WORKSPACE,
                             .kind = MZ_ROWS_FIXED,
                             .rows = o->chunk_rows,
                             .width = o->vocab_size,
                             .dtype = MZ_F32};
  mz_tensor_opts_t weight = {.ndim = 2,
                             .shape = {o->vocab_size, o->hidden_size},
                             .init = MZ_INIT_NORMAL,
                             .init_std = o->init_std,
                             .param_group = MZ_GROUP_DECAY,
                             .block = o->block};

  if (o->tied)
    MZ_TRY(mz_decl_borrow(decl, o->tied, &l->weight));
  else
    MZ_TRY(mz_declare_tensor(decl, "lm_head", "weight", weight, &l->weight));
  MZ_TRY(mz_declare_buffer(decl, "head", "logits", logits,
                           &l->logits[MZ_FORWARD]));
  return MZ_TRACE(mz_declare_buffer(decl, "head", "grad.logits", logits,
                                    &l->logits[MZ_BACKWARD]));
}

static mz_status_t declare_steps(const head_t *l, mz_decl_t *decl)
{
  mz_compute_opts_t loss = {
      .name = "loss", .fn = head_loss, .modes = MZ_IN_EVAL};
  mz_compute_opts_t grad = {.name = "loss_grad", .fn = head_grad};
  bool generates = l->opts.logits_out != NULL;

  MZ_REFS(&loss, reads, l->opts.in);
  MZ_REFS(&loss, writes, l->logits[MZ_FORWARD]);
  MZ_REFS(&loss, weights, l->weight);
  MZ_REFS(&grad, reads, l->opts.in);
  MZ_REFS(&grad, writes, l->logits[MZ_BACKWARD], l->opts.d_in);
  MZ_REFS(&grad, weights, l->weight);
  MZ_REFS(&grad, grads, l->weight);
  if (generates) loss.name = "logits", loss.fn = head_logits;
  return MZ_TRACE(mz_decl_simple(decl, &loss, generates ? NULL : &grad));
}

mz_status_t mz_head_declare(mz_decl_t *decl, const mz_head_opts_t *opts)
{
  head_t *self = NULL, *owned;
  mz_status_t st;

  MZ_TRY(mz_new(1, "head", &self));
  owned = self;
  self->opts = *opts;
  MZ_TRY_GOTO(st, declare_own(self, decl), done);
  MZ_TRY_GOTO(st, mz_layer_begin(decl, "head", self, head_describe), done);
  owned = NULL;
  MZ_TRY_GOTO(st, declare_steps(self, decl), done);
done:
  mz_free(owned);
  return st;
}
