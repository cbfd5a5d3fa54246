/* SPDX-License-Identifier: Apache-2.0 */
/* The published dispatch over two ranks: four experts, expert e returns (e + 1)
 * x, three tokens a rank of which one is dropped. The MoE layer alone, between
 * a layer that gives its input and one that gives the gradient of its output;
 * its experts note what reaches them and what they return.
 *   rank_dispatch [KEY=VALUE]...
 * Exactly two ranks; train.device=cuda puts the layer on GPUs. Exit code 0:
 * routes, rows on the way there and back, outputs, counts, losses and the
 * gradient of the input are right.
 *
 * An x of the document has two elements. Behind them stand the token's logits,
 * which the gate's weight picks; the experts multiply them like all others. */
#include "lone.h"

#include "base/check.h"
#include "train/engine_impl.h"

#include <math.h>
#include <moezero/engine.h>
#include <moezero/moe.h>
#include <stdio.h>
#include <string.h>

enum {
  RANKS = 2,
  TOKENS = 3,
  EXPERTS = 4,
  LOCAL = EXPERTS / RANKS,
  LOGITS = 2, /* where they begin in a token's x */
  WIDTH = 8
};

static const char text[] =
    "{\"data\": {\"sequence_length\": 3}, \"moe\": {\"use_rts\": false}, "
    "\"train_micro_batch_size_per_gpu\": 1, \"gradient_accumulation_steps\": 1,"
    " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-3}}}";

/* By rank: x, gates (logits are ln of 10 g), the expert of a token or -1. */
static const float inputs[RANKS][TOKENS][LOGITS] = {
    {{1, 2}, {3, 4}, {5, 6}}, {{10, 20}, {30, 40}, {50, 60}}};
static const float rows[RANKS][TOKENS][EXPERTS] = {
    {{6, 2, 1, 1}, {1, 1, 7, 1}, {5, 3, 1, 1}},
    {{1, 1, 1, 7}, {2, 5, 2, 1}, {1, 6, 2, 1}}};
static const int32_t experts[RANKS][TOKENS] = {{0, 2, -1}, {3, 1, -1}};

/* [source, local expert, 1, 2] of the rank that computes, as published: zeros
 * where no token went. */
static const float received[RANKS][RANKS][LOCAL][LOGITS] = {
    {{{1, 2}, {0, 0}}, {{0, 0}, {30, 40}}},
    {{{3, 4}, {0, 0}}, {{0, 0}, {10, 20}}}};
static const float returned[RANKS][RANKS][LOCAL][LOGITS] = {
    {{{1, 2}, {0, 0}}, {{0, 0}, {60, 80}}},
    {{{9, 12}, {0, 0}}, {{0, 0}, {40, 80}}}};
static const float outputs[RANKS][TOKENS][LOGITS] = {
    {{.6f, 1.2f}, {6.3f, 8.4f}, {0, 0}}, {{28, 56}, {30, 40}, {0, 0}}};
static const int64_t routed[RANKS][EXPERTS] = {{2, 0, 1, 0}, {0, 2, 0, 1}};
static const double aux_loss = 1.466666667;

static int world_rank;

typedef struct bench {
  int32_t x, y, d_x, d_y; /* buffers [T, WIDTH] */
  float seen_y[TOKENS][WIDTH], seen_d_x[TOKENS][WIDTH];
  /* what the experts saw, in the order of received */
  float there[RANKS][LOCAL][LOGITS], back[RANKS][LOCAL][LOGITS];
  int32_t num[RANKS][LOCAL]; /* rows */
  mz_expert_ops_t expert;    /* that multiplies */
  void *expert_self;
  mz_config_t *config;
  mz_decl_t *decl;
  mz_engine_t *engine;
} bench_t;

static float input(int t, int h)
{
  if (h < LOGITS) return inputs[world_rank][t][h];
  if (h < LOGITS + EXPERTS) return logf(rows[world_rank][t][h - LOGITS]);
  return 0;
}

static float gradient(int t, int h)
{
  return 0.5f - (float)(WIDTH * t + h) / 16;
}

/* --- the layers on both sides --- */

/* The layer's buffers lie on its device. */
static mz_status_t give(const mz_call_t *call, int32_t buffer,
                        float (*value)(int t, int h))
{
  float values[TOKENS * WIDTH];
  int64_t num = call->micro->num_tokens;

  for (int t = 0; t < num; t++)
    for (int h = 0; h < WIDTH; h++)
      values[t * WIDTH + h] = value(t, h);
  return MZ_TRACE(mz_device_copy(call->kernels->device, call->buffers[buffer],
                                 values, num * WIDTH * 4, call->stream));
}

static mz_status_t see(const mz_call_t *call, const void *there, void *here,
                       int64_t bytes)
{
  return MZ_TRACE(
      mz_device_copy(call->kernels->device, here, there, bytes, call->stream));
}

static mz_status_t give_input(const mz_call_t *call, void *self)
{
  const bench_t *b = self;

  return MZ_TRACE(give(call, b->x, input));
}

static mz_status_t see_gradient(const mz_call_t *call, void *self)
{
  bench_t *b = self;

  return MZ_TRACE(
      see(call, call->buffers[b->d_x], b->seen_d_x, sizeof b->seen_d_x));
}

static mz_status_t see_output(const mz_call_t *call, void *self)
{
  bench_t *b = self;

  return MZ_TRACE(see(call, call->buffers[b->y], b->seen_y, sizeof b->seen_y));
}

static mz_status_t give_gradient(const mz_call_t *call, void *self)
{
  const bench_t *b = self;

  return MZ_TRACE(give(call, b->d_y, gradient));
}

/* --- experts that note their rows --- */

static mz_status_t expert_declare(void *self, mz_decl_t *decl, int32_t moe)
{
  bench_t *b = self;

  return MZ_TRACE(b->expert.declare(b->expert_self, decl, moe));
}

static int64_t expert_saved_width(const void *self)
{
  const bench_t *b = self;

  return b->expert.saved_width(b->expert_self);
}

static int64_t expert_scratch_width(const void *self)
{
  const bench_t *b = self;

  return b->expert.scratch_width(b->expert_self);
}

static double expert_operations(const void *self)
{
  const bench_t *b = self;

  return b->expert.operations(b->expert_self);
}

static void expert_destroy(void *self)
{
  bench_t *b = self;

  b->expert.destroy(b->expert_self);
}

/* Rows come by expert, then by source: one of a pair at most. */
static mz_status_t note(const mz_call_t *call, const mz_window_t *w,
                        const void *there, bool arrived, bench_t *b)
{
  float values[RANKS * LOCAL * WIDTH];
  int32_t counts[RANKS * LOCAL];

  MZ_REQUIRE(w->rows <= RANKS * LOCAL, MZ_ERR_DATA, "%" PRId64 " rows",
             w->rows);
  MZ_TRY(see(call, w->counts, counts,
             (int64_t)w->num_sources * w->num_experts * 4));
  MZ_TRY(see(call, there, values, w->rows * WIDTH * 4));
  for (int32_t e = 0; e < w->num_experts; e++) {
    int32_t at = w->host_offsets[e], local = (w->first_expert + e) % LOCAL;

    for (int32_t s = 0; s < w->num_sources; s++) {
      int32_t n = counts[s * w->num_experts + e];

      if (arrived) b->num[s][local] = n;
      if (n > 0)
        memcpy(arrived ? b->there[s][local] : b->back[s][local],
               values + at * WIDTH, sizeof b->there[s][local]);
      at += n;
    }
  }
  return MZ_OK;
}

static mz_status_t expert_forward(void *self, const mz_call_t *call,
                                  const mz_expert_rows_t *window_rows)
{
  bench_t *b = self;

  MZ_TRY(note(call, window_rows->window, window_rows->x, true, b));
  MZ_TRY(b->expert.forward(b->expert_self, call, window_rows));
  return MZ_TRACE(note(call, window_rows->window, window_rows->y, false, b));
}

static mz_status_t expert_backward(void *self, const mz_call_t *call,
                                   const mz_expert_rows_t *window_rows)
{
  bench_t *b = self;

  return MZ_TRACE(b->expert.backward(b->expert_self, call, window_rows));
}

/* --- the network --- */

static mz_status_t declare_moe(bench_t *b)
{
  mz_ffn_opts_t ffn = {.hidden_size = WIDTH,
                       .intermediate_size = WIDTH,
                       .activation = MZ_ACT_IDENTITY_TIMES};
  mz_expert_ops_t expert = {.name = "noted",
                            .declare = expert_declare,
                            .saved_width = expert_saved_width,
                            .scratch_width = expert_scratch_width,
                            .forward = expert_forward,
                            .backward = expert_backward,
                            .operations = expert_operations,
                            .destroy = expert_destroy};
  mz_moe_layer_opts_t opts = {.moe = {.name = "moe",
                                      .num_experts = EXPERTS,
                                      .ep_size = RANKS,
                                      .k = 1,
                                      .drop_tokens = true,
                                      .capacity_factor = 1.0,
                                      .eval_capacity_factor = 1.0,
                                      .min_capacity = 1,
                                      .aux_loss = MZ_AUX_LOAD_BALANCING,
                                      .aux_scope = MZ_SCOPE_RANK},
                              .hidden_size = WIDTH,
                              .init_std = 0.5,
                              .drop_policy = MZ_DROP_POSITION,
                              .in = b->x,
                              .out = b->y,
                              .d_in = b->d_x,
                              .d_out = b->d_y,
                              .expert = &expert,
                              .expert_self = b};

  MZ_TRY(mz_ffn_expert(&ffn, &b->expert, &b->expert_self));
  return MZ_TRACE(mz_moe_layer(b->decl, &opts));
}

static mz_status_t declare(bench_t *b)
{
  mz_compute_opts_t give_x = {
      .name = "x", .fn = give_input, .writes = {b->x}, .num_writes = 1};
  mz_compute_opts_t see_d_x = {
      .name = "d_x", .fn = see_gradient, .reads = {b->d_x}, .num_reads = 1};
  mz_compute_opts_t see_y = {
      .name = "y", .fn = see_output, .reads = {b->y}, .num_reads = 1};
  mz_compute_opts_t give_d_y = {
      .name = "d_y", .fn = give_gradient, .writes = {b->d_y}, .num_writes = 1};

  MZ_TRY(lone_end(b->decl, "before", b, &give_x, &see_d_x));
  MZ_TRY(declare_moe(b));
  return MZ_TRACE(lone_end(b->decl, "behind", b, &see_y, &give_d_y));
}

/* Logit e is element LOGITS + e of x. */
static mz_status_t write_gate(const bench_t *b)
{
  float w[EXPERTS][WIDTH] = {{0}};

  for (int e = 0; e < EXPERTS; e++)
    w[e][LOGITS + e] = 1;
  for (int32_t t = 0; t < mz_decl_num_tensors(b->decl); t++)
    if (strcmp(mz_decl_tensor_name(b->decl, t), "moe.gate.weight") == 0)
      return MZ_TRACE(mz_engine_write(b->engine, t, MZ_PART_WEIGHTS, w[0]));
  MZ_FAIL(MZ_ERR_DATA, "the layer has no gate");
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

  /* what the warm pass left */
  memset(b->there, 0, sizeof b->there);
  memset(b->back, 0, sizeof b->back);
  return MZ_TRACE(mz_engine_step(b->engine, &data, result));
}

/* --- checks --- */

/* Gates are right to a few 1e-7; size: of what they multiply. */
static mz_status_t near(const char *what, int64_t at, double value,
                        double wanted, double size)
{
  MZ_REQUIRE(fabs(value - wanted) <= 2e-6 * fmax(1, fabs(size)), MZ_ERR_DATA,
             "%s[%" PRId64 "] is %.9g, not %.9g", what, at, value, wanted);
  return MZ_OK;
}

static mz_status_t check_all(const char *what, const float *values,
                             const float *wanted, int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    MZ_TRY(
        near(what, i, (double)values[i], (double)wanted[i], (double)wanted[i]));
  return MZ_OK;
}

static mz_status_t check_experts(const bench_t *b)
{
  const float *there = received[world_rank][0][0];
  const float *back = returned[world_rank][0][0];

  for (int s = 0; s < RANKS; s++)
    for (int e = 0; e < LOCAL; e++)
      MZ_REQUIRE(b->num[s][e] == (received[world_rank][s][e][0] > 0),
                 MZ_ERR_DATA, "%d rows of rank %d for expert %d", b->num[s][e],
                 s, e);
  MZ_TRY(check_all("received", b->there[0][0], there, RANKS * LOCAL * LOGITS));
  return MZ_TRACE(
      check_all("returned", b->back[0][0], back, RANKS * LOCAL * LOGITS));
}

/* d_x = w (e + 1) d_y, and of the logits d w (delta - g) with d = <d_y, (e + 1)
 * x>. */
static mz_status_t check_token(const bench_t *b, int t)
{
  int32_t e = experts[world_rank][t];
  const float *row = rows[world_rank][t];
  double w = e < 0 ? 0 : (double)row[e] / 10, d = 0;

  MZ_TRY(check_all("y", b->seen_y[t], outputs[world_rank][t], LOGITS));
  for (int h = 0; h < WIDTH; h++)
    d += (e + 1) * (double)gradient(t, h) * (double)input(t, h);
  for (int h = 0; h < WIDTH; h++) {
    double wanted = w * (e + 1) * (double)gradient(t, h);
    int j = h - LOGITS;

    if (j >= 0 && j < EXPERTS)
      wanted += d * w * ((j == e) - (double)row[j] / 10);
    MZ_TRY(near("y", t * WIDTH + h, (double)b->seen_y[t][h],
                w * (e + 1) * (double)input(t, h),
                (e + 1) * (double)input(t, h)));
    MZ_TRY(near("d_x", t * WIDTH + h, (double)b->seen_d_x[t][h], wanted, d));
  }
  return MZ_OK;
}

/* Of this rank, and what the step tells of both. */
static mz_status_t check_counts(const bench_t *b, const mz_step_result_t *r)
{
  const mz_moe_opts_t *opts = &b->decl->moes[0].opts;
  const mz_moe_call_t *call = &b->engine->moes[0].call;
  const mz_device_t *device = b->engine->device;
  int64_t stats[MZ_STATS_ELEMENTS(EXPERTS)];

  MZ_TRY(
      mz_device_copy(device, stats, call->stats, sizeof stats, device->stream));
  MZ_REQUIRE(call->capacity == 1, MZ_ERR_DATA, "capacity %d", call->capacity);
  for (int e = 0; e < EXPERTS; e++) {
    int64_t both = routed[0][e] + routed[1][e];

    MZ_REQUIRE(stats[MZ_STATS_ROUTED(EXPERTS) + e] == routed[world_rank][e] &&
                   r->moes[0].routed[e] == both && r->moes[0].kept[e] == 1,
               MZ_ERR_DATA,
               "expert %d: routed %" PRId64 ", of both %" PRId64
               ", kept %" PRId64,
               e, stats[MZ_STATS_ROUTED(EXPERTS) + e], r->moes[0].routed[e],
               r->moes[0].kept[e]);
  }
  MZ_TRY(near("own loss", 0, mz_moe_aux_value(opts, stats, 1, 0), aux_loss, 1));
  MZ_TRY(near("loss", 0, r->aux_loss, aux_loss, 1));
  /* four rows, there and back, forward and backward: no padding */
  MZ_REQUIRE(r->exchange_bytes == 4 * 4 * WIDTH * 4, MZ_ERR_DATA,
             "%" PRId64 " bytes were exchanged", r->exchange_bytes);
  return MZ_OK;
}

static mz_status_t run(bench_t *b, const char *const *given, int num_given)
{
  mz_step_result_t result;

  MZ_TRY(mz_config_parse(text, "dispatch", given, num_given, &b->config));
  MZ_TRY(mz_config_resolve(b->config, RANKS));
  MZ_TRY(mz_decl_create(&b->decl));
  MZ_TRY(lone_rows(b->decl, WIDTH, &b->x, &b->y, &b->d_x, &b->d_y));
  MZ_TRY(declare(b));
  MZ_TRY(mz_engine_create(b->config, b->decl, MPI_COMM_WORLD, &b->engine));
  MZ_TRY(write_gate(b));
  MZ_TRY(step(b, &result));
  MZ_TRY(check_experts(b));
  for (int t = 0; t < TOKENS; t++)
    MZ_TRY(check_token(b, t));
  return MZ_TRACE(check_counts(b, &result));
}

int main(int argc, char **argv)
{
  int provided, size, bad, worst;
  bench_t b = {.config = NULL};

  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != RANKS) MPI_Abort(MPI_COMM_WORLD, 2);
  bad = run(&b, (const char *const *)argv + 1, argc - 1) != MZ_OK;
  if (bad) fprintf(stderr, "rank %d: %s\n", world_rank, mz_error_last());
  mz_engine_destroy(&b.engine);
  mz_decl_destroy(&b.decl);
  mz_config_destroy(&b.config);
  MPI_Allreduce(&bad, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (world_rank == 0 && !worst) printf("right\n");
  MPI_Finalize();
  return worst;
}
