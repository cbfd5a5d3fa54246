/* SPDX-License-Identifier: Apache-2.0 */
/* Whole parameters between steps, read and changed on several layouts. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>

struct layout {
  int ranks;
  char args[160];
};

ParameterizedTestParameters(param, reads_and_changes_as_on_one_rank)
{
  static struct layout layouts[] = {
      {1, "comm.thread=false"},
      {2, "zero_optimization.stage=0 moe.ep_size=2"},
      {2, "zero_optimization.stage=1 comm.thread=false"},
      {4, "zero_optimization.stage=2 moe.ep_size=2"},
      {4, "zero_optimization.stage=3 moe.ep_size=2 debug.poison=true"},
      {4, "zero_optimization.stage=3 moe.ep_size=4 "
          "zero_optimization.stage3_param_persistence_threshold=0"},
  };

  return cr_make_param_array(struct layout, layouts,
                             sizeof layouts / sizeof *layouts);
}

ParameterizedTest(struct layout *l, param, reads_and_changes_as_on_one_rank)
{
  char output[16384];
  int code = mz_test_mpirun(l->ranks, "tests/ranks/rank_param", l->args, 60,
                            output, sizeof output);

  cr_assert_eq(code, 0, "%d ranks, %s: exit code %d\n%s", l->ranks, l->args,
               code, output);
}
