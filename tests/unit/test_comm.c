/* SPDX-License-Identifier: Apache-2.0 */
/* The queue on 1 to 4 ranks, threaded and inline; what it says when one fails.
 */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdio.h>
#include <string.h>

struct form {
  int ranks;
  char args[16];
};

ParameterizedTestParameters(comm, messages_arrive_in_order_and_whole)
{
  static struct form forms[] = {
      {1, "thread 0"}, {2, "thread 0"}, {3, "thread 0"}, {4, "thread 0"},
      {1, "inline 0"}, {2, "inline 0"}, {3, "inline 0"}, {4, "inline 0"},
      {2, "thread 7"}, {3, "inline 7"}, {4, "thread 7"}, {3, "pairwise 0"}};

  return cr_make_param_array(struct form, forms, sizeof forms / sizeof *forms);
}

ParameterizedTest(struct form *f, comm, messages_arrive_in_order_and_whole)
{
  char output[16384];
  int code = mz_test_mpirun(f->ranks, "tests/ranks/rank_comm", f->args, 120,
                            output, sizeof output);

  cr_assert_eq(code, 0, "%d ranks, %s: exit code %d\n%s", f->ranks, f->args,
               code, output);
}

Test(comm, no_message_overtakes_one_that_is_staged)
{
  static const char *const forms[] = {"thread", "inline"};

  for (int i = 0; i < 2; i++) {
    char output[4096];
    int code = mz_test_mpirun(2, "tests/ranks/rank_staged", forms[i], 60,
                              output, sizeof output);

    cr_assert_eq(code, 0, "%s: exit code %d\n%s", forms[i], code, output);
  }
}

static void run_watchdog(const char *args, int ranks, char *output,
                         size_t output_bytes)
{
  int code = mz_test_mpirun(ranks, "tests/ranks/rank_watchdog", args, 60,
                            output, output_bytes);

  cr_assert_eq(code, 7, "%s: exit code %d\n%s", args, code, output);
  cr_assert_null(strstr(output, "lives on"), "%s", output);
  cr_assert_null(strstr(output, "not destroyed"), "%s", output);
}

static void expect_verdict(const char *output, int rank, const char *text)
{
  char line[512];

  snprintf(line, sizeof line, "verdict of %d: %s", rank, text);
  cr_assert(strstr(output, line), "no line \"%s\" in\n%s", line, output);
}

static void expect_all(const char *args, int ranks, const char *text)
{
  char output[16384];

  run_watchdog(args, ranks, output, sizeof output);
  for (int r = 0; r < ranks; r++)
    expect_verdict(output, r, text);
}

/* Its thread still answers: a lower number. */
Test(watchdog, names_the_late_rank_and_its_place)
{
  expect_all("stall thread", 3,
             "another rank failed or is late: rank 2 is late: bulk lane at "
             "9, rank ");
}

Test(watchdog, names_the_rank_that_does_not_answer)
{
  expect_all("stall inline", 3,
             "another rank failed or is late: rank 2 does not answer");
}

Test(watchdog, also_ends_a_post_into_a_full_ring)
{
  expect_all("full thread", 2,
             "another rank failed or is late: rank 1 is late: bulk lane at "
             "9, rank 0 at 11");
}

static void expect_broken(const char *args, const char *status,
                          const char *text)
{
  char output[16384], line[512];

  run_watchdog(args, 2, output, sizeof output);
  snprintf(line, sizeof line, "%s: %s\n", status, text);
  expect_verdict(output, 1, line);
  snprintf(line, sizeof line,
           "another rank failed or is late: rank 1 failed: %s\n", text);
  expect_verdict(output, 0, line);
}

Test(failure, of_a_bind_is_told_to_the_others)
{
  expect_broken("broken thread", "invalid data", "no counts");
  expect_broken("broken inline", "invalid data", "no counts");
}

Test(failure, of_a_negative_count_names_it)
{
  expect_broken("negative inline", "invalid argument",
                "-1 elements from rank 0 of the group, 1 to it");
}

Test(failure, of_a_displacement_beyond_an_mpi_call_names_it)
{
  expect_broken("overflow thread", "number out of range",
                "2147483648 does not fit into a 32-bit integer");
}

/* A rank is as late as in the tests above, but may be: its disk is slow. */
Test(watchdog, waits_longer_while_it_is_stretched)
{
  const char *forms[] = {"patient thread", "patient inline"};
  char output[4096];

  for (int i = 0; i < 2; i++)
    cr_assert_eq(mz_test_mpirun(2, "tests/ranks/rank_watchdog", forms[i], 60,
                                output, sizeof output),
                 0, "%s: %s", forms[i], output);
}
