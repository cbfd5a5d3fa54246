/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The run's tuning table: what a backend chose by timing, as lines of text, on
 * its way between ranks, checkpoints and the run's folder.
 */
#ifndef MZ_TRAIN_TUNING_H
#define MZ_TRAIN_TUNING_H

#include "train/folder.h"
#include "train/save.h"

#define MZ_TUNING_NAME "tuning.json"

/**
 * Takes the table that stands in @p from, a file or a checkpoint, and says so
 * where it does not fit this GPU or its libraries: then the first step makes
 * another one. Collective. @return MZ_OK, MZ_ERR_DATA (not a table; names
 * @p from).
 */
mz_status_t mz_tuning_take(mz_engine_t *engine, const char *from,
                           const char *text, mz_say_t say, void *ctx);

/**
 * Takes rank 0's FOLDER/tuning.json if there is one, unless the engine has a
 * table already, from a checkpoint: that one gives the saved run's bits.
 * Collective; @p folder is open on all ranks.
 * @return as mz_tuning_take, MZ_ERR_IO, MZ_ERR_NOMEM.
 */
mz_status_t mz_tuning_load(mz_engine_t *engine, const mz_folder_t *folder,
                           mz_say_t say, void *ctx);

/** Writes this rank's table as FOLDER/tuning.json; nothing where the backend
 * has no choices. Not collective. @return as mz_tuning_write. */
mz_status_t mz_tuning_save(const mz_engine_t *engine,
                           const mz_folder_t *folder);

/** FOLDER/tuning.json, an object whose "table" is a list of lines. Not
 * collective. @return MZ_OK, MZ_ERR_IO, MZ_ERR_NOMEM. */
mz_status_t mz_tuning_write(const mz_folder_t *folder, const char *text);

/** @param[out] text_out  "" where there is no such file; owned by the caller
 * (mz_free). @return MZ_OK, MZ_ERR_DATA (not such a file), MZ_ERR_NOMEM. */
mz_status_t mz_tuning_read(const mz_folder_t *folder, char **text_out);

/**
 * Rank @p root's text to all ranks. Collective.
 * @param status  Of this rank: what went before, agreed here.
 * @param text    Read on the root if its status is MZ_OK.
 * @param[out] text_out  Owned by the caller (mz_free).
 * @return MZ_OK, the worst @p status, MZ_ERR_NOMEM, MZ_ERR_PEER.
 */
mz_status_t mz_tuning_share(struct mz_comm *comm, int root, mz_status_t status,
                            const char *text, char **text_out);

#endif
