/* SPDX-License-Identifier: Apache-2.0 */
/* Known failures of other frameworks whose right numbers are known: statistics
 * of the gate, tokens beyond an expert's capacity, ranks without labels, MPI
 * calls of few elements, and evaluation and saves in the midst of training. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char output[1 << 15];

static void expect_run(int ranks, const char *program, const char *args)
{
  int code = mz_test_mpirun(ranks, program, args, 60, output, sizeof output);

  cr_assert_eq(code, 0, "%s %s on %d ranks: exit code %d\n%s", program, args,
               ranks, code, output);
}

/* With the communication thread and without. */
static void expect_right(int ranks, const char *program, const char *name)
{
  char path[64], args[64];

  snprintf(path, sizeof path, "tests/ranks/%s", program);
  expect_run(ranks, path, name);
  snprintf(args, sizeof args, "%s inline", name);
  expect_run(ranks, path, args);
}

Test(numbers, counts_and_losses_of_the_gate_are_the_published_ones)
{
  expect_right(2, "rank_numbers", "losses");
}

Test(numbers, tokens_beyond_the_capacity_get_nothing_and_give_nothing)
{
  expect_right(1, "rank_drops", "");
  expect_right(2, "rank_drops", "");
}

/* Two ranks by hand, each row on its way; also with experts in two runs. */
Test(numbers, the_published_dispatch_over_two_ranks)
{
  static const char *const layouts[] = {
      "", "comm.thread=false",
      "zero_optimization.stage=3 moe.overlap_chunks=2"};

  for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++)
    expect_run(2, "tests/ranks/rank_dispatch", layouts[i]);
}

Test(numbers, the_published_averages_norm_and_clipping)
{
  static const char *const layouts[] = {
      "2", "1 gradient_clipping=10", "2 zero_optimization.stage=3",
      "2 zero_optimization.stage=2 gradient_accumulation_steps=2"};

  for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++)
    expect_run(4, "tests/ranks/rank_average", layouts[i]);
}

/* Small here; ci/gpu-test has the sizes whose offsets pass 2^31. */
Test(numbers, the_last_of_many_experts_learns_as_it_would_alone)
{
  expect_run(1, "tests/ranks/rank_experts", "cpu 80 32 64");
}

/* What is slow on a GPU is done at once on the CPU: the exchanges and equal
 * losses are left of it. */
Test(numbers, slow_work_before_messages_changes_no_bit)
{
  expect_run(2, "tests/ranks/rank_delay", "cpu");
}

Test(numbers, a_rank_without_labels_changes_neither_loss_nor_gradient)
{
  expect_right(2, "rank_numbers", "masked");
}

Test(numbers, training_does_not_see_evaluations)
{
  expect_right(2, "rank_numbers", "eval");
}

Test(numbers, messages_in_pieces_of_7_change_no_bit)
{
  expect_right(3, "rank_numbers", "limit");
}

/* --- whole runs of gpt_moe in a folder of their own --- */

enum { MAX_STEPS = 20 };

static char folder[64];

static const char config[] =
    "{\"model\": {\"vocab_size\": 64, \"hidden_size\": 32,"
    " \"num_hidden_layers\": 2, \"num_attention_heads\": 2,"
    " \"intermediate_size\": 64, \"max_position_embeddings\": 16},"
    " \"moe\": {\"num_experts\": 4, \"k\": 2, \"drop_tokens\": false},"
    " \"data\": {\"train\": \"%s/train.bin\", \"valid\": \"%s/valid.bin\","
    " \"sequence_length\": 16},"
    " \"train\": {\"steps\": 6, \"watchdog_s\": 20}, \"train_batch_size\": 4,"
    " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-3,"
    " \"eps\": 1e-4}}}\n";

static FILE *open_file(const char *name, const char *mode)
{
  char path[160];
  FILE *file;

  snprintf(path, sizeof path, "%s/%s", folder, name);
  file = fopen(path, mode);
  cr_assert_not_null(file, "%s", path);
  return file;
}

static void write_tokens(const char *name, int32_t num, int stride)
{
  int32_t header[256] = {20240520, 1, num};
  FILE *file = open_file(name, "wb");

  cr_assert_eq(fwrite(header, 4, 256, file), 256);
  for (int32_t i = 0; i < num; i++) {
    uint16_t id = (uint16_t)((i * stride + i / 7) % 64);
    cr_assert_eq(fwrite(&id, 2, 1, file), 1);
  }
  fclose(file);
}

/* 3 sequences to evaluate: one more token, for the last label. */
static void make_folder(void)
{
  FILE *file;

  strcpy(folder, "/tmp/mz-test-numbers-XXXXXX");
  cr_assert_not_null(mkdtemp(folder));
  write_tokens("train.bin", 2000, 5);
  write_tokens("valid.bin", 3 * 16 + 1, 3);
  file = open_file("c.json", "w");
  fprintf(file, config, folder, folder);
  fclose(file);
}

static void remove_folder(void)
{
  char command[128];

  snprintf(command, sizeof command, "rm -rf %s", folder);
  cr_assert_eq(system(command), 0);
}

TestSuite(runs, .init = make_folder, .fini = remove_folder);

/* In less than 60 s. */
static void train(int ranks, const char *out, const char *options)
{
  char args[1024];

  snprintf(args, sizeof args, "%s/c.json --out %s/%s %s", folder, folder, out,
           options);
  expect_run(ranks, "apps/gpt_moe", args);
}

/* What a run's metrics say. */
typedef struct record {
  int num_steps, num_evals;
  char steps[MAX_STEPS][1024]; /* what does not depend on time */
  double evals[MAX_STEPS + 1]; /* by step; NaN: none */
} record_t;

/* Copies from the first of two words up to the second, or to the end. */
static void keep_part(char *kept, const char *line, const char *from,
                      const char *to)
{
  const char *start = strstr(line, from), *end;
  size_t used = strlen(kept);

  cr_assert_not_null(start, "no %s in: %s", from, line);
  end = to ? strstr(start, to) : start + strlen(start);
  cr_assert_not_null(end, "no %s in: %s", to, line);
  cr_assert_lt(used + (size_t)(end - start), 1024);
  strncat(kept, start, (size_t)(end - start));
}

static void read_record(const char *out, record_t *record)
{
  char name[64], line[8192];
  int64_t step, tokens;
  double loss;
  FILE *file;

  memset(record, 0, sizeof *record);
  for (int i = 0; i <= MAX_STEPS; i++)
    record->evals[i] = NAN;
  snprintf(name, sizeof name, "%s/metrics.jsonl", out);
  file = open_file(name, "r");
  while (fgets(line, sizeof line, file)) {
    if (sscanf(line,
               "{\"step\": %" SCNd64 ", \"eval_loss\": %lf, "
               "\"eval_tokens\": %" SCNd64,
               &step, &loss, &tokens) == 3) {
      cr_assert(step >= 1 && step <= MAX_STEPS && tokens == 48, "%s", line);
      record->evals[step] = loss;
      record->num_evals++;
      continue;
    }
    cr_assert_lt(record->num_steps, MAX_STEPS);
    keep_part(record->steps[record->num_steps], line, "{\"step\"",
              ", \"tokens_per_s\"");
    keep_part(record->steps[record->num_steps], line, "\"expert_counts\"",
              ", \"bytes\"");
    keep_part(record->steps[record->num_steps++], line, "\"param_hash\"", NULL);
  }
  fclose(file);
}

/* The lines that say the loss of an evaluation, of a rank's log. */
static void read_evals(const char *out, int rank, char *lines, size_t bytes)
{
  char name[64], line[1024];
  FILE *file;

  snprintf(name, sizeof name, "%s/log.%d", out, rank);
  file = open_file(name, "r");
  lines[0] = '\0';
  while (fgets(line, sizeof line, file))
    if (strstr(line, "validation loss"))
      strncat(lines, line, bytes - strlen(lines) - 1);
  fclose(file);
}

/* As one rank has it, on every rank; both saves are whole. */
static void expect_like_one(int ranks, const char *out, const record_t *one)
{
  char args[256], first[1024], lines[1024];
  record_t record;

  read_record(out, &record);
  cr_assert_eq(record.num_steps, 6);
  cr_assert_eq(record.num_evals, 3);
  for (int step = 2; step <= 6; step += 2)
    cr_assert(fabs(record.evals[step] - one->evals[step]) <=
                  1e-5 * one->evals[step],
              "%s, step %d: %.9g, one rank %.9g", out, step, record.evals[step],
              one->evals[step]);
  read_evals(out, 0, first, sizeof first);
  cr_assert_not_null(strstr(first, "step 6  validation loss"), "%s", first);
  for (int rank = 1; rank < ranks; rank++) {
    read_evals(out, rank, lines, sizeof lines);
    cr_assert_str_eq(lines, first, "rank %d: %s", rank, lines);
  }
  for (int step = 3; step <= 6; step += 3) {
    snprintf(args, sizeof args, "%s/%s/checkpoint/global_step%d --verify",
             folder, out, step);
    expect_run(1, "h5-gather", args);
  }
}

#define OFTEN                                                                  \
  "--set train.eval_interval=2 --set checkpoint.save_interval=3 "              \
  "--set monitor.param_hash=true "

Test(runs, evaluate_and_save_on_all_ranks_with_uneven_data, .timeout = 240)
{
  record_t one;

  train(1, "one", OFTEN);
  read_record("one", &one);
  train(2, "two", OFTEN "--set moe.ep_size=2");
  expect_like_one(2, "two", &one);
  train(4, "four", OFTEN "--set zero_optimization.stage=3");
  expect_like_one(4, "four", &one);
  train(4, "both",
        OFTEN "--set zero_optimization.stage=3 "
              "--set moe.ep_size=2");
  expect_like_one(4, "both", &one);
}

#define CHANCE                                                                 \
  "--steps 20 --set monitor.param_hash=true --set moe.ep_size=2 "              \
  "--set model.dropout=0.1 --set moe.k=1 --set moe.use_rts=true "              \
  "--set moe.drop_tokens=true --set moe.capacity_factor=1.0 "

Test(runs, train_alike_with_any_interval_of_evaluation, .timeout = 240)
{
  static record_t off, fifth, each;

  train(2, "off", CHANCE "--set train.eval_interval=0");
  train(2, "fifth", CHANCE "--set train.eval_interval=5");
  train(2, "each", CHANCE "--set train.eval_interval=1");
  read_record("off", &off);
  read_record("fifth", &fifth);
  read_record("each", &each);
  cr_assert_eq(off.num_evals, 1);
  cr_assert_eq(fifth.num_evals, 4);
  cr_assert_eq(each.num_evals, 20);
  for (int i = 0; i < MAX_STEPS; i++) {
    cr_assert_str_eq(off.steps[i], fifth.steps[i]);
    cr_assert_str_eq(off.steps[i], each.steps[i]);
    cr_assert_not_null(strstr(off.steps[i], "\"param_hash\": \""));
  }
  for (int step = 5; step <= MAX_STEPS; step += 5)
    cr_assert_eq(fifth.evals[step], each.evals[step]);
  cr_assert_eq(off.evals[MAX_STEPS], each.evals[MAX_STEPS]);
}
