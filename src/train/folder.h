/* SPDX-License-Identifier: Apache-2.0 */
/**
 * A run's folder. Rank 0 makes it, holds an fcntl lock on DIR/lock that dies
 * with the process, and writes config.json and the metrics; every rank has a
 * log of its own, DIR/log.<rank>. Nothing here is collective.
 */
#ifndef MZ_TRAIN_FOLDER_H
#define MZ_TRAIN_FOLDER_H

#include <moezero/status.h>
#include <stdbool.h>
#include <stdio.h>

typedef struct mz_folder {
  char *path;
  int lock;      /* file descriptor of rank 0; -1 elsewhere */
  FILE *metrics; /* of rank 0; NULL elsewhere */
  FILE *log;
} mz_folder_t;

/** A name for a run that starts now: "runs/2031-05-01-13-45-00". */
void mz_folder_name(char *text, size_t text_bytes);

/**
 * Makes the folder and those above it where they are missing, and opens its
 * files; rank 0 first takes the lock.
 * @param keep  Metrics and logs go on behind what is there; else they start
 * empty.
 * @param metrics_name  A path under the folder.
 * @param[out] folder_out  Closed and empty after any error.
 * @return MZ_OK, MZ_ERR_IO (message: path and reason, or that another process
 * holds the lock), MZ_ERR_NOMEM.
 */
mz_status_t mz_folder_open(const char *path, int rank, const char *metrics_name,
                           bool keep, mz_folder_t *folder_out);

/** Writes @p text as DIR/@p name, replacing it by rename. */
mz_status_t mz_folder_write(const mz_folder_t *folder, const char *name,
                            const char *text);

void mz_folder_close(mz_folder_t *folder);

#endif
