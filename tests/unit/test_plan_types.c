/* SPDX-License-Identifier: Apache-2.0 */
/* What the model's type and the type on the wire change in a plan. */
#include "plan_case.h"

/* What a test makes is freed when it ends. */
static mz_plan_t *plans[16];
static mz_decl_t *decls[16];
static int num_made;

static void free_made(void)
{
  while (num_made > 0) {
    num_made--;
    mz_plan_destroy(&plans[num_made]);
    mz_decl_destroy(&decls[num_made]);
  }
}

static mz_plan_t *plan_in(bool bf16, mz_dtype_t wire, int64_t stage)
{
  mz_config_values_t c = tiny_config(2, 2, 4, 4);
  mz_plan_opts_t opts = tiny_opts(4, 1, stage);

  c.bf16 = bf16;
  opts.communication_dtype = wire;
  cr_assert_lt(num_made, (int)(sizeof plans / sizeof *plans));
  decls[num_made] = declare(&c);
  plans[num_made] = make_plan(decls[num_made], &opts);
  return plans[num_made++];
}

static int64_t bytes_of(const mz_plan_t *p, int32_t buffer)
{
  return p->buffers[buffer].bytes;
}

static int64_t traffic_of(const mz_plan_t *p, mz_entry_kind_t kind)
{
  int64_t sum = 0;

  for (int32_t i = 0; i < p->num_traffic; i++)
    if (p->traffic[i].kind == kind)
      sum += p->traffic[i].bytes_micro + p->traffic[i].bytes_update;
  return sum;
}

Test(plan_types, bf16_halves_weights_and_adds_a_master, .fini = free_made)
{
  mz_plan_t *full = plan_in(false, MZ_F32, 3), *half = plan_in(true, MZ_F32, 3);

  cr_expect_eq(full->master, -1);
  cr_expect_eq(bytes_of(full, full->params), 2 * bytes_of(half, half->params));
  cr_assert_geq(half->master, 0);
  cr_expect_eq(bytes_of(half, half->master), bytes_of(half, half->exp_avg));
  cr_expect_eq(bytes_of(half, half->accum), bytes_of(full, full->accum));
  cr_expect_eq(traffic_of(full, MZ_ENTRY_PARAMS),
               2 * traffic_of(half, MZ_ENTRY_PARAMS));
  cr_expect_eq(traffic_of(full, MZ_ENTRY_TOKENS),
               2 * traffic_of(half, MZ_ENTRY_TOKENS));
  cr_expect_eq(traffic_of(full, MZ_ENTRY_GRADS),
               traffic_of(half, MZ_ENTRY_GRADS));
}

/* The largest weight is qkv [96, 32], the widest rows are its 96 columns. */
Test(plan_types, bf16_has_a_workspace_and_fp32_none, .fini = free_made)
{
  mz_plan_t *full = plan_in(false, MZ_F32, 0), *half = plan_in(true, MZ_F32, 0);
  const mz_plan_buffer_t *b;

  cr_expect_eq(full->workspace, -1);
  cr_assert_geq(half->workspace, 0);
  b = &half->buffers[half->workspace];
  cr_expect_eq(b->category, MZ_CAT_WORKSPACE);
  cr_expect(b->persistent);
  cr_expect_eq(b->bytes, 4 * (96 * 32 + 2 * 96 + 256 * 6 * 96));
  cr_expect_geq(half->category_bytes[MZ_CAT_WORKSPACE], b->bytes);
}

/* 16 bytes for each of the H 32 columns of 16 tokens, in either type and
 * whatever narrow arrays there are beside: statistics, a thin shared expert. */
Test(plan_types, a_gpu_has_a_workspace_for_the_models_width)
{
  mz_config_values_t c = tiny_config(2, 2, 4, 4);
  mz_plan_opts_t opts = tiny_opts(4, 1, 0);

  opts.cuda = true;
  for (int i = 0; i < 4; i++) {
    mz_decl_t *decl;
    mz_plan_t *plan;

    c.bf16 = i % 2 == 1;
    c.moe.num_shared_experts = i / 2;
    c.moe.shared_expert_intermediate_size = 3;
    c.moe.shared_expert_gate = true;
    decl = declare(&c);
    plan = make_plan(decl, &opts);
    cr_expect_eq(bytes_of(plan, plan->workspace), (192 << 20) + 16 * 16 * 32,
                 "case %d", i);
    mz_plan_destroy(&plan);
    mz_decl_destroy(&decl);
  }
}

/* Contributions in bf16 are packed, one unit in one piece too, and those of the
 * other ranks arrive; what is summed at stage 0 is gathered in fp32. */
Test(plan_types, gradients_travel_in_the_type_of_the_wire, .fini = free_made)
{
  for (int64_t stage = 0; stage <= 3; stage++) {
    mz_plan_t *full = plan_in(false, MZ_F32, stage);
    mz_plan_t *half = plan_in(false, MZ_BF16, stage);

    cr_expect_eq(traffic_of(full, MZ_ENTRY_GRADS),
                 2 * traffic_of(half, MZ_ENTRY_GRADS));
    cr_expect_eq(traffic_of(full, MZ_ENTRY_SUMS),
                 traffic_of(half, MZ_ENTRY_SUMS));
    for (int32_t i = 0; i < half->num_entries; i++) {
      const mz_entry_t *e = &half->entries[i];
      int64_t ranks;

      if (e->kind == MZ_ENTRY_SUMS) cr_expect_eq(e->dtype, MZ_F32);
      if (e->kind != MZ_ENTRY_GRADS) continue;
      cr_expect_eq(e->dtype, MZ_BF16);
      cr_assert_geq(e->packed, 0);
      ranks = half->units[e->first_unit].ranks;
      cr_expect_eq(bytes_of(half, e->packed), e->length * 2 * ranks);
      cr_expect_eq(bytes_of(half, e->staging), e->length * 2 * (ranks - 1));
    }
  }
}
