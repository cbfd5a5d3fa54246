/* SPDX-License-Identifier: Apache-2.0 */
/* Groups, units, shards and segments: who holds what. */
#include "plan_case.h"

#include <stdio.h>

/* --- groups --- */

static const mz_group_t *group(const mz_plan_t *plan, const char *name)
{
  for (int32_t i = 0; i < plan->num_groups; i++)
    if (strcmp(plan->groups[i].name, name) == 0) return &plan->groups[i];
  return NULL;
}

/* Every rank of @p want is in a group of this name, which holds them in this
 * order. */
static void expect_group(const world_t *w, const char *name, int size,
                         const int *want)
{
  for (int i = 0; i < size; i++) {
    const mz_group_t *g = group(w->plans[want[i]], name);

    cr_assert_not_null(g, "%s on rank %d", name, want[i]);
    cr_assert_eq(g->size, size);
    cr_expect_eq(g->place, i);
    for (int j = 0; j < size; j++)
      cr_expect_eq(g->ranks[j], want[j], "%s of rank %d, member %d", name,
                   want[i], j);
  }
}

#define EXPECT_GROUP(w, name, ...)                                             \
  expect_group((w), (name), (int)(sizeof((int[]){__VA_ARGS__}) / sizeof(int)), \
               (const int[]){__VA_ARGS__})

static world_t world_of(int size, int32_t ep, int32_t experts, bool data_first)
{
  layout_t l = {size, ep, ep, experts, experts, data_first};
  return make_world(&l, 1, tiny_opts);
}

Test(plan_groups, four_ranks_in_pairs)
{
  world_t w = world_of(4, 2, 8, false);

  EXPECT_GROUP(&w, "data", 0, 1, 2, 3);
  EXPECT_GROUP(&w, "ep2", 0, 1);
  EXPECT_GROUP(&w, "ep2", 2, 3);
  EXPECT_GROUP(&w, "edp2", 0, 2);
  EXPECT_GROUP(&w, "edp2", 1, 3);
  cr_expect_eq(w.plans[0]->num_groups, 3);
  cr_expect_eq(w.plans[3]->moes[0].experts_per_rank, 4);
  cr_expect_eq(w.plans[3]->moes[0].first_expert, 4);
  destroy_world(&w);
}

Test(plan_groups, eight_ranks_in_pairs)
{
  world_t w = world_of(8, 2, 8, false);

  EXPECT_GROUP(&w, "ep2", 0, 1);
  EXPECT_GROUP(&w, "ep2", 2, 3);
  EXPECT_GROUP(&w, "ep2", 4, 5);
  EXPECT_GROUP(&w, "ep2", 6, 7);
  EXPECT_GROUP(&w, "edp2", 0, 2, 4, 6);
  EXPECT_GROUP(&w, "edp2", 1, 3, 5, 7);
  destroy_world(&w);
}

Test(plan_groups, eight_ranks_in_fours)
{
  world_t w = world_of(8, 4, 8, false);

  EXPECT_GROUP(&w, "ep4", 0, 1, 2, 3);
  EXPECT_GROUP(&w, "ep4", 4, 5, 6, 7);
  EXPECT_GROUP(&w, "edp4", 0, 4);
  EXPECT_GROUP(&w, "edp4", 1, 5);
  EXPECT_GROUP(&w, "edp4", 2, 6);
  EXPECT_GROUP(&w, "edp4", 3, 7);
  destroy_world(&w);
}

Test(plan_groups, data_before_expert)
{
  world_t w = world_of(8, 2, 8, true);

  EXPECT_GROUP(&w, "ep2", 0, 4);
  EXPECT_GROUP(&w, "ep2", 1, 5);
  EXPECT_GROUP(&w, "ep2", 2, 6);
  EXPECT_GROUP(&w, "ep2", 3, 7);
  EXPECT_GROUP(&w, "edp2", 0, 1, 2, 3);
  EXPECT_GROUP(&w, "edp2", 4, 5, 6, 7);
  destroy_world(&w);
}

Test(plan_groups, one_of_a_pair_may_be_all_ranks)
{
  world_t w = world_of(4, 4, 4, false);
  const mz_moe_plan_t *m = &w.plans[2]->moes[0];

  cr_expect_eq(m->ep_group, 0);
  cr_expect_eq(w.plans[2]->groups[m->edp_group].size, 1);
  cr_expect_eq(w.plans[2]->groups[m->edp_group].ranks[0], 2);
  destroy_world(&w);
  w = world_of(4, 1, 4, false);
  m = &w.plans[2]->moes[0];
  cr_expect_eq(m->edp_group, 0);
  cr_expect_eq(w.plans[2]->groups[m->ep_group].size, 1);
  destroy_world(&w);
}

Test(plan_groups, layers_differ_and_equal_layers_share)
{
  layout_t l = {8, 2, 4, 4, 8, false};
  world_t w = make_world(&l, 1, tiny_opts);

  EXPECT_GROUP(&w, "ep2", 6, 7);
  EXPECT_GROUP(&w, "ep4", 4, 5, 6, 7);
  cr_expect_eq(w.plans[0]->num_groups, 5);
  destroy_world(&w);
  w = world_of(8, 2, 8, false);
  cr_expect_eq(w.plans[0]->num_groups, 3);
  destroy_world(&w);
}

Test(plan_groups, a_size_that_does_not_divide_is_refused)
{
  mz_config_values_t c = tiny_config(1, 3, 4, 6);
  mz_decl_t *decl = declare(&c);
  mz_plan_opts_t opts = tiny_opts(8, 0, 0);

  expect_refused(decl, &opts, MZ_ERR_CONFIG,
                 "h.1.moe: moe.ep_size 3 does not divide the 8 ranks");
  mz_decl_destroy(&decl);
}

/* --- units of TINY by hand, two ranks --- */

static const mz_unit_t *unit(const mz_plan_t *plan, const char *name)
{
  for (int32_t i = 0; i < plan->num_units; i++)
    if (strcmp(plan->units[i].name, name) == 0) return &plan->units[i];
  cr_assert_fail("no unit %s", name);
  return NULL;
}

static void expect_unit(const mz_plan_t *plan, const char *name, int32_t ranks,
                        int64_t shard, int32_t p, int32_t g, int32_t o)
{
  const mz_unit_t *u = unit(plan, name);

  cr_expect_eq(u->ranks, ranks, "%s", name);
  cr_expect_eq(u->shard, shard, "%s: shard %d", name, (int)u->shard);
  cr_expect_eq(u->elements, ranks * shard, "%s", name);
  cr_expect_eq(u->p, p, "%s", name);
  cr_expect_eq(u->g, g, "%s", name);
  cr_expect_eq(u->o, o, "%s", name);
}

/* A block's tensors padded: ln 4 x 128, qkv 3072 + 128, proj 1024 + 128, gate
 * 128: 4992, half of it up to a multiple of 128: 2560. */
static void expect_tiny_units(int64_t stage, int32_t g, int32_t o)
{
  layout_t l = {2, 1, 2, 4, 4, false};
  world_t w = make_world(&l, stage, tiny_opts);

  for (int r = 0; r < 2; r++) {
    expect_unit(w.plans[r], "block.0", 2, 1280, 1, g, o);
    expect_unit(w.plans[r], "block.1", 2, 2560, 1, g, o);
    expect_unit(w.plans[r], "block.2", 2, 2560, 1, g, o);
    expect_unit(w.plans[r], "block.3", 2, 1152, 1, g, o);
    expect_unit(w.plans[r], "h.0.moe.experts.3", 2, 2176, 1, g, o);
    /* one replica: nothing to shard */
    expect_unit(w.plans[r], r ? "h.1.moe.experts.2" : "h.1.moe.experts.1", 1,
                4352, 1, 1, 1);
    cr_expect_eq(w.plans[r]->num_units, 4 + 4 + 2);
  }
  destroy_world(&w);
}

Test(plan_units, stage_0_shares_nothing) { expect_tiny_units(0, 1, 1); }

Test(plan_units, stage_1_shards_the_optimizer) { expect_tiny_units(1, 1, 2); }

Test(plan_units, stage_2_shards_gradients_too) { expect_tiny_units(2, 2, 2); }

Test(plan_units, stage_3_shards_weights_but_small_tensors)
{
  layout_t l = {2, 1, 2, 4, 4, false};
  world_t w = make_world(&l, 3, tiny_opts);
  const mz_plan_t *p = w.plans[1];

  expect_unit(p, "block.0", 2, 1280, 2, 2, 2);
  expect_unit(p, "block.1.whole", 2, 384, 1, 2, 2);
  expect_unit(p, "block.1", 2, 2176, 2, 2, 2); /* 3072 + 1024 + 128 */
  expect_unit(p, "block.3.whole", 2, 128, 1, 2, 2);
  expect_unit(p, "block.3", 2, 1024, 2, 2, 2);
  expect_unit(p, "h.0.moe.experts.0", 2, 2176, 2, 2, 2);
  expect_unit(p, "h.1.moe.experts.3", 1, 4352, 1, 1, 1);
  cr_expect_eq(p->num_units, 4 + 3 + 4 + 2);
  destroy_world(&w);
}

/* Small tensors in order of declaration: the norms of 32 first. */
Test(plan_units, the_model_threshold_bounds_what_stays_whole)
{
  mz_config_values_t c = tiny_config(1, 1, 4, 4);
  mz_decl_t *decl = declare(&c);
  mz_plan_opts_t opts = tiny_opts(2, 0, 3);
  mz_plan_t *plan;

  opts.model_persistence_threshold = 64 + 95;
  plan = make_plan(decl, &opts);
  /* ln_1 (64), not qkv.bias (96), then proj.bias and ln_2.weight */
  cr_expect_eq(unit(plan, "block.1.whole")->num_tensors, 4);
  cr_expect_eq(unit(plan, "block.1")->num_tensors, 5);
  for (int32_t i = 0; i < plan->num_units; i++)
    cr_expect_str_neq(plan->units[i].name, "block.2.whole");
  mz_plan_destroy(&plan);
  mz_decl_destroy(&decl);
}

Test(plan_units, a_borrowed_tensor_is_a_unit_of_its_own)
{
  mz_config_values_t c = tiny_config(1, 1, 4, 4);
  mz_decl_t *decl;
  mz_plan_opts_t opts = tiny_opts(2, 0, 3);
  mz_plan_t *plan;

  c.model.tie_word_embeddings = true;
  decl = declare(&c);
  plan = make_plan(decl, &opts);
  expect_unit(plan, "wte.weight", 2, 1024, 2, 2, 2);
  cr_expect_eq(unit(plan, "block.0")->num_tensors, 1);
  mz_plan_destroy(&plan);
  mz_decl_destroy(&decl);
}

/* Own layouts: [10, 7, 3] on 4 ranks take 128 each, so rank 0 holds the first
 * tensor, rank 1 the second, rank 2 the third and rank 3 nothing; [300] on 2:
 * padded to 384, 256 and 44 elements; [1] on 4: all on rank 0. */
static mz_status_t no_step(const mz_call_t *call, void *self) { return MZ_OK; }

static mz_decl_t *declare_vectors(int num, const int64_t *sizes)
{
  mz_decl_t *decl = NULL;
  mz_layer_opts_t layer = {.name = "layer"};
  mz_compute_opts_t backward = {.name = "backward", .fn = no_step};

  cr_assert_eq(mz_decl_create(&decl), MZ_OK);
  for (int i = 0; i < num; i++) {
    char name[8] = {'t', (char)('0' + i)};
    mz_tensor_opts_t t = {.name = name, .ndim = 1, .shape = {sizes[i]}};
    cr_assert_eq(mz_decl_tensor(decl, &t, &backward.grads[i]), MZ_OK);
  }
  backward.num_grads = num;
  cr_assert_eq(mz_decl_layer(decl, &layer), MZ_OK);
  cr_assert_eq(mz_decl_compute(decl, MZ_BACKWARD, &backward), MZ_OK);
  return decl;
}

static void expect_owned(int num, const int64_t *sizes, int world, int rank,
                         int32_t tensor, int64_t offset, int64_t length)
{
  mz_decl_t *decl = declare_vectors(num, sizes);
  mz_plan_opts_t opts = tiny_opts(world, rank, 1);
  mz_plan_t *plan = make_plan(decl, &opts);
  const mz_segment_t *s = plan->segments[MZ_SHARE_OWNED];

  cr_expect_eq(plan->num_segments[MZ_SHARE_OWNED], length > 0);
  if (length > 0 && plan->num_segments[MZ_SHARE_OWNED] == 1) {
    cr_expect_eq(s->tensor, tensor);
    cr_expect_eq(s->tensor_offset, offset);
    cr_expect_eq(s->length, length);
  }
  mz_plan_destroy(&plan);
  mz_decl_destroy(&decl);
}

Test(plan_partition, shards_are_multiples_of_128)
{
  const int64_t three[] = {10, 7, 3}, large[] = {300}, one[] = {1};

  expect_owned(3, three, 4, 0, 0, 0, 10);
  expect_owned(3, three, 4, 1, 1, 0, 7);
  expect_owned(3, three, 4, 2, 2, 0, 3);
  expect_owned(3, three, 4, 3, 0, 0, 0);
  expect_owned(1, large, 2, 0, 0, 0, 256);
  expect_owned(1, large, 2, 1, 0, 256, 44);
  expect_owned(1, one, 4, 0, 0, 0, 1);
  expect_owned(1, one, 4, 3, 0, 0, 0);
}

/* --- who owns and who updates an element --- */

static void count_owners(const world_t *w, mz_share_t share, int64_t *starts,
                         uint8_t *owners)
{
  for (int r = 0; r < w->size; r++)
    for (int32_t i = 0; i < w->plans[r]->num_segments[share]; i++) {
      const mz_segment_t *s = &w->plans[r]->segments[share][i];
      for (int64_t e = 0; e < s->length; e++)
        owners[starts[s->tensor] + s->tensor_offset + e]++;
    }
}

/* How often an element of a tensor is there: once, or where the optimizer is
 * not sharded, on all ranks of the tensor's group. */
static int expected_owners(const world_t *w, mz_share_t share, int32_t tensor)
{
  const mz_tensor_t *t = &w->decl->tensors[tensor];
  int ep = t->moe < 0 ? 1 : w->decl->moes[t->moe].opts.ep_size;

  if (share == MZ_SHARE_OWNED || w->plans[0]->opts.stage > 0) return 1;
  return w->size / ep;
}

static void check_owners(const world_t *w, const char *name)
{
  int64_t n = w->decl->num_tensors, *starts = NULL;
  uint8_t *owners = NULL;

  cr_assert_eq(mz_new(n + 1, "starts", &starts), MZ_OK);
  for (int64_t t = 0; t < n; t++)
    starts[t + 1] = starts[t] + w->decl->tensors[t].elements;
  for (int share = 0; share < 2; share++) {
    cr_assert_eq(mz_new(starts[n], "owners", &owners), MZ_OK);
    count_owners(w, (mz_share_t)share, starts, owners);
    for (int32_t t = 0; t < n; t++)
      for (int64_t e = starts[t]; e < starts[t + 1]; e++)
        cr_assert_eq(owners[e], expected_owners(w, (mz_share_t)share, t),
                     "%s, share %d: element %d of %s is on %d ranks", name,
                     share, (int)(e - starts[t]), w->decl->tensors[t].name,
                     owners[e]);
    mz_free(owners);
  }
  mz_free(starts);
}

Test(plan_segments, every_element_is_owned_once_and_updated_where_it_should)
{
  for_worlds(check_owners);
}

static void check_order(const world_t *w, const char *name)
{
  for (int r = 0; r < w->size; r++)
    for (int share = 0; share < 2; share++) {
      const mz_plan_t *p = w->plans[r];

      for (int32_t i = 0; i < p->num_segments[share]; i++) {
        const mz_segment_t *s = &p->segments[share][i], *last = s - 1;
        const mz_unit_t *u = &p->units[s->unit];
        int64_t size = share ? u->elements / u->o : u->shard;
        int64_t begin =
            p->groups[u->group].place % (share ? u->o : u->ranks) * size;

        cr_assert(s->length >= 1 && s->unit_offset >= begin &&
                      s->unit_offset + s->length <= begin + size,
                  "%s", name);
        cr_assert_eq(s->param_group, w->decl->tensors[s->tensor].param_group);
        if (i == 0) continue;
        cr_assert(s->unit > last->unit ||
                      (s->unit == last->unit &&
                       s->param_group >= last->param_group &&
                       s->unit_offset >= last->unit_offset + last->length),
                  "%s: segment %d", name, i);
      }
    }
}

Test(plan_segments, lie_in_order_within_the_ranks_part)
{
  for_worlds(check_order);
}

/* Regions: units one after the other, sizes p, g and o of each. */
static void check_regions(const world_t *w, const char *name)
{
  for (int r = 0; r < w->size; r++) {
    const mz_plan_t *p = w->plans[r];
    int64_t params = 0, accum = 0, state = 0;

    for (int32_t i = 0; i < p->num_units; i++) {
      const mz_unit_t *u = &p->units[i];
      cr_assert_eq(u->shard % MZ_PLAN_ALIGN, 0, "%s", name);
      cr_assert(u->p <= u->g && u->g <= u->o && u->o <= u->ranks, "%s", name);
      cr_assert_eq(u->param_offset, params, "%s", name);
      cr_assert_eq(u->accum_offset, accum, "%s", name);
      cr_assert_eq(u->state_offset, state, "%s", name);
      params += u->elements / u->p;
      accum += u->elements / u->g;
      state += u->elements / u->o;
    }
    cr_assert_eq(p->buffers[p->params].bytes, 4 * params, "%s", name);
    cr_assert_eq(p->buffers[p->accum].bytes, 4 * accum, "%s", name);
    cr_assert_eq(p->buffers[p->exp_avg].bytes, 4 * state, "%s", name);
    cr_assert_eq(p->buffers[p->exp_avg_sq].bytes, 4 * state, "%s", name);
    cr_assert_eq(p->master, -1, "%s: fp32 weights are their own master", name);
  }
}

Test(plan_units, regions_hold_the_parts_of_the_units_in_order)
{
  for_worlds(check_regions);
}

/* Of a plan for inference at any stage: weights and the walks without them. */
static void check_inference(const mz_decl_t *decl, int64_t stage)
{
  mz_plan_opts_t opts = tiny_opts(4, 3, stage);
  mz_plan_t *train = make_plan(decl, &opts), *p;

  opts.inference = true;
  p = make_plan(decl, &opts);
  for (int32_t i = 0; i < p->num_units; i++) {
    cr_assert_eq(p->units[i].p, train->units[i].p);
    cr_assert_eq(p->units[i].g, p->units[i].p);
    cr_assert_eq(p->units[i].o, p->units[i].p);
  }
  cr_expect_eq(p->buffers[p->params].bytes,
               train->buffers[train->params].bytes);
  cr_expect(p->accum == -1 && p->master == -1 && p->exp_avg == -1 &&
            p->exp_avg_sq == -1);
  cr_expect_eq(p->category_bytes[MZ_CAT_GRADS], 0);
  cr_expect_eq(p->category_bytes[MZ_CAT_OPTIMIZER], 0);
  cr_expect_eq(p->num_ops[MZ_WALK_MICRO], 0);
  cr_expect_eq(p->num_ops[MZ_WALK_UPDATE], 0);
  cr_expect_eq(p->num_ops[MZ_WALK_BEGIN], train->num_ops[MZ_WALK_BEGIN]);
  cr_expect_eq(p->num_ops[MZ_WALK_EVAL], train->num_ops[MZ_WALK_EVAL]);
  cr_expect_lt(p->arena_bytes, train->arena_bytes -
                                   train->category_bytes[MZ_CAT_OPTIMIZER] -
                                   train->category_bytes[MZ_CAT_GRADS] + 1);
  mz_plan_destroy(&train);
  mz_plan_destroy(&p);
}

Test(plan_units, inference_has_weights_only)
{
  mz_config_values_t c = tiny_config(2, 2, 4, 4);
  mz_decl_t *decl = declare(&c);

  for (int64_t stage = 0; stage <= 3; stage++)
    check_inference(decl, stage);
  mz_decl_destroy(&decl);
}

/* An expert's tensors have a place exactly on the ranks of its group. */
static void check_places(const world_t *w, const char *name)
{
  for (int r = 0; r < w->size; r++)
    for (int32_t t = 0; t < w->decl->num_tensors; t++) {
      const mz_plan_t *p = w->plans[r];
      const mz_tensor_t *tensor = &w->decl->tensors[t];
      int32_t place = p->tensor_place[t];
      bool here = tensor->moe < 0;

      if (!here) {
        const mz_moe_plan_t *m = &p->moes[tensor->moe];
        here = tensor->expert >= m->first_expert &&
               tensor->expert < m->first_expert + m->experts_per_rank;
      }
      cr_assert_eq(place >= 0, here, "%s: %s on rank %d", name, tensor->name,
                   r);
      if (here) cr_assert_eq(p->unit_tensors[place].tensor, t, "%s", name);
    }
}

Test(plan_units, an_experts_tensors_are_on_the_ranks_of_its_group_only)
{
  for_worlds(check_places);
}

Test(plan_options, out_of_range_are_refused)
{
  mz_config_values_t c = tiny_config(1, 1, 4, 4);
  mz_decl_t *decl = declare(&c);
  mz_plan_opts_t opts = tiny_opts(2, 2, 0);

  expect_refused(decl, &opts, MZ_ERR_ARG, "rank 2 of 2");
  opts = tiny_opts(2, 0, 4);
  expect_refused(decl, &opts, MZ_ERR_ARG, "stage 4, need 0..3");
  opts = tiny_opts(2, 0, 0);
  opts.accumulation = 0;
  expect_refused(decl, &opts, MZ_ERR_ARG,
                 "1 sequences of 16, accumulation 0: each is at least 1");
  opts = tiny_opts(2, 0, 0);
  opts.saved_rows = 0;
  expect_refused(decl, &opts, MZ_ERR_ARG,
                 "saved_rows 0 and piece_bytes 1048576, need more than 0; "
                 "overlap_chunks 1, at least 0");
  opts = tiny_opts(2, 0, 0);
  opts.micro_sequences = INT64_MAX / 8;
  expect_refused(decl, &opts, MZ_ERR_OVERFLOW, "1152921504606846975 x 16");
  opts.micro_sequences = 1 << 28;
  expect_refused(decl, &opts, MZ_ERR_OVERFLOW,
                 "h.0.moe: up to 8589934592 rows a rank");
  mz_decl_destroy(&decl);
}
