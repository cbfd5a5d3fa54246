/* SPDX-License-Identifier: Apache-2.0 */
/* Known failures of other frameworks whose right numbers are known: statistics
 * of the gate, tokens beyond an expert's capacity, ranks without labels, MPI
 * calls of few elements, and evaluation and saves in the midst of training. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <stdio.h>

static char output[1 << 15];

static void expect_run(int ranks, const char *program, const char *args)
{
  int code = mz_test_mpirun(ranks, program, args, 60, output, sizeof output);

  cr_assert_eq(code, 0, "%s %s on %d ranks: exit code %d\n%s", program, args,
               ranks, code, output);
}

/* With the communication thread and without. */
static void expect_right(int ranks, const char *program, const char *name)
{
  char path[64], args[64];

  snprintf(path, sizeof path, "tests/ranks/%s", program);
  expect_run(ranks, path, name);
  snprintf(args, sizeof args, "%s inline", name);
  expect_run(ranks, path, args);
}

Test(numbers, counts_and_losses_of_the_gate_are_the_published_ones)
{
  expect_right(2, "rank_numbers", "losses");
}

Test(numbers, tokens_beyond_the_capacity_get_nothing_and_give_nothing)
{
  expect_right(1, "rank_drops", "");
  expect_right(2, "rank_drops", "");
}

Test(numbers, a_rank_without_labels_changes_neither_loss_nor_gradient)
{
  expect_right(2, "rank_numbers", "masked");
}

Test(numbers, training_does_not_see_evaluations)
{
  expect_right(2, "rank_numbers", "eval");
}
