/* SPDX-License-Identifier: Apache-2.0 */
/* Declaration of the MoE layer: T tokens, E experts, k choices, H width.
 *
 * forward   route: gate, permute -> send, kept;  counts;  beside;  for each
 *           run, for each round { dispatch send -> recv; experts; return ret ->
 *           send };  combine, mix
 * backward  mix_grad, combine_grad;  beside_grad;  for each run, for each round
 *           { rows not saved: dispatch x again;  dispatch the gradient;
 *           experts_grad;  return;  experts_wgrad };  route_grad
 *
 * send is one buffer for all that is in send order: a row returns to the place
 * it was dispatched from, after that dispatch has ended, and the rows of
 * different rounds and runs are disjoint. So the plan may post the first
 * dispatches right behind the counts (backward: behind combine_grad) and wait
 * for the last returns before combine (route_grad): what is declared between
 * them and touches no exchanged buffer computes meanwhile. */
#include "moe/moe_layer_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "moe/declare.h"

#include <stdio.h>
#include <string.h>

static void layer_destroy(void *self)
{
  mz_moe_layer_t *l = self;

  if (!l) return;
  if (l->expert.destroy) l->expert.destroy(l->opts.expert_self);
  mz_free((void *)l->opts.fixed_logits);
  mz_free((void *)l->opts.route_table);
  mz_free(l);
}

static void layer_describe(const void *self, int64_t num_tokens,
                           int64_t sequence_length, char *line,
                           size_t line_bytes, double *operations_out)
{
  const mz_moe_layer_t *l = self;
  const mz_moe_opts_t *moe = &l->opts.moe;
  double token = (double)moe->num_experts * (double)l->opts.hidden_size +
                 moe->k * l->expert.operations(l->opts.expert_self) +
                 mz_beside_operations(&l->beside);

  snprintf(line, line_bytes, "%s: %d experts (%s), ep_size %d, top-%d, %s%s",
           l->name, moe->num_experts, l->expert.name, moe->ep_size, moe->k,
           moe->drop_tokens ? "capacity" : "dropless",
           mz_beside_text(&l->beside));
  *operations_out = (double)num_tokens * token;
}

static mz_status_t check_choice(const mz_moe_layer_opts_t *opts)
{
  const mz_moe_opts_t *moe = &opts->moe;

  MZ_REQUIRE(opts->temperature >= 0 && opts->temperature_end >= 0 &&
                 opts->temperature_steps >= 0 &&
                 (opts->temperature_steps == 0 ||
                  (opts->temperature > 0 && opts->temperature_end > 0)),
             MZ_ERR_ARG, "%s: temperature %g to %g in %" PRId64 " steps",
             moe->name, opts->temperature, opts->temperature_end,
             opts->temperature_steps);
  MZ_REQUIRE(opts->jitter >= 0 && opts->jitter < 1, MZ_ERR_ARG,
             "%s: jitter is %g, need 0 <= jitter < 1", moe->name, opts->jitter);
  MZ_REQUIRE(
      moe->bias_update_rate == 0 || opts->choice_noise == MZ_CHOICE_GREEDY,
      MZ_ERR_ARG, "%s: a bias and drawn choices exclude each other", moe->name);
  MZ_REQUIRE(opts->score == MZ_SCORE_SOFTMAX || moe->z_coef == 0, MZ_ERR_ARG,
             "%s: the z-loss is of softmax, its coefficient is %g", moe->name,
             moe->z_coef);
  return MZ_OK;
}

static mz_status_t check_opts(const mz_moe_layer_opts_t *opts)
{
  const mz_moe_opts_t *moe = &opts->moe;

  MZ_REQUIRE(opts->hidden_size >= 1, MZ_ERR_ARG,
             "%s: hidden_size is %" PRId64 ", need at least 1", moe->name,
             opts->hidden_size);
  MZ_REQUIRE(opts->in != opts->d_in && opts->in != opts->out, MZ_ERR_ARG,
             "%s: the input is read until the end of backward, its buffer %d "
             "cannot be the output's or that of its gradient",
             moe->name, opts->in);
  MZ_REQUIRE(moe->aux_coef >= 0 && moe->z_coef >= 0, MZ_ERR_ARG,
             "%s: coefficients %g and %g, need at least 0", moe->name,
             moe->aux_coef, moe->z_coef);
  MZ_TRY(check_choice(opts));
  MZ_REQUIRE(
      opts->drop_policy >= MZ_DROP_PROBS && opts->drop_policy <= MZ_DROP_RANDOM,
      MZ_ERR_ARG, "%s: no drop policy %d", moe->name, (int)opts->drop_policy);
  if (!opts->route_table) return MZ_OK;
  for (int64_t t = 0; t < opts->route_tokens; t++)
    MZ_REQUIRE(
        opts->route_table[t] >= 0 && opts->route_table[t] < moe->num_experts,
        MZ_ERR_ARG,
        "%s: the route table sends token id %" PRId64 " to expert %d of %d",
        moe->name, t, opts->route_table[t], moe->num_experts);
  return MZ_OK;
}

/* The layer's own copies; after an error self is still fit to be destroyed. */
static mz_status_t copy_opts(mz_moe_layer_t *l, const mz_moe_layer_opts_t *opts)
{
  float *logits = NULL;
  int32_t *table = NULL;

  l->opts = *opts;
  l->opts.fixed_logits = NULL;
  l->opts.route_table = NULL;
  l->opts.expert = NULL;
  l->expert = *opts->expert;
  MZ_TRY(check_opts(opts));
  MZ_TRY(mz_beside_set(&l->beside, opts));
  MZ_TRY(mz_format_name(l->name, "%s", opts->moe.name));
  l->opts.moe.name = l->name;
  if (opts->fixed_logits) {
    MZ_TRY(mz_new(opts->moe.num_experts, "fixed logits", &logits));
    memcpy(logits, opts->fixed_logits,
           (size_t)opts->moe.num_experts * sizeof *logits);
    l->opts.fixed_logits = logits;
  }
  if (opts->route_table) {
    MZ_TRY(mz_new(opts->route_tokens, "route table", &table));
    memcpy(table, opts->route_table,
           (size_t)opts->route_tokens * sizeof *table);
    l->opts.route_table = table;
  }
  return MZ_OK;
}

static mz_status_t declare_tensors(mz_moe_layer_t *l, mz_decl_t *decl)
{
  mz_tensor_opts_t gate = {
      .ndim = 2,
      .shape = {l->opts.moe.num_experts, l->opts.hidden_size},
      .init = MZ_INIT_NORMAL,
      .init_std = l->opts.init_std,
      .param_group = MZ_GROUP_DECAY,
      .block = l->opts.block};
  int32_t before;

  MZ_TRY(mz_decl_moe(decl, &l->opts.moe, &l->moe));
  MZ_TRY(mz_declare_tensor(decl, l->name, "gate.weight", gate, &l->gate));
  MZ_TRY(mz_beside_declare(&l->beside, decl, l->name, l->opts.block));
  before = mz_decl_num_tensors(decl);
  MZ_TRY(l->expert.declare(l->opts.expert_self, decl, l->moe));
  l->expert_tensors = mz_decl_num_tensors(decl) > before;
  l->saved_width = l->expert.saved_width(l->opts.expert_self);
  l->scratch_width = l->expert.scratch_width(l->opts.expert_self);
  return MZ_OK;
}

static mz_status_t declare_given(mz_moe_layer_t *l, mz_decl_t *decl,
                                 const char *suffix, int64_t width,
                                 mz_dtype_t dtype, int32_t *buffer_out)
{
  return MZ_TRACE(
      mz_declare_buffer(decl, l->name, suffix,
                        (mz_buffer_opts_t){.category = MZ_CAT_ROUTING,
                                           .kind = MZ_ROWS_FIXED,
                                           .rows = 1,
                                           .width = width,
                                           .dtype = dtype},
                        buffer_out));
}

static mz_status_t declare_token_buffers(mz_moe_layer_t *l, mz_decl_t *decl)
{
  int64_t E = l->opts.moe.num_experts, k = l->opts.moe.k;
  mz_dtype_t dtype = mz_decl_dtype(decl);
  const struct {
    const char *suffix;
    int32_t *id;
    mz_category_t category;
    int64_t rows, width;
    mz_dtype_t dtype;
  } list[] = {
      {"probs", &l->probs, MZ_CAT_ROUTING, 1, E, MZ_F32},
      {"lse", &l->lse, MZ_CAT_ROUTING, 1, 1, MZ_F32},
      {"expert", &l->expert_ids, MZ_CAT_ROUTING, 1, k, MZ_I32},
      {"weight", &l->weight, MZ_CAT_ROUTING, 1, k, MZ_F32},
      {"row", &l->row, MZ_CAT_ROUTING, 1, k, MZ_I32},
      {"d_weight", &l->d_weight, MZ_CAT_ROUTING, 1, k, MZ_F32},
      {"dlogits", &l->dlogits, MZ_CAT_ROUTING, 1, E, MZ_F32},
      {"send", &l->send, MZ_CAT_DISPATCH, k, l->opts.hidden_size, dtype},
      {"resend", &l->resend, MZ_CAT_DISPATCH, k, l->opts.hidden_size, dtype},
  };

  for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
    MZ_TRY(mz_declare_buffer(decl, l->name, list[i].suffix,
                             (mz_buffer_opts_t){.category = list[i].category,
                                                .kind = MZ_ROWS_TOKENS,
                                                .rows = list[i].rows,
                                                .width = list[i].width,
                                                .dtype = list[i].dtype},
                             list[i].id));
  l->logits = l->table = l->bias = -1;
  if (l->opts.moe.bias_update_rate > 0)
    MZ_TRY(declare_given(l, decl, "bias", E, MZ_F32, &l->bias));
  if (l->opts.fixed_logits)
    MZ_TRY(declare_given(l, decl, "given_logits", E, MZ_F32, &l->logits));
  if (l->opts.route_table)
    MZ_TRY(declare_given(l, decl, "route_table", l->opts.route_tokens, MZ_I32,
                         &l->table));
  return MZ_TRACE(
      mz_declare_buffer(decl, l->name, "kept",
                        (mz_buffer_opts_t){.category = MZ_CAT_ROUTING,
                                           .kind = MZ_ROWS_FIXED,
                                           .rows = 1,
                                           .width = E,
                                           .dtype = MZ_I32},
                        &l->kept));
}

static mz_status_t declare_row_buffers(mz_moe_layer_t *l, mz_decl_t *decl)
{
  int64_t H = l->opts.hidden_size;
  mz_moe_round_t *f = &l->round[MZ_FORWARD], *b = &l->round[MZ_BACKWARD];
  const struct {
    const char *prefix, *suffix;
    int32_t *id;
    mz_category_t category;
    mz_rows_t kind;
    int64_t width;
  } list[] = {
      {l->name, "recv", &f->recv, MZ_CAT_DISPATCH, MZ_ROWS_ROUND, H},
      {l->name, "x", &f->x, MZ_CAT_DISPATCH, MZ_ROWS_ROUND, H},
      {l->name, "ret", &f->ret, MZ_CAT_DISPATCH, MZ_ROWS_ROUND, H},
      {l->name, "saved", &f->saved, MZ_CAT_WORKSPACE, MZ_ROWS_ROUND,
       l->saved_width},
      {l->name, "scratch", &f->scratch, MZ_CAT_WORKSPACE, MZ_ROWS_ROUND,
       l->scratch_width},
      {l->name, "grad.recv", &b->recv, MZ_CAT_DISPATCH, MZ_ROWS_ROUND, H},
      {l->name, "grad.x", &b->x, MZ_CAT_DISPATCH, MZ_ROWS_ROUND, H},
      {l->name, "grad.ret", &b->ret, MZ_CAT_DISPATCH, MZ_ROWS_ROUND, H},
      {l->name, "grad.work", &l->work, MZ_CAT_DISPATCH, MZ_ROWS_ROUND, H},
      {l->name, "grad.saved", &b->saved, MZ_CAT_WORKSPACE, MZ_ROWS_ROUND,
       l->saved_width},
      {l->name, "grad.scratch", &b->scratch, MZ_CAT_WORKSPACE, MZ_ROWS_ROUND,
       l->scratch_width},
      {"moe.pool", "x", &l->pool_x, MZ_CAT_SAVED_ROWS, MZ_ROWS_POOL, H},
      {"moe.pool", "saved", &l->pool_saved, MZ_CAT_SAVED_ROWS, MZ_ROWS_POOL,
       l->saved_width},
  };

  for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
    MZ_TRY(mz_declare_buffer(decl, list[i].prefix, list[i].suffix,
                             (mz_buffer_opts_t){.category = list[i].category,
                                                .kind = list[i].kind,
                                                .moe = l->moe,
                                                .width = list[i].width,
                                                .dtype = mz_decl_dtype(decl)},
                             list[i].id));
  return MZ_OK;
}

static mz_status_t declare_forward(const mz_moe_layer_t *l, mz_decl_t *decl)
{
  const mz_moe_round_t *round = &l->round[MZ_FORWARD];
  mz_compute_opts_t route = {.name = "route", .fn = mz_moe_route};
  mz_compute_opts_t experts = {.name = "experts",
                               .fn = mz_moe_experts,
                               .expert_weights = l->expert_tensors};
  mz_compute_opts_t combine = {.name = "combine", .fn = mz_moe_combine};

  MZ_REFS(&route, reads, l->opts.in);
  MZ_REFS(&route, writes, l->probs, l->lse, l->expert_ids, l->weight, l->row,
          l->kept, l->send, l->logits, l->table, l->bias);
  if (l->opts.has_pads) MZ_REFS(&route, reads, l->opts.used);
  MZ_REFS(&route, weights, l->gate);
  MZ_REFS(&experts, reads, round->recv);
  MZ_REFS(&experts, writes, l->pool_x, l->pool_saved, round->x, round->saved,
          round->scratch, round->recv, round->ret);
  MZ_REFS(&combine, reads, l->row, l->weight, l->send);
  MZ_REFS(&combine, writes, l->opts.out);
  mz_beside_refs(&l->beside, &combine);

  MZ_TRY(mz_decl_compute(decl, MZ_FORWARD, &route));
  MZ_TRY(mz_decl_counts(decl, MZ_FORWARD, l->moe, l->kept));
  MZ_TRY(mz_beside_step(&l->beside, decl, MZ_FORWARD, mz_moe_beside));
  MZ_TRY(mz_decl_runs(decl, MZ_FORWARD, l->moe));
  MZ_TRY(mz_decl_rounds(decl, MZ_FORWARD, l->moe));
  MZ_TRY(mz_decl_exchange(decl, MZ_FORWARD, l->moe, MZ_DISPATCH, l->send,
                          round->recv));
  MZ_TRY(mz_decl_compute(decl, MZ_FORWARD, &experts));
  MZ_TRY(mz_decl_exchange(decl, MZ_FORWARD, l->moe, MZ_RETURN, round->ret,
                          l->send));
  MZ_TRY(mz_decl_end(decl, MZ_FORWARD));
  MZ_TRY(mz_decl_end(decl, MZ_FORWARD));
  return MZ_TRACE(mz_decl_compute(decl, MZ_FORWARD, &combine));
}

/* What travels back does so while the gradients of the weights are computed,
 * where the expert can do that apart. */
static mz_status_t declare_wgrad(const mz_moe_layer_t *l, mz_decl_t *decl)
{
  const mz_moe_round_t *round = &l->round[MZ_BACKWARD];
  mz_compute_opts_t wgrad = {.name = "experts_wgrad",
                             .fn = mz_moe_experts_wgrad,
                             .expert_weights = l->expert_tensors,
                             .expert_grads = l->expert_tensors};

  if (!l->expert.backward_weights) return MZ_OK;
  MZ_REFS(&wgrad, reads, round->x, round->saved, round->scratch, round->recv,
          l->work, l->pool_x, l->pool_saved);
  MZ_REFS(&wgrad, writes, round->saved, round->scratch, round->recv, l->work,
          l->pool_saved);
  return MZ_TRACE(mz_decl_compute(decl, MZ_BACKWARD, &wgrad));
}

/* The runs of backward: dispatch, experts_grad, return, experts_wgrad. */
static mz_status_t declare_runs_grad(const mz_moe_layer_t *l, mz_decl_t *decl)
{
  const mz_moe_round_t *round = &l->round[MZ_BACKWARD];
  mz_compute_opts_t experts = {.name = "experts_grad",
                               .fn = mz_moe_experts_grad,
                               .expert_weights = l->expert_tensors,
                               .expert_grads = l->expert_tensors &&
                                               !l->expert.backward_weights};

  MZ_REFS(&experts, reads, round->recv, l->work, l->pool_x, l->pool_saved);
  MZ_REFS(&experts, writes, round->x, round->saved, round->scratch, l->work,
          round->recv, round->ret, l->pool_saved);
  MZ_TRY(mz_decl_runs(decl, MZ_BACKWARD, l->moe));
  MZ_TRY(mz_decl_rounds(decl, MZ_BACKWARD, l->moe));
  MZ_TRY(mz_decl_branch(decl, MZ_BACKWARD, l->moe, false));
  MZ_TRY(mz_decl_exchange(decl, MZ_BACKWARD, l->moe, MZ_DISPATCH, l->resend,
                          l->work));
  MZ_TRY(mz_decl_end(decl, MZ_BACKWARD));
  MZ_TRY(mz_decl_exchange(decl, MZ_BACKWARD, l->moe, MZ_DISPATCH, l->send,
                          round->recv));
  MZ_TRY(mz_decl_compute(decl, MZ_BACKWARD, &experts));
  MZ_TRY(mz_decl_exchange(decl, MZ_BACKWARD, l->moe, MZ_RETURN, round->ret,
                          l->send));
  MZ_TRY(declare_wgrad(l, decl));
  MZ_TRY(mz_decl_end(decl, MZ_BACKWARD));
  return MZ_TRACE(mz_decl_end(decl, MZ_BACKWARD));
}

static mz_status_t declare_backward(const mz_moe_layer_t *l, mz_decl_t *decl)
{
  const mz_moe_opts_t *moe = &l->opts.moe;
  bool aux = moe->aux_loss != MZ_AUX_NONE && moe->aux_coef > 0;
  mz_compute_opts_t combine = {.name = "combine_grad",
                               .fn = mz_moe_combine_grad};
  mz_compute_opts_t route = {.name = "route_grad",
                             .fn = mz_moe_route_grad,
                             .needs_stats = moe->aux_scope == MZ_SCOPE_GROUP &&
                                            (aux || moe->z_coef > 0)};

  MZ_REFS(&combine, reads, l->row, l->weight, l->send, l->opts.d_out,
          l->opts.in);
  MZ_REFS(&combine, writes, l->send, l->d_weight, l->resend);
  MZ_REFS(&route, reads, l->opts.in, l->probs, l->lse, l->expert_ids, l->weight,
          l->row, l->kept, l->d_weight, l->send, l->logits, l->table);
  MZ_REFS(&route, writes, l->opts.d_in, l->dlogits);
  MZ_REFS(&route, weights, l->gate);
  MZ_REFS(&route, grads, l->gate);
  mz_beside_grad_refs(&l->beside, &combine);
  mz_beside_input_refs(&l->beside, &route);

  MZ_TRY(mz_decl_compute(decl, MZ_BACKWARD, &combine));
  MZ_TRY(mz_beside_step(&l->beside, decl, MZ_BACKWARD, mz_moe_beside_grad));
  MZ_TRY(declare_runs_grad(l, decl));
  return MZ_TRACE(mz_decl_compute(decl, MZ_BACKWARD, &route));
}

mz_status_t mz_moe_layer(mz_decl_t *decl, const mz_moe_layer_opts_t *opts)
{
  mz_moe_layer_t *self = NULL, *owned;
  mz_status_t st;

  MZ_REQUIRE(decl && opts && opts->expert && opts->moe.name, MZ_ERR_ARG,
             "decl, opts, the expert or the name is NULL");
  st = mz_new(1, "MoE layer", &self);
  if (st != MZ_OK) {
    if (opts->expert->destroy) opts->expert->destroy(opts->expert_self);
    return MZ_TRACE(st);
  }
  owned = self; /* until the declaration takes it */
  MZ_TRY_GOTO(st, copy_opts(self, opts), done);
  MZ_TRY_GOTO(st, declare_tensors(self, decl), done);
  MZ_TRY_GOTO(st, declare_token_buffers(self, decl), done);
  MZ_TRY_GOTO(st, declare_row_buffers(self, decl), done);
  MZ_TRY_GOTO(
      st,
      mz_decl_layer(decl, &(mz_layer_opts_t){.name = self->name,
                                             .self = self,
                                             .destroy = layer_destroy,
                                             .describe = layer_describe}),
      done);
  owned = NULL;
  MZ_TRY_GOTO(st, declare_forward(self, decl), done);
  MZ_TRY_GOTO(st, declare_backward(self, decl), done);
done:
  layer_destroy(owned);
  return st;
}
