/* SPDX-License-Identifier: Apache-2.0 */
/* Layout does not matter: TINY in fp32, dropless, 10 steps on a global batch
 * equals one rank with the same micro-batches, in loss, gradient norm and every
 * parameter (relative 1e-5), for any ranks, ep_size, ZeRO stage and
 * accumulation, with the communication thread and inline. Every start of mpirun
 * runs many layouts. tests/soak/layouts.sh runs all of them on every variant;
 * here the plain one, and of the variants a covering set. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <stdio.h>

/* ZeRO-3 with runs of a few tensors that are gathered again for each use. */
#define TIGHT                                                                  \
  "zero_optimization.stage3_max_reuse_distance=0 "                             \
  "zero_optimization.stage3_prefetch_bucket_size=0 "                           \
  "zero_optimization.stage3_param_persistence_threshold=0 "

#define LIVE "zero_optimization.stage3_max_live_parameters="

static void expect_equal(int ranks, const char *args)
{
  char output[16384];
  int code = mz_test_mpirun(ranks, "tests/ranks/rank_layouts", args, 180,
                            output, sizeof output);

  cr_assert_eq(code, 0, "%s: exit code %d\n%s", args, code, output);
  cr_log_info("%s", output);
}

Test(layouts, every_layout_of_4_ranks_equals_one_rank)
{
  expect_equal(4, "all comm.thread=true -- comm.thread=false");
}

Test(layouts, three_ranks_equal_one_rank_with_a_batch_of_6)
{
  expect_equal(3, "cover batch=6 experts=6 -- batch=6 experts=6 "
                  "moe.saved_rows=0.25 -- batch=6 experts=4 seed=1 "
                  "moe.aux_loss=load_balancing moe.aux_loss_coef=0.01");
}

Test(layouts, equal_with_tied_embedding_clipping_and_dropout)
{
  expect_equal(4, "cover model.tie_word_embeddings=true -- "
                  "gradient_clipping=0.5 -- model.dropout=0.1 -- "
                  "model.tie_word_embeddings=true gradient_clipping=0.5 "
                  "model.dropout=0.1");
}

Test(layouts, equal_with_auxiliary_losses_of_the_group)
{
  expect_equal(4,
               "cover moe.aux_loss=load_balancing moe.aux_loss_coef=0.01 "
               "-- seed=1 moe.z_loss_coef=0.01 -- moe.aux_loss=load_balancing "
               "moe.aux_loss_coef=0.01 moe.z_loss_coef=0.001 "
               "moe.saved_rows=0.25 moe.k=1");
}

Test(layouts, equal_with_other_balance_losses)
{
  expect_equal(4, "cover moe.aux_loss=first_choice moe.aux_loss_coef=0.05 -- "
                  "moe.aux_loss=squared moe.aux_loss_coef=1 -- "
                  "moe.bias_update_rate=0.01 -- moe.aux_loss=squared "
                  "moe.aux_loss_coef=1 moe.score=sigmoid");
}

/* Random numbers are counted in the global batch. */
Test(layouts, equal_with_noise_of_the_gate_and_a_temperature)
{
  expect_equal(4, "cover moe.gate_noise=0.1 moe.temperature=1.3 -- moe.k=1 "
                  "moe.noisy_gate_policy=RSample -- "
                  "moe.top2_2nd_expert_sampling=true -- moe.score=sigmoid "
                  "moe.bias_update_rate=0.01 "
                  "'moe.temperature={\"start\":2,\"end\":0.5,\"steps\":8}'");
}

/* A capacity is of a rank's tokens, so the number of ranks is one. */
#define DROPS "same_ranks moe.drop_tokens=true moe.capacity_factor=0.75 "

Test(layouts, equal_with_random_selection_on_any_ep_size_and_stage)
{
  expect_equal(4,
               "cover " DROPS "moe.k=1 -- " DROPS "moe.use_rts=true -- " DROPS
               "moe.use_rts=true moe.gate_noise=0.1 moe.k=3 -- " DROPS
               "moe.expert_capacity=3 moe.use_rts=true "
               "moe.bias_update_rate=0.01");
}

/* A dense map beside the experts, a pyramid of them, groups of two sizes. */
Test(layouts, equal_with_other_shapes_of_the_layer)
{
  expect_equal(4, "cover moe.use_residual=true model.dropout=0.1 "
                  "moe.gate_noise=0.1 debug.poison=true -- "
                  "moe.num_shared_experts=2 moe.num_experts=[4,8] "
                  "moe.saved_rows=0.25 moe.overlap_chunks=2 -- "
                  "ep_of_last moe.num_shared_experts=1 "
                  "moe.shared_expert_gate=true model.architecture=llama "
                  "model.num_key_value_heads=1 model.dropout=0.1 -- ep_of_last "
                  "moe.num_experts=[4,8] moe.use_residual=true "
                  "use_data_before_expert_parallelism=true -- " DROPS
                  "moe.use_residual=true moe.k=1 moe.use_rts=true "
                  "moe.gate_noise=0.1 model.dropout=0.1 -- " DROPS
                  "moe.num_experts=[4,8] moe.num_shared_experts=1 "
                  "moe.shared_expert_gate=true moe.use_rts=true "
                  "model.dropout=0.1");
}

Test(layouts, an_expert_of_the_application_may_be_any_map_of_equal_widths)
{
  char output[16384];
  int code = mz_test_mpirun(4, "tests/ranks/rank_own_expert", "", 60, output,
                            sizeof output);

  cr_assert_eq(code, 0, "exit code %d\n%s", code, output);
  cr_log_info("%s", output);
}

Test(layouts, equal_whether_rows_are_saved_or_sent_again)
{
  expect_equal(4, "cover moe.saved_rows=0.25 -- moe.saved_rows=8 -- "
                  "moe.saved_rows=0.25 moe.overlap_chunks=2 -- "
                  "moe.saved_rows=8 moe.overlap_chunks=2");
}

Test(layouts, equal_with_other_models)
{
  expect_equal(4, "cover moe.num_experts=[4,8] -- model.architecture=llama "
                  "model.num_key_value_heads=1 -- moe.num_experts=[8,4] "
                  "moe.layers=[0,1] moe.k=3");
}

Test(layouts, equal_with_small_pieces_and_buckets)
{
  expect_equal(4, "cover comm.piece_bytes=4096 -- "
                  "zero_optimization.reduce_bucket_size=3000 "
                  "zero_optimization.allgather_bucket_size=2000 -- " TIGHT
                  "-- " TIGHT
                  "zero_optimization.stage3_max_live_parameters=60000");
}

Test(layouts, equal_with_poison_and_other_orders_and_limits)
{
  expect_equal(4, "cover debug.poison=true -- "
                  "debug.poison=true moe.saved_rows=0.25 -- "
                  "use_data_before_expert_parallelism=true -- "
                  "debug.count_limit=7");
}

#define FOUR(x) x "," x "," x "," x
#define TO_FIRST "moe.k=1 debug.route_table=[" FOUR(FOUR("0,0,0,0")) "]"
#define TO_TWO "moe.k=1 debug.route_table=[" FOUR(FOUR("0,1,1,0")) "]"

/* One expert, all experts chosen, all tokens to one expert, and experts of the
 * later ranks without a token. E = ep is among the plain layouts. */
Test(layouts, equal_at_the_edges_of_routing)
{
  expect_equal(4, "cover experts=1 moe.k=1 -- moe.k=4 -- " TO_FIRST
                  " -- " TO_TWO " -- moe.saved_rows=0.25 " TO_FIRST);
}

static void expect_pools(int ranks, const char *args)
{
  char output[16384];
  int code = mz_test_mpirun(ranks, "tests/ranks/rank_pools", args, 60, output,
                            sizeof output);

  cr_assert_eq(code, 0, "%s: exit code %d\n%s", args, code, output);
  cr_log_info("%s", output);
}

Test(layouts, gradients_are_equal_whatever_the_pool)
{
  expect_pools(1, "moe.aux_loss=load_balancing moe.aux_loss_coef=0.01");
  expect_pools(4, "moe.ep_size=4 zero_optimization.stage=3");
  expect_pools(4, "moe.ep_size=2 zero_optimization.stage=2 " TO_FIRST);
  expect_pools(1, "ragged gradient_accumulation_steps=4 train_batch_size=16 "
                  "moe.k=2");
  expect_pools(2, "ragged gradient_accumulation_steps=4 train_batch_size=32 "
                  "moe.k=2 moe.ep_size=2 model.architecture=llama");
}

/* As with an MPI that does not take a GPU's memory. */
Test(layouts, equal_with_messages_through_host_memory)
{
  expect_equal(4, "cover debug.staged=true -- "
                  "debug.staged=true moe.saved_rows=0.25 "
                  "moe.overlap_chunks=2 -- debug.staged=true "
                  "debug.count_limit=7");
}

/* From one unit at a time to all but a few; what is gone is poisoned. */
Test(layouts, equal_with_any_room_for_gathered_weights)
{
  expect_equal(4,
               "cover debug.poison=true " LIVE "5120 -- debug.poison=true " LIVE
               "15000 zero_optimization.stage3_prefetch_bucket_size="
               "6000 -- debug.poison=true " LIVE "40000 comm.thread=false "
               "zero_optimization.stage3_max_reuse_distance=9000 "
               "zero_optimization.stage3_param_persistence_threshold=0");
}
