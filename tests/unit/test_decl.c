/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations: what is refused, with its text, and names. */
#include "base/alloc.h"
#include "moezero/decl.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static mz_decl_t *decl;

static void create(void) { cr_assert_eq(mz_decl_create(&decl), MZ_OK); }

static void destroy(void)
{
  mz_decl_destroy(&decl);
  cr_assert_null(decl);
}

TestSuite(decl, .init = create, .fini = destroy);

static mz_status_t no_step(const struct mz_call *call, void *self)
{
  return MZ_OK;
}

static void expect_error(mz_status_t got, mz_status_t want, const char *text)
{
  cr_expect_eq(got, want, "%s", mz_status_text(got));
  cr_expect_str_eq(mz_error_message(), text);
  mz_error_clear();
}

static mz_status_t add(const char *name, int64_t rows, int32_t *id)
{
  mz_tensor_opts_t t = {.name = name, .ndim = 1, .shape = {rows}};
  return mz_decl_tensor(decl, &t, id);
}

static mz_status_t add_moe(int32_t experts, int32_t ep, int32_t k, int32_t *id)
{
  mz_moe_opts_t m = {
      .name = "moe", .num_experts = experts, .ep_size = ep, .k = k};
  return mz_decl_moe(decl, &m, id);
}

static void add_layer(void)
{
  mz_layer_opts_t layer = {.name = "layer"};
  cr_assert_eq(mz_decl_layer(decl, &layer), MZ_OK);
}

Test(decl, finds_tensors_by_name_among_many)
{
  char name[32];
  int64_t shape[4];
  int32_t id;

  for (int i = 0; i < 500; i++) {
    snprintf(name, sizeof name, "tensor.%d", i);
    cr_assert_eq(add(name, i + 1, &id), MZ_OK, "%s", mz_error_last());
    cr_assert_eq(id, i);
  }
  cr_expect_eq(mz_decl_num_tensors(decl), 500);
  cr_expect_eq(mz_decl_find_tensor(decl, "tensor.321"), 321);
  cr_expect_eq(mz_decl_find_tensor(decl, "tensor.500"), -1);
  cr_expect_str_eq(mz_decl_tensor_name(decl, 17), "tensor.17");
  cr_expect_eq(mz_decl_tensor_elements(decl, 17), 18);
  cr_expect_eq(mz_decl_tensor_shape(decl, 17, shape), 1);
  cr_expect_eq(shape[0], 18);
}

Test(decl, an_empty_one_has_no_tensor_of_any_name)
{
  cr_expect_eq(mz_decl_find_tensor(decl, "tensor"), -1);
}

Test(decl, names_an_experts_tensors_by_its_global_number)
{
  mz_tensor_opts_t t = {.name = "up", .ndim = 2, .shape = {3, 5}};
  int32_t moe, first;

  cr_assert_eq(add_moe(4, 2, 1, &moe), MZ_OK);
  cr_assert_eq(mz_decl_expert_tensor(decl, moe, &t, &first), MZ_OK);
  cr_expect_eq(mz_decl_num_tensors(decl), 4);
  cr_expect_eq(mz_decl_find_tensor(decl, "moe.experts.3.up"), first + 3);
  expect_error(mz_decl_borrow(decl, "moe.experts.3.up", &first), MZ_ERR_ARG,
               "\"moe.experts.3.up\" is an expert's tensor and cannot be "
               "borrowed");
}

Test(decl, refuses_a_name_twice_and_a_hash_twice)
{
  int32_t id;

  cr_assert_eq(add("weight", 1, &id), MZ_OK);
  expect_error(add("weight", 1, &id), MZ_ERR_ARG,
               "tensor \"weight\" has the hash of \"weight\": names must "
               "differ, and their hashes too");
  /* FNV-1a of both is 0x5e4daa9d */
  cr_assert_eq(add("costarring", 1, &id), MZ_OK);
  expect_error(add("liquid", 1, &id), MZ_ERR_ARG,
               "tensor \"liquid\" has the hash of \"costarring\": names must "
               "differ, and their hashes too");
}

Test(decl, refuses_names_that_are_missing_or_too_long)
{
  char name[MZ_NAME_MAX + 1];
  int32_t id;

  memset(name, 'n', sizeof name);
  name[MZ_NAME_MAX] = '\0';
  expect_error(add(name, 1, &id), MZ_ERR_ARG,
               "name \"nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn...\" has 96 "
               "bytes, at most 95 are allowed");
  name[MZ_NAME_MAX - 1] = '\0';
  cr_expect_eq(add(name, 1, &id), MZ_OK);
  expect_error(add("", 1, &id), MZ_ERR_ARG, "a name is missing");
  expect_error(add(NULL, 1, &id), MZ_ERR_ARG, "a name is missing");
}

Test(decl, refuses_shapes_out_of_range)
{
  mz_tensor_opts_t t = {.name = "t", .ndim = 5};
  int32_t id;

  expect_error(mz_decl_tensor(decl, &t, &id), MZ_ERR_ARG,
               "t: 5 dimensions, need 1..4");
  t.ndim = 2;
  t.shape[0] = 3;
  expect_error(mz_decl_tensor(decl, &t, &id), MZ_ERR_ARG,
               "t: extent 1 is 0, need at least 1");
  t.shape[0] = t.shape[1] = INT64_C(1) << 32;
  expect_error(mz_decl_tensor(decl, &t, &id), MZ_ERR_OVERFLOW,
               "4294967296 x 4294967296 does not fit into 64 bits");
  t.shape[0] = t.shape[1] = 1;
  t.init_std = -1;
  expect_error(mz_decl_tensor(decl, &t, &id), MZ_ERR_ARG,
               "t: standard deviation -1, need at least 0");
  t.init_std = 0;
  t.param_group = 2;
  expect_error(mz_decl_tensor(decl, &t, &id), MZ_ERR_ARG,
               "t: parameter group 2, need 0..1");
}

Test(decl, refuses_experts_that_do_not_divide)
{
  int32_t id;

  expect_error(add_moe(4, 3, 1, &id), MZ_ERR_ARG,
               "moe: num_experts 4 is not divisible by ep_size 3");
  expect_error(add_moe(4, 0, 1, &id), MZ_ERR_ARG,
               "moe: num_experts 4 is not divisible by ep_size 0");
  expect_error(add_moe(4, -1, 1, &id), MZ_ERR_ARG,
               "moe: num_experts 4 is not divisible by ep_size -1");
  expect_error(add_moe(0, 1, 1, &id), MZ_ERR_ARG,
               "moe: num_experts is 0, need at least 1");
  expect_error(add_moe(4, 2, 5, &id), MZ_ERR_ARG,
               "moe: k is 5, need 1..num_experts=4");
}

Test(decl, refuses_capacity_factors_of_nothing)
{
  mz_moe_opts_t m = {.name = "moe",
                     .num_experts = 4,
                     .ep_size = 2,
                     .k = 1,
                     .drop_tokens = true,
                     .capacity_factor = 1};
  int32_t id;

  expect_error(mz_decl_moe(decl, &m, &id), MZ_ERR_ARG,
               "moe: capacity factors 1 and 0, need above 0");
  m.drop_tokens = false;
  m.eval_drop = MZ_EVAL_DROPS;
  expect_error(mz_decl_moe(decl, &m, &id), MZ_ERR_ARG,
               "moe: capacity factors 1 and 0, need above 0");
  m.expert_capacity = -1;
  m.eval_drop = MZ_EVAL_DROPLESS;
  expect_error(mz_decl_moe(decl, &m, &id), MZ_ERR_ARG,
               "moe: expert_capacity -1, bias_update_rate 0, need at least 0");
  m.expert_capacity = 3;
  m.eval_drop = MZ_EVAL_DROPS;
  cr_assert_eq(mz_decl_moe(decl, &m, &id), MZ_OK);
}

Test(decl, refuses_to_borrow_what_is_not_there)
{
  int32_t id;

  expect_error(mz_decl_borrow(decl, "wte.weight", &id), MZ_ERR_ARG,
               "no tensor \"wte.weight\" to borrow");
}

Test(decl, refuses_steps_with_references_out_of_range)
{
  mz_compute_opts_t step = {.name = "step", .fn = no_step};

  expect_error(mz_decl_compute(decl, MZ_FORWARD, &step), MZ_ERR_ARG,
               "a step before the first layer");
  add_layer();
  step.num_reads = 1;
  expect_error(mz_decl_compute(decl, MZ_FORWARD, &step), MZ_ERR_ARG,
               "step step: no buffer 0");
  step.num_reads = 0;
  step.num_grads = 1;
  step.grads[0] = 7;
  expect_error(mz_decl_compute(decl, MZ_FORWARD, &step), MZ_ERR_ARG,
               "step step: no tensor 7");
  step.num_grads = 17;
  expect_error(mz_decl_compute(decl, MZ_FORWARD, &step), MZ_ERR_ARG,
               "step step: 17 references, at most 16");
  step.fn = NULL;
  expect_error(mz_decl_compute(decl, MZ_FORWARD, &step), MZ_ERR_ARG,
               "step step has no function");
}

Test(decl, refuses_steps_of_a_moe_that_is_not_there)
{
  add_layer();
  expect_error(mz_decl_runs(decl, MZ_FORWARD, 0), MZ_ERR_ARG, "no MoE 0");
  expect_error(mz_decl_counts(decl, MZ_FORWARD, -1, 0), MZ_ERR_ARG,
               "no MoE -1");
}

Test(decl, refuses_two_moes_in_one_layer)
{
  int32_t first, second;

  cr_assert_eq(add_moe(4, 2, 1, &first), MZ_OK);
  cr_assert_eq(add_moe(4, 2, 1, &second), MZ_OK);
  add_layer();
  cr_assert_eq(mz_decl_runs(decl, MZ_FORWARD, first), MZ_OK);
  expect_error(mz_decl_runs(decl, MZ_BACKWARD, second), MZ_ERR_ARG,
               "layer layer has the MoEs moe and moe, one is possible");
}

static int32_t buffer_of(const char *name, mz_rows_t kind, int32_t moe,
                         int64_t width)
{
  mz_buffer_opts_t b = {
      .name = name, .kind = kind, .rows = 1, .moe = moe, .width = width};
  int32_t id;

  cr_assert_eq(mz_decl_buffer(decl, &b, &id), MZ_OK);
  return id;
}

Test(decl, refuses_counts_that_have_no_room)
{
  mz_buffer_opts_t b = {.name = "short",
                        .kind = MZ_ROWS_FIXED,
                        .rows = 1,
                        .width = 3,
                        .dtype = MZ_I32};
  int32_t moe, tokens, few;

  cr_assert_eq(add_moe(4, 2, 1, &moe), MZ_OK);
  add_layer();
  tokens = buffer_of("tokens", MZ_ROWS_TOKENS, moe, 4);
  cr_assert_eq(mz_decl_buffer(decl, &b, &few), MZ_OK);
  expect_error(mz_decl_counts(decl, MZ_FORWARD, moe, 7), MZ_ERR_ARG,
               "counts: no buffer 7");
  expect_error(
      mz_decl_counts(decl, MZ_FORWARD, moe, tokens), MZ_ERR_ARG,
      "counts: buffer tokens is MZ_ROWS_TOKENS, needed is MZ_ROWS_FIXED");
  expect_error(mz_decl_counts(decl, MZ_FORWARD, moe, few), MZ_ERR_SHAPE,
               "counts: buffer short has 3 int32 a row, needed are 4 int32");
}

Test(decl, refuses_buffers_and_exchanges_that_do_not_fit)
{
  mz_buffer_opts_t b = {.name = "b", .kind = MZ_ROWS_ROUND, .width = 1};
  int32_t id, moe, other, wide, narrow;

  expect_error(mz_decl_buffer(decl, &b, &id), MZ_ERR_ARG, "b: no MoE 0");
  b.kind = MZ_ROWS_FIXED;
  b.rows = -1;
  expect_error(mz_decl_buffer(decl, &b, &id), MZ_ERR_ARG,
               "b: -1 rows of 1 elements");
  cr_assert_eq(add_moe(4, 2, 1, &moe), MZ_OK);
  cr_assert_eq(add_moe(4, 2, 1, &other), MZ_OK);
  add_layer();
  wide = buffer_of("wide", MZ_ROWS_TOKENS, moe, 8);
  narrow = buffer_of("narrow", MZ_ROWS_ROUND, moe, 4);
  expect_error(
      mz_decl_exchange(decl, MZ_FORWARD, moe, MZ_DISPATCH, wide, narrow),
      MZ_ERR_SHAPE,
      "exchange of rows of 8 into rows of 4 elements (wide, narrow)");
  expect_error(mz_decl_exchange(decl, MZ_FORWARD, moe, MZ_DISPATCH, wide, wide),
               MZ_ERR_ARG, "exchange between buffers 0 and 0");
  expect_error(
      mz_decl_exchange(decl, MZ_FORWARD, moe, MZ_RETURN, wide, narrow),
      MZ_ERR_ARG,
      "exchange: buffer narrow is MZ_ROWS_ROUND, needed is MZ_ROWS_TOKENS");
  expect_error(
      mz_decl_exchange(decl, MZ_FORWARD, other, MZ_RETURN, narrow, wide),
      MZ_ERR_ARG,
      "exchange: buffer narrow is MZ_ROWS_ROUND, needed is MZ_ROWS_ROUND of "
      "the same MoE");
}

Test(decl, the_element_type_is_set_before_the_first_tensor)
{
  int32_t id;

  cr_expect_eq(mz_decl_dtype(decl), MZ_F32);
  cr_assert_eq(mz_decl_set_dtype(decl, MZ_BF16), MZ_OK);
  cr_expect_eq(mz_decl_dtype(decl), MZ_BF16);
  cr_assert_eq(add("t", 1, &id), MZ_OK);
  expect_error(mz_decl_set_dtype(decl, MZ_F32), MZ_ERR_ARG,
               "the element type is set before the first tensor");
}

static int destroyed;

static void count_destroy(void *self) { destroyed++; }

Test(decl, destroys_each_layer_once)
{
  mz_layer_opts_t layer = {.name = "layer", .destroy = count_destroy};

  cr_assert_eq(mz_decl_layer(decl, &layer), MZ_OK);
  cr_assert_eq(mz_decl_layer(decl, &layer), MZ_OK);
  mz_decl_destroy(&decl);
  mz_decl_destroy(&decl);
  cr_expect_eq(destroyed, 2);
}

/* Enough of each list to make it grow. */
static mz_status_t declare_all(void)
{
  mz_layer_opts_t layer = {.name = "layer"};
  mz_tensor_opts_t up = {.name = "up", .ndim = 1, .shape = {4}};
  mz_buffer_opts_t buffer = {.name = "buffer", .rows = 1, .width = 1};
  mz_compute_opts_t step = {.name = "step", .fn = no_step};
  mz_status_t st = mz_decl_layer(decl, &layer);
  int32_t id, moe = -1;

  if (st == MZ_OK) st = add_moe(40, 1, 1, &moe);
  if (st == MZ_OK) st = mz_decl_expert_tensor(decl, moe, &up, &id);
  if (st == MZ_OK) st = mz_decl_buffer(decl, &buffer, &id);
  if (st == MZ_OK) st = mz_decl_simple(decl, &step, &step);
  return st;
}

Test(decl_memory, a_failed_allocation_is_an_error_that_leaves_a_whole_object)
{
  mz_status_t st = MZ_ERR_NOMEM;
  int64_t n;

  for (n = 0; st != MZ_OK && n < 100; n++) {
    mz_alloc_fail_at(n + 1);
    st = mz_decl_create(&decl);
    if (st == MZ_OK) st = declare_all();
    mz_alloc_fail_at(0);
    cr_assert(st == MZ_OK || st == MZ_ERR_NOMEM, "%s", mz_error_last());
    if (decl)
      cr_expect_eq(mz_decl_find_tensor(decl, "moe.experts.39.up") >= 0,
                   st == MZ_OK || mz_decl_num_tensors(decl) == 40);
    mz_decl_destroy(&decl);
  }
  cr_expect_eq(st, MZ_OK);
  cr_expect_gt(n, 8);
}
