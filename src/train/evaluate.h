/* SPDX-License-Identifier: Apache-2.0 */
/* Validation: the mean loss over data.valid, in training and by itself. */
#ifndef MZ_TRAIN_EVALUATE_H
#define MZ_TRAIN_EVALUATE_H

#include "train/feed.h"

#include <moezero/engine.h>

/**
 * Takes data.valid in order, train.eval_steps global batches of it at most.
 * Collective.
 * @param feed  With validation data.
 * @param[out] loss_out    Mean over the labels, nat a token.
 * @param[out] labels_out  Over all ranks.
 * @return MZ_OK or the same error on all ranks: those of mz_feed_valid and
 * mz_engine_eval.
 */
mz_status_t mz_evaluate(mz_engine_t *engine, mz_feed_t *feed, double *loss_out,
                        int64_t *labels_out);

#endif
