/* SPDX-License-Identifier: Apache-2.0 */
/* More tokens than one expert takes: the MoE layer alone, between a layer that
 * gives its input and one that gives the gradient of its output.
 *   rank_drops [KEY=VALUE]... [inline]
 * Any ranks, each with 20 tokens that all want expert 0 of 4. Expert 0 takes 5
 * tokens a rank. Every drop policy, and by position with every third token a
 * pad; experts that return their input and experts of weights. A last word
 * "inline" runs without the communication thread. train.device=cuda puts the
 * layer on a GPU. Exit code 0: all is right. */
#include "lone.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/engine_impl.h"

#include <math.h>
#include <moezero/engine.h>
#include <moezero/moe.h>
#include <stdio.h>
#include <string.h>

enum {
  TOKENS = 20,
  WIDTH = 8,
  EXPERTS = 4,
  CAPACITY = 5,
  STEPS = 4,
  MAX_GIVEN = 8
};

static const char text[] =
    "{\"data\": {\"sequence_length\": 20}, \"moe\": {\"k\": 1, "
    "\"drop_tokens\": true, \"capacity_factor\": 1.0, "
    "\"eval_capacity_factor\": 1.0, \"min_capacity\": 0}, "
    "\"train_micro_batch_size_per_gpu\": 1, \"gradient_accumulation_steps\": 1,"
    " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-3}}, "
    "\"debug\": {\"fixed_logits\": [2, -1, -1, -1]}}";

static int world_rank, world_size, num_failed;
static bool without_thread;
static char **given;
static int num_given;

/* The layers on both sides, and what they saw last. */
typedef struct bench {
  int32_t x, y, d_x, d_y; /* buffers [T, WIDTH] */
  int32_t used;           /* buffer [T] */
  bool pads;
  float seen_y[TOKENS * WIDTH], seen_d_x[TOKENS * WIDTH];
  mz_config_t *config;
  mz_decl_t *decl;
  mz_engine_t *engine;
} bench_t;

/* Never 0, nor the same for two tokens. */
static float input(int64_t i) { return 0.5f + (float)i / 64; }
static float gradient(int64_t i) { return -0.25f - (float)i / 32; }

static bool is_pad(int64_t t) { return t % 3 == 1; }

/* The layer's buffers lie on its device. */
static mz_status_t give(const mz_call_t *call, int32_t buffer,
                        float (*value)(int64_t i))
{
  float values[TOKENS * WIDTH];
  int64_t num = call->micro->num_tokens * WIDTH;

  for (int64_t i = 0; i < num; i++)
    values[i] = value(i);
  return MZ_TRACE(mz_device_copy(call->kernels->device, call->buffers[buffer],
                                 values, num * 4, call->stream));
}

static mz_status_t give_pads(const mz_call_t *call, int32_t buffer)
{
  int32_t used[TOKENS];

  for (int64_t t = 0; t < call->micro->num_tokens; t++)
    used[t] = !is_pad(t);
  return MZ_TRACE(mz_device_copy(call->kernels->device, call->buffers[buffer],
                                 used, call->micro->num_tokens * 4,
                                 call->stream));
}

static mz_status_t see(const mz_call_t *call, int32_t buffer,
                       float values[TOKENS * WIDTH])
{
  return MZ_TRACE(mz_device_copy(call->kernels->device, values,
                                 call->buffers[buffer], TOKENS * WIDTH * 4,
                                 call->stream));
}

static mz_status_t give_input(const mz_call_t *call, void *self)
{
  const bench_t *b = self;

  MZ_TRY(give_pads(call, b->used));
  return MZ_TRACE(give(call, b->x, input));
}

static mz_status_t see_gradient(const mz_call_t *call, void *self)
{
  bench_t *b = self;

  return MZ_TRACE(see(call, b->d_x, b->seen_d_x));
}

static mz_status_t see_output(const mz_call_t *call, void *self)
{
  bench_t *b = self;

  return MZ_TRACE(see(call, b->y, b->seen_y));
}

static mz_status_t give_gradient(const mz_call_t *call, void *self)
{
  const bench_t *b = self;

  return MZ_TRACE(give(call, b->d_y, gradient));
}

/* --- the network --- */

static mz_status_t declare_buffers(bench_t *b)
{
  MZ_TRY(lone_rows(b->decl, WIDTH, &b->x, &b->y, &b->d_x, &b->d_y));
  return MZ_TRACE(mz_decl_buffer(b->decl,
                                 &(mz_buffer_opts_t){.name = "used",
                                                     .category = MZ_CAT_ROUTING,
                                                     .kind = MZ_ROWS_TOKENS,
                                                     .rows = 1,
                                                     .width = 1,
                                                     .dtype = MZ_I32},
                                 &b->used));
}

/* Policy, factors and logits come from the configuration. */
static mz_status_t declare_moe(const bench_t *b, mz_activation_t activation)
{
  const mz_config_values_t *v = mz_config_values(b->config);
  mz_ffn_opts_t ffn = {.hidden_size = WIDTH,
                       .intermediate_size = 2 * WIDTH,
                       .activation = activation,
                       .bias = activation != MZ_ACT_IDENTITY_TIMES,
                       .init_std = 0.5,
                       .output_init_std = 0.5};
  mz_expert_ops_t expert;
  mz_moe_layer_opts_t opts = {
      .moe = {.name = "moe",
              .num_experts = EXPERTS,
              .ep_size = world_size,
              .k = (int32_t)v->moe.k,
              .drop_tokens = v->moe.drop_tokens,
              .capacity_factor = v->moe.capacity_factor,
              .eval_capacity_factor = v->moe.eval_capacity_factor,
              .min_capacity = (int32_t)v->moe.min_capacity},
      .hidden_size = WIDTH,
      .init_std = 0.5,
      .drop_policy = v->moe.drop_policy,
      .has_pads = b->pads,
      .used = b->used,
      .in = b->x,
      .out = b->y,
      .d_in = b->d_x,
      .d_out = b->d_y,
      .expert = &expert,
      .fixed_logits = v->debug.fixed_logits};

  MZ_TRY(mz_ffn_expert(&ffn, &expert, &opts.expert_self));
  return MZ_TRACE(mz_moe_layer(b->decl, &opts));
}

static mz_status_t declare(bench_t *b, mz_activation_t activation)
{
  mz_compute_opts_t give_x = {.name = "x",
                              .fn = give_input,
                              .writes = {b->x, b->used},
                              .num_writes = 2};
  mz_compute_opts_t see_d_x = {
      .name = "d_x", .fn = see_gradient, .reads = {b->d_x}, .num_reads = 1};
  mz_compute_opts_t see_y = {
      .name = "y", .fn = see_output, .reads = {b->y}, .num_reads = 1};
  mz_compute_opts_t give_d_y = {
      .name = "d_y", .fn = give_gradient, .writes = {b->d_y}, .num_writes = 1};

  MZ_TRY(lone_end(b->decl, "before", b, &give_x, &see_d_x));
  MZ_TRY(declare_moe(b, activation));
  return MZ_TRACE(lone_end(b->decl, "behind", b, &see_y, &give_d_y));
}

/* A token that no expert takes must not get a bias either. */
static mz_status_t set_biases(const bench_t *b)
{
  static const float ones[WIDTH] = {1, 1, 1, 1, 1, 1, 1, 1};

  for (int32_t t = 0; t < mz_decl_num_tensors(b->decl); t++)
    if (strstr(mz_decl_tensor_name(b->decl, t), ".down.bias"))
      MZ_TRY(mz_engine_write(b->engine, t, MZ_PART_WEIGHTS, ones));
  return MZ_OK;
}

static mz_status_t create(bench_t *b, const char *policy, int stage,
                          mz_activation_t activation)
{
  bool random = strcmp(policy, "random") == 0;
  bool probs = strcmp(policy, "probs") == 0;
  char own[4][64];
  const char *all[4 + MAX_GIVEN] = {own[0], own[1], own[2], own[3]};

  snprintf(own[0], 64, "moe.drop_policy=%s", probs ? "probs" : "position");
  b->pads = strcmp(policy, "pads") == 0;
  snprintf(own[1], 64, "moe.use_rts=%s", random ? "true" : "false");
  snprintf(own[2], 64, "zero_optimization.stage=%d", stage);
  snprintf(own[3], 64, "comm.thread=%s", without_thread ? "false" : "true");
  for (int i = 0; i < num_given; i++)
    all[4 + i] = given[i];
  MZ_TRY(mz_config_parse(text, "drops", all, 4 + num_given, &b->config));
  MZ_TRY(mz_config_resolve(b->config, world_size));
  MZ_TRY(mz_decl_create(&b->decl));
  MZ_TRY(declare_buffers(b));
  MZ_TRY(declare(b, activation));
  MZ_TRY(mz_engine_create(b->config, b->decl, MPI_COMM_WORLD, &b->engine));
  return MZ_TRACE(set_biases(b));
}

static mz_status_t step(bench_t *b, mz_step_result_t *result)
{
  int32_t ids[TOKENS] = {0}, one = 1;
  int64_t sample = world_rank;
  mz_step_data_t data = {.num_micro = 1,
                         .tokens = ids,
                         .labels = ids,
                         .samples = &sample,
                         .sequences = &one,
                         .max_sequences = &one};

  return MZ_TRACE(mz_engine_step(b->engine, &data, result));
}

/* --- checks --- */

static mz_status_t check_counts(const bench_t *b, const mz_step_result_t *r)
{
  int64_t num = 0;

  MZ_REQUIRE(b->engine->moes[0].call.capacity == CAPACITY, MZ_ERR_DATA,
             "capacity %d", b->engine->moes[0].call.capacity);
  for (int64_t t = 0; t < TOKENS; t++)
    num += !b->pads || !is_pad(t);
  for (int e = 0; e < EXPERTS; e++) {
    int64_t routed = e == 0 ? num * world_size : 0;
    int64_t kept = e == 0 ? CAPACITY * world_size : 0;
    MZ_REQUIRE(r->moes[0].routed[e] == routed && r->moes[0].kept[e] == kept,
               MZ_ERR_DATA, "expert %d: routed %" PRId64 ", kept %" PRId64, e,
               r->moes[0].routed[e], r->moes[0].kept[e]);
  }
  return MZ_OK;
}

static bool all_zero(const float *row)
{
  for (int i = 0; i < WIDTH; i++)
    if (row[i] != 0) return false;
  return true;
}

/* Expert 0 returns its input, times the gate. */
static mz_status_t check_identity(const bench_t *b, int64_t t)
{
  double gate = exp(2) / (exp(2) + 3 * exp(-1));

  for (int64_t i = t * WIDTH; i < (t + 1) * WIDTH; i++)
    MZ_REQUIRE(
        fabs(b->seen_y[i] - gate * input(i)) <= 1e-6 * fabs(input(i)) &&
            fabs(b->seen_d_x[i] - gate * gradient(i)) <=
                1e-6 * fabs(gradient(i)),
        MZ_ERR_DATA, "element %" PRId64 ": %.9g and %.9g, need %.9g and %.9g",
        i, b->seen_y[i], b->seen_d_x[i], gate * input(i), gate * gradient(i));
  return MZ_OK;
}

/* Which tokens stayed, a bit each; the rows of the others are exactly 0. */
static mz_status_t find_kept(const bench_t *b, bool identity,
                             uint32_t *kept_out)
{
  int num = 0;

  *kept_out = 0;
  for (int64_t t = 0; t < TOKENS; t++) {
    bool zero_y = all_zero(b->seen_y + t * WIDTH);
    bool zero_d_x = all_zero(b->seen_d_x + t * WIDTH);

    MZ_REQUIRE(zero_y == zero_d_x, MZ_ERR_DATA,
               "token %" PRId64 ": output %s, gradient %s", t,
               zero_y ? "0" : "not 0", zero_d_x ? "0" : "not 0");
    if (zero_y) continue;
    if (identity) MZ_TRY(check_identity(b, t));
    *kept_out |= 1u << t;
    num++;
  }
  MZ_REQUIRE(num == CAPACITY, MZ_ERR_DATA, "%d tokens kept", num);
  return MZ_OK;
}

/* Equal gates: the earlier tokens stay, unless chance chooses, anew each time.
 */
static mz_status_t check_policy(const char *policy, const uint32_t *kept)
{
  /* without pads tokens 0-4, else 0, 2, 3, 5, 6 */
  const uint32_t first =
      strcmp(policy, "pads") == 0 ? 0x6d : (1u << CAPACITY) - 1;
  int num_first = 0, num_same = 0;

  for (int i = 0; i < STEPS; i++) {
    num_first += kept[i] == first;
    num_same += kept[i] == kept[0];
  }
  if (strcmp(policy, "random") == 0)
    MZ_REQUIRE(num_first < STEPS && num_same < STEPS, MZ_ERR_DATA,
               "the same tokens stayed in all steps: %x", kept[0]);
  else
    MZ_REQUIRE(num_first == STEPS, MZ_ERR_DATA,
               "the first tokens stayed in %d steps of %d", num_first, STEPS);
  return MZ_OK;
}

static mz_status_t try_policy(const char *policy, int stage,
                              mz_activation_t activation)
{
  uint32_t kept[STEPS];
  mz_step_result_t result;
  bench_t b = {.config = NULL};
  mz_status_t st;

  MZ_TRY_GOTO(st, create(&b, policy, stage, activation), done);
  for (int i = 0; i < STEPS; i++) {
    MZ_TRY_GOTO(st, step(&b, &result), done);
    MZ_TRY_GOTO(st, check_counts(&b, &result), done);
    MZ_TRY_GOTO(
        st, find_kept(&b, activation == MZ_ACT_IDENTITY_TIMES, &kept[i]), done);
  }
  MZ_TRY_GOTO(st, check_policy(policy, kept), done);
done:
  mz_engine_destroy(&b.engine);
  mz_decl_destroy(&b.decl);
  mz_config_destroy(&b.config);
  return st;
}

/* All ranks agree on whether a case passed. */
static void report(mz_status_t st, const char *policy, int stage,
                   const char *experts)
{
  int ok = st == MZ_OK, all_ok;

  if (!ok)
    fprintf(stderr, "rank %d: %s, stage %d, %s: %s\n", world_rank, policy,
            stage, experts, mz_error_last());
  MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  num_failed += !all_ok;
  if (world_rank == 0 && all_ok)
    printf("%s, stage %d, %s: right\n", policy, stage, experts);
}

int main(int argc, char **argv)
{
  static const char *const policies[] = {"probs", "position", "random", "pads"};
  int provided;

  without_thread = argc > 1 && strcmp(argv[argc - 1], "inline") == 0;
  given = argv + 1;
  num_given = argc - 1 - without_thread;
  if (num_given > MAX_GIVEN) return 2;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  for (int i = 0; i < 4; i++)
    for (int stage = 0; stage <= 3; stage += 3) {
      report(try_policy(policies[i], stage, MZ_ACT_IDENTITY_TIMES), policies[i],
             stage, "experts that return their input");
      report(try_policy(policies[i], stage, MZ_ACT_GELU), policies[i], stage,
             "experts of weights");
    }
  MPI_Finalize();
  return num_failed > 0;
}
