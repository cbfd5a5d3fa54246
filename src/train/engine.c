/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's life and its steps. */
#include "train/engine_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/hooks.h"
#include "train/plan_opts.h"
#include "train/schedule.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

double mz_engine_now_ms(void)
{
  struct timespec t;

  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* Since the last call for this clock. */
static double lap_ms(double *clock)
{
  double before = *clock;

  *clock = mz_engine_now_ms();
  return *clock - before;
}

static int64_t resident_bytes(void)
{
  long long size = 0, resident = 0;
  FILE *file = fopen("/proc/self/statm", "r");

  if (!file) return 0;
  if (fscanf(file, "%lld %lld", &size, &resident) != 2) resident = 0;
  fclose(file);
  return (int64_t)resident * sysconf(_SC_PAGESIZE);
}

/* --- one micro-batch --- */

/* Data of a step in a buffer: samples, then tokens, then labels. */
typedef struct step_arrays {
  int64_t *samples;
  int32_t *tokens, *labels;
} step_arrays_t;

static step_arrays_t arrays_at(const mz_engine_t *e, int32_t buffer)
{
  const mz_plan_opts_t *o = &e->plan->opts;
  step_arrays_t a;

  a.samples = (int64_t *)mz_zero_buffer(e->zero, buffer);
  a.tokens = (int32_t *)(a.samples + o->accumulation * o->micro_sequences);
  a.labels = a.tokens + o->accumulation * e->plan->max_tokens;
  return a;
}

static int32_t sequence_of(const mz_engine_t *e, int rank)
{
  int64_t length =
      e->sequence > 0 ? e->sequence : e->plan->opts.sequence_length;

  if (rank < e->config->debug.num_tokens_per_rank)
    length = mz_min_i64(length, e->config->debug.tokens_per_rank[rank]);
  return (int32_t)length;
}

static int64_t most_tokens(const mz_engine_t *e, int32_t sequences)
{
  int64_t most = 0;

  for (int r = 0; r < e->plan->opts.world_size; r++)
    most = mz_max_i64(most, sequence_of(e, r));
  return most * sequences;
}

static mz_status_t begin_micro(mz_engine_t *e, const mz_step_data_t *data,
                               int32_t j)
{
  const mz_plan_opts_t *o = &e->plan->opts;
  step_arrays_t a = arrays_at(e, e->plan->data);
  char *rows = mz_zero_buffer(e->zero, e->plan->token_rows);
  int32_t length = sequence_of(e, o->rank);

  e->micro =
      (mz_micro_t){.num_tokens = (int64_t)data->sequences[j] * length,
                   .max_tokens = most_tokens(e, data->max_sequences[j]),
                   .sequences = data->sequences[j],
                   .sequence_length = length,
                   .tokens = a.tokens + j * e->plan->max_tokens,
                   .labels = a.labels + j * e->plan->max_tokens,
                   .samples = a.samples + j * o->micro_sequences,
                   .offsets = (const int32_t *)(const void *)rows,
                   .host_offsets = {0, data->sequences[j] * length},
                   .token_scale = e->total_labels > 0 ? 1 / e->total_labels : 0,
                   .index = j,
                   .accumulation = data->num_micro};
  MZ_TRY(mz_device_upload(e->device, rows, e->micro.host_offsets,
                          sizeof e->micro.host_offsets, e->device->stream));
  return MZ_TRACE(mz_routing_begin_micro(e));
}

/* Copies the step's data and counts what has a label. A rank whose sequences
 * are cut (debug.tokens_per_rank) holds them without gaps. */
static mz_status_t take_data(mz_engine_t *e, const mz_step_data_t *data,
                             double *scalars)
{
  const mz_plan_opts_t *o = &e->plan->opts;
  step_arrays_t a = arrays_at(e, e->plan->data_host);
  int64_t length = sequence_of(e, o->rank), labels = 0, tokens = 0;

  for (int32_t j = 0; j < data->num_micro; j++)
    for (int32_t s = 0; s < data->sequences[j]; s++) {
      int64_t row = j * o->micro_sequences + s;
      int64_t to = j * e->plan->max_tokens + s * length;

      a.samples[row] = data->samples[row];
      for (int64_t t = 0; t < length; t++) {
        int32_t label = data->labels[row * o->sequence_length + t];
        if (mz_hooks_masked(e->config, o->rank)) label = -1;
        a.tokens[to + t] = data->tokens[row * o->sequence_length + t];
        a.labels[to + t] = label;
        labels += label >= 0;
      }
      tokens += length;
    }
  scalars[MZ_AT_LABELS] = (double)labels;
  scalars[MZ_AT_TOKENS] = (double)tokens;
  return MZ_TRACE(mz_device_copy(
      e->device, mz_zero_buffer(e->zero, e->plan->data), a.samples,
      e->plan->buffers[e->plan->data].bytes, e->device->stream));
}

static mz_status_t check_data(const mz_engine_t *e, const mz_step_data_t *data)
{
  const mz_plan_opts_t *o = &e->plan->opts;

  MZ_REQUIRE(data->num_micro >= 1 && data->num_micro <= o->accumulation,
             MZ_ERR_ARG, "%d micro-batches, planned are %" PRId64,
             data->num_micro, o->accumulation);
  for (int32_t j = 0; j < data->num_micro; j++)
    MZ_REQUIRE(data->sequences[j] >= 0 &&
                   data->sequences[j] <= data->max_sequences[j] &&
                   data->max_sequences[j] <= o->micro_sequences,
               MZ_ERR_ARG,
               "micro-batch %d: %d sequences, %d on the rank with the most, "
               "planned are %" PRId64,
               j, data->sequences[j], data->max_sequences[j],
               o->micro_sequences);
  return MZ_OK;
}

static mz_status_t begin(mz_engine_t *e, const mz_step_data_t *data,
                         mz_mode_t mode)
{
  double *own = (double *)mz_zero_buffer(e->zero, e->plan->scalars_own);

  e->status = e->late == MZ_OK ? MZ_OK : MZ_ERROR(e->late, "%s", e->late_text);
  e->call.mode = mode;
  e->call.step = e->steps;
  e->aux_sum = e->z_sum = e->weighted_aux = 0;
  if (e->parts && mode == MZ_MODE_TRAIN)
    mz_engine_note(e, mz_parts_begin(e->parts));
  MZ_TRY(mz_update_begin(e));
  mz_engine_note(e, check_data(e, data)); /* all ranks get to know it */
  if (e->status == MZ_OK) MZ_TRY(take_data(e, data, own));
  mz_routing_begin_step(e);
  return MZ_OK;
}

static mz_status_t walk_whole(mz_engine_t *e, mz_walk_t walk)
{
  return MZ_TRACE(mz_engine_walk(e, walk, 0, e->plan->num_ops[walk]));
}

/* Own parts, then from the first operation after the optimizer on; without one,
 * none. */
mz_status_t mz_engine_publish(mz_engine_t *engine)
{
  const mz_op_t *ops = engine->plan->ops[MZ_WALK_UPDATE];
  int32_t first = 0, num = engine->plan->num_ops[MZ_WALK_UPDATE];

  engine->status = mz_zero_publish(engine->zero); /* no step's any more */
  while (first < num && ops[first].kind != MZ_OP_ADAMW)
    first++;
  MZ_TRY(mz_engine_walk(engine, MZ_WALK_UPDATE, first + 1, num));
  return MZ_TRACE(mz_comm_agree(engine->comm, engine->status));
}

/* Gradients of all micro-batches, then the update unless there is none. */
static mz_status_t run_step(mz_engine_t *e, const mz_step_data_t *data)
{
  MZ_TRY(walk_whole(e, MZ_WALK_BEGIN));
  e->total_labels = mz_update_sum(e, MZ_AT_LABELS);
  e->total_tokens = mz_update_sum(e, MZ_AT_TOKENS);
  if (mz_update_worst(e) != MZ_OK) return MZ_OK; /* all ranks know it */
  mz_engine_note(
      e, mz_hooks_fault(e->config, e->plan->opts.rank, e->steps + 1, false));
  mz_zero_begin_step(e->zero);
  for (int32_t j = 0; j < data->num_micro; j++) {
    mz_engine_note(e, begin_micro(e, data, j));
    MZ_TRY(walk_whole(e, MZ_WALK_MICRO));
  }
  e->micro.index = 0; /* sums of the update are not of a later micro-batch */
  return MZ_TRACE(walk_whole(e, MZ_WALK_UPDATE));
}

/* With the waits that the configuration wants. None of the stream outlives the
 * step: nothing outside of steps has to know of them. */
static mz_status_t run_waiting(mz_engine_t *e, const mz_step_data_t *data)
{
  mz_status_t st;

  e->stream_waits = e->config->comm.wait == MZ_WAIT_STREAM;
  st = run_step(e, data);
  e->stream_waits = false;
  return st != MZ_OK ? MZ_TRACE(st) : MZ_TRACE(mz_comm_settle(e->comm));
}

/* No rank may leave alone with an error: it is one of the step's. */
static void take_parts(mz_engine_t *e, mz_step_result_t *r)
{
  if (!e->parts) return;
  mz_engine_note(e, mz_parts_take(e->parts, &r->parts_ms, &r->num_parts));
}

static void fill_result(const mz_engine_t *e, mz_step_result_t *r)
{
  r->step = e->steps;
  r->lm_loss = e->total_labels > 0 ? e->total_loss / e->total_labels : 0;
  r->aux_loss = e->aux_sum;
  r->z_loss = e->z_sum;
  r->loss = r->lm_loss + (e->total_labels > 0 ? e->weighted_aux : 0);
  r->lr = e->lr;
  r->grad_norm = e->grad_norm;
  r->skipped = e->verdict_skip;
  r->labels = (int64_t)e->total_labels;
  r->tokens = (int64_t)e->total_tokens;
  r->min_gap = e->min_gap;
  if (e->culprit >= 0)
    snprintf(r->culprit, sizeof r->culprit, "%s",
             mz_decl_tensor_name(e->decl, e->culprit));
  r->num_moes = e->plan->num_moes;
  r->moes = e->results;
  r->exchange_bytes = (int64_t)mz_update_sum(e, MZ_AT_SENT);
  r->least_exposed_ms = mz_update_least(e, MZ_AT_EXPOSED);
}

/* Adds its number to the error that ended a step. */
static mz_status_t name_step(const mz_engine_t *e, mz_status_t status)
{
  char text[1024];

  if (status == MZ_OK) return MZ_OK;
  snprintf(text, sizeof text, "%s", mz_error_message());
  MZ_FAIL(status, "step %" PRId64 ": %s", e->steps + 1, text);
}

/* No rank may agree alone: the others have left the step. */
static void keep_late(mz_engine_t *e)
{
  if (e->status == MZ_OK) return;
  e->late = e->status;
  snprintf(e->late_text, sizeof e->late_text, "in step %" PRId64 ": %s",
           e->steps + 1, mz_error_message());
}

mz_status_t mz_engine_step(mz_engine_t *engine, const mz_step_data_t *data,
                           mz_step_result_t *result_out)
{
  double start = mz_engine_now_ms();

  *result_out = (mz_step_result_t){0};
  MZ_REQUIRE(!engine->plan->opts.inference, MZ_ERR_ARG,
             "a step of an engine made for inference");
  mz_comm_take_wait_seconds(engine->comm);
  mz_comm_take_timed_seconds(engine->comm);
  engine->exposed_ms = engine->covered_ms = 0;
  MZ_TRY(begin(engine, data, MZ_MODE_TRAIN));
  mz_engine_note(engine, mz_tuning_begin_step(engine));
  engine->verdict_skip = false;
  engine->lr = mz_schedule_lr(&engine->config->scheduler,
                              engine->config->optimizer.lr, engine->updates);
  MZ_TRY(name_step(engine, run_waiting(engine, data)));
  if (mz_update_worst(engine) != MZ_OK)
    return MZ_TRACE(
        name_step(engine, mz_comm_agree(engine->comm, engine->status)));
  take_parts(engine, result_out);
  keep_late(engine);
  MZ_TRY(mz_tuning_end_step(engine));
  engine->steps++;
  fill_result(engine, result_out);
  result_out->ms = mz_engine_now_ms() - start;
  result_out->wait_ms =
      1e3 * mz_comm_take_wait_seconds(engine->comm) + engine->covered_ms;
  result_out->exchange_ms = 1e3 * mz_comm_take_timed_seconds(engine->comm);
  result_out->exposed_ms = engine->exposed_ms;
  return MZ_OK;
}

mz_status_t mz_engine_eval(mz_engine_t *engine, const mz_step_data_t *data,
                           double *loss_sum_out, int64_t *labels_out)
{
  MZ_TRY(begin(engine, data, MZ_MODE_EVAL));
  for (int32_t j = 0; j < data->num_micro; j++) {
    mz_engine_note(engine, begin_micro(engine, data, j));
    MZ_TRY(walk_whole(engine, MZ_WALK_EVAL));
  }
  MZ_TRY(walk_whole(engine, MZ_WALK_BEGIN));
  if (mz_update_worst(engine) != MZ_OK)
    return MZ_TRACE(mz_comm_agree(engine->comm, engine->status));
  *loss_sum_out = mz_update_sum(engine, MZ_SCALAR_LOSS_SUM);
  *labels_out = (int64_t)mz_update_sum(engine, MZ_AT_LABELS);
  return MZ_OK;
}

/* --- life --- */

static mz_status_t create_comm(mz_engine_t *e, MPI_Comm comm)
{
  mz_comm_opts_t opts = {.thread = e->config->comm.thread,
                         .watchdog_s = e->config->train.watchdog_s,
                         .staged = e->config->debug.staged,
                         .count_limit = e->config->debug.count_limit,
                         .form = e->config->comm.messages};
  return MZ_TRACE(mz_comm_create(comm, &opts, &e->comm));
}

static mz_status_t create_plan(mz_engine_t *e, bool inference)
{
  mz_plan_opts_t opts;

  MZ_REQUIRE(mz_decl_dtype(e->decl) == (e->config->bf16 ? MZ_BF16 : MZ_F32),
             MZ_ERR_CONFIG,
             "bf16.enabled is %s, but the declaration's element type is %d",
             e->config->bf16 ? "true" : "false", (int)mz_decl_dtype(e->decl));
  mz_plan_opts_from_config(e->config, mz_comm_size(e->comm),
                           mz_comm_rank(e->comm), &opts);
  opts.inference = inference;
  MZ_TRY(mz_plan_create(e->decl, &opts, &e->plan));
  return MZ_TRACE(mz_new(e->plan->num_groups, "groups", &e->comm_groups));
}

static mz_status_t create_groups(mz_engine_t *e)
{
  for (int32_t i = 1; i < e->plan->num_groups; i++) {
    const mz_group_t *g = &e->plan->groups[i];
    MZ_TRY(mz_comm_add_group(e->comm, g->name, g->ranks, g->size,
                             &e->comm_groups[i]));
  }
  return MZ_OK;
}

static mz_status_t create_tables(mz_engine_t *e)
{
  int64_t world = e->plan->opts.world_size;

  MZ_TRY(mz_new(e->decl->num_layers, "MoE of layers", &e->layer_moe));
  for (int64_t l = 0; l < e->decl->num_layers; l++) {
    const mz_layer_t *layer = &e->decl->layers[l];

    e->layer_moe[l] = -1;
    for (int pass = 0; pass < 2; pass++)
      for (int32_t s = 0; s < layer->num[pass]; s++) {
        int32_t moe = e->decl->steps[pass][layer->first[pass] + s].moe;
        if (moe >= 0) e->layer_moe[l] = moe;
      }
  }
  MZ_TRY(mz_new(e->decl->num_buffers, "buffer pointers", &e->buffers));
  for (int64_t b = 0; b < e->decl->num_buffers; b++)
    e->buffers[b] = mz_zero_buffer(e->zero, e->plan->buffer_of_decl[b]);
  MZ_TRY(mz_new(e->plan->num_entries, "tickets", &e->tickets));
  for (int w = 0; w < MZ_NUM_WALKS; w++)
    MZ_TRY(mz_new(e->plan->num_ops[w], "operations known", &e->known[w]));
  MZ_TRY(mz_new(4 * world, "extents of a tensor", &e->extents));
  MZ_TRY(mz_new(2 * world, "scalars message", &e->scalars_counts));
  e->scalars_displs = e->scalars_counts + world;
  for (int64_t r = 0; r < world; r++) {
    e->scalars_counts[r] = MZ_PLAN_SCALARS;
    e->scalars_displs[r] = r * MZ_PLAN_SCALARS;
  }
  MZ_TRY(mz_new(e->decl->num_tensors, "marks of tensors", &e->gathered));
  MZ_TRY(mz_update_make_groups(e));
  return MZ_TRACE(mz_routing_create(e));
}

/* In the arena. */
static mz_status_t create_kernels(mz_engine_t *e)
{
  mz_kernels_opts_t opts = {.device = e->device,
                            .dtype = e->plan->dtype,
                            .deterministic = e->config->train.deterministic};

  if (e->plan->workspace >= 0) {
    const mz_plan_buffer_t *workspace = &e->plan->buffers[e->plan->workspace];
    opts.workspace = e->arena + workspace->offset;
    opts.workspace_bytes = workspace->bytes;
  }
  if (e->config->wall_clock_breakdown && !e->plan->opts.inference) {
    MZ_TRY(mz_parts_create(e->plan, e->device, &e->parts));
    opts.spans = mz_parts_spans(e->parts);
  }
  return MZ_TRACE(mz_kernels_create(&opts, &e->kernels));
}

static mz_status_t create_memory(mz_engine_t *e)
{
  mz_zero_opts_t zero = {.plan = e->plan,
                         .comm = e->comm,
                         .comm_groups = e->comm_groups,
                         .stream = e->device->stream};

  MZ_TRY(mz_device_alloc(e->device, e->plan->arena_bytes, "the plan's arena",
                         (void **)&e->arena));
  if (e->plan->host_bytes > 0)
    MZ_TRY(mz_device_alloc_host(e->device, e->plan->host_bytes,
                                "the plan's host arena",
                                (void **)&e->host_arena));
  MZ_TRY(create_kernels(e));
  e->tuned = !e->kernels->ops->tune; /* nothing to choose */
  zero.kernels = e->kernels;
  zero.arena = e->arena;
  zero.host_arena = e->host_arena;
  MZ_TRY(mz_zero_create(&zero, &e->zero));
  MZ_TRY(create_tables(e));
  e->call = (mz_call_t){
      .seed = (uint64_t)e->config->train.seed,
      .micro = &e->micro,
      .kernels = e->kernels,
      .stream = e->device->stream,
      .buffers = e->buffers,
      .weights = mz_zero_weights(e->zero),
      .grads = mz_zero_grads(e->zero),
      .accumulate = mz_zero_accumulate(e->zero),
      .scalars = (double *)mz_zero_buffer(e->zero, e->plan->scalars)};
  return MZ_OK;
}

static mz_status_t create_values(mz_engine_t *e)
{
  mz_status_t st = mz_zero_init(e->zero, (uint64_t)e->config->train.seed);

  MZ_TRY(mz_comm_agree(e->comm, st));
  return MZ_TRACE(mz_engine_publish(e));
}

/* Every kernel, message and buffer once, on zeros, without an update. */
static mz_status_t warm_step(mz_engine_t *e, const mz_step_data_t *data)
{
  mz_step_result_t result;

  if (e->plan->opts.inference) return MZ_OK;
  MZ_TRY(begin(e, data, MZ_MODE_TRAIN));
  e->verdict_skip = true;
  MZ_TRY(run_step(e, data));
  take_parts(e, &result);
  return MZ_TRACE(mz_comm_agree(e->comm, e->status));
}

static mz_status_t warm_pass(mz_engine_t *e)
{
  const mz_plan_opts_t *o = &e->plan->opts;
  int64_t rows = o->micro_sequences, tokens = e->plan->max_tokens;
  int32_t sequences = (int32_t)rows, *zeros = NULL;
  int64_t *samples = NULL;
  mz_step_data_t data = {
      .num_micro = 1, .sequences = &sequences, .max_sequences = &sequences};
  mz_status_t st;
  double loss;
  int64_t labels;

  st = mz_new(tokens, "warm tokens", &zeros);
  if (st == MZ_OK) st = mz_new(rows, "warm samples", &samples);
  MZ_TRY_GOTO(st, mz_comm_agree(e->comm, st), done);
  MZ_ASSERT(zeros && samples); /* all ranks succeed, so this one did */
  data.tokens = data.labels = zeros;
  data.samples = samples;
  MZ_TRY_GOTO(st, warm_step(e, &data), done);
  MZ_TRY_GOTO(st, mz_engine_eval(e, &data, &loss, &labels), done);
done:
  mz_free(zeros);
  mz_free(samples);
  return st;
}

/* What is in use besides the arena: of the process, or of the GPU. */
static mz_status_t measure_baseline(mz_engine_t *e)
{
  int64_t used = resident_bytes();

  if (!e->device->ops->is_host) MZ_TRY(mz_device_used(e->device, &used));
  e->baseline_bytes = used - e->plan->arena_bytes;
  return MZ_OK;
}

static mz_status_t create(const mz_config_t *config, const mz_decl_t *decl,
                          MPI_Comm comm, bool inference,
                          mz_engine_t **engine_out)
{
  mz_engine_t *e = NULL;
  double clock = mz_engine_now_ms();
  mz_status_t st;

  *engine_out = NULL;
  MZ_TRY_GOTO(st, mz_new(1, "engine", &e), done);
  e->config = mz_config_values(config);
  e->decl = decl;
  MZ_TRY_GOTO(st, create_comm(e, comm), done);
  MZ_TRY_GOTO(st, mz_comm_agree(e->comm, create_plan(e, inference)), done);
  MZ_TRY_GOTO(st, create_groups(e), done);
  e->start_times.plan_ms = lap_ms(&clock);
  MZ_TRY_GOTO(st, mz_engine_open_device(e), done);
  MZ_TRY_GOTO(st, mz_comm_agree(e->comm, create_memory(e)), done);
  e->start_times.device_ms = lap_ms(&clock);
  MZ_TRY_GOTO(st, create_values(e), done);
  e->start_times.values_ms = lap_ms(&clock);
  MZ_TRY_GOTO(st, warm_pass(e), done);
  e->start_times.warm_ms = lap_ms(&clock);
  MZ_TRY_GOTO(st, measure_baseline(e), done);
  mz_hooks_mark("warm");
  *engine_out = e;
  e = NULL;
done:
  mz_engine_destroy(&e);
  return st;
}

mz_status_t mz_engine_create(const mz_config_t *config, const mz_decl_t *decl,
                             MPI_Comm comm, mz_engine_t **engine_out)
{
  return MZ_TRACE(create(config, decl, comm, false, engine_out));
}

mz_status_t mz_engine_create_inference(const mz_config_t *config,
                                       const mz_decl_t *decl, MPI_Comm comm,
                                       mz_engine_t **engine_out)
{
  return MZ_TRACE(create(config, decl, comm, true, engine_out));
}

void mz_engine_destroy(mz_engine_t **engine)
{
  mz_engine_t *e = engine ? *engine : NULL;

  if (!e) return;
  mz_comm_destroy(&e->comm); /* what is under way has its arrays until then */
  if (e->plan) mz_routing_destroy(e);
  mz_zero_destroy(&e->zero);
  mz_kernels_destroy(&e->kernels);
  mz_parts_destroy(&e->parts);
  if (e->device) {
    mz_device_free(e->device, e->arena);
    mz_device_free_host(e->device, e->host_arena);
  }
  mz_device_close(&e->device);
  mz_plan_destroy(&e->plan);
  mz_free(e->comm_groups);
  mz_free(e->layer_moe);
  mz_free(e->buffers);
  mz_free(e->tickets);
  for (int w = 0; w < MZ_NUM_WALKS; w++)
    mz_free(e->known[w]);
  mz_free(e->scalars_counts);
  mz_free(e->extents);
  mz_free(e->groups);
  mz_free(e->lr_ratio);
  mz_free(e->gathered);
  mz_free(e);
  *engine = NULL;
}

int64_t mz_engine_steps(const mz_engine_t *engine) { return engine->steps; }

void mz_engine_set_steps(mz_engine_t *engine, int64_t steps)
{
  engine->steps = steps;
}

const struct mz_plan *mz_engine_plan(const mz_engine_t *engine)
{
  return engine->plan;
}

struct mz_comm *mz_engine_comm(mz_engine_t *engine) { return engine->comm; }

const mz_start_times_t *mz_engine_start_times(const mz_engine_t *engine)
{
  return &engine->start_times;
}

int64_t mz_engine_baseline_bytes(const mz_engine_t *engine)
{
  return engine->baseline_bytes;
}
