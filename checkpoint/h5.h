/* SPDX-License-Identifier: Apache-2.0 */
/**
 * HDF5 in small pieces: attributes, texts and tables, with the library's own
 * words in error messages. HDF5 may be built without threads: every call lies
 * between mz_h5_enter and mz_h5_leave, one lock for the process.
 *
 * Errors: MZ_ERR_IO, with the path, what was tried and HDF5's first reason.
 */
#ifndef MZ_CHECKPOINT_H5_H
#define MZ_CHECKPOINT_H5_H

#include "checkpoint/format.h"

#include <hdf5.h>

/** Takes the lock; HDF5 prints nothing until mz_h5_leave. Not nested. */
void mz_h5_enter(void);
void mz_h5_leave(void);

/** A file and the name that messages give it. */
typedef struct mz_h5 {
  hid_t file;
  const char *path; /* borrowed */
} mz_h5_t;

/** Records "path: what: reason" of the last failed HDF5 call. */
mz_status_t mz_h5_fail(const char *path, const char *what);

/** File access: no locks of HDF5's own (some file systems have none), objects
 * are closed with the file, space in multiples of 8 bytes. -1 on failure. */
hid_t mz_h5_access(void);

/** Opens to read. */
mz_status_t mz_h5_open(const char *path, mz_h5_t *h5_out);
void mz_h5_close(mz_h5_t *h5);

mz_status_t mz_h5_put_text(const mz_h5_t *h5, const char *attribute,
                           const char *text);
mz_status_t mz_h5_put_i64(const mz_h5_t *h5, const char *attribute,
                          int64_t value);
/** Of the root, or of a dataset @p object. */
mz_status_t mz_h5_put_object_text(const mz_h5_t *h5, const char *object,
                                  const char *attribute, const char *text);
/** @param[out] text_out  "" where there is no such text. */
void mz_h5_get_text(const mz_h5_t *h5, const char *object,
                    const char *attribute, char *text_out, size_t text_bytes);
mz_status_t mz_h5_get_i64(const mz_h5_t *h5, const char *attribute,
                          int64_t *value_out);

/** A text as a dataset; what is read is owned by the caller (mz_free). */
mz_status_t mz_h5_write_text(const mz_h5_t *h5, const char *name,
                             const char *text);
mz_status_t mz_h5_read_text(const mz_h5_t *h5, const char *name,
                            char **text_out);

/** Whether there is a dataset of this name. */
bool mz_h5_has(const mz_h5_t *h5, const char *name);

/** Types of a row; -1 on failure. */
hid_t mz_h5_tensor_type(void);
hid_t mz_h5_file_type(void);
/** @param with_file  Without it, a row of a rank file. */
hid_t mz_h5_source_type(bool with_file);

/** A table; takes over @p type. Read rows are owned by the caller (mz_free). */
mz_status_t mz_h5_write_table(const mz_h5_t *h5, const char *name, hid_t type,
                              int64_t num, const void *rows);
mz_status_t mz_h5_read_table(const mz_h5_t *h5, const char *name, hid_t type,
                             size_t row_bytes, int64_t *num_out,
                             void **rows_out);

/** The type of stored values: MZ_F32, MZ_F16, MZ_BF16 (16-bit integers). */
hid_t mz_h5_value_type(mz_dtype_t dtype);

#endif
