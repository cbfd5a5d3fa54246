/* SPDX-License-Identifier: Apache-2.0 */
/* What the ranks decide, and the configuration and the table written out. */
#include "base/alloc.h"
#include "config/keys.h"
#include "config_base.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

/* Reads BASE with the three batch numbers; 0: not given. */
static mz_config_t *load_batch(int train, int micro, int accumulation)
{
  static const char *const names[] = {"train_batch_size",
                                      "train_micro_batch_size_per_gpu",
                                      "gradient_accumulation_steps"};
  const int values[] = {train, micro, accumulation};
  char texts[3][64];
  const char *assignments[3];
  mz_config_t *config = NULL;

  for (int i = 0; i < 3; i++) {
    snprintf(texts[i], sizeof texts[i], values[i] ? "%s=%d" : "%s=auto",
             names[i], values[i]);
    assignments[i] = texts[i];
  }
  cr_assert_eq(mz_config_parse(BASE, "base", assignments, 3, &config), MZ_OK);
  return config;
}

Test(config_batch, two_of_three_give_the_third)
{
  static const int rows[][6] = {
      /* given (0: not)   result, all on 2 ranks */
      {32, 16, 1, 32, 16, 1}, {32, 8, 2, 32, 8, 2}, {32, 8, 0, 32, 8, 2},
      {32, 0, 2, 32, 8, 2},   {0, 8, 2, 32, 8, 2},  {32, 0, 0, 32, 16, 1},
      {0, 8, 0, 16, 8, 1},
  };

  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    mz_config_t *config = load_batch(rows[i][0], rows[i][1], rows[i][2]);
    const mz_config_values_t *values = mz_config_values(config);
    cr_assert_eq(mz_config_resolve(config, 2), MZ_OK, "row %zu", i);
    cr_expect_eq(values->train_batch_size, rows[i][3]);
    cr_expect_eq(values->train_micro_batch_size_per_gpu, rows[i][4]);
    cr_expect_eq(values->gradient_accumulation_steps, rows[i][5]);
    mz_config_destroy(&config);
  }
}

Test(config_batch, what_does_not_hold_is_refused_with_the_numbers)
{
  static const struct {
    int train, micro, accumulation;
    const char *text;
  } rows[] = {
      {33, 17, 2,
       "batch: train_batch_size 33 is not train_micro_batch_size_per_gpu 17 x "
       "gradient_accumulation_steps 2 x 2 ranks = 68"},
      {32, 18, 1,
       "batch: train_batch_size 32 is not train_micro_batch_size_per_gpu 18 x "
       "gradient_accumulation_steps 1 x 2 ranks = 36"},
      {0, 0, 4,
       "batch: either train_batch_size or train_micro_batch_size_per_gpu needs "
       "to be given (gradient_accumulation_steps 4, 2 ranks)"},
      {1, 0, 0,
       "batch: train_batch_size 1 is not a multiple of 2 ranks x "
       "gradient_accumulation_steps 1"},
      {14, 0, 4,
       "batch: train_batch_size 14 is not a multiple of 2 ranks x "
       "gradient_accumulation_steps 4"},
      {30, 8, 0,
       "batch: train_batch_size 30 is not train_micro_batch_size_per_gpu 8 x "
       "gradient_accumulation_steps 1 x 2 ranks = 16"},
      {4, 8, 0,
       "batch: train_batch_size 4, train_micro_batch_size_per_gpu 8, "
       "gradient_accumulation_steps 0, 2 ranks: each has to be greater than "
       "0"},
  };

  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    mz_config_t *config =
        load_batch(rows[i].train, rows[i].micro, rows[i].accumulation);
    cr_expect_eq(mz_config_resolve(config, 2), MZ_ERR_CONFIG);
    cr_expect_str_eq(mz_error_message(), rows[i].text);
    mz_config_destroy(&config);
  }
  REFUSED("train_batch_size=0", "train_batch_size: found 0, allowed: an "
                                "integer from 1 to 2147483647");
}

Test(config_batch, is_done_anew_for_another_number_of_ranks)
{
  mz_config_t *config = load_batch(32, 0, 2);
  const mz_config_values_t *values = mz_config_values(config);

  cr_assert_eq(mz_config_resolve(config, 2), MZ_OK);
  cr_expect_eq(values->train_micro_batch_size_per_gpu, 8);
  cr_assert_eq(mz_config_resolve(config, 4), MZ_OK);
  cr_expect_eq(values->train_micro_batch_size_per_gpu, 4);
  cr_expect_eq(mz_config_resolve(config, 0), MZ_ERR_ARG);
  mz_config_destroy(&config);
}

Test(config_batch, products_beyond_64_bits_are_refused)
{
  mz_config_t *config = load_batch(0, 2147483647, 2147483647);

  cr_expect_eq(mz_config_resolve(config, 2147483647), MZ_ERR_OVERFLOW);
  mz_config_destroy(&config);
}

/* The matrix of ranks, experts and ep_size. */
Test(config_ranks, ep_size_divides_ranks_and_experts)
{
  static const struct {
    int ranks, experts, ep;
    const char *text;
  } rows[] = {
#define MOE_TEXT(ep, what, experts, ranks)                                     \
  "moe.ep_size: " #ep " does not divide the " what                             \
  " (block 0: moe.num_experts " #experts ", moe.ep_size " #ep ", " #ranks      \
  " ranks); it must divide both the ranks and the experts"
      {1, 8, 1, NULL},
      {3, 8, 1, NULL},
      {4, 8, 2, NULL},
      {4, 8, 4, NULL},
      {8, 4, 4, NULL},
      {3, 8, 2, MOE_TEXT(2, "ranks", 8, 3)},
      {3, 9, 2, MOE_TEXT(2, "ranks", 9, 3)},
      {3, 8, 3, MOE_TEXT(3, "experts", 8, 3)},
      {4, 6, 4, MOE_TEXT(4, "experts", 6, 4)},
      {2, 8, 4, MOE_TEXT(4, "ranks", 8, 2)},
      {4, 8, 3, MOE_TEXT(3, "ranks", 8, 4)},
      {8, 4, 8, MOE_TEXT(8, "experts", 4, 8)},
  };

  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    char experts[32], ep[32];
    mz_config_t *config = NULL;

    snprintf(experts, sizeof experts, "moe.num_experts=%d", rows[i].experts);
    snprintf(ep, sizeof ep, "moe.ep_size=%d", rows[i].ep);
    cr_assert_eq(LOAD(&config, experts, ep, "train_batch_size=24"), MZ_OK);
    cr_expect_eq(mz_config_resolve(config, rows[i].ranks),
                 rows[i].text ? MZ_ERR_CONFIG : MZ_OK, "row %zu", i);
    if (rows[i].text) cr_expect_str_eq(mz_error_message(), rows[i].text);
    mz_config_destroy(&config);
  }
}

/* Each part without pointers, byte for byte; then all of it as text. */
static void expect_same(const mz_config_t *a, const mz_config_t *b)
{
  const mz_config_values_t *x = mz_config_values(a), *y = mz_config_values(b);
  char *text[2] = {NULL, NULL};

  cr_expect_arr_eq(&x->model, &y->model, sizeof x->model);
  cr_expect_arr_eq(&x->moe, &y->moe, sizeof x->moe);
  cr_expect_arr_eq(&x->zero, &y->zero, sizeof x->zero);
  cr_expect_arr_eq(&x->optimizer, &y->optimizer, sizeof x->optimizer);
  cr_expect_arr_eq(&x->scheduler, &y->scheduler, sizeof x->scheduler);
  cr_expect_arr_eq(&x->train, &y->train, sizeof x->train);
  cr_expect_arr_eq(&x->comm, &y->comm, sizeof x->comm);
  cr_expect_arr_eq(x->data.train_weight, y->data.train_weight,
                   sizeof x->data.train_weight);
  cr_expect_eq(x->train_batch_size, y->train_batch_size);
  cr_expect_eq(x->train_micro_batch_size_per_gpu,
               y->train_micro_batch_size_per_gpu);
  cr_expect_eq(x->gradient_accumulation_steps, y->gradient_accumulation_steps);
  cr_expect_eq(x->gradient_clipping, y->gradient_clipping);
  cr_expect_eq(x->steps_per_print, y->steps_per_print);
  cr_assert_eq(mz_config_to_json(a, &text[0]), MZ_OK);
  cr_assert_eq(mz_config_to_json(b, &text[1]), MZ_OK);
  cr_expect_str_eq(text[0], text[1]);
  mz_config_free_text(&text[0]);
  mz_config_free_text(&text[1]);
}

/* Writes the configuration on 2 ranks, reads it back, destroys both. */
static void expect_round_trip(mz_config_t *config)
{
  mz_config_t *again = NULL;
  char *text = NULL;

  cr_assert_eq(mz_config_resolve(config, 2), MZ_OK, "%s", mz_error_last());
  cr_assert_eq(mz_config_to_json(config, &text), MZ_OK);
  cr_assert_eq(mz_config_parse(text, "again", NULL, 0, &again), MZ_OK, "%s\n%s",
               mz_error_last(), text);
  cr_expect_eq(mz_config_num_notes(again), 0);
  expect_same(config, again);
  cr_assert_eq(mz_config_resolve(again, 2), MZ_OK);
  expect_same(config, again);
  mz_config_free_text(&text);
  cr_expect_null(text);
  mz_config_destroy(&again);
  mz_config_destroy(&config);
}

Test(config_json, reads_back_to_the_same_values)
{
  mz_config_t *config = NULL;

  expect_round_trip(load(NULL));
  cr_assert_eq(mz_config_parse("{\"train_batch_size\": 4, \"data\": "
                               "{\"sequence_length\": 8}, \"moe\": "
                               "{\"overlap_chunks\": 2}}",
                               "no model", NULL, 0, &config),
               MZ_OK);
  expect_round_trip(config);
  expect_round_trip(load("moe={\"num_experts\": 4, \"ep_size\": 2}"));
  expect_round_trip(load("bfloat16.enabled=true"));
  expect_round_trip(load("communication_data_type=bf16"));
  expect_round_trip(load("moe={\"num_experts\": [0, 4, 8, 0], \"k\": 2, "
                         "\"drop_policy\": \"position\"}"));
  expect_round_trip(load("moe={\"num_experts\": 0}"));
  expect_round_trip(
      load("scheduler={\"type\": \"WarmupDecayLR\", \"params\": "
           "{\"total_num_steps\": 2000, \"warmup_max_lr\": 0.5}}"));
  expect_round_trip(
      load("scheduler={\"type\": \"WarmupCosineLR\", \"params\": "
           "{\"total_num_steps\": 2000, \"cos_min_ratio\": 0.5}}"));
  cr_assert_eq(
      LOAD(&config, "model.architecture=llama", "model.norm=layernorm",
           "model.dropout=0.1", "model.attention_bias=true",
           "optimizer.type=Adam", "optimizer.params.adam_w_mode=false",
           "optimizer.params.lr=3e-4", "optimizer.params.betas=[0.1, 0.95]",
           "scheduler.type=WarmupLR", "scheduler.params.warmup_num_steps=7",
           "optimizer.param_groups=[{\"pattern\": \"h.*\", \"experts\": true, "
           "\"lr\": 0.1, \"betas\": [0.1, 0.7]}, {\"experts\": false, "
           "\"eps\": 1e-7, \"weight_decay\": 0.3}, {\"lr\": 0}]",
           "steps_per_print=3", "zero_optimization.stage=3",
           "zero_optimization.stage3_max_live_parameters=12345678901",
           "data.train=[\"a \\\"b\", {\"path\": \"c\", \"weight\": 0.7}]",
           "data.format=tokens", "data.sequence_length=12", "data.seed=5",
           "train.device=cpu", "train.watchdog_s=0.3", "comm.thread=false",
           "checkpoint.gather_dtype=bf16", "monitor.param_hash=true"),
      MZ_OK, "%s", mz_error_last());
  expect_round_trip(config);
}

#ifdef MZ_TEST_HOOKS
Test(config_json, hooks_read_back_too)
{
  mz_config_t *config = NULL;

  cr_assert_eq(LOAD(&config, "debug.fixed_logits=[2, -1.1]",
                    "debug.route_table=[0, 3]", "debug.poison=true",
                    "debug.fault=stall:rank0:step1", "debug.delay_ms=5",
                    "debug.tokens_per_rank=[16, 8]", "debug.label_mask=[1]"),
               MZ_OK);
  expect_round_trip(config);
}
#endif

Test(config_json, hooks_that_are_off_are_left_out)
{
  mz_config_t *config = load(NULL);
  char *text = NULL;

  cr_assert_eq(mz_config_to_json(config, &text), MZ_OK);
  cr_expect_null(strstr(text, "debug"));
  mz_config_free_text(&text);
  mz_config_destroy(&config);
}

Test(config_describe, lists_every_key_once_as_text)
{
  char *text = NULL, line[128];
  const mz_key_t *key;
  int num = 0;

  cr_assert_eq(mz_config_describe(false, &text), MZ_OK);
  for (num = 0; (key = mz_key_at(num)); num++) {
    snprintf(line, sizeof line, num ? "\n%s\n" : "%s\n", key->path);
    cr_expect(strstr(text, line), "%s", key->path);
    cr_expect(strstr(text, key->meaning), "%s", key->path);
  }
  cr_expect_gt(num, 250);
  cr_expect(strstr(text, "\nzero_optimization.stage\n"
                         "    integer: an integer from 0 to 3\n"
                         "    default: 0\n"
                         "    Shards over the ranks: 1 optimizer state, 2 also "
                         "gradients, 3 also parameters\n"));
  cr_expect(strstr(text, "\nfp16.enabled\n"
                         "    boolean: true or false\n"
                         "    default: false\n"
                         "    not supported yet\n"));
  mz_config_free_text(&text);
}

Test(config_describe, lists_every_key_once_as_json)
{
  char *text = NULL;
  json_t *rows;
  size_t num = 0;

  cr_assert_eq(mz_config_describe(true, &text), MZ_OK);
  rows = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
  cr_assert_not_null(rows);
  for (; mz_key_at((int)num); num++) {
    const mz_key_t *key = mz_key_at((int)num);
    const json_t *row = json_array_get(rows, num);
    static const char *const members[] = {"name", "type", "allowed", "status",
                                          "meaning"};
    for (int m = 0; m < 5; m++)
      cr_expect(json_string_length(json_object_get(row, members[m])) > 0,
                "%s of %s", members[m], key->path);
    cr_expect_str_eq(json_string_value(json_object_get(row, "name")),
                     key->path);
    cr_expect_eq(json_object_get(row, "default") != NULL,
                 mz_key_has_default(key), "%s", key->path);
  }
  cr_expect_eq(json_array_size(rows), num);
  json_decref(rows);
  mz_config_free_text(&text);
}

Test(config_table, is_consistent)
{
  const mz_key_t *key;

  for (int i = 0; (key = mz_key_at(i)); i++) {
    json_t *fallback;

    cr_expect_eq(mz_key_find(key->path), key, "%s stands twice", key->path);
    cr_expect_not(mz_key_is_section(key->path), "%s is a section", key->path);
    if (!mz_key_has_default(key)) continue;
    fallback = json_loads(key->fallback, JSON_DECODE_ANY, NULL);
    cr_assert_not_null(fallback, "%s", key->path);
    cr_expect_eq(mz_key_check(key, fallback), MZ_OK, "%s: %s", key->path,
                 mz_error_message());
    json_decref(fallback);
  }
}

#define COSINE                                                                 \
  "scheduler={\"type\": \"WarmupCosineLR\", \"params\": "                      \
  "{\"total_num_steps\": 2000}}"

/* Every key's default may be written down: it changes nothing. */
Test(config_table, defaults_may_be_given)
{
  const mz_key_t *key;

  for (int i = 0; (key = mz_key_at(i)); i++) {
    char assignment[256];
    mz_config_t *config = NULL;
    bool params = strncmp(key->path, "scheduler.params.", 17) == 0;
    bool warmup = mz_key_fits_schedule(key, MZ_SCHED_WARMUP);

    if (!mz_key_has_default(key)) continue;
    snprintf(assignment, sizeof assignment, "%s=%s", key->path, key->fallback);
#ifndef MZ_TEST_HOOKS
    if (key->hooks) continue;
#endif
    cr_expect_eq(LOAD(&config, "moe.num_experts=1",
                      params && warmup ? "scheduler.type=WarmupLR"
                      : params         ? COSINE
                                       : "comm.thread=true",
                      assignment),
                 MZ_OK, "%s: %s", assignment, mz_error_last());
    mz_config_destroy(&config);
  }
}

Test(config_memory, every_failed_allocation_is_reported)
{
  static const char *const assignments[] = {
      "moe.num_experts=4", "data.train=[\"a\", \"b\"]",
      "zero_optimization.overlap_comm=true", "checkpoint.dir=here"};
  mz_status_t st = MZ_ERR_NOMEM;

  for (int n = 1; st != MZ_OK; n++) {
    mz_config_t *config = NULL;
    char *text = NULL;

    cr_assert_lt(n, 1000);
    mz_alloc_fail_at(n);
    st = mz_config_parse(BASE, "base", assignments, 4, &config);
    if (st == MZ_OK) st = mz_config_to_json(config, &text);
    mz_config_free_text(&text);
    if (st == MZ_OK) st = mz_config_describe(true, &text);
    mz_alloc_fail_at(0);
    cr_expect(st == MZ_OK || st == MZ_ERR_NOMEM, "%s", mz_error_last());
    mz_config_free_text(&text);
    mz_config_destroy(&config);
  }
}
