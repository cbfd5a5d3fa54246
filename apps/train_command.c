/* SPDX-License-Identifier: Apache-2.0 */
/* The commands train and check: everything around the loop. */
#include "commands.h"
#include "report.h"

#include "base/alloc.h"
#include "base/check.h"
#include "comm/comm.h"
#include "model/gpt.h"
#include "plan/plan.h"
#include "train/folder.h"
#include "train/metrics.h"
#include "train/run.h"
#include "train/save.h"

#include <limits.h>
#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct job {
  const options_t *options;
  int rank, size;
  mz_comm_t *control; /* of what happens before and around the engine */
  mz_config_t *config;
  mz_decl_t *decl;
  mz_feed_t *feed;
  mz_engine_t *engine;
  mz_folder_t folder;
  char save_dir[PATH_MAX];
} job_t;

/* What every rank finds by itself keeps its message as it is; what only some
 * find is told to all with the rank's number. */
static mz_status_t settle(const job_t *job, mz_status_t st)
{
  int64_t low, high;

  MZ_TRY(mz_comm_min_max(job->control, st, &low, &high));
  return low == high ? st : mz_comm_agree(job->control, st);
}

/* A program built against another MPI than srun's comes up as N single ranks,
 * each of which would train the whole model. */
static mz_status_t check_launch(const job_t *job)
{
  const char *tasks = getenv("SLURM_NTASKS");

  MZ_REQUIRE(job->size > 1 || !tasks || atoi(tasks) <= 1, MZ_ERR_CONFIG,
             "SLURM_NTASKS is %s, but MPI knows of 1 rank: start with mpirun, "
             "or srun with the PMI of this MPI",
             tasks);
  return MZ_OK;
}

static mz_status_t read_config(job_t *job)
{
  const options_t *o = job->options;
  mz_status_t st =
      mz_config_read(o->config, (const char *const *)o->assignments,
                     o->num_assignments, &job->config);

  /* a file of the command line that is not there is a wrong command line */
  MZ_TRY(st == MZ_ERR_IO ? MZ_ERR_CONFIG : st);
  return MZ_TRACE(mz_config_resolve(job->config, job->size));
}

static mz_status_t declare(job_t *job)
{
  MZ_TRY(mz_decl_create(&job->decl));
  return MZ_TRACE(mz_gpt_declare(mz_config_values(job->config), job->decl));
}

static mz_status_t compare(const job_t *job, const char *what, int64_t samples)
{
  int64_t low, high;

  MZ_TRY(mz_comm_min_max(job->control, samples, &low, &high));
  MZ_REQUIRE(low == high, MZ_ERR_DATA,
             "%s has %" PRId64 " samples on one rank and %" PRId64
             " on another: the files differ",
             what, low, high);
  return MZ_OK;
}

static mz_status_t open_data(job_t *job)
{
  MZ_TRY(settle(job,
                mz_feed_create(job->config, job->rank, job->size, &job->feed)));
  MZ_TRY(compare(job, "data.train", mz_feed_num_train(job->feed)));
  return MZ_TRACE(compare(job, "data.valid", mz_feed_num_valid(job->feed)));
}

/* Rank 0 first, since the lock may keep this job out. */
static mz_status_t open_folder(job_t *job)
{
  const char *metrics = mz_config_values(job->config)->monitor_jsonl;
  bool keep = job->options->resume != NULL;
  char path[PATH_MAX] = "";
  mz_status_t st = MZ_OK;

  if (!job->options->out) {
    if (job->rank == 0) mz_folder_name(path, sizeof path);
    MZ_TRY(mz_comm_broadcast(job->control, path, sizeof path, 0));
  } else {
    MZ_REQUIRE(strlen(job->options->out) < sizeof path, MZ_ERR_CONFIG,
               "--out: a path of %zu bytes", strlen(job->options->out));
    snprintf(path, sizeof path, "%s", job->options->out);
  }
  if (job->rank == 0) st = mz_folder_open(path, 0, metrics, keep, &job->folder);
  MZ_TRY(mz_comm_agree(job->control, st));
  if (job->rank > 0)
    st = mz_folder_open(path, job->rank, metrics, keep, &job->folder);
  MZ_TRY(mz_comm_agree(job->control, st));
  mz_feed_set_log(job->feed, job->folder.log);
  return MZ_OK;
}

static mz_status_t write_record(const job_t *job)
{
  char *text = NULL;
  mz_status_t st =
      report_record(job->config, job->control, &text); /* collective */

  if (st == MZ_OK && job->rank == 0)
    st = mz_folder_write(&job->folder, "config.json", text);
  mz_free(text);
  return MZ_TRACE(mz_comm_agree(job->control, st));
}

static void say(void *ctx, const char *line)
{
  (void)ctx;
  puts(line);
  fflush(stdout);
}

static void note(void *ctx, const char *line)
{
  const job_t *job = ctx;

  fprintf(job->folder.log, "%s\n", line);
  if (job->rank == 0 && !job->options->json) say(NULL, line);
}

/* The checkpoint to resume from, as rank 0 sees it; "": there is none yet. */
static mz_status_t find_resume(job_t *job, char path[PATH_MAX])
{
  char latest[PATH_MAX + 8];

  snprintf(path, PATH_MAX, "%s", job->options->resume);
  if (strcmp(path, "auto") != 0) return MZ_OK;
  snprintf(path, PATH_MAX, "%s", job->save_dir);
  snprintf(latest, sizeof latest, "%s/latest", path);
  if (access(latest, F_OK) != 0) path[0] = '\0';
  return MZ_TRACE(mz_comm_broadcast(job->control, path, PATH_MAX, 0));
}

static mz_status_t resume(job_t *job)
{
  char path[PATH_MAX], line[PATH_MAX + 64];
  int64_t step;
  mz_status_t st = MZ_OK;

  MZ_TRY(find_resume(job, path));
  if (path[0])
    MZ_TRY(mz_save_resume(job->engine, job->config, path, note, job));
  step = mz_engine_steps(job->engine);
  if (path[0])
    snprintf(line, sizeof line, "resumed from %s at step %" PRId64, path, step);
  else
    snprintf(line, sizeof line, "no checkpoint in %s yet: starting",
             job->save_dir);
  note(job, line);
  if (job->folder.metrics) st = mz_metrics_cut(job->folder.metrics, step);
  return MZ_TRACE(mz_comm_agree(job->control, st));
}

/* Where the run begins, and where its saves go. */
static mz_status_t set_state(job_t *job)
{
  const mz_checkpoint_config_t *c = &mz_config_values(job->config)->checkpoint;
  bool inside = c->dir[0] != '/';
  int bytes =
      snprintf(job->save_dir, sizeof job->save_dir, "%s%s%s",
               inside ? job->folder.path : "", inside ? "/" : "", c->dir);

  MZ_REQUIRE(bytes < (int)sizeof job->save_dir, MZ_ERR_CONFIG,
             "checkpoint.dir: a path of %d bytes", bytes);
  if (job->options->resume) MZ_TRY(resume(job));
  if (job->options->init_from)
    MZ_TRY(mz_save_init_from(job->engine, job->options->init_from));
  if (c->save_interval == 0) return MZ_OK;
  return MZ_TRACE(
      mz_save_check(job->engine, job->save_dir, mz_engine_steps(job->engine)));
}

static mz_status_t train(job_t *job)
{
  mz_run_opts_t opts = {.config = job->config,
                        .engine = job->engine,
                        .feed = job->feed,
                        .save_dir = job->save_dir,
                        .metrics = job->folder.metrics,
                        .log = job->folder.log};
  mz_run_result_t result;

  if (job->rank == 0 && job->options->json) opts.json = stdout;
  if (job->rank == 0 && !job->options->json) opts.say = say;
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

static mz_status_t start_up(job_t *job)
{
  MZ_TRY(settle(job, check_launch(job)));
  MZ_TRY(settle(job, read_config(job)));
  MZ_TRY(settle(job, declare(job)));
  MZ_TRY(open_data(job));
  MZ_TRY(
      mz_engine_create(job->config, job->decl, MPI_COMM_WORLD, &job->engine));
  MZ_TRY(report_start(job->config, job->decl, job->engine, job->control,
                      !job->options->json));
  return MZ_OK;
}

static mz_status_t run_job(job_t *job)
{
  pthread_t positions;
  mz_status_t st;

  MZ_TRY(start_up(job));
  if (job->options->command == COMMAND_CHECK) {
    if (job->rank == 0)
      report_layers(job->decl, mz_engine_plan(job->engine)->max_tokens,
                    mz_engine_plan(job->engine)->opts.sequence_length);
    if (job->rank == 0) puts("check: the start-up checks passed");
    return MZ_OK;
  }
  MZ_TRY(open_folder(job));
  MZ_TRY(set_state(job));
  MZ_TRY(write_record(job));
  MZ_REQUIRE(pthread_create(&positions, NULL, tell_positions,
                            mz_engine_comm(job->engine)) == 0,
             MZ_ERR_NOMEM, "cannot start a thread for SIGUSR2");
  st = train(job);
  pthread_cancel(positions);
  pthread_join(positions, NULL);
  return st;
}

/* Only this ends the other ranks. Rank 0 speaks; the others do if it does not
 * (it may be the one that died). */
static void end_all(const job_t *job, mz_status_t st)
{
  if (job->rank > 0) sleep(2);
  print_error(st);
  MPI_Abort(MPI_COMM_WORLD, EXIT_FAILED);
}

int command_train(const options_t *options)
{
  const mz_comm_opts_t control = {0};
  job_t job = {.options = options, .folder = {.lock = -1}};
  mz_status_t st;

  MPI_Comm_rank(MPI_COMM_WORLD, &job.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &job.size);
  st = mz_comm_create(MPI_COMM_WORLD, &control, &job.control);
  if (st == MZ_OK) st = run_job(&job);
  if (st != MZ_OK && job.folder.log)
    fprintf(job.folder.log, "%s\n", mz_error_last());
  if (st == MZ_ERR_PEER || st == MZ_ERR_MPI) end_all(&job, st);
  if (st != MZ_OK && job.rank == 0) print_error(st);
  mz_engine_destroy(&job.engine);
  mz_folder_close(&job.folder);
  mz_feed_destroy(&job.feed);
  mz_decl_destroy(&job.decl);
  mz_config_destroy(&job.config);
  mz_comm_destroy(&job.control);
  return exit_code(st);
}
