/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The files of a checkpoint, format version 1.
 *
 * rank_<R>.h5: attributes format = "moezero rank file", version, save_id, step,
 * rank, ranks; tables `tensors` {name, ndim, shape[4]} and `segments` {tensor,
 * offset, length, position}; 1-D fp32 datasets `weights`, `exp_avg`,
 * `exp_avg_sq`, contiguous, in which the elements [offset, offset + length) of
 * a tensor lie from `position` on.
 *
 * checkpoint.h5: a user block of 512 bytes with the sum of the rest of the file
 * as text; attributes format = "moezero checkpoint", version, save_id, step,
 * updates, sampler_position, seed, ranks; texts `config`, `client_state` and
 * `tuning` (of the run's choices of algorithms; not in older files); tables
 * `tensors`, `files` {name, bytes, sum} and `sources` {file, tensor, offset,
 * length, position}, sorted by (tensor, offset); group `model` with a virtual
 * dataset a tensor.
 *
 * A save_id is drawn for every save: a file of another one is recognised.
 *
 * A one-file model: attribute format = "moezero model", a dataset a tensor.
 */
#ifndef MZ_CHECKPOINT_FORMAT_H
#define MZ_CHECKPOINT_FORMAT_H

#include <moezero/checkpoint.h>

#define MZ_FORMAT_RANK "moezero rank file"
#define MZ_FORMAT_CHECKPOINT "moezero checkpoint"
#define MZ_FORMAT_MODEL "moezero model"
#define MZ_MASTER_NAME "checkpoint.h5"
#define MZ_LATEST_NAME "latest"

enum {
  MZ_FORMAT_VERSION = 1,
  MZ_USER_BLOCK_BYTES = 512,
  MZ_MAX_VIRTUAL_SOURCES = 512,
  MZ_SAVE_ID_BYTES = 17 /* 16 hexadecimal digits */
};

typedef struct mz_file_row {
  char name[32];
  int64_t bytes;
  uint64_t sum; /* checkpoint/sum64.h */
} mz_file_row_t;

typedef struct mz_source_row {
  int32_t file;
  int32_t tensor;
  int64_t offset, length; /* within the tensor */
  int64_t position;       /* within the file's datasets */
} mz_source_row_t;

/** Names of the datasets by part: weights, exp_avg, exp_avg_sq. */
const char *mz_ckpt_part_name(mz_ckpt_part_t part);

#endif
