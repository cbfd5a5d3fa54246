/* SPDX-License-Identifier: Apache-2.0 */
/* The plan as text and JSON, the predicted step, and how long planning takes.
 */
#include "plan_case.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <time.h>

static mz_plan_t *tiny_plan(mz_decl_t **decl, int32_t ep, int64_t stage,
                            const mz_machine_t *machine)
{
  mz_config_values_t c = tiny_config(ep, ep, 4, 4);
  mz_plan_opts_t opts = tiny_opts(2, 0, stage);

  opts.accumulation = 3;
  if (machine) opts.machine = *machine;
  *decl = declare(&c);
  return make_plan(*decl, &opts);
}

static char *json_of(const mz_plan_t *plan)
{
  char *text = NULL;

  cr_assert_eq(mz_plan_to_json(plan, &text), MZ_OK, "%s", mz_error_last());
  return text;
}

Test(plan_json, is_the_same_bytes_for_the_same_arguments)
{
  for (int64_t stage = 0; stage <= 3; stage++) {
    mz_decl_t *decl[2];
    mz_plan_t *plan[2];
    char *text[2];

    for (int i = 0; i < 2; i++) {
      plan[i] = tiny_plan(&decl[i], 2, stage, NULL);
      text[i] = json_of(plan[i]);
    }
    cr_expect_str_eq(text[0], text[1]);
    for (int i = 0; i < 2; i++) {
      mz_free(text[i]);
      mz_plan_destroy(&plan[i]);
      mz_decl_destroy(&decl[i]);
    }
  }
}

static int64_t number(const json_t *object, const char *key)
{
  const json_t *value = json_object_get(object, key);

  cr_assert(json_is_integer(value), "%s", key);
  return json_integer_value(value);
}

static const json_t *row(const json_t *root, const char *list, const char *key,
                         const char *name)
{
  const json_t *all = json_object_get(root, list);

  for (size_t i = 0; i < json_array_size(all); i++) {
    const json_t *r = json_array_get(all, i);
    const char *text = json_string_value(json_object_get(r, key));
    if (text && strcmp(text, name) == 0) return r;
  }
  cr_assert_fail("no %s \"%s\" in %s", key, name, list);
  return NULL;
}

Test(plan_json, holds_what_the_plan_holds)
{
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 2, 2, NULL);
  char *text = json_of(p);
  json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
  const json_t *r;

  cr_assert_not_null(root);
  cr_expect_eq(text[strlen(text) - 1], '\n');
  cr_expect_eq(number(json_object_get(root, "options"), "accumulation"), 3);
  r = row(root, "groups", "name", "data");
  cr_expect_eq(number(r, "size"), 2);
  cr_expect_eq(json_array_size(json_object_get(r, "ranks")), 2);
  r = row(root, "units", "name", "block.1");
  cr_expect_eq(number(r, "elements"), 5120);
  cr_expect_eq(number(r, "shard"), 2560);
  cr_expect_eq(number(r, "p"), 1);
  cr_expect_eq(number(r, "o"), 2);
  r = row(root, "buffers", "name", "accumulators");
  cr_expect_eq(number(r, "bytes"), p->buffers[p->accum].bytes);
  cr_expect_eq(number(r, "offset"), p->buffers[p->accum].offset);
  cr_expect(json_is_true(json_object_get(r, "persistent")));
  r = json_object_get(row(root, "buffers", "name", "h.0.moe.send"), "lives");
  cr_expect_eq(json_array_size(json_object_get(r, "micro")), 2);
  cr_expect_null(json_object_get(r, "update"));
  r = row(root, "messages", "kind", "tokens");
  cr_expect(json_is_true(json_object_get(r, "bound")));
  cr_expect_eq(number(r, "calls_micro"), 20);
  cr_expect_eq(number(json_object_get(root, "bytes"), "gradients"),
               p->category_bytes[MZ_CAT_GRADS]);
  cr_expect_eq(number(root, "arena_bytes"), p->arena_bytes);
  cr_expect_eq(number(root, "pool_rows"), 80);
  cr_expect_eq(number(row(root, "moes", "name", "h.1.moe"), "round_rows"), 40);
  cr_expect_eq(number(json_object_get(root, "schedule"), "micro_ops"),
               p->num_ops[MZ_WALK_MICRO]);
  cr_expect_eq((int32_t)json_array_size(json_object_get(root, "buffers")),
               p->num_buffers);
  cr_expect_eq(json_real_value(
                   json_object_get(json_object_get(root, "times"), "step_s")),
               p->times.step_s);
  json_decref(root);
  mz_free(text);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

static void expect_line(const char *text, const char *line)
{
  cr_expect(strstr(text, line), "no \"%s\" in\n%s", line, text);
}

Test(plan_text, is_a_table)
{
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 2, 1, NULL);
  char *text = NULL;

  cr_assert_eq(mz_plan_to_text(p, &text), MZ_OK);
  expect_line(text, "plan of rank 0 of 2: ZeRO stage 1, fp32, 1 x 16 tokens a "
                    "micro-batch, accumulation 3\n");
  expect_line(text, "  data                      2  0 1\n");
  /* 13,632 elements in the tensors, 15,104 padded, half of them updated */
  expect_line(text, "  dense                     4          13632"
                    "          15104          15104           7552\n");
  expect_line(text, "  h.0.moe                   2          16768"
                    "           8704           8704           8704\n");
  expect_line(text, "arena, in all");
  /* two layers of the bound by hand, three micro-batches */
  expect_line(text, "  tokens                data           20          57344"
                    "        0              0       60         172032 at most"
                    "\n");
  expect_line(text, "  scalars               data            0              0"
                    "        2            256        2            256\n");
  expect_line(text, "operations             4.531e+05 multiply-adds");
  cr_expect_eq(text[strlen(text) - 1], '\n');
  mz_free(text);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

Test(plan_text, of_one_rank_has_no_messages)
{
  mz_config_values_t c = tiny_config(1, 1, 4, 4);
  mz_decl_t *decl = declare(&c);
  mz_plan_opts_t opts = tiny_opts(1, 0, 0);
  mz_plan_t *p = make_plan(decl, &opts);
  char *text = NULL;

  cr_assert_eq(mz_plan_to_text(p, &text), MZ_OK);
  expect_line(text, "  none\n");
  mz_free(text);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

/* T 16, H 32: norms 5 x 2 T H; two of attention T (3072 + 1024 + 17 H); two of
 * MoE T (4 H + 2 x 4096); embedding T H; head T H 64. */
Test(plan_times, operations_by_hand)
{
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 1, 0, NULL);
  double want = 5 * 2 * 512 + 2 * 16 * (3072 + 1024 + 17 * 32) +
                2 * 16 * (4 * 32 + 2 * 4096) + 512 + 512 * 64;

  cr_expect_float_eq(p->operations, want, 1e-6);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

static const double never = 1e-300; /* seconds, or seconds a byte */

Test(plan_times, computing_is_three_forwards_of_two_operations)
{
  mz_machine_t machine = {1e6, 1 / never, 1 / never, never};
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 2, 1, &machine);

  cr_expect_float_eq(p->times.compute_s, 3 * 6 * p->operations * 1e-6, 1e-9);
  cr_expect_float_eq(p->times.step_s, p->times.compute_s, 1e-9);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

/* Stage 1, ep 2: a rank updates half of 15,104 dense elements and its four
 * experts of 4352. */
Test(plan_times, the_update_reads_and_writes_28_bytes_an_element)
{
  mz_machine_t machine = {1 / never, 1e6, 1 / never, never};
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 2, 1, &machine);

  cr_expect_float_eq(p->times.update_s, 28e-6 * (7552 + 4 * 4352), 1e-9);
  cr_expect_float_eq(p->times.step_s, p->times.update_s, 1e-9);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

/* A micro-batch: per layer counts and, with the rows in the pool, two messages
 * of tokens each way; one of statistics. A step: scalars twice, gradients and
 * weights. Tokens: 32 rows of 128 bytes each time. */
Test(plan_times, messages_cost_latency_and_bytes_of_balanced_tokens)
{
  mz_machine_t slow = {1 / never, 1 / never, 1 / never, 1};
  mz_machine_t thin = {1 / never, 1 / never, 1e6, never};
  double micro = 2 * (24 + 4 * 32 * 128) + 288, step = 256 + 30208 + 30208;
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 2, 1, &slow);

  cr_expect_float_eq(p->times.messages_s, 3 * (2 * 5 + 1) + 4, 1e-9);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
  p = tiny_plan(&decl, 2, 1, &thin);
  cr_expect_float_eq(p->times.messages_s, 1e-6 * (3 * micro + step), 1e-9);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

Test(plan_times, a_machine_of_zeros_is_a_cpu_rank)
{
  mz_machine_t cpu = {5e10, 1.5e10, 5e8, 1e-4};
  mz_decl_t *decl[2];
  mz_plan_t *p = tiny_plan(&decl[0], 2, 1, NULL);
  mz_plan_t *q = tiny_plan(&decl[1], 2, 1, &cpu);

  cr_expect_eq(p->times.step_s, q->times.step_s);
  cr_expect_gt(p->times.step_s, 0);
  mz_plan_destroy(&p);
  mz_plan_destroy(&q);
  mz_decl_destroy(&decl[0]);
  mz_decl_destroy(&decl[1]);
}

Test(plan_fits, compares_the_arena_with_the_device)
{
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 1, 1, NULL);

  cr_expect_eq(mz_plan_fits(p, p->arena_bytes), MZ_OK);
  cr_expect_eq(mz_plan_fits(p, 0), MZ_OK);
  cr_expect_eq(mz_plan_fits(p, p->arena_bytes - 1), MZ_ERR_FIT);
  p->arena_bytes = INT64_C(3) << 30;
  cr_expect_eq(mz_plan_fits(p, INT64_C(2) << 30), MZ_ERR_FIT);
  cr_expect_str_eq(mz_error_message(),
                   "a rank needs 3.000 GiB, the device has 2.000 GiB");
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

/* The ledger against its definition: the most bytes at one operation. */
static void check_peaks(const world_t *w, const char *name)
{
  const mz_plan_t *p = w->plans[0];
  int64_t peak[MZ_NUM_CATEGORIES] = {0};

  for (int k = 0; k < MZ_NUM_WALKS; k++)
    for (int32_t at = 0; at < p->num_ops[k]; at++) {
      int64_t live[MZ_NUM_CATEGORIES] = {0};

      for (int32_t i = 0; i < p->num_buffers; i++) {
        const mz_plan_buffer_t *b = &p->buffers[i];
        if (b->persistent || (b->life[k].first <= at && b->life[k].last >= at))
          live[b->category] += mz_round_up(b->bytes, MZ_ALIGN_BYTES);
      }
      for (int c = 0; c < MZ_NUM_CATEGORIES; c++)
        peak[c] = mz_max_i64(peak[c], live[c]);
    }
  for (int c = 0; c < MZ_NUM_CATEGORIES; c++)
    cr_assert_eq(p->category_bytes[c], peak[c], "%s: %s", name,
                 mz_category_name((mz_category_t)c));
}

Test(plan_ledger, a_category_is_the_most_that_lives_at_once)
{
  for_worlds(check_peaks);
}

/* --- memory --- */

typedef mz_status_t (*make_fn)(const mz_decl_t *decl);

static mz_status_t plan_only(const mz_decl_t *decl)
{
  mz_plan_opts_t opts = small_opts(2, 0, 3);
  mz_plan_t *plan = NULL;
  mz_status_t st = mz_plan_create(decl, &opts, &plan);

  if (st != MZ_OK) cr_assert_null(plan);
  mz_plan_destroy(&plan);
  return st;
}

static void expect_all_failures(make_fn make, int at_least)
{
  mz_config_values_t c = tiny_config(2, 1, 4, 4);
  mz_decl_t *decl = declare(&c);
  mz_status_t st = MZ_ERR_NOMEM;
  int64_t n;

  for (n = 0; st != MZ_OK && n < 2000; n++) {
    mz_alloc_fail_at(n + 1);
    st = make(decl);
    mz_alloc_fail_at(0);
    cr_assert(st == MZ_OK || st == MZ_ERR_NOMEM, "%s", mz_error_last());
  }
  cr_expect_eq(st, MZ_OK);
  cr_expect_gt(n, at_least);
  mz_decl_destroy(&decl);
}

Test(plan_memory, a_failed_allocation_is_an_error_without_a_leak)
{
  expect_all_failures(plan_only, 60);
}

static const mz_plan_t *printed;

static mz_status_t print_text(const mz_decl_t *decl)
{
  char *text = NULL;
  mz_status_t st = mz_plan_to_text(printed, &text);

  mz_free(text);
  return st;
}

static mz_status_t print_json(const mz_decl_t *decl)
{
  char *text = NULL;
  mz_status_t st = mz_plan_to_json(printed, &text);

  mz_free(text);
  return st;
}

Test(plan_memory, a_text_that_does_not_fit_is_an_error_without_a_leak)
{
  mz_decl_t *decl;
  mz_plan_t *p = tiny_plan(&decl, 2, 3, NULL);

  printed = p;
  expect_all_failures(print_text, 3);
  expect_all_failures(print_json, 5);
  mz_plan_destroy(&p);
  mz_decl_destroy(&decl);
}

/* --- 4096 ranks --- */

static double now_ms(void)
{
  struct timespec t;

  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* 24 blocks of width 1024, 128 experts each; DeepSpeed's buckets. */
static mz_decl_t *declare_big(int32_t ep)
{
  mz_config_values_t c = tiny_config(1, 1, 4, 4);

  c.model.vocab_size = 50257;
  c.model.hidden_size = 1024;
  c.model.num_hidden_layers = 24;
  c.model.num_attention_heads = c.model.num_key_value_heads = 16;
  c.model.max_position_embeddings = 1024;
  c.moe.expert_intermediate_size = c.model.intermediate_size = 4096;
  c.moe.num_layers = 24;
  for (int32_t i = 0; i < 24; i++) {
    c.moe.layer[i] = i;
    c.moe.num_experts[i] = 128;
    c.moe.ep_size[i] = ep;
  }
  return declare(&c);
}

static void plan_big(int32_t ep, int64_t stage, int64_t bucket)
{
  mz_decl_t *decl = declare_big(ep);
  mz_plan_opts_t opts = tiny_opts(4096, 2049, stage);
  double before;
  mz_plan_t *plan;

  opts.sequence_length = 1024;
  opts.reduce_bucket_size = opts.allgather_bucket_size = bucket;
  opts.prefetch_bucket_size = 50000000;
  opts.persistence_threshold = 100000;
  opts.max_live_parameters = opts.max_reuse_distance = 1000000000;
  opts.piece_bytes = 32 << 20;
  before = now_ms();
  plan = make_plan(decl, &opts);
  printf("4096 ranks, ep %d, stage %d, buckets of %.0e: %d units, %d entries, "
         "%d operations, %d buffers in %.1f ms\n",
         ep, (int)stage, (double)bucket, plan->num_units, plan->num_entries,
         plan->num_ops[MZ_WALK_MICRO], plan->num_buffers, now_ms() - before);
  cr_expect_eq(plan->groups[0].size, 4096);
  cr_expect_eq(plan->units[plan->num_units - 1].ranks, 4096 / ep);
  mz_plan_destroy(&plan);
  mz_decl_destroy(&decl);
}

Test(plan_speed, a_rank_of_4096_is_planned_at_once)
{
  plan_big(64, 0, 500000000);
  plan_big(64, 3, 500000000);
  plan_big(1, 3, 500000000);
  plan_big(1, 3, 8000000); /* one expert a run: 3072 runs */
}
