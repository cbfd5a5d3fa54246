/* SPDX-License-Identifier: Apache-2.0 */
/**
 * How the tokens of a MoE layer spread over its experts: numbers of one step,
 * made from the counts that the ranks have gathered anyway, and the experts
 * that have been idle for a while. No collective, the same on all ranks and, as
 * long as no token is dropped, at any layout.
 *
 * E experts. "Routed" are choices before dropping, "kept" those that reached
 * their expert.
 */
#ifndef MZ_TRAIN_LOAD_H
#define MZ_TRAIN_LOAD_H

#include "plan/plan.h"

#include <moezero/engine.h>

/** Steps that an expert may be idle for before it counts as dead. */
enum { MZ_LOAD_WINDOW = 100 };

typedef struct mz_expert_load {
  int32_t num_experts;
  const int64_t *routed; /* [E] */
  const int64_t *kept;   /* [E] */
  int32_t dead;          /* experts without a token for a window of steps */
  int64_t routing_bytes; /* of this rank: what the layer keeps of its routes
                            from forward to backward */
} mz_expert_load_t;

/** Share of the routed choices that were dropped; 0 when nothing was routed. */
double mz_load_dropped(const mz_expert_load_t *load);

/** Mean over the experts of (routed / mean - 1)^2: the square of the
 * coefficient of variation; 0: balanced, E - 1: all to one expert. */
double mz_load_variance(const mz_expert_load_t *load);

/** The most routed expert over the mean; 1 when nothing was routed. */
double mz_load_largest(const mz_expert_load_t *load);

/** The loads of all MoE layers, and when each expert last had a token. */
typedef struct mz_loads mz_loads_t;

/** @param plan  Borrowed during the call. @return MZ_OK, MZ_ERR_NOMEM. */
mz_status_t mz_loads_create(const mz_plan_t *plan, mz_loads_t **loads_out);
void mz_loads_destroy(mz_loads_t **loads);

/** Takes the counts of a step; they are borrowed until the next one. */
void mz_loads_take(mz_loads_t *loads, const mz_step_result_t *result);

/** [MoE layers], of the last step taken. */
const mz_expert_load_t *mz_loads_all(const mz_loads_t *loads);

/** Steps that `dead` looks back on: those taken, at most MZ_LOAD_WINDOW. */
int64_t mz_loads_window(const mz_loads_t *loads);

/** Bytes that all ranks hand to token exchanges in a step at most, by the plan;
 * 0 when no token travels. */
int64_t mz_load_planned_bytes(const mz_plan_t *plan);

#endif
