/* SPDX-License-Identifier: Apache-2.0 */
/* Bad input and the small commands of gpt_moe: exit code, message, no folder
 * left behind, no rank left running. */
#include "mpirun.h"

#include "base/check.h"
#include "kernels/device.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64], output[1 << 16];

static const char base_config[] =
    "{\"model\": {\"architecture\": \"gpt2\", \"vocab_size\": 64,"
    " \"hidden_size\": 32, \"num_hidden_layers\": 2,"
    " \"num_attention_heads\": 2, \"intermediate_size\": 64,"
    " \"max_position_embeddings\": 16},"
    " \"moe\": {\"num_experts\": 4, \"layers\": {\"every\": 1}, \"k\": 2,"
    " \"drop_tokens\": false},"
    " \"data\": {\"train\": \"%s/train.bin\", \"valid\": \"%s/valid.bin\","
    " \"sequence_length\": 16},"
    " \"train\": {\"steps\": 3, \"device\": \"cpu\"},"
    " \"train_batch_size\": 4}\n";

static void path_of(const char *name, char path[256])
{
  snprintf(path, 256, "%s/%s", folder, name);
}

static void write_text(const char *name, const char *text)
{
  char path[256];
  FILE *file;

  path_of(name, path);
  file = fopen(path, "w");
  cr_assert_not_null(file);
  fputs(text, file);
  fclose(file);
}

/* A token file with `num` ids below 64 of which the header counts `count`. */
static void write_tokens(const char *name, int32_t count, int num)
{
  int32_t header[256] = {20240520, 1, count};
  char path[256];
  FILE *file;

  path_of(name, path);
  file = fopen(path, "wb");
  cr_assert_not_null(file);
  cr_assert_eq(fwrite(header, 4, 256, file), 256);
  for (int i = 0; i < num; i++) {
    uint16_t id = (uint16_t)(i * 5 % 64);
    cr_assert_eq(fwrite(&id, 2, 1, file), 1);
  }
  fclose(file);
}

static void make_folder(void)
{
  char text[2048];

  strcpy(folder, "/tmp/mz-test-cli-XXXXXX");
  cr_assert_not_null(mkdtemp(folder));
  snprintf(text, sizeof text, base_config, folder, folder);
  write_text("c.json", text);
  write_tokens("train.bin", 1000, 1000);
  write_tokens("valid.bin", 200, 200);
}

static void remove_folder(void)
{
  char command[128];

  snprintf(command, sizeof command, "rm -rf %s", folder);
  cr_assert_eq(system(command), 0);
}

TestSuite(cli, .init = make_folder, .fini = remove_folder);

/* Runs gpt_moe on ranks with c.json, the arguments and --out DIR/out. */
static int train(int ranks, const char *arguments)
{
  char all[1024];

  snprintf(all, sizeof all, "%s/c.json --out %s/out %s", folder, folder,
           arguments);
  return mz_test_mpirun(ranks, "apps/gpt_moe", all, 30, output, sizeof output);
}

static int command(const char *arguments)
{
  return mz_test_mpirun(1, "apps/gpt_moe", arguments, 30, output,
                        sizeof output);
}

static bool made_folder(void)
{
  char path[256];
  struct stat info;

  path_of("out", path);
  return stat(path, &info) == 0;
}

static int times(const char *words)
{
  int num = 0;

  for (const char *at = output; (at = strstr(at, words)); at++)
    num++;
  return num;
}

/* Refused with the code and both words, by one rank, leaving no folder. */
static void refused(int ranks, const char *arguments, int code,
                    const char *first, const char *second)
{
  int found = train(ranks, arguments);

  cr_assert_eq(found, code, "%s: exit %d: %s", arguments, found, output);
  cr_assert(strstr(output, first), "%s: no '%s' in: %s", arguments, first,
            output);
  cr_assert(strstr(output, second), "%s: no '%s' in: %s", arguments, second,
            output);
  cr_assert_eq(times("gpt_moe: "), 1, "%s: more than one message: %s",
               arguments, output);
  cr_assert_not(made_folder(), "%s left a folder", arguments);
}

Test(cli, trains_evaluates_and_fills_its_folder)
{
  char path[256];

  cr_assert_eq(train(2, ""), 0, "%s", output);
  cr_assert(strstr(output, "step 3/3"), "%s", output);
  cr_assert(strstr(output, "validation loss"), "%s", output);
  for (int i = 0; i < 4; i++) {
    static const char *const names[] = {"out/config.json", "out/metrics.jsonl",
                                        "out/log.0", "out/log.1"};
    path_of(names[i], path);
    cr_assert_eq(access(path, R_OK), 0, "no %s", path);
  }
}

Test(cli, unknown_key_has_the_nearest_name)
{
  refused(2, "--set zero_optimization.stge=3", 2, "zero_optimization.stge",
          "did you mean \"stage\"");
}

Test(cli, wrong_type_and_range_have_the_keys_path)
{
  refused(1, "--set model.hidden_size=x", 2, "model.hidden_size", "x");
  refused(1, "--set zero_optimization.stage=4", 2, "zero_optimization.stage",
          "4");
  refused(1, "--set moe.k=9", 2, "moe.k", "9");
}

Test(cli, syntax_has_line_and_column)
{
  write_text("c.json", "{\"model\":\n  {\"vocab_size\" 64}}");
  refused(2, "", 2, "c.json:2:18:", "':' expected");
}

Test(cli, sizes_that_do_not_divide_are_named)
{
  refused(2, "--set moe.ep_size=3", 2, "ep_size", "3");
  refused(2, "--set moe.num_experts=5 --set moe.ep_size=2", 2, "5", "2");
  refused(1, "--set model.num_attention_heads=5", 2, "32", "5");
}

Test(cli, batch_arithmetic_that_does_not_hold_prints_the_numbers)
{
  refused(2, "--set train_batch_size=3 --set train_micro_batch_size_per_gpu=2",
          2, "train_batch_size", "3");
}

Test(cli, sequence_longer_than_the_model_is_refused)
{
  refused(1, "--set data.sequence_length=64", 2, "64", "16");
}

Test(cli, missing_configuration_is_a_usage_error)
{
  refused(2, "--set", 2, "--set", "needs a value");
  cr_assert_eq(command("/none/here.json"), 2);
  cr_assert(strstr(output, "/none/here.json"), "%s", output);
}

Test(cli, missing_data_is_named)
{
  refused(2, "--data /none/here.bin", 1, "/none/here.bin", "No such file");
}

Test(cli, empty_data_is_refused)
{
  write_text("train.bin", "");
  refused(2, "", 1, "train.bin", "empty");
}

Test(cli, truncated_data_is_refused_with_the_numbers)
{
  write_tokens("train.bin", 1000, 400);
  refused(2, "", 1, "train.bin", "counts 1000 tokens, the file holds 400");
}

Test(cli, data_of_another_format_is_refused)
{
  refused(1, "--set data.format=text", 1, "train.bin", "data.format is text");
}

Test(cli, vocabulary_below_a_token_id_is_refused)
{
  refused(2, "--set model.vocab_size=32", 1, "token id", "vocab_size 32");
}

Test(cli, data_shorter_than_a_sequence_is_refused)
{
  write_tokens("valid.bin", 16, 16);
  refused(1, "", 1, "valid.bin", "need at least 17");
}

/* On a machine with a GPU there is nothing to refuse. */
static bool has_gpu(void)
{
  int count;

  return mz_device_count(MZ_BACKEND_CUDA, &count) == MZ_OK;
}

Test(cli, a_gpu_that_is_not_there_is_refused_with_the_reason)
{
  if (has_gpu()) return;
  refused(1, "--set train.device=cuda", 2, "rank 0: ", mz_error_message());
  refused(2, "--set train.device=cuda", 2, "rank 0: ", mz_error_message());
  refused(2, "--set train.device=cuda --set comm.thread=false", 2,
          "rank 0: ", mz_error_message());
}

Test(cli, without_a_gpu_auto_is_the_cpu)
{
  if (has_gpu()) return;
  cr_assert_eq(train(2, "--set train.device=auto"), 0, "%s", output);
  cr_assert(strstr(output, "device of rank 0: CPU"), "%s", output);
  cr_assert(strstr(output, "step 3/3"), "%s", output);
}

Test(cli, what_comes_later_is_refused_by_name)
{
  refused(2, "--fit", 2, "not supported yet", "--fit");
  cr_assert_eq(command("measure"), 2);
  cr_assert(strstr(output, "not supported yet: measure"), "%s", output);
}

Test(cli, one_rank_of_several_slurm_tasks_is_refused)
{
  setenv("SLURM_NTASKS", "4", 1);
  refused(1, "", 2, "SLURM_NTASKS is 4", "1 rank");
}

Test(cli, a_second_job_is_kept_out_of_the_folder)
{
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  char path[256];
  int file;

  path_of("out", path);
  cr_assert_eq(mkdir(path, 0777), 0);
  path_of("out/lock", path);
  file = open(path, O_RDWR | O_CREAT, 0666);
  cr_assert(file >= 0);
  cr_assert_eq(fcntl(file, F_SETLK, &lock), 0);
  cr_assert_eq(train(2, ""), 1, "%s", output);
  cr_assert(strstr(output, "another run writes into this folder"), "%s",
            output);
  path_of("out/metrics.jsonl", path);
  cr_assert_neq(access(path, F_OK), 0);
  close(file);
}

/* Trains 3 steps with saves every 2. */
static void train_and_save(int ranks, const char *more)
{
  char arguments[256];

  snprintf(arguments, sizeof arguments, "--set checkpoint.save_interval=2 %s",
           more);
  cr_assert_eq(train(ranks, arguments), 0, "%s", output);
}

static void expect_words(const char *words)
{
  cr_assert(strstr(output, words), "no '%s' in: %s", words, output);
}

Test(cli, resume_goes_on_and_says_what_differs)
{
  char path[256], line[65536];
  int lines = 0;
  FILE *file;

  cr_assert_eq(train(2, "--resume auto --set checkpoint.save_interval=2"), 0,
               "%s", output);
  expect_words("out/checkpoint yet: starting");
  expect_words("saved ");
  cr_assert_eq(train(1, "--resume auto --steps 5"), 0, "%s", output);
  expect_words("at step 3");
  expect_words("train.steps: 3 -> 5");
  expect_words("step 5/5");
  path_of("out/metrics.jsonl", path);
  file = fopen(path, "r");
  cr_assert_not_null(file);
  while (fgets(line, sizeof line, file))
    lines += strstr(line, "grad_norm") != NULL;
  fclose(file);
  cr_assert_eq(lines, 5);
}

/* A kill between the two renames of a save leaves `latest` behind its step. */
Test(cli, resume_auto_takes_the_newest_step_whatever_latest_names)
{
  char path[256];

  train_and_save(1, "");
  write_text("out/checkpoint/latest", "global_step2\n");
  cr_assert_eq(train(2, "--resume auto --steps 4"), 0, "%s", output);
  expect_words("out/checkpoint/global_step3 at step 3");
  path_of("out/checkpoint/latest", path);
  cr_assert_eq(unlink(path), 0);
  cr_assert_eq(train(1, "--resume auto --steps 5"), 0, "%s", output);
  expect_words("step 5/5");
}

/* MPI_THREAD_SERIALIZED: the main thread and the communication thread take
 * turns, also before the first step, in a save and at the end. */
Test(cli, one_thread_at_a_time_is_in_mpi)
{
  cr_assert_eq(
      setenv("LD_PRELOAD", MZ_BUILD_ROOT "/tests/outside/libthreadwatch.so", 1),
      0);
  train_and_save(2, "--resume auto");
  cr_assert_eq(train(2, "--resume auto --steps 5"), 0, "%s", output);
  cr_assert_null(strstr(output, "threadwatch"), "%s", output);
}

Test(cli, saved_steps_are_not_overwritten)
{
  train_and_save(1, "");
  cr_assert_eq(train(1, "--set checkpoint.save_interval=2"), 1, "%s", output);
  expect_words("global_step3 is complete, and this run starts at step 0");
}

Test(cli, resume_refuses_other_shapes_and_damage)
{
  char path[256];

  train_and_save(1, "");
  cr_assert_eq(train(2, "--resume auto --set model.hidden_size=64"), 1, "%s",
               output);
  expect_words(" has the shape [64, 32], the model's is [64, 64]");
  path_of("out/checkpoint/global_step3/rank_0.h5", path);
  cr_assert_eq(truncate(path, 5000), 0);
  cr_assert_eq(train(2, "--resume auto --steps 5"), 1, "%s", output);
  expect_words("rank_0.h5: truncated: it has 5000 bytes");
  cr_assert_eq(times("gpt_moe: "), 1, "%s", output);
}

Test(cli, a_gathered_file_starts_a_run)
{
  char arguments[256];

  train_and_save(2, "--set checkpoint.gather_on_save=true "
                    "--set checkpoint.keep=1");
  snprintf(arguments, sizeof arguments,
           "--init-from %s/out/checkpoint/global_step3/model.h5", folder);
  cr_assert_eq(train(1, arguments), 0, "%s", output);
  cr_assert_eq(train(1, "--init-from /nowhere"), 1, "%s", output);
  expect_words("/nowhere: No such file or directory");
  snprintf(arguments, sizeof arguments,
           "--resume %s/out/checkpoint/global_step3/model.h5", folder);
  cr_assert_eq(train(1, arguments), 1, "%s", output);
  expect_words("a one-file model has no step to resume from");
}

Test(cli, resume_and_init_from_exclude_each_other)
{
  refused(1, "--resume x --init-from y", 2, "--resume and --init-from",
          "exclude each other");
}

Test(cli, json_prints_the_lines_of_the_metrics)
{
  cr_assert_eq(train(1, "--json"), 0, "%s", output);
  cr_assert_eq(times("\"grad_norm\""), 3, "%s", output);
  cr_assert_eq(times("\"eval_loss\""), 1, "%s", output);
}

/* In the first line of a run, also of one that resumes. */
Test(cli, metrics_tell_where_the_start_went)
{
  static const char *const parts[] = {
      "\"start.mpi\": ",    "\"start.data\": ",   "\"start.plan\": ",
      "\"start.device\": ", "\"start.values\": ", "\"start.warm\": ",
      "\"start.folder\": "};
  double ms;

  for (int run = 0; run < 2; run++) {
    cr_assert_eq(train(1, run ? "--json --resume auto --steps 5"
                              : "--json --set checkpoint.save_interval=3"),
                 0, "%s", output);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
      cr_assert_eq(times(parts[i]), 1, "%s in %s", parts[i], output);
      ms = atof(strstr(output, parts[i]) + strlen(parts[i]));
      cr_assert(ms >= 0 && ms < 30000, "%s%g", parts[i], ms);
    }
  }
}

Test(cli, check_makes_no_folder)
{
  char arguments[256];

  snprintf(arguments, sizeof arguments, "check %s/c.json", folder);
  cr_assert_eq(command(arguments), 0, "%s", output);
  cr_assert(strstr(output, "the start-up checks passed"), "%s", output);
  cr_assert_not(made_folder());
}

Test(cli, plan_of_many_ranks_needs_no_mpi)
{
  char arguments[512];

  snprintf(arguments, sizeof arguments,
           "plan %s/c.json --ranks 512 --set train_batch_size=512 "
           "--set moe.ep_size=4 --set zero_optimization.stage=3",
           folder);
  cr_assert_eq(command(arguments), 0, "%s", output);
  cr_assert(strstr(output, "plan of rank 0 of 512: ZeRO stage 3"), "%s",
            output);
  cr_assert(strstr(output, "edp4"), "%s", output);
}

Test(cli, plan_that_does_not_fit_exits_3)
{
  char arguments[256];

  snprintf(arguments, sizeof arguments,
           "plan %s/c.json --ranks 1 --device-memory 64KiB", folder);
  cr_assert_eq(command(arguments), 3, "%s", output);
  cr_assert(strstr(output, "the device has 0.000 GiB"), "%s", output);
}

Test(cli, config_lists_every_key)
{
  cr_assert_eq(command("config"), 0, "%s", output);
  cr_assert(strstr(output, "moe.capacity_factor"), "%s", output);
  cr_assert_eq(command("--version"), 0);
  cr_assert(strstr(output, ", commit "), "%s", output);
  cr_assert_eq(command("--help"), 0);
  cr_assert(strstr(output, "usage: mpirun"), "%s", output);
}

#ifdef MZ_TEST_HOOKS
Test(cli, a_failure_of_one_rank_ends_all_with_rank_step_and_cause)
{
  cr_assert_eq(train(4, "--set debug.fault=oom:rank2:step3"), 1, "%s", output);
  cr_assert(strstr(output, "gpt_moe: step 3: rank 2: no memory"), "%s", output);
  cr_assert_eq(times("gpt_moe: "), 1, "%s", output);
}

Test(cli, a_killed_rank_ends_the_job)
{
  cr_assert_neq(train(4, "--set debug.fault=exit:rank3:step2"), 0);
  cr_assert(strstr(output, "rank 3"), "%s", output);
}

Test(cli, a_late_rank_is_named_and_the_job_ended)
{
  cr_assert_eq(train(2, "--set debug.fault=stall:rank1:step2 "
                        "--set train.watchdog_s=2"),
               1, "%s", output);
  cr_assert(strstr(output, "gpt_moe: step 2: rank 1 is late"), "%s", output);
}
#endif
