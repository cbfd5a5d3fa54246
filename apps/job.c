/* SPDX-License-Identifier: Apache-2.0 */
#include "job.h"

#include "commands.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/device.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_EXTRA = 8 };

mz_comm_t *job_comm(const job_t *job)
{
  return job->engine ? mz_engine_comm(job->engine) : job->control;
}

mz_status_t job_settle(const job_t *job, mz_status_t status)
{
  int64_t low, high;

  MZ_TRY(mz_comm_min_max(job_comm(job), status, &low, &high));
  return low == high ? status : mz_comm_agree(job_comm(job), status);
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

mz_status_t job_create(const options_t *options, job_t *job)
{
  const mz_comm_opts_t control = {0};

  job->options = options;
  MPI_Comm_rank(MPI_COMM_WORLD, &job->rank);
  MPI_Comm_size(MPI_COMM_WORLD, &job->size);
  MZ_TRY(mz_comm_create(MPI_COMM_WORLD, &control, &job->control));
  return MZ_TRACE(job_settle(job, check_launch(job)));
}

/* Only this ends the other ranks. Rank 0 speaks; the others do if it does not
 * (it may be the one that died). */
static void end_all(const job_t *job, mz_status_t status)
{
  if (job->rank > 0) sleep(2);
  print_error(status);
  MPI_Abort(MPI_COMM_WORLD, EXIT_FAILED);
}

int job_end(job_t *job, mz_status_t status)
{
  if (status == MZ_ERR_PEER || status == MZ_ERR_MPI || status == MZ_ERR_CUDA)
    end_all(job, status);
  if (status != MZ_OK && job->rank == 0) print_error(status);
  mz_engine_destroy(&job->engine);
  mz_feed_destroy(&job->feed);
  mz_decl_destroy(&job->decl);
  mz_config_destroy(&job->config);
  mz_comm_destroy(&job->control);
  return exit_code(status);
}

/* The options' assignments, then the extra ones. */
static mz_status_t read_config(job_t *job, const char *const *extra,
                               int num_extra)
{
  const options_t *o = job->options;
  const char **all = NULL;
  int num = o->num_assignments;
  mz_status_t st;

  mz_config_destroy(&job->config);
  MZ_TRY_GOTO(st, mz_new((int64_t)num + num_extra, "assignments", &all), done);
  for (int i = 0; i < num + num_extra; i++)
    all[i] = i < num ? o->assignments[i] : extra[i - num];
  st = mz_config_read(o->config, all, num + num_extra, &job->config);
  /* a file of the command line that is not there is a wrong command line */
  if (st == MZ_ERR_IO) st = MZ_ERR_CONFIG;
done:
  mz_free(all);
  return st;
}

/* train.device "auto": GPUs where every rank sees one. */
static mz_status_t settle_device(job_t *job)
{
  const char *device = mz_config_values(job->config)->train.device;
  int64_t fewest, most;
  int count = 0;

  if (strcmp(device, "auto") != 0) return MZ_OK;
  if (mz_device_count(MZ_BACKEND_CUDA, &count) != MZ_OK) count = 0;
  MZ_TRY(mz_comm_min_max(job->control, count, &fewest, &most));
  return MZ_TRACE(
      mz_config_set_device(job->config, fewest > 0 ? "cuda" : "cpu"));
}

mz_status_t job_read_config(job_t *job, const char *const *extra, int num_extra)
{
  mz_status_t st = read_config(job, extra, num_extra);

  if (st == MZ_OK) st = mz_config_resolve(job->config, job->size);
  MZ_TRY(job_settle(job, st));
  return MZ_TRACE(settle_device(job));
}

/* Greatest common divisor. */
static int common(int a, int b) { return b == 0 ? a : common(b, a % b); }

mz_status_t job_read_config_anywhere(job_t *job, const char *const *extra,
                                     int num_extra)
{
  const char *all[MAX_EXTRA + 1];
  const mz_moe_config_t *moe;
  char assignment[32];
  int ep = job->size;
  bool fits = true;

  MZ_REQUIRE(num_extra <= MAX_EXTRA, MZ_ERR_ARG, "%d assignments", num_extra);
  MZ_TRY(job_settle(job, read_config(job, extra, num_extra)));
  moe = &mz_config_values(job->config)->moe;
  for (int32_t i = 0; i < moe->num_layers; i++) {
    fits = fits && job->size % moe->ep_size[i] == 0;
    ep = common(ep, moe->ep_size[i]);
  }
  if (fits) return MZ_TRACE(job_read_config(job, extra, num_extra));
  if (job->rank == 0)
    fprintf(stderr, "moe.ep_size does not divide %d ranks: %d is used\n",
            job->size, ep);
  for (int i = 0; i < num_extra; i++)
    all[i] = extra[i];
  snprintf(assignment, sizeof assignment, "moe.ep_size=%d", ep);
  all[num_extra] = assignment;
  return MZ_TRACE(job_read_config(job, all, num_extra + 1));
}

mz_status_t job_compare(const job_t *job, const char *what, int64_t samples)
{
  int64_t low, high;

  MZ_TRY(mz_comm_min_max(job_comm(job), samples, &low, &high));
  MZ_REQUIRE(low == high, MZ_ERR_DATA,
             "%s has %" PRId64 " samples on one rank and %" PRId64
             " on another: the files differ",
             what, low, high);
  return MZ_OK;
}
