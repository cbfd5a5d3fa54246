/* SPDX-License-Identifier: Apache-2.0 */
/* What the commands under mpirun share: ranks, configuration, model, engine. */
#ifndef APPS_JOB_H
#define APPS_JOB_H

#include "options.h"

#include "comm/comm.h"
#include "train/feed.h"

#include <moezero/config.h>
#include <moezero/decl.h>
#include <moezero/engine.h>

typedef struct job {
  const options_t *options;
  int rank, size;
  mz_comm_t *control; /* of what happens before the engine: see job_comm */
  mz_config_t *config;
  mz_decl_t *decl;
  mz_feed_t *feed; /* NULL: the command reads no data */
  mz_engine_t *engine;
} job_t;

/** Fills a job that is all zero. Collective. */
mz_status_t job_create(const options_t *options, job_t *job);

/**
 * What to tell the other ranks by. Once there is an engine it is the engine's:
 * the engine's communication thread calls MPI, and MPI_THREAD_SERIALIZED allows
 * no second thread beside it.
 */
mz_comm_t *job_comm(const job_t *job);

/** Ends what job_create began: prints @p status where it is an error, calls
 * MPI_Abort if other ranks would wait for ever. @return the exit code. */
int job_end(job_t *job, mz_status_t status);

/** What every rank finds by itself keeps its message as it is; what only some
 * find is told to all with the rank's number. Collective. */
mz_status_t job_settle(const job_t *job, mz_status_t status);

/** Reads and resolves the configuration with the options' assignments, then
 * the @p extra ones. Collective. */
mz_status_t job_read_config(job_t *job, const char *const *extra,
                            int num_extra);

/**
 * The same for a command that may run on other ranks than the training did: an
 * expert-parallel size that does not divide the ranks becomes one that does,
 * which changes no result. Collective.
 */
mz_status_t job_read_config_anywhere(job_t *job, const char *const *extra,
                                     int num_extra);

/** @return MZ_OK, or MZ_ERR_DATA when the ranks see different numbers. */
mz_status_t job_compare(const job_t *job, const char *what, int64_t samples);

#endif
