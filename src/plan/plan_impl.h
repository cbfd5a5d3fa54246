/* SPDX-License-Identifier: Apache-2.0 */
/* The makers of a plan, in the order in which mz_plan_create calls them. */
#ifndef MZ_PLAN_PLAN_IMPL_H
#define MZ_PLAN_PLAN_IMPL_H

#include "plan/decl_impl.h"
#include "plan/plan.h"

/* groups.c: group lists of this rank. */
mz_status_t mz_plan_make_groups(mz_plan_t *plan);
/* The two groups of an ep_size. */
void mz_plan_find_groups(const mz_plan_t *plan, int32_t ep_size,
                         int32_t *expert_out, int32_t *expert_data_out);

/* units.c: units, their tensors, region offsets, segments. */
mz_status_t mz_plan_make_units(mz_plan_t *plan);

/* runs.c: routing bounds, runs of experts, the pool. */
mz_status_t mz_plan_make_runs(mz_plan_t *plan);

/* buffers.c: buffers of declaration, regions and engine; then more while the
 * schedule is made; then their lives and places. */
mz_status_t mz_plan_make_buffers(mz_plan_t *plan);
mz_status_t mz_plan_add_buffer(mz_plan_t *plan, const char *name,
                               mz_category_t category, int64_t bytes,
                               bool persistent, int32_t *buffer_out);
/* The second of a buffer that two runs exchange in turn; once for a buffer. */
mz_status_t mz_plan_add_twin(mz_plan_t *plan, int32_t decl_buffer);
mz_status_t mz_plan_place_buffers(mz_plan_t *plan);

/* workspace.c: scratch of the kernels, 0 with fp32. MZ_OK, MZ_ERR_OVERFLOW. */
mz_status_t mz_plan_workspace_bytes(const mz_plan_t *plan, int64_t *bytes_out);

/* schedule.c: the walks. */
mz_status_t mz_plan_make_schedule(mz_plan_t *plan);

/* ledger.c: traffic and sums. */
mz_status_t mz_plan_make_ledger(mz_plan_t *plan);

/* times.c: the predicted step. */
void mz_plan_make_times(mz_plan_t *plan);

/* names.c: words of print and JSON. */
const char *mz_group_kind_name(mz_group_kind_t kind);
const char *mz_walk_name(mz_walk_t walk);
const char *mz_dtype_name(mz_dtype_t dtype);

/* --- emission of operations --- */

enum { MZ_MAX_PENDING = 2 /* reductions posted and not yet added */ };

typedef struct mz_emit {
  mz_plan_t *plan;
  mz_walk_t walk;
  int64_t capacity_ops, capacity_entries;
  int32_t pending[MZ_MAX_PENDING]; /* entries waiting for WAIT and SUM */
  int32_t num_pending;
} mz_emit_t;

mz_status_t mz_emit_op(mz_emit_t *emit, mz_op_t op);
mz_status_t mz_emit_simple(mz_emit_t *emit, mz_op_kind_t kind, int32_t entry);
mz_status_t mz_emit_entry(mz_emit_t *emit, mz_entry_t entry,
                          int32_t *entry_out);

/* transfer.c: bulk entries of num consecutive units of one group.
 * target: plan buffer that holds them unit-major, -1: the region. */
mz_status_t mz_emit_gather_post(mz_emit_t *emit, mz_entry_kind_t kind,
                                int32_t first_unit, int32_t num, int32_t target,
                                int32_t *first_entry, int32_t *num_entries);
mz_status_t mz_emit_gather_wait(mz_emit_t *emit, int32_t first_entry,
                                int32_t num_entries);
mz_status_t mz_emit_reduce(mz_emit_t *emit, int32_t first_unit, int32_t num,
                           int32_t target);
mz_status_t mz_emit_drain(mz_emit_t *emit, int32_t keep);

#endif
