/* SPDX-License-Identifier: Apache-2.0 */
/* The walks: from items, stays and reductions to operations. */
#include "plan/sketch.h"

#include "base/alloc.h"
#include "base/check.h"

#include <stdio.h>

/* --- the walk --- */

/* What ends and begins at each item; lists run in order of stays and sets. */
static void link_items(mz_sketch_t *s)
{
  for (int64_t i = 0; i < s->num_items; i++)
    s->items[i].release = s->items[i].scratch = s->items[i].reduce = -1;
  for (int64_t i = s->num_stays - 1; i >= 0; i--) {
    mz_item_t *it = &s->items[s->stays[i].last];

    s->stays[i].next_release = it->release;
    it->release = (int32_t)i;
  }
  for (int64_t i = s->num_sets - 1; i >= 0; i--) {
    mz_set_t *set = &s->sets[i];

    if (!set->scatters || set->grad_first < 0) continue;
    set->next_scratch = s->items[set->grad_first].scratch;
    s->items[set->grad_first].scratch = (int32_t)i;
    set->next_reduce = s->items[set->grad_last].reduce;
    s->items[set->grad_last].reduce = (int32_t)i;
  }
}

static mz_status_t add_target(mz_sketch_t *s, const mz_set_t *set,
                              const char *what, mz_dtype_t dtype,
                              int32_t *buffer_out)
{
  char name[2 * MZ_NAME_MAX];

  snprintf(name, sizeof name, "%s.%s.%d", what,
           s->plan->units[set->first_unit].name, s->plan->num_buffers);
  return MZ_TRACE(mz_plan_add_buffer(
      s->plan, name, MZ_CAT_GATHERED,
      set->elements * (int64_t)mz_dtype_bytes(dtype), false, buffer_out));
}

static mz_status_t prepare(mz_sketch_t *s, const mz_set_t *set,
                           mz_op_kind_t kind, int32_t weights, int32_t grads)
{
  mz_op_t op = {.kind = kind,
                .first_unit = set->first_unit,
                .num_units = set->num_units,
                .weights = weights,
                .grads = grads,
                .moe = -1,
                .run = -1};
  return MZ_TRACE(mz_emit_op(s->emit, op));
}

static mz_status_t post_stay(mz_sketch_t *s, mz_stay_t *stay)
{
  mz_set_t *set = &s->sets[stay->set];

  MZ_TRY(add_target(s, set, "gathered", s->plan->dtype, &stay->target));
  return MZ_TRACE(mz_emit_gather_post(s->emit, MZ_ENTRY_PARAMS, set->first_unit,
                                      set->num_units, stay->target,
                                      &stay->first_entry, &stay->num_entries));
}

static mz_status_t before_item(mz_sketch_t *s, int32_t at)
{
  for (; s->next_post < s->num_stays && s->stays[s->next_post].post == at;
       s->next_post++)
    MZ_TRY(post_stay(s, &s->stays[s->next_post]));
  for (; s->next_first < s->num_stays && s->stays[s->next_first].first == at;
       s->next_first++) {
    const mz_stay_t *stay = &s->stays[s->next_first];

    MZ_TRY(mz_emit_gather_wait(s->emit, stay->first_entry, stay->num_entries));
    MZ_TRY(prepare(s, &s->sets[stay->set], MZ_OP_PREPARE, stay->target, -1));
  }
  for (int32_t i = s->items[at].scratch; i >= 0; i = s->sets[i].next_scratch) {
    mz_set_t *set = &s->sets[i];

    MZ_TRY(add_target(s, set, "scratch", MZ_F32, &set->scratch));
    MZ_TRY(prepare(s, set, MZ_OP_PREPARE, -1, set->scratch));
  }
  return MZ_OK;
}

static mz_status_t after_item(mz_sketch_t *s, int32_t at)
{
  for (int32_t i = s->items[at].release; i >= 0; i = s->stays[i].next_release)
    MZ_TRY(prepare(s, &s->sets[s->stays[i].set], MZ_OP_RELEASE,
                   s->stays[i].target, -1));
  for (int32_t i = s->items[at].reduce; i >= 0; i = s->sets[i].next_reduce) {
    const mz_set_t *set = &s->sets[i];
    MZ_TRY(
        mz_emit_reduce(s->emit, set->first_unit, set->num_units, set->scratch));
  }
  return MZ_OK;
}

static mz_status_t copy_item(mz_sketch_t *s, const mz_item_t *it)
{
  int32_t base = s->plan->num_ops[s->emit->walk];

  for (int32_t i = 0; i < it->num_ops; i++) {
    mz_op_t op = s->ops[it->first_op + i];

    if (op.kind == MZ_OP_LOOP || op.kind == MZ_OP_END_LOOP ||
        op.kind == MZ_OP_AGAIN || op.kind == MZ_OP_BRANCH)
      op.jump += base;
    MZ_TRY(mz_emit_op(s->emit, op));
  }
  return MZ_OK;
}

static mz_status_t post_stats(mz_sketch_t *s, int32_t *entry_out)
{
  mz_entry_t e = {.kind = MZ_ENTRY_STATS,
                  .lane = 0,
                  .group = 0,
                  .dtype = MZ_I64,
                  .moe = -1,
                  .staging = -1,
                  .packed = -1,
                  .target = -1,
                  .send_bytes = 8 * s->plan->stats_elements};

  MZ_TRY(mz_emit_entry(s->emit, e, entry_out));
  return MZ_TRACE(mz_emit_simple(s->emit, MZ_OP_POST, *entry_out));
}

static mz_status_t wait_stats(mz_sketch_t *s, int32_t *entry)
{
  MZ_TRY(mz_emit_simple(s->emit, MZ_OP_WAIT, *entry));
  MZ_TRY(mz_emit_simple(s->emit, MZ_OP_STATS_SUM, *entry));
  *entry = -1;
  return MZ_OK;
}

static mz_status_t emit_walk(mz_sketch_t *s)
{
  int32_t stats = -1;

  for (int32_t i = 0; i < s->num_items; i++) {
    MZ_TRY(before_item(s, i));
    if (s->items[i].needs_stats && stats >= 0) MZ_TRY(wait_stats(s, &stats));
    MZ_TRY(copy_item(s, &s->items[i]));
    if (s->items[i].last_counts) MZ_TRY(post_stats(s, &stats));
    MZ_TRY(after_item(s, i));
  }
  if (stats >= 0) MZ_TRY(wait_stats(s, &stats));
  return MZ_TRACE(mz_emit_drain(s->emit, 0));
}

static mz_status_t make_walk(mz_emit_t *emit, mz_walk_t walk)
{
  mz_sketch_t s = {.emit = emit, .plan = emit->plan};
  mz_status_t st;

  emit->walk = walk;
  emit->capacity_ops = 0;
  s.train = walk == MZ_WALK_MICRO;
  MZ_TRY_GOTO(st, mz_sketch_make_items(&s), done);
  MZ_TRY_GOTO(st, mz_sketch_make_stays(&s), done);
  link_items(&s);
  MZ_TRY_GOTO(st, emit_walk(&s), done);
done:
  mz_free(s.ops);
  mz_free(s.items);
  mz_free(s.sets);
  mz_free(s.stays);
  mz_free(s.flows);
  mz_free(s.set_of_unit);
  mz_free(s.set_of_run);
  mz_free(s.contributed);
  return st;
}

/* --- the optimizer step --- */

/* Calls emit for each stretch of units of one group for which want holds. */
typedef bool (*want_fn)(const mz_unit_t *unit);

static bool wants_reduce(const mz_unit_t *u)
{
  return u->ranks > 1 && u->g == 1;
}

static bool wants_sums(const mz_unit_t *u) { return u->ranks > 1 && u->o == 1; }

static bool wants_weights(const mz_unit_t *u) { return u->p == 1 && u->o > 1; }

static int32_t stretch(const mz_plan_t *p, int32_t first, want_fn want)
{
  int32_t n = 0;

  while (first + n < p->num_units && want(&p->units[first + n]) &&
         p->units[first + n].group == p->units[first].group)
    n++;
  return n;
}

static mz_status_t gather_all(mz_emit_t *emit, mz_entry_kind_t kind,
                              want_fn want)
{
  mz_plan_t *p = emit->plan;
  int32_t first_entry = p->num_entries, entry, num;

  for (int32_t u = 0, n; u < p->num_units; u += n ? n : 1) {
    n = stretch(p, u, want);
    if (n) MZ_TRY(mz_emit_gather_post(emit, kind, u, n, -1, &entry, &num));
  }
  return MZ_TRACE(
      mz_emit_gather_wait(emit, first_entry, p->num_entries - first_entry));
}

static mz_status_t post_scalars(mz_emit_t *emit, int32_t *entry_out)
{
  mz_entry_t e = {.kind = MZ_ENTRY_SCALARS,
                  .dtype = MZ_F64,
                  .moe = -1,
                  .staging = -1,
                  .packed = -1,
                  .target = -1,
                  .send_bytes = 8 * MZ_PLAN_SCALARS};

  MZ_TRY(mz_emit_entry(emit, e, entry_out));
  return MZ_TRACE(mz_emit_simple(emit, MZ_OP_POST, *entry_out));
}

static mz_status_t make_begin(mz_emit_t *emit)
{
  int32_t entry;

  emit->walk = MZ_WALK_BEGIN;
  MZ_TRY(post_scalars(emit, &entry));
  return MZ_TRACE(mz_emit_simple(emit, MZ_OP_WAIT, entry));
}

static mz_status_t make_update(mz_emit_t *emit)
{
  mz_plan_t *p = emit->plan;
  mz_op_t all = {
      .kind = MZ_OP_ADAMW, .num_units = p->num_units, .moe = -1, .run = -1};
  int32_t entry;

  emit->walk = MZ_WALK_UPDATE;
  emit->capacity_ops = 0;
  for (int32_t u = 0, n; u < p->num_units; u += n ? n : 1) {
    n = stretch(p, u, wants_reduce);
    if (n) MZ_TRY(mz_emit_reduce(emit, u, n, -1));
  }
  MZ_TRY(mz_emit_drain(emit, 0));
  MZ_TRY(mz_emit_simple(emit, MZ_OP_NORM, -1));
  MZ_TRY(post_scalars(emit, &entry));
  MZ_TRY(gather_all(emit, MZ_ENTRY_SUMS, wants_sums));
  MZ_TRY(mz_emit_simple(emit, MZ_OP_WAIT, entry));
  MZ_TRY(mz_emit_simple(emit, MZ_OP_FACTOR, entry));
  MZ_TRY(mz_emit_op(emit, all));
  return MZ_TRACE(gather_all(emit, MZ_ENTRY_WEIGHTS, wants_weights));
}

mz_status_t mz_plan_make_schedule(mz_plan_t *plan)
{
  mz_emit_t emit = {.plan = plan};

  MZ_TRY(make_begin(&emit));
  if (!plan->opts.inference) MZ_TRY(make_walk(&emit, MZ_WALK_MICRO));
  MZ_TRY(make_walk(&emit, MZ_WALK_EVAL));
  if (plan->opts.inference) return MZ_OK;
  return MZ_TRACE(make_update(&emit));
}
