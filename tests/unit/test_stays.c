/* SPDX-License-Identifier: Apache-2.0 */
/* Stays of gathered weights under limits: the fewest messages, never more
 * elements than allowed, prefetches as far as the bucket reaches. Blocks of one
 * tensor of U elements on two ranks at stage 3: one message a gather. */
#include "plan/plan.h"

#include "base/check.h"
#include "plan/decl_impl.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

enum { U = 256, MANY = 1000 * U, MAX_USES = 16, MAX_BLOCKS = 8 };

static mz_status_t compute(const struct mz_call *call, void *self)
{
  return MZ_OK;
}

static mz_decl_t *declare_blocks(int num)
{
  mz_decl_t *decl = NULL;
  char name[32];

  cr_assert_eq(mz_decl_create(&decl), MZ_OK);
  cr_assert_eq(mz_decl_layer(decl, &(mz_layer_opts_t){.name = "all"}), MZ_OK);
  for (int32_t b = 0, id; b < num; b++) {
    mz_tensor_opts_t t = {.name = name, .ndim = 1, .shape = {U}, .block = b};

    snprintf(name, sizeof name, "b.%d", b);
    cr_assert_eq(mz_decl_tensor(decl, &t, &id), MZ_OK);
  }
  return decl;
}

static void add_use(mz_decl_t *decl, mz_pass_t pass, int32_t block)
{
  mz_compute_opts_t step = {.name = "use",
                            .fn = compute,
                            .weights = {block},
                            .num_weights = 1,
                            .grads = {block},
                            .num_grads = pass == MZ_BACKWARD};

  cr_assert_eq(mz_decl_compute(decl, pass, &step), MZ_OK);
}

/* Blocks in order, and back. */
static mz_decl_t *declare_stack(int num)
{
  mz_decl_t *decl = declare_blocks(num);

  for (int b = 0; b < num; b++)
    add_use(decl, MZ_FORWARD, b);
  for (int b = num - 1; b >= 0; b--)
    add_use(decl, MZ_BACKWARD, b);
  return decl;
}

/* Forward uses in the given order; backward every block once. */
static mz_decl_t *declare_uses(const int32_t *uses, int num_uses,
                               int num_blocks)
{
  mz_decl_t *decl = declare_blocks(num_blocks);

  for (int i = 0; i < num_uses; i++)
    add_use(decl, MZ_FORWARD, uses[i]);
  for (int b = 0; b < num_blocks; b++)
    add_use(decl, MZ_BACKWARD, b);
  return decl;
}

static mz_status_t try_plan(const mz_decl_t *decl, int64_t live, int64_t reuse,
                            int64_t prefetch, mz_plan_t **plan_out)
{
  mz_plan_opts_t opts = {.world_size = 2,
                         .stage = 3,
                         .micro_sequences = 1,
                         .sequence_length = 1,
                         .accumulation = 1,
                         .reduce_bucket_size = MANY,
                         .allgather_bucket_size = MANY,
                         .prefetch_bucket_size = prefetch,
                         .max_live_parameters = live,
                         .max_reuse_distance = reuse,
                         .piece_bytes = MANY,
                         .saved_rows = 1,
                         .overlap_chunks = 1};

  return mz_plan_create(decl, &opts, plan_out);
}

static mz_plan_t *make_plan(const mz_decl_t *decl, int64_t live, int64_t reuse,
                            int64_t prefetch)
{
  mz_plan_t *plan = NULL;

  cr_assert_eq(try_plan(decl, live, reuse, prefetch, &plan), MZ_OK, "%s",
               mz_error_last());
  return plan;
}

static int64_t gathers(const mz_plan_t *plan, mz_walk_t walk)
{
  for (int32_t i = 0; i < plan->num_traffic; i++)
    if (plan->traffic[i].kind == MZ_ENTRY_PARAMS)
      return walk == MZ_WALK_MICRO ? plan->traffic[i].calls_micro
                                   : plan->traffic[i].calls_eval;
  return 0;
}

/* Walks the operations: weights are there when they are read, what lives and
 * what was posted ahead stays within the limits, and the peak is as planned. */
static void check_walk(const mz_plan_t *p, mz_walk_t walk, int64_t *peak)
{
  bool ready[MANY / U] = {false};
  int64_t live = 0, posted = 0;

  for (int32_t i = 0; i < p->num_ops[walk]; i++) {
    const mz_op_t *op = &p->ops[walk][i];

    if (op->kind == MZ_OP_POST &&
        p->entries[op->entry].kind == MZ_ENTRY_PARAMS) {
      live += U;
      posted += U;
    }
    if (op->kind == MZ_OP_PREPARE && op->weights >= 0) {
      ready[op->first_unit] = true;
      posted -= U;
    }
    if (op->kind == MZ_OP_RELEASE) {
      cr_assert(ready[op->first_unit]);
      ready[op->first_unit] = false;
      live -= U;
    }
    if (op->kind == MZ_OP_COMPUTE) {
      int32_t block = p->decl->steps[op->pass][op->step].compute.weights[0];
      cr_assert(ready[block], "block %d is not there", block);
      cr_assert(posted <= p->opts.prefetch_bucket_size ||
                (posted == U && p->opts.prefetch_bucket_size > 0));
    }
    cr_assert_leq(live, p->opts.max_live_parameters);
    *peak = live > *peak ? live : *peak;
  }
  cr_assert_eq(live, 0);
}

static void check_plan(const mz_plan_t *plan)
{
  int64_t peak = 0;

  check_walk(plan, MZ_WALK_MICRO, &peak);
  check_walk(plan, MZ_WALK_EVAL, &peak);
  cr_assert_eq(peak, plan->peak_gathered);
}

/* With room for k of n blocks the last k of the way forward are still there on
 * the way back. */
Test(stays, room_for_k_of_n_saves_k_messages)
{
  static const int64_t buckets[] = {0, U, 2 * U, MANY};
  enum { n = 6 };
  mz_decl_t *decl = declare_stack(n);

  for (int k = 1; k <= n + 1; k++)
    for (int i = 0; i < 4; i++) {
      mz_plan_t *plan = make_plan(decl, k * U, MANY, buckets[i]);

      cr_expect_eq(gathers(plan, MZ_WALK_MICRO), 2 * n - (k < n ? k : n),
                   "room for %d, bucket %d", k, (int)buckets[i]);
      cr_expect_eq(gathers(plan, MZ_WALK_EVAL), n);
      check_plan(plan);
      mz_plan_destroy(&plan);
    }
  mz_decl_destroy(&decl);
}

/* Between the two uses of block i lie the n - 1 - i blocks above it. */
Test(stays, blocks_beyond_the_reuse_distance_are_gathered_again)
{
  enum { n = 6 };
  mz_decl_t *decl = declare_stack(n);

  for (int r = 0; r <= n; r++) {
    mz_plan_t *plan = make_plan(decl, MANY, r * U, MANY);

    cr_expect_eq(gathers(plan, MZ_WALK_MICRO), 2 * n - (r < n ? r + 1 : n),
                 "distance %d", r);
    check_plan(plan);
    mz_plan_destroy(&plan);
  }
  mz_decl_destroy(&decl);
}

/* Room for two of A B C A B C: when C comes B goes, whose next use is later
 * than A's. The least recently used would be A, and each use a message. */
Test(stays, the_farthest_next_use_goes)
{
  static const int32_t uses[] = {0, 1, 2, 0, 1, 2};
  mz_decl_t *decl = declare_uses(uses, 6, 3);
  mz_plan_t *plan = make_plan(decl, 2 * U, MANY, 0);

  cr_expect_eq(gathers(plan, MZ_WALK_EVAL), 4);
  check_plan(plan);
  mz_plan_destroy(&plan);
  mz_decl_destroy(&decl);
}

/* Fewest gathers: over all sets of blocks that may be there after each use. */
static int fewest(const int32_t *uses, int num_uses, int num_blocks, int room)
{
  int cost[1 << MAX_BLOCKS], next[1 << MAX_BLOCKS], best = MAX_USES;

  for (int s = 0; s < 1 << num_blocks; s++)
    cost[s] = s ? MAX_USES : 0;
  for (int i = 0; i < num_uses; i++) {
    int bit = 1 << uses[i];

    for (int s = 0; s < 1 << num_blocks; s++)
      next[s] = MAX_USES;
    for (int s = 0; s < 1 << num_blocks; s++) {
      int all = s | bit, c = cost[s] + !(s & bit);

      for (int kept = all; kept; kept = (kept - 1) & all)
        if ((kept & bit) && __builtin_popcount((unsigned)kept) <= room &&
            c < next[kept])
          next[kept] = c;
    }
    memcpy(cost, next, sizeof cost);
  }
  for (int s = 0; s < 1 << num_blocks; s++)
    best = cost[s] < best ? cost[s] : best;
  return best;
}

Test(stays, no_order_of_uses_can_do_with_fewer_messages)
{
  enum { blocks = 5, num = 14 };
  uint32_t random = 12345;

  for (int t = 0; t < 60; t++) {
    int32_t uses[num];
    int room = 1 + t % (blocks - 1);
    mz_decl_t *decl;
    mz_plan_t *plan;

    for (int i = 0; i < num; i++) {
      random = random * 1664525u + 1013904223u;
      uses[i] = (int32_t)(random >> 24) % blocks;
    }
    decl = declare_uses(uses, num, blocks);
    plan = make_plan(decl, room * U, MANY, t % 3 * U);
    cr_expect_eq(gathers(plan, MZ_WALK_EVAL), fewest(uses, num, blocks, room),
                 "trial %d", t);
    check_plan(plan);
    mz_plan_destroy(&plan);
    mz_decl_destroy(&decl);
  }
}

/* Gathers posted before the first step computes. */
static int posted_first(const mz_plan_t *plan)
{
  int num = 0;

  for (int32_t i = 0; plan->ops[MZ_WALK_MICRO][i].kind != MZ_OP_COMPUTE; i++)
    num += plan->ops[MZ_WALK_MICRO][i].kind == MZ_OP_POST;
  return num;
}

Test(stays, as_many_blocks_are_posted_ahead_as_bucket_and_limit_allow)
{
  static const struct {
    int64_t live, prefetch;
    int posts;
  } rows[] = {
      {MANY, 0, 1},     {MANY, 1, 2},         {MANY, U - 1, 2},  {MANY, U, 2},
      {MANY, 3 * U, 4}, {MANY, MANY, 6},      {2 * U, 3 * U, 2}, {U, MANY, 1},
      {U, 1, 1},        {4 * U - 1, MANY, 3},
  };
  mz_decl_t *decl = declare_stack(6);

  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    mz_plan_t *plan = make_plan(decl, rows[i].live, MANY, rows[i].prefetch);

    cr_expect_eq(posted_first(plan), rows[i].posts, "row %zu: %d", i,
                 posted_first(plan));
    check_plan(plan);
    mz_plan_destroy(&plan);
  }
  mz_decl_destroy(&decl);
}

/* The queue holds 64 messages: more would make the post wait. */
Test(stays, at_most_32_are_posted_ahead)
{
  mz_decl_t *decl = declare_stack(40);
  mz_plan_t *plan = make_plan(decl, MANY, MANY, MANY);

  cr_expect_eq(posted_first(plan), 33, "%d", posted_first(plan));
  check_plan(plan);
  mz_plan_destroy(&plan);
  mz_decl_destroy(&decl);
}

Test(stays, a_limit_below_the_largest_step_is_refused)
{
  mz_compute_opts_t three = {
      .name = "three", .fn = compute, .weights = {0, 1, 3}, .num_weights = 3};
  mz_decl_t *decl = declare_stack(4);
  mz_plan_t *plan = NULL;

  cr_assert_eq(mz_decl_compute(decl, MZ_FORWARD, &three), MZ_OK);
  cr_expect_eq(try_plan(decl, 3 * U - 1, MANY, 0, &plan), MZ_ERR_CONFIG);
  cr_expect_str_eq(mz_error_message(),
                   "zero_optimization.stage3_max_live_parameters is 767, the "
                   "largest step needs 768");
  cr_expect_null(plan);
  cr_expect_eq(try_plan(decl, 3 * U, MANY, 0, &plan), MZ_OK);
  check_plan(plan);
  mz_plan_destroy(&plan);
  mz_decl_destroy(&decl);
}
