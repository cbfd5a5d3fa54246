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

/* The runs of a MoE in one pass of a layer; exchanges.c. Steps by their place
 * in the pass. */
typedef struct mz_flow {
  mz_pass_t pass;
  int32_t moe;
  int32_t first, close;   /* behind RUNS, its END */
  int32_t head, head_end; /* dispatches with which a round begins */
  int32_t tail, tail_end; /* returns, behind which it only computes */
  int32_t after;          /* behind which the first dispatches are posted; -1:
                             behind RUNS */
  int32_t first_entry;    /* of the first run's exchanges */
  bool begun;
  int32_t num_awaited; /* runs whose returns have been waited for */
} mz_flow_t;

typedef struct mz_sketch {
  mz_emit_t *emit;
  mz_plan_t *plan;
  bool train;
  mz_op_t *ops;
  mz_item_t *items;
  mz_set_t *sets;
  mz_stay_t *stays;
  mz_flow_t *flows; /* of the layer that is being added */
  int64_t num_ops, cap_ops, num_items, cap_items, num_sets, num_stays,
      cap_stays, num_flows, cap_flows;
  int32_t *set_of_unit, *set_of_run;
  int64_t next_post, next_first; /* stays that come next, in their order */
  uint8_t *contributed;          /* by tensor */
} mz_sketch_t;

/* items.c: sets and items of the walk sketch->emit->walk. */
mz_status_t mz_sketch_make_items(mz_sketch_t *sketch);
/* Adds an operation to the last item. */
mz_status_t mz_sketch_op(mz_sketch_t *sketch, mz_op_t op);
/* What is skipped by the operation at @p op of sketch->ops ends here. */
void mz_sketch_close(mz_sketch_t *sketch, int64_t op);
/* The END of the RUNS, ROUNDS or BRANCH at @p at, before @p end; -1: none. */
int32_t mz_step_end(const mz_step_t *steps, int32_t at, int32_t end);

/* exchanges.c: operations go to the last item. Run i counts in the order of the
 * walk. A new flow in s->flows, of the RUNS at step @p runs; the layer's steps
 * begin at @p begin. */
mz_status_t mz_flow_create(mz_sketch_t *sketch, mz_pass_t pass, int32_t begin,
                           int32_t runs, int32_t close);
/* Around the steps of run i, behind ROUNDS, and an exchange where it stands. */
mz_status_t mz_flow_begin_run(mz_sketch_t *sketch, mz_flow_t *flow, int32_t i);
mz_status_t mz_flow_end_run(mz_sketch_t *sketch, mz_flow_t *flow, int32_t i);
mz_status_t mz_flow_begin_round(mz_sketch_t *sketch, mz_flow_t *flow, int32_t i,
                                int32_t step);
mz_status_t mz_flow_exchange(mz_sketch_t *sketch, mz_flow_t *flow, int32_t i,
                             int32_t step);
/* Before a step outside of runs (NULL: the layer ends), and behind it. */
mz_status_t mz_flows_before(mz_sketch_t *sketch, const mz_step_t *step);
mz_status_t mz_flows_behind(mz_sketch_t *sketch, int32_t step);

/* stays.c: from the items' weights, when each set is gathered and released.
 * @return MZ_OK, MZ_ERR_CONFIG (live limit below what the largest step needs),
 * MZ_ERR_NOMEM. */
mz_status_t mz_sketch_make_stays(mz_sketch_t *sketch);

#endif
