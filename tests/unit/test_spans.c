/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/kernels.h"

#include "base/alloc.h"

#include <criterion/criterion.h>
#include <string.h>
#include <time.h>

enum { PARTS = 2 + MZ_NUM_KERNELS, OWN = 1, FIRST = 2 };

static mz_device_t *cpu;
static mz_spans_t *spans;

static void open_cpu(void)
{
  cr_assert_eq(mz_device_open(MZ_BACKEND_CPU, 0, &cpu), MZ_OK);
  cr_assert_eq(mz_spans_create(cpu, PARTS, &spans), MZ_OK);
}

static void close_cpu(void)
{
  mz_spans_destroy(&spans);
  cr_assert_null(spans);
  mz_spans_destroy(&spans);
  mz_spans_destroy(NULL);
  mz_device_close(&cpu);
}

TestSuite(spans, .init = open_cpu, .fini = close_cpu);

static double now_ms(void)
{
  struct timespec t;

  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static void sleep_ms(long ms)
{
  struct timespec t = {ms / 1000, ms % 1000 * 1000000};

  nanosleep(&t, NULL);
}

static double sum_of(const mz_span_sum_t *sums)
{
  double sum = 0;

  for (int i = 0; i < PARTS; i++)
    sum += sums[i].ms;
  return sum;
}

Test(spans, timers_tell_milliseconds_between_marks)
{
  mz_timer_t from, to;
  double ms, begin, outside;

  cr_assert_eq(mz_timer_create(cpu, &from), MZ_OK);
  cr_assert_eq(mz_timer_create(cpu, &to), MZ_OK);
  begin = now_ms();
  cr_assert_eq(mz_timer_mark(cpu, from, cpu->stream), MZ_OK);
  sleep_ms(20);
  cr_assert_eq(mz_timer_mark(cpu, to, cpu->stream), MZ_OK);
  outside = now_ms() - begin;
  cr_assert_eq(mz_timer_elapsed(cpu, from, to, &ms), MZ_OK);
  cr_assert(ms >= 20 && ms <= outside, "%g ms, from outside %g", ms, outside);
  mz_timer_destroy(cpu, from);
  mz_timer_destroy(cpu, to);
  mz_timer_destroy(cpu, NULL);
}

Test(spans, a_mark_ends_one_part_and_begins_another)
{
  const mz_span_sum_t *sums;

  cr_assert_eq(mz_spans_begin(spans), MZ_OK);
  sleep_ms(10);
  cr_assert_eq(mz_spans_mark(spans, OWN), MZ_OK);
  sleep_ms(20);
  cr_assert_eq(mz_spans_mark(spans, MZ_SPAN_GAPS), MZ_OK);
  cr_assert_eq(mz_spans_mark(spans, OWN), MZ_OK);
  sleep_ms(5);
  cr_assert_eq(mz_spans_take(spans, &sums), MZ_OK);
  cr_assert(sums[MZ_SPAN_GAPS].ms >= 10);
  cr_assert(sums[OWN].ms >= 25);
  cr_assert_eq(sums[OWN].num, 2);
  cr_assert_eq(sums[FIRST].num, 0);
}

/* Far more marks than are kept: the oldest are read in between. */
Test(spans, of_any_number_add_up_to_the_time_from_begin_to_take)
{
  const mz_span_sum_t *sums;
  double begin = now_ms(), inside, outside;

  cr_assert_eq(mz_spans_begin(spans), MZ_OK);
  inside = now_ms();
  for (int i = 0; i < 10000; i++) {
    cr_assert_eq(mz_spans_mark(spans, OWN), MZ_OK);
    cr_assert_eq(mz_spans_mark(spans, MZ_SPAN_GAPS), MZ_OK);
  }
  inside = now_ms() - inside;
  cr_assert_eq(mz_spans_take(spans, &sums), MZ_OK);
  outside = now_ms() - begin;
  cr_assert_eq(sums[OWN].num, 10000);
  cr_assert(sum_of(sums) >= inside - 1e-3 && sum_of(sums) <= outside + 1e-3,
            "%g ms, need %g to %g", sum_of(sums), inside, outside);
}

Test(spans, outside_of_begin_and_take_are_none)
{
  const mz_span_sum_t *sums;

  cr_assert_eq(mz_spans_mark(spans, OWN), MZ_OK);
  cr_assert_eq(mz_spans_begin(spans), MZ_OK);
  cr_assert_eq(mz_spans_mark(spans, OWN), MZ_OK);
  cr_assert_eq(mz_spans_begin(spans), MZ_OK);
  cr_assert_eq(mz_spans_take(spans, &sums), MZ_OK);
  cr_assert_eq(sums[OWN].num, 0);
  cr_assert_eq(mz_spans_mark(spans, OWN), MZ_OK);
  cr_assert_eq(sums[OWN].num, 0);
}

Test(spans, a_table_with_them_does_the_same_and_times_each_operation)
{
  mz_kernels_opts_t opts = {.device = cpu, .spans = spans};
  mz_kernels_t *kernels;
  const mz_span_sum_t *sums;
  float x[] = {1, 2, 3}, y[3] = {0};
  mz_convert_t convert = {.n = 3, .src = x, .dst = y};

  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_OK);
  cr_assert_str_eq(kernels->ops->name, "/cpu");
  cr_assert_eq(mz_spans_begin(spans), MZ_OK);
  mz_spans_operations(spans, FIRST);
  cr_assert_eq(kernels->ops->convert(kernels, &convert, NULL), MZ_OK);
  cr_assert_eq(kernels->ops->convert(kernels, &convert, NULL), MZ_OK);
  cr_assert_eq(mz_spans_take(spans, &sums), MZ_OK);
  cr_assert_eq(memcmp(x, y, sizeof x), 0);
  for (int op = 0; op < MZ_NUM_KERNELS; op++)
    cr_assert_eq(sums[FIRST + op].num, op == MZ_KERNEL_convert ? 2 : 0, "%s",
                 mz_kernel_name(op));
  cr_assert_gt(sums[FIRST + MZ_KERNEL_convert].ms, 0);
  cr_assert_eq(sums[MZ_SPAN_GAPS].num, 3);
  cr_assert_str_eq(mz_kernel_name(MZ_KERNEL_linear), "linear");
  cr_assert_str_eq(mz_kernel_name(MZ_KERNEL_convert), "convert");
  mz_kernels_destroy(&kernels);
}

Test(spans, memory_that_fails_leaves_nothing)
{
  mz_spans_t *none = spans;

  for (int n = 1; n <= 3; n++) {
    mz_alloc_fail_at(n);
    cr_assert_eq(mz_spans_create(cpu, PARTS, &none), MZ_ERR_NOMEM);
    cr_assert_null(none);
  }
  mz_alloc_fail_at(0);
}
