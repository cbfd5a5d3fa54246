/* SPDX-License-Identifier: Apache-2.0 */
/* Values of DeepSpeed's schedules, printed with seven significant digits. */
#include "train/schedule.h"

#include <criterion/criterion.h>
#include <math.h>

enum { NUM = 11 };

static const int64_t at[NUM] = {-1, 0, 1, 4, 9, 10, 11, 50, 99, 100, 120};

static void check(const mz_scheduler_config_t *s, const double expected[NUM])
{
  for (int i = 0; i < NUM; i++) {
    double lr = mz_schedule_lr(s, 1e-3, at[i] + 1);
    cr_assert_leq(fabs(lr - expected[i]), 1e-6 * expected[i],
                  "t %d: %.9g, expected %.9g", (int)at[i], lr, expected[i]);
  }
}

Test(schedule, warmup_log_has_the_golden_values)
{
  mz_scheduler_config_t s = {.type = MZ_SCHED_WARMUP,
                             .warmup_max_lr = 1e-3,
                             .warmup_num_steps = 10,
                             .warmup_type = MZ_WARMUP_LOG};
  const double expected[NUM] = {0,    0,    3.010300e-04, 6.989700e-04,
                                1e-3, 1e-3, 1e-3,         1e-3,
                                1e-3, 1e-3, 1e-3};
  check(&s, expected);
}

Test(schedule, warmup_linear_has_the_golden_values)
{
  mz_scheduler_config_t s = {.type = MZ_SCHED_WARMUP,
                             .warmup_max_lr = 1e-3,
                             .warmup_num_steps = 10,
                             .warmup_type = MZ_WARMUP_LINEAR};
  const double expected[NUM] = {0,    0,    1e-4, 4e-4, 9e-4, 1e-3,
                                1e-3, 1e-3, 1e-3, 1e-3, 1e-3};
  check(&s, expected);
}

Test(schedule, decay_log_has_the_golden_values)
{
  mz_scheduler_config_t s = {.type = MZ_SCHED_WARMUP_DECAY,
                             .warmup_max_lr = 1e-3,
                             .warmup_num_steps = 10,
                             .warmup_type = MZ_WARMUP_LOG,
                             .total_num_steps = 100};
  const double expected[NUM] = {0,
                                0,
                                3.010300e-04,
                                6.989700e-04,
                                1e-3,
                                1e-3,
                                9.888889e-04,
                                5.555556e-04,
                                1.111111e-05,
                                0,
                                0};
  check(&s, expected);
}

Test(schedule, cosine_log_has_the_golden_values)
{
  mz_scheduler_config_t s = {.type = MZ_SCHED_WARMUP_COSINE,
                             .warmup_num_steps = 10,
                             .warmup_type = MZ_WARMUP_LOG,
                             .total_num_steps = 100,
                             .cos_min_ratio = 1e-4};
  const double expected[NUM] = {0,
                                0,
                                3.010300e-04,
                                6.989700e-04,
                                1e-3,
                                9.996954e-04,
                                9.987821e-04,
                                5.696296e-04,
                                1e-7,
                                1e-7,
                                1e-7};
  check(&s, expected);
}

Test(schedule, cosine_linear_has_the_golden_values)
{
  mz_scheduler_config_t s = {.type = MZ_SCHED_WARMUP_COSINE,
                             .warmup_num_steps = 10,
                             .warmup_type = MZ_WARMUP_LINEAR,
                             .total_num_steps = 100,
                             .warmup_min_ratio = 0.01,
                             .cos_min_ratio = 1e-4};
  const double expected[NUM] = {
      0,       1e-5,         1.09e-4,      4.06e-4,
      9.01e-4, 9.996954e-04, 9.987821e-04, 5.696296e-04,
      1e-7,    1e-7,         1e-7};
  check(&s, expected);
}

/* The minimum is added back: the decay ends there, not at 0. */
Test(schedule, decay_ends_at_the_minimum)
{
  mz_scheduler_config_t s = {.type = MZ_SCHED_WARMUP_DECAY,
                             .warmup_min_lr = 2e-4,
                             .warmup_max_lr = 1e-3,
                             .warmup_num_steps = 2,
                             .warmup_type = MZ_WARMUP_LINEAR,
                             .total_num_steps = 6};
  cr_assert_eq(mz_schedule_lr(&s, 7.0, 0), 2e-4);
  cr_assert_float_eq(mz_schedule_lr(&s, 7.0, 3), 1e-3, 1e-12);
  cr_assert_float_eq(mz_schedule_lr(&s, 7.0, 5), 6e-4, 1e-12);
  cr_assert_eq(mz_schedule_lr(&s, 7.0, 7), 2e-4);
  cr_assert_eq(mz_schedule_lr(&s, 7.0, INT64_MAX), 2e-4);
}

/* No step between the warm-up and the end: both fall at once. */
Test(schedule, a_total_below_the_warm_up_ends_with_it)
{
  mz_scheduler_config_t s = {.type = MZ_SCHED_WARMUP_DECAY,
                             .warmup_max_lr = 1e-3,
                             .warmup_num_steps = 10,
                             .warmup_type = MZ_WARMUP_LINEAR,
                             .total_num_steps = 5};
  cr_assert_float_eq(mz_schedule_lr(&s, 7.0, 10), 9e-4, 1e-12);
  cr_assert_eq(mz_schedule_lr(&s, 7.0, 11), 0);
  s.type = MZ_SCHED_WARMUP_COSINE;
  s.cos_min_ratio = 0.5;
  cr_assert_float_eq(mz_schedule_lr(&s, 1e-3, 11), 5e-4, 1e-12);
}

Test(schedule, warmup_starts_at_the_minimum)
{
  mz_scheduler_config_t s = {.type = MZ_SCHED_WARMUP,
                             .warmup_min_lr = 2e-4,
                             .warmup_max_lr = 1e-3,
                             .warmup_num_steps = 4,
                             .warmup_type = MZ_WARMUP_LINEAR};
  cr_assert_eq(mz_schedule_lr(&s, 7.0, 0), 2e-4);
  cr_assert_eq(mz_schedule_lr(&s, 7.0, 1), 2e-4);
  cr_assert_float_eq(mz_schedule_lr(&s, 7.0, 3), 6e-4, 1e-12);
}

/* ln 1 is 0: one warm-up step counts as two, as in DeepSpeed. */
Test(schedule, one_warmup_step_counts_as_two)
{
  mz_scheduler_config_t s = {.type = MZ_SCHED_WARMUP,
                             .warmup_max_lr = 1e-3,
                             .warmup_num_steps = 1,
                             .warmup_type = MZ_WARMUP_LOG};
  cr_assert_eq(mz_schedule_lr(&s, 7.0, 1), 0);
  cr_assert_float_eq(mz_schedule_lr(&s, 7.0, 2), 1e-3, 1e-12);
}

Test(schedule, constant_is_the_optimizers_rate)
{
  mz_scheduler_config_t s = {.type = MZ_SCHED_CONSTANT,
                             .warmup_max_lr = 1e-3,
                             .warmup_num_steps = 10,
                             .warmup_type = MZ_WARMUP_LOG};
  cr_assert_eq(mz_schedule_lr(&s, 3e-3, 0), 3e-3);
  cr_assert_eq(mz_schedule_lr(&s, 3e-3, INT64_MAX), 3e-3);
}
