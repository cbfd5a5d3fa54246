/* SPDX-License-Identifier: Apache-2.0 */
/* Items of a walk: a compute step, or a whole run of experts with its rounds.
 * No unit is acquired or reduced inside of an item: the members of an
 * expert-data group sit in different expert-parallel groups and would hang. */
#include "plan/sketch.h"

#include "base/alloc.h"
#include "base/check.h"

/* --- sets --- */

static void add_set(mz_sketch_t *s, int32_t first_unit, int32_t num)
{
  mz_set_t *set = &s->sets[s->num_sets++];

  set->first_unit = first_unit;
  set->num_units = num;
  set->grad_first = set->grad_last = set->scratch = -1;
  for (int32_t u = first_unit; u < first_unit + num; u++) {
    set->elements += s->plan->units[u].elements;
    set->gathers = s->plan->units[u].p > 1;
    set->scatters = s->plan->units[u].g > 1;
  }
}

static mz_status_t make_sets(mz_sketch_t *s)
{
  mz_plan_t *p = s->plan;

  MZ_TRY(mz_new(p->num_units + p->num_runs, "sets", &s->sets));
  MZ_TRY(mz_new(p->num_units, "sets of units", &s->set_of_unit));
  MZ_TRY(mz_new(p->num_runs, "sets of runs", &s->set_of_run));
  for (int32_t u = 0; u < p->num_units && p->units[u].moe < 0; u++) {
    s->set_of_unit[u] = (int32_t)s->num_sets;
    add_set(s, u, 1);
  }
  for (int32_t r = 0; r < p->num_runs; r++) {
    bool has = p->decl->moes[p->runs[r].moe].num_tensors > 0;
    s->set_of_run[r] = (int32_t)s->num_sets;
    add_set(s, p->runs[r].first_unit, has ? p->runs[r].num_experts : 0);
  }
  return MZ_OK;
}

/* --- items --- */

mz_status_t mz_sketch_op(mz_sketch_t *s, mz_op_t op)
{
  MZ_TRY(mz_grow(&s->ops, &s->cap_ops, s->num_ops + 1, "sketched operations"));
  s->ops[s->num_ops++] = op;
  s->items[s->num_items - 1].num_ops++;
  return MZ_OK;
}

void mz_sketch_close(mz_sketch_t *s, int64_t op)
{
  s->ops[op].jump = (int32_t)(s->num_ops - s->items[s->num_items - 1].first_op);
}

int32_t mz_step_end(const mz_step_t *steps, int32_t at, int32_t end)
{
  int32_t depth = 0;

  for (int32_t i = at; i < end; i++) {
    mz_step_kind_t k = steps[i].kind;
    if (k == MZ_STEP_RUNS || k == MZ_STEP_ROUNDS || k == MZ_STEP_BRANCH)
      depth++;
    if (k == MZ_STEP_END && --depth == 0) return i;
  }
  return -1;
}

static mz_status_t open_item(mz_sketch_t *s, mz_pass_t pass)
{
  mz_item_t it = {.first_op = (int32_t)s->num_ops, .pass = pass};

  MZ_TRY(mz_grow(&s->items, &s->cap_items, s->num_items + 1, "items"));
  s->items[s->num_items++] = it;
  return MZ_OK;
}

static void need(int32_t *list, int32_t *num, int32_t set)
{
  for (int32_t i = 0; i < *num; i++)
    if (list[i] == set) return;
  list[(*num)++] = set;
}

static void note_grad(mz_sketch_t *s, int32_t set)
{
  int32_t at = (int32_t)s->num_items - 1;

  need(s->items[at].grads, &s->items[at].num_grads, set);
  if (s->sets[set].grad_first < 0) s->sets[set].grad_first = at;
  s->sets[set].grad_last = at;
}

static mz_status_t note_needs(mz_sketch_t *s, const mz_step_t *step,
                              int32_t run, bool in_round)
{
  const mz_compute_opts_t *c = &step->compute;
  mz_item_t *it = &s->items[s->num_items - 1];
  mz_plan_t *p = s->plan;

  it->needs_stats = it->needs_stats || c->needs_stats;
  for (int32_t i = 0; i < c->num_weights; i++) {
    int32_t place = p->tensor_place[c->weights[i]];
    need(it->weights, &it->num_weights,
         s->set_of_unit[p->unit_tensors[place].unit]);
  }
  for (int32_t i = 0; s->train && i < c->num_grads; i++) {
    int32_t place = p->tensor_place[c->grads[i]];
    s->contributed[c->grads[i]] = 1;
    note_grad(s, s->set_of_unit[p->unit_tensors[place].unit]);
  }
  MZ_REQUIRE(!c->expert_weights || run >= 0, MZ_ERR_ARG,
             "step %s uses experts outside of a run", c->name);
  MZ_REQUIRE(!c->expert_grads || in_round, MZ_ERR_ARG,
             "step %s adds to gradients of experts outside of a round",
             c->name);
  if (c->expert_weights)
    need(it->weights, &it->num_weights, s->set_of_run[run]);
  if (c->expert_grads && s->train) note_grad(s, s->set_of_run[run]);
  return MZ_OK;
}

static mz_status_t add_counts(mz_sketch_t *s, const mz_step_t *step)
{
  mz_plan_t *p = s->plan;
  int32_t experts = p->decl->moes[step->moe].opts.num_experts;
  mz_entry_t e = {.kind = MZ_ENTRY_COUNTS,
                  .lane = 0,
                  .group = p->moes[step->moe].ep_group,
                  .dtype = MZ_I32,
                  .moe = step->moe,
                  .staging = -1,
                  .packed = -1,
                  .target = -1,
                  .send_bytes = MZ_PLAN_COUNTS_SENT(experts)};
  int32_t entry;

  p->moes[step->moe].counts = step->counts;
  MZ_TRY(mz_emit_entry(s->emit, e, &entry));
  for (int i = 0; i < 2; i++) {
    mz_op_t op = {.kind = i ? MZ_OP_WAIT : MZ_OP_POST,
                  .entry = entry,
                  .moe = step->moe,
                  .run = -1};
    MZ_TRY(mz_sketch_op(s, op));
  }
  for (int64_t i = 0; i < s->num_items; i++)
    s->items[i].last_counts = i == s->num_items - 1;
  return MZ_OK;
}

static mz_status_t add_compute(mz_sketch_t *s, const mz_step_t *step,
                               mz_pass_t pass, int32_t index, int32_t run,
                               bool in_round)
{
  mz_op_t op = {.kind = MZ_OP_COMPUTE,
                .layer = step->layer,
                .step = index,
                .pass = (int32_t)pass,
                .moe = run >= 0 ? s->plan->runs[run].moe : -1,
                .run = run,
                .flag = in_round};

  if (!(step->compute.modes & (s->train ? MZ_IN_TRAIN : MZ_IN_EVAL)))
    return MZ_OK;
  MZ_TRY(note_needs(s, step, run, in_round));
  return MZ_TRACE(mz_sketch_op(s, op));
}

/* Where steps are added: at run i of a flow, or outside of runs (NULL). */
typedef struct place {
  mz_pass_t pass;
  mz_flow_t *flow;
  int32_t i, run;
} place_t;

/* Closes the rounds or the branch that began at operation @p open of the item
 * whose first is @p base. */
static mz_status_t add_end(mz_sketch_t *s, int32_t run, int32_t base,
                           int32_t open)
{
  mz_op_t *begin = &s->ops[base + open];
  mz_op_t op = {
      .kind = MZ_OP_END_LOOP, .moe = begin->moe, .run = run, .jump = open + 1};

  if (begin->kind == MZ_OP_LOOP) MZ_TRY(mz_sketch_op(s, op));
  mz_sketch_close(s, base + open);
  return MZ_OK;
}

static mz_status_t add_begin(mz_sketch_t *s, const place_t *place, int32_t step)
{
  const mz_step_t *x = &s->plan->decl->steps[place->pass][step];
  bool rounds = x->kind == MZ_STEP_ROUNDS;
  mz_op_t op = {.kind = rounds ? MZ_OP_LOOP : MZ_OP_BRANCH,
                .moe = x->moe,
                .run = place->run,
                .flag = x->saved};

  MZ_REQUIRE(place->flow, MZ_ERR_ARG, "rounds or a branch outside of a run");
  MZ_TRY(mz_sketch_op(s, op));
  if (!rounds) return MZ_OK;
  return MZ_TRACE(mz_flow_begin_round(s, place->flow, place->i, step));
}

/* Steps [first, end) at one place. Loops and branches nest; jumps are relative
 * to the item's first operation until copied. */
static mz_status_t add_steps(mz_sketch_t *s, const place_t *place,
                             int32_t first, int32_t end)
{
  const mz_step_t *steps = s->plan->decl->steps[place->pass];
  int32_t open[4], depth = 0, rounds = 0;

  for (int32_t i = first; i < end; i++) {
    const mz_step_t *step = &steps[i];
    int32_t base = s->items[s->num_items - 1].first_op;

    switch (step->kind) {
    case MZ_STEP_COMPUTE:
      MZ_TRY(add_compute(s, step, place->pass, i, place->run, rounds > 0));
      break;
    case MZ_STEP_COUNTS:
      MZ_TRY(add_counts(s, step));
      break;
    case MZ_STEP_EXCHANGE:
      MZ_REQUIRE(rounds > 0, MZ_ERR_ARG, "an exchange outside of a round");
      MZ_TRY(mz_flow_exchange(s, place->flow, place->i, i));
      break;
    case MZ_STEP_ROUNDS:
    case MZ_STEP_BRANCH:
      MZ_REQUIRE(depth < 4, MZ_ERR_ARG, "rounds and branches nest 4 deep");
      rounds += step->kind == MZ_STEP_ROUNDS;
      open[depth++] = (int32_t)s->num_ops - base;
      MZ_TRY(add_begin(s, place, i));
      break;
    case MZ_STEP_END:
      MZ_REQUIRE(depth > 0, MZ_ERR_ARG, "an end without its beginning");
      rounds -= s->ops[base + open[--depth]].kind == MZ_OP_LOOP;
      MZ_TRY(add_end(s, place->run, base, open[depth]));
      break;
    case MZ_STEP_RUNS:
      MZ_FAIL(MZ_ERR_ARG, "runs inside of runs");
    }
  }
  MZ_REQUIRE(depth == 0, MZ_ERR_ARG, "rounds or a branch without an end");
  return MZ_OK;
}

static mz_status_t add_runs(mz_sketch_t *s, mz_flow_t *flow)
{
  const mz_plan_t *p = s->plan;
  const mz_moe_plan_t *m = &p->moes[flow->moe];

  for (int32_t i = 0; i < m->num_runs; i++) {
    int32_t run =
        m->first_run + (flow->pass == MZ_FORWARD ? i : m->num_runs - 1 - i);
    place_t place = {.pass = flow->pass, .flow = flow, .i = i, .run = run};
    mz_op_t op = {.kind = MZ_OP_RUN, .moe = flow->moe, .run = run};

    MZ_TRY(open_item(s, flow->pass));
    if (i == 0) MZ_TRY(mz_flows_before(s, NULL));
    MZ_TRY(mz_sketch_op(s, op));
    MZ_TRY(mz_flow_begin_run(s, flow, i));
    MZ_TRY(add_steps(s, &place, flow->first, flow->close));
    MZ_TRY(mz_flow_end_run(s, flow, i));
  }
  return MZ_OK;
}

static mz_status_t find_flows(mz_sketch_t *s, mz_pass_t pass,
                              const mz_layer_t *l)
{
  const mz_step_t *steps = s->plan->decl->steps[pass];
  int32_t end = l->first[pass] + l->num[pass];

  s->num_flows = 0;
  for (int32_t i = l->first[pass]; i < end; i++) {
    int32_t close;

    if (steps[i].kind != MZ_STEP_RUNS) continue;
    close = mz_step_end(steps, i, end);
    MZ_REQUIRE(close >= 0, MZ_ERR_ARG, "%s: runs without an end", l->name);
    MZ_TRY(mz_flow_create(s, pass, l->first[pass], i, close));
    i = close;
  }
  return MZ_OK;
}

static mz_status_t add_layer(mz_sketch_t *s, mz_pass_t pass, int32_t layer)
{
  const mz_layer_t *l = &s->plan->decl->layers[layer];
  const mz_step_t *steps = s->plan->decl->steps[pass];
  int32_t end = l->first[pass] + l->num[pass], flow = 0;
  place_t outside = {.pass = pass, .run = -1};

  MZ_TRY(find_flows(s, pass, l));
  for (int32_t i = l->first[pass]; i < end; i++) {
    if (steps[i].kind == MZ_STEP_RUNS) {
      i = s->flows[flow].close;
      MZ_TRY(add_runs(s, &s->flows[flow++]));
      continue;
    }
    MZ_TRY(open_item(s, pass));
    MZ_TRY(mz_flows_before(s, &steps[i]));
    MZ_TRY(add_steps(s, &outside, i, i + 1));
    MZ_TRY(mz_flows_behind(s, i));
  }
  return MZ_TRACE(mz_flows_before(s, NULL));
}

mz_status_t mz_sketch_make_items(mz_sketch_t *s)
{
  int32_t layers = (int32_t)s->plan->decl->num_layers;

  MZ_TRY(mz_new(s->plan->decl->num_tensors, "contributions", &s->contributed));
  MZ_TRY(make_sets(s));
  for (int32_t l = 0; l < layers; l++)
    MZ_TRY(add_layer(s, MZ_FORWARD, l));
  for (int32_t l = layers - 1; s->train && l >= 0; l--)
    MZ_TRY(add_layer(s, MZ_BACKWARD, l));
  for (int32_t t = 0; s->train && t < s->plan->decl->num_tensors; t++)
    MZ_REQUIRE(s->contributed[t] || s->plan->decl->tensors[t].moe >= 0,
               MZ_ERR_ARG, "tensor %s gets no gradient from any step",
               s->plan->decl->tensors[t].name);
  return MZ_OK;
}
