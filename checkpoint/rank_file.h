/* SPDX-License-Identifier: Apache-2.0 */
/* rank_<R>.h5 and checkpoint.h5, as a save writes them. */
#ifndef MZ_CHECKPOINT_RANK_FILE_H
#define MZ_CHECKPOINT_RANK_FILE_H

#include "checkpoint/h5.h"

/** What all files of a save have in common. */
typedef struct mz_save_head {
  char save_id[MZ_SAVE_ID_BYTES];
  int64_t step;
  int rank, ranks;
  const mz_ckpt_tensor_t *tensors;
  int32_t num_tensors;
} mz_save_head_t;

/**
 * A rank's file in two moves: with @p reserve it only takes the space, then it
 * is written. Not collective.
 * @param opts  Its slices are written.
 * @param rows  [num_slices] segments; file is the rank.
 * @param[out] file_out  Name, bytes and sum; NULL with @p reserve.
 * @return MZ_OK, MZ_ERR_IO, MZ_ERR_NOMEM.
 */
mz_status_t mz_rank_file_write(const char *path, const mz_save_head_t *head,
                               const mz_ckpt_save_opts_t *opts,
                               const mz_source_row_t *rows, bool reserve,
                               mz_file_row_t *file_out);

/** Writes checkpoint.h5 into @p folder: built in memory, then under another
 * name, then by rename.
 * @param sources  [num_sources] sorted by (tensor, offset).
 * @return MZ_OK, MZ_ERR_IO, MZ_ERR_NOMEM. */
mz_status_t mz_master_write(const char *folder, const mz_save_head_t *head,
                            const mz_ckpt_state_t *state,
                            const mz_file_row_t *files,
                            const mz_source_row_t *sources,
                            int64_t num_sources);

#endif
