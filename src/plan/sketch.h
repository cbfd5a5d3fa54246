/* SPDX-License-Identifier: Apache-2.0 */
/* A walk on the drawing board: the layers' steps as items, between which
 * weights are acquired and gradients reduced. */
#ifndef MZ_PLAN_SKETCH_H
#define MZ_PLAN_SKETCH_H

#include "plan/plan_impl.h"

/* What is gathered and reduced together: a dense unit or a run of experts. */
typedef struct mz_set {
  int32_t first_unit, num_units;
  int64_t elements;
  bool gathers, scatters;                 /* p > 1, g > 1 */
  int32_t grad_first, grad_last, scratch; /* items; plan buffer */
  int32_t next_scratch, next_reduce;      /* of the same item; -1: none */
} mz_set_t;

typedef struct mz_item {
  int32_t first_op, num_ops; /* in sketch->ops */
  mz_pass_t pass;
  bool needs_stats, last_counts;
  int32_t weights[MZ_STEP_MAX_REFS], grads[MZ_STEP_MAX_REFS]; /* sets */
  int32_t num_weights, num_grads;
  /* what happens at it, heads of lists, -1: nothing: stays that end, sets whose
   * gradients begin and are whole */
  int32_t release, scratch, reduce;
} mz_item_t;

/* One stay of a set's weights. In order of first, and so of post. */
typedef struct mz_stay {
  int32_t set, first, last, post; /* items */
  int32_t earliest;               /* item: the set's stay before has ended */
  int32_t target, first_entry, num_entries;
  int32_t next_release; /* of the same item; -1: none */
} mz_stay_t;

typedef struct mz_sketch {
  mz_emit_t *emit;
  mz_plan_t *plan;
  bool train;
  mz_op_t *ops;
  mz_item_t *items;
  mz_set_t *sets;
  mz_stay_t *stays;
  int64_t num_ops, cap_ops, num_items, cap_items, num_sets, num_stays,
      cap_stays;
  int32_t *set_of_unit, *set_of_run;
  int64_t next_post, next_first; /* stays that come next, in their order */
  uint8_t *contributed;          /* by tensor */
} mz_sketch_t;

/* items.c: sets and items of the walk sketch->emit->walk. */
mz_status_t mz_sketch_make_items(mz_sketch_t *sketch);

/* stays.c: from the items' weights, when each set is gathered and released.
 * @return MZ_OK, MZ_ERR_CONFIG (live limit below what the largest step needs),
 * MZ_ERR_NOMEM. */
mz_status_t mz_sketch_make_stays(mz_sketch_t *sketch);

#endif
