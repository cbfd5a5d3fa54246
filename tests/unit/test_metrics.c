/* SPDX-License-Identifier: Apache-2.0 */
#include "train/metrics.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

static const int64_t routed[2][4] = {{10, 2, 2, 2}, {4, 4, 4, 4}};
static const int64_t kept[2][4] = {{5, 2, 2, 2}, {4, 4, 4, 4}};
static const mz_expert_load_t loads[2] = {{4, routed[0], kept[0], 0, 256},
                                          {4, routed[1], kept[1], 3, 512}};
static const mz_named_number_t times[2] = {{"compute", 1.5}, {"wait", 0.25}};
static const mz_named_number_t parts[2] = {{"gaps", 0.5},
                                           {"attention.linear", 3}};
static const mz_named_number_t bytes[1] = {{"params", 1 << 30}};

static mz_metrics_t example(void)
{
  mz_metrics_t m = {.step = 3,
                    .loss = 0.1 + 0.2,
                    .lm_loss = 1.0 / 3.0,
                    .lr = 1e-3,
                    .grad_norm = NAN,
                    .loss_scale = INFINITY,
                    .skipped = 1,
                    .tokens = 64,
                    .tokens_per_s = 7911.6,
                    .min_gap = 1e-5,
                    .step_ms = 8.0,
                    .time_ms = times,
                    .num_times = 2,
                    .parts_ms = parts,
                    .num_parts = 2,
                    .experts = loads,
                    .num_moes = 2,
                    .expert_window = MZ_LOAD_WINDOW,
                    .exchange_bytes = 4096,
                    .planned_exchange_bytes = 8192,
                    .exchange_ms = 8,
                    .exposed_ms = 2,
                    .least_exposed_ms = 1.5,
                    .bytes = bytes,
                    .num_bytes = 1};
  return m;
}

/* Writes with the given function and reads the line back. */
static json_t *written(const mz_metrics_t *m, double eval_loss)
{
  FILE *file = tmpfile();
  char line[4096];
  json_t *json;

  cr_assert_not_null(file);
  cr_assert_eq(m ? mz_metrics_write(file, m)
                 : mz_metrics_write_eval(file, 7, eval_loss, 48),
               MZ_OK);
  rewind(file);
  cr_assert_not_null(fgets(line, sizeof line, file));
  cr_assert_eq(line[strlen(line) - 1], '\n');
  cr_assert_null(fgets(line + strlen(line), 2, file));
  json = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
  cr_assert_not_null(json, "not JSON: %s", line);
  fclose(file);
  return json;
}

static double real(const json_t *json, const char *name)
{
  return json_number_value(json_object_get(json, name));
}

Test(metrics, every_field_is_one_line_of_json)
{
  mz_metrics_t m = example();
  json_t *json = written(&m, 0), *counts, *times_read;

  cr_assert_eq(real(json, "step"), 3);
  cr_assert_eq(real(json, "skipped"), 1);
  cr_assert_eq(real(json, "tokens"), 64);
  cr_assert_eq(real(json, "lr"), 1e-3);
  cr_assert_eq(real(json, "step_ms"), 8.0);
  cr_assert_eq(real(json, "min_gap"), 1e-5);
  times_read = json_object_get(json, "time_ms");
  cr_assert_eq(real(times_read, "compute"), 1.5);
  cr_assert_eq(real(times_read, "wait"), 0.25);
  cr_assert_eq(real(times_read, "gaps"), 0.5);
  cr_assert_eq(real(times_read, "attention.linear"), 3);
  cr_assert_eq(real(json_object_get(json, "bytes"), "params"), 1073741824.0);
  counts = json_array_get(json_object_get(json, "expert_counts"), 0);
  cr_assert_eq(json_integer_value(json_array_get(counts, 0)), 10);
  counts = json_array_get(json_object_get(json, "expert_kept"), 0);
  cr_assert_eq(json_integer_value(json_array_get(counts, 0)), 5);
  cr_assert_eq(json_array_size(json_object_get(json, "expert_counts")), 2);
  cr_assert_null(json_object_get(json, "param_hash"));
  json_decref(json);
}

static double of_layer(const json_t *json, const char *name, size_t layer)
{
  const json_t *list = json_object_get(json, name);

  cr_assert_eq(json_array_size(list), 2, "%s", name);
  return json_number_value(json_array_get(list, layer));
}

/* Of 16 routes 10, 2, 2, 2 the mean is 4: (1.5^2 + 3 * 0.5^2) / 4 = 0.75. */
Test(metrics, every_layer_has_its_load)
{
  mz_metrics_t m = example();
  json_t *json = written(&m, 0), *bytes_read;

  cr_assert_eq(of_layer(json, "expert_dropped", 0), 5.0 / 16);
  cr_assert_eq(of_layer(json, "expert_dropped", 1), 0);
  cr_assert_eq(of_layer(json, "expert_variance", 0), 0.75);
  cr_assert_eq(of_layer(json, "expert_variance", 1), 0);
  cr_assert_eq(of_layer(json, "expert_largest", 0), 2.5);
  cr_assert_eq(of_layer(json, "expert_largest", 1), 1);
  cr_assert_eq(of_layer(json, "expert_dead", 0), 0);
  cr_assert_eq(of_layer(json, "expert_dead", 1), 3);
  cr_assert_eq(of_layer(json, "routing_bytes", 0), 256);
  cr_assert_eq(of_layer(json, "routing_bytes", 1), 512);
  cr_assert_eq(real(json, "expert_window"), MZ_LOAD_WINDOW);
  bytes_read = json_object_get(json, "exchange_bytes");
  cr_assert_eq(real(bytes_read, "sent"), 4096);
  cr_assert_eq(real(bytes_read, "planned"), 8192);
  bytes_read = json_object_get(json, "exchange_ms");
  cr_assert_eq(real(bytes_read, "under_way"), 8);
  cr_assert_eq(real(bytes_read, "exposed"), 2);
  cr_assert_eq(real(bytes_read, "exposed_least"), 1.5);
  cr_assert_eq(real(json, "exchange_exposed"), 0.25);
  json_decref(json);
}

Test(metrics, losses_read_back_to_the_same_bits)
{
  mz_metrics_t m = example();
  json_t *json = written(&m, 0);

  cr_assert_eq(real(json, "loss"), 0.1 + 0.2);
  cr_assert_eq(real(json, "lm_loss"), 1.0 / 3.0);
  json_decref(json);
}

Test(metrics, not_a_number_and_infinity_are_null)
{
  mz_metrics_t m = example();
  json_t *json = written(&m, 0);

  cr_assert(json_is_null(json_object_get(json, "grad_norm")));
  cr_assert(json_is_null(json_object_get(json, "loss_scale")));
  json_decref(json);
}

Test(metrics, parameter_hash_has_16_digits)
{
  mz_metrics_t m = example();
  json_t *json;

  m.has_param_hash = true;
  m.param_hash = 0xabc;
  json = written(&m, 0);
  cr_assert_str_eq(json_string_value(json_object_get(json, "param_hash")),
                   "0000000000000abc");
  json_decref(json);
}

Test(metrics, evaluation_lines_have_eval_loss_and_no_loss)
{
  json_t *json = written(NULL, 2.0 / 3.0);

  cr_assert_eq(real(json, "step"), 7);
  cr_assert_eq(real(json, "eval_loss"), 2.0 / 3.0);
  cr_assert_eq(real(json, "eval_tokens"), 48);
  cr_assert_null(json_object_get(json, "loss"));
  json_decref(json);
}

Test(metrics, a_full_disk_is_an_error)
{
  mz_metrics_t m = example();
  FILE *file = fopen("/dev/full", "w");

  cr_assert_not_null(file);
  cr_assert_eq(mz_metrics_write(file, &m), MZ_ERR_IO);
  cr_assert(strstr(mz_error_message(), "No space left"));
  fclose(file);
}

Test(metrics, progress_shows_step_loss_rate_time_left_and_load)
{
  mz_metrics_t m = example();
  char text[256];

  mz_metrics_progress(&m, 500, 65.2, text, sizeof text);
  cr_assert_str_eq(text, "step 3/500  loss 0.3000  lr 1.00e-03  7912 tokens/s"
                         "  ETA 1:05  load 2.50 1.00  dropped 15.6%  dead 3");
  m.expert_window--; /* too early to tell */
  mz_metrics_progress(&m, 500, 65.2, text, sizeof text);
  cr_assert_null(strstr(text, "dead"));
  m.num_moes = 0;
  mz_metrics_progress(&m, 500, 3725, text, sizeof text);
  cr_assert(strstr(text, "  ETA 1:02:05"));
  cr_assert_null(strstr(text, "load"));
  mz_metrics_progress(&m, 500, -1, text, sizeof text);
  cr_assert_null(strstr(text, "ETA"));
}

Test(metrics, progress_names_the_worst_of_many_layers)
{
  const mz_expert_load_t many[5] = {loads[1], loads[1], loads[0], loads[1],
                                    loads[1]};
  mz_metrics_t m = example();
  char text[256];

  m.experts = many;
  m.num_moes = 5;
  mz_metrics_progress(&m, 500, 1, text, sizeof text);
  cr_assert(strstr(text, "load at most 2.50 (MoE layer 2)"), "%s", text);
}

Test(metrics, progress_is_cut_to_the_buffer)
{
  mz_metrics_t m = example();
  char text[16];

  mz_metrics_progress(&m, 500, 1, text, sizeof text);
  cr_assert_str_eq(text, "step 3/500  los");
}

/* Lines of steps 1 to 3, an evaluation after step 2, and half a line. */
static FILE *lines_to_cut(void)
{
  FILE *file = tmpfile();
  mz_metrics_t m = example();

  for (m.step = 1; m.step <= 3; m.step++) {
    cr_assert_eq(mz_metrics_write(file, &m), MZ_OK);
    if (m.step == 2)
      cr_assert_eq(mz_metrics_write_eval(file, 2, 1.5, 48), MZ_OK);
  }
  fputs("{\"step\": 1", file);
  return file;
}

Test(metrics, are_cut_behind_a_step)
{
  static const int left[] = {0, 1, 3, 4, 4};

  for (int step = 0; step <= 4; step++) {
    FILE *file = lines_to_cut();
    char line[4096];
    int lines = 0;

    cr_assert_eq(mz_metrics_cut(file, step), MZ_OK);
    fputs("x\n", file);
    rewind(file);
    while (fgets(line, sizeof line, file))
      lines++;
    cr_assert_eq(lines, left[step] + 1, "step %d: %d lines", step, lines);
    cr_assert_str_eq(line, "x\n");
    fclose(file);
  }
}
