/* SPDX-License-Identifier: Apache-2.0 */
/* Values of DeepSpeed's WarmupLR, printed with seven significant digits. */
#include "train/schedule.h"

#include <criterion/criterion.h>
#include <math.h>

enum { NUM = 11 };

static const int64_t at[NUM] = {-1, 0, 1, 4, 9, 10, 11, 50, 99, 100, 120};

static void check(const mz_scheduler_config_t *s, const double expected[NUM])
{
  for (int i = 0; i < NUM; i++) {
    double lr = mz_schedule_lr(s, 7.0, at[i] + 1);
    cr_assert_leq(fabs(lr - expected[i]), 1e-6 * expected[i],
                  "t %d: %.9g, expected %.9g", (int)at[i], lr, expected[i]);
  }
}

Test(schedule, warmup_log_has_the_golden_values)
{
  mz_scheduler_config_t s = {MZ_SCHED_WARMUP, 0, 1e-3, 10, MZ_WARMUP_LOG};
  const double expected[NUM] = {0,    0,    3.010300e-04, 6.989700e-04,
                                1e-3, 1e-3, 1e-3,         1e-3,
                                1e-3, 1e-3, 1e-3};
  check(&s, expected);
}

Test(schedule, warmup_linear_has_the_golden_values)
{
  mz_scheduler_config_t s = {MZ_SCHED_WARMUP, 0, 1e-3, 10, MZ_WARMUP_LINEAR};
  const double expected[NUM] = {0,    0,    1e-4, 4e-4, 9e-4, 1e-3,
                                1e-3, 1e-3, 1e-3, 1e-3, 1e-3};
  check(&s, expected);
}

Test(schedule, warmup_starts_at_the_minimum)
{
  mz_scheduler_config_t s = {MZ_SCHED_WARMUP, 2e-4, 1e-3, 4, MZ_WARMUP_LINEAR};
  cr_assert_eq(mz_schedule_lr(&s, 7.0, 0), 2e-4);
  cr_assert_eq(mz_schedule_lr(&s, 7.0, 1), 2e-4);
  cr_assert_float_eq(mz_schedule_lr(&s, 7.0, 3), 6e-4, 1e-12);
}

/* ln 1 is 0: one warm-up step counts as two, as in DeepSpeed. */
Test(schedule, one_warmup_step_counts_as_two)
{
  mz_scheduler_config_t s = {MZ_SCHED_WARMUP, 0, 1e-3, 1, MZ_WARMUP_LOG};
  cr_assert_eq(mz_schedule_lr(&s, 7.0, 1), 0);
  cr_assert_float_eq(mz_schedule_lr(&s, 7.0, 2), 1e-3, 1e-12);
}

Test(schedule, constant_is_the_optimizers_rate)
{
  mz_scheduler_config_t s = {MZ_SCHED_CONSTANT, 0, 1e-3, 10, MZ_WARMUP_LOG};
  cr_assert_eq(mz_schedule_lr(&s, 3e-3, 0), 3e-3);
  cr_assert_eq(mz_schedule_lr(&s, 3e-3, INT64_MAX), 3e-3);
}
