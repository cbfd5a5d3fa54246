/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The loop: feeds the engine, evaluates, measures, and stops in time.
 *
 * Ranks go through it together. What one rank alone may find (data that cannot
 * be read, its clock) is agreed once before each step.
 */
#ifndef MZ_TRAIN_RUN_H
#define MZ_TRAIN_RUN_H

#include "train/feed.h"
#include "train/folder.h"
#include "train/metrics.h"

#include <moezero/engine.h>

enum { MZ_RUN_STARTS = 8 };

typedef struct mz_run_opts {
  const mz_config_t *config; /* resolved; borrowed, as all below */
  mz_engine_t *engine;
  mz_feed_t *feed;
  const char *save_dir; /* where checkpoints go; NULL: none are saved */
  /** This rank's metrics and log go there, where it has them, and rank 0's
   * tuning table after the first step. */
  const mz_folder_t *folder;
  FILE *json; /* a second copy of the metrics; may be NULL */
  /** Parts of the start-up: into time_ms of the first step's line. */
  const mz_named_number_t *starts;
  int32_t num_starts; /* at most MZ_RUN_STARTS */
  /** Takes a progress line, without its line end; NULL: none. */
  void (*say)(void *ctx, const char *line);
  void *ctx;
} mz_run_opts_t;

typedef struct mz_run_result {
  int64_t steps;  /* done when the run ended */
  bool timed_out; /* train.max_minutes ended it */
  double loss;    /* of the last step */
  bool evaluated;
  double eval_loss; /* of the last evaluation */
} mz_run_result_t;

/**
 * Trains from mz_engine_steps to train.steps, evaluates every
 * train.eval_interval steps and at the end, saves every
 * checkpoint.save_interval steps and, if that is not 0, at the end. Collective.
 * @return MZ_OK or the same error on all ranks; those of mz_engine_step, of
 * mz_dataset_sample, of mz_metrics_write and of mz_save_step.
 */
mz_status_t mz_run_train(const mz_run_opts_t *opts,
                         mz_run_result_t *result_out);

#endif
