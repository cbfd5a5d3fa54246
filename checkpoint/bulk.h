/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The slice writer: an HDF5 file whose large datasets are contiguous and have
 * their place from the start. HDF5 writes what describes them; their bytes go
 * around it with pwrite, and the checksum is taken on the way.
 *
 * HDF5 1.10 may crash after a write that failed. So the space of a file is
 * reserved first, and a full disk is found before HDF5 is asked for anything.
 */
#ifndef MZ_CHECKPOINT_BULK_H
#define MZ_CHECKPOINT_BULK_H

#include "checkpoint/h5.h"

typedef struct mz_bulk mz_bulk_t;

typedef struct mz_bulk_set {
  char name[MZ_NAME_MAX + 16]; /* groups of it are made */
  int32_t ndim;
  int64_t shape[4];
  mz_dtype_t dtype; /* MZ_F32, MZ_BF16, MZ_F16 */
} mz_bulk_set_t;

typedef struct mz_bulk_opts {
  const char *path;          /* borrowed until finish or abandon */
  const mz_bulk_set_t *sets; /* [num_sets], borrowed in the same way */
  int32_t num_sets;
  int64_t table_bytes; /* of what describe writes */
  /** Writes the small things, inside mz_h5_enter. */
  mz_status_t (*describe)(const mz_h5_t *h5, const void *ctx);
  const void *ctx;
} mz_bulk_opts_t;

/** Makes the file, which must not exist, with room for everything.
 * @return MZ_OK, MZ_ERR_IO. */
mz_status_t mz_bulk_reserve(const mz_bulk_opts_t *opts);

/** After mz_bulk_reserve. @return MZ_OK, MZ_ERR_IO, MZ_ERR_NOMEM. */
mz_status_t mz_bulk_create(const mz_bulk_opts_t *opts, mz_bulk_t **bulk_out);

/** Appends values to a set: the sets one after another, each from its start.
 * @return MZ_OK, MZ_ERR_IO, MZ_ERR_ARG (more than the set holds),
 * MZ_ERR_OVERFLOW (a finite value is not finite in the set's type). */
mz_status_t mz_bulk_append(mz_bulk_t *bulk, int32_t set, const float *values,
                           int64_t num);

/** Ends the file on disk and frees *bulk, in any case. Every set must be full.
 * @param[out] row_out  Its bytes and sum; NULL: no sum is taken. */
mz_status_t mz_bulk_finish(mz_bulk_t **bulk, mz_file_row_t *row_out);

/** Closes without a look at the result. */
void mz_bulk_abandon(mz_bulk_t **bulk);

#endif
