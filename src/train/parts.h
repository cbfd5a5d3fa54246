/* SPDX-License-Identifier: Apache-2.0 */
/**
 * wall_clock_breakdown: where the time of a step goes on this rank's device.
 *
 * The parts are "<compute step>.<operation>" ("attention.linear"), with "bulk"
 * for what is done to gradients and weights that travel and "update" for norm
 * and optimizer; "message.<kind>" where no operation runs while the host posts
 * a message or waits for one: what is not hidden of it; and "gaps", the rest,
 * as before an operation that is launched late. They add up to the step. Not
 * collective.
 */
#ifndef MZ_TRAIN_PARTS_H
#define MZ_TRAIN_PARTS_H

#include "kernels/spans.h"
#include "plan/plan.h"

typedef struct mz_parts mz_parts_t;

/** @param plan, device  Borrowed until destroy.
 * @return MZ_OK, MZ_ERR_NOMEM, MZ_ERR_CUDA. */
mz_status_t mz_parts_create(const mz_plan_t *plan, const mz_device_t *device,
                            mz_parts_t **parts_out);
void mz_parts_destroy(mz_parts_t **parts);

/** For the kernel table; borrowed. */
mz_spans_t *mz_parts_spans(const mz_parts_t *parts);

/** A step begins. */
mz_status_t mz_parts_begin(mz_parts_t *parts);

/** Before and after an operation of the plan. */
mz_status_t mz_parts_enter(mz_parts_t *parts, const mz_op_t *op);
mz_status_t mz_parts_leave(mz_parts_t *parts, const mz_op_t *op);

/** The step is done; waits for the device.
 * @param[out] ms_out  [*num_out] milliseconds of what occurred in the step,
 * borrowed until the next call. */
mz_status_t mz_parts_take(mz_parts_t *parts, const mz_named_number_t **ms_out,
                          int32_t *num_out);

#endif
