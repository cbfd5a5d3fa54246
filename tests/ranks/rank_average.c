/* SPDX-License-Identifier: Apache-2.0 */
/* The published averages over four ranks with two experts in pairs of ranks:
 * one dense number, one number of each expert, whose gradients are given. Each
 * rank's loss is the mean of its own tokens, a quarter of the step's. Expert A
 * is on ranks 0 and 2, where its gradient already holds the tokens of two
 * ranks: the average is over four all the same. An ep_size of 1 puts both
 * experts on all ranks.
 *   rank_average EP_SIZE [KEY=VALUE]...
 * Exactly four ranks, on CPUs. Exit code 0: averages, the norm of distinct
 * numbers and the factor of the clipping are right on all ranks. */
#include "lone.h"

#include "base/check.h"
#include "train/engine_impl.h"

#include <math.h>
#include <moezero/engine.h>
#include <moezero/moe.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 4, EXPERTS = 2, WIDTH = 4 };

static const char text[] =
    "{\"data\": {\"sequence_length\": 1}, \"gradient_clipping\": 1.0, "
    "\"train_micro_batch_size_per_gpu\": 1, \"optimizer\": {\"type\": "
    "\"AdamW\", \"params\": {\"lr\": 1e-3}}}";

static const float of_dense[RANKS] = {1, 2, 3, 6};
static const float of_expert[RANKS] = {4, 2, 8, 6}; /* A, B, A, B */
/* with both experts on all ranks, which add up to the same */
static const float of_both[EXPERTS][RANKS] = {{1, 3, 2, 6}, {0, 2, 1, 5}};

static int32_t ep_size;
static int world_rank;

typedef struct bench {
  int32_t x, y, d_x, d_y; /* buffers [T, WIDTH] */
  int32_t dense, expert;  /* tensors [1], the latter of expert A */
  mz_config_t *config;
  mz_decl_t *decl;
  mz_engine_t *engine;
} bench_t;

/* The gradient of a mean over the labels of this rank, here one a micro-batch:
 * the step's mean takes its share. */
static void add(const mz_call_t *call, int32_t tensor, float value)
{
  float *grad = call->grads[tensor];

  if (!call->accumulate[tensor]) *grad = 0;
  *grad += value * (float)call->micro->token_scale;
}

static mz_status_t zero(const mz_call_t *call, int32_t buffer)
{
  memset(call->buffers[buffer], 0,
         (size_t)call->micro->num_tokens * WIDTH * sizeof(float));
  return MZ_OK;
}

static mz_status_t give_x(const mz_call_t *call, void *self)
{
  const bench_t *b = self;

  return MZ_TRACE(zero(call, b->x));
}

static mz_status_t give_d_y(const mz_call_t *call, void *self)
{
  const bench_t *b = self;

  add(call, b->dense, of_dense[world_rank]);
  return MZ_TRACE(zero(call, b->d_y));
}

static mz_status_t nothing(const mz_call_t *call, void *self) { return MZ_OK; }

/* --- experts: the identity beside a number --- */

static mz_status_t expert_declare(void *self, mz_decl_t *decl, int32_t moe)
{
  bench_t *b = self;
  mz_tensor_opts_t opts = {
      .name = "number", .ndim = 1, .shape = {1}, .init = MZ_INIT_ONE};

  return MZ_TRACE(mz_decl_expert_tensor(decl, moe, &opts, &b->expert));
}

static int64_t no_width(const void *self) { return 0; }
static double no_operations(const void *self) { return 0; }

static mz_status_t expert_forward(void *self, const mz_call_t *call,
                                  const mz_expert_rows_t *rows)
{
  memcpy(rows->y, rows->x, (size_t)rows->window->rows * WIDTH * sizeof(float));
  return MZ_OK;
}

static mz_status_t expert_backward(void *self, const mz_call_t *call,
                                   const mz_expert_rows_t *rows)
{
  const bench_t *b = self;
  const mz_window_t *w = rows->window;

  for (int32_t e = w->first_expert; e < w->first_expert + w->num_experts; e++)
    add(call, b->expert + e,
        ep_size == 1 ? of_both[e][world_rank] : of_expert[world_rank]);
  memcpy(rows->dx, rows->dy, (size_t)w->rows * WIDTH * sizeof(float));
  return MZ_OK;
}

/* --- the network --- */

/* Fixed logits: the gate's weight has no gradient. */
static mz_status_t declare_moe(bench_t *b)
{
  static const float logits[EXPERTS] = {1, 0};
  mz_expert_ops_t expert = {.name = "number",
                            .declare = expert_declare,
                            .saved_width = no_width,
                            .scratch_width = no_width,
                            .forward = expert_forward,
                            .backward = expert_backward,
                            .operations = no_operations};
  mz_moe_layer_opts_t opts = {.moe = {.name = "moe",
                                      .num_experts = EXPERTS,
                                      .ep_size = ep_size,
                                      .k = 1,
                                      .capacity_factor = 1,
                                      .eval_capacity_factor = 1},
                              .hidden_size = WIDTH,
                              .init_std = 0.5,
                              .in = b->x,
                              .out = b->y,
                              .d_in = b->d_x,
                              .d_out = b->d_y,
                              .expert = &expert,
                              .expert_self = b,
                              .fixed_logits = logits};

  return MZ_TRACE(mz_moe_layer(b->decl, &opts));
}

static mz_status_t declare(bench_t *b)
{
  mz_tensor_opts_t dense = {
      .name = "dense", .ndim = 1, .shape = {1}, .init = MZ_INIT_ONE};
  mz_compute_opts_t x = {
      .name = "x", .fn = give_x, .writes = {b->x}, .num_writes = 1};
  mz_compute_opts_t d_x = {
      .name = "d_x", .fn = nothing, .reads = {b->d_x}, .num_reads = 1};
  mz_compute_opts_t y = {
      .name = "y", .fn = nothing, .reads = {b->y}, .num_reads = 1};
  mz_compute_opts_t d_y = {
      .name = "d_y", .fn = give_d_y, .writes = {b->d_y}, .num_writes = 1};

  MZ_TRY(lone_end(b->decl, "before", b, &x, &d_x));
  MZ_TRY(declare_moe(b));
  MZ_TRY(mz_decl_tensor(b->decl, &dense, &b->dense));
  y.weights[0] = d_y.grads[0] = b->dense;
  y.num_weights = d_y.num_grads = 1;
  return MZ_TRACE(lone_end(b->decl, "behind", b, &y, &d_y));
}

static mz_status_t step(bench_t *b, mz_step_result_t *result)
{
  const mz_config_values_t *v = mz_config_values(b->config);
  int32_t ids[2] = {0}, ones[2] = {1, 1};
  int64_t samples[2] = {world_rank, RANKS + world_rank};
  mz_step_data_t data = {.num_micro = (int32_t)v->gradient_accumulation_steps,
                         .tokens = ids,
                         .labels = ids,
                         .samples = samples,
                         .sequences = ones,
                         .max_sequences = ones};

  MZ_REQUIRE(data.num_micro <= 2, MZ_ERR_ARG, "more than two micro-batches");
  return MZ_TRACE(mz_engine_step(b->engine, &data, result));
}

/* --- checks --- */

static mz_status_t near(const char *what, double value, double wanted)
{
  MZ_REQUIRE(fabs(value - wanted) <= 1e-6 * wanted, MZ_ERR_DATA,
             "%s is %.9g, not %.9g", what, value, wanted);
  return MZ_OK;
}

static mz_status_t check(const bench_t *b, const mz_step_result_t *result)
{
  double factor =
      mz_config_values(b->config)->gradient_clipping > 5 ? 1 : 0.213200671;
  float dense, expert[EXPERTS];

  MZ_TRY(mz_engine_read(b->engine, b->dense, MZ_PART_GRADS, &dense));
  for (int e = 0; e < EXPERTS; e++)
    MZ_TRY(mz_engine_read(b->engine, b->expert + e, MZ_PART_GRADS, &expert[e]));
  MZ_TRY(near("the dense gradient", (double)dense, 3));
  MZ_TRY(near("that of expert A", (double)expert[0], 3));
  MZ_TRY(near("that of expert B", (double)expert[1], 2));
  MZ_TRY(near("the norm", result->grad_norm, 4.69041576));
  return MZ_TRACE(near("the factor", (double)b->engine->factor, factor));
}

static mz_status_t run(bench_t *b, const char *const *given, int num_given)
{
  mz_step_result_t result;

  MZ_TRY(mz_config_parse(text, "average", given, num_given, &b->config));
  MZ_TRY(mz_config_resolve(b->config, RANKS));
  MZ_TRY(mz_decl_create(&b->decl));
  MZ_TRY(lone_rows(b->decl, WIDTH, &b->x, &b->y, &b->d_x, &b->d_y));
  MZ_TRY(declare(b));
  MZ_TRY(mz_engine_create(b->config, b->decl, MPI_COMM_WORLD, &b->engine));
  MZ_TRY(step(b, &result));
  return MZ_TRACE(check(b, &result));
}

int main(int argc, char **argv)
{
  int provided, size, bad, worst;
  bench_t b = {.config = NULL};

  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != RANKS || argc < 2) MPI_Abort(MPI_COMM_WORLD, 2);
  ep_size = atoi(argv[1]);
  bad = run(&b, (const char *const *)argv + 2, argc - 2) != MZ_OK;
  if (bad) fprintf(stderr, "rank %d: %s\n", world_rank, mz_error_last());
  mz_engine_destroy(&b.engine);
  mz_decl_destroy(&b.decl);
  mz_config_destroy(&b.config);
  MPI_Allreduce(&bad, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (world_rank == 0 && !worst) printf("right\n");
  MPI_Finalize();
  return worst;
}
