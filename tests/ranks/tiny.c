/* SPDX-License-Identifier: Apache-2.0 */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"
#include "comm/comm.h"
#include <moezero/gpt.h>

#include <math.h>
#include <moezero/random.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char text[] =
    "{\"model\": {\"architecture\": \"gpt2\", \"vocab_size\": 64, "
    "\"hidden_size\": 32, \"num_hidden_layers\": 2, \"num_attention_heads\": "
    "2, \"intermediate_size\": 64, \"max_position_embeddings\": 16, "
    "\"tie_word_embeddings\": false}, \"moe\": {\"num_experts\": 4, \"k\": 2, "
    "\"drop_tokens\": false, \"aux_loss\": \"none\"}, \"data\": "
    "{\"sequence_length\": 16}, \"train\": {\"seed\": 1234, \"watchdog_s\": "
    "30}, \"train_batch_size\": 8, \"gradient_clipping\": 0, \"optimizer\": "
    "{\"type\": \"AdamW\", \"params\": {\"lr\": 1e-3, \"eps\": 1e-4}}, "
    "\"zero_optimization\": {\"stage\": 0, "
    "\"stage3_param_persistence_threshold\": 100}}";

enum { MAX_ASSIGNMENTS = 64 };

bool tiny_inline;
const char *tiny_tuning;

void tiny_give(tiny_given_t *given, const char *format, ...)
{
  va_list args;

  va_start(args, format);
  vsnprintf(given->values[given->num], TINY_VALUE, format, args);
  va_end(args);
  given->all[given->num] = given->values[given->num];
  given->num++;
}

mz_status_t tiny_config(const char *const *assignments, int num, MPI_Comm comm,
                        mz_config_t **config_out)
{
  const char *all[MAX_ASSIGNMENTS];
  int n = 0, size;

  MZ_REQUIRE(num < MAX_ASSIGNMENTS, MZ_ERR_ARG, "%d assignments", num);
  all[n++] = tiny_inline ? "comm.thread=false" : "comm.thread=true";
  for (int i = 0; i < num; i++)
    all[n++] = assignments[i];
  MPI_Comm_size(comm, &size);
  MZ_TRY(mz_config_parse(text, "TINY", all, n, config_out));
  return MZ_TRACE(mz_config_resolve(*config_out, size));
}

/* --- SIGUSR2 --- */

static pthread_mutex_t watch_lock = PTHREAD_MUTEX_INITIALIZER;
static mz_engine_t *watched; /* under the lock */

static void *tell_positions(void *ctx)
{
  sigset_t set;
  int number;
  char place[512];

  (void)ctx;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  while (sigwait(&set, &number) == 0) {
    pthread_mutex_lock(&watch_lock);
    snprintf(place, sizeof place, "no engine");
    if (watched) mz_comm_position(mz_engine_comm(watched), place, sizeof place);
    fprintf(stderr, "%s\n", place);
    pthread_mutex_unlock(&watch_lock);
  }
  return NULL;
}

void tiny_watch(void)
{
  pthread_t thread;
  sigset_t set;

  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &set, NULL);
  if (pthread_create(&thread, NULL, tell_positions, NULL) == 0)
    pthread_detach(thread);
}

static void watch(mz_engine_t *engine)
{
  pthread_mutex_lock(&watch_lock);
  watched = engine;
  pthread_mutex_unlock(&watch_lock);
}

/* --- engines --- */

mz_status_t tiny_create(const char *const *assignments, int num, MPI_Comm comm,
                        tiny_t *tiny_out)
{
  memset(tiny_out, 0, sizeof *tiny_out);
  tiny_out->comm = comm;
  MZ_TRY(tiny_config(assignments, num, comm, &tiny_out->config));
  MZ_TRY(mz_decl_create(&tiny_out->decl));
  MZ_TRY(mz_gpt_declare(mz_config_values(tiny_out->config), tiny_out->decl));
  MZ_TRY(mz_engine_create(tiny_out->config, tiny_out->decl, comm,
                          &tiny_out->engine));
  watch(tiny_out->engine);
  if (!tiny_tuning) return MZ_OK;
  return MZ_TRACE(mz_engine_take_tuning(tiny_out->engine, tiny_tuning));
}

void tiny_destroy(tiny_t *tiny)
{
  watch(NULL);
  mz_engine_destroy(&tiny->engine);
  mz_decl_destroy(&tiny->decl);
  mz_config_destroy(&tiny->config);
}

int32_t tiny_token(int64_t step, int64_t sample, int64_t t)
{
  mz_random_t random =
      mz_random_make(77, (uint32_t)step, MZ_PURPOSE_SAMPLER, (uint32_t)sample);
  uint32_t bits = mz_random_u32(&random, (uint64_t)t);

  return (int32_t)(bits % 5 ? (t * 3 + sample * 7) % TINY_VOCAB
                            : bits / 5 % TINY_VOCAB);
}

/* This rank's part of a global batch. */
typedef struct batch {
  int32_t tokens[TINY_MAX_BATCH * TINY_SEQUENCE];
  int32_t labels[TINY_MAX_BATCH * TINY_SEQUENCE];
  int64_t samples[TINY_MAX_BATCH];
  int32_t sequences[TINY_MAX_BATCH];
  mz_step_data_t data;
} batch_t;

static void fill_row(const tiny_t *tiny, batch_t *b, int64_t row,
                     int64_t sample)
{
  int64_t length = mz_config_values(tiny->config)->data.sequence_length;
  int64_t step = mz_engine_steps(tiny->engine);
  int32_t (*token)(int64_t, int64_t, int64_t) =
      tiny->token ? tiny->token : tiny_token;

  b->samples[row] = sample;
  for (int64_t t = 0; t < length; t++) {
    b->tokens[row * length + t] = token(step, sample, t);
    b->labels[row * length + t] = token(step, sample, t + 1);
  }
}

static mz_status_t fill_batch(const tiny_t *tiny, batch_t *b)
{
  const mz_config_values_t *v = mz_config_values(tiny->config);
  int64_t m = v->train_micro_batch_size_per_gpu;
  int64_t a = v->gradient_accumulation_steps;
  int rank, size;

  MPI_Comm_rank(tiny->comm, &rank);
  MPI_Comm_size(tiny->comm, &size);
  MZ_REQUIRE(m * a <= TINY_MAX_BATCH &&
                 v->data.sequence_length <= TINY_SEQUENCE,
             MZ_ERR_ARG, "the batch is larger than a test's");
  b->data = (mz_step_data_t){.num_micro = (int32_t)a,
                             .tokens = b->tokens,
                             .labels = b->labels,
                             .samples = b->samples,
                             .sequences = b->sequences,
                             .max_sequences = b->sequences};
  for (int64_t j = 0; j < a; j++) {
    b->sequences[j] = (int32_t)(tiny->ragged && j % 2 ? (m + 1) / 2 : m);
    for (int64_t i = 0; i < b->sequences[j]; i++)
      fill_row(tiny, b, j * m + i,
               tiny->first_sample + j * m * size + rank * m + i);
  }
  return MZ_OK;
}

mz_status_t tiny_step(tiny_t *tiny, mz_step_result_t *result_out)
{
  batch_t b;

  MZ_TRY(fill_batch(tiny, &b));
  return MZ_TRACE(mz_engine_step(tiny->engine, &b.data, result_out));
}

mz_status_t tiny_eval(tiny_t *tiny, double *loss_sum_out, int64_t *labels_out)
{
  batch_t b;

  MZ_TRY(fill_batch(tiny, &b));
  return MZ_TRACE(
      mz_engine_eval(tiny->engine, &b.data, loss_sum_out, labels_out));
}

mz_status_t tiny_read(tiny_t *tiny, mz_tensor_part_t part, tiny_run_t *run)
{
  int n = mz_decl_num_tensors(tiny->decl);

  run->num_tensors = n;
  MZ_TRY(mz_new(n + 1, "offsets", &run->offsets));
  MZ_TRY(mz_new(n, "names", &run->names));
  for (int t = 0; t < n; t++) {
    run->offsets[t + 1] =
        run->offsets[t] + mz_decl_tensor_elements(tiny->decl, t);
    MZ_TRY(mz_string_copy(mz_decl_tensor_name(tiny->decl, t), &run->names[t]));
  }
  run->num_values = run->offsets[n];
  MZ_TRY(mz_new(run->num_values, "values", &run->values));
  for (int t = 0; t < n; t++)
    MZ_TRY(
        mz_engine_read(tiny->engine, t, part, run->values + run->offsets[t]));
  return MZ_TRACE(mz_engine_param_hash(tiny->engine, &run->hash));
}

mz_status_t tiny_run(const char *const *assignments, int num, MPI_Comm comm,
                     int num_steps, tiny_run_t *run_out)
{
  tiny_t tiny;
  mz_status_t st;
  mz_step_result_t result;

  memset(run_out, 0, sizeof *run_out);
  run_out->num_steps = num_steps;
  run_out->min_gap = HUGE_VAL;
  MZ_TRY_GOTO(st, tiny_create(assignments, num, comm, &tiny), done);
  for (int i = 0; i < num_steps; i++) {
    MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
    run_out->loss[i] = result.loss;
    run_out->norm[i] = result.grad_norm;
    run_out->min_gap = fmin(run_out->min_gap, result.min_gap);
  }
  MZ_TRY_GOTO(st, tiny_read(&tiny, MZ_PART_WEIGHTS, run_out), done);
  MZ_TRY_GOTO(st, mz_engine_tuning_text(tiny.engine, &run_out->tuning), done);
done:
  tiny_destroy(&tiny);
  return st;
}

void tiny_run_free(tiny_run_t *run)
{
  for (int t = 0; run->names && t < run->num_tensors; t++)
    mz_free(run->names[t]);
  mz_free(run->names);
  mz_free(run->offsets);
  mz_free(run->values);
  mz_free(run->tuning);
  memset(run, 0, sizeof *run);
}

static double apart(double a, double b)
{
  double scale = fmax(fmax(fabs(a), fabs(b)), 1e-12);

  return isfinite(a) && isfinite(b) ? fabs(a - b) / scale : HUGE_VAL;
}

tiny_apart_t tiny_compare(const tiny_run_t *a, const tiny_run_t *b)
{
  tiny_apart_t worst = {.name = "no tensor"};

  for (int i = 0; i < a->num_steps; i++) {
    worst.loss = fmax(worst.loss, apart(a->loss[i], b->loss[i]));
    worst.norm = fmax(worst.norm, apart(a->norm[i], b->norm[i]));
  }
  for (int t = 0; t < a->num_tensors; t++) {
    double square = 0, sum = 0, d;

    for (int64_t i = a->offsets[t]; i < a->offsets[t + 1]; i++) {
      double x = a->values[i], y = b->values[i];
      square += x * x;
      sum += (x - y) * (x - y);
    }
    d = square > 0 ? sqrt(sum / square) : sqrt(sum);
    if (!(d <= worst.tensor)) {
      worst.tensor = isfinite(d) ? d : HUGE_VAL;
      worst.name = a->names[t];
    }
  }
  return worst;
}

int tiny_num_failed;

void tiny_report(mz_status_t st, const char *format, ...)
{
  int ok = st == MZ_OK, all_ok, rank;
  char name[TINY_VALUE];
  va_list args;

  va_start(args, format);
  vsnprintf(name, sizeof name, format, args);
  va_end(args);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (!ok) fprintf(stderr, "rank %d: %s: %s\n", rank, name, mz_error_last());
  MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  tiny_num_failed += !all_ok;
  if (rank == 0 && all_ok) printf("%s: right\n", name);
}
