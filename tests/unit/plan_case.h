/* SPDX-License-Identifier: Apache-2.0 */
/* TINY and its plans, for the tests of src/plan. */
#ifndef MZ_TEST_PLAN_CASE_H
#define MZ_TEST_PLAN_CASE_H

#include "base/alloc.h"
#include "base/check.h"
#include <moezero/gpt.h>
#include "plan/decl_impl.h"
#include "plan/plan.h"

#include <criterion/criterion.h>
#include <string.h>

/* H 32, 2 heads, V 64, 16 positions, 2 blocks, F 64, both MoE, k 2, dropless,
 * untied; ep_size and experts of the two MoE layers. */
static inline mz_config_values_t tiny_config(int32_t ep0, int32_t ep1,
                                             int32_t experts0, int32_t experts1)
{
  mz_config_values_t c = {
      .model = {.architecture = MZ_ARCH_GPT2,
                .vocab_size = 64,
                .hidden_size = 32,
                .num_hidden_layers = 2,
                .num_attention_heads = 2,
                .num_key_value_heads = 2,
                .intermediate_size = 64,
                .max_position_embeddings = 16,
                .hidden_act = MZ_ACT_GELU,
                .norm_eps = 1e-5,
                .position_embedding = MZ_POS_LEARNED,
                .bias = true,
                .attention_bias = true,
                .initializer_range = 0.02},
      .moe = {.num_layers = 2,
              .layer = {0, 1},
              .num_experts = {experts0, experts1},
              .ep_size = {ep0, ep1},
              .k = 2,
              .expert_intermediate_size = 64,
              .expert_bias = true,
              .capacity_factor = 1,
              .eval_capacity_factor = 1,
              .norm_topk_prob = true},
  };
  return c;
}

static inline mz_decl_t *declare(const mz_config_values_t *c)
{
  mz_decl_t *decl = NULL;

  cr_assert_eq(mz_decl_create(&decl), MZ_OK);
  cr_assert_eq(mz_gpt_declare(c, decl), MZ_OK, "%s", mz_error_last());
  return decl;
}

/* One sequence of 16 tokens, everything in one bucket. */
static inline mz_plan_opts_t tiny_opts(int world, int rank, int64_t stage)
{
  mz_plan_opts_t opts = {.world_size = world,
                         .rank = rank,
                         .stage = stage,
                         .micro_sequences = 1,
                         .sequence_length = 16,
                         .accumulation = 1,
                         .reduce_bucket_size = 1 << 20,
                         .allgather_bucket_size = 1 << 20,
                         .prefetch_bucket_size = 1 << 20,
                         .persistence_threshold = 100,
                         .model_persistence_threshold = 1 << 20,
                         .max_live_parameters = 1 << 20,
                         .piece_bytes = 1 << 20,
                         .saved_rows = 1.25,
                         .overlap_chunks = 1};
  return opts;
}

static inline mz_plan_t *make_plan(const mz_decl_t *decl,
                                   const mz_plan_opts_t *opts)
{
  mz_plan_t *plan = NULL;

  cr_assert_eq(mz_plan_create(decl, opts, &plan), MZ_OK, "%s", mz_error_last());
  return plan;
}

/* The plan is refused with this message, or with one that begins so. */
static inline void expect_refused(const mz_decl_t *decl,
                                  const mz_plan_opts_t *opts,
                                  mz_status_t status, const char *text)
{
  mz_plan_t *plan = NULL;

  cr_expect_eq(mz_plan_create(decl, opts, &plan), status, "%s",
               mz_error_last());
  cr_expect_eq(strncmp(mz_error_message(), text, strlen(text)), 0,
               "\"%s\" and not \"%s\"", mz_error_message(), text);
  cr_expect_null(plan);
  mz_plan_destroy(&plan);
}

/* Layouts that every claim about all ranks is tried on. */
typedef struct layout {
  int world;
  int32_t ep0, ep1, experts0, experts1;
  bool data_first;
} layout_t;

static const layout_t layouts[] = {
    {1, 1, 1, 4, 4, false}, {2, 1, 1, 4, 4, false}, {2, 2, 2, 4, 4, false},
    {3, 1, 3, 4, 6, false}, {4, 2, 2, 4, 4, false}, {4, 2, 2, 4, 4, true},
    {4, 4, 1, 8, 3, false}, {4, 1, 2, 5, 6, true},  {8, 2, 4, 4, 8, false},
    {8, 4, 8, 4, 8, true},
};

enum { NUM_LAYOUTS = sizeof layouts / sizeof layouts[0], MAX_WORLD = 8 };

/* Options whose buckets and pieces split what tiny_opts sends at once. */
static inline mz_plan_opts_t small_opts(int world, int rank, int64_t stage)
{
  mz_plan_opts_t opts = tiny_opts(world, rank, stage);

  opts.reduce_bucket_size = 9000;
  opts.allgather_bucket_size = 5000;
  opts.prefetch_bucket_size = 6000;
  opts.max_live_parameters = 30000;
  opts.max_reuse_distance = 4000;
  opts.piece_bytes = 8192;
  opts.saved_rows = 0.25;
  opts.overlap_chunks = 2;
  opts.accumulation = 2;
  return opts;
}

/* Plans of all ranks. */
typedef struct world {
  mz_decl_t *decl;
  mz_plan_t *plans[MAX_WORLD];
  int size;
} world_t;

typedef mz_plan_opts_t (*opts_fn)(int world, int rank, int64_t stage);

static inline world_t make_world(const layout_t *l, int64_t stage, opts_fn make)
{
  mz_config_values_t c = tiny_config(l->ep0, l->ep1, l->experts0, l->experts1);
  world_t w = {.decl = declare(&c), .size = l->world};

  for (int r = 0; r < l->world; r++) {
    mz_plan_opts_t opts = make(l->world, r, stage);
    opts.data_before_expert = l->data_first;
    w.plans[r] = make_plan(w.decl, &opts);
  }
  return w;
}

static inline void destroy_world(world_t *w)
{
  for (int r = 0; r < w->size; r++)
    mz_plan_destroy(&w->plans[r]);
  mz_decl_destroy(&w->decl);
}

/* How a walk is taken: rounds a loop, whether rows are in the pool. */
typedef struct way {
  int32_t rounds;
  bool saved;
} way_t;

/* The operation behind the one at @p at; round: of the loop, kept between. */
static inline int32_t next_op(const mz_op_t *ops, int32_t at, way_t way,
                              int32_t *round)
{
  const mz_op_t *op = &ops[at];

  if (op->kind == MZ_OP_LOOP) *round = 0;
  if (op->kind == MZ_OP_END_LOOP && ++*round < way.rounds) return op->jump;
  if (op->kind == MZ_OP_AGAIN && *round == 0) return op->jump;
  if (op->kind == MZ_OP_BRANCH && op->flag != way.saved) return op->jump;
  return at + 1;
}

typedef void (*world_fn)(const world_t *w, const char *name);

/* Calls check for each layout and stage, with large and with small buckets. */
static inline void for_worlds(world_fn check)
{
  const opts_fn makers[] = {tiny_opts, small_opts};

  for (int i = 0; i < NUM_LAYOUTS; i++)
    for (int64_t stage = 0; stage <= 3; stage++)
      for (int m = 0; m < 2; m++) {
        const layout_t *l = &layouts[i];
        world_t w = make_world(l, stage, makers[m]);
        char name[128];

        snprintf(name, sizeof name,
                 "W %d ep %d,%d experts %d,%d stage %d, %s buckets", l->world,
                 l->ep0, l->ep1, l->experts0, l->experts1, (int)stage,
                 m ? "small" : "large");
        check(&w, name);
        destroy_world(&w);
      }
}

#endif
