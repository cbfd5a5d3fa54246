/* SPDX-License-Identifier: Apache-2.0 */
/* Two runs of one layout give the same bits, and so do messages pairwise and by
 * collectives, and the threaded and the inline queue; with a tuning table,
 * which is one on all ranks. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <stdio.h>

static void expect_same(int ranks, const char *program, const char *args)
{
  char output[16384];
  int code = mz_test_mpirun(ranks, program, args, 180, output, sizeof output);

  cr_assert_eq(code, 0, "%s: exit code %d\n%s", args, code, output);
  cr_log_info("%s", output);
}

Test(bits, repeat_in_both_forms_of_the_queue_on_4_ranks)
{
  expect_same(4, "tests/ranks/rank_bits",
              "-- moe.aux_loss=load_balancing moe.aux_loss_coef=0.01 "
              "model.dropout=0.1 gradient_clipping=0.5 "
              "model.tie_word_embeddings=true -- moe.saved_rows=0.25 "
              "moe.overlap_chunks=2");
}

/* Rows in one round, in several, and sent again. */
Test(bits, are_the_same_however_many_runs_overlap)
{
  expect_same(1, "tests/ranks/rank_bits",
              "overlap moe.num_experts=8 moe.saved_rows=0.25");
  expect_same(2, "tests/ranks/rank_bits",
              "overlap moe.num_experts=8 moe.saved_rows=1.0 -- overlap "
              "moe.num_experts=8 moe.saved_rows=0.25 debug.poison=true");
  expect_same(4, "tests/ranks/rank_bits",
              "overlap moe.num_experts=16 moe.saved_rows=0.25 "
              "debug.poison=true bf16.enabled=true");
}

Test(bits, repeat_with_a_tuning_table)
{
  expect_same(1, "tests/ranks/rank_tuning", "");
  expect_same(3, "tests/ranks/rank_tuning",
              "train_batch_size=6 zero_optimization.stage=3");
}

Test(bits, repeat_in_both_forms_of_the_queue_on_2_ranks)
{
  expect_same(2, "tests/ranks/rank_bits",
              "model.dropout=0.1 -- moe.saved_rows=0.25 "
              "comm.piece_bytes=4096 -- model.architecture=llama -- "
              "bf16.enabled=true "
              "model.dropout=0.1 -- bf16.enabled=true "
              "communication_data_type=fp32 moe.saved_rows=0.25");
}
