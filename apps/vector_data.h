/* SPDX-License-Identifier: Apache-2.0 */
/* The data of vector_moe: an HDF5 file that it makes itself, with the groups
 * "train" and "valid", each of x [rows, 84] fp32 and label [rows] int32. */
#ifndef APPS_VECTOR_DATA_H
#define APPS_VECTOR_DATA_H

#include <moezero/status.h>
#include <stdint.h>

enum { WIDTH = 84, CLASSES = 10, MAX_ROWS = 8192 };

typedef struct rows {
  int64_t num;
  float x[MAX_ROWS * WIDTH];
  int32_t label[MAX_ROWS]; /* in [0, CLASSES) */
} rows_t;

/** Makes the file unless it is there. @return MZ_OK, MZ_ERR_IO. */
mz_status_t vector_data_make(const char *path);

/** Reads the file. @return MZ_OK, MZ_ERR_IO, MZ_ERR_DATA (not such a file). */
mz_status_t vector_data_read(const char *path, rows_t *train, rows_t *valid);

#endif
