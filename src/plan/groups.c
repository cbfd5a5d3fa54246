/* SPDX-License-Identifier: Apache-2.0 */
/* Process groups of this rank. With r = W / ep, expert first: expert-parallel
 * groups {g ep + j : j}, expert-data groups {i + g ep : g}; data first:
 * {i + j r : j} and {i r + j : j} (DeepSpeed's use_data_before_expert_
 * parallelism). */
#include "plan/plan_impl.h"

#include "base/alloc.h"
#include "base/check.h"

#include <stdio.h>
#include <string.h>

static mz_status_t add_group(mz_plan_t *plan, mz_group_kind_t kind,
                             int32_t ep_size, int32_t size, int first,
                             int stride)
{
  mz_group_t *g = &plan->groups[plan->num_groups];
  const char *names[] = {"data", "ep", "edp"};

  g->kind = kind;
  g->ep_size = ep_size;
  g->size = size;
  MZ_TRY(mz_new(size, "ranks of a group", &g->ranks));
  for (int32_t i = 0; i < size; i++) {
    g->ranks[i] = first + i * stride;
    if (g->ranks[i] == plan->opts.rank) g->place = i;
  }
  if (kind == MZ_GROUP_DATA)
    snprintf(g->name, sizeof g->name, "data");
  else
    snprintf(g->name, sizeof g->name, "%s%d", names[kind], ep_size);
  plan->num_groups++;
  return MZ_OK;
}

static mz_status_t add_pair(mz_plan_t *plan, int32_t ep_size)
{
  int world = plan->opts.world_size, rank = plan->opts.rank;
  int groups = world / ep_size;
  bool data_first = plan->opts.data_before_expert;

  if (ep_size > 1 && ep_size < world) {
    MZ_TRY(add_group(plan, MZ_GROUP_EXPERT, ep_size, ep_size,
                     data_first ? rank % groups : rank / ep_size * ep_size,
                     data_first ? groups : 1));
    MZ_TRY(add_group(plan, MZ_GROUP_EXPERT_DATA, ep_size, groups,
                     data_first ? rank / groups * groups : rank % ep_size,
                     data_first ? 1 : ep_size));
    return MZ_OK;
  }
  /* one of the two is the data group, the other this rank alone */
  if (world > 1)
    MZ_TRY(add_group(plan,
                     ep_size == 1 ? MZ_GROUP_EXPERT : MZ_GROUP_EXPERT_DATA,
                     ep_size, 1, rank, 1));
  return MZ_OK;
}

void mz_plan_find_groups(const mz_plan_t *plan, int32_t ep_size,
                         int32_t *expert_out, int32_t *expert_data_out)
{
  *expert_out = *expert_data_out = 0;
  for (int32_t i = 1; i < plan->num_groups; i++) {
    if (plan->groups[i].ep_size != ep_size) continue;
    if (plan->groups[i].kind == MZ_GROUP_EXPERT)
      *expert_out = i;
    else
      *expert_data_out = i;
  }
}

mz_status_t mz_plan_make_groups(mz_plan_t *plan)
{
  const mz_decl_t *d = plan->decl;

  MZ_TRY(mz_new(1 + 2 * d->num_moes, "groups", &plan->groups));
  MZ_TRY(add_group(plan, MZ_GROUP_DATA, 1, plan->opts.world_size, 0, 1));
  for (int64_t m = 0; m < d->num_moes; m++) {
    int32_t ep = d->moes[m].opts.ep_size;
    bool known = false;

    MZ_REQUIRE(plan->opts.world_size % ep == 0, MZ_ERR_CONFIG,
               "%s: moe.ep_size %d does not divide the %d ranks",
               d->moes[m].name, ep, plan->opts.world_size);
    for (int64_t i = 0; i < m; i++)
      known = known || d->moes[i].opts.ep_size == ep;
    if (!known) MZ_TRY(add_pair(plan, ep));
  }
  return MZ_OK;
}
