/* SPDX-License-Identifier: Apache-2.0 */
/* A small checkpoint of four ranks in a folder of its own, for tests of what
 * reads it: tests/ranks/rank_save.c says what is in it. */
#ifndef MZ_TEST_SAMPLE_H
#define MZ_TEST_SAMPLE_H

#include "mpirun.h"

#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SAMPLE_PATH = 128, SAMPLE_TEXT = 8192 };

/* Runs a program of tests/ranks, which must succeed. */
static inline void run_ranks(int ranks, const char *program, int timeout_s,
                             const char *format, ...)
{
  char args[1024], output[SAMPLE_TEXT];
  va_list list;
  int code;

  va_start(list, format);
  vsnprintf(args, sizeof args, format, list);
  va_end(list);
  code = mz_test_mpirun(ranks, program, args, timeout_s, output, sizeof output);
  cr_assert_eq(code, 0, "%s %s: exit code %d\n%s", program, args, code, output);
}

static inline void make_folder(char folder[SAMPLE_PATH])
{
  snprintf(folder, SAMPLE_PATH, "/tmp/mz-checkpoint-XXXXXX");
  cr_assert_not_null(mkdtemp(folder));
}

static inline void remove_folder(const char *folder)
{
  char command[SAMPLE_PATH + 16];

  snprintf(command, sizeof command, "rm -rf '%s'", folder);
  cr_assert_eq(system(command), 0);
}

/* FOLDER/c with steps 1 and 2 of @p ranks ranks. */
static inline void make_sample(char folder[SAMPLE_PATH], int ranks)
{
  make_folder(folder);
  run_ranks(ranks, "tests/ranks/rank_save", 60, "write %s/c 1", folder);
  run_ranks(ranks, "tests/ranks/rank_save", 60, "write %s/c 2", folder);
}

/* Runs a shell command; returns its exit code and what it printed. */
static inline int shell(char output[SAMPLE_TEXT], const char *format, ...)
{
  char command[2048];
  va_list list;
  FILE *pipe;
  size_t got;
  int status;

  va_start(list, format);
  vsnprintf(command, sizeof command, format, list);
  va_end(list);
  pipe = popen(command, "r");
  cr_assert_not_null(pipe);
  got = fread(output, 1, SAMPLE_TEXT - 1, pipe);
  output[got] = '\0';
  status = pclose(pipe);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#endif
