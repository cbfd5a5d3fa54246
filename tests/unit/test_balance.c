/* SPDX-License-Identifier: Apache-2.0 */
/* Balance by a bias, the temperature, and the capacities of training and
 * evaluation, on TINY under mpirun. */
#include "mpirun.h"

#include <criterion/criterion.h>

static void expect(int ranks, const char *what)
{
  char output[16384];
  int code = mz_test_mpirun(ranks, "tests/ranks/rank_balance", what, 60, output,
                            sizeof output);

  cr_assert_eq(code, 0, "%s: exit code %d\n%s", what, code, output);
}

Test(balance, biases_follow_the_counts_of_all_ranks_after_an_update)
{
  for (int ranks = 1; ranks <= 4; ranks *= 2)
    expect(ranks, "bias");
}

Test(balance, biases_take_two_thirds_of_the_variance_of_loads)
{
  expect(2, "variance");
}

Test(balance, temperature_goes_by_optimizer_steps) { expect(2, "temperature"); }

Test(balance, training_and_evaluation_have_capacities_of_their_own)
{
  for (int ranks = 1; ranks <= 4; ranks *= 2)
    expect(ranks, "capacity");
}
