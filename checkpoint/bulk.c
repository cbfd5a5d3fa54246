/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/bulk.h"

#include "base/alloc.h"
#include "base/check.h"
#include "checkpoint/disk.h"
#include "checkpoint/half.h"
#include "checkpoint/sum64.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  BUFFER_BYTES = 1 << 20,
  SET_BYTES = 2048, /* at most, of what HDF5 writes about a dataset */
  FILE_BYTES = 65536
};

struct mz_bulk {
  mz_bulk_opts_t opts;
  int file;
  int64_t *at;  /* [sets] first byte */
  int32_t set;  /* being written */
  int64_t done; /* elements of it, buffered ones included */
  char *buffer;
  int64_t buffered; /* bytes */
  int64_t written;  /* bytes of the set */
  uint64_t parts;   /* of the checksum: whole words of full sets */
};

static int64_t elements_of(const mz_bulk_set_t *set)
{
  int64_t n = 1;
  for (int32_t d = 0; d < set->ndim; d++)
    n *= set->shape[d];
  return n;
}

static int64_t bytes_of(const mz_bulk_set_t *set)
{
  return elements_of(set) * (int64_t)mz_dtype_bytes(set->dtype);
}

mz_status_t mz_bulk_reserve(const mz_bulk_opts_t *opts)
{
  int64_t bytes = FILE_BYTES + opts->table_bytes;
  int file, result = 0, reason = 0;

  for (int32_t i = 0; i < opts->num_sets; i++)
    bytes += bytes_of(&opts->sets[i]) + SET_BYTES;
  file = open(opts->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  MZ_REQUIRE(file >= 0, MZ_ERR_IO, "%s: %s", opts->path, strerror(errno));
  do
    result = fallocate(file, 0, 0, bytes);
  while (result != 0 && errno == EINTR);
  if (result != 0) reason = errno;
  if (reason == EOPNOTSUPP || reason == ENOSYS) reason = 0;
  if (close(file) != 0 && reason == 0) reason = errno;
  if (reason != 0) unlink(opts->path);
  MZ_REQUIRE(reason == 0, MZ_ERR_IO, "%s: no room for %" PRId64 " bytes: %s",
             opts->path, bytes, strerror(reason));
  return MZ_OK;
}

/* HDF5 knows no bfloat16: its sets are 16-bit integers and say so. */
static mz_status_t create_set(const mz_h5_t *h5, const mz_bulk_set_t *set,
                              hid_t layout, hid_t links, int64_t *at_out)
{
  hsize_t shape[4];
  hid_t type = mz_h5_value_type(set->dtype), space, made;
  haddr_t at = HADDR_UNDEF;

  for (int32_t d = 0; d < set->ndim; d++)
    shape[d] = (hsize_t)set->shape[d];
  space = H5Screate_simple(set->ndim, shape, NULL);
  made =
      H5Dcreate2(h5->file, set->name, type, space, links, layout, H5P_DEFAULT);
  if (made >= 0) {
    at = H5Dget_offset(made);
    H5Dclose(made);
  }
  if (space >= 0) H5Sclose(space);
  if (type >= 0) H5Tclose(type);
  *at_out = (int64_t)at;
  if (made < 0 || (at == HADDR_UNDEF && elements_of(set) > 0))
    return mz_h5_fail(h5->path, set->name);
  if (set->dtype == MZ_BF16)
    return MZ_TRACE(mz_h5_put_object_text(h5, set->name, "dtype", "bf16"));
  return MZ_OK;
}

static mz_status_t create_sets(const mz_h5_t *h5, mz_bulk_t *bulk)
{
  hid_t layout = H5Pcreate(H5P_DATASET_CREATE);
  hid_t links = H5Pcreate(H5P_LINK_CREATE);
  mz_status_t st = MZ_OK;

  if (H5Pset_layout(layout, H5D_CONTIGUOUS) < 0 ||
      H5Pset_alloc_time(layout, H5D_ALLOC_TIME_EARLY) < 0 ||
      H5Pset_fill_time(layout, H5D_FILL_TIME_NEVER) < 0 ||
      H5Pset_create_intermediate_group(links, 1) < 0)
    st = mz_h5_fail(h5->path, "dataset layout");
  for (int32_t i = 0; i < bulk->opts.num_sets && st == MZ_OK; i++)
    st = create_set(h5, &bulk->opts.sets[i], layout, links, &bulk->at[i]);
  if (layout >= 0) H5Pclose(layout);
  if (links >= 0) H5Pclose(links);
  return MZ_TRACE(st);
}

static mz_status_t create_file(mz_bulk_t *bulk)
{
  hid_t access = mz_h5_access();
  mz_h5_t h5 = {.path = bulk->opts.path};
  mz_status_t st;

  h5.file =
      access < 0 ? -1 : H5Fcreate(h5.path, H5F_ACC_TRUNC, H5P_DEFAULT, access);
  if (access >= 0) H5Pclose(access);
  if (h5.file < 0) return mz_h5_fail(h5.path, "cannot be made");
  st = bulk->opts.describe(&h5, bulk->opts.ctx);
  if (st == MZ_OK) st = create_sets(&h5, bulk);
  if (H5Fclose(h5.file) < 0 && st == MZ_OK)
    st = mz_h5_fail(h5.path, "cannot be written");
  return MZ_TRACE(st);
}

mz_status_t mz_bulk_create(const mz_bulk_opts_t *opts, mz_bulk_t **bulk_out)
{
  mz_bulk_t *b = NULL;
  mz_status_t st;

  *bulk_out = NULL;
  MZ_TRY_GOTO(st, mz_new(1, "bulk writer", &b), done);
  b->file = -1;
  b->opts = *opts;
  MZ_TRY_GOTO(st, mz_new(opts->num_sets, "places", &b->at), done);
  MZ_TRY_GOTO(st, mz_new(BUFFER_BYTES, "write buffer", &b->buffer), done);
  mz_h5_enter();
  st = create_file(b);
  mz_h5_leave();
  if (st != MZ_OK) goto done;
  b->file = open(opts->path, O_RDWR | O_CLOEXEC);
  MZ_REQUIRE_GOTO(b->file >= 0, st, done, MZ_ERR_IO, "%s: %s", opts->path,
                  strerror(errno));
  *bulk_out = b;
  b = NULL;
done:
  mz_bulk_abandon(&b);
  return st;
}

static mz_status_t flush(mz_bulk_t *b)
{
  int64_t at = b->at[b->set] + b->written, whole = b->buffered / 8 * 8;

  if (b->buffered == 0) return MZ_OK;
  MZ_TRY(mz_disk_pwrite(b->file, b->opts.path, b->buffer, (size_t)b->buffered,
                        at));
  b->parts += mz_sum64_part(b->buffer, at, whole);
  b->written += b->buffered;
  b->buffered = 0;
  return MZ_OK;
}

/* The next set begins, or the file ends: the current one must be full. */
static mz_status_t next_set(mz_bulk_t *b, int32_t set)
{
  for (; b->set < set; b->set++) {
    const mz_bulk_set_t *s = &b->opts.sets[b->set];

    MZ_REQUIRE(b->done == elements_of(s), MZ_ERR_ARG,
               "%s: %s got %" PRId64 " of %" PRId64 " elements", b->opts.path,
               s->name, b->done, elements_of(s));
    MZ_TRY(flush(b));
    b->done = b->written = 0;
  }
  return MZ_OK;
}

static mz_status_t take(mz_bulk_t *b, const mz_bulk_set_t *s,
                        const float *values, int64_t num)
{
  char *to = b->buffer + b->buffered;
  int64_t bad;

  if (s->dtype == MZ_F32) {
    memcpy(to, values, (size_t)num * sizeof *values);
    return MZ_OK;
  }
  bad = mz_half_from_f32(s->dtype, num, values, (uint16_t *)(void *)to);
  MZ_REQUIRE(bad < 0, MZ_ERR_OVERFLOW,
             "%s: element %" PRId64 " is %g, too large for 16 bits", s->name,
             b->done + bad, (double)values[bad]);
  return MZ_OK;
}

mz_status_t mz_bulk_append(mz_bulk_t *bulk, int32_t set, const float *values,
                           int64_t num)
{
  mz_bulk_t *b = bulk;
  const mz_bulk_set_t *s = &b->opts.sets[set];
  int64_t size = (int64_t)mz_dtype_bytes(s->dtype), part;

  MZ_TRY(next_set(b, set));
  MZ_REQUIRE(set == b->set && b->done + num <= elements_of(s), MZ_ERR_ARG,
             "%s: %" PRId64 " elements after %" PRId64 " of %s", b->opts.path,
             num, b->done, s->name);
  for (; num > 0; num -= part, values += part) {
    part = mz_min_i64(num, (BUFFER_BYTES - b->buffered) / size);
    MZ_TRY(take(b, s, values, part));
    b->buffered += part * size;
    b->done += part;
    if (b->buffered == BUFFER_BYTES) MZ_TRY(flush(b));
  }
  return MZ_OK;
}

/* Adds bytes [at, end), which HDF5 wrote; both ends are multiples of 8, or the
 * end is that of the file. */
static mz_status_t sum_rest(mz_bulk_t *b, int64_t at, int64_t end)
{
  for (int64_t part; at < end; at += part) {
    part = mz_min_i64(end - at, BUFFER_BYTES);
    MZ_TRY(mz_disk_pread(b->file, b->opts.path, b->buffer, (size_t)part, at));
    b->parts += mz_sum64_part(b->buffer, at, part);
  }
  return MZ_OK;
}

/* The set that starts first at or behind @p at; -1: none. */
static int32_t set_behind(const mz_bulk_t *b, int64_t at)
{
  int32_t found = -1;

  for (int32_t i = 0; i < b->opts.num_sets; i++)
    if (bytes_of(&b->opts.sets[i]) >= 8 && b->at[i] >= at &&
        (found < 0 || b->at[i] < b->at[found]))
      found = i;
  return found;
}

static mz_status_t sum_file(mz_bulk_t *b, mz_file_row_t *row)
{
  struct stat info;
  int64_t at = 0;
  int32_t set;

  MZ_REQUIRE(fstat(b->file, &info) == 0, MZ_ERR_IO, "%s: %s", b->opts.path,
             strerror(errno));
  while ((set = set_behind(b, at)) >= 0) {
    MZ_TRY(sum_rest(b, at, b->at[set]));
    at = b->at[set] + bytes_of(&b->opts.sets[set]) / 8 * 8;
  }
  MZ_TRY(sum_rest(b, at, info.st_size));
  row->bytes = info.st_size;
  row->sum = mz_sum64_end(b->parts, info.st_size);
  return MZ_OK;
}

mz_status_t mz_bulk_finish(mz_bulk_t **bulk, mz_file_row_t *row_out)
{
  mz_bulk_t *b = *bulk;
  mz_status_t st;
  int result;

  MZ_TRY_GOTO(st, next_set(b, b->opts.num_sets), done);
  if (row_out) MZ_TRY_GOTO(st, sum_file(b, row_out), done);
  MZ_REQUIRE_GOTO(fsync(b->file) == 0, st, done, MZ_ERR_IO, "%s: %s",
                  b->opts.path, strerror(errno));
  result = close(b->file);
  b->file = -1;
  MZ_REQUIRE_GOTO(result == 0, st, done, MZ_ERR_IO, "%s: %s", b->opts.path,
                  strerror(errno));
done:
  mz_bulk_abandon(bulk);
  return st;
}

void mz_bulk_abandon(mz_bulk_t **bulk)
{
  mz_bulk_t *b = bulk ? *bulk : NULL;

  if (!b) return;
  if (b->file >= 0) close(b->file);
  mz_free(b->buffer);
  mz_free(b->at);
  mz_free(b);
  *bulk = NULL;
}
