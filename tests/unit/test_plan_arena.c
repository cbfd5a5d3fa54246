/* SPDX-License-Identifier: Apache-2.0 */
/* The arena and the units: nothing is overwritten that is read later, weights
 * are there when a step reads them. */
#include "plan_case.h"

#include <stdio.h>

enum { NOBODY = -1 };

/* --- the arena --- */

typedef struct arena {
  const mz_plan_t *plan;
  const char *name;
  int32_t *owner; /* plan buffer by block of MZ_ALIGN_BYTES */
  int64_t blocks;
} arena_t;

static arena_t make_arena(const mz_plan_t *plan, const char *name)
{
  arena_t a = {.plan = plan, .name = name};

  cr_assert_eq(plan->arena_bytes % MZ_ALIGN_BYTES, 0);
  a.blocks = plan->arena_bytes / MZ_ALIGN_BYTES;
  cr_assert_eq(mz_new(a.blocks, "owners of blocks", &a.owner), MZ_OK);
  return a;
}

static void clear(arena_t *a)
{
  for (int64_t i = 0; i < a->blocks; i++)
    a->owner[i] = NOBODY;
}

static void span_of(const arena_t *a, int32_t buffer, int64_t *first,
                    int64_t *end)
{
  const mz_plan_buffer_t *b = &a->plan->buffers[buffer];

  cr_assert_eq(b->offset % MZ_ALIGN_BYTES, 0);
  *first = b->offset / MZ_ALIGN_BYTES;
  *end = *first + mz_div_up(b->bytes, MZ_ALIGN_BYTES);
  cr_assert_leq(*end, a->blocks, "%s: %s is outside", a->name, b->name);
}

/* Every operation: what lives lies apart. */
static void check_apart(const world_t *w, const char *name)
{
  arena_t a = make_arena(w->plans[w->size - 1], name);

  for (int walk = 0; walk < MZ_NUM_WALKS; walk++)
    for (int32_t at = 0; at < a.plan->num_ops[walk]; at++) {
      clear(&a);
      for (int32_t b = 0; b < a.plan->num_buffers; b++) {
        const mz_plan_buffer_t *x = &a.plan->buffers[b];
        int64_t first, end;

        if (!x->persistent &&
            (x->life[walk].first > at || x->life[walk].last < at))
          continue;
        span_of(&a, b, &first, &end);
        for (int64_t i = first; i < end; i++) {
          cr_assert_eq(a.owner[i], NOBODY, "%s: %s and %s share bytes at %d",
                       name, x->name, a.plan->buffers[a.owner[i]].name, at);
          a.owner[i] = b;
        }
      }
    }
  mz_free(a.owner);
}

Test(plan_arena, what_lives_at_one_operation_lies_apart)
{
  for_worlds(check_apart);
}

/* --- the walks on an arena that remembers who wrote --- */

static void write_to(arena_t *a, int32_t buffer)
{
  int64_t first, end;

  if (buffer < 0) return;
  span_of(a, buffer, &first, &end);
  for (int64_t i = first; i < end; i++) {
    int32_t was = a->owner[i];
    cr_assert(was == buffer || was == NOBODY ||
                  !a->plan->buffers[was].persistent,
              "%s: %s overwrites %s", a->name, a->plan->buffers[buffer].name,
              a->plan->buffers[was].name);
    a->owner[i] = buffer;
  }
}

static void read_from(const arena_t *a, int32_t buffer, int32_t at)
{
  int64_t first, end;

  if (buffer < 0) return;
  span_of(a, buffer, &first, &end);
  for (int64_t i = first; i < end; i++)
    cr_assert_eq(a->owner[i], buffer, "%s: %s is read at %d but %s is there",
                 a->name, a->plan->buffers[buffer].name, at,
                 a->owner[i] < 0 ? "nothing"
                                 : a->plan->buffers[a->owner[i]].name);
}

static void sides(const mz_plan_t *p, const mz_op_t *op, int32_t *send,
                  int32_t *recv)
{
  const mz_entry_t *e = &p->entries[op->entry];

  *send = *recv = -1;
  switch (e->kind) {
  case MZ_ENTRY_GRADS:
    *send = e->packed >= 0 ? e->packed : e->target;
    *recv = e->staging;
    break;
  case MZ_ENTRY_COUNTS:
    *send = p->buffer_of_decl[p->moes[e->moe].counts];
    break;
  case MZ_ENTRY_TOKENS:
    *send = mz_plan_buffer_at(p, e->send, op->run);
    *recv = mz_plan_buffer_at(p, e->recv, op->run);
    break;
  default:
    *recv = e->staging >= 0 ? e->staging : e->target;
  }
}

static void take_message(arena_t *a, const mz_op_t *op, int32_t at)
{
  const mz_entry_t *e = &a->plan->entries[op->entry];
  bool reduce = e->kind == MZ_ENTRY_GRADS;
  int32_t send, recv;

  sides(a->plan, op, &send, &recv);
  switch (op->kind) {
  case MZ_OP_PACK:
    if (reduce) read_from(a, e->target, at);
    write_to(a, reduce ? e->packed : e->staging);
    break;
  case MZ_OP_POST:
    read_from(a, send, at);
    write_to(a, recv);
    break;
  case MZ_OP_WAIT: /* both sides were left alone while it travelled */
    read_from(a, send, at);
    read_from(a, recv, at);
    break;
  case MZ_OP_PLACE:
    read_from(a, e->staging, at);
    write_to(a, e->target);
    break;
  case MZ_OP_SUM:
    read_from(a, e->staging, at);
    break;
  default:
    break;
  }
}

static void take_compute(arena_t *a, const mz_op_t *op, int32_t at)
{
  const mz_plan_t *p = a->plan;
  const mz_compute_opts_t *c = &p->decl->steps[op->pass][op->step].compute;

  for (int32_t i = 0; i < c->num_reads; i++)
    read_from(a, mz_plan_buffer_at(p, c->reads[i], op->run), at);
  for (int32_t i = 0; i < c->num_writes; i++)
    write_to(a, mz_plan_buffer_at(p, c->writes[i], op->run));
}

static void take_op(arena_t *a, const mz_op_t *op, int32_t at)
{
  switch (op->kind) {
  case MZ_OP_COMPUTE:
    take_compute(a, op, at);
    break;
  case MZ_OP_PREPARE:
    read_from(a, op->weights, at);
    write_to(a, op->grads);
    break;
  case MZ_OP_RELEASE: /* the weights were there until now */
    read_from(a, op->weights, at);
    break;
  case MZ_OP_PACK:
  case MZ_OP_POST:
  case MZ_OP_WAIT:
  case MZ_OP_PLACE:
  case MZ_OP_SUM:
    take_message(a, op, at);
    break;
  default:
    break;
  }
}

/* Two rounds a loop; rows are sent again. */
static void walk(arena_t *a, mz_walk_t w)
{
  const way_t way = {.rounds = 2, .saved = false};
  const mz_op_t *ops = a->plan->ops[w];
  int32_t round = 0;

  for (int32_t at = 0; at < a->plan->num_ops[w];
       at = next_op(ops, at, way, &round))
    take_op(a, &ops[at], at);
}

static void check_walks(const world_t *w, const char *name)
{
  for (int r = 0; r<w->size; r += w->size> 1 ? w->size - 1 : 1) {
    arena_t a = make_arena(w->plans[r], name);

    clear(&a);
    for (int32_t b = 0; b < a.plan->num_buffers; b++)
      if (a.plan->buffers[b].persistent) write_to(&a, b);
    for (int k = 0; k < MZ_NUM_WALKS; k++)
      walk(&a, (mz_walk_t)k);
    mz_free(a.owner);
  }
}

Test(plan_arena, nothing_is_overwritten_before_its_last_reader)
{
  for_worlds(check_walks);
}

/* --- weights and gradients of the units --- */

typedef struct units {
  const mz_plan_t *plan;
  const char *name;
  bool weights[64], grads[64]; /* by unit: there now */
  int64_t gathered, most;      /* elements of weights there at once */
} units_t;

static void expect_there(const units_t *s, int32_t first, int32_t num,
                         bool grads, int32_t at)
{
  for (int32_t u = first; u < first + num; u++) {
    const mz_unit_t *unit = &s->plan->units[u];

    if (grads)
      cr_assert(unit->g == 1 || s->grads[u], "%s: no gradient of %s at %d",
                s->name, unit->name, at);
    else
      cr_assert(unit->p == 1 || s->weights[u], "%s: no weights of %s at %d",
                s->name, unit->name, at);
  }
}

static void use_units(const units_t *s, const mz_op_t *op, int32_t at)
{
  const mz_plan_t *p = s->plan;
  const mz_compute_opts_t *c = &p->decl->steps[op->pass][op->step].compute;
  const mz_run_t *run = op->run >= 0 ? &p->runs[op->run] : NULL;

  for (int32_t i = 0; i < c->num_weights; i++)
    expect_there(s, p->unit_tensors[p->tensor_place[c->weights[i]]].unit, 1,
                 false, at);
  for (int32_t i = 0; i < c->num_grads && op->pass == MZ_BACKWARD; i++)
    expect_there(s, p->unit_tensors[p->tensor_place[c->grads[i]]].unit, 1, true,
                 at);
  if (run && c->expert_weights)
    expect_there(s, run->first_unit, run->num_experts, false, at);
  if (run && c->expert_grads)
    expect_there(s, run->first_unit, run->num_experts, true, at);
}

static void set_units(units_t *s, const mz_op_t *op)
{
  bool there = op->kind == MZ_OP_PREPARE;

  for (int32_t u = op->first_unit; u < op->first_unit + op->num_units; u++) {
    if (op->weights >= 0) {
      cr_assert_neq(s->weights[u], there, "%s: %s twice", s->name,
                    s->plan->units[u].name);
      s->weights[u] = there;
      s->gathered += (there ? 1 : -1) * s->plan->units[u].elements;
    }
    if (op->grads >= 0) s->grads[u] = there;
  }
  s->most = mz_max_i64(s->most, s->gathered);
}

/* A gradient that travels gets no contribution afterwards. */
static void send_units(units_t *s, const mz_op_t *op, int32_t at)
{
  const mz_entry_t *e = &s->plan->entries[op->entry];

  if (e->kind != MZ_ENTRY_GRADS || e->piece > 0) return;
  expect_there(s, e->first_unit, e->num_units, true, at);
  for (int32_t u = e->first_unit; u < e->first_unit + e->num_units; u++)
    s->grads[u] = false;
}

static void check_units(const world_t *w, const char *name)
{
  units_t s = {.plan = w->plans[0], .name = name};

  cr_assert_leq(s.plan->num_units, 64);
  for (int k = MZ_WALK_MICRO; k <= MZ_WALK_EVAL; k++) {
    for (int32_t at = 0; at < s.plan->num_ops[k]; at++) {
      const mz_op_t *op = &s.plan->ops[k][at];

      if (op->kind == MZ_OP_COMPUTE) use_units(&s, op, at);
      if (op->kind == MZ_OP_PREPARE || op->kind == MZ_OP_RELEASE)
        set_units(&s, op);
      if (op->kind == MZ_OP_POST) send_units(&s, op, at);
    }
    for (int32_t u = 0; u < s.plan->num_units; u++)
      cr_assert(!s.weights[u] && !s.grads[u], "%s: %s stays", name,
                s.plan->units[u].name);
  }
  cr_assert_leq(s.most, s.plan->peak_gathered, "%s", name);
  cr_assert_leq(s.plan->peak_gathered, s.plan->opts.max_live_parameters, "%s",
                name);
}

Test(plan_units, are_there_when_a_step_needs_them_and_leave_afterwards)
{
  for_worlds(check_units);
}

/* Weights are under way while others are at work, within the bucket. */
Test(plan_units, the_next_stays_are_posted_within_the_prefetch_bucket)
{
  layout_t l = {2, 1, 1, 4, 4, false};
  world_t w = make_world(&l, 3, tiny_opts);
  const mz_plan_t *p = w.plans[0];
  int64_t under_way = 0, most = 0;

  for (int32_t i = 0; i < p->num_ops[MZ_WALK_EVAL]; i++) {
    const mz_op_t *op = &p->ops[MZ_WALK_EVAL][i];
    const mz_entry_t *e = &p->entries[op->entry];
    bool params = (op->kind == MZ_OP_POST || op->kind == MZ_OP_WAIT) &&
                  e->kind == MZ_ENTRY_PARAMS;
    int64_t elements = params ? e->length * p->units[e->first_unit].ranks : 0;

    under_way += op->kind == MZ_OP_POST ? elements : -elements;
    if (op->kind == MZ_OP_COMPUTE && under_way > most) most = under_way;
  }
  cr_expect_gt(most, 0);
  cr_expect_leq(most, p->opts.prefetch_bucket_size);
  cr_expect_eq(under_way, 0);
  destroy_world(&w);
}
