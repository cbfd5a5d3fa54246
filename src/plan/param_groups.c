/* SPDX-License-Identifier: Apache-2.0 */
/* Parameter groups: what each gives, and which tensors are in them. */
#include "plan/decl_impl.h"

#include "base/alloc.h"
#include "base/check.h"

#include <fnmatch.h>
#include <moezero/config.h>

static bool fraction(double x) { return x >= 0 && x < 1; }

static mz_status_t check_hyper(const mz_hyper_t *h)
{
  MZ_REQUIRE(!(h->gives & MZ_GIVES_LR) || h->lr >= 0, MZ_ERR_ARG,
             "parameter group: lr is %g, need at least 0", h->lr);
  MZ_REQUIRE(!(h->gives & MZ_GIVES_BETAS) ||
                 (fraction(h->beta1) && fraction(h->beta2)),
             MZ_ERR_ARG,
             "parameter group: betas are %g and %g, need 0 to below 1",
             h->beta1, h->beta2);
  MZ_REQUIRE(!(h->gives & MZ_GIVES_EPS) || h->eps >= 0, MZ_ERR_ARG,
             "parameter group: eps is %g, need at least 0", h->eps);
  MZ_REQUIRE(!(h->gives & MZ_GIVES_WEIGHT_DECAY) || h->weight_decay >= 0,
             MZ_ERR_ARG, "parameter group: weight_decay is %g, need at least 0",
             h->weight_decay);
  return MZ_OK;
}

/* @p over on top of @p base. */
static mz_hyper_t lay_over(mz_hyper_t base, const mz_hyper_t *over)
{
  if (over->gives & MZ_GIVES_LR) base.lr = over->lr;
  if (over->gives & MZ_GIVES_BETAS) base.beta1 = over->beta1;
  if (over->gives & MZ_GIVES_BETAS) base.beta2 = over->beta2;
  if (over->gives & MZ_GIVES_EPS) base.eps = over->eps;
  if (over->gives & MZ_GIVES_WEIGHT_DECAY)
    base.weight_decay = over->weight_decay;
  base.gives |= over->gives;
  return base;
}

static mz_status_t add_group(mz_decl_t *d, mz_hyper_t hyper, int32_t *group_out)
{
  MZ_TRY(mz_grow(&d->groups, &d->cap_groups, d->num_groups + 1,
                 "parameter groups"));
  d->groups[d->num_groups] = hyper;
  *group_out = (int32_t)d->num_groups++;
  return MZ_OK;
}

mz_status_t mz_decl_first_groups(mz_decl_t *decl)
{
  mz_hyper_t decay = {0}, none = {.gives = MZ_GIVES_WEIGHT_DECAY};
  int32_t group;

  MZ_TRY(add_group(decl, decay, &group));
  return MZ_TRACE(add_group(decl, none, &group));
}

mz_status_t mz_decl_param_group(mz_decl_t *decl,
                                const mz_param_group_opts_t *opts,
                                int32_t *group_out)
{
  MZ_REQUIRE(decl && opts && group_out, MZ_ERR_ARG,
             "decl, opts or group_out is NULL");
  MZ_REQUIRE(opts->base >= 0 && opts->base < decl->num_groups, MZ_ERR_ARG,
             "parameter group on base %d, need 0..%" PRId64, opts->base,
             decl->num_groups - 1);
  MZ_TRY(check_hyper(&opts->hyper));
  return MZ_TRACE(add_group(
      decl, lay_over(decl->groups[opts->base], &opts->hyper), group_out));
}

/* --- optimizer.param_groups --- */

static bool matches(const mz_param_group_config_t *entry, const mz_tensor_t *t)
{
  if (entry->which == MZ_EXPERTS_ONLY && t->moe < 0) return false;
  if (entry->which == MZ_DENSE_ONLY && t->moe >= 0) return false;
  return fnmatch(entry->pattern, t->name, 0) == 0;
}

static int32_t first_match(const struct mz_optimizer_config *o,
                           const mz_tensor_t *t)
{
  for (int32_t i = 0; i < o->num_groups; i++)
    if (matches(&o->groups[i], t)) return i;
  return -1;
}

/* The group of an entry on top of a declared group is made at its first use;
 * made[entry * declared + group]: its id, 0: not yet. */
static mz_status_t regroup(mz_decl_t *d, const struct mz_optimizer_config *o,
                           int64_t declared, int32_t *made)
{
  for (int64_t i = 0; i < d->num_tensors; i++) {
    mz_tensor_t *t = &d->tensors[i];
    int32_t entry = first_match(o, t), *id;

    if (entry < 0) continue;
    id = &made[entry * declared + t->param_group];
    if (!*id) {
      mz_param_group_opts_t opts = {t->param_group, o->groups[entry].hyper};
      MZ_TRY(mz_decl_param_group(d, &opts, id));
    }
    t->param_group = *id;
  }
  return MZ_OK;
}

static mz_status_t check_used(const struct mz_optimizer_config *o,
                              int64_t declared, const int32_t *made)
{
  for (int32_t i = 0; i < o->num_groups; i++) {
    bool used = false;

    for (int64_t g = 0; g < declared; g++)
      used = used || made[i * declared + g];
    MZ_REQUIRE(used, MZ_ERR_CONFIG,
               "optimizer.param_groups[%d]: no tensor is left for pattern "
               "\"%s\"%s",
               i, o->groups[i].pattern,
               o->groups[i].which == MZ_EXPERTS_ONLY ? " among the experts"
               : o->groups[i].which == MZ_DENSE_ONLY ? " outside of experts"
                                                     : "");
  }
  return MZ_OK;
}

mz_status_t mz_decl_apply_groups(mz_decl_t *decl,
                                 const struct mz_optimizer_config *optimizer)
{
  int64_t declared;
  int32_t *made = NULL;
  mz_status_t st;

  MZ_REQUIRE(decl && optimizer, MZ_ERR_ARG, "decl or optimizer is NULL");
  MZ_REQUIRE(decl->num_grouped < 0, MZ_ERR_ARG,
             "optimizer.param_groups was applied before");
  declared = decl->num_groups;
  MZ_TRY_GOTO(
      st, mz_new(optimizer->num_groups * declared, "groups of entries", &made),
      done);
  MZ_TRY_GOTO(st, regroup(decl, optimizer, declared, made), done);
  MZ_TRY_GOTO(st, check_used(optimizer, declared, made), done);
  decl->num_grouped = decl->num_tensors;
done:
  mz_free(made);
  return st;
}

int32_t mz_decl_tensor_group(const mz_decl_t *decl, int32_t tensor)
{
  return decl->tensors[tensor].param_group;
}

int32_t mz_decl_num_param_groups(const mz_decl_t *decl)
{
  return (int32_t)decl->num_groups;
}

const mz_hyper_t *mz_decl_group_hyper(const mz_decl_t *decl, int32_t group)
{
  return &decl->groups[group];
}
