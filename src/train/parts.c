/* SPDX-License-Identifier: Apache-2.0 */
/* Parts in order: the gaps, a message kind each, then for each group all
 * operations of a kernel table. A group is a name of compute steps, or one of
 * the two that are no layer's. */
#include "train/parts.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/kernels.h"
#include "plan/decl_impl.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum {
  FIRST_MESSAGE = MZ_SPAN_GAPS + 1,
  FIRST_GROUP = FIRST_MESSAGE + MZ_ENTRY_SCALARS + 1
};

struct mz_parts {
  const mz_plan_t *plan;
  mz_spans_t *spans;
  const char **groups; /* [num_groups] names, borrowed from the declaration */
  int32_t num_groups;
  int32_t *group_of[2]; /* by pass and step of the declaration */
  int32_t bulk, update; /* groups */
  int32_t num_parts;
  char (*names)[MZ_NAME_MAX]; /* [num_parts] */
  mz_named_number_t *ms;      /* [num_parts] */
};

/* The group of a name; a new one is added. */
static int32_t group_named(mz_parts_t *p, const char *name)
{
  int32_t g = 0;

  while (g < p->num_groups && strcmp(p->groups[g], name) != 0)
    g++;
  if (g == p->num_groups) p->groups[p->num_groups++] = name;
  return g;
}

static mz_status_t find_groups(mz_parts_t *p)
{
  const mz_decl_t *d = p->plan->decl;

  MZ_TRY(mz_new(d->num_steps[MZ_FORWARD] + d->num_steps[MZ_BACKWARD] + 2,
                "groups of parts", &p->groups));
  for (int pass = 0; pass < 2; pass++) {
    MZ_TRY(mz_new(d->num_steps[pass], "parts of steps", &p->group_of[pass]));
    for (int64_t s = 0; s < d->num_steps[pass]; s++)
      if (d->steps[pass][s].kind == MZ_STEP_COMPUTE)
        p->group_of[pass][s] = group_named(p, d->steps[pass][s].compute.name);
  }
  p->bulk = group_named(p, "bulk");
  p->update = group_named(p, "update");
  return MZ_OK;
}

/* A layer may call its step anything, a name of the metrics has few letters. */
static void put_name(mz_parts_t *p, int32_t part, const char *first,
                     const char *second)
{
  char *name = p->names[part];

  snprintf(name, MZ_NAME_MAX, "%.60s.%.30s", first, second);
  for (; *name; name++)
    if (!isalnum((unsigned char)*name) && *name != '.') *name = '_';
}

static mz_status_t name_parts(mz_parts_t *p)
{
  p->num_parts = FIRST_GROUP + p->num_groups * MZ_NUM_KERNELS;
  MZ_TRY(mz_new(p->num_parts, "names of parts", &p->names));
  MZ_TRY(mz_new(p->num_parts, "times of parts", &p->ms));
  snprintf(p->names[MZ_SPAN_GAPS], MZ_NAME_MAX, "gaps");
  for (int32_t k = 0; k <= MZ_ENTRY_SCALARS; k++)
    put_name(p, FIRST_MESSAGE + k, "message",
             mz_entry_kind_name((mz_entry_kind_t)k));
  for (int32_t g = 0; g < p->num_groups; g++)
    for (int32_t op = 0; op < MZ_NUM_KERNELS; op++)
      put_name(p, FIRST_GROUP + g * MZ_NUM_KERNELS + op, p->groups[g],
               mz_kernel_name(op));
  return MZ_OK;
}

mz_status_t mz_parts_create(const mz_plan_t *plan, const mz_device_t *device,
                            mz_parts_t **parts_out)
{
  mz_parts_t *p = NULL;
  mz_status_t st;

  *parts_out = NULL;
  MZ_TRY_GOTO(st, mz_new(1, "parts of a step", &p), done);
  p->plan = plan;
  MZ_TRY_GOTO(st, find_groups(p), done);
  MZ_TRY_GOTO(st, name_parts(p), done);
  MZ_TRY_GOTO(st, mz_spans_create(device, p->num_parts, &p->spans), done);
  *parts_out = p;
  p = NULL;
done:
  mz_parts_destroy(&p);
  return st;
}

void mz_parts_destroy(mz_parts_t **parts)
{
  mz_parts_t *p = parts ? *parts : NULL;

  if (!p) return;
  mz_spans_destroy(&p->spans);
  mz_free(p->groups);
  mz_free(p->group_of[MZ_FORWARD]);
  mz_free(p->group_of[MZ_BACKWARD]);
  mz_free(p->names);
  mz_free(p->ms);
  mz_free(p);
  *parts = NULL;
}

mz_spans_t *mz_parts_spans(const mz_parts_t *parts) { return parts->spans; }

mz_status_t mz_parts_begin(mz_parts_t *parts)
{
  return MZ_TRACE(mz_spans_begin(parts->spans));
}

static void run_group(mz_parts_t *p, int32_t group)
{
  mz_spans_operations(p->spans, FIRST_GROUP + group * MZ_NUM_KERNELS);
}

mz_status_t mz_parts_enter(mz_parts_t *parts, const mz_op_t *op)
{
  switch (op->kind) {
  case MZ_OP_COMPUTE:
    run_group(parts, parts->group_of[op->pass][op->step]);
    return MZ_OK;
  case MZ_OP_PACK:
  case MZ_OP_PLACE:
  case MZ_OP_SUM:
    run_group(parts, parts->bulk);
    return MZ_OK;
  case MZ_OP_NORM:
  case MZ_OP_ADAMW:
    run_group(parts, parts->update);
    return MZ_OK;
  case MZ_OP_POST:
  case MZ_OP_WAIT:
    return MZ_TRACE(mz_spans_mark(
        parts->spans,
        FIRST_MESSAGE + (int32_t)parts->plan->entries[op->entry].kind));
  default:
    return MZ_OK;
  }
}

mz_status_t mz_parts_leave(mz_parts_t *parts, const mz_op_t *op)
{
  if (op->kind != MZ_OP_POST && op->kind != MZ_OP_WAIT) return MZ_OK;
  return MZ_TRACE(mz_spans_mark(parts->spans, MZ_SPAN_GAPS));
}

mz_status_t mz_parts_take(mz_parts_t *parts, const mz_named_number_t **ms_out,
                          int32_t *num_out)
{
  const mz_span_sum_t *sums;
  int32_t num = 0;

  MZ_TRY(mz_spans_take(parts->spans, &sums));
  for (int32_t i = 0; i < parts->num_parts; i++)
    if (sums[i].num > 0)
      parts->ms[num++] = (mz_named_number_t){parts->names[i], sums[i].ms};
  *ms_out = parts->ms;
  *num_out = num;
  return MZ_OK;
}
