/* SPDX-License-Identifier: Apache-2.0 */
/* Learning rates by the number of optimizer steps done. */
#ifndef MZ_TRAIN_SCHEDULE_H
#define MZ_TRAIN_SCHEDULE_H

#include <moezero/config.h>

/**
 * The learning rate of the next optimizer step after @p steps_done >= 0 steps
 * that were not skipped. DeepSpeed moves its scheduler after the step, so with
 * t = steps_done - 1, W = max(2, warmup_num_steps) and T = total_num_steps:
 *  - constant: @p lr;
 *  - WarmupLR: min + (max - min) gamma; gamma is 0 at t < 0, ln(t + 1) / ln W
 *    (log) or t / W (linear) below W, then 1;
 *  - WarmupDecayLR: the same, but from W on gamma = max(0, (T - t) /
 *    max(1, T - W));
 *  - WarmupCosineLR: lr times a ratio: 0 at t < 0, r0 + (1 - r0) gamma below W
 *    (r0 = warmup_min_ratio), then max(0, rm + (1 - rm) (1 + cos pi p) / 2)
 *    with p = min(1, (t - W + 1) / max(1, T - W)), rm = cos_min_ratio.
 * @param lr  The optimizer's own rate.
 */
double mz_schedule_lr(const mz_scheduler_config_t *scheduler, double lr,
                      int64_t steps_done);

#endif
