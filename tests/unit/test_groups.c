/* SPDX-License-Identifier: Apache-2.0 */
/* Parameter groups in a running engine, and on any layout. */
#include "mpirun.h"

#include <criterion/criterion.h>

static void expect_good(int ranks, const char *program, const char *args)
{
  char output[16384];
  int code = mz_test_mpirun(ranks, program, args, 120, output, sizeof output);

  cr_assert_eq(code, 0, "%s: exit code %d\n%s", args, code, output);
}

Test(groups, each_number_reaches_its_tensors_and_no_other)
{
  expect_good(1, "tests/ranks/rank_groups", "");
  expect_good(4, "tests/ranks/rank_groups",
              "zero_optimization.stage=3 moe.ep_size=2");
}

/* Experts of one layer in different groups, whose order in a unit differs. */
Test(groups, any_layout_equals_one_rank)
{
  expect_good(4, "tests/ranks/rank_layouts",
              "cover optimizer.params.weight_decay=0.01 train.seed=5 "
              "'optimizer.param_groups=[{\"pattern\":\"*experts.[13].*bias\","
              "\"lr\":1e-4},{\"experts\":false,\"pattern\":\"*bias\","
              "\"weight_decay\":0.1,\"betas\":[0.8,0.99]},"
              "{\"pattern\":\"h.0.*\",\"eps\":1e-3}]'");
}
