/* SPDX-License-Identifier: Apache-2.0 */
/* Learning rates by the number of optimizer steps done. */
#ifndef MZ_TRAIN_SCHEDULE_H
#define MZ_TRAIN_SCHEDULE_H

#include <moezero/config.h>

/**
 * The learning rate of the next optimizer step after @p steps_done >= 0 steps
 * that were not skipped. DeepSpeed moves its scheduler after the step, so with
 * t = steps_done - 1 and W = max(2, warmup_num_steps):
 *  - constant: @p lr;
 *  - WarmupLR: min + (max - min) gamma; gamma is 0 at t < 0, ln(t + 1) / ln W
 *    (log) or t / W (linear) below W, then 1.
 * @param lr  The optimizer's own rate.
 */
double mz_schedule_lr(const mz_scheduler_config_t *scheduler, double lr,
                      int64_t steps_done);

#endif
