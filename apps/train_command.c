/* SPDX-License-Identifier: Apache-2.0 */
/* The commands train and check: everything around the loop. */
#include "commands.h"
#include "job.h"
#include "report.h"
#include "start_times.h"

#include "base/alloc.h"
#include "base/check.h"
#include "checkpoint/disk.h"
#include "comm/comm.h"
#include <moezero/gpt.h>
#include "plan/plan.h"
#include "train/folder.h"
#include "train/metrics.h"
#include "train/run.h"
#include "train/save.h"
#include "train/tuning.h"

#include <limits.h>
#include <moezero/checkpoint.h>
#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct training {
  job_t job;
  start_times_t start;
  mz_folder_t folder;
  char save_dir[PATH_MAX];
} training_t;

static mz_status_t declare(job_t *job)
{
  MZ_TRY(mz_decl_create(&job->decl));
  return MZ_TRACE(mz_gpt_declare(mz_config_values(job->config), job->decl));
}

static mz_status_t open_data(job_t *job)
{
  MZ_TRY(job_settle(
      job, mz_feed_create(job->config, job->rank, job->size, &job->feed)));
  MZ_TRY(job_compare(job, "data.train", mz_feed_num_train(job->feed)));
  return MZ_TRACE(job_compare(job, "data.valid", mz_feed_num_valid(job->feed)));
}

/* Rank 0 first, since the lock may keep this job out. */
static mz_status_t open_folder(training_t *t)
{
  const char *metrics = mz_config_values(t->job.config)->monitor_jsonl;
  bool keep = t->job.options->resume != NULL;
  char path[PATH_MAX] = "";
  mz_status_t st = MZ_OK;

  if (!t->job.options->out) {
    if (t->job.rank == 0) mz_folder_name(path, sizeof path);
    MZ_TRY(mz_comm_broadcast(job_comm(&t->job), path, sizeof path, 0));
  } else {
    MZ_REQUIRE(strlen(t->job.options->out) < sizeof path, MZ_ERR_CONFIG,
               "--out: a path of %zu bytes", strlen(t->job.options->out));
    snprintf(path, sizeof path, "%s", t->job.options->out);
  }
  if (t->job.rank == 0) st = mz_folder_open(path, 0, metrics, keep, &t->folder);
  MZ_TRY(mz_comm_agree(job_comm(&t->job), st));
  if (t->job.rank > 0)
    st = mz_folder_open(path, t->job.rank, metrics, keep, &t->folder);
  MZ_TRY(mz_comm_agree(job_comm(&t->job), st));
  mz_feed_set_log(t->job.feed, t->folder.log);
  return MZ_OK;
}

static mz_status_t write_record(const training_t *t)
{
  char *text = NULL;
  mz_status_t st =
      report_record(t->job.config, job_comm(&t->job), &text); /* collective */

  if (st == MZ_OK && t->job.rank == 0)
    st = mz_folder_write(&t->folder, "config.json", text);
  mz_free(text);
  return MZ_TRACE(mz_comm_agree(job_comm(&t->job), st));
}

static void say(void *ctx, const char *line)
{
  (void)ctx;
  puts(line);
  fflush(stdout);
}

static void note(void *ctx, const char *line)
{
  const training_t *t = ctx;

  fprintf(t->folder.log, "%s\n", line);
  if (t->job.rank == 0 && !t->job.options->json) say(NULL, line);
}

/* The checkpoint to resume from, as rank 0 sees it; "": there is none yet. A
 * run that was killed between the rename of a step and that of `latest` left a
 * newer step than `latest` names: it is complete, so it counts. */
static mz_status_t find_resume(training_t *t, char path[PATH_MAX])
{
  int64_t newest = -1;
  mz_status_t st = MZ_OK;

  if (strcmp(t->job.options->resume, "auto") != 0)
    return MZ_TRACE(mz_disk_path(path, "%s", t->job.options->resume));
  path[0] = '\0';
  if (t->job.rank == 0) newest = mz_ckpt_newest(t->save_dir);
  if (newest >= 0)
    st = mz_disk_path(path, "%s/global_step%" PRId64, t->save_dir, newest);
  MZ_TRY(mz_comm_agree(job_comm(&t->job), st));
  return MZ_TRACE(mz_comm_broadcast(job_comm(&t->job), path, PATH_MAX, 0));
}

static mz_status_t resume(training_t *t)
{
  char path[PATH_MAX], line[PATH_MAX + 64];
  int64_t step;
  mz_status_t st = MZ_OK;

  MZ_TRY(find_resume(t, path));
  if (path[0])
    MZ_TRY(mz_save_resume(t->job.engine, t->job.config, path, note, t));
  step = mz_engine_steps(t->job.engine);
  if (path[0])
    snprintf(line, sizeof line, "resumed from %s at step %" PRId64, path, step);
  else
    snprintf(line, sizeof line, "no checkpoint in %s yet: starting",
             t->save_dir);
  note(t, line);
  if (t->folder.metrics) st = mz_metrics_cut(t->folder.metrics, step);
  return MZ_TRACE(mz_comm_agree(job_comm(&t->job), st));
}

/* Where the run begins, and where its saves go. */
static mz_status_t set_state(training_t *t)
{
  const mz_checkpoint_config_t *c =
      &mz_config_values(t->job.config)->checkpoint;
  bool inside = c->dir[0] != '/';
  int bytes = snprintf(t->save_dir, sizeof t->save_dir, "%s%s%s",
                       inside ? t->folder.path : "", inside ? "/" : "", c->dir);

  MZ_REQUIRE(bytes < (int)sizeof t->save_dir, MZ_ERR_CONFIG,
             "checkpoint.dir: a path of %d bytes", bytes);
  if (t->job.options->resume) MZ_TRY(resume(t));
  if (t->job.options->init_from)
    MZ_TRY(mz_save_init_from(t->job.engine, t->job.options->init_from));
  if (c->save_interval == 0) return MZ_OK;
  return MZ_TRACE(mz_save_check(t->job.engine, t->save_dir,
                                mz_engine_steps(t->job.engine)));
}

static mz_status_t train(training_t *t)
{
  mz_run_opts_t opts = {.config = t->job.config,
                        .engine = t->job.engine,
                        .feed = t->job.feed,
                        .save_dir = t->save_dir,
                        .folder = &t->folder,
                        .starts = t->start.parts,
                        .num_starts = t->start.num};
  mz_run_result_t result;

  if (t->job.rank == 0 && t->job.options->json) opts.json = stdout;
  if (t->job.rank == 0 && !t->job.options->json) opts.say = say;
  MZ_TRY(mz_run_train(&opts, &result));
  if (result.timed_out && opts.say)
    printf("stopped by train.max_minutes after %" PRId64 " steps\n",
           result.steps);
  return MZ_OK;
}

/* SIGUSR2: where this rank stands, also while it waits for a message. */
static void *tell_positions(void *comm)
{
  sigset_t set;
  int signal_number;
  char text[512];

  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  while (sigwait(&set, &signal_number) == 0) {
    mz_comm_position(comm, text, sizeof text);
    fprintf(stderr, "%s\n", text);
  }
  return NULL;
}

/* No rank trains where one cannot tell where it stands. */
static mz_status_t train_watched(training_t *t)
{
  pthread_t positions;
  bool started = pthread_create(&positions, NULL, tell_positions,
                                mz_engine_comm(t->job.engine)) == 0;
  mz_status_t st = MZ_OK;

  if (!started)
    st = MZ_ERROR(MZ_ERR_NOMEM, "cannot start a thread for SIGUSR2");
  st = job_settle(&t->job, st);
  if (st == MZ_OK) st = train(t);
  if (started) {
    pthread_cancel(positions);
    pthread_join(positions, NULL);
  }
  return MZ_TRACE(st);
}

static mz_status_t start_up(job_t *job, start_times_t *times)
{
  MZ_TRY(job_read_config(job, NULL, 0));
  MZ_TRY(job_settle(job, declare(job)));
  start_times_end(times, "start.mpi");
  MZ_TRY(open_data(job));
  start_times_end(times, "start.data");
  MZ_TRY(
      mz_engine_create(job->config, job->decl, MPI_COMM_WORLD, &job->engine));
  start_times_engine(times, job->engine);
  MZ_TRY(report_start(job->config, job->decl, job->engine, job_comm(job),
                      !job->options->json));
  return MZ_OK;
}

static mz_status_t run(training_t *t)
{
  job_t *job = &t->job;

  MZ_TRY(start_up(job, &t->start));
  if (job->options->command == COMMAND_CHECK) {
    if (job->rank == 0)
      report_layers(job->decl, mz_engine_plan(job->engine)->max_tokens,
                    mz_engine_plan(job->engine)->opts.sequence_length);
    if (job->rank == 0) puts("check: the start-up checks passed");
    return MZ_OK;
  }
  MZ_TRY(open_folder(t));
  MZ_TRY(set_state(t));
  MZ_TRY(mz_tuning_load(job->engine, &t->folder, note, t));
  MZ_TRY(write_record(t));
  start_times_end(&t->start, "start.folder");
  return MZ_TRACE(train_watched(t));
}

int command_train(const options_t *options)
{
  training_t t = {.folder = {.lock = -1}};
  mz_status_t st;

  start_times_begin(&t.start);
  st = job_create(options, &t.job);
  if (st == MZ_OK) st = run(&t);
  if (st != MZ_OK && t.folder.log)
    fprintf(t.folder.log, "%s\n", mz_error_last());
  mz_folder_close(&t.folder);
  return job_end(&t.job, st);
}
