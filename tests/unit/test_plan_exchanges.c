/* SPDX-License-Identifier: Apache-2.0 */
/* Exchanges of runs travel while something else is computed: the order of
 * operations, and what it costs. */
#include "plan_case.h"

#include <stdio.h>

/* --- TINY, whose MoE layers have 4 experts a rank --- */

typedef struct tiny {
  mz_decl_t *decl;
  mz_plan_t *plan;
} tiny_t;

static tiny_t tiny_plan(int32_t ep, int64_t chunks)
{
  mz_config_values_t c = tiny_config(ep, ep, 4 * ep, 4 * ep);
  mz_plan_opts_t opts = tiny_opts(2, 0, 1);
  tiny_t t;

  opts.overlap_chunks = chunks;
  t.decl = declare(&c);
  t.plan = make_plan(t.decl, &opts);
  return t;
}

static void tiny_destroy(tiny_t *t)
{
  mz_plan_destroy(&t->plan);
  mz_decl_destroy(&t->decl);
}

typedef struct find {
  mz_op_kind_t kind;
  mz_pass_t pass;
  mz_direction_t direction;
  const char *name; /* of a compute step */
  int32_t run;
  bool last; /* of several */
} find_t;

/* Entries of a pass: the forward ones come first. */
static bool is_it(const mz_plan_t *p, const mz_op_t *op, const find_t *f,
                  bool backward)
{
  const mz_entry_t *e = &p->entries[op->entry];

  if (op->kind != f->kind || op->run != f->run) return false;
  if (op->kind == MZ_OP_COMPUTE)
    return strcmp(p->decl->steps[op->pass][op->step].compute.name, f->name) ==
           0;
  return e->kind == MZ_ENTRY_TOKENS && e->direction == f->direction &&
         backward == (f->pass == MZ_BACKWARD);
}

/* Place of an operation in a micro-batch; it is there. */
static int32_t place(const mz_plan_t *p, find_t f)
{
  const mz_op_t *ops = p->ops[MZ_WALK_MICRO];
  bool backward = false;
  int32_t found = -1;

  for (int32_t i = 0; i < p->num_ops[MZ_WALK_MICRO]; i++) {
    if (ops[i].kind == MZ_OP_COMPUTE) backward = ops[i].pass == MZ_BACKWARD;
    if (is_it(p, &ops[i], &f, backward) && (found < 0 || f.last)) found = i;
  }
  cr_assert_geq(found, 0, "kind %d run %d %s", f.kind, f.run,
                f.name ? f.name : "");
  return found;
}

static int32_t posted(const mz_plan_t *p, mz_pass_t pass, mz_direction_t d,
                      int32_t run)
{
  return place(p, (find_t){MZ_OP_POST, pass, d, NULL, run, false});
}

static int32_t awaited(const mz_plan_t *p, mz_pass_t pass, mz_direction_t d,
                       int32_t run)
{
  return place(p, (find_t){MZ_OP_WAIT, pass, d, NULL, run, true});
}

static int32_t computed(const mz_plan_t *p, mz_pass_t pass, int32_t run)
{
  const char *name = pass == MZ_FORWARD ? "experts" : "experts_grad";

  return place(p, (find_t){MZ_OP_COMPUTE, pass, MZ_DISPATCH, name, run, false});
}

/* Run i of a layer's four in the order of a pass. */
static int32_t run_at(const mz_plan_t *p, int32_t moe, mz_pass_t pass,
                      int32_t i)
{
  return p->moes[moe].first_run + (pass == MZ_FORWARD ? i : 3 - i);
}

static void check_order(const mz_plan_t *p, int32_t moe, mz_pass_t pass)
{
  for (int32_t i = 0; i + 1 < 4; i++) {
    int32_t now = run_at(p, moe, pass, i), next = run_at(p, moe, pass, i + 1);
    int32_t compute = computed(p, pass, now);

    cr_expect_lt(posted(p, pass, MZ_DISPATCH, next), compute,
                 "moe %d pass %d: dispatch %d", moe, pass, i + 1);
    cr_expect_lt(computed(p, pass, next), awaited(p, pass, MZ_RETURN, now),
                 "moe %d pass %d: return %d", moe, pass, i);
    cr_expect_lt(compute, posted(p, pass, MZ_RETURN, now));
    cr_expect_lt(posted(p, pass, MZ_RETURN, now), computed(p, pass, next));
  }
}

/* With one run, too. */
static void check_weights_under_returns(const mz_plan_t *p, int32_t moe,
                                        int32_t num_runs)
{
  for (int32_t i = 0; i < num_runs; i++) {
    int32_t run = p->moes[moe].first_run + i;
    int32_t weights = place(p, (find_t){MZ_OP_COMPUTE, MZ_BACKWARD, MZ_RETURN,
                                        "experts_wgrad", run, false});

    cr_expect_lt(posted(p, MZ_BACKWARD, MZ_RETURN, run), weights, "moe %d: %d",
                 moe, i);
    cr_expect_lt(weights, awaited(p, MZ_BACKWARD, MZ_RETURN, run), "moe %d: %d",
                 moe, i);
  }
}

Test(plan_exchanges, weights_get_their_gradients_while_rows_return)
{
  for (int64_t chunks = 1; chunks <= 4; chunks *= 2) {
    tiny_t t = tiny_plan(2, chunks);

    cr_assert_eq(t.plan->moes[0].num_runs, chunks);
    for (int32_t moe = 0; moe < 2; moe++)
      check_weights_under_returns(t.plan, moe, (int32_t)chunks);
    tiny_destroy(&t);
  }
}

Test(plan_exchanges, a_dispatch_is_posted_before_the_experts_before_it)
{
  tiny_t t = tiny_plan(2, 4);

  cr_assert_eq(t.plan->moes[0].num_runs, 4);
  for (int32_t moe = 0; moe < 2; moe++) {
    check_order(t.plan, moe, MZ_FORWARD);
    check_order(t.plan, moe, MZ_BACKWARD);
  }
  tiny_destroy(&t);
}

/* The buffers of run i + 2 are those of run i. */
Test(plan_exchanges, a_run_waits_for_the_return_whose_buffers_it_writes)
{
  tiny_t t = tiny_plan(2, 4);

  for (int pass = 0; pass < 2; pass++)
    for (int32_t i = 0; i + 2 < 4; i++) {
      int32_t now = run_at(t.plan, 1, (mz_pass_t)pass, i);
      int32_t then = run_at(t.plan, 1, (mz_pass_t)pass, i + 2);

      cr_expect_lt(awaited(t.plan, (mz_pass_t)pass, MZ_RETURN, now),
                   computed(t.plan, (mz_pass_t)pass, then));
      cr_expect_gt(posted(t.plan, (mz_pass_t)pass, MZ_DISPATCH, then),
                   computed(t.plan, (mz_pass_t)pass, now));
    }
  tiny_destroy(&t);
}

static int32_t num_twins(const mz_plan_t *p)
{
  int32_t num = 0;

  for (int64_t b = 0; b < p->decl->num_buffers; b++)
    num += p->twin_of_decl[b] >= 0;
  return num;
}

/* recv, ret, grad.recv, grad.work and grad.ret of both layers. */
Test(plan_exchanges, buffers_are_doubled_only_where_runs_overlap)
{
  const struct {
    int32_t ep;
    int64_t chunks;
    int32_t twins;
  } cases[] = {{2, 1, 0}, {1, 4, 0}, {2, 2, 10}, {2, 4, 10}};

  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    tiny_t t = tiny_plan(cases[i].ep, cases[i].chunks);

    cr_expect_eq(num_twins(t.plan), cases[i].twins, "ep %d, %d chunks: %d",
                 cases[i].ep, (int)cases[i].chunks, num_twins(t.plan));
    cr_expect_eq(t.plan->moes[0].ahead, cases[i].twins ? 2 : 1);
    tiny_destroy(&t);
  }
}

/* Runs that only ZeRO's buckets cut have one set of buffers. */
Test(plan_exchanges, runs_cut_by_buckets_alone_do_not_overlap)
{
  mz_config_values_t c = tiny_config(2, 2, 8, 8);
  mz_plan_opts_t opts = tiny_opts(4, 0, 2);
  mz_decl_t *decl = declare(&c);
  mz_plan_t *p;

  opts.reduce_bucket_size = 9000; /* two experts */
  p = make_plan(decl, &opts);
  cr_expect_eq(p->moes[0].num_runs, 2);
  cr_expect_eq(num_twins(p), 0);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

/* --- a layer of its own: steps around the runs --- */

static mz_status_t no_step(const mz_call_t *call, void *self) { return MZ_OK; }

typedef struct model {
  mz_decl_t *decl;
  int32_t weight, moe, send, recv, ret, kept, own;
} model_t;

#define MUST(call) cr_assert_eq((call), MZ_OK, "%s", mz_error_last())

static int32_t buffer(model_t *m, const char *name, mz_rows_t kind)
{
  mz_buffer_opts_t b = {.name = name,
                        .kind = kind,
                        .rows = 2,
                        .moe = m->moe,
                        .width = 4,
                        .dtype = kind == MZ_ROWS_FIXED ? MZ_I32 : MZ_F32};
  int32_t id;

  MUST(mz_decl_buffer(m->decl, &b, &id));
  return id;
}

static void step(model_t *m, const char *name, int32_t reads, int32_t writes)
{
  mz_compute_opts_t c = {.name = name, .fn = no_step};

  if (reads >= 0) c.reads[c.num_reads++] = reads;
  if (writes >= 0) c.writes[c.num_writes++] = writes;
  if (strcmp(name, "route") == 0) c.grads[c.num_grads++] = m->weight;
  MUST(mz_decl_compute(m->decl, MZ_FORWARD, &c));
}

/* What a step behind the return writes, if there is one. */
typedef enum later { NO_STEP, OWN, RETURNED, SENT } later_t;

/* route, counts, beside, runs { dispatch, experts, return, weights }, behind,
 * combine */
static model_t own_model(bool experts_read_send, later_t later)
{
  model_t m = {0};
  mz_tensor_opts_t t = {.name = "weight", .ndim = 1, .shape = {4}};
  mz_moe_opts_t moe = {.name = "moe", .num_experts = 4, .ep_size = 2, .k = 1};
  int32_t up;

  MUST(mz_decl_create(&m.decl));
  MUST(mz_decl_tensor(m.decl, &t, &m.weight));
  MUST(mz_decl_moe(m.decl, &moe, &m.moe));
  MUST(mz_decl_expert_tensor(m.decl, m.moe, &t, &up));
  m.send = buffer(&m, "send", MZ_ROWS_TOKENS);
  m.recv = buffer(&m, "recv", MZ_ROWS_ROUND);
  m.ret = buffer(&m, "ret", MZ_ROWS_ROUND);
  m.kept = buffer(&m, "kept", MZ_ROWS_FIXED);
  m.own = buffer(&m, "own", MZ_ROWS_TOKENS);
  MUST(mz_decl_layer(m.decl, &(mz_layer_opts_t){.name = "layer"}));
  step(&m, "route", -1, m.send);
  MUST(mz_decl_counts(m.decl, MZ_FORWARD, m.moe, m.kept));
  step(&m, "beside", m.send, m.own);
  MUST(mz_decl_runs(m.decl, MZ_FORWARD, m.moe));
  MUST(mz_decl_rounds(m.decl, MZ_FORWARD, m.moe));
  MUST(
      mz_decl_exchange(m.decl, MZ_FORWARD, m.moe, MZ_DISPATCH, m.send, m.recv));
  step(&m, "experts", experts_read_send ? m.send : m.recv, m.ret);
  MUST(mz_decl_exchange(m.decl, MZ_FORWARD, m.moe, MZ_RETURN, m.ret, m.send));
  if (later != NO_STEP)
    step(&m, "weights", -1,
         later == OWN        ? m.own
         : later == RETURNED ? m.ret
                             : m.send);
  MUST(mz_decl_end(m.decl, MZ_FORWARD));
  MUST(mz_decl_end(m.decl, MZ_FORWARD));
  step(&m, "behind", m.own, m.own);
  step(&m, "combine", m.send, -1);
  return m;
}

/* One letter an operation of the micro-batch. */
static void spell(const mz_plan_t *p, char *text)
{
  const mz_op_t *ops = p->ops[MZ_WALK_MICRO];
  size_t n = 0;

  for (int32_t i = 0; i < p->num_ops[MZ_WALK_MICRO]; i++) {
    const mz_entry_t *e = &p->entries[ops[i].entry];
    bool post = ops[i].kind == MZ_OP_POST, wait = ops[i].kind == MZ_OP_WAIT;

    if (ops[i].kind == MZ_OP_COMPUTE)
      text[n++] = p->decl->steps[0][ops[i].step].compute.name[0];
    if ((post || wait) && e->kind == MZ_ENTRY_TOKENS)
      text[n++] = e->direction == MZ_DISPATCH ? "dD"[wait] : "tT"[wait];
    if ((post || wait) && e->kind == MZ_ENTRY_COUNTS) text[n++] = "cC"[wait];
    if (ops[i].kind == MZ_OP_LOOP) text[n++] = '{';
    if (ops[i].kind == MZ_OP_AGAIN) text[n++] = '?';
    if (ops[i].kind == MZ_OP_END_LOOP) text[n++] = '}';
    cr_assert_lt(n, 100);
  }
  text[n] = '\0';
}

static void expect_spelt(model_t m, int64_t chunks, const char *wanted)
{
  mz_plan_opts_t opts = tiny_opts(2, 0, 0);
  char text[128];
  mz_plan_t *p;

  opts.overlap_chunks = chunks;
  p = make_plan(m.decl, &opts);
  spell(p, text);
  cr_expect_str_eq(text, wanted);
  mz_plan_destroy(&p);
  mz_decl_destroy(&m.decl);
}

/* r route, c C counts, b beside and behind, d D dispatch, t T return, e
 * experts, w weights; posted in small letters, awaited in capitals. A second
 * round posts its dispatch and waits for the return before it. */
Test(plan_exchanges, steps_beside_the_experts_run_under_the_exchange)
{
  expect_spelt(own_model(false, NO_STEP), 1, "rcCdb{?dTDet}bTc");
  expect_spelt(own_model(false, NO_STEP), 2, "rcCddb{?dTDet}{?dTDet}bTTc");
}

Test(plan_exchanges, rows_return_under_a_step_behind_them)
{
  expect_spelt(own_model(false, OWN), 1, "rcCdb{?dTDetw}bTc");
  expect_spelt(own_model(false, OWN), 2, "rcCddb{?dTDetw}{?dTDetw}bTTc");
}

/* Whether an expert had rows is known of a round. */
Test(plan_exchanges, gradients_of_experts_outside_of_rounds_are_refused)
{
  model_t m = own_model(false, NO_STEP);
  mz_plan_opts_t opts = tiny_opts(2, 0, 0);
  mz_compute_opts_t weights = {
      .name = "weights", .fn = no_step, .expert_grads = true};
  mz_plan_t *p = NULL;

  MUST(mz_decl_runs(m.decl, MZ_BACKWARD, m.moe));
  MUST(mz_decl_compute(m.decl, MZ_BACKWARD, &weights));
  MUST(mz_decl_end(m.decl, MZ_BACKWARD));
  cr_assert_eq(mz_plan_create(m.decl, &opts, &p), MZ_ERR_ARG);
  cr_expect(strstr(mz_error_message(), "weights adds to gradients of experts "
                                       "outside of a round"),
            "%s", mz_error_message());
  mz_decl_destroy(&m.decl);
}

Test(plan_exchanges, nothing_overlaps_without_chunks)
{
  tiny_t t = tiny_plan(2, 0);
  int32_t run = t.plan->moes[1].first_run;
  int32_t weights =
      place(t.plan, (find_t){MZ_OP_COMPUTE, MZ_BACKWARD, MZ_RETURN,
                             "experts_wgrad", run, false});

  cr_expect_lt(awaited(t.plan, MZ_BACKWARD, MZ_RETURN, run), weights);
  tiny_destroy(&t);
  expect_spelt(own_model(false, NO_STEP), 0, "rcCb{dDetT}bc");
}

/* What experts touch themselves travels where it is declared. */
Test(plan_exchanges, nothing_travels_ahead_of_a_step_that_touches_it)
{
  expect_spelt(own_model(false, RETURNED), 2, "rcCb{dDetTw}{dDetTw}bc");
  expect_spelt(own_model(false, SENT), 2, "rcCb{dDetTw}{dDetTw}bc");
  expect_spelt(own_model(true, NO_STEP), 2, "rcCb{dDetT}{dDetT}bc");
}

/* The MoE that was declared last comes first in the model. */
Test(plan_exchanges, statistics_leave_behind_the_last_counts)
{
  model_t m = {0};
  mz_plan_opts_t opts = tiny_opts(2, 0, 0);
  mz_tensor_opts_t t = {.name = "weight", .ndim = 1, .shape = {4}};
  mz_moe_opts_t moe = {.num_experts = 4, .ep_size = 2, .k = 1};
  int32_t moes[2], last_counts = -1, statistics = -1, up;
  mz_plan_t *p;

  MUST(mz_decl_create(&m.decl));
  MUST(mz_decl_tensor(m.decl, &t, &m.weight));
  for (int i = 0; i < 2; i++) {
    moe.name = i ? "moe.1" : "moe.0";
    MUST(mz_decl_moe(m.decl, &moe, &moes[i]));
    MUST(mz_decl_expert_tensor(m.decl, moes[i], &t, &up));
  }
  m.kept = buffer(&m, "kept", MZ_ROWS_FIXED);
  for (int i = 1; i >= 0; i--) {
    MUST(mz_decl_layer(m.decl, &(mz_layer_opts_t){.name = "layer"}));
    step(&m, "route", -1, m.kept);
    MUST(mz_decl_counts(m.decl, MZ_FORWARD, moes[i], m.kept));
  }
  p = make_plan(m.decl, &opts);
  for (int32_t i = 0; i < p->num_ops[MZ_WALK_MICRO]; i++) {
    const mz_op_t *op = &p->ops[MZ_WALK_MICRO][i];

    if (op->kind != MZ_OP_POST) continue;
    if (p->entries[op->entry].kind == MZ_ENTRY_COUNTS) last_counts = i;
    if (p->entries[op->entry].kind == MZ_ENTRY_STATS) statistics = i;
  }
  cr_expect_gt(last_counts, 0);
  cr_expect_gt(statistics, last_counts, "%d behind %d", statistics,
               last_counts);
  mz_plan_destroy(&p);
  mz_decl_destroy(&m.decl);
}
