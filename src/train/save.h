/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Between the engine and its checkpoints: what this rank owns goes out, what it
 * updates comes in. All functions are collective; an error is the same on all
 * ranks.
 */
#ifndef MZ_TRAIN_SAVE_H
#define MZ_TRAIN_SAVE_H

#include <moezero/config.h>
#include <moezero/engine.h>

/** Takes a line for the user; called on every rank with the same lines. */
typedef void (*mz_say_t)(void *ctx, const char *line);

/**
 * Before the first step: whether saves of steps above @p step can work.
 * @return MZ_OK, MZ_ERR_IO when a later step is complete in @p dir already: it
 * would not be overwritten.
 */
mz_status_t mz_save_check(mz_engine_t *engine, const char *dir, int64_t step);

/**
 * Saves the engine's state as DIR/global_step<N>, then, with
 * checkpoint.gather_on_save, writes model.h5 into that folder.
 * @return those of mz_ckpt_save and mz_ckpt_gather.
 */
mz_status_t mz_save_step(mz_engine_t *engine, const mz_config_t *config,
                         const char *dir);

/**
 * Verifies the checkpoint at @p path and goes on from it: weights, moments,
 * steps, updates and the tuning table. The configuration stays; what differs
 * from the saved one is said, and that the table does not fit this GPU.
 * @return MZ_OK, MZ_ERR_SHAPE (names the tensor and both shapes), those of
 * mz_ckpt_open; MZ_ERR_DATA for a one-file model.
 */
mz_status_t mz_save_resume(mz_engine_t *engine, const mz_config_t *config,
                           const char *path, mz_say_t say, void *ctx);

/** Weights only, of a checkpoint or of a one-file model: moments and steps
 * stay. @return as mz_save_resume. */
mz_status_t mz_save_init_from(mz_engine_t *engine, const char *path);

#endif
