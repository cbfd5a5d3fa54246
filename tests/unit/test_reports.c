/* SPDX-License-Identifier: Apache-2.0 */
/* What the metrics of a run say of its MoE layers, on 1, 2 and 4 ranks. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  STEPS = 4,
  MOES = 2,
  EXPERTS = 4,
  HIDDEN = 32,
  ROUTES = 8 * 16 * 2 /* of a layer and step */
};

static const char config[] =
    "{\"model\": {\"vocab_size\": 257, \"hidden_size\": 32,"
    " \"num_hidden_layers\": 2, \"num_attention_heads\": 2,"
    " \"intermediate_size\": 64, \"max_position_embeddings\": 16},"
    " \"moe\": {\"num_experts\": 4, \"layers\": {\"every\": 1}, \"k\": 2,"
    " \"drop_tokens\": false, \"saved_rows\": 8},"
    " \"data\": {\"sequence_length\": 16}, \"steps_per_print\": 1,"
    " \"train\": {\"steps\": 4, \"device\": \"cpu\"},"
    " \"optimizer\": {\"type\": \"AdamW\","
    " \"params\": {\"lr\": 1e-3, \"eps\": 1e-4}},"
    " \"train_batch_size\": 8, \"train_micro_batch_size_per_gpu\": 2}\n";

typedef struct run {
  json_t *line[STEPS];
} run_t;

static char folder[64], output[1 << 16];

static void make_folder(void)
{
  char path[128];
  FILE *file;

  strcpy(folder, "/tmp/mz-test-reports-XXXXXX");
  cr_assert_not_null(mkdtemp(folder));
  snprintf(path, sizeof path, "%s/c.json", folder);
  file = fopen(path, "w");
  cr_assert_not_null(file);
  fputs(config, file);
  fclose(file);
  snprintf(path, sizeof path, "%s/text", folder);
  file = fopen(path, "w");
  cr_assert_not_null(file);
  for (int i = 0; i < 200; i++)
    fprintf(file, "%d jackdaws love my big sphinx of quartz. ", i);
  fclose(file);
}

static void remove_folder(void)
{
  char command[128];

  snprintf(command, sizeof command, "rm -rf %s", folder);
  cr_assert_eq(system(command), 0);
}

TestSuite(reports, .init = make_folder, .fini = remove_folder);

static void train(int ranks, const char *options)
{
  char all[1024];
  int code;

  snprintf(all, sizeof all, "%s/c.json --data %s/text --out %s/out %s", folder,
           folder, folder, options);
  code = mz_test_mpirun(ranks, "apps/gpt_moe", all, 60, output, sizeof output);
  cr_assert_eq(code, 0, "%d ranks, %s: exit %d: %s", ranks, options, code,
               output);
}

/* Runs with --json and reads its lines; all of them are JSON. */
static run_t lines_of(int ranks, const char *options)
{
  char with_json[512], *at = output, *end;
  run_t run;

  snprintf(with_json, sizeof with_json, "--json %s 2>/dev/null", options);
  train(ranks, with_json);
  for (int i = 0; i < STEPS; i++, at = end + 1) {
    end = strchr(at, '\n');
    cr_assert_not_null(end, "%d lines: %s", i, output);
    *end = '\0';
    run.line[i] = json_loads(at, JSON_REJECT_DUPLICATES, NULL);
    cr_assert_not_null(run.line[i], "not JSON: %s", at);
  }
  return run;
}

static void free_run(run_t *run)
{
  for (int i = 0; i < STEPS; i++)
    json_decref(run->line[i]);
}

static double number(const json_t *line, const char *list, size_t layer)
{
  const json_t *all = json_object_get(line, list);

  cr_assert_eq(json_array_size(all), MOES, "%s", list);
  return json_number_value(json_array_get(all, layer));
}

static double bytes_of(const json_t *line, const char *which)
{
  return json_number_value(
      json_object_get(json_object_get(line, "exchange_bytes"), which));
}

static const char *const global[] = {
    "expert_counts",  "expert_kept", "expert_dropped", "expert_variance",
    "expert_largest", "expert_dead", "expert_window"};

static void expect_equal(const run_t *a, const run_t *b, const char *options)
{
  for (int i = 0; i < STEPS; i++)
    for (size_t n = 0; n < sizeof global / sizeof global[0]; n++) {
      const json_t *one = json_object_get(a->line[i], global[n]);
      const json_t *two = json_object_get(b->line[i], global[n]);

      cr_expect(one && json_equal(one, two), "%s: %s of step %d differs",
                options, global[n], i + 1);
    }
}

/* The numbers of a layer, from its counts. */
static void expect_made_of_counts(const json_t *line, size_t layer)
{
  const json_t *routed =
      json_array_get(json_object_get(line, "expert_counts"), layer);
  const json_t *kept =
      json_array_get(json_object_get(line, "expert_kept"), layer);
  double mean = (double)ROUTES / EXPERTS, squares = 0, most = 0, stayed = 0;

  for (size_t e = 0; e < EXPERTS; e++) {
    double count = json_number_value(json_array_get(routed, e));

    squares += (count / mean - 1) * (count / mean - 1);
    most = fmax(most, count);
    stayed += json_number_value(json_array_get(kept, e));
  }
  cr_expect_float_eq(number(line, "expert_variance", layer), squares / EXPERTS,
                     1e-12);
  cr_expect_float_eq(number(line, "expert_largest", layer), most / mean, 1e-12);
  cr_expect_float_eq(number(line, "expert_dropped", layer), 1 - stayed / ROUTES,
                     1e-12);
}

Test(reports, do_not_depend_on_ranks_ep_size_and_stage)
{
  static const struct {
    int ranks;
    const char *options;
  } layouts[] = {{2, "--set moe.ep_size=2 --set zero_optimization.stage=3"},
                 {2, "--set train_micro_batch_size_per_gpu=1"},
                 {4, "--set moe.ep_size=2 --set zero_optimization.stage=2"},
                 {4, "--set moe.ep_size=4 --set comm.thread=false"}};
  run_t one = lines_of(1, "");

  for (int i = 0; i < STEPS; i++) {
    for (size_t m = 0; m < MOES; m++)
      expect_made_of_counts(one.line[i], m);
    cr_expect_gt(number(one.line[i], "expert_variance", 0), 0);
    cr_expect_eq(
        json_number_value(json_object_get(one.line[i], "expert_window")),
        i + 1);
  }
  for (size_t l = 0; l < sizeof layouts / sizeof layouts[0]; l++) {
    run_t run = lines_of(layouts[l].ranks, layouts[l].options);

    expect_equal(&one, &run, layouts[l].options);
    free_run(&run);
  }
  free_run(&one);
}

#define DROPS "--set moe.drop_tokens=true --set moe.capacity_factor=0.75 "

/* A capacity is of a rank's tokens, so the number of ranks is one. */
Test(reports, with_drops_do_not_depend_on_ep_size_and_stage)
{
  static const char other[] =
      DROPS "--set moe.ep_size=4 --set zero_optimization.stage=3";
  run_t one = lines_of(4, DROPS), run = lines_of(4, other);

  for (int i = 0; i < STEPS; i++)
    for (size_t m = 0; m < MOES; m++) {
      expect_made_of_counts(one.line[i], m);
      cr_expect_gt(number(one.line[i], "expert_dropped", m), 0.2);
    }
  expect_equal(&one, &run, other);
  free_run(&one);
  free_run(&run);
}

/* Under way within the step, and only where something travels. */
static void expect_time(const json_t *line, bool travels)
{
  const json_t *ms = json_object_get(line, "exchange_ms");
  double all = json_number_value(json_object_get(ms, "under_way"));
  double exposed = json_number_value(json_object_get(ms, "exposed"));
  double least = json_number_value(json_object_get(ms, "exposed_least"));
  double step = json_number_value(json_object_get(line, "step_ms"));
  double share = json_number_value(json_object_get(line, "exchange_exposed"));

  cr_expect_eq(all > 0, travels, "%g ms", all);
  cr_expect_eq(exposed > 0, travels, "%g ms", exposed);
  cr_expect_lt(all, step);
  cr_expect_lt(exposed, step);
  cr_expect_eq(least > 0, travels, "%g ms", least);
  cr_expect_leq(least, exposed);
  cr_expect_float_eq(share * all, exposed, 1e-9);
}

/* A row goes there and back in each pass; one that is not in the pool goes
 * there once more in backward. */
static void expect_bytes(int ranks, const char *options, int trips)
{
  run_t run = lines_of(ranks, options);

  for (int i = 0; i < STEPS; i++) {
    double sent = bytes_of(run.line[i], "sent");

    cr_expect_eq(sent, (double)trips * MOES * ROUTES * HIDDEN * 4,
                 "%d ranks, %s: %g bytes", ranks, options, sent);
    cr_expect_leq(sent, bytes_of(run.line[i], "planned"));
    expect_time(run.line[i], sent > 0);
  }
  free_run(&run);
}

Test(reports, exchanged_bytes_are_those_of_the_rows)
{
  expect_bytes(1, "", 0);
  expect_bytes(2, "--set moe.ep_size=1", 0);
  expect_bytes(2, "--set moe.ep_size=2", 4);
  expect_bytes(4, "--set moe.ep_size=2 --set moe.overlap_chunks=2", 4);
  expect_bytes(4, "--set moe.ep_size=4 --set moe.saved_rows=0.25", 5);
}

Test(reports, are_short_in_the_progress_line)
{
  const char *line;
  double share;

  train(2, DROPS);
  line = strstr(output, "step 4/4");
  cr_assert(line && strstr(line, "  load "), "%s", output);
  line = strstr(line, "  dropped ");
  cr_assert(line && sscanf(line, "  dropped %lf%%", &share) == 1, "%s", output);
  cr_assert(share > 20 && share < 100, "%g%%", share);
  train(2, "");
  cr_assert_null(strstr(output, "dropped"), "%s", output);
}
