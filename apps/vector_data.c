/* SPDX-License-Identifier: Apache-2.0 */
#include "vector_data.h"

#include <moezero/random.h>

#include <hdf5.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

enum { REGIONS = 8, TRAIN_ROWS = MAX_ROWS, VALID_ROWS = 2048 };

#define TRY(call)                                                              \
  do {                                                                         \
    mz_status_t st_ = (call);                                                  \
    if (st_ != MZ_OK) return st_;                                              \
  } while (0)

#define FAIL(code, ...)                                                        \
  mz_error_set((code), __FILE__, __LINE__, __func__, __VA_ARGS__)

/* --- the task ---
 * A vector is the sum of a region's direction, a pattern's and noise. Its class
 * is that of its pattern, but every region numbers the patterns anew: no one
 * linear map can tell, one for each region can. */

/* What the task's random numbers are for. */
enum { REGION = MZ_PURPOSE_OWN, KIND, REGION_AT, PATTERN_AT, NOISE };

static uint32_t draw(uint32_t purpose, uint64_t row, uint32_t below)
{
  mz_random_t random = mz_random_make(1, 0, purpose, 0);

  return mz_random_u32(&random, row) % below;
}

/* Some classes are rarer than others: of 100 draws 19 give class 0. */
static uint32_t kind_of(uint64_t row)
{
  uint32_t at = draw(KIND, row, 100);

  return at >= 90 ? 0 : at % CLASSES;
}

static int32_t make_row(uint64_t row, float *x)
{
  uint32_t region = draw(REGION, row, REGIONS), kind = kind_of(row);
  uint32_t pattern = (kind + 3 * region) % CLASSES;
  mz_random_t region_at = mz_random_make(1, region, REGION_AT, 0);
  mz_random_t pattern_at = mz_random_make(1, pattern, PATTERN_AT, 0);
  mz_random_t noise = mz_random_make(1, (uint32_t)row, NOISE, 0);

  for (uint64_t i = 0; i < WIDTH; i++)
    x[i] = (float)(0.5 * mz_random_normal(&region_at, i) +
                   0.5 * mz_random_normal(&pattern_at, i) +
                   0.3 * mz_random_normal(&noise, i));
  return (int32_t)kind;
}

/* --- the file --- */

/* What fails is said once, by the program. */
static void be_quiet(void) { H5Eset_auto2(H5E_DEFAULT, NULL, NULL); }

static bool write_list(hid_t file, const char *name, hid_t type, int num_dims,
                       hsize_t rows, const void *values)
{
  hsize_t dims[2] = {rows, WIDTH};
  hid_t space = H5Screate_simple(num_dims, dims, NULL);
  hid_t list = H5Dcreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT,
                          H5P_DEFAULT);
  bool good = list >= 0 &&
              H5Dwrite(list, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0;

  if (list >= 0) good = H5Dclose(list) >= 0 && good;
  H5Sclose(space);
  return good;
}

static bool write_part(hid_t file, const char *part, int64_t first, int64_t num)
{
  hid_t group = H5Gcreate2(file, part, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  static rows_t rows; /* too large for a stack */
  bool good = group >= 0;

  for (int64_t i = 0; good && i < num; i++)
    rows.label[i] = make_row((uint64_t)(first + i), rows.x + i * WIDTH);
  good =
      good &&
      write_list(group, "x", H5T_NATIVE_FLOAT, 2, (hsize_t)num, rows.x) &&
      write_list(group, "label", H5T_NATIVE_INT32, 1, (hsize_t)num, rows.label);
  if (group >= 0) H5Gclose(group);
  return good;
}

/* Under another name first: a file that is there is whole. */
mz_status_t vector_data_make(const char *path)
{
  char part[4096];
  hid_t file;
  bool good;

  if (access(path, F_OK) == 0) return MZ_OK;
  be_quiet();
  snprintf(part, sizeof part, "%.4000s.part", path);
  file = H5Fcreate(part, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  if (file < 0) return FAIL(MZ_ERR_IO, "%s: cannot create it", part);
  good = write_part(file, "train", 0, TRAIN_ROWS) &&
         write_part(file, "valid", TRAIN_ROWS, VALID_ROWS);
  good = H5Fclose(file) >= 0 && good;
  if (!good || rename(part, path) != 0)
    return FAIL(MZ_ERR_IO, "%s: cannot write it", path);
  return MZ_OK;
}

/* @param width  Of a row; 1: the list has one dimension. */
static mz_status_t read_list(hid_t file, const char *name, hid_t type,
                             int64_t width, int64_t num, void *values)
{
  hid_t list = H5Dopen2(file, name, H5P_DEFAULT);
  hid_t space = list < 0 ? -1 : H5Dget_space(list);
  bool good = list >= 0 && H5Sget_simple_extent_npoints(space) == num * width &&
              H5Dread(list, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0;

  if (space >= 0) H5Sclose(space);
  if (list >= 0) H5Dclose(list);
  if (!good)
    return FAIL(MZ_ERR_DATA, "%s: not %" PRId64 " rows of %" PRId64 " numbers",
                name, num, width);
  return MZ_OK;
}

static mz_status_t read_part(hid_t file, const char *part, int64_t num,
                             rows_t *rows)
{
  char x[32], label[32];

  snprintf(x, sizeof x, "%s/x", part);
  snprintf(label, sizeof label, "%s/label", part);
  rows->num = num;
  TRY(read_list(file, x, H5T_NATIVE_FLOAT, WIDTH, num, rows->x));
  return read_list(file, label, H5T_NATIVE_INT32, 1, num, rows->label);
}

mz_status_t vector_data_read(const char *path, rows_t *train, rows_t *valid)
{
  mz_status_t st;
  hid_t file;

  be_quiet();
  file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
  if (file < 0) return FAIL(MZ_ERR_IO, "%s: cannot open it", path);
  st = read_part(file, "train", TRAIN_ROWS, train);
  if (st == MZ_OK) st = read_part(file, "valid", VALID_ROWS, valid);
  H5Fclose(file);
  return st;
}
