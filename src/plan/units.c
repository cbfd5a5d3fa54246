/* SPDX-License-Identifier: Apache-2.0 */
/* Units of this rank: for each block its tensors and, at stage 3, its small
 * tensors that stay whole; borrowed tensors alone; then its experts. */
#include "plan/plan_impl.h"

#include "base/alloc.h"
#include "base/check.h"

#include <stdio.h>
#include <string.h>

enum unit_class { WHOLE, SMALL, SHARED };

typedef struct maker {
  mz_plan_t *plan;
  int64_t cap_units, cap_tensors, cap_segments[2];
  int64_t whole_elements; /* of small tensors so far, for the model threshold */
  uint8_t *class;         /* by tensor */
} maker_t;

static mz_status_t open_unit(maker_t *mk, const char *name, int32_t group,
                             bool stays_whole, int32_t moe, int32_t expert)
{
  mz_plan_t *p = mk->plan;
  mz_unit_t u = {.group = group, .moe = moe, .expert = expert};
  int64_t stage = p->opts.stage;
  int32_t n = p->groups[group].size;

  snprintf(u.name, sizeof u.name, "%s", name);
  u.ranks = n;
  u.o = stage >= 1 ? n : 1;
  u.g = stage >= 2 ? n : 1;
  u.p = stage >= 3 && !stays_whole ? n : 1;
  if (p->opts.inference) u.g = u.o = u.p;
  u.first_tensor = p->num_unit_tensors;
  MZ_TRY(mz_grow(&p->units, &mk->cap_units, p->num_units + 1, "units"));
  p->units[p->num_units++] = u;
  return MZ_OK;
}

static mz_status_t append_tensor(maker_t *mk, int32_t tensor)
{
  mz_plan_t *p = mk->plan;
  mz_unit_t *u = &p->units[p->num_units - 1];
  mz_unit_tensor_t t = {.tensor = tensor,
                        .unit = p->num_units - 1,
                        .offset = u->elements,
                        .elements = p->decl->tensors[tensor].elements};

  MZ_TRY(mz_grow(&p->unit_tensors, &mk->cap_tensors, p->num_unit_tensors + 1,
                 "tensors of units"));
  p->tensor_place[tensor] = p->num_unit_tensors;
  p->unit_tensors[p->num_unit_tensors++] = t;
  u->num_tensors++;
  MZ_TRY(mz_add_i64(u->elements, mz_round_up(t.elements, MZ_PLAN_ALIGN),
                    &u->elements));
  return MZ_OK;
}

static void close_unit(mz_plan_t *p)
{
  mz_unit_t *u = &p->units[p->num_units - 1];

  if (u->num_tensors == 0) {
    p->num_units--;
    return;
  }
  u->shard = mz_round_up(mz_div_up(u->elements, u->ranks), MZ_PLAN_ALIGN);
  u->elements = u->shard * u->ranks;
}

static void classify(maker_t *mk)
{
  mz_plan_t *p = mk->plan;

  for (int64_t i = 0; i < p->decl->num_tensors; i++) {
    const mz_tensor_t *t = &p->decl->tensors[i];
    if (t->moe >= 0) continue;
    mk->class[i] = t->shared ? SHARED : WHOLE;
    if (t->shared || p->opts.stage < 3 || p->opts.world_size == 1) continue;
    if (t->elements > p->opts.persistence_threshold ||
        t->elements > p->opts.model_persistence_threshold - mk->whole_elements)
      continue;
    mk->class[i] = SMALL;
    mk->whole_elements += t->elements;
  }
}

static mz_status_t add_class(maker_t *mk, int32_t block, enum unit_class class)
{
  mz_plan_t *p = mk->plan;
  char name[MZ_NAME_MAX];

  snprintf(name, sizeof name, "block.%d%s", block,
           class == SMALL ? ".whole" : "");
  MZ_TRY(open_unit(mk, name, 0, class == SMALL, -1, -1));
  for (int32_t g = 0; g < p->decl->num_groups; g++)
    for (int32_t i = 0; i < p->decl->num_tensors; i++) {
      const mz_tensor_t *t = &p->decl->tensors[i];
      if (t->moe < 0 && t->block == block && t->param_group == g &&
          mk->class[i] == class)
        MZ_TRY(append_tensor(mk, i));
    }
  close_unit(p);
  return MZ_OK;
}

static mz_status_t add_dense(maker_t *mk)
{
  const mz_decl_t *d = mk->plan->decl;
  int32_t last = -1;

  for (int64_t i = 0; i < d->num_tensors; i++)
    if (d->tensors[i].moe < 0 && d->tensors[i].block > last)
      last = d->tensors[i].block;
  for (int32_t block = 0; block <= last; block++) {
    MZ_TRY(add_class(mk, block, SMALL));
    MZ_TRY(add_class(mk, block, WHOLE));
    for (int32_t i = 0; i < d->num_tensors; i++) {
      const mz_tensor_t *t = &d->tensors[i];
      if (t->moe >= 0 || t->block != block || mk->class[i] != SHARED) continue;
      MZ_TRY(open_unit(mk, t->name, 0, false, -1, -1));
      MZ_TRY(append_tensor(mk, i));
      close_unit(mk->plan);
    }
  }
  return MZ_OK;
}

static mz_status_t add_experts(maker_t *mk, int32_t moe)
{
  mz_plan_t *p = mk->plan;
  const mz_moe_t *m = &p->decl->moes[moe];
  int32_t ep_group, edp_group, per_rank = m->opts.num_experts / m->opts.ep_size;
  int32_t first;

  mz_plan_find_groups(p, m->opts.ep_size, &ep_group, &edp_group);
  first = p->groups[ep_group].place * per_rank;
  for (int32_t e = first; e < first + per_rank; e++) {
    char name[MZ_NAME_MAX + 32];
    snprintf(name, sizeof name, "%s.experts.%d", m->name, e);
    MZ_TRY(open_unit(mk, name, edp_group, false, moe, e));
    for (int32_t g = 0; g < p->decl->num_groups; g++)
      for (int32_t t = 0; t < m->num_tensors; t++)
        if (p->decl->tensors[m->tensors[t] + e].param_group == g)
          MZ_TRY(append_tensor(mk, m->tensors[t] + e));
    close_unit(p);
  }
  return MZ_OK;
}

static mz_status_t set_offsets(mz_plan_t *p)
{
  int64_t params = 0, accum = 0, state = 0;

  for (int32_t i = 0; i < p->num_units; i++) {
    mz_unit_t *u = &p->units[i];
    u->param_offset = params;
    u->accum_offset = accum;
    u->state_offset = state;
    MZ_TRY(mz_add_i64(params, u->elements / u->p, &params));
    MZ_TRY(mz_add_i64(accum, u->elements / u->g, &accum));
    MZ_TRY(mz_add_i64(state, u->elements / u->o, &state));
  }
  return MZ_OK;
}

mz_status_t mz_plan_segments(const mz_plan_t *plan, int32_t unit, int64_t begin,
                             int64_t end, mz_segment_t **segments, int32_t *num,
                             int64_t *capacity)
{
  const mz_unit_t *u = &plan->units[unit];

  for (int32_t i = 0; i < u->num_tensors; i++) {
    const mz_unit_tensor_t *t = &plan->unit_tensors[u->first_tensor + i];
    int64_t a = mz_max_i64(begin, t->offset);
    int64_t b = mz_min_i64(end, t->offset + t->elements);
    mz_segment_t s = {.unit = unit, .tensor = t->tensor};

    if (b <= a) continue;
    s.param_group = plan->decl->tensors[t->tensor].param_group;
    s.tensor_offset = a - t->offset;
    s.unit_offset = a;
    s.length = b - a;
    MZ_TRY(mz_grow(segments, capacity, *num + 1, "segments"));
    (*segments)[(*num)++] = s;
  }
  return MZ_OK;
}

static mz_status_t make_segments(maker_t *mk)
{
  mz_plan_t *p = mk->plan;

  for (int32_t i = 0; i < p->num_units; i++) {
    const mz_unit_t *u = &p->units[i];
    int32_t place = p->groups[u->group].place;
    int64_t part = u->elements / u->o;
    int64_t begin[2] = {place * u->shard, place % u->o * part};
    int64_t length[2] = {u->shard, part};

    for (int s = 0; s < 2; s++)
      MZ_TRY(mz_plan_segments(p, i, begin[s], begin[s] + length[s],
                              &p->segments[s], &p->num_segments[s],
                              &mk->cap_segments[s]));
  }
  return MZ_OK;
}

mz_status_t mz_plan_make_units(mz_plan_t *plan)
{
  maker_t mk = {.plan = plan};
  mz_status_t st;
  int64_t n = plan->decl->num_tensors;

  MZ_TRY_GOTO(st, mz_new(n, "places of tensors", &plan->tensor_place), done);
  MZ_TRY_GOTO(st, mz_new(n, "classes of tensors", &mk.class), done);
  for (int64_t i = 0; i < n; i++)
    plan->tensor_place[i] = -1;
  classify(&mk);
  MZ_TRY_GOTO(st, add_dense(&mk), done);
  for (int32_t m = 0; m < plan->decl->num_moes; m++)
    MZ_TRY_GOTO(st, add_experts(&mk, m), done);
  MZ_TRY_GOTO(st, set_offsets(plan), done);
  MZ_TRY_GOTO(st, make_segments(&mk), done);
done:
  mz_free(mk.class);
  return st;
}
