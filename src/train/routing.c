/* SPDX-License-Identifier: Apache-2.0 */
/* What depends on the counts of a MoE layer: whether its rows are saved, how
 * many rounds a run takes, who sends which rows; and the statistics. All of it
 * is derived on every rank from the gathered counts (plan/route.c). */
#include "train/bias.h"
#include "train/engine_impl.h"

#include "base/alloc.h"
#include "base/check.h"

#include <math.h>
#include <moezero/moe.h>
#include <sched.h>
#include <string.h>

/* --- life --- */

static mz_status_t create_moe(mz_engine_t *e, int32_t moe, char **region)
{
  const mz_moe_opts_t *o = &e->decl->moes[moe].opts;
  const mz_moe_plan_t *p = &e->plan->moes[moe];
  mz_moe_state_t *m = &e->moes[moe];
  int64_t sent = MZ_PLAN_COUNTS_SENT(o->num_experts);

  m->sent = *region;
  m->received = m->sent + sent;
  m->kept = (int32_t *)(m->received + sent * o->ep_size);
  m->used = (int64_t *)((char *)m->kept +
                        MZ_PLAN_COUNTS_KEPT(o->num_experts, o->ep_size));
  *region += MZ_PLAN_COUNTS_BYTES(o->num_experts, o->ep_size);
  MZ_TRY(mz_new(2 * (int64_t)o->ep_size, "counts message", &m->counts));
  m->displs = m->counts + o->ep_size;
  for (int32_t s = 0; s < o->ep_size; s++) {
    m->counts[s] = sent;
    m->displs[s] = s * sent;
  }
  MZ_TRY(mz_new(2 * (int64_t)o->num_experts, "routed rows", &m->routed_sum));
  m->kept_sum = m->routed_sum + o->num_experts;
  MZ_TRY(mz_bias_create(o, &m->bias));
  m->call.bias = m->bias;
  m->call.moe = moe;
  m->call.ep_rank = e->plan->groups[p->ep_group].place;
  m->call.stats = mz_zero_buffer(e->zero, e->plan->stats) + 8 * p->stats_offset;
  m->call.total =
      mz_zero_buffer(e->zero, e->plan->stats_total) + 8 * p->stats_offset;
  m->call.ranks = e->plan->opts.world_size;
  e->results[moe] = (mz_moe_result_t){.num_experts = o->num_experts,
                                      .routed = m->routed_sum,
                                      .kept = m->kept_sum,
                                      .bias = m->bias};
  return MZ_OK;
}

static mz_status_t create_token_wires(mz_engine_t *e)
{
  int64_t numbers = 0, *at;

  for (int32_t i = 0; i < e->plan->num_entries; i++)
    if (e->plan->entries[i].kind == MZ_ENTRY_TOKENS)
      numbers += 4 * (int64_t)e->plan->groups[e->plan->entries[i].group].size;
  MZ_TRY(mz_new(e->plan->num_entries, "token messages", &e->token_wires));
  MZ_TRY(mz_new(numbers, "rows of token messages", &e->token_numbers));
  at = e->token_numbers;
  for (int32_t i = 0; i < e->plan->num_entries; i++) {
    mz_token_wire_t *w = &e->token_wires[i];
    int32_t size = e->plan->groups[e->plan->entries[i].group].size;

    if (e->plan->entries[i].kind != MZ_ENTRY_TOKENS) continue;
    w->engine = e;
    w->entry = i;
    w->send_counts = at;
    w->send_displs = at + size;
    w->recv_counts = at + 2 * size;
    w->recv_displs = at + 3 * size;
    at += 4 * size;
  }
  return MZ_OK;
}

mz_status_t mz_routing_create(mz_engine_t *engine)
{
  char *region = mz_zero_buffer(engine->zero, engine->plan->counts_all);
  int64_t world = engine->plan->opts.world_size;

  MZ_TRY(mz_new(engine->plan->num_moes, "experts", &engine->moes));
  MZ_TRY(mz_new(engine->plan->num_moes, "results", &engine->results));
  for (int32_t m = 0; m < engine->plan->num_moes; m++)
    MZ_TRY(create_moe(engine, m, &region));
  MZ_TRY(create_token_wires(engine));
  MZ_TRY(mz_event_create(engine->device, &engine->at_wait));
  MZ_TRY(mz_new(engine->plan->buffers[engine->plan->round_counts].bytes / 4,
                "rows of a window", &engine->window_numbers));
  MZ_TRY(mz_new(8 * engine->plan->stats_elements, "sums of statistics",
                &engine->stats_sum));
  MZ_TRY(mz_new(2 * world, "statistics message", &engine->stats_counts));
  engine->stats_displs = engine->stats_counts + world;
  for (int64_t r = 0; r < world; r++) {
    engine->stats_counts[r] = engine->plan->stats_elements;
    engine->stats_displs[r] = r * engine->plan->stats_elements;
  }
  return MZ_OK;
}

void mz_routing_destroy(mz_engine_t *engine)
{
  for (int32_t m = 0; engine->moes && m < engine->plan->num_moes; m++) {
    mz_free(engine->moes[m].counts);
    mz_free(engine->moes[m].routed_sum);
    mz_free(engine->moes[m].bias);
  }
  if (engine->at_wait) mz_event_destroy(engine->device, engine->at_wait);
  mz_free(engine->moes);
  mz_free(engine->results);
  mz_free(engine->token_wires);
  mz_free(engine->token_numbers);
  mz_free(engine->stats_counts);
  mz_free(engine->window_numbers);
  mz_free(engine->stats_sum);
}

/* --- counts --- */

void mz_routing_begin_step(mz_engine_t *engine)
{
  for (int32_t m = 0; m < engine->plan->num_moes; m++)
    memset(engine->moes[m].routed_sum, 0,
           2 * (size_t)engine->decl->moes[m].opts.num_experts *
               sizeof(int64_t));
  for (int32_t i = 0; i < engine->plan->num_entries; i++)
    engine->token_wires[i].sent_bytes = 0;
}

int64_t mz_routing_sent_bytes(const mz_engine_t *engine)
{
  int64_t bytes = 0;

  for (int32_t i = 0; i < engine->plan->num_entries; i++)
    bytes += engine->token_wires[i].sent_bytes;
  return bytes;
}

mz_status_t mz_routing_begin_micro(mz_engine_t *engine)
{
  engine->pool_used = 0;
  for (int32_t m = 0; m < engine->plan->num_moes; m++)
    engine->moes[m].call.capacity = (int32_t)mz_min_i64(
        INT32_MAX,
        mz_route_limit(&engine->decl->moes[m].opts, engine->micro.max_tokens,
                       engine->call.mode == MZ_MODE_TRAIN));
  return MZ_TRACE(mz_device_fill(
      engine->device, mz_zero_buffer(engine->zero, engine->plan->stats), 0,
      engine->plan->stats_elements * 8, engine->device->stream));
}

mz_status_t mz_routing_post_counts(mz_engine_t *engine, const mz_op_t *op)
{
  const mz_entry_t *entry = &engine->plan->entries[op->entry];
  mz_moe_state_t *m = &engine->moes[entry->moe];
  int32_t experts = engine->decl->moes[entry->moe].opts.num_experts;
  const void *kept = engine->buffers[engine->plan->moes[entry->moe].counts];
  mz_msg_t msg = {.kind = MZ_MSG_GATHER,
                  .group = engine->comm_groups[entry->group],
                  .element_bytes = 1,
                  .send = m->sent,
                  .recv = m->received,
                  .send_count = m->counts[0],
                  .recv_counts = m->counts,
                  .recv_displs = m->displs};

  /* a rank that failed sends no rows */
  if (engine->status == MZ_OK)
    mz_engine_note(engine, mz_device_copy(engine->device, m->sent, kept,
                                          4 * (int64_t)experts,
                                          engine->device->stream));
  if (engine->status != MZ_OK) memset(m->sent, 0, (size_t)experts * 4);
  memcpy(m->sent + m->counts[0] - 8, &engine->pool_used, 8);
  MZ_TRY(mz_comm_post(engine->comm, MZ_LANE_EXCHANGE, &msg, &m->ticket));
  engine->tickets[op->entry] = m->ticket;
  return MZ_OK;
}

void mz_routing_take_counts(mz_engine_t *engine, int32_t moe)
{
  const mz_moe_opts_t *o = &engine->decl->moes[moe].opts;
  mz_moe_state_t *m = &engine->moes[moe];
  int32_t place = m->call.ep_rank;

  for (int32_t s = 0; s < o->ep_size; s++) {
    const char *from = m->received + s * m->counts[0];
    memcpy(m->kept + (int64_t)s * o->num_experts, from,
           (size_t)o->num_experts * 4);
    memcpy(&m->used[s], from + m->counts[0] - 8, 8);
  }
  m->call.local_rows =
      mz_route_local_rows(m->kept, o->num_experts, o->ep_size, place);
  m->call.saved = mz_route_fits(m->kept, o->num_experts, o->ep_size, m->used,
                                engine->plan->pool_rows);
  m->pool_row = engine->pool_used;
  if (m->call.saved) engine->pool_used += m->call.local_rows;
}

void mz_routing_point_pool(mz_engine_t *engine, int32_t moe)
{
  for (int32_t b = 0; b < engine->decl->num_buffers; b++) {
    const mz_decl_buffer_t *d = &engine->decl->buffers[b];
    int32_t id = engine->plan->buffer_of_decl[b];

    if (d->kind == MZ_ROWS_POOL && d->moe == moe)
      engine->buffers[b] =
          mz_zero_buffer(engine->zero, id) +
          engine->moes[moe].pool_row * engine->plan->buffers[id].row_bytes;
  }
}

/* --- runs and rounds --- */

static int32_t run_place(const mz_engine_t *e, int32_t run)
{
  const mz_run_t *r = &e->plan->runs[run];
  return r->first_expert - e->plan->moes[r->moe].first_expert;
}

/* Where a run finds a buffer of its rounds. */
static char *buffer_at(const mz_engine_t *e, int32_t buffer, int32_t run)
{
  return mz_zero_buffer(e->zero, mz_plan_buffer_at(e->plan, buffer, run));
}

void mz_routing_set_run(mz_engine_t *engine, const mz_op_t *op)
{
  const mz_moe_opts_t *o = &engine->decl->moes[op->moe].opts;
  const mz_run_t *run = &engine->plan->runs[op->run];
  mz_moe_state_t *m = &engine->moes[op->moe];
  int32_t before = run_place(engine, op->run);

  /* runs take turns with twins, and keep_tokens lets some point elsewhere */
  for (int32_t b = 0; b < engine->decl->num_buffers; b++)
    if (engine->decl->buffers[b].kind == MZ_ROWS_ROUND &&
        engine->decl->buffers[b].moe == op->moe)
      engine->buffers[b] = buffer_at(engine, b, op->run);
  m->rounds =
      mz_route_rounds(m->kept, o->num_experts, o->ep_size, before,
                      run->num_experts, engine->plan->moes[op->moe].round_rows);
  m->run_row =
      mz_route_window(m->kept, o->num_experts, o->ep_size, m->call.ep_rank, 0,
                      before, 0, INT64_MAX, NULL, NULL);
}

mz_status_t mz_routing_set_round(mz_engine_t *engine, const mz_op_t *op,
                                 int64_t round)
{
  const mz_moe_opts_t *o = &engine->decl->moes[op->moe].opts;
  const mz_run_t *run = &engine->plan->runs[op->run];
  mz_moe_state_t *m = &engine->moes[op->moe];
  int64_t round_rows = engine->plan->moes[op->moe].round_rows;
  int32_t *there =
      (int32_t *)mz_zero_buffer(engine->zero, engine->plan->round_counts);
  int64_t num_counts = (int64_t)o->ep_size * run->num_experts;
  int64_t begin = (m->run_row / round_rows + round) * round_rows;
  int32_t *counts = engine->window_numbers, *offsets = counts + num_counts;

  m->round = round;
  engine->window = (mz_window_t){.first_expert = run->first_expert,
                                 .num_experts = run->num_experts,
                                 .num_sources = o->ep_size,
                                 .offsets = there + num_counts,
                                 .host_offsets = offsets,
                                 .counts = there,
                                 .max_rows = round_rows,
                                 .pool_row = mz_max_i64(begin, m->run_row)};
  engine->window.rows =
      mz_route_window(m->kept, o->num_experts, o->ep_size, m->call.ep_rank,
                      run_place(engine, op->run), run->num_experts, round,
                      round_rows, counts, offsets);
  return MZ_TRACE(mz_device_upload(engine->device, there, counts,
                                   4 * (num_counts + run->num_experts + 1),
                                   engine->device->stream));
}

/* On the progressing thread, when the counts are there. The token side is
 * indexed by the rank that computes (its part of the send order), the expert
 * side by the source rank, source-major. */
static mz_status_t bind_tokens(void *ctx)
{
  mz_token_wire_t *w = ctx;
  const mz_engine_t *e = w->engine;
  const mz_entry_t *entry = &e->plan->entries[w->entry];
  const mz_moe_opts_t *o = &e->decl->moes[entry->moe].opts;
  const mz_moe_state_t *m = &e->moes[entry->moe];
  const mz_decl_buffer_t *sent = &e->decl->buffers[entry->send];
  bool out = entry->direction == MZ_DISPATCH;
  int64_t *token_counts = out ? w->send_counts : w->recv_counts;
  int64_t *token_displs = out ? w->send_displs : w->recv_displs;
  int64_t *expert_counts = out ? w->recv_counts : w->send_counts;
  int64_t *expert_displs = out ? w->recv_displs : w->send_displs;
  int64_t round_rows = e->plan->moes[entry->moe].round_rows, at = 0, rows = 0;
  int64_t unused;
  int32_t first = run_place(e, w->run), me = m->call.ep_rank;
  int32_t num = e->plan->runs[w->run].num_experts;

  for (int32_t r = 0; r < o->ep_size; r++) {
    token_counts[r] =
        mz_route_part(m->kept, o->num_experts, o->ep_size, me, r, first, num,
                      w->round, round_rows, &token_displs[r]);
    expert_counts[r] = mz_route_part(m->kept, o->num_experts, o->ep_size, r, me,
                                     first, num, w->round, round_rows, &unused);
    expert_displs[r] = at;
    at += expert_counts[r];
    rows += w->send_counts[r];
  }
  if (o->ep_size > 1)
    w->sent_bytes += rows * sent->width * (int64_t)mz_dtype_bytes(sent->dtype);
  return MZ_OK;
}

/* What a message waits for on this rank. A dispatch starts when the one of
 * another run before it has arrived: at once they would share the wire, and the
 * experts that compute first would wait for both. */
static mz_ticket_t start_after(mz_engine_t *e, const mz_op_t *op)
{
  const mz_entry_t *entry = &e->plan->entries[op->entry];
  mz_moe_state_t *m = &e->moes[entry->moe];

  if (entry->direction == MZ_RETURN) return m->ticket;
  if (op->run != m->front_run) m->behind = m->front;
  m->front_run = op->run;
  return m->behind.number > m->ticket.number ? m->behind : m->ticket;
}

mz_status_t mz_routing_post_tokens(mz_engine_t *engine, const mz_op_t *op)
{
  const mz_entry_t *entry = &engine->plan->entries[op->entry];
  const mz_decl_buffer_t *b = &engine->decl->buffers[entry->send];
  mz_token_wire_t *w = &engine->token_wires[op->entry];
  mz_msg_t msg = {.kind = MZ_MSG_EXCHANGE,
                  .group = engine->comm_groups[entry->group],
                  .element_bytes = (size_t)b->width * mz_dtype_bytes(b->dtype),
                  .send = buffer_at(engine, entry->send, op->run),
                  .recv = buffer_at(engine, entry->recv, op->run),
                  .send_counts = w->send_counts,
                  .send_displs = w->send_displs,
                  .recv_counts = w->recv_counts,
                  .recv_displs = w->recv_displs,
                  .bind = bind_tokens,
                  .ctx = w,
                  .backend = true,
                  .timed = true};

  /* Its arrays are in use until its last message has ended: the stream may wait
     for that, and the host be here. */
  MZ_TRY(mz_comm_wait(engine->comm, engine->tickets[op->entry]));
  w->run = op->run;
  w->round = op->flag ? engine->moes[entry->moe].round : 0;
  if (engine->plan->groups[entry->group].size == 1) return MZ_OK;
  msg.after = start_after(engine, op);
  MZ_TRY(mz_comm_post(engine->comm, MZ_LANE_EXCHANGE, &msg,
                      &engine->tickets[op->entry]));
  if (entry->direction == MZ_DISPATCH)
    engine->moes[entry->moe].front = engine->tickets[op->entry];
  return MZ_OK;
}

/* A group of one rank: rows stay where they are. From the dispatch on, the
 * expert's side is the window of the token side, also for the rows that will
 * return to it. */
static mz_status_t keep_tokens(mz_engine_t *e, mz_token_wire_t *w)
{
  const mz_entry_t *entry = &e->plan->entries[w->entry], *back = entry + 1;
  const mz_entry_t *end = e->plan->entries + e->plan->num_entries;
  const mz_decl_buffer_t *b = &e->decl->buffers[entry->send];
  char *rows;

  if (entry->direction == MZ_RETURN) return MZ_OK;
  MZ_TRY(bind_tokens(w));
  rows = (char *)e->buffers[entry->send] +
         w->send_displs[0] * b->width * (int64_t)mz_dtype_bytes(b->dtype);
  e->buffers[entry->recv] = rows;
  for (; back < end; back++)
    if (back->kind == MZ_ENTRY_TOKENS && back->moe == entry->moe &&
        back->direction == MZ_RETURN && back->recv == entry->send) {
      e->buffers[back->send] = rows;
      break;
    }
  return MZ_OK;
}

enum { POLLS = 8 /* of a message for one look at the device */ };

/* While a device has work from before the wait, the message is hidden. An error
 * of the device is one of the step's; the walk goes on. */
static void wait_covered(mz_engine_t *e, mz_ticket_t ticket)
{
  mz_status_t st = mz_event_record(e->device, e->at_wait, e->device->stream);
  bool idle = false;

  for (int i = 0; st == MZ_OK && !idle && !mz_comm_done(e->comm, ticket); i++) {
    /* not at each poll: the thread wants the device's library, too */
    if (i % POLLS == 0) st = mz_event_done(e->device, e->at_wait, &idle);
    sched_yield();
  }
  mz_engine_note(e, st);
}

mz_status_t mz_routing_wait_tokens(mz_engine_t *engine, const mz_op_t *op)
{
  const mz_entry_t *entry = &engine->plan->entries[op->entry];
  mz_ticket_t ticket = engine->tickets[op->entry];
  double begin = mz_engine_now_ms(), idle = begin;

  if (engine->plan->groups[entry->group].size == 1)
    return MZ_TRACE(keep_tokens(engine, &engine->token_wires[op->entry]));
  if (engine->stream_waits) {
    engine->exposed_ms = NAN; /* the stream waits: the host cannot tell */
    return MZ_TRACE(mz_comm_wait_on_stream(engine->comm, ticket));
  }
  if (!engine->device->ops->is_host) {
    wait_covered(engine, ticket);
    idle = mz_engine_now_ms();
  }
  MZ_TRY(mz_comm_wait(engine->comm, ticket));
  engine->covered_ms += idle - begin;
  engine->exposed_ms += mz_engine_now_ms() - idle;
  return MZ_OK;
}

/* --- statistics --- */

mz_status_t mz_routing_post_stats(mz_engine_t *engine, const mz_op_t *op)
{
  char *own = mz_zero_buffer(engine->zero, engine->plan->stats_own);
  mz_msg_t msg = {.kind = MZ_MSG_GATHER,
                  .group = 0,
                  .element_bytes = 8,
                  .send = own,
                  .recv = mz_zero_buffer(engine->zero, engine->plan->stats_all),
                  .send_count = engine->plan->stats_elements,
                  .recv_counts = engine->stats_counts,
                  .recv_displs = engine->stats_displs};

  mz_engine_note(
      engine,
      mz_device_copy(engine->device, own,
                     mz_zero_buffer(engine->zero, engine->plan->stats),
                     engine->plan->stats_elements * 8, engine->device->stream));
  return MZ_TRACE(mz_comm_post(engine->comm, MZ_LANE_EXCHANGE, &msg,
                               &engine->tickets[op->entry]));
}

/* Totals of one MoE: integers exactly, fp64 in rank order. */
static void sum_moe(mz_engine_t *e, int32_t moe)
{
  int32_t experts = e->decl->moes[moe].opts.num_experts;
  int64_t integers = MZ_STATS_PROBS(experts), all = MZ_STATS_ELEMENTS(experts);
  int64_t offset = e->plan->moes[moe].stats_offset;
  char *total = e->stats_sum + 8 * offset;

  memset(total, 0, (size_t)all * 8);
  for (int r = 0; r < e->plan->opts.world_size; r++) {
    const char *one = mz_zero_buffer(e->zero, e->plan->stats_all) +
                      8 * (r * e->plan->stats_elements + offset);
    for (int64_t i = 0; i < integers; i++)
      ((int64_t *)total)[i] += ((const int64_t *)one)[i];
    for (int64_t i = integers; i < all; i++)
      ((double *)total)[i] += ((const double *)one)[i];
  }
}

mz_status_t mz_routing_sum_stats(mz_engine_t *engine)
{
  const char *all = mz_zero_buffer(engine->zero, engine->plan->stats_all);

  for (int32_t i = 0; i < engine->plan->num_moes; i++) {
    const mz_moe_opts_t *o = &engine->decl->moes[i].opts;
    mz_moe_state_t *m = &engine->moes[i];
    const int64_t *total =
        (const int64_t *)(const void *)(engine->stats_sum +
                                        8 * engine->plan->moes[i].stats_offset);
    const char *stats = all + 8 * engine->plan->moes[i].stats_offset;
    double aux, z;

    sum_moe(engine, i);
    m->call.total_tokens = (double)total[MZ_STATS_TOKENS(o->num_experts)];
    for (int32_t x = 0; x < o->num_experts; x++) {
      m->routed_sum[x] += total[MZ_STATS_ROUTED(o->num_experts) + x];
      m->kept_sum[x] += total[MZ_STATS_KEPT(o->num_experts) + x];
    }
    aux = mz_moe_aux_value(o, stats, engine->plan->opts.world_size,
                           engine->plan->stats_elements);
    z = mz_moe_z_value(o, stats, engine->plan->opts.world_size,
                       engine->plan->stats_elements);
    engine->aux_sum += aux / engine->micro.accumulation;
    engine->z_sum += z / engine->micro.accumulation;
    engine->weighted_aux +=
        (o->aux_coef * aux + o->z_coef * z) / engine->micro.accumulation;
  }
  return MZ_TRACE(mz_device_upload(
      engine->device, mz_zero_buffer(engine->zero, engine->plan->stats_total),
      engine->stats_sum, engine->plan->stats_elements * 8,
      engine->device->stream));
}
