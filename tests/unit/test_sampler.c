/* SPDX-License-Identifier: Apache-2.0 */
#include "data/sampler.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 1100 };

static void check_permutation(int64_t n, int64_t epoch)
{
  mz_sampler_t s = {1234, n};
  bool seen[MOST] = {false};

  for (int64_t i = 0; i < n; i++) {
    int64_t index = mz_sampler_index(&s, epoch * n + i);
    cr_assert(index >= 0 && index < n);
    cr_assert_not(seen[index], "n %d: sample %d twice", (int)n, (int)index);
    seen[index] = true;
  }
}

Test(sampler, an_epoch_takes_every_sample_once)
{
  const int64_t sizes[] = {1, 2, 3, 4, 5, 7, 16, 17, 64, 65, 1000, 1024, 1025};

  for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++)
    for (int64_t epoch = 0; epoch < 3; epoch++)
      check_permutation(sizes[k], epoch);
}

/* Samples left in place: a random permutation keeps one on average. */
static int64_t equal_places(const mz_sampler_t *a, int64_t first_a,
                            const mz_sampler_t *b, int64_t first_b, int64_t n)
{
  int64_t equal = 0;

  for (int64_t i = 0; i < n; i++)
    equal +=
        mz_sampler_index(a, first_a + i) == mz_sampler_index(b, first_b + i);
  return equal;
}

Test(sampler, epochs_and_seeds_have_orders_of_their_own)
{
  mz_sampler_t a = {1, 1000}, b = {2, 1000};

  cr_assert_leq(equal_places(&a, 0, &a, 1000, 1000), 10);
  cr_assert_leq(equal_places(&a, 0, &b, 0, 1000), 10);
  cr_assert_eq(equal_places(&a, 0, &a, 0, 1000), 1000);
}

/* The mean distance of neighbours in a random order of n is n / 3. */
Test(sampler, neighbours_are_far_apart)
{
  mz_sampler_t s = {7, 1000};
  int64_t sum = 0;

  for (int64_t i = 1; i < 1000; i++)
    sum += llabs(mz_sampler_index(&s, i) - mz_sampler_index(&s, i - 1));
  cr_assert(sum > 280 * 999 && sum < 390 * 999, "mean %g", (double)sum / 999);
}

/* Each of the 6 orders of 3 samples comes up about equally often. */
Test(sampler, small_sets_are_shuffled_evenly)
{
  mz_sampler_t s = {99, 3};
  int counts[9] = {0};

  for (int64_t epoch = 0; epoch < 6000; epoch++)
    counts[mz_sampler_index(&s, 3 * epoch) * 3 +
           mz_sampler_index(&s, 3 * epoch + 1)]++;
  for (int i = 0; i < 9; i++)
    cr_assert(i % 4 == 0 ? counts[i] == 0 : counts[i] > 850 && counts[i] < 1150,
              "order %d came up %d times of 6000", i, counts[i]);
}

Test(sampler, largest_sets_need_no_table)
{
  mz_sampler_t s = {5, INT64_C(1) << 62};
  int64_t a = mz_sampler_index(&s, 0), b = mz_sampler_index(&s, s.num_samples);

  cr_assert(a >= 0 && a < s.num_samples);
  cr_assert(b >= 0 && b < s.num_samples);
  cr_assert_neq(a, b);
}

/* The order is part of what a checkpoint means: it must not change. */
Test(sampler, order_is_fixed_for_all_time)
{
  mz_sampler_t s = {1234, 10};
  char order[11] = {0};

  for (int i = 0; i < 10; i++)
    order[i] = (char)('0' + mz_sampler_index(&s, i));
  cr_assert_str_eq(order, "3062148957");
}
