/* SPDX-License-Identifier: Apache-2.0 */
/* The tutorial's program on 1, 2 and 4 ranks. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NUM_LOSSES = 7 }; /* steps 1, 10, 20, ..., 60 */

typedef struct outcome {
  double loss[NUM_LOSSES];
  double gradient; /* how far it is off */
  double accuracy, baseline;
} outcome_t;

static void run(int ranks, const char *args, outcome_t *o)
{
  char output[4096], *line;
  int code =
      mz_test_mpirun(ranks, "apps/own_model", args, 60, output, sizeof output);

  cr_assert_eq(code, 0, "%d ranks: exit %d: %s", ranks, code, output);
  line = strstr(output, "gradient of bridge");
  cr_assert(line &&
            sscanf(line, "gradient of bridge: off by %lf", &o->gradient) == 1);
  for (int i = 0; i < NUM_LOSSES; i++) {
    int step;

    line = strstr(line + 1, "\nstep ");
    cr_assert(line, "%s", output);
    cr_assert_eq(sscanf(line, " step %d loss %lf", &step, &o->loss[i]), 2);
    cr_assert_eq(step, i == 0 ? 1 : 10 * i);
  }
  line = strstr(line, "\naccuracy");
  cr_assert(line && sscanf(line, " accuracy %lf, baseline %lf", &o->accuracy,
                           &o->baseline) == 2);
  cr_assert(strstr(line, "\nmoe.experts.3.up.weight [168, 84] root mean"));
}

static void expect_same(const outcome_t *a, const outcome_t *b)
{
  for (int i = 0; i < NUM_LOSSES; i++)
    cr_expect_lt(fabs(a->loss[i] - b->loss[i]), 1e-5 * a->loss[i],
                 "loss %d: %.8f and %.8f", i, a->loss[i], b->loss[i]);
}

Test(tutorial, own_model_learns_alike_on_1_2_and_4_ranks)
{
  outcome_t one, more;

  run(1, "", &one);
  cr_expect_gt(one.gradient, 0);
  cr_expect_lt(one.gradient, 2e-3);
  cr_expect_gt(one.accuracy, 0.8);
  cr_expect_gt(one.accuracy, 4 * one.baseline);
  cr_expect_gt(one.baseline, 0.1); /* ten classes: the most frequent one */
  run(2, "", &more);
  expect_same(&one, &more);
  run(4, "", &more);
  expect_same(&one, &more);
  run(2,
      "zero_optimization.stage=3 "
      "zero_optimization.stage3_param_persistence_threshold=0",
      &more);
  expect_same(&one, &more);
}

Test(tutorial, own_model_names_what_is_wrong)
{
  char output[4096];

  cr_expect_eq(mz_test_mpirun(2, "apps/own_model", "train_batch_size=63", 60,
                              output, sizeof output),
               1);
  cr_expect(strstr(output, "own_model: batch: train_batch_size 63 is not"),
            "%s", output);
}
