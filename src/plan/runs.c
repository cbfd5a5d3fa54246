/* SPDX-License-Identifier: Apache-2.0 */
/* Routing bounds: rows of a round, the pool of saved rows, runs of experts. */
#include "plan/plan_impl.h"

#include "base/alloc.h"
#include "base/check.h"

#include <math.h>

/* Most rows that a rank's experts can get from all sources of a layer. */
static mz_status_t most_rows(const mz_plan_t *plan, const mz_moe_opts_t *o,
                             bool training, int64_t *rows_out)
{
  int64_t limit = mz_route_limit(o, plan->max_tokens, training), rows;

  MZ_TRY(mz_mul_i64(plan->max_tokens, (int64_t)o->ep_size * o->k, &rows));
  if (mz_route_drops(o, training))
    rows = mz_min_i64(rows, limit * (o->num_experts / o->ep_size) * o->ep_size);
  *rows_out = mz_max_i64(rows, 1);
  return MZ_OK;
}

/* A round takes all rows of a walk that drops, else the wanted multiple of
 * balanced ones; the pool likewise. */
static mz_status_t make_bounds(mz_plan_t *plan, int32_t moe)
{
  const mz_moe_opts_t *o = &plan->decl->moes[moe].opts;
  mz_moe_plan_t *m = &plan->moes[moe];
  double balanced = (double)plan->max_tokens * o->k;
  int64_t wanted, largest = 0, saved = 0;

  wanted = (int64_t)fmin(ceil(plan->opts.saved_rows * balanced), 9e15);
  for (int training = 0; training < 2; training++) {
    int64_t most = 1, rows;

    MZ_TRY(most_rows(plan, o, training, &most));
    rows = mz_route_drops(o, training) ? most : mz_min_i64(wanted, most);
    m->round_rows = mz_max_i64(m->round_rows, mz_max_i64(1, rows));
    m->max_capacity = mz_max_i64(m->max_capacity,
                                 mz_route_limit(o, plan->max_tokens, training));
    largest = mz_max_i64(largest, most);
    saved = mz_max_i64(saved, rows);
  }
  plan->pool_rows += saved;
  MZ_REQUIRE(largest <= INT32_MAX, MZ_ERR_OVERFLOW,
             "%s: up to %" PRId64 " rows a rank, offsets hold %d at most",
             plan->decl->moes[moe].name, largest, INT32_MAX);
  return MZ_OK;
}

/* The longest run that the buckets allow. */
static int32_t run_length(const mz_plan_t *plan, const mz_moe_plan_t *m,
                          const mz_unit_t *unit)
{
  int64_t length = m->experts_per_rank;

  if (unit->g > 1)
    length = mz_min_i64(length, plan->opts.reduce_bucket_size / unit->elements);
  if (unit->p > 1)
    length =
        mz_min_i64(length, plan->opts.max_live_parameters / 3 / unit->elements);
  if (plan->groups[m->ep_group].size > 1) /* else there is no exchange */
    length =
        mz_min_i64(length, mz_div_up(m->experts_per_rank,
                                     mz_max_i64(1, plan->opts.overlap_chunks)));
  return (int32_t)mz_max_i64(length, 1);
}

mz_status_t mz_plan_make_runs(mz_plan_t *plan)
{
  int64_t capacity = 0;
  int32_t unit = 0;

  plan->num_moes = (int32_t)plan->decl->num_moes;
  MZ_TRY(mz_new(plan->num_moes, "plans of experts", &plan->moes));
  while (unit < plan->num_units && plan->units[unit].moe < 0)
    unit++;
  for (int32_t i = 0; i < plan->num_moes; i++) {
    const mz_moe_opts_t *o = &plan->decl->moes[i].opts;
    mz_moe_plan_t *m = &plan->moes[i];
    int32_t step;

    mz_plan_find_groups(plan, o->ep_size, &m->ep_group, &m->edp_group);
    m->experts_per_rank = o->num_experts / o->ep_size;
    m->first_expert = plan->groups[m->ep_group].place * m->experts_per_rank;
    m->stats_offset = plan->stats_elements;
    plan->stats_elements += MZ_STATS_ELEMENTS(o->num_experts);
    m->counts = -1;
    MZ_TRY(make_bounds(plan, i));
    m->first_run = plan->num_runs;
    step = plan->decl->moes[i].num_tensors
               ? run_length(plan, m, &plan->units[unit])
               : m->experts_per_rank;
    for (int32_t e = 0; e < m->experts_per_rank; e += step) {
      mz_run_t run = {.moe = i,
                      .first_expert = m->first_expert + e,
                      .first_unit = unit + e};
      run.num_experts = (int32_t)mz_min_i64(step, m->experts_per_rank - e);
      MZ_TRY(mz_grow(&plan->runs, &capacity, plan->num_runs + 1, "runs"));
      plan->runs[plan->num_runs++] = run;
      m->num_runs++;
    }
    m->ahead = 1;
    if (m->num_runs > 1 && plan->opts.overlap_chunks > 1 && o->ep_size > 1)
      m->ahead = 2;
    if (plan->decl->moes[i].num_tensors) unit += m->experts_per_rank;
  }
  return MZ_OK;
}
