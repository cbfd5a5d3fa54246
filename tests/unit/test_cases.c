/* SPDX-License-Identifier: Apache-2.0 */
/* Known failures of other frameworks, as cases on real ranks: experts that one
 * rank uses alone, ragged batches, gradients and norms over layouts, updates of
 * shards, numbers that do not divide, and ranks that fail. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <ctype.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void expect_run(int ranks, const char *program, const char *args)
{
  char path[128], output[16384];
  int code;

  snprintf(path, sizeof path, "tests/ranks/%s", program);
  code = mz_test_mpirun(ranks, path, args, 60, output, sizeof output);
  cr_assert_eq(code, 0, "%s %s: exit code %d\n%s", program, args, code, output);
  cr_log_info("%s", output);
}

/* With the communication thread and without. */
static void expect_right(int ranks, const char *program, const char *args)
{
  char with_word[256];

  expect_run(ranks, program, args);
  snprintf(with_word, sizeof with_word, "%s inline", args);
  expect_run(ranks, program, with_word);
}

Test(cases, an_expert_used_on_one_rank_only_stops_nothing)
{
  expect_right(2, "rank_cases", "routes");
}

Test(cases, ranks_of_different_length_have_one_capacity)
{
  expect_right(2, "rank_cases", "ragged");
}

Test(cases, a_rank_of_the_experts_without_a_token_stops_nothing)
{
  expect_right(2, "rank_cases", "empty");
}

Test(cases, a_step_that_failed_on_one_rank_changes_nothing)
{
  expect_right(2, "rank_failed", "");
}

Test(cases, strength_of_the_balance_loss_does_not_depend_on_the_layout)
{
  expect_right(4, "rank_aux", "");
}

Test(cases, gradients_do_not_depend_on_ep_size_or_stage)
{
  expect_right(4, "rank_updates", "gradients");
}

Test(cases, norm_counts_each_element_once_and_no_padding)
{
  char path[] = "/tmp/mz-norms-XXXXXX";
  char args[64];
  int file = mkstemp(path);

  cr_assert_geq(file, 0);
  snprintf(args, sizeof args, "norm %s", path);
  expect_right(4, "rank_cases", args);
  remove(path);
}

Test(cases, shards_of_experts_are_sized_by_their_own_group)
{
  expect_right(4, "rank_updates", "update");
}

Test(cases, ranks_experts_and_ep_size_divide)
{
  expect_right(8, "rank_cases", "divide");
}

/* --- failures of the program --- */

typedef struct job {
  char folder[64];
  char output[16384];
  int code;
  double seconds;
} job_t;

static const char config[] =
    "{\"model\": {\"vocab_size\": 257, \"hidden_size\": 32, "
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 2, "
    "\"intermediate_size\": 64, \"max_position_embeddings\": 16},\n"
    " \"moe\": {\"num_experts\": 4, \"k\": 2, \"drop_tokens\": false},\n"
    " \"data\": {\"sequence_length\": 16},\n"
    " \"train\": {\"steps\": 6, \"watchdog_s\": 2},\n"
    " \"train_batch_size\": 8,\n"
    " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-3}},\n"
    " \"zero_optimization\": {\"stage\": 2}}\n";

static void write_inputs(const char *folder)
{
  char path[128];
  FILE *file;

  snprintf(path, sizeof path, "%s/case.json", folder);
  file = fopen(path, "w");
  cr_assert_not_null(file);
  fputs(config, file);
  fclose(file);
  snprintf(path, sizeof path, "%s/text", folder);
  file = fopen(path, "w");
  cr_assert_not_null(file);
  for (int i = 0; i < 800; i++)
    fputs("pack my box with five dozen liquor jugs. ", file);
  fclose(file);
}

static double now(void)
{
  struct timespec t;

  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Starts gpt_moe on 4 ranks in a folder of its own. */
static void run_job(job_t *job, const char *options)
{
  char args[512];

  strcpy(job->folder, "/tmp/mz-case-XXXXXX");
  cr_assert_not_null(mkdtemp(job->folder));
  write_inputs(job->folder);
  snprintf(args, sizeof args, "%s/case.json --data %s/text --out %s/out %s",
           job->folder, job->folder, job->folder, options);
  job->seconds = now();
  job->code = mz_test_mpirun(4, "apps/gpt_moe", args, 60, job->output,
                             sizeof job->output);
  job->seconds = now() - job->seconds;
}

static int names_folder(const char *process, const char *folder)
{
  char path[64], text[4096] = "";
  size_t got;
  FILE *file;

  snprintf(path, sizeof path, "/proc/%.20s/cmdline", process);
  file = fopen(path, "r");
  if (!file) return 0;
  got = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  for (size_t i = 0; i < got; i++)
    if (text[i] == '\0') text[i] = ' ';
  return strstr(text, folder) != NULL;
}

/* Every rank has the folder's name in its command line. */
static int count_processes(const char *folder)
{
  DIR *list = opendir("/proc");
  struct dirent *entry;
  int num = 0;

  cr_assert_not_null(list);
  while ((entry = readdir(list)))
    if (isdigit((unsigned char)entry->d_name[0]))
      num += names_folder(entry->d_name, folder);
  closedir(list);
  return num;
}

static void expect_in(const job_t *job, const char *text)
{
  cr_assert(strstr(job->output, text), "no \"%s\" in\n%s", text, job->output);
}

static void remove_job(const job_t *job)
{
  char command[128];

  snprintf(command, sizeof command, "rm -rf %s", job->folder);
  cr_assert_eq(system(command), 0);
}

static void expect_failure(job_t *job, const char *options, int code)
{
  run_job(job, options);
  cr_assert_eq(job->code, code, "exit code %d\n%s", job->code, job->output);
  cr_assert_lt(job->seconds, 30, "%g s\n%s", job->seconds, job->output);
  cr_assert_eq(count_processes(job->folder), 0, "a rank is left\n%s",
               job->output);
}

Test(failures, none_is_found_in_a_good_run)
{
  job_t job;

  run_job(&job, "--set moe.ep_size=2");
  cr_assert_eq(job.code, 0, "exit code %d\n%s", job.code, job.output);
  expect_in(&job, "step 6/6");
  remove_job(&job);
}

Test(failures, of_any_allocation_at_the_start_fail_on_all)
{
  expect_run(2, "rank_memory", "moe.ep_size=2 zero_optimization.stage=3");
}

Test(failures, of_memory_on_one_rank_end_all_with_rank_step_and_cause)
{
  job_t job;

  expect_failure(&job, "--set moe.ep_size=2 --set debug.fault=oom:rank2:step3",
                 1);
  expect_in(&job, "step 3: rank 2: no memory");
  remove_job(&job);
}

/* The others have left the step by then, and learn it in the next one. */
Test(failures, after_the_last_message_of_a_step_end_all_in_the_next)
{
  job_t job;

  expect_failure(&job, "--set moe.ep_size=2 --set debug.fault=late:rank2:step3",
                 1);
  expect_in(&job, "step 4: rank 2: in step 3: no memory");
  remove_job(&job);
}

/* 137: mpirun passes the signal on. */
Test(failures, a_killed_rank_ends_all)
{
  job_t job;

  expect_failure(&job, "--set moe.ep_size=2 --set debug.fault=exit:rank2:step2",
                 137);
  expect_in(&job, "rank 2");
  expect_in(&job, "signal 9");
  expect_in(&job, "step 1/6");
  remove_job(&job);
}

Test(failures, a_rank_that_stalls_is_named_after_the_watchdog_time)
{
  static const char *const layouts[] = {
      "--set moe.ep_size=2 --set zero_optimization.stage=1",
      "--set moe.ep_size=4 --set zero_optimization.stage=0",
      "--set moe.ep_size=1 --set zero_optimization.stage=3"};

  for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
    char options[256];
    job_t job;

    snprintf(options, sizeof options, "%s --set debug.fault=stall:rank2:step3",
             layouts[i]);
    expect_failure(&job, options, 1);
    expect_in(&job, "step 3: rank 2 is late");
    remove_job(&job);
  }
}

/* Its progress is inline: it cannot answer while it stalls. */
Test(failures, a_rank_that_does_not_answer_is_named)
{
  job_t job;

  expect_failure(&job,
                 "--set moe.ep_size=2 --set comm.thread=false "
                 "--set debug.fault=stall:rank2:step3",
                 1);
  expect_in(&job, "step 3: rank 2 does not answer");
  remove_job(&job);
}

/* One message, from rank 0, before anything is made. */
Test(failures, numbers_that_do_not_divide_are_refused_at_once)
{
  job_t job;
  const char *first;

  expect_failure(&job, "--set moe.num_experts=9 --set moe.ep_size=2", 2);
  cr_assert_lt(job.seconds, 5, "%g s", job.seconds);
  expect_in(&job, "moe.num_experts 9, moe.ep_size 2, 4 ranks");
  first = strstr(job.output, "moe.ep_size 2");
  cr_assert_null(strstr(first + 1, "moe.ep_size 2"), "said twice:\n%s",
                 job.output);
  remove_job(&job);
}
