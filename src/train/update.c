/* SPDX-License-Identifier: Apache-2.0 */
/* What the ranks tell each other in a step, the global norm, clipping, the
 * verdict, and the optimizer. Sums are taken in rank order by every rank. */
#include "train/engine_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/bias.h"
#include "train/hooks.h"

#include <math.h>
#include <string.h>

mz_status_t mz_update_begin(mz_engine_t *engine)
{
  double *own =
      (double *)mz_zero_buffer(engine->zero, engine->plan->scalars_own);
  double start[MZ_NUM_OF_KERNELS] = {[MZ_SCALAR_MIN_GAP] = HUGE_VAL};

  memset(own, 0, 8 * MZ_PLAN_SCALARS);
  return MZ_TRACE(mz_device_upload(
      engine->device, mz_zero_buffer(engine->zero, engine->plan->scalars),
      start, sizeof start, engine->device->stream));
}

mz_status_t mz_update_post_scalars(mz_engine_t *engine, int32_t entry)
{
  double *own =
      (double *)mz_zero_buffer(engine->zero, engine->plan->scalars_own);
  mz_msg_t msg = {.kind = MZ_MSG_GATHER,
                  .group = 0,
                  .element_bytes = sizeof(double),
                  .send = own,
                  .recv =
                      mz_zero_buffer(engine->zero, engine->plan->scalars_all),
                  .send_count = MZ_PLAN_SCALARS,
                  .recv_counts = engine->scalars_counts,
                  .recv_displs = engine->scalars_displs};

  mz_engine_note(
      engine,
      mz_device_copy(engine->device, own,
                     mz_zero_buffer(engine->zero, engine->plan->scalars),
                     MZ_NUM_OF_KERNELS * (int64_t)sizeof(double),
                     engine->device->stream));
  own[MZ_AT_STATUS] = (double)engine->status;
  own[MZ_AT_SENT] = (double)mz_routing_sent_bytes(engine);
  own[MZ_AT_EXPOSED] = engine->exposed_ms;
  return MZ_TRACE(mz_comm_post(engine->comm, MZ_LANE_EXCHANGE, &msg,
                               &engine->tickets[entry]));
}

static const double *scalars_of(const mz_engine_t *e, int r)
{
  return (const double *)mz_zero_buffer(e->zero, e->plan->scalars_all) +
         (int64_t)r * MZ_PLAN_SCALARS;
}

double mz_update_sum(const mz_engine_t *engine, int32_t at)
{
  double sum = 0;

  for (int r = 0; r < engine->plan->opts.world_size; r++)
    sum += scalars_of(engine, r)[at];
  return sum;
}

double mz_update_least(const mz_engine_t *engine, int32_t at)
{
  double least = scalars_of(engine, 0)[at];

  for (int r = 1; r < engine->plan->opts.world_size; r++)
    least = fmin(least, scalars_of(engine, r)[at]);
  return least;
}

mz_status_t mz_update_worst(const mz_engine_t *engine)
{
  double worst = 0;

  for (int r = 0; r < engine->plan->opts.world_size; r++)
    worst = fmax(worst, scalars_of(engine, r)[MZ_AT_STATUS]);
  return (mz_status_t)worst;
}

void mz_update_norm(mz_engine_t *engine)
{
  double *there = (double *)mz_zero_buffer(engine->zero, engine->plan->scalars);

  if (engine->config->debug.inject_grads && engine->status == MZ_OK)
    mz_engine_note(engine, mz_hooks_inject(engine));
  if (engine->status == MZ_OK)
    mz_engine_note(engine, mz_zero_norm(engine->zero, &there[MZ_AT_SQUARES]));
}

/* Norm and factor: spec 5.3 without loss scale, 1 / max(1, (n + 1e-6)/clip).
 * No update when a rank failed, a gradient is not finite or nothing had a
 * label. */
void mz_update_verdict(mz_engine_t *engine)
{
  double clip = engine->config->gradient_clipping, over;

  engine->grad_norm = sqrt(mz_update_sum(engine, MZ_AT_SQUARES));
  engine->total_loss = mz_update_sum(engine, MZ_SCALAR_LOSS_SUM);
  engine->min_gap = HUGE_VAL;
  engine->culprit = -1;
  for (int r = 0; r < engine->plan->opts.world_size; r++) {
    const double *s = scalars_of(engine, r);
    engine->min_gap = fmin(engine->min_gap, s[MZ_SCALAR_MIN_GAP]);
    if (s[MZ_AT_CULPRIT] > 0 && engine->culprit < 0)
      engine->culprit = (int32_t)s[MZ_AT_CULPRIT] - 1;
  }
  engine->verdict_skip =
      engine->verdict_skip || mz_update_worst(engine) != MZ_OK ||
      !isfinite(engine->grad_norm) || engine->total_labels == 0;
  over = clip > 0 ? (engine->grad_norm + 1e-6) / clip : 0;
  engine->factor = (float)(1 / fmax(1, over));
}

mz_status_t mz_update_make_groups(mz_engine_t *engine)
{
  const mz_optimizer_config_t *o = &engine->config->optimizer;
  int32_t num = mz_decl_num_param_groups(engine->decl);

  MZ_REQUIRE(o->num_groups == 0 ||
                 engine->decl->num_grouped == engine->decl->num_tensors,
             MZ_ERR_ARG,
             "optimizer.param_groups is given, but mz_decl_apply_groups was "
             "not called after the last tensor");
  MZ_TRY(mz_new(num, "parameter groups", &engine->groups));
  MZ_TRY(mz_new(num, "rates of parameter groups", &engine->lr_ratio));
  for (int32_t i = 0; i < num; i++) {
    const mz_hyper_t *h = mz_decl_group_hyper(engine->decl, i);
    mz_adamw_group_t *g = &engine->groups[i];
    bool lr = h->gives & MZ_GIVES_LR, betas = h->gives & MZ_GIVES_BETAS;

    MZ_REQUIRE(!lr || o->lr > 0, MZ_ERR_CONFIG,
               "optimizer.params.lr is 0, but a parameter group has the rate "
               "%g, which the schedule scales by their ratio",
               h->lr);
    engine->lr_ratio[i] = lr ? h->lr / o->lr : 1;
    g->beta1 = betas ? h->beta1 : o->beta1;
    g->beta2 = betas ? h->beta2 : o->beta2;
    g->eps = h->gives & MZ_GIVES_EPS ? h->eps : o->eps;
    g->decay =
        h->gives & MZ_GIVES_WEIGHT_DECAY ? h->weight_decay : o->weight_decay;
  }
  return MZ_OK;
}

void mz_update_adamw(mz_engine_t *engine)
{
  const mz_optimizer_config_t *o = &engine->config->optimizer;
  mz_zero_update_t u = {.groups = engine->groups,
                        .num_groups = mz_decl_num_param_groups(engine->decl),
                        .t = engine->updates + 1,
                        .l2 = !o->adam_w_mode,
                        .bias_correction = o->bias_correction,
                        .factor = engine->factor};

  if (engine->verdict_skip) return;
  for (int32_t i = 0; i < mz_decl_num_param_groups(engine->decl); i++)
    engine->groups[i].lr = engine->lr * engine->lr_ratio[i];
  mz_engine_note(engine, mz_zero_adamw(engine->zero, &u));
  mz_bias_update(engine);
  mz_engine_note(engine, mz_hooks_fault(engine->config, engine->plan->opts.rank,
                                        engine->steps + 1, true));
  engine->updates++;
}
