/* SPDX-License-Identifier: Apache-2.0 */
/* Steps whose waits are a stream's, on a device whose work is done later, in
 * the place of a GPU (tests/ranks/late_device.h). */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <string.h>

static char output[16384];

static void run_program(const char *program, int ranks, const char *args)
{
  int code = mz_test_mpirun(ranks, program, args, 120, output, sizeof output);

  cr_assert_eq(code, 0, "%d ranks, %s: exit code %d\n%s", ranks, args, code,
               output);
}

static void run(int ranks, const char *args)
{
  run_program("tests/ranks/rank_stream", ranks, args);
}

/* Against a CPU rank. */
static void run_late(int ranks, const char *args)
{
  run_program("tests/ranks/rank_late", ranks, args);
}

Test(stream, bits_are_those_of_a_waiting_host)
{
  run(2, "");
  run(3, "4");
}

/* Many experts are many launches. */
Test(stream, launches_of_many_experts_find_room)
{
  run_late(4, "moe.num_experts=64 comm.wait=stream "
              "model.initializer_range=0.2");
}

/* Whoever waits: what travels ahead of the experts leaves
 * when it is there, and nothing is written that still travels. */
Test(stream, runs_that_overlap_have_the_bits_of_one_run)
{
  run_late(2, "overlap moe.num_experts=8 moe.saved_rows=0.25 "
              "model.initializer_range=0.2 debug.poison=true");
  run_late(2, "overlap moe.num_experts=8 comm.wait=stream "
              "model.initializer_range=0.2 debug.poison=true");
  run_late(2, "overlap moe.num_experts=8 comm.wait=stream "
              "model.architecture=llama model.num_key_value_heads=1 "
              "model.initializer_range=0.2 debug.poison=true");
}

Test(stream, one_rank_waits_for_nobody) { run(1, "2"); }

Test(stream, no_wait_hangs_with_4_ranks_one_late_at_random)
{
  run(4, "12 moe.drop_tokens=true model.dropout=0.1 gradient_clipping=0.1");
}

Test(stream, rounds_and_pieces_find_their_arrays_free)
{
  run(2, "4 moe.saved_rows=0.25 moe.overlap_chunks=2 comm.piece_bytes=4096 "
         "train_micro_batch_size_per_gpu=2");
}

/* The stream of rank 0 waits for what rank 1 does not send. */
Test(stream, ends_when_another_rank_stands_still)
{
  int code = mz_test_mpirun(2, "tests/ranks/rank_stream",
                            "4 comm.wait=stream train.watchdog_s=1 "
                            "debug.fault=stall:rank1:step3",
                            60, output, sizeof output);

  cr_assert_eq(code, 7, "exit code %d\n%s", code, output);
  cr_expect(strstr(output, "rank 1 is late"), "%s", output);
}

Test(stream, all_ranks_end_a_step_that_one_failed_in)
{
  int code = mz_test_mpirun(
      2, "tests/ranks/rank_stream",
      "4 comm.wait=stream moe.ep_size=2 zero_optimization.stage=3 "
      "debug.fault=oom:rank1:step3",
      60, output, sizeof output);

  cr_assert_eq(code, 7, "exit code %d\n%s", code, output);
  cr_expect(strstr(output, "verdict of 0: "), "%s", output);
  cr_expect(strstr(output, "no memory (debug.fault"), "%s", output);
}
