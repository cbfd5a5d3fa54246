/* SPDX-License-Identifier: Apache-2.0 */
/* Walks the plan's operations. A computation that fails leaves its error in
 * engine->status and is not called again in this step, but the walk goes on, so
 * that no rank waits for a message that never comes. */
#include "train/engine_impl.h"

#include "base/check.h"

#include <string.h>
#include <time.h>

void mz_engine_note(mz_engine_t *engine, mz_status_t status)
{
  if (engine->status == MZ_OK) engine->status = status;
}

static mz_status_t compute(mz_engine_t *e, const mz_op_t *op)
{
  const mz_compute_opts_t *c = &e->decl->steps[op->pass][op->step].compute;
  const mz_layer_t *layer = &e->decl->layers[op->layer];
  int32_t moe = e->layer_moe[op->layer];

  e->call.layer = op->layer;
  e->call.moe = moe >= 0 ? &e->moes[moe].call : NULL;
  e->call.window = op->flag ? &e->window : NULL;
  if (moe >= 0) mz_routing_point_pool(e, moe);
  return MZ_TRACE(c->fn(&e->call, layer->opts.self));
}

/* After a contribution the next one is added. An expert without rows made none:
 * the first rows that come write its gradient, in whichever round that is, so
 * that how many runs there are does not change which kernels sum it. */
static void mark_grads(mz_engine_t *e, const mz_op_t *op)
{
  const mz_compute_opts_t *c = &e->decl->steps[op->pass][op->step].compute;
  uint8_t *accumulate = mz_zero_accumulate(e->zero);
  const mz_run_t *run;
  const mz_moe_t *m;

  if (e->call.mode != MZ_MODE_TRAIN) return;
  for (int32_t i = 0; i < c->num_grads; i++)
    accumulate[c->grads[i]] = 1;
  if (!c->expert_grads) return;
  run = &e->plan->runs[op->run];
  m = &e->decl->moes[run->moe];
  for (int32_t i = 0; i < run->num_experts; i++) {
    if (e->window.host_offsets[i] == e->window.host_offsets[i + 1]) continue;
    for (int32_t t = 0; t < m->num_tensors; t++)
      accumulate[m->tensors[t] + run->first_expert + i] = 1;
  }
}

static mz_status_t post(mz_engine_t *e, const mz_op_t *op)
{
  const mz_entry_t *entry = &e->plan->entries[op->entry];

  if (entry->lane == MZ_LANE_BULK)
    return MZ_TRACE(mz_zero_post(e->zero, op->entry));
  if (e->config->debug.delay_ms > 0) {
    struct timespec delay = {e->config->debug.delay_ms / 1000,
                             e->config->debug.delay_ms % 1000 * 1000000};
    nanosleep(&delay, NULL);
  }
  switch (entry->kind) {
  case MZ_ENTRY_COUNTS:
    return MZ_TRACE(mz_routing_post_counts(e, op));
  case MZ_ENTRY_TOKENS:
    return MZ_TRACE(mz_routing_post_tokens(e, op));
  case MZ_ENTRY_STATS:
    return MZ_TRACE(mz_routing_post_stats(e, op));
  default:
    return MZ_TRACE(mz_update_post_scalars(e, op->entry));
  }
}

static mz_status_t wait_for(mz_engine_t *e, const mz_op_t *op)
{
  const mz_entry_t *entry = &e->plan->entries[op->entry];

  if (entry->lane == MZ_LANE_BULK)
    return MZ_TRACE(mz_zero_wait(e->zero, op->entry, e->stream_waits));
  if (entry->kind == MZ_ENTRY_TOKENS)
    return MZ_TRACE(mz_routing_wait_tokens(e, op));
  MZ_TRY(mz_comm_wait(e->comm, e->tickets[op->entry]));
  if (entry->kind == MZ_ENTRY_COUNTS) mz_routing_take_counts(e, entry->moe);
  return MZ_OK;
}

/* Where the walk goes next. */
static int32_t next(mz_engine_t *e, const mz_op_t *op, int32_t at)
{
  mz_moe_state_t *m;

  if (op->kind != MZ_OP_LOOP && op->kind != MZ_OP_END_LOOP &&
      op->kind != MZ_OP_AGAIN && op->kind != MZ_OP_BRANCH)
    return at + 1;
  m = &e->moes[op->moe];
  if (op->kind == MZ_OP_AGAIN) return m->round > 0 ? at + 1 : op->jump;
  if (op->kind == MZ_OP_BRANCH)
    return m->call.saved == op->flag ? at + 1 : op->jump;
  if (op->kind == MZ_OP_LOOP) {
    mz_engine_note(e, mz_routing_set_round(e, op, 0));
    return at + 1;
  }
  if (m->round + 1 >= m->rounds) return at + 1;
  mz_engine_note(e, mz_routing_set_round(e, op, m->round + 1));
  return op->jump;
}

/* What only computes: skipped after an error of this rank; but what moves
 * weights and gradients between their shards and messages goes on, since the
 * others get what this rank sends. */
static mz_status_t local_op(mz_engine_t *e, const mz_op_t *op)
{
  switch (op->kind) {
  case MZ_OP_COMPUTE:
    return MZ_TRACE(compute(e, op));
  case MZ_OP_PACK:
    return MZ_TRACE(mz_zero_pack(e->zero, op->entry));
  case MZ_OP_PLACE:
    return MZ_TRACE(mz_zero_place(e->zero, op->entry));
  case MZ_OP_SUM:
    return MZ_TRACE(mz_zero_sum(e->zero, op->entry, e->micro.index == 0));
  default:
    return MZ_OK;
  }
}

static mz_status_t take(mz_engine_t *e, const mz_op_t *op)
{
  switch (op->kind) {
  case MZ_OP_POST:
    return MZ_TRACE(post(e, op));
  case MZ_OP_WAIT:
    return MZ_TRACE(wait_for(e, op));
  case MZ_OP_PREPARE:
    mz_zero_prepare(e->zero, op);
    return MZ_OK;
  case MZ_OP_RELEASE:
    mz_zero_release(e->zero, op);
    return MZ_OK;
  case MZ_OP_RUN:
    mz_routing_set_run(e, op);
    return MZ_OK;
  case MZ_OP_STATS_SUM:
    mz_engine_note(e, mz_routing_sum_stats(e));
    return MZ_OK;
  case MZ_OP_NORM:
    mz_update_norm(e);
    return MZ_OK;
  case MZ_OP_FACTOR:
    mz_update_verdict(e);
    return MZ_OK;
  case MZ_OP_ADAMW:
    mz_update_adamw(e);
    return MZ_OK;
  case MZ_OP_PACK:
  case MZ_OP_PLACE:
    mz_engine_note(e, local_op(e, op));
    return MZ_OK;
  default:
    if (e->status == MZ_OK) mz_engine_note(e, local_op(e, op));
    if (op->kind == MZ_OP_COMPUTE) mark_grads(e, op);
    return MZ_OK;
  }
}

/* With the time of the parts, where it is wanted. */
static mz_status_t take_timed(mz_engine_t *e, const mz_op_t *op)
{
  if (!e->parts) return MZ_TRACE(take(e, op));
  mz_engine_note(e, mz_parts_enter(e->parts, op));
  MZ_TRY(take(e, op));
  mz_engine_note(e, mz_parts_leave(e->parts, op));
  return MZ_OK;
}

/* debug.poison: what nobody reads again becomes NaN. */
static mz_status_t poison(mz_engine_t *e, mz_walk_t walk, int32_t at)
{
  for (int32_t b = 0; b < e->plan->num_buffers; b++) {
    const mz_plan_buffer_t *x = &e->plan->buffers[b];
    if (!x->persistent && x->life[walk].last == at && x->bytes > 0)
      MZ_TRY(mz_device_fill(e->device, mz_zero_buffer(e->zero, b), 0xff,
                            x->bytes, e->device->stream));
  }
  return MZ_OK;
}

/* --- while the stream may wait (src/comm/stream.c says why) --- */

/* Launches of one operation at most: of a step, and of each expert of a run
 * (three products and their gradients, biases, activations). */
enum { OF_A_STEP = 64, OF_AN_EXPERT = 12, OF_OTHERS = 4 };

void mz_engine_forget_known(mz_engine_t *engine)
{
  for (int w = 0; w < MZ_NUM_WALKS; w++)
    memset(engine->known[w], 0, (size_t)engine->plan->num_ops[w]);
}

/* Whether the operation will launch all that it is for: one on no rows launches
 * nothing, after an error nothing is computed, without an update no AdamW. */
static bool is_whole(const mz_engine_t *e, const mz_op_t *op)
{
  return e->status == MZ_OK && !e->verdict_skip &&
         (op->run < 0 || e->window.rows > 0);
}

static int64_t most_launches(const mz_plan_t *p, const mz_op_t *op)
{
  switch (op->kind) {
  case MZ_OP_PACK:
  case MZ_OP_PLACE:
  case MZ_OP_SUM: {
    const mz_entry_t *entry = &p->entries[op->entry];
    return (int64_t)entry->num_units * p->units[entry->first_unit].ranks;
  }
  case MZ_OP_COMPUTE:
    return op->run < 0
               ? OF_A_STEP
               : OF_A_STEP + OF_AN_EXPERT * p->runs[op->run].num_experts;
  case MZ_OP_ADAMW:
    return OF_A_STEP + op->num_units;
  case MZ_OP_STATS_SUM: /* uploads a few kB a launch */
    return OF_A_STEP + p->stats_elements / 256;
  default:
    return OF_OTHERS;
  }
}

/* What an operation does for the first time may wait for the device, so it does
 * it while no stream waits. */
static mz_status_t go_ahead(mz_engine_t *e, mz_walk_t walk, int32_t at)
{
  const mz_op_t *op = &e->plan->ops[walk][at];
  bool known = e->known[walk][at] != 0;
  uint64_t awaited = mz_comm_awaited(e->comm).number;

  if (awaited != e->behind) e->ahead = 0;
  e->behind = awaited;
  e->ahead += most_launches(e->plan, op);
  if (known && e->ahead <= e->device->ops->depth * 3 / 4) return MZ_OK;
  MZ_TRY(mz_comm_settle(e->comm)); /* none is behind a wait now */
  e->ahead = 0;
  if (!known) e->known[walk][at] = is_whole(e, op);
  return MZ_OK;
}

mz_status_t mz_engine_walk(mz_engine_t *engine, mz_walk_t walk, int32_t first,
                           int32_t last)
{
  const mz_op_t *ops = engine->plan->ops[walk];

  for (int32_t at = first; at < last;) {
    int32_t to;

    if (engine->stream_waits) MZ_TRY(go_ahead(engine, walk, at));
    MZ_TRY(take_timed(engine, &ops[at]));
    to = next(engine, &ops[at], at);
    if (engine->config->debug.poison && to > at)
      MZ_TRY(poison(engine, walk, at));
    at = to;
  }
  return MZ_OK;
}
