/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule: all ranks take the same steps, the messages of TINY by hand,
 * and what is refused. */
#include "plan_case.h"

#include <stdio.h>

/* --- no rank waits for what never comes --- */

static void check_equal_walks(const world_t *w, const char *name)
{
  const mz_plan_t *p = w->plans[0];

  for (int r = 1; r < w->size; r++)
    for (int k = 0; k < MZ_NUM_WALKS; k++) {
      const mz_plan_t *q = w->plans[r];

      cr_assert_eq(p->num_ops[k], q->num_ops[k], "%s", name);
      for (int32_t i = 0; i < p->num_ops[k]; i++) {
        const mz_op_t *a = &p->ops[k][i], *b = &q->ops[k][i];
        cr_assert(a->kind == b->kind && a->step == b->step &&
                      a->pass == b->pass && a->entry == b->entry &&
                      a->jump == b->jump && a->run == b->run,
                  "%s: operation %d of rank %d", name, i, r);
      }
    }
}

Test(plan_schedule, all_ranks_take_the_same_steps)
{
  for_worlds(check_equal_walks);
}

static bool same_message(const mz_entry_t *a, const mz_entry_t *b)
{
  return a->kind == b->kind && a->lane == b->lane && a->dtype == b->dtype &&
         a->send_bytes == b->send_bytes && a->num_units == b->num_units &&
         a->length == b->length && a->moe == b->moe &&
         a->direction == b->direction;
}

/* Entry i is in a group of the same ranks on each member, and as large. */
static void check_members(const world_t *w, const char *name)
{
  for (int r = 0; r < w->size; r++)
    for (int32_t i = 0; i < w->plans[r]->num_entries; i++) {
      const mz_entry_t *a = &w->plans[r]->entries[i];
      const mz_group_t *g = &w->plans[r]->groups[a->group];

      for (int32_t j = 0; j < g->size; j++) {
        const mz_plan_t *q = w->plans[g->ranks[j]];
        const mz_entry_t *b = &q->entries[i];
        const mz_group_t *h = &q->groups[b->group];

        cr_assert(h->size == g->size && h->place == j &&
                      memcmp(h->ranks, g->ranks,
                             sizeof *g->ranks * (size_t)g->size) == 0,
                  "%s: entry %d is of another group on rank %d", name, i,
                  g->ranks[j]);
        cr_assert(same_message(a, b), "%s: entry %d differs on rank %d", name,
                  i, g->ranks[j]);
      }
    }
}

Test(plan_schedule, the_members_of_a_group_post_the_same_messages)
{
  for_worlds(check_members);
}

/* The members of an expert-data group sit in different expert-parallel groups
 * and take different numbers of rounds. */
static void check_loops(const world_t *w, const char *name)
{
  const mz_plan_t *p = w->plans[0];

  for (int k = 0; k < MZ_NUM_WALKS; k++)
    for (int32_t i = 0, end = 0; i < p->num_ops[k]; i++) {
      const mz_op_t *op = &p->ops[k][i];

      if (op->kind == MZ_OP_LOOP && op->jump > end) end = op->jump;
      if (i >= end) continue;
      cr_assert(op->kind != MZ_OP_PREPARE && op->kind != MZ_OP_RELEASE &&
                    op->kind != MZ_OP_PACK && op->kind != MZ_OP_PLACE &&
                    op->kind != MZ_OP_SUM,
                "%s: operation %d", name, i);
      if (op->kind == MZ_OP_POST || op->kind == MZ_OP_WAIT)
        cr_assert_eq(p->entries[op->entry].kind, MZ_ENTRY_TOKENS, "%s", name);
    }
}

Test(plan_schedule, no_unit_moves_inside_of_a_round)
{
  for_worlds(check_loops);
}

/* Messages of one walk, taken in one way. */
typedef struct road {
  const mz_plan_t *plan;
  const char *name;
  bool under_way[2048], awaited[2048]; /* by entry */
  int32_t run[2048];
} road_t;

/* What is sent may be read, what arrives is nobody's. */
static void check_untouched(const road_t *r, const mz_op_t *op, int32_t at)
{
  const mz_plan_t *p = r->plan;
  const mz_compute_opts_t *c = &p->decl->steps[op->pass][op->step].compute;

  for (int32_t i = 0; i < p->num_entries; i++) {
    const mz_entry_t *e = &p->entries[i];
    int32_t send, recv;

    if (!r->under_way[i] || e->kind != MZ_ENTRY_TOKENS) continue;
    send = mz_plan_buffer_at(p, e->send, r->run[i]);
    recv = mz_plan_buffer_at(p, e->recv, r->run[i]);
    for (int32_t j = 0; j < c->num_reads; j++)
      cr_assert_neq(mz_plan_buffer_at(p, c->reads[j], op->run), recv,
                    "%s: %s reads at %d what arrives", r->name, c->name, at);
    for (int32_t j = 0; j < c->num_writes; j++) {
      int32_t b = mz_plan_buffer_at(p, c->writes[j], op->run);
      cr_assert(b != recv && b != send, "%s: %s writes at %d what travels",
                r->name, c->name, at);
    }
  }
}

static void take_road(road_t *r, mz_walk_t w, way_t way)
{
  const mz_op_t *ops = r->plan->ops[w];
  int32_t round = 0;

  for (int32_t at = 0; at < r->plan->num_ops[w];
       at = next_op(ops, at, way, &round)) {
    const mz_op_t *op = &ops[at];

    if (op->kind == MZ_OP_COMPUTE) check_untouched(r, op, at);
    if (op->kind != MZ_OP_POST && op->kind != MZ_OP_WAIT) continue;
    cr_assert_eq(r->under_way[op->entry], op->kind == MZ_OP_WAIT,
                 "%s: entry %d at %d", r->name, op->entry, at);
    r->under_way[op->entry] = op->kind == MZ_OP_POST;
    r->run[op->entry] = op->run;
    r->awaited[op->entry] |= op->kind == MZ_OP_WAIT;
  }
}

/* Every message is posted when it is not under way, and awaited in its walk;
 * with rows that are sent again every entry is used. */
static void check_waits(const world_t *w, const char *name)
{
  for (int32_t rounds = 1; rounds <= 3; rounds++)
    for (int saved = 0; saved < 2; saved++) {
      static road_t r;

      r = (road_t){.plan = w->plans[0], .name = name};
      cr_assert_lt(r.plan->num_entries, 2048);
      for (int k = 0; k < MZ_NUM_WALKS; k++) {
        take_road(&r, (mz_walk_t)k, (way_t){rounds, saved != 0});
        for (int32_t e = 0; e < r.plan->num_entries; e++)
          cr_assert_not(r.under_way[e], "%s: entry %d stays", name, e);
      }
      for (int32_t e = 0; !saved && e < r.plan->num_entries; e++)
        cr_assert(r.awaited[e], "%s: entry %d is not used", name, e);
    }
}

Test(plan_schedule, every_message_is_awaited_and_nobody_touches_it_before)
{
  for_worlds(check_waits);
}

/* --- messages of TINY on two ranks by hand --- */

static const mz_traffic_t *line(const mz_plan_t *p, mz_entry_kind_t kind)
{
  for (int32_t i = 0; i < p->num_traffic; i++)
    if (p->traffic[i].kind == kind) return &p->traffic[i];
  return NULL;
}

static void expect_line(const mz_plan_t *p, mz_entry_kind_t kind,
                        int64_t micro_calls, int64_t micro,
                        int64_t update_calls, int64_t update,
                        int64_t eval_calls, int64_t eval)
{
  const mz_traffic_t *t = line(p, kind);

  cr_assert_not_null(t, "kind %d", kind);
  cr_expect_eq(t->calls_micro, micro_calls, "kind %d: %d", kind,
               (int)t->calls_micro);
  cr_expect_eq(t->bytes_micro, micro, "kind %d: %d", kind, (int)t->bytes_micro);
  cr_expect_eq(t->calls_update, update_calls, "kind %d: %d", kind,
               (int)t->calls_update);
  cr_expect_eq(t->bytes_update, update, "kind %d: %d", kind,
               (int)t->bytes_update);
  cr_expect_eq(t->calls_eval, eval_calls, "kind %d: %d", kind,
               (int)t->calls_eval);
  cr_expect_eq(t->bytes_eval, eval, "kind %d: %d", kind, (int)t->bytes_eval);
  cr_expect_eq(t->bound, kind == MZ_ENTRY_TOKENS);
}

static mz_plan_t *tiny_plan(mz_decl_t **decl, int32_t ep, int64_t stage)
{
  mz_config_values_t c = tiny_config(ep, ep, 4, 4);
  mz_plan_opts_t opts = tiny_opts(2, 1, stage);

  *decl = declare(&c);
  return make_plan(*decl, &opts);
}

/* Units padded: blocks 2560, 5120, 5120, 2304; eight experts of 4352: 49,920
 * elements of 4 bytes. A rank sends its contribution to the other's half of
 * them, and then its half of the weights. */
Test(plan_traffic, stage_1_sends_gradients_and_weights_once_a_step)
{
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 1, 1);

  expect_line(p, MZ_ENTRY_GRADS, 0, 0, 1, 99840, 0, 0);
  expect_line(p, MZ_ENTRY_WEIGHTS, 0, 0, 1, 99840, 0, 0);
  expect_line(p, MZ_ENTRY_STATS, 1, 8 * 2 * (4 * 4 + 2), 0, 0, 1, 288);
  expect_line(p, MZ_ENTRY_SCALARS, 0, 0, 2, 2 * 8 * MZ_PLAN_SCALARS, 0, 0);
  cr_expect_eq(p->num_traffic, 4);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

Test(plan_traffic, stage_0_gathers_sums_instead_of_weights)
{
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 1, 0);

  expect_line(p, MZ_ENTRY_GRADS, 0, 0, 1, 99840, 0, 0);
  expect_line(p, MZ_ENTRY_SUMS, 0, 0, 1, 99840, 0, 0);
  cr_expect_null(line(p, MZ_ENTRY_WEIGHTS));
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

/* Gradients of the four dense units and, layer by layer, of the experts. */
Test(plan_traffic, stage_2_sends_gradients_every_micro_batch)
{
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 1, 2);

  expect_line(p, MZ_ENTRY_GRADS, 6, 99840, 0, 0, 0, 0);
  expect_line(p, MZ_ENTRY_WEIGHTS, 0, 0, 1, 99840, 0, 0);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

/* Shards gathered: block.0 1280 (its backward reads no weight), lm_head 1024
 * (forward and backward in one stay), and twice each: blocks 2176, experts
 * 2176. Small tensors, 768 + 768 + 256 padded, are updated and gathered. */
Test(plan_traffic, stage_3_gathers_weights_for_each_pass)
{
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 1, 3);

  expect_line(p, MZ_ENTRY_PARAMS, 10, 4 * (1280 + 1024 + 2 * 10 * 2176), 0, 0,
              6, 4 * (1280 + 1024 + 10 * 2176));
  expect_line(p, MZ_ENTRY_GRADS, 9, 99840, 0, 0, 0, 0);
  expect_line(p, MZ_ENTRY_WEIGHTS, 0, 0, 3, 4 * 1792 / 2, 0, 0);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

/* T k = 32 rows of 128 bytes. Of each layer: forward there (32 rows) and back
 * (64 at most); backward x again, dy (32 each), dx back (64). A round holds 40
 * rows, so there are at most 2. Counts: 24 bytes a layer. */
Test(plan_traffic, ep_2_bounds_the_tokens_and_leaves_experts_alone)
{
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 2, 1);

  expect_line(p, MZ_ENTRY_GRADS, 0, 0, 1, 2 * 15104, 0, 0);
  expect_line(p, MZ_ENTRY_WEIGHTS, 0, 0, 1, 2 * 15104, 0, 0);
  expect_line(p, MZ_ENTRY_TOKENS, 2 * 2 * 5, 2 * 128 * (32 * 3 + 64 * 2), 0, 0,
              2 * 2 * 2, 2 * 128 * (32 + 64));
  expect_line(p, MZ_ENTRY_COUNTS, 2, 48, 0, 0, 2, 48);
  cr_expect_eq(p->moes[0].round_rows, 40);
  cr_expect_eq(p->pool_rows, 80);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

/* Buckets and pieces cut messages, not bytes. */
Test(plan_traffic, small_buckets_send_the_same_bytes_in_more_calls)
{
  for (int64_t stage = 0; stage <= 2; stage++) {
    layout_t l = {2, 1, 1, 4, 4, false};
    world_t w = make_world(&l, stage, small_opts);
    const mz_traffic_t *t = line(w.plans[0], MZ_ENTRY_GRADS);

    cr_expect_eq(t->bytes_micro + t->bytes_update, 99840);
    cr_expect_gt(t->calls_micro + t->calls_update, 10);
    for (int32_t i = 0; i < w.plans[0]->num_entries; i++)
      if (w.plans[0]->entries[i].lane == 1)
        cr_expect_leq(w.plans[0]->entries[i].send_bytes, 8192);
    destroy_world(&w);
  }
}

Test(plan_traffic, one_rank_sends_nothing)
{
  layout_t l = {1, 1, 1, 4, 4, false};
  world_t w = make_world(&l, 3, tiny_opts);

  cr_expect_eq(w.plans[0]->num_traffic, 0);
  destroy_world(&w);
}

/* --- what is refused --- */

Test(plan_schedule, a_live_limit_below_the_largest_step_is_refused)
{
  mz_config_values_t c = tiny_config(1, 1, 4, 4);
  mz_decl_t *decl = declare(&c);
  mz_plan_opts_t opts = tiny_opts(2, 0, 3);
  mz_plan_t *plan;

  opts.max_live_parameters = 4351;
  expect_refused(decl, &opts, MZ_ERR_CONFIG,
                 "zero_optimization.stage3_max_live_parameters is 4351, the "
                 "largest step needs 4352");
  opts.max_live_parameters = 4352;
  plan = make_plan(decl, &opts);
  cr_expect_eq(plan->peak_gathered, 4352);
  mz_plan_destroy(&plan);
  mz_decl_destroy(&decl);
}

static mz_status_t no_step(const mz_call_t *call, void *self) { return MZ_OK; }

/* A layer with one tensor, one set of experts with one tensor, two buffers. */
typedef struct model {
  mz_decl_t *decl;
  int32_t tensor, moe, send, recv;
} model_t;

static model_t small_model(void)
{
  model_t m = {0};
  mz_layer_opts_t layer = {.name = "layer"};
  mz_tensor_opts_t t = {.name = "weight", .ndim = 1, .shape = {4}};
  mz_moe_opts_t moe = {.name = "moe", .num_experts = 2, .ep_size = 1, .k = 1};
  mz_buffer_opts_t b = {
      .name = "send", .kind = MZ_ROWS_TOKENS, .rows = 1, .width = 4};
  int32_t up;

  cr_assert_eq(mz_decl_create(&m.decl), MZ_OK);
  cr_assert_eq(mz_decl_tensor(m.decl, &t, &m.tensor), MZ_OK);
  cr_assert_eq(mz_decl_moe(m.decl, &moe, &m.moe), MZ_OK);
  cr_assert_eq(mz_decl_expert_tensor(m.decl, m.moe, &t, &up), MZ_OK);
  cr_assert_eq(mz_decl_buffer(m.decl, &b, &m.send), MZ_OK);
  b.name = "recv";
  b.kind = MZ_ROWS_ROUND;
  b.moe = m.moe;
  cr_assert_eq(mz_decl_buffer(m.decl, &b, &m.recv), MZ_OK);
  cr_assert_eq(mz_decl_layer(m.decl, &layer), MZ_OK);
  return m;
}

static void step(model_t *m, mz_compute_opts_t c)
{
  c.fn = no_step;
  cr_assert_eq(mz_decl_compute(m->decl, MZ_FORWARD, &c), MZ_OK);
}

#define STEP(call) cr_assert_eq((call), MZ_OK)

/* A round may write a part of what is read behind the loop, and read a part of
 * what was written before it. */
Test(plan_arena, what_crosses_a_loop_lives_in_all_of_it)
{
  model_t m = small_model();
  mz_plan_opts_t opts = tiny_opts(1, 0, 0);
  const mz_op_t *ops;
  mz_life_t send, recv;
  int32_t loop = 0;
  mz_plan_t *p;

  step(&m, (mz_compute_opts_t){.name = "before",
                               .num_writes = 1,
                               .writes = {m.send},
                               .num_grads = 1,
                               .grads = {m.tensor}});
  STEP(mz_decl_runs(m.decl, MZ_FORWARD, m.moe));
  STEP(mz_decl_rounds(m.decl, MZ_FORWARD, m.moe));
  for (int i = 0; i < 3; i++)
    step(&m, (mz_compute_opts_t){.name = "inside",
                                 .num_reads = i == 1,
                                 .reads = {m.send},
                                 .num_writes = i == 1,
                                 .writes = {m.recv}});
  STEP(mz_decl_end(m.decl, MZ_FORWARD));
  STEP(mz_decl_end(m.decl, MZ_FORWARD));
  step(&m, (mz_compute_opts_t){
               .name = "behind", .num_reads = 1, .reads = {m.recv}});
  p = make_plan(m.decl, &opts);
  ops = p->ops[MZ_WALK_MICRO];
  while (ops[loop].kind != MZ_OP_LOOP)
    loop++;
  send = p->buffers[p->buffer_of_decl[m.send]].life[MZ_WALK_MICRO];
  recv = p->buffers[p->buffer_of_decl[m.recv]].life[MZ_WALK_MICRO];
  cr_expect_eq(send.first, 0);
  cr_expect_eq(send.last, ops[loop].jump - 1);
  cr_expect_eq(recv.first, loop);
  cr_expect_eq(recv.last, ops[loop].jump);
  mz_plan_destroy(&p);
  mz_decl_destroy(&m.decl);
}

static void expect_no_plan(model_t *m, const char *text)
{
  mz_plan_opts_t opts = tiny_opts(1, 0, 0);

  expect_refused(m->decl, &opts, MZ_ERR_ARG, text);
  mz_decl_destroy(&m->decl);
}

Test(plan_refuses, a_buffer_read_before_it_is_written)
{
  model_t m = small_model();

  step(&m, (mz_compute_opts_t){
               .name = "first", .num_grads = 1, .grads = {m.tensor}});
  step(&m, (mz_compute_opts_t){
               .name = "second", .num_reads = 1, .reads = {m.send}});
  expect_no_plan(&m, "step second of layer reads buffer send before it is "
                     "written");
}

Test(plan_refuses, a_tensor_without_a_gradient)
{
  model_t m = small_model();

  step(&m, (mz_compute_opts_t){
               .name = "first", .num_weights = 1, .weights = {m.tensor}});
  expect_no_plan(&m, "tensor weight gets no gradient from any step");
}

Test(plan_refuses, experts_outside_of_a_run)
{
  model_t m = small_model();

  step(&m, (mz_compute_opts_t){.name = "experts", .expert_weights = true});
  expect_no_plan(&m, "step experts uses experts outside of a run");
}

static void exchange(model_t *m)
{
  STEP(mz_decl_exchange(m->decl, MZ_FORWARD, m->moe, MZ_DISPATCH, m->send,
                        m->recv));
}

Test(plan_refuses, an_exchange_outside_of_a_round)
{
  model_t m = small_model();

  exchange(&m);
  expect_no_plan(&m, "an exchange outside of a round");
  m = small_model();
  STEP(mz_decl_runs(m.decl, MZ_FORWARD, m.moe));
  exchange(&m);
  STEP(mz_decl_end(m.decl, MZ_FORWARD));
  expect_no_plan(&m, "an exchange outside of a round");
  m = small_model();
  STEP(mz_decl_runs(m.decl, MZ_FORWARD, m.moe));
  STEP(mz_decl_branch(m.decl, MZ_FORWARD, m.moe, true));
  exchange(&m);
  STEP(mz_decl_end(m.decl, MZ_FORWARD));
  STEP(mz_decl_end(m.decl, MZ_FORWARD));
  expect_no_plan(&m, "an exchange outside of a round");
}

Test(plan_refuses, what_opens_and_does_not_close)
{
  model_t m = small_model();

  STEP(mz_decl_runs(m.decl, MZ_FORWARD, m.moe));
  expect_no_plan(&m, "layer: runs without an end");
  m = small_model();
  STEP(mz_decl_end(m.decl, MZ_FORWARD));
  expect_no_plan(&m, "an end without its beginning");
  m = small_model();
  STEP(mz_decl_rounds(m.decl, MZ_FORWARD, m.moe));
  expect_no_plan(&m, "rounds or a branch outside of a run");
}

Test(plan_refuses, runs_inside_of_runs_and_what_nests_too_deep)
{
  model_t m = small_model();

  for (int i = 0; i < 2; i++)
    STEP(mz_decl_runs(m.decl, MZ_FORWARD, m.moe));
  for (int i = 0; i < 2; i++)
    STEP(mz_decl_end(m.decl, MZ_FORWARD));
  expect_no_plan(&m, "runs inside of runs");
  m = small_model();
  STEP(mz_decl_runs(m.decl, MZ_FORWARD, m.moe));
  for (int i = 0; i < 5; i++)
    STEP(mz_decl_rounds(m.decl, MZ_FORWARD, m.moe));
  for (int i = 0; i < 6; i++)
    STEP(mz_decl_end(m.decl, MZ_FORWARD));
  expect_no_plan(&m, "rounds and branches nest 4 deep");
}
