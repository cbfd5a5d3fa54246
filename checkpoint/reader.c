/* SPDX-License-Identifier: Apache-2.0 */
/* The slice reader: opens, finds, reads, verifies. */
#include "checkpoint/ckpt_impl.h"

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

enum { MAX_OPEN = 8, BUFFER_BYTES = 1 << 20, HALF_ELEMENTS = 1 << 12 };

int64_t mz_ckpt_elements(const mz_ckpt_tensor_t *tensor)
{
  int64_t n = 1;

  for (int32_t d = 0; d < tensor->ndim; d++)
    n *= tensor->shape[d];
  return n;
}

/* --- life --- */

/* The folder that `latest` names. */
static mz_status_t follow_latest(const char *dir, char path_out[PATH_MAX])
{
  char latest[PATH_MAX], name[256] = "";
  int file;
  ssize_t bytes;

  MZ_TRY(mz_disk_path(latest, "%s/" MZ_LATEST_NAME, dir));
  file = open(latest, O_RDONLY | O_CLOEXEC);
  MZ_REQUIRE(file >= 0 || errno != ENOENT, MZ_ERR_DATA,
             "%s: no checkpoint: neither " MZ_MASTER_NAME " nor " MZ_LATEST_NAME
             " is in it",
             dir);
  MZ_REQUIRE(file >= 0, MZ_ERR_IO, "%s: %s", latest, strerror(errno));
  bytes = read(file, name, sizeof name - 1);
  close(file);
  name[bytes < 0 ? 0 : bytes] = '\0';
  name[strcspn(name, "\r\n")] = '\0';
  MZ_REQUIRE(name[0] && !strchr(name, '/'), MZ_ERR_DATA,
             "%s: it does not name a folder beside it", latest);
  return MZ_TRACE(mz_disk_path(path_out, "%s/%s", dir, name));
}

/* What a path means: a folder of a step, or a one-file model. */
static mz_status_t resolve(const char *path, char path_out[PATH_MAX],
                           bool *one_file_out)
{
  const char *base = strrchr(path, '/');
  struct stat info;
  char inside[PATH_MAX];

  MZ_REQUIRE(stat(path, &info) == 0, MZ_ERR_IO, "%s: %s", path,
             strerror(errno));
  *one_file_out = !S_ISDIR(info.st_mode);
  if (*one_file_out) {
    base = base ? base + 1 : path;
    MZ_REQUIRE(strcmp(base, MZ_MASTER_NAME) != 0, MZ_ERR_ARG,
               "%s: name the folder, not the file in it", path);
    return MZ_TRACE(mz_disk_path(path_out, "%s", path));
  }
  MZ_TRY(mz_disk_path(inside, "%s/" MZ_MASTER_NAME, path));
  if (mz_disk_exists(inside))
    return MZ_TRACE(mz_disk_path(path_out, "%s", path));
  return MZ_TRACE(follow_latest(path, path_out));
}

mz_status_t mz_ckpt_open(const char *path, mz_ckpt_t **ckpt_out)
{
  mz_ckpt_t *c = NULL;
  char found[PATH_MAX];
  bool one_file = false;
  mz_status_t st;

  *ckpt_out = NULL;
  MZ_TRY_GOTO(st, mz_new(1, "checkpoint", &c), done);
  MZ_TRY_GOTO(st, resolve(path, found, &one_file), done);
  MZ_TRY_GOTO(st, mz_string_copy(found, &c->path), done);
  MZ_TRY_GOTO(st, one_file ? mz_model_file_open(c) : mz_index_open(c), done);
  *ckpt_out = c;
  c = NULL;
done:
  mz_ckpt_close(&c);
  return st;
}

void mz_ckpt_close(mz_ckpt_t **ckpt)
{
  mz_ckpt_t *c = ckpt ? *ckpt : NULL;

  if (!c) return;
  for (int64_t i = 0; c->files && i < c->num_files; i++) {
    if (c->files[i].file >= 0) close(c->files[i].file);
    mz_free(c->files[i].path);
  }
  mz_free(c->files);
  mz_free(c->rows);
  mz_free(c->sources);
  mz_free(c->first_source);
  mz_free(c->by_name);
  mz_free(c->places);
  mz_free(c->tensors);
  mz_free(c->config);
  mz_free(c->client_state);
  mz_free(c->tuning);
  mz_free(c->path);
  mz_free(c);
  *ckpt = NULL;
}

const char *mz_ckpt_path(const mz_ckpt_t *ckpt) { return ckpt->path; }

const mz_ckpt_state_t *mz_ckpt_state(const mz_ckpt_t *ckpt)
{
  return ckpt->one_file ? NULL : &ckpt->state;
}

bool mz_ckpt_has(const mz_ckpt_t *ckpt, mz_ckpt_part_t part)
{
  return ckpt->has[part];
}

int32_t mz_ckpt_num_tensors(const mz_ckpt_t *ckpt)
{
  return (int32_t)ckpt->num_tensors;
}

const mz_ckpt_tensor_t *mz_ckpt_tensor(const mz_ckpt_t *ckpt, int32_t tensor)
{
  return &ckpt->tensors[tensor];
}

int32_t mz_ckpt_num_files(const mz_ckpt_t *ckpt)
{
  return (int32_t)ckpt->num_files;
}

int64_t mz_ckpt_bytes(const mz_ckpt_t *ckpt)
{
  struct stat info;
  int64_t bytes = 0;

  if (ckpt->one_file) return stat(ckpt->path, &info) == 0 ? info.st_size : 0;
  for (int64_t i = 0; i < ckpt->num_files; i++)
    bytes += ckpt->rows[i].bytes;
  return bytes;
}

int32_t mz_ckpt_find(const mz_ckpt_t *ckpt, const char *name)
{
  int32_t low = 0, high = (int32_t)ckpt->num_tensors;

  while (low < high) {
    int32_t middle = low + (high - low) / 2, tensor = ckpt->by_name[middle];
    int order = strcmp(name, ckpt->tensors[tensor].name);

    if (order == 0) return tensor;
    if (order < 0)
      high = middle;
    else
      low = middle + 1;
  }
  return -1;
}

/* --- files: few open at once --- */

static bool close_oldest(mz_ckpt_t *c)
{
  mz_ckpt_file_t *oldest = NULL;

  for (int64_t i = 0; i < c->num_files; i++)
    if (c->files[i].file >= 0 && (!oldest || c->files[i].used < oldest->used))
      oldest = &c->files[i];
  if (!oldest) return false;
  close(oldest->file);
  oldest->file = -1;
  c->num_open--;
  return true;
}

/* Where descriptors are short, older files of ours are closed. */
static int open_or_make_room(mz_ckpt_t *c, const char *path)
{
  int file;

  if (c->num_open >= MAX_OPEN) close_oldest(c);
  do
    file = open(path, O_RDONLY | O_CLOEXEC);
  while (file < 0 && (errno == EMFILE || errno == ENFILE) && close_oldest(c));
  return file;
}

/* The file, open. The first time it is asked what it is: HDF5 takes a
 * descriptor for that, so ours comes after. */
static mz_status_t need_file(mz_ckpt_t *c, int32_t file)
{
  mz_ckpt_file_t *f = &c->files[file];
  int probe;

  f->used = ++c->clock;
  if (f->file >= 0) return MZ_OK;
  if (!f->known) {
    probe = open_or_make_room(c, f->path);
    MZ_REQUIRE(probe >= 0, MZ_ERR_IO, "%s: %s", f->path, strerror(errno));
    close(probe);
    MZ_TRY(mz_index_read_rank_file(c, file, f->places));
    f->known = true;
  }
  f->file = open_or_make_room(c, f->path);
  MZ_REQUIRE(f->file >= 0, MZ_ERR_IO, "%s: %s", f->path, strerror(errno));
  c->num_open++;
  return MZ_OK;
}

/* --- slices --- */

static mz_status_t read_half(const mz_ckpt_file_t *f, const mz_place_t *place,
                             int64_t first, int64_t num, float *values)
{
  uint16_t half[HALF_ELEMENTS];

  for (int64_t part; num > 0; first += part, values += part, num -= part) {
    part = mz_min_i64(num, HALF_ELEMENTS);
    MZ_TRY(mz_disk_pread(f->file, f->path, half, (size_t)part * sizeof *half,
                         place->at + first * (int64_t)sizeof *half));
    mz_half_to_f32(place->dtype, part, half, values);
  }
  return MZ_OK;
}

static mz_status_t read_source(mz_ckpt_t *c, const mz_source_row_t *s,
                               mz_ckpt_part_t part, int64_t first, int64_t num,
                               float *values)
{
  const mz_ckpt_file_t *f = &c->files[s->file];
  const mz_place_t *place;

  MZ_TRY(need_file(c, s->file));
  place = c->one_file ? &c->places[s->tensor * MZ_CKPT_NUM_PARTS + (int)part]
                      : &f->places[part];
  first += s->position;
  if (place->dtype != MZ_F32)
    return MZ_TRACE(read_half(f, place, first, num, values));
  return MZ_TRACE(mz_disk_pread(f->file, f->path, values,
                                (size_t)num * sizeof *values,
                                place->at + first * (int64_t)sizeof *values));
}

/* The source of a tensor that holds element @p at. */
static int64_t find_source(const mz_ckpt_t *c, int32_t tensor, int64_t at)
{
  int64_t low = c->first_source[tensor], high = c->first_source[tensor + 1];

  while (high - low > 1) {
    int64_t middle = low + (high - low) / 2;
    if (c->sources[middle].offset <= at)
      low = middle;
    else
      high = middle;
  }
  return low;
}

mz_status_t mz_ckpt_read(mz_ckpt_t *ckpt, int32_t tensor, mz_ckpt_part_t part,
                         int64_t offset, int64_t length, float *values_out)
{
  mz_ckpt_t *c = ckpt;
  int64_t at = offset, end, some;

  MZ_REQUIRE(tensor >= 0 && tensor < c->num_tensors, MZ_ERR_ARG,
             "%s: no tensor %" PRId32, c->path, tensor);
  MZ_REQUIRE(offset >= 0 && length >= 0 &&
                 length <= mz_ckpt_elements(&c->tensors[tensor]) - offset,
             MZ_ERR_ARG, "%s: elements %" PRId64 " + %" PRId64 " of %s",
             c->path, offset, length, c->tensors[tensor].name);
  MZ_REQUIRE(c->has[part], MZ_ERR_ARG, "%s: it holds no %s", c->path,
             mz_ckpt_part_name(part));
  end = offset + length;
  for (int64_t i = find_source(c, tensor, at); at < end; i++, at += some) {
    const mz_source_row_t *s = &c->sources[i];

    some = mz_min_i64(end, s->offset + s->length) - at;
    MZ_TRY(read_source(c, s, part, at - s->offset, some,
                       values_out + (at - offset)));
  }
  return MZ_OK;
}

/* --- verification --- */

static mz_status_t verify_file(mz_ckpt_t *c, int32_t file, char *buffer)
{
  const mz_file_row_t *row = &c->rows[file];
  const mz_ckpt_file_t *f = &c->files[file];
  uint64_t parts = 0;

  MZ_TRY(need_file(c, file));
  for (int64_t at = 0, part; at < row->bytes; at += part) {
    part = mz_min_i64(row->bytes - at, BUFFER_BYTES);
    MZ_TRY(mz_disk_pread(f->file, f->path, buffer, (size_t)part, at));
    parts += mz_sum64_part(buffer, at, part);
  }
  MZ_REQUIRE(mz_sum64_end(parts, row->bytes) == row->sum, MZ_ERR_DATA,
             "%s: damaged: its checksum is not what was written", f->path);
  return MZ_OK;
}

mz_status_t mz_ckpt_verify(mz_ckpt_t *ckpt, int32_t first, int32_t stride)
{
  char *buffer = NULL;
  mz_status_t st = MZ_OK;

  MZ_REQUIRE(first >= 0 && stride >= 1, MZ_ERR_ARG,
             "every %" PRId32 "th file from %" PRId32 " on", stride, first);
  if (ckpt->one_file) return MZ_OK;
  MZ_TRY(mz_new(BUFFER_BYTES, "read buffer", &buffer));
  for (int64_t i = first; i < ckpt->num_files && st == MZ_OK; i += stride)
    st = verify_file(ckpt, (int32_t)i, buffer);
  mz_free(buffer);
  return MZ_TRACE(st);
}
