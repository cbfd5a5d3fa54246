/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moezero/checkpoint.h
 * @brief Checkpoints that do not remember how they were sharded.
 *
 * DIR/global_step<N>/ holds rank_<R>.h5, a file a rank with its slices of the
 * fp32 weights and moments, and checkpoint.h5: state, file list with checksums
 * and virtual datasets model/<name> that show every whole weight over the rank
 * files. DIR/latest holds the name of the newest folder. The formats stand in
 * checkpoint/format.h.
 *
 * A slice is a flat range of a tensor. Any reader asks for (tensor, range) and
 * gets values, whatever the ranks, ep_size and stage of the run that saved.
 * A file of h5-gather, datasets named by tensor, is read in the same way.
 */
#ifndef MZ_CHECKPOINT_H
#define MZ_CHECKPOINT_H

#include <moezero/status.h>
#include <moezero/types.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

struct mz_comm;
typedef struct mz_ckpt mz_ckpt_t;

typedef enum mz_ckpt_part {
  MZ_CKPT_WEIGHTS,
  MZ_CKPT_EXP_AVG,
  MZ_CKPT_EXP_AVG_SQ,
  MZ_CKPT_NUM_PARTS
} mz_ckpt_part_t;

typedef struct mz_ckpt_tensor {
  char name[MZ_NAME_MAX]; /* global */
  int32_t ndim;           /* 1..4 */
  int64_t shape[4];       /* slowest to fastest, each >= 1 */
} mz_ckpt_tensor_t;

/** A flat range of a tensor that this rank holds: length >= 1 elements. */
typedef struct mz_ckpt_slice {
  int32_t tensor; /* index in the list of tensors */
  int64_t offset, length;
  const float *values[MZ_CKPT_NUM_PARTS]; /* [length] each; see fetch */
} mz_ckpt_slice_t;

/** All random numbers are functions of (seed, step, place): no other state. */
typedef struct mz_ckpt_state {
  int64_t step;             /* optimizer steps done, >= 0 */
  int64_t updates;          /* of them not skipped: Adam's t */
  int64_t sampler_position; /* samples taken since the start of training */
  uint64_t seed;
  const char *config;       /* its text */
  const char *client_state; /* the application's text; NULL: "" */
  const char *tuning;       /* mz_engine_tuning_text; NULL: "" */
} mz_ckpt_state_t;

typedef struct mz_ckpt_save_opts {
  const char *dir; /* made where missing */
  mz_ckpt_state_t state;
  const mz_ckpt_tensor_t *tensors; /* all, the same list on all ranks */
  int32_t num_tensors;
  const mz_ckpt_slice_t *slices; /* of this rank; over the ranks they cover
                                    every element once */
  int32_t num_slices;
  int64_t keep; /* newest steps kept; 0: all */
  /** Brings values of slices to the host; NULL: they are host memory. */
  mz_status_t (*fetch)(void *ctx, const float *values, int64_t num,
                       float *host_out);
  void *ctx;
} mz_ckpt_save_opts_t;

/**
 * Writes DIR/global_step<N>. It is built under another name and published by
 * rename, when every byte is on disk; after that DIR/latest is replaced, then
 * steps beyond `keep` are deleted. Collective; the same on all ranks but for
 * the slices.
 * @return MZ_OK or, on all ranks, the worst status and the lowest failing
 * rank's message: MZ_ERR_IO (path and reason; the step exists already),
 * MZ_ERR_ARG (a slice outside its tensor), MZ_ERR_NOMEM, MZ_ERR_PEER. After an
 * error nothing of this save remains and older steps are as they were.
 */
mz_status_t mz_ckpt_save(struct mz_comm *comm, const mz_ckpt_save_opts_t *opts);

/** The highest step in @p dir that is complete; -1: none. Not collective. */
int64_t mz_ckpt_newest(const char *dir);

/**
 * Opens a folder global_step<N>, a folder with `latest` in it, or a one-file
 * model of h5-gather. Every file of the list must be there with its size. Not
 * collective.
 * @return MZ_OK, MZ_ERR_IO (a file is missing or cannot be read), MZ_ERR_DATA
 * (not a checkpoint, truncated, of another save, damaged), MZ_ERR_NOMEM; the
 * message names the file and the reason.
 */
mz_status_t mz_ckpt_open(const char *path, mz_ckpt_t **ckpt_out);
void mz_ckpt_close(mz_ckpt_t **ckpt);

/** The folder or file that was opened, behind `latest`. Borrowed. */
const char *mz_ckpt_path(const mz_ckpt_t *ckpt);

/** NULL for a one-file model. Borrowed until close. */
const mz_ckpt_state_t *mz_ckpt_state(const mz_ckpt_t *ckpt);

bool mz_ckpt_has(const mz_ckpt_t *ckpt, mz_ckpt_part_t part);
int32_t mz_ckpt_num_tensors(const mz_ckpt_t *ckpt);
const mz_ckpt_tensor_t *mz_ckpt_tensor(const mz_ckpt_t *ckpt, int32_t tensor);
int64_t mz_ckpt_elements(const mz_ckpt_tensor_t *tensor);
/** -1: no such tensor. */
int32_t mz_ckpt_find(const mz_ckpt_t *ckpt, const char *name);

/**
 * Reads elements [offset, offset + length) of a tensor as fp32. Opens rank
 * files when they are first needed and few at once. Not collective.
 * @param[out] values_out  [length]
 * @return as mz_ckpt_open; MZ_ERR_ARG (a range outside the tensor, a part that
 * is not there).
 */
mz_status_t mz_ckpt_read(mz_ckpt_t *ckpt, int32_t tensor, mz_ckpt_part_t part,
                         int64_t offset, int64_t length, float *values_out);

/**
 * Reads files first, first + stride, ... of the list whole and compares their
 * checksums; a one-file model has none. Not collective.
 * @return MZ_OK, MZ_ERR_DATA (names the file), MZ_ERR_IO.
 */
mz_status_t mz_ckpt_verify(mz_ckpt_t *ckpt, int32_t first, int32_t stride);
int32_t mz_ckpt_num_files(const mz_ckpt_t *ckpt);
int64_t mz_ckpt_bytes(const mz_ckpt_t *ckpt); /* of all its files */

typedef struct mz_ckpt_gather_opts {
  const char *path; /* of the file to write */
  mz_dtype_t dtype; /* MZ_F32, MZ_BF16 (16-bit integers with an attribute
                       dtype = "bf16": HDF5 has no such type), MZ_F16 */
  bool optimizer;   /* also exp_avg/<name> and exp_avg_sq/<name>, in fp32 */
} mz_ckpt_gather_opts_t;

/**
 * Verifies the checkpoint, then writes every tensor as a dataset of its name,
 * in a few MiB of memory. An older file is replaced when the new one is whole;
 * after an error nothing new remains. Not collective.
 * @return as mz_ckpt_open; MZ_ERR_OVERFLOW (a finite weight is not finite in
 * fp16; names the tensor), MZ_ERR_ARG, MZ_ERR_UNSUPPORTED.
 */
mz_status_t mz_ckpt_gather(mz_ckpt_t *ckpt, const mz_ckpt_gather_opts_t *opts);

#ifdef __cplusplus
}
#endif
#endif
