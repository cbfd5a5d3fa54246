/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Folders and files, of checkpoints and of a run. Errors: MZ_ERR_IO with the
 * path and the system's reason. Nothing here is collective.
 */
#ifndef MZ_CHECKPOINT_DISK_H
#define MZ_CHECKPOINT_DISK_H

#include <limits.h>
#include <moezero/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** A path of a printf form; MZ_ERR_IO when it does not fit. */
mz_status_t mz_disk_path(char path_out[PATH_MAX], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/** Makes a folder and those above it where they are missing. */
mz_status_t mz_disk_make_folders(const char *path);
mz_status_t mz_disk_sync_folder(const char *path);

/** Makes a file that is not there yet. */
mz_status_t mz_disk_write(const char *path, const void *bytes, size_t num);
mz_status_t mz_disk_rename(const char *from, const char *to);

/** Removes a folder and the files in it; one that is not there is fine. */
mz_status_t mz_disk_remove_folder(const char *path);

bool mz_disk_exists(const char *path);

/** Whole reads and writes at a place; @p path is for messages. */
mz_status_t mz_disk_pread(int file, const char *path, void *bytes, size_t num,
                          int64_t at);
mz_status_t mz_disk_pwrite(int file, const char *path, const void *bytes,
                           size_t num, int64_t at);

/** Steps with a checkpoint.h5 in their folder, ascending; owned by the caller
 * (mz_free). A folder that is not there has none. */
mz_status_t mz_disk_steps(const char *dir, int64_t **steps_out,
                          int64_t *num_out);

#endif
