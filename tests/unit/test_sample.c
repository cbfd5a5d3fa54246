/* SPDX-License-Identifier: Apache-2.0 */
/* The next token, worked by hand. */
#include "train/sample.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

static int32_t draw(double temperature, double top_p, int32_t num,
                    const float *logits, double u)
{
  mz_sample_opts_t opts = {temperature, top_p};
  mz_choice_t scratch[8];
  int32_t token = -1;

  cr_assert_eq(mz_sample(&opts, num, logits, u, scratch, &token), MZ_OK, "%s",
               mz_error_last());
  return token;
}

Test(sample, temperature_0_takes_the_largest_and_of_equal_ones_the_first)
{
  const float logits[] = {-1, 2, 0.5F, 2, -INFINITY};

  cr_expect_eq(draw(0, 1, 5, logits, 0.999), 1);
  cr_expect_eq(draw(0, 1, 1, logits, 0), 0);
}

/* p = 1/8, 2/8, 5/8: in order of falling p the sums are 5/8, 7/8, 1. */
Test(sample, follows_the_probabilities)
{
  const float logits[] = {0, logf(2), logf(5)};

  cr_expect_eq(draw(1, 1, 3, logits, 0), 2);
  cr_expect_eq(draw(1, 1, 3, logits, 0.62), 2);
  cr_expect_eq(draw(1, 1, 3, logits, 0.63), 1);
  cr_expect_eq(draw(1, 1, 3, logits, 0.87), 1);
  cr_expect_eq(draw(1, 1, 3, logits, 0.88), 0);
  cr_expect_eq(draw(1, 1, 3, logits, 1 - 0x1p-32), 0);
}

/* At 0.8 the nucleus is 5/8 + 2/8; token 1 begins at u = 5/7 = 0.714. */
Test(sample, the_nucleus_is_the_fewest_that_reach_top_p)
{
  const float logits[] = {0, logf(2), logf(5)};

  cr_expect_eq(draw(1, 0.8, 3, logits, 0.71), 2);
  cr_expect_eq(draw(1, 0.8, 3, logits, 0.72), 1);
  cr_expect_eq(draw(1, 0.8, 3, logits, 0.9999), 1);
  cr_expect_eq(draw(1, 0.6, 3, logits, 0.9999), 2);
  cr_expect_eq(draw(1, 0, 3, logits, 0.9999), 2);
}

/* Four of 1/4 each: the first two reach 0.5 exactly. */
Test(sample, equal_probabilities_go_by_id)
{
  const float logits[] = {3, 3, 3, 3};

  cr_expect_eq(draw(1, 0.5, 4, logits, 0.49), 0);
  cr_expect_eq(draw(1, 0.5, 4, logits, 0.5), 1);
  cr_expect_eq(draw(1, 0.5, 4, logits, 0.9999), 1);
  cr_expect_eq(draw(1, 0.51, 4, logits, 0.9999), 2);
  cr_expect_eq(draw(1, 1, 4, logits, 0.75), 3);
}

/* p = 1/4, 3/4 becomes 1/10, 9/10 at 0.5 and (1, sqrt 3) / 2.73 at 2. */
Test(sample, temperature_divides_the_logits)
{
  const float logits[] = {0, logf(3)};

  cr_expect_eq(draw(0.5, 1, 2, logits, 0.89), 1);
  cr_expect_eq(draw(0.5, 1, 2, logits, 0.91), 0);
  cr_expect_eq(draw(2, 1, 2, logits, 0.63), 1);
  cr_expect_eq(draw(2, 1, 2, logits, 0.64), 0);
  cr_expect_eq(draw(1e-300, 1, 2, logits, 0.9999), 1);
}

Test(sample, minus_infinity_is_never_drawn)
{
  const float logits[] = {-INFINITY, 0, -INFINITY, 0};

  cr_expect_eq(draw(1, 1, 4, logits, 1 - 0x1p-32), 3);
  cr_expect_eq(draw(1, 1, 4, logits, 0), 1);
}

static void refused(const float *logits, const char *words)
{
  mz_sample_opts_t opts = {1, 1};
  mz_choice_t scratch[2];
  int32_t token = -1;

  cr_expect_eq(mz_sample(&opts, 2, logits, 0, scratch, &token), MZ_ERR_DATA);
  cr_expect(strstr(mz_error_message(), words), "%s", mz_error_message());
  cr_expect_eq(token, -1);
}

Test(sample, logits_that_are_not_numbers_are_named)
{
  const float none[] = {0, NAN}, high[] = {0, INFINITY},
              low[] = {-INFINITY, -INFINITY};

  refused(none, "token 1 is not a number");
  refused(high, "of token 1, is inf");
  refused(low, "of token 0, is -inf");
}

Test(sample, options_have_ranges)
{
  const mz_sample_opts_t good[] = {{0, 1}, {0.8, 0.9}, {5, 0}};
  const mz_sample_opts_t bad[] = {{-0.1, 1}, {NAN, 1},  {INFINITY, 1},
                                  {1, 1.1},  {1, -0.1}, {1, NAN}};

  for (size_t i = 0; i < sizeof good / sizeof *good; i++)
    cr_expect_eq(mz_sample_check(&good[i]), MZ_OK, "%zu", i);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    cr_expect_eq(mz_sample_check(&bad[i]), MZ_ERR_ARG, "%zu", i);
}
