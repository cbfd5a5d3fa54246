/* SPDX-License-Identifier: Apache-2.0 */
#include "train/schedule.h"

#include "base/alloc.h"

#include <math.h>

static int64_t warmup_steps(const mz_scheduler_config_t *s)
{
  return mz_max_i64(2, s->warmup_num_steps);
}

/* Steps from the warm-up's end to the last one. */
static double decay_steps(const mz_scheduler_config_t *s)
{
  return (double)mz_max_i64(1, s->total_num_steps - warmup_steps(s));
}

static double warmup_gamma(const mz_scheduler_config_t *s, int64_t t)
{
  double W = (double)warmup_steps(s);

  if (t < 0) return 0.0;
  if (t >= warmup_steps(s)) return 1.0;
  if (s->warmup_type == MZ_WARMUP_LINEAR) return (double)t / W;
  return log((double)t + 1.0) / log(W);
}

static double decay_gamma(const mz_scheduler_config_t *s, int64_t t)
{
  if (t < warmup_steps(s)) return warmup_gamma(s, t);
  return fmax(0.0, (double)(s->total_num_steps - t) / decay_steps(s));
}

static double cosine_ratio(const mz_scheduler_config_t *s, int64_t t)
{
  double low = s->cos_min_ratio, start = s->warmup_min_ratio, p;

  if (t < 0) return 0.0;
  if (t < warmup_steps(s)) return start + (1 - start) * warmup_gamma(s, t);
  p = fmin(1.0, (double)(t - warmup_steps(s) + 1) / decay_steps(s));
  return fmax(0.0, low + (1 - low) * (1 + cos(acos(-1.0) * p)) / 2);
}

double mz_schedule_lr(const mz_scheduler_config_t *scheduler, double lr,
                      int64_t steps_done)
{
  double low = scheduler->warmup_min_lr, high = scheduler->warmup_max_lr;
  int64_t t = steps_done - 1;

  switch (scheduler->type) {
  case MZ_SCHED_CONSTANT:
    break;
  case MZ_SCHED_WARMUP:
    return low + (high - low) * warmup_gamma(scheduler, t);
  case MZ_SCHED_WARMUP_DECAY:
    return low + (high - low) * decay_gamma(scheduler, t);
  case MZ_SCHED_WARMUP_COSINE:
    return lr * cosine_ratio(scheduler, t);
  }
  return lr;
}
