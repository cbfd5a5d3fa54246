/* SPDX-License-Identifier: Apache-2.0 */
/* An open checkpoint or one-file model, shared by index.c and model_file.c
 * (which fill it) and reader.c. */
#ifndef MZ_CHECKPOINT_CKPT_IMPL_H
#define MZ_CHECKPOINT_CKPT_IMPL_H

#include "checkpoint/h5.h"

/* Where a dataset's values lie. */
typedef struct mz_place {
  int64_t at; /* byte in the file; -1: not there */
  int64_t elements;
  mz_dtype_t dtype;
} mz_place_t;

typedef struct mz_ckpt_file {
  char *path;
  int file; /* -1: closed */
  bool known;
  uint64_t used;                        /* when, for the oldest to be closed */
  mz_place_t places[MZ_CKPT_NUM_PARTS]; /* of a rank file, once known */
} mz_ckpt_file_t;

struct mz_ckpt {
  char *path;
  bool one_file;
  mz_ckpt_state_t state;
  char *config, *client_state, *tuning;
  char save_id[MZ_SAVE_ID_BYTES];
  bool has[MZ_CKPT_NUM_PARTS];

  mz_ckpt_tensor_t *tensors;
  int64_t num_tensors;
  int32_t *by_name;   /* [num_tensors] indices in order of names */
  mz_place_t *places; /* one_file: [num_tensors, parts] */

  mz_file_row_t *rows;   /* [num_files] */
  mz_ckpt_file_t *files; /* [num_files] */
  int64_t num_files;
  int32_t num_open;
  uint64_t clock;

  mz_source_row_t *sources; /* by (tensor, offset) */
  int64_t num_sources;
  int64_t *first_source; /* [num_tensors + 1] */
};

/** Fills an empty ckpt from the folder ckpt->path. */
mz_status_t mz_index_open(mz_ckpt_t *ckpt);

/** Fills it from the file ckpt->path. */
mz_status_t mz_model_file_open(mz_ckpt_t *ckpt);

/** What both do last: first_source and by_name; every element of every tensor
 * must have one source. @return MZ_OK, MZ_ERR_DATA, MZ_ERR_NOMEM. */
mz_status_t mz_index_finish(mz_ckpt_t *ckpt);

/** What a rank file says of itself, and where its datasets lie. */
mz_status_t mz_index_read_rank_file(const mz_ckpt_t *ckpt, int32_t file,
                                    mz_place_t places[MZ_CKPT_NUM_PARTS]);

/** Inside mz_h5_enter: the place of a contiguous dataset of values. */
mz_status_t mz_index_place(const mz_h5_t *h5, const char *name,
                           mz_place_t *place_out);

#endif
