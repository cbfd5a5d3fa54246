/* SPDX-License-Identifier: Apache-2.0 */
#include "model/layers.h"

#include "base/alloc.h"
#include "base/check.h"
#include "model/common.h"
#include "moe/declare.h"
#include "moe/map.h"

#include <stdio.h>

typedef struct embedding {
  mz_embedding_opts_t opts;
  int32_t wte, wpe; /* [V, H]; [positions, H] or -1 */
} embedding_t;

static mz_embedding_t embedding_args(const embedding_t *l,
                                     const mz_call_t *call)
{
  mz_embedding_t a = {.num_tokens = call->micro->num_tokens,
                      .width = l->opts.hidden_size,
                      .vocab = l->opts.vocab_size,
                      .positions = l->opts.positions,
                      .sequence = call->micro->sequence_length,
                      .tokens = call->micro->tokens,
                      .dropout = mz_call_dropout(call, l->opts.dropout)};
  return a;
}

static mz_status_t embedding_forward(const mz_call_t *call, void *self)
{
  const embedding_t *l = self;
  mz_embedding_t a = embedding_args(l, call);

  a.wte = call->weights[l->wte];
  a.wpe = l->wpe < 0 ? NULL : call->weights[l->wpe];
  a.x = call->buffers[l->opts.x];
  return MZ_KERNEL(call, embedding, &a);
}

static mz_status_t embedding_backward(const mz_call_t *call, void *self)
{
  const embedding_t *l = self;
  mz_embedding_grad_t a = {.forward = embedding_args(l, call),
                           .dx = call->buffers[l->opts.d_x],
                           .dwte = call->grads[l->wte],
                           .accumulate_te = call->accumulate[l->wte]};

  if (l->wpe >= 0) {
    a.dwpe = call->grads[l->wpe];
    a.accumulate_pe = call->accumulate[l->wpe];
  }
  return MZ_KERNEL(call, embedding_grad, &a);
}

static void embedding_describe(const void *self, int64_t num_tokens,
                               int64_t sequence_length, char *line,
                               size_t line_bytes, double *operations_out)
{
  const embedding_t *l = self;

  snprintf(line, line_bytes,
           "embedding: vocabulary %" PRId64 ", width %" PRId64
           ", learned positions %" PRId64,
           l->opts.vocab_size, l->opts.hidden_size, l->opts.positions);
  *operations_out = (double)num_tokens * (double)l->opts.hidden_size;
}

static mz_status_t declare_table(mz_decl_t *decl, const char *prefix,
                                 const mz_embedding_opts_t *opts, int64_t rows,
                                 int32_t *tensor_out)
{
  return MZ_TRACE(
      mz_declare_tensor(decl, prefix, "weight",
                        (mz_tensor_opts_t){.ndim = 2,
                                           .shape = {rows, opts->hidden_size},
                                           .init = MZ_INIT_NORMAL,
                                           .init_std = opts->init_std,
                                           .param_group = MZ_GROUP_DECAY,
                                           .block = opts->block},
                        tensor_out));
}

static mz_status_t declare_steps(const embedding_t *l, mz_decl_t *decl)
{
  mz_compute_opts_t forward = {.name = "embedding", .fn = embedding_forward};
  mz_compute_opts_t backward = {.name = "embedding_grad",
                                .fn = embedding_backward};

  MZ_REFS(&forward, writes, l->opts.x);
  MZ_REFS(&forward, weights, l->wte, l->wpe);
  MZ_REFS(&backward, reads, l->opts.d_x);
  MZ_REFS(&backward, grads, l->wte, l->wpe);
  return MZ_TRACE(mz_decl_simple(decl, &forward, &backward));
}

mz_status_t mz_embedding_declare(mz_decl_t *decl,
                                 const mz_embedding_opts_t *opts)
{
  embedding_t *self = NULL, *owned;
  mz_status_t st;

  MZ_TRY(mz_new(1, "embedding", &self));
  owned = self;
  self->opts = *opts;
  self->wpe = -1;
  MZ_TRY_GOTO(
      st, declare_table(decl, "wte", opts, opts->vocab_size, &self->wte), done);
  if (opts->positions > 0)
    MZ_TRY_GOTO(st,
                declare_table(decl, "wpe", opts, opts->positions, &self->wpe),
                done);
  MZ_TRY_GOTO(st, mz_layer_begin(decl, "embedding", self, embedding_describe),
              done);
  owned = NULL;
  MZ_TRY_GOTO(st, declare_steps(self, decl), done);
done:
  mz_free(owned);
  return st;
}
