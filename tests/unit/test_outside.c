/* SPDX-License-Identifier: Apache-2.0 */
/* Memory and messages are as planned, by the counts of an observer that is
 * preloaded (tests/outside): nothing large is allocated after the warm pass,
 * what lives is the arena, the peak of the process is baseline + plan within
 * max(64 MiB, 0.5%), gathers and reductions are exact in calls and bytes for
 * each communicator, and token exchanges within the bound. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <stdio.h>

#define ZERO "zero_optimization."

static void expect_planned(int ranks, int steps, const char *variants)
{
  char args[4096], output[16384];
  int code;

  snprintf(args, sizeof args, "%s/tests/outside/liboutside.so %d %s",
           MZ_BUILD_ROOT, steps, variants);
  code = mz_test_mpirun(ranks, "tests/ranks/rank_outside", args, 240, output,
                        sizeof output);
  cr_assert_eq(code, 0, "%s: exit code %d\n%s", args, code, output);
  cr_log_info("%s", output);
}

/* Each list of words at each ZeRO stage, in one start. */
static void expect_stages(int ranks, const char *const *words, int num)
{
  char variants[4096];
  size_t at = 0;

  for (int i = 0; i < num; i++)
    for (int stage = 0; stage <= 3; stage++)
      at += (size_t)snprintf(variants + at, sizeof variants - at,
                             "%s%s " ZERO "stage=%d", at ? " -- " : "",
                             words[i], stage);
  cr_assert_lt(at, sizeof variants);
  expect_planned(ranks, 3, variants);
}

Test(outside, memory_and_messages_are_as_planned_on_4_ranks)
{
  static const char *const words[] = {
      "moe.ep_size=1",
      ("moe.ep_size=2 gradient_accumulation_steps=2 moe.num_shared_experts=1 "
       "moe.shared_expert_gate=true"),
      "moe.ep_size=4 moe.saved_rows=0.25"};

  expect_stages(4, words, 3);
}

Test(outside, memory_and_messages_are_as_planned_on_2_ranks)
{
  static const char *const words[] = {
      "moe.ep_size=2 model.tie_word_embeddings=true comm.thread=false "
      "moe.use_residual=true",
      "moe.aux_loss=load_balancing moe.aux_loss_coef=0.01 "
      "gradient_accumulation_steps=2"};

  expect_stages(2, words, 2);
}

Test(outside, memory_and_messages_are_as_planned_on_3_ranks)
{
  static const char *const words[] = {"train_batch_size=6"};

  expect_stages(3, words, 1);
}

Test(outside, memory_and_messages_are_as_planned_in_pieces)
{
  static const char *const words[] = {
      "moe.ep_size=2 comm.piece_bytes=4096 moe.num_experts=8 "
      "moe.overlap_chunks=4 moe.saved_rows=0.25",
      "moe.ep_size=2 debug.poison=true " ZERO
      "stage3_max_reuse_distance=0 " ZERO
      "stage3_param_persistence_threshold=0",
      "moe.ep_size=2 debug.count_limit=1000",
      "moe.ep_size=2 comm.messages=pairwise"};

  expect_stages(4, words, 4);
}

/* The kernels' workspace and the master weights are in the plan too. */
Test(outside, memory_and_messages_are_as_planned_in_bf16)
{
  static const char *const words[] = {
      "moe.ep_size=2 bf16.enabled=true",
      "communication_data_type=bf16 comm.piece_bytes=4096"};

  expect_stages(2, words, 2);
}

/* More than 1 GiB a rank, most of it in the embedding and the head. */
Test(outside, a_large_vocabulary_is_as_planned)
{
  expect_planned(2, 2,
                 "moe.ep_size=2 model.hidden_size=512 model.vocab_size=60000 "
                 "model.intermediate_size=1024 " ZERO "stage=0");
}

/* More than 1 GiB a rank, most of it in experts that ZeRO-3 shards. */
Test(outside, large_experts_are_as_planned)
{
  expect_planned(2, 2,
                 "model.hidden_size=512 moe.num_experts=8 "
                 "moe.expert_intermediate_size=4864 " ZERO "stage=3");
}
