/* SPDX-License-Identifier: Apache-2.0 */
#include "train/schedule.h"

#include "base/alloc.h"

#include <math.h>

static double warmup_gamma(const mz_scheduler_config_t *scheduler, int64_t t)
{
  int64_t W = mz_max_i64(2, scheduler->warmup_num_steps);

  if (t < 0) return 0.0;
  if (t >= W) return 1.0;
  if (scheduler->warmup_type == MZ_WARMUP_LINEAR) return (double)t / (double)W;
  return log((double)t + 1.0) / log((double)W);
}

double mz_schedule_lr(const mz_scheduler_config_t *scheduler, double lr,
                      int64_t steps_done)
{
  double low = scheduler->warmup_min_lr, high = scheduler->warmup_max_lr;

  if (scheduler->type == MZ_SCHED_CONSTANT) return lr;
  return low + (high - low) * warmup_gamma(scheduler, steps_done - 1);
}
