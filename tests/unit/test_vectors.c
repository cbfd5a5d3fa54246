/* SPDX-License-Identifier: Apache-2.0 */
/* apps/vector_moe on 1, 2 and 4 ranks. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NUM_LOSSES = 9 }; /* steps 1, 20, 40, ..., 160 */

typedef struct outcome {
  double loss[NUM_LOSSES];
  double accuracy, baseline;
} outcome_t;

static char folder[64], output[1 << 14];

static void make_folder(void)
{
  strcpy(folder, "/tmp/mz-test-vectors-XXXXXX");
  cr_assert_not_null(mkdtemp(folder));
}

static void remove_folder(void)
{
  char command[128];

  snprintf(command, sizeof command, "rm -rf %s", folder);
  cr_assert_eq(system(command), 0);
}

TestSuite(vectors, .init = make_folder, .fini = remove_folder);

static int start(int ranks, const char *more)
{
  char args[256];

  snprintf(args, sizeof args, "%s/vectors.h5 %s", folder, more);
  return mz_test_mpirun(ranks, "apps/vector_moe", args, 60, output,
                        sizeof output);
}

static void run(int ranks, const char *more, outcome_t *o)
{
  int code = start(ranks, more);
  const char *line = output;

  cr_assert_eq(code, 0, "%d ranks: exit %d: %s", ranks, code, output);
  for (int i = 0; i < NUM_LOSSES; i++) {
    int step;

    line = strstr(line + (i > 0), "step ");
    cr_assert(line, "%s", output);
    cr_assert_eq(sscanf(line, "step %d loss %lf", &step, &o->loss[i]), 2);
    cr_assert_eq(step, i == 0 ? 1 : 20 * i);
  }
  line = strstr(line, "accuracy");
  cr_assert(line && sscanf(line, "accuracy %lf, majority baseline %lf",
                           &o->accuracy, &o->baseline) == 2,
            "%s", output);
}

static void expect_same(const outcome_t *a, const outcome_t *b)
{
  for (int i = 0; i < NUM_LOSSES; i++)
    cr_expect_lt(fabs(a->loss[i] - b->loss[i]), 1e-5 * a->loss[i],
                 "loss %d: %.8f and %.8f", i, a->loss[i], b->loss[i]);
  cr_expect_eq(a->accuracy, b->accuracy);
}

Test(vectors, are_told_apart_alike_on_1_2_and_4_ranks)
{
  outcome_t one, more;

  run(1, "", &one);
  cr_expect_geq(one.accuracy, 0.9);
  cr_expect(one.baseline > 0.1 && one.baseline < 0.3, "baseline %g",
            one.baseline);
  run(2, "", &more); /* ep_size 2 */
  expect_same(&one, &more);
  run(4, "", &more); /* the same, twice */
  expect_same(&one, &more);
  run(4,
      "zero_optimization.stage=3 "
      "zero_optimization.stage3_param_persistence_threshold=0",
      &more);
  expect_same(&one, &more);
}

/* The task wants experts: one of them is a linear map. */
Test(vectors, are_not_told_apart_by_one_expert)
{
  outcome_t one;

  run(1, "experts=1", &one);
  cr_expect_lt(one.accuracy, one.baseline + 0.2);
}

Test(vectors, of_a_file_that_is_none_are_refused)
{
  char path[128];
  FILE *file;

  snprintf(path, sizeof path, "%s/vectors.h5", folder);
  file = fopen(path, "w");
  cr_assert_not_null(file);
  fputs("no HDF5\n", file);
  fclose(file);
  cr_expect_eq(start(2, ""), 1, "%s", output);
  cr_expect(strstr(output, "vector_moe: "), "%s", output);
  cr_expect(strstr(output, "vectors.h5: cannot open it"), "%s", output);
  cr_expect_eq(access(path, F_OK), 0);
}
