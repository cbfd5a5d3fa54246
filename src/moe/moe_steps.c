/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of the MoE layer's steps.
 *
 * Gradients of the auxiliary terms (moezero/moe.h), T tokens of the scope, a
 * accumulation steps. Balance losses add to the gradient of the share of expert
 * e of every token: coef E f_e / (T a), with f_e = routed_e / (T k) or first_e
 * / T; squared: 2 coef (P_e - 1/E) / (T a). The z-loss adds 2 coef lse g / (T
 * a) to the gradient of a logit. In scope "rank" all are divided by the ranks.
 */
#include "moe/moe_layer_impl.h"

#include "base/check.h"
#include "moe/map.h"

#include <math.h>

/* 0 for a temperature of 1, at which kernels have nothing to do. */
static float temperature(const mz_moe_layer_opts_t *o, int64_t step)
{
  double share = 0, now;

  if (o->temperature_steps > 0)
    share = fmin(1, (double)step / (double)o->temperature_steps);
  now = o->temperature + (o->temperature_end - o->temperature) * share;
  return now == 1 ? 0 : (float)now;
}

/* How experts are chosen and scored; noise is for training. */
static void set_choice(const mz_moe_layer_t *l, const mz_call_t *call,
                       mz_gate_t *a)
{
  const mz_moe_layer_opts_t *o = &l->opts;

  a->score = o->score;
  a->temperature = temperature(o, call->step);
  if (l->bias >= 0) a->bias = call->buffers[l->bias];
  if (o->has_pads) a->used = call->buffers[o->used];
  if (call->mode != MZ_MODE_TRAIN) return;
  a->jitter = (float)o->jitter;
  a->jitter_random = MZ_CALL_RANDOM(call, MZ_PURPOSE_GATE_NOISE);
  a->choice_noise = o->choice_noise;
  a->choice_random = MZ_CALL_RANDOM(
      call, o->choice_noise == MZ_CHOICE_DRAWN_SECOND ? MZ_PURPOSE_SECOND_CHOICE
                                                      : MZ_PURPOSE_GATE_NOISE);
}

static mz_gate_t gate_args(const mz_moe_layer_t *l, const mz_call_t *call)
{
  const mz_moe_opts_t *moe = &l->opts.moe;
  mz_gate_t a = {.num_tokens = call->micro->num_tokens,
                 .num_experts = moe->num_experts,
                 .k = moe->k,
                 .width = l->opts.hidden_size,
                 .x = call->buffers[l->opts.in],
                 .w = call->weights[l->gate],
                 .fixed_logits =
                     l->logits < 0 ? NULL : call->buffers[l->logits],
                 .route_table = l->table < 0 ? NULL : call->buffers[l->table],
                 .tokens = call->micro->tokens,
                 .capacity = call->moe->capacity,
                 .policy = l->opts.drop_policy,
                 .random = MZ_CALL_RANDOM(call, MZ_PURPOSE_TOKEN_SELECTION),
                 .samples = call->micro->samples,
                 .sequence = call->micro->sequence_length,
                 .norm_topk = l->opts.norm_topk && moe->k > 1,
                 .probs = call->buffers[l->probs],
                 .lse = call->buffers[l->lse],
                 .expert = call->buffers[l->expert_ids],
                 .weight = call->buffers[l->weight],
                 .row = call->buffers[l->row],
                 .kept = call->buffers[l->kept],
                 .stats = call->moe->stats};

  set_choice(l, call, &a);
  return a;
}

static mz_status_t permute(const mz_moe_layer_t *l, const mz_call_t *call,
                           int32_t send)
{
  mz_permute_t a = {.num_tokens = call->micro->num_tokens,
                    .width = l->opts.hidden_size,
                    .k = l->opts.moe.k,
                    .row = call->buffers[l->row],
                    .x = call->buffers[l->opts.in],
                    .send = call->buffers[send]};

  return MZ_KERNEL(call, permute, &a);
}

/* The bias, and what a test gives for the gate, where the kernels read it. */
static mz_status_t upload_given(const mz_moe_layer_t *l, const mz_call_t *call)
{
  const mz_device_t *device = call->kernels->device;

  if (l->bias >= 0)
    MZ_TRY(mz_device_upload(device, call->buffers[l->bias], call->moe->bias,
                            4 * l->opts.moe.num_experts, call->stream));
  if (l->logits >= 0)
    MZ_TRY(mz_device_upload(device, call->buffers[l->logits],
                            l->opts.fixed_logits, 4 * l->opts.moe.num_experts,
                            call->stream));
  if (l->table >= 0)
    MZ_TRY(mz_device_upload(device, call->buffers[l->table],
                            l->opts.route_table, 4 * l->opts.route_tokens,
                            call->stream));
  return MZ_OK;
}

mz_status_t mz_moe_route(const mz_call_t *call, void *self)
{
  const mz_moe_layer_t *l = self;
  mz_gate_t gate = gate_args(l, call);

  gate.min_gap = &call->scalars[MZ_SCALAR_MIN_GAP];
  MZ_TRY(upload_given(l, call));
  MZ_TRY(MZ_KERNEL(call, gate, &gate));
  return MZ_TRACE(permute(l, call, l->send));
}

static mz_status_t regroup(const mz_moe_layer_t *l, const mz_call_t *call,
                           const void *src, void *dst, int to_source_major)
{
  const mz_window_t *window = call->window;
  mz_regroup_t a = {.num_sources = window->num_sources,
                    .num_experts = window->num_experts,
                    .counts = window->counts,
                    .offsets = window->offsets,
                    .max_rows = window->rows,
                    .width = l->opts.hidden_size,
                    .src = src,
                    .dst = dst,
                    .to_source_major = to_source_major};

  if (src == dst) return MZ_OK; /* the orders are one, nothing moves */
  return MZ_KERNEL(call, regroup, &a);
}

/* Rows of one expert, or from one source, lie alike in both orders: what
 * returns is written where it is sent from. */
static bool orders_are_one(const mz_window_t *window)
{
  return window->num_experts == 1 || window->num_sources == 1;
}

/* Where the experts write what returns. */
static void *rows_out(const mz_call_t *call, const mz_moe_round_t *round)
{
  return call->buffers[orders_are_one(call->window) ? round->ret : round->recv];
}

static mz_status_t make_return(const mz_moe_layer_t *l, const mz_call_t *call,
                               const mz_moe_round_t *round)
{
  return MZ_TRACE(
      regroup(l, call, rows_out(call, round), call->buffers[round->ret], 1));
}

/* x and saved of the window's rows: in the pool or of this round only. */
static void *rows_x(const mz_moe_layer_t *l, const mz_call_t *call,
                    const mz_moe_round_t *round)
{
  if (!call->moe->saved) return call->buffers[round->x];
  return mz_at(call, call->buffers[l->pool_x],
               call->window->pool_row * l->opts.hidden_size);
}

static void *rows_saved(const mz_moe_layer_t *l, const mz_call_t *call,
                        const mz_moe_round_t *round)
{
  if (!call->moe->saved) return call->buffers[round->saved];
  return mz_at(call, call->buffers[l->pool_saved],
               call->window->pool_row * l->saved_width);
}

mz_status_t mz_moe_experts(const mz_call_t *call, void *self)
{
  const mz_moe_layer_t *l = self;
  const mz_moe_round_t *round = &l->round[MZ_FORWARD];
  void *x = rows_x(l, call, round);
  mz_expert_rows_t rows = {.window = call->window,
                           .x = x,
                           .saved = rows_saved(l, call, round),
                           .scratch = call->buffers[round->scratch],
                           .y = rows_out(call, round)};

  MZ_TRY(regroup(l, call, call->buffers[round->recv], x, 0));
  MZ_TRY(l->expert.forward(l->opts.expert_self, call, &rows));
  return MZ_TRACE(make_return(l, call, round));
}

static mz_combine_t combine_args(const mz_moe_layer_t *l, const mz_call_t *call)
{
  mz_combine_t a = {.num_tokens = call->micro->num_tokens,
                    .width = l->opts.hidden_size,
                    .k = l->opts.moe.k,
                    .row = call->buffers[l->row],
                    .weight = call->buffers[l->weight],
                    .back = call->buffers[l->send]};
  return a;
}

mz_status_t mz_moe_combine(const mz_call_t *call, void *self)
{
  const mz_moe_layer_t *l = self;
  mz_combine_t a = combine_args(l, call);

  a.y = call->buffers[mz_beside_combined(&l->beside)];
  MZ_TRY(MZ_KERNEL(call, combine, &a));
  return MZ_TRACE(mz_beside_mix(&l->beside, call));
}

mz_status_t mz_moe_beside(const mz_call_t *call, void *self)
{
  const mz_moe_layer_t *l = self;

  return MZ_TRACE(mz_beside_forward(&l->beside, call));
}

mz_status_t mz_moe_beside_grad(const mz_call_t *call, void *self)
{
  const mz_moe_layer_t *l = self;

  return MZ_TRACE(mz_beside_backward(&l->beside, call));
}

mz_status_t mz_moe_combine_grad(const mz_call_t *call, void *self)
{
  const mz_moe_layer_t *l = self;
  mz_combine_grad_t a = {.forward = combine_args(l, call),
                         .dy = call->buffers[mz_beside_d_combined(&l->beside)],
                         .d_send = call->buffers[l->send],
                         .d_weight = call->buffers[l->d_weight]};

  if (!call->moe->saved) MZ_TRY(permute(l, call, l->resend));
  MZ_TRY(mz_beside_mix_grad(&l->beside, call));
  return MZ_KERNEL(call, combine_grad, &a);
}

/* x arrives again and what backward needs of it is computed again; the output
 * itself is not wanted, so it goes where x came from. */
static mz_status_t recompute(const mz_moe_layer_t *l, const mz_call_t *call,
                             mz_expert_rows_t rows, void *x)
{
  void *work = call->buffers[l->work];

  MZ_TRY(regroup(l, call, work, x, 0));
  rows.y = work;
  return MZ_TRACE(l->expert.forward(l->opts.expert_self, call, &rows));
}

/* What arrived of one expert from several sources is in order, and dx is
 * written elsewhere; from one source dx may take the place of dy, which is
 * needed. */
static void *rows_dy(const mz_moe_layer_t *l, const mz_call_t *call)
{
  const mz_window_t *window = call->window;
  bool there = window->num_experts == 1 && window->num_sources > 1;

  return call->buffers[there ? l->round[MZ_BACKWARD].recv : l->work];
}

static mz_expert_rows_t grad_rows(const mz_moe_layer_t *l,
                                  const mz_call_t *call)
{
  const mz_moe_round_t *round = &l->round[MZ_BACKWARD];
  mz_expert_rows_t rows = {.window = call->window,
                           .x = rows_x(l, call, round),
                           .saved = rows_saved(l, call, round),
                           .scratch = call->buffers[round->scratch],
                           .dy = rows_dy(l, call)};
  return rows;
}

mz_status_t mz_moe_experts_grad(const mz_call_t *call, void *self)
{
  const mz_moe_layer_t *l = self;
  const mz_moe_round_t *round = &l->round[MZ_BACKWARD];
  mz_expert_rows_t rows = grad_rows(l, call);

  if (!call->moe->saved)
    MZ_TRY(recompute(l, call, rows, rows_x(l, call, round)));
  MZ_TRY(regroup(l, call, call->buffers[round->recv], rows_dy(l, call), 0));
  rows.dx = rows_out(call, round);
  MZ_TRY(l->expert.backward(l->opts.expert_self, call, &rows));
  return MZ_TRACE(make_return(l, call, round));
}

mz_status_t mz_moe_experts_wgrad(const mz_call_t *call, void *self)
{
  const mz_moe_layer_t *l = self;
  mz_expert_rows_t rows = grad_rows(l, call);

  return MZ_TRACE(l->expert.backward_weights(l->opts.expert_self, call, &rows));
}

static void set_aux(const mz_moe_layer_t *l, const mz_call_t *call,
                    mz_gate_grad_t *a)
{
  const mz_moe_opts_t *moe = &l->opts.moe;
  bool group = moe->aux_scope == MZ_SCOPE_GROUP;
  bool firsts = moe->aux_loss == MZ_AUX_FIRST_CHOICE;
  bool squared = moe->aux_loss == MZ_AUX_SQUARED;
  const int64_t *stats = group ? call->moe->total : call->moe->stats;
  double tokens =
      group ? call->moe->total_tokens : (double)call->micro->num_tokens;
  double coef = moe->aux_loss == MZ_AUX_NONE ? 0 : moe->aux_coef;
  double divisor = tokens * call->micro->accumulation;
  int32_t E = moe->num_experts;

  if ((coef <= 0 && moe->z_coef <= 0) || tokens <= 0) return;
  if (!group) divisor *= call->moe->ranks;
  a->aux_counts = stats + (firsts ? MZ_STATS_FIRST(E) : MZ_STATS_ROUTED(E));
  a->aux_sums = (const double *)(const void *)(stats + MZ_STATS_PROBS(E));
  a->sums_mean = tokens / E;
  if (squared)
    a->sums_scale = 2 * coef / tokens / divisor;
  else
    a->aux_scale = coef * E / (tokens * (firsts ? 1 : moe->k)) / divisor;
  a->z_scale = moe->z_coef / divisor;
}

mz_status_t mz_moe_route_grad(const mz_call_t *call, void *self)
{
  const mz_moe_layer_t *l = self;
  mz_permute_grad_t permute_grad = {.num_tokens = call->micro->num_tokens,
                                    .width = l->opts.hidden_size,
                                    .k = l->opts.moe.k,
                                    .row = call->buffers[l->row],
                                    .d_row = call->buffers[l->send],
                                    .dx = call->buffers[l->opts.d_in]};
  mz_gate_grad_t gate_grad = {.forward = gate_args(l, call),
                              .d_weight = call->buffers[l->d_weight],
                              .dlogits = call->buffers[l->dlogits],
                              .dx = call->buffers[l->opts.d_in],
                              .dw = call->grads[l->gate],
                              .accumulate = call->accumulate[l->gate]};

  set_aux(l, call, &gate_grad);
  MZ_TRY(MZ_KERNEL(call, permute_grad, &permute_grad));
  MZ_TRY(MZ_KERNEL(call, gate_grad, &gate_grad));
  return MZ_TRACE(mz_beside_add_input(&l->beside, call));
}
