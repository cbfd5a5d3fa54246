/* SPDX-License-Identifier: Apache-2.0 */
#include "train/run.h"

#include "base/alloc.h"
#include "base/check.h"
#include "comm/comm.h"
#include "plan/plan.h"
#include "train/evaluate.h"
#include "train/hooks.h"
#include "train/metrics.h"
#include "train/save.h"
#include "train/tuning.h"

#include <math.h>
#include <time.h>

enum { SECONDS_A_LINE = 2 /* without steps_per_print */ };

/* What the ranks tell each other before a step; the largest number wins. */
enum { GO_ON, TIME_IS_UP, HAS_FAILED };

typedef struct loop {
  const mz_run_opts_t *opts;
  const mz_config_values_t *config;
  struct mz_comm *comm;
  double start_s;
  int64_t first_step; /* steps done when the run started */
  int64_t skipped;
  mz_loads_t *loads;
  int64_t planned_exchange_bytes;
  mz_named_number_t bytes[MZ_NUM_CATEGORIES];
  double line_s, step_s; /* when the last line was said, a step began */
  int64_t line_tokens;   /* since then */
  int64_t evaluated_step, saved_step;
  mz_status_t pending; /* what this rank alone failed at (writing), until the
                          next agreement: the others are on their way */
} loop_t;

static double now_s(void)
{
  struct timespec t;

  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double limit_s(const loop_t *loop)
{
  double minutes = loop->config->train.max_minutes;
  return minutes > 0 ? 60 * minutes : INFINITY;
}

/* One integer maximum a step: whether some rank failed, else whether rank 0's
 * clock says stop. Clocks of other ranks do not count. */
static mz_status_t agree(const loop_t *loop, mz_status_t st, bool *stop_out)
{
  bool over =
      mz_comm_rank(loop->comm) == 0 && now_s() - loop->start_s >= limit_s(loop);
  int64_t word, low, high;

  if (loop->pending != MZ_OK) st = loop->pending;
  word = st != MZ_OK ? HAS_FAILED : over ? TIME_IS_UP : GO_ON;
  MZ_TRY(mz_comm_min_max(loop->comm, word, &low, &high));
  if (high == HAS_FAILED) return MZ_TRACE(mz_comm_agree(loop->comm, st));
  *stop_out = high == TIME_IS_UP;
  return MZ_OK;
}

static void keep(loop_t *loop, mz_status_t st)
{
  if (loop->pending == MZ_OK) loop->pending = MZ_TRACE(st);
}

static void name_bytes(loop_t *loop)
{
  const mz_plan_t *plan = mz_engine_plan(loop->opts->engine);

  for (int c = 0; c < MZ_NUM_CATEGORIES; c++)
    loop->bytes[c] = (mz_named_number_t){mz_category_name((mz_category_t)c),
                                         (double)plan->category_bytes[c]};
}

static bool is_first(const loop_t *loop, int64_t step)
{
  return step == loop->first_step + 1;
}

static int32_t name_times(const loop_t *loop, const mz_step_result_t *r,
                          double data_s, mz_named_number_t *times)
{
  int32_t num = 0;

  times[num++] = (mz_named_number_t){"data", 1e3 * data_s};
  times[num++] = (mz_named_number_t){"engine", r->ms};
  times[num++] = (mz_named_number_t){"wait", r->wait_ms};
  for (int32_t i = 0; is_first(loop, r->step) && i < loop->opts->num_starts;
       i++)
    times[num++] = loop->opts->starts[i];
  return num;
}

static mz_metrics_t metrics_of(const loop_t *loop, const mz_step_result_t *r,
                               double step_s)
{
  mz_metrics_t m = {.step = r->step,
                    .loss = r->loss,
                    .lm_loss = r->lm_loss,
                    .aux_loss = r->aux_loss,
                    .z_loss = r->z_loss,
                    .lr = r->lr,
                    .grad_norm = r->grad_norm,
                    .loss_scale = 1,
                    .skipped = loop->skipped,
                    .tokens = r->tokens,
                    .min_gap = r->min_gap,
                    .tokens_per_s = (double)r->tokens / step_s,
                    .step_ms = 1e3 * step_s,
                    .parts_ms = r->parts_ms,
                    .num_parts = r->num_parts,
                    .experts = mz_loads_all(loop->loads),
                    .num_moes = r->num_moes,
                    .expert_window = mz_loads_window(loop->loads),
                    .exchange_bytes = r->exchange_bytes,
                    .planned_exchange_bytes = loop->planned_exchange_bytes,
                    .exchange_ms = r->exchange_ms,
                    .exposed_ms = r->exposed_ms,
                    .least_exposed_ms = r->least_exposed_ms,
                    .bytes = loop->bytes,
                    .num_bytes = MZ_NUM_CATEGORIES};

  return m;
}

/* Seconds to the end: by the mean step so far, or the time limit. */
static double left_s(const loop_t *loop, int64_t step, double now)
{
  double passed = now - loop->start_s;
  double mean = passed / (double)(step - loop->first_step);

  return fmin(mean * (double)(loop->config->train.steps - step),
              fmax(0, limit_s(loop) - passed));
}

static void say(loop_t *loop, mz_metrics_t *metrics, double now)
{
  int64_t every = loop->config->steps_per_print, step = metrics->step;
  bool due =
      every > 0 ? step % every == 0 : now - loop->line_s >= SECONDS_A_LINE;
  char line[512];

  loop->line_tokens += metrics->tokens;
  if (!loop->opts->say) return;
  if (!due && !is_first(loop, step) && step != loop->config->train.steps)
    return;
  metrics->tokens_per_s = (double)loop->line_tokens / (now - loop->line_s);
  mz_metrics_progress(metrics, loop->config->train.steps,
                      left_s(loop, step, now), line, sizeof line);
  loop->opts->say(loop->opts->ctx, line);
  loop->line_s = now;
  loop->line_tokens = 0;
}

/* To the people who watch, and to this rank's log. */
static void tell(const loop_t *loop, const char *line)
{
  if (loop->opts->say) loop->opts->say(loop->opts->ctx, line);
  if (!loop->opts->folder->log) return;
  fprintf(loop->opts->folder->log, "%s\n", line);
  fflush(loop->opts->folder->log);
}

static void tell_skip(const loop_t *loop, const mz_step_result_t *r)
{
  char line[256];

  if (!r->skipped) return;
  if (r->culprit[0])
    snprintf(line, sizeof line,
             "step %" PRId64 " skipped: the gradient of %s is not finite",
             r->step, r->culprit);
  else
    snprintf(line, sizeof line, "step %" PRId64 " skipped: no valid label",
             r->step);
  tell(loop, line);
}

/* One line in the metrics and one for people. The hash is collective. */
static mz_status_t measure(loop_t *loop, const mz_step_result_t *r,
                           double data_s)
{
  double now = now_s(), step_s = now - loop->step_s;
  mz_named_number_t times[3 + MZ_RUN_STARTS];
  mz_metrics_t metrics;

  loop->skipped += r->skipped;
  mz_loads_take(loop->loads, r);
  metrics = metrics_of(loop, r, step_s);
  metrics.time_ms = times;
  metrics.num_times = name_times(loop, r, data_s, times);
  if (loop->config->monitor_param_hash) {
    MZ_TRY(mz_engine_param_hash(loop->opts->engine, &metrics.param_hash));
    metrics.has_param_hash = true;
  }
  tell_skip(loop, r);
  if (loop->opts->folder->metrics)
    keep(loop, mz_metrics_write(loop->opts->folder->metrics, &metrics));
  if (loop->opts->json)
    keep(loop, mz_metrics_write(loop->opts->json, &metrics));
  say(loop, &metrics, now);
  return MZ_OK;
}

static void write_eval(loop_t *loop, int64_t step, double loss, int64_t labels)
{
  char line[128];

  snprintf(line, sizeof line,
           "step %" PRId64 "  validation loss %.4f over %" PRId64 " tokens",
           step, loss, labels);
  tell(loop, line);
  if (loop->opts->folder->metrics)
    keep(loop, mz_metrics_write_eval(loop->opts->folder->metrics, step, loss,
                                     labels));
  if (loop->opts->json)
    keep(loop, mz_metrics_write_eval(loop->opts->json, step, loss, labels));
}

static mz_status_t evaluate(loop_t *loop, int64_t step, mz_run_result_t *result)
{
  double start = now_s();
  int64_t labels;

  if (mz_feed_num_valid(loop->opts->feed) == 0) return MZ_OK;
  if (loop->evaluated_step == step) return MZ_OK;
  MZ_TRY(mz_evaluate(loop->opts->engine, loop->opts->feed, &result->eval_loss,
                     &labels));
  loop->evaluated_step = step;
  loop->line_s += now_s() - start; /* tokens/s are of training */
  result->evaluated = true;
  write_eval(loop, step, result->eval_loss, labels);
  return MZ_OK;
}

static mz_status_t dump(const loop_t *loop, mz_tensor_part_t part,
                        const char *folder)
{
  if (!folder) return MZ_OK;
  return MZ_TRACE(mz_hooks_dump(loop->opts->engine, part, folder));
}

/* A step that the run began with, or has saved, is on disk already. */
static mz_status_t save(loop_t *loop, int64_t step)
{
  const char *dir = loop->opts->save_dir;
  double start = now_s();
  char line[512];

  if (!dir || loop->config->checkpoint.save_interval == 0) return MZ_OK;
  if (loop->saved_step == step) return MZ_OK;
  MZ_TRY(mz_save_step(loop->opts->engine, loop->opts->config, dir));
  loop->saved_step = step;
  snprintf(line, sizeof line, "saved %.400s/global_step%" PRId64 " in %.2f s",
           dir, step, now_s() - start);
  tell(loop, line);
  return MZ_OK;
}

static mz_status_t save_if_due(loop_t *loop, int64_t step)
{
  int64_t every = loop->config->checkpoint.save_interval;

  if (every == 0 || step % every != 0) return MZ_OK;
  return MZ_TRACE(save(loop, step));
}

static mz_status_t walk(loop_t *loop, mz_run_result_t *result)
{
  const mz_train_config_t *train = &loop->config->train;
  mz_step_result_t r;
  mz_step_data_t data;
  mz_status_t st;
  double data_s;
  bool stop;

  while (result->steps < train->steps) {
    loop->step_s = now_s();
    st = mz_feed_train(loop->opts->feed, result->steps, &data);
    data_s = now_s() - loop->step_s;
    MZ_TRY(agree(loop, st, &result->timed_out));
    if (result->timed_out) break;
    MZ_TRY(mz_engine_step(loop->opts->engine, &data, &r));
    result->steps = r.step;
    result->loss = r.loss;
    MZ_TRY(measure(loop, &r, data_s));
    if (is_first(loop, r.step) && mz_comm_rank(loop->comm) == 0)
      keep(loop, mz_tuning_save(loop->opts->engine, loop->opts->folder));
    if (r.step == 1)
      MZ_TRY(dump(loop, MZ_PART_GRADS, loop->config->debug.dump_grads));
    if (train->eval_interval > 0 && r.step % train->eval_interval == 0)
      MZ_TRY(evaluate(loop, r.step, result));
    MZ_TRY(save_if_due(loop, r.step));
  }
  MZ_TRY(dump(loop, MZ_PART_WEIGHTS, loop->config->debug.dump_full));
  MZ_TRY(save(loop, result->steps));
  MZ_TRY(evaluate(loop, result->steps, result));
  return MZ_TRACE(agree(loop, MZ_OK, &stop));
}

mz_status_t mz_run_train(const mz_run_opts_t *opts, mz_run_result_t *result_out)
{
  const mz_plan_t *plan = mz_engine_plan(opts->engine);
  loop_t loop = {.opts = opts,
                 .config = mz_config_values(opts->config),
                 .comm = mz_engine_comm(opts->engine),
                 .start_s = now_s(),
                 .first_step = mz_engine_steps(opts->engine),
                 .evaluated_step = -1,
                 .saved_step = mz_engine_steps(opts->engine)};
  mz_run_result_t result = {.steps = loop.first_step};
  mz_status_t st;

  MZ_TRY_GOTO(st, mz_loads_create(plan, &loop.loads), done);
  loop.planned_exchange_bytes = mz_load_planned_bytes(plan);
  name_bytes(&loop);
  loop.line_s = loop.start_s;
  MZ_TRY_GOTO(st, walk(&loop, &result), done);
  *result_out = result;
done:
  mz_loads_destroy(&loop.loads);
  return st;
}
