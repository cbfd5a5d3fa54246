/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/h5.h"

#include "base/alloc.h"
#include "base/check.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static H5E_auto2_t saved_report;
static void *saved_data;
static char reason[256]; /* of the last call that failed */

static herr_t take_first(unsigned n, const H5E_error2_t *error, void *ctx)
{
  (void)ctx;
  if (n == 0 && error->desc) snprintf(reason, sizeof reason, "%s", error->desc);
  return 0;
}

/* HDF5 calls it when a call fails, instead of printing; the next call of any
 * kind would forget the reason. */
static herr_t report(hid_t stack, void *ctx)
{
  return H5Ewalk2(stack, H5E_WALK_UPWARD, take_first, ctx);
}

void mz_h5_enter(void)
{
  pthread_mutex_lock(&lock);
  snprintf(reason, sizeof reason, "no reason given");
  H5Eget_auto2(H5E_DEFAULT, &saved_report, &saved_data);
  H5Eset_auto2(H5E_DEFAULT, report, NULL);
}

void mz_h5_leave(void)
{
  H5Eset_auto2(H5E_DEFAULT, saved_report, saved_data);
  pthread_mutex_unlock(&lock);
}

mz_status_t mz_h5_fail(const char *path, const char *what)
{
  MZ_FAIL(MZ_ERR_IO, "%s: %s: %s", path, what, reason);
}

hid_t mz_h5_access(void)
{
  hid_t access = H5Pcreate(H5P_FILE_ACCESS);

  if (access < 0) return access;
  if (H5Pset_fclose_degree(access, H5F_CLOSE_STRONG) < 0 ||
      H5Pset_file_locking(access, 0, 1) < 0 ||
      H5Pset_alignment(access, 1, 8) < 0) {
    H5Pclose(access);
    return -1;
  }
  return access;
}

mz_status_t mz_h5_open(const char *path, mz_h5_t *h5_out)
{
  hid_t access = mz_h5_access();

  h5_out->path = path;
  h5_out->file = access < 0 ? -1 : H5Fopen(path, H5F_ACC_RDONLY, access);
  if (access >= 0) H5Pclose(access);
  if (h5_out->file < 0) return mz_h5_fail(path, "cannot open it as HDF5");
  return MZ_OK;
}

void mz_h5_close(mz_h5_t *h5)
{
  if (h5->file >= 0) H5Fclose(h5->file);
  h5->file = -1;
}

static hid_t text_type(size_t bytes)
{
  hid_t type = H5Tcopy(H5T_C_S1);

  if (type >= 0 && H5Tset_size(type, bytes) < 0) {
    H5Tclose(type);
    return -1;
  }
  return type;
}

static mz_status_t put(const mz_h5_t *h5, const char *object,
                       const char *attribute, hid_t type, const void *value)
{
  hid_t space = H5Screate(H5S_SCALAR), made;
  herr_t result = -1;

  made = H5Acreate_by_name(h5->file, object, attribute, type, space,
                           H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  if (made >= 0) {
    result = H5Awrite(made, type, value);
    if (H5Aclose(made) < 0) result = -1;
  }
  if (space >= 0) H5Sclose(space);
  return result < 0 ? mz_h5_fail(h5->path, attribute) : MZ_OK;
}

mz_status_t mz_h5_put_object_text(const mz_h5_t *h5, const char *object,
                                  const char *attribute, const char *text)
{
  hid_t type = text_type(strlen(text) + 1);
  mz_status_t st = put(h5, object, attribute, type, text);

  if (type >= 0) H5Tclose(type);
  return st;
}

mz_status_t mz_h5_put_text(const mz_h5_t *h5, const char *attribute,
                           const char *text)
{
  return MZ_TRACE(mz_h5_put_object_text(h5, "/", attribute, text));
}

mz_status_t mz_h5_put_i64(const mz_h5_t *h5, const char *attribute,
                          int64_t value)
{
  return MZ_TRACE(put(h5, "/", attribute, H5T_STD_I64LE, &value));
}

void mz_h5_get_text(const mz_h5_t *h5, const char *object,
                    const char *attribute, char *text_out, size_t text_bytes)
{
  hid_t found =
      H5Aopen_by_name(h5->file, object, attribute, H5P_DEFAULT, H5P_DEFAULT);
  hid_t stored = found < 0 ? -1 : H5Aget_type(found);
  hid_t wanted = text_type(text_bytes);

  if (stored < 0 || H5Tget_class(stored) != H5T_STRING ||
      H5Tis_variable_str(stored) != 0 || wanted < 0 ||
      H5Aread(found, wanted, text_out) < 0)
    text_out[0] = '\0';
  text_out[text_bytes - 1] = '\0';
  if (wanted >= 0) H5Tclose(wanted);
  if (stored >= 0) H5Tclose(stored);
  if (found >= 0) H5Aclose(found);
}

mz_status_t mz_h5_get_i64(const mz_h5_t *h5, const char *attribute,
                          int64_t *value_out)
{
  hid_t found = H5Aopen(h5->file, attribute, H5P_DEFAULT);
  int64_t value = 0;
  herr_t result = found < 0 ? -1 : H5Aread(found, H5T_NATIVE_INT64, &value);

  if (found >= 0) H5Aclose(found);
  if (result < 0) return mz_h5_fail(h5->path, attribute);
  *value_out = value;
  return MZ_OK;
}

/* A dataset of its own for small things, written at once. */
static mz_status_t write_dataset(const mz_h5_t *h5, const char *name,
                                 hid_t type, hid_t space, const void *values)
{
  hid_t set = H5Dcreate2(h5->file, name, type, space, H5P_DEFAULT, H5P_DEFAULT,
                         H5P_DEFAULT);
  herr_t result = -1;

  if (set >= 0) {
    result =
        values ? H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) : 0;
    if (H5Dclose(set) < 0) result = -1;
  }
  return result < 0 ? mz_h5_fail(h5->path, name) : MZ_OK;
}

mz_status_t mz_h5_write_text(const mz_h5_t *h5, const char *name,
                             const char *text)
{
  hid_t type = text_type(strlen(text) + 1), space = H5Screate(H5S_SCALAR);
  mz_status_t st = write_dataset(h5, name, type, space, text);

  if (type >= 0) H5Tclose(type);
  if (space >= 0) H5Sclose(space);
  return MZ_TRACE(st);
}

mz_status_t mz_h5_read_text(const mz_h5_t *h5, const char *name,
                            char **text_out)
{
  hid_t set = H5Dopen2(h5->file, name, H5P_DEFAULT);
  hid_t type = set < 0 ? -1 : H5Dget_type(set);
  char *text = NULL;
  mz_status_t st = MZ_OK;

  if (type < 0 || H5Tget_class(type) != H5T_STRING || H5Tis_variable_str(type))
    st = mz_h5_fail(h5->path, name);
  else
    st = mz_new((int64_t)H5Tget_size(type) + 1, name, &text);
  if (st == MZ_OK &&
      H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, text) < 0)
    st = mz_h5_fail(h5->path, name);
  if (type >= 0) H5Tclose(type);
  if (set >= 0) H5Dclose(set);
  if (st == MZ_OK)
    *text_out = text;
  else
    mz_free(text);
  return st;
}

bool mz_h5_has(const mz_h5_t *h5, const char *name)
{
  return H5Lexists(h5->file, name, H5P_DEFAULT) > 0;
}

typedef struct column {
  const char *name;
  size_t at;
  hid_t type;
} column_t;

static hid_t row_type(size_t bytes, const column_t *columns, int num)
{
  hid_t type = H5Tcreate(H5T_COMPOUND, bytes);

  for (int i = 0; i < num && type >= 0; i++)
    if (H5Tinsert(type, columns[i].name, columns[i].at, columns[i].type) < 0) {
      H5Tclose(type);
      return -1;
    }
  return type;
}

hid_t mz_h5_tensor_type(void)
{
  hsize_t four = 4;
  hid_t name = text_type(MZ_NAME_MAX);
  hid_t shape = H5Tarray_create2(H5T_STD_I64LE, 1, &four);
  const column_t columns[] = {
      {"name", offsetof(mz_ckpt_tensor_t, name), name},
      {"ndim", offsetof(mz_ckpt_tensor_t, ndim), H5T_STD_I32LE},
      {"shape", offsetof(mz_ckpt_tensor_t, shape), shape}};
  hid_t type = row_type(sizeof(mz_ckpt_tensor_t), columns, 3);

  if (name >= 0) H5Tclose(name);
  if (shape >= 0) H5Tclose(shape);
  return type;
}

hid_t mz_h5_file_type(void)
{
  hid_t name = text_type(sizeof((mz_file_row_t *)0)->name);
  const column_t columns[] = {
      {"name", offsetof(mz_file_row_t, name), name},
      {"bytes", offsetof(mz_file_row_t, bytes), H5T_STD_I64LE},
      {"sum", offsetof(mz_file_row_t, sum), H5T_STD_U64LE}};
  hid_t type = row_type(sizeof(mz_file_row_t), columns, 3);

  if (name >= 0) H5Tclose(name);
  return type;
}

hid_t mz_h5_source_type(bool with_file)
{
  const column_t columns[] = {
      {"file", offsetof(mz_source_row_t, file), H5T_STD_I32LE},
      {"tensor", offsetof(mz_source_row_t, tensor), H5T_STD_I32LE},
      {"offset", offsetof(mz_source_row_t, offset), H5T_STD_I64LE},
      {"length", offsetof(mz_source_row_t, length), H5T_STD_I64LE},
      {"position", offsetof(mz_source_row_t, position), H5T_STD_I64LE}};

  return row_type(sizeof(mz_source_row_t), columns + !with_file, 4 + with_file);
}

mz_status_t mz_h5_write_table(const mz_h5_t *h5, const char *name, hid_t type,
                              int64_t num, const void *rows)
{
  hsize_t extent = (hsize_t)num;
  hid_t space = H5Screate_simple(1, &extent, NULL);
  mz_status_t st = write_dataset(h5, name, type, space, num ? rows : NULL);

  if (space >= 0) H5Sclose(space);
  if (type >= 0) H5Tclose(type);
  return MZ_TRACE(st);
}

mz_status_t mz_h5_read_table(const mz_h5_t *h5, const char *name, hid_t type,
                             size_t row_bytes, int64_t *num_out,
                             void **rows_out)
{
  hid_t set = H5Dopen2(h5->file, name, H5P_DEFAULT);
  hid_t space = set < 0 ? -1 : H5Dget_space(set);
  int64_t num = space < 0 ? -1 : H5Sget_simple_extent_npoints(space);
  void *rows = NULL;
  mz_status_t st = MZ_OK;

  if (num < 0 || type < 0)
    st = mz_h5_fail(h5->path, name);
  else
    st = mz_alloc_zeroed(num, row_bytes, name, &rows);
  if (st == MZ_OK && num > 0 &&
      H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, rows) < 0)
    st = mz_h5_fail(h5->path, name);
  if (space >= 0) H5Sclose(space);
  if (set >= 0) H5Dclose(set);
  if (type >= 0) H5Tclose(type);
  if (st == MZ_OK) {
    *num_out = num;
    *rows_out = rows;
  } else {
    mz_free(rows);
  }
  return st;
}

hid_t mz_h5_value_type(mz_dtype_t dtype)
{
  hid_t type;

  if (dtype == MZ_F32) return H5Tcopy(H5T_IEEE_F32LE);
  if (dtype == MZ_BF16) return H5Tcopy(H5T_STD_U16LE);
  /* IEEE binary16: sign 15, exponent 10..14 with bias 15, fraction 0..9 */
  type = H5Tcopy(H5T_IEEE_F32LE);
  if (type < 0) return type;
  if (H5Tset_fields(type, 15, 10, 5, 0, 10) < 0 || H5Tset_size(type, 2) < 0 ||
      H5Tset_ebias(type, 15) < 0) {
    H5Tclose(type);
    return -1;
  }
  return type;
}
