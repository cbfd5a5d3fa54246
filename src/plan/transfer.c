/* SPDX-License-Identifier: Apache-2.0 */
/* Bulk entries: consecutive small units travel together through rank-major
 * staging, a unit larger than a piece travels in pieces straight to its place.
 * At most MZ_MAX_PENDING reductions are posted and not yet added. */
#include "plan/plan_impl.h"

#include "base/alloc.h"
#include "base/check.h"

#include <stdio.h>

mz_status_t mz_emit_op(mz_emit_t *emit, mz_op_t op)
{
  mz_plan_t *p = emit->plan;
  mz_walk_t w = emit->walk;

  MZ_TRY(mz_grow(&p->ops[w], &emit->capacity_ops, p->num_ops[w] + 1,
                 "operations"));
  p->ops[w][p->num_ops[w]++] = op;
  return MZ_OK;
}

mz_status_t mz_emit_simple(mz_emit_t *emit, mz_op_kind_t kind, int32_t entry)
{
  mz_op_t op = {.kind = kind, .entry = entry, .moe = -1, .run = -1};
  return MZ_TRACE(mz_emit_op(emit, op));
}

mz_status_t mz_emit_entry(mz_emit_t *emit, mz_entry_t entry, int32_t *entry_out)
{
  mz_plan_t *p = emit->plan;

  if (!entry.max_calls) entry.max_calls = 1;
  MZ_TRY(mz_grow(&p->entries, &emit->capacity_entries, p->num_entries + 1,
                 "entries"));
  *entry_out = p->num_entries;
  p->entries[p->num_entries++] = entry;
  return MZ_OK;
}

static mz_dtype_t entry_dtype(const mz_plan_t *p, mz_entry_kind_t kind)
{
  if (kind == MZ_ENTRY_GRADS) return p->opts.communication_dtype;
  return kind == MZ_ENTRY_SUMS ? MZ_F32 : p->dtype;
}

/* Units [first, first + count) that travel in one entry. */
static int32_t together(const mz_plan_t *p, int32_t first, int32_t num,
                        int64_t limit)
{
  int64_t sum = 0;
  int32_t count = 0;

  while (count < num && sum + p->units[first + count].elements <= limit)
    sum += p->units[first + count++].elements;
  return count > 1 ? count : 1;
}

static int64_t limit_elements(const mz_plan_t *p, mz_entry_kind_t kind)
{
  int64_t bucket = kind == MZ_ENTRY_GRADS ? p->opts.reduce_bucket_size
                                          : p->opts.allgather_bucket_size;
  return mz_max_i64(
      1, mz_min_i64(bucket, p->opts.piece_bytes /
                                (int64_t)mz_dtype_bytes(entry_dtype(p, kind))));
}

static int64_t units_shard(const mz_plan_t *p, int32_t first, int32_t count)
{
  int64_t sum = 0;
  for (int32_t i = 0; i < count; i++)
    sum += p->units[first + i].shard;
  return sum;
}

static mz_status_t add_staging(mz_emit_t *emit, mz_entry_t *e, int64_t elements,
                               const char *what, int32_t *buffer_out)
{
  char name[MZ_NAME_MAX + 32];

  snprintf(name, sizeof name, "%s.%s.%d", what,
           emit->plan->units[e->first_unit].name, emit->plan->num_entries);
  return MZ_TRACE(mz_plan_add_buffer(
      emit->plan, name, MZ_CAT_STAGING,
      elements * (int64_t)mz_dtype_bytes(e->dtype), false, buffer_out));
}

/* The entry for units [first, first + count), elements [piece, + length). */
static mz_status_t make_entry(mz_emit_t *emit, mz_entry_kind_t kind,
                              int32_t first, int32_t count, int64_t piece,
                              int64_t length, int32_t target,
                              int64_t target_offset, int32_t *entry_out)
{
  mz_plan_t *p = emit->plan;
  const mz_unit_t *u = &p->units[first];
  mz_entry_t e = {.kind = kind,
                  .lane = 1,
                  .group = u->group,
                  .dtype = entry_dtype(p, kind),
                  .first_unit = first,
                  .num_units = count,
                  .piece = piece,
                  .length = length,
                  .staging = -1,
                  .packed = -1,
                  .target = target,
                  .target_offset = target_offset,
                  .moe = -1};
  bool reduce = kind == MZ_ENTRY_GRADS;
  bool convert = reduce && e.dtype != MZ_F32;
  int64_t others = u->ranks - 1; /* the own contribution does not travel */

  if (reduce || count > 1)
    MZ_TRY(add_staging(emit, &e, length * (reduce ? others : u->ranks),
                       "staging", &e.staging));
  if (reduce && (count > 1 || convert))
    MZ_TRY(add_staging(emit, &e, length * u->ranks, "packed", &e.packed));
  e.send_bytes =
      length * (int64_t)mz_dtype_bytes(e.dtype) * (reduce ? others : 1);
  return MZ_TRACE(mz_emit_entry(emit, e, entry_out));
}

/* Calls each() for the entries of num units, in order. */
typedef mz_status_t (*each_fn)(mz_emit_t *emit, int32_t entry);

static mz_status_t for_entries(mz_emit_t *emit, mz_entry_kind_t kind,
                               int32_t first_unit, int32_t num, int32_t target,
                               each_fn each)
{
  const mz_plan_t *p = emit->plan;
  int64_t limit = limit_elements(p, kind), offset = 0;
  int32_t entry;

  for (int32_t i = 0, count; i < num; i += count) {
    int32_t first = first_unit + i;
    const mz_unit_t *u = &p->units[first];
    int64_t shard, step;

    count = together(p, first, num - i, limit);
    shard = units_shard(p, first, count);
    step = mz_max_i64(MZ_PLAN_ALIGN,
                      limit / u->ranks / MZ_PLAN_ALIGN * MZ_PLAN_ALIGN);
    if (count > 1) step = shard;
    for (int64_t at = 0; at < shard; at += step) {
      MZ_TRY(make_entry(emit, kind, first, count, at,
                        mz_min_i64(step, shard - at), target, offset, &entry));
      MZ_TRY(each(emit, entry));
    }
    offset += shard * u->ranks;
  }
  return MZ_OK;
}

static mz_status_t post_gather(mz_emit_t *emit, int32_t entry)
{
  const mz_entry_t *e = &emit->plan->entries[entry];

  if (e->num_units > 1 && e->kind != MZ_ENTRY_PARAMS)
    MZ_TRY(mz_emit_simple(emit, MZ_OP_PACK, entry));
  return MZ_TRACE(mz_emit_simple(emit, MZ_OP_POST, entry));
}

mz_status_t mz_emit_gather_post(mz_emit_t *emit, mz_entry_kind_t kind,
                                int32_t first_unit, int32_t num, int32_t target,
                                int32_t *first_entry, int32_t *num_entries)
{
  *first_entry = emit->plan->num_entries;
  MZ_TRY(for_entries(emit, kind, first_unit, num, target, post_gather));
  *num_entries = emit->plan->num_entries - *first_entry;
  return MZ_OK;
}

mz_status_t mz_emit_gather_wait(mz_emit_t *emit, int32_t first_entry,
                                int32_t num_entries)
{
  for (int32_t e = first_entry; e < first_entry + num_entries; e++) {
    MZ_TRY(mz_emit_simple(emit, MZ_OP_WAIT, e));
    if (emit->plan->entries[e].num_units > 1)
      MZ_TRY(mz_emit_simple(emit, MZ_OP_PLACE, e));
  }
  return MZ_OK;
}

mz_status_t mz_emit_drain(mz_emit_t *emit, int32_t keep)
{
  while (emit->num_pending > keep) {
    MZ_TRY(mz_emit_simple(emit, MZ_OP_WAIT, emit->pending[0]));
    MZ_TRY(mz_emit_simple(emit, MZ_OP_SUM, emit->pending[0]));
    for (int32_t i = 1; i < emit->num_pending; i++)
      emit->pending[i - 1] = emit->pending[i];
    emit->num_pending--;
  }
  return MZ_OK;
}

static mz_status_t post_reduce(mz_emit_t *emit, int32_t entry)
{
  MZ_TRY(mz_emit_drain(emit, MZ_MAX_PENDING - 1));
  if (emit->plan->entries[entry].packed >= 0)
    MZ_TRY(mz_emit_simple(emit, MZ_OP_PACK, entry));
  MZ_TRY(mz_emit_simple(emit, MZ_OP_POST, entry));
  emit->pending[emit->num_pending++] = entry;
  return MZ_OK;
}

mz_status_t mz_emit_reduce(mz_emit_t *emit, int32_t first_unit, int32_t num,
                           int32_t target)
{
  return MZ_TRACE(
      for_entries(emit, MZ_ENTRY_GRADS, first_unit, num, target, post_reduce));
}
