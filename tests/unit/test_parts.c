/* SPDX-License-Identifier: Apache-2.0 */
/* wall_clock_breakdown: where the time of a step goes. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <stdio.h>

static void expect_run(int ranks, const char *program, const char *args)
{
  static char output[1 << 15];
  int code = mz_test_mpirun(ranks, program, args, 120, output, sizeof output);

  cr_assert_eq(code, 0, "%s %s on %d ranks: exit code %d\n%s", program, args,
               ranks, code, output);
}

/* On 1 and 2 ranks, with the communication thread and without. */
static void expect_right(const char *name)
{
  char args[64];

  snprintf(args, sizeof args, "%s inline", name);
  for (int ranks = 1; ranks <= 2; ranks++) {
    expect_run(ranks, "tests/ranks/rank_parts", name);
    expect_run(ranks, "tests/ranks/rank_parts", args);
  }
}

Test(parts, are_those_of_the_model_and_add_up_to_the_step)
{
  expect_right("add");
}

Test(parts, change_no_bit_and_are_none_without_the_key)
{
  expect_right("same");
}

Test(parts, of_messages_hold_their_delay) { expect_right("delay"); }
