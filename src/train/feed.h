/* SPDX-License-Identifier: Apache-2.0 */
/**
 * From data sets to the engine's steps: this rank's batches in memory of their
 * own.
 */
#ifndef MZ_TRAIN_FEED_H
#define MZ_TRAIN_FEED_H

#include "data/batch.h"

#include <moezero/engine.h>

typedef struct mz_feed mz_feed_t;

/**
 * Opens data.train and data.valid of @p config. Not collective: the caller
 * agrees on the status, and compares the number of samples across ranks.
 * @param config  Resolved; borrowed.
 * @return MZ_OK, those of mz_dataset_open, MZ_ERR_NOMEM.
 */
mz_status_t mz_feed_create(const mz_config_t *config, int rank, int size,
                           mz_feed_t **feed_out);

/** Opens data.valid alone; no mz_feed_train. @return also MZ_ERR_CONFIG:
 * data.valid is not given. */
mz_status_t mz_feed_create_valid(const mz_config_t *config, int rank, int size,
                                 mz_feed_t **feed_out);
void mz_feed_destroy(mz_feed_t **feed);

/** Where debug.sample_ids goes; borrowed, may be NULL. */
void mz_feed_set_log(mz_feed_t *feed, FILE *log);

/** Samples of an epoch; of validation, 0 without it. */
int64_t mz_feed_num_train(const mz_feed_t *feed);
int64_t mz_feed_num_valid(const mz_feed_t *feed);

/** Batches of one evaluation (train.eval_steps of them at most). */
int64_t mz_feed_num_eval_batches(const mz_feed_t *feed);

/**
 * The data of training step @p step, from 0.
 * @param[out] data_out  Borrowed until the next call.
 * @return as mz_batch_fill.
 */
mz_status_t mz_feed_train(mz_feed_t *feed, int64_t step,
                          mz_step_data_t *data_out);

/** Batch @p batch of an evaluation, likewise; micro-batches that no rank has a
 * sample for are left out. */
mz_status_t mz_feed_valid(mz_feed_t *feed, int64_t batch,
                          mz_step_data_t *data_out);

#endif
