/* SPDX-License-Identifier: Apache-2.0 */
/* From checkpoint.h5 to the index: which file holds what. Nothing that the
 * files say is taken on trust. */
#include "checkpoint/ckpt_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "checkpoint/disk.h"
#include "checkpoint/sum64.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- checkpoint.h5 --- */

static mz_status_t check_seal(const char *path, const char *bytes, int64_t num)
{
  unsigned long long told;
  int64_t rest = num - MZ_USER_BLOCK_BYTES;
  uint64_t parts;

  MZ_REQUIRE(
      num > MZ_USER_BLOCK_BYTES &&
          sscanf(bytes, MZ_FORMAT_CHECKPOINT "\nsum64 %16llx\n", &told) == 1,
      MZ_ERR_DATA, "%s: not moezero's, or it was cut", path);
  parts = mz_sum64_part(bytes + MZ_USER_BLOCK_BYTES, 0, rest);
  MZ_REQUIRE(mz_sum64_end(parts, rest) == told, MZ_ERR_DATA,
             "%s: damaged: its checksum is not what was written", path);
  return MZ_OK;
}

static mz_status_t check_master(const char *path)
{
  int file = open(path, O_RDONLY | O_CLOEXEC);
  struct stat info;
  char *bytes = NULL;
  mz_status_t st;

  MZ_REQUIRE(file >= 0, MZ_ERR_IO, "%s: %s", path, strerror(errno));
  MZ_REQUIRE_GOTO(fstat(file, &info) == 0, st, done, MZ_ERR_IO, "%s: %s", path,
                  strerror(errno));
  /* A zero behind the bytes, for sscanf. */
  MZ_TRY_GOTO(st, mz_new(info.st_size + 1, "checkpoint.h5", &bytes), done);
  MZ_TRY_GOTO(st, mz_disk_pread(file, path, bytes, (size_t)info.st_size, 0),
              done);
  MZ_TRY_GOTO(st, check_seal(path, bytes, info.st_size), done);
done:
  close(file);
  mz_free(bytes);
  return st;
}

static mz_status_t check_format(const mz_h5_t *h5, const char *format)
{
  char found[64];
  int64_t version;

  mz_h5_get_text(h5, "/", "format", found, sizeof found);
  MZ_REQUIRE(strcmp(found, format) == 0, MZ_ERR_DATA,
             "%s: its format is \"%s\", not \"%s\"", h5->path, found, format);
  MZ_TRY(mz_h5_get_i64(h5, "version", &version));
  MZ_REQUIRE(version == MZ_FORMAT_VERSION, MZ_ERR_UNSUPPORTED,
             "%s: format version %" PRId64 ", this program reads %d", h5->path,
             version, MZ_FORMAT_VERSION);
  return MZ_OK;
}

static mz_status_t read_master(const mz_h5_t *h5, mz_ckpt_t *c)
{
  char seed[24];

  MZ_TRY(check_format(h5, MZ_FORMAT_CHECKPOINT));
  mz_h5_get_text(h5, "/", "save_id", c->save_id, sizeof c->save_id);
  mz_h5_get_text(h5, "/", "seed", seed, sizeof seed);
  c->state.seed = strtoull(seed, NULL, 10);
  MZ_TRY(mz_h5_get_i64(h5, "step", &c->state.step));
  MZ_TRY(mz_h5_get_i64(h5, "updates", &c->state.updates));
  MZ_TRY(mz_h5_get_i64(h5, "sampler_position", &c->state.sampler_position));
  MZ_TRY(mz_h5_read_text(h5, "config", &c->config));
  MZ_TRY(mz_h5_read_text(h5, "client_state", &c->client_state));
  if (mz_h5_has(h5, "tuning"))
    MZ_TRY(mz_h5_read_text(h5, "tuning", &c->tuning));
  else
    MZ_TRY(mz_string_copy("", &c->tuning));
  c->state.config = c->config;
  c->state.client_state = c->client_state;
  c->state.tuning = c->tuning;
  MZ_TRY(mz_h5_read_table(h5, "tensors", mz_h5_tensor_type(),
                          sizeof *c->tensors, &c->num_tensors,
                          (void **)&c->tensors));
  MZ_TRY(mz_h5_read_table(h5, "files", mz_h5_file_type(), sizeof *c->rows,
                          &c->num_files, (void **)&c->rows));
  return MZ_TRACE(mz_h5_read_table(h5, "sources", mz_h5_source_type(true),
                                   sizeof *c->sources, &c->num_sources,
                                   (void **)&c->sources));
}

/* Every file of the list is there with its size. A wrong size may be that of
 * another save's file, which says so itself. */
static mz_status_t check_files(mz_ckpt_t *c)
{
  char path[PATH_MAX];
  struct stat info;

  MZ_TRY(mz_new(c->num_files, "files", &c->files));
  for (int64_t i = 0; i < c->num_files; i++)
    c->files[i].file = -1;
  for (int32_t i = 0; i < c->num_files; i++) {
    mz_place_t places[MZ_CKPT_NUM_PARTS];

    MZ_REQUIRE(!strchr(c->rows[i].name, '/'), MZ_ERR_DATA,
               "%s: a file is listed as %s", c->path, c->rows[i].name);
    MZ_TRY(mz_disk_path(path, "%s/%s", c->path, c->rows[i].name));
    MZ_TRY(mz_string_copy(path, &c->files[i].path));
    MZ_REQUIRE(stat(path, &info) == 0, MZ_ERR_IO, "%s: missing: %s", path,
               strerror(errno));
    if (info.st_size == c->rows[i].bytes) continue;
    if (mz_index_read_rank_file(c, i, places) == MZ_ERR_DATA)
      return MZ_TRACE(MZ_ERR_DATA);
    MZ_FAIL(MZ_ERR_DATA,
            "%s: %s: it has %" PRId64 " bytes, %" PRId64 " were written", path,
            info.st_size < c->rows[i].bytes ? "truncated" : "changed",
            (int64_t)info.st_size, c->rows[i].bytes);
  }
  return MZ_OK;
}

mz_status_t mz_index_open(mz_ckpt_t *ckpt)
{
  char path[PATH_MAX];
  mz_h5_t h5;
  mz_status_t st;

  MZ_TRY(mz_disk_path(path, "%s/" MZ_MASTER_NAME, ckpt->path));
  MZ_TRY(check_master(path));
  mz_h5_enter();
  st = mz_h5_open(path, &h5);
  if (st == MZ_OK) st = read_master(&h5, ckpt);
  mz_h5_close(&h5);
  mz_h5_leave();
  MZ_TRY(st);
  for (int p = 0; p < MZ_CKPT_NUM_PARTS; p++)
    ckpt->has[p] = true;
  MZ_TRY(check_files(ckpt));
  return MZ_TRACE(mz_index_finish(ckpt));
}

/* --- rank files --- */

mz_status_t mz_index_place(const mz_h5_t *h5, const char *name,
                           mz_place_t *place_out)
{
  static const mz_dtype_t dtypes[] = {MZ_F32, MZ_F16, MZ_BF16};
  hid_t set = H5Dopen2(h5->file, name, H5P_DEFAULT);
  hid_t type = set < 0 ? -1 : H5Dget_type(set);
  hid_t space = set < 0 ? -1 : H5Dget_space(set);
  haddr_t at = set < 0 ? HADDR_UNDEF : H5Dget_offset(set);
  mz_place_t place = {.at = (int64_t)at, .dtype = MZ_I64};

  if (space >= 0) place.elements = H5Sget_simple_extent_npoints(space);
  for (int i = 0; i < 3 && type >= 0; i++) {
    hid_t wanted = mz_h5_value_type(dtypes[i]);
    if (H5Tequal(type, wanted) > 0) place.dtype = dtypes[i];
    H5Tclose(wanted);
  }
  if (space >= 0) H5Sclose(space);
  if (type >= 0) H5Tclose(type);
  if (set >= 0) H5Dclose(set);
  if (set < 0 || space < 0 || type < 0) return mz_h5_fail(h5->path, name);
  MZ_REQUIRE(place.dtype != MZ_I64, MZ_ERR_UNSUPPORTED,
             "%s: %s is neither fp32 nor fp16 nor bf16", h5->path, name);
  MZ_REQUIRE(at != HADDR_UNDEF || place.elements == 0, MZ_ERR_UNSUPPORTED,
             "%s: %s is not contiguous (chunked, compressed or virtual)",
             h5->path, name);
  *place_out = place;
  return MZ_OK;
}

static int64_t elements_in_file(const mz_ckpt_t *c, int32_t file)
{
  int64_t most = 0;

  for (int64_t i = 0; i < c->num_sources; i++)
    if (c->sources[i].file == file)
      most = mz_max_i64(most, c->sources[i].position + c->sources[i].length);
  return most;
}

static mz_status_t read_rank_file(const mz_h5_t *h5, const mz_ckpt_t *c,
                                  int32_t file, mz_place_t *places)
{
  char id[MZ_SAVE_ID_BYTES];
  int64_t step, rank;

  MZ_TRY(check_format(h5, MZ_FORMAT_RANK));
  mz_h5_get_text(h5, "/", "save_id", id, sizeof id);
  MZ_TRY(mz_h5_get_i64(h5, "step", &step));
  MZ_TRY(mz_h5_get_i64(h5, "rank", &rank));
  MZ_REQUIRE(strcmp(id, c->save_id) == 0, MZ_ERR_DATA,
             "%s: it is of another save: step %" PRId64
             ", save %s; the checkpoint is step %" PRId64 ", save %s",
             h5->path, step, id, c->state.step, c->save_id);
  MZ_REQUIRE(rank == file, MZ_ERR_DATA,
             "%s: it is the file of rank %" PRId64 ", not of %" PRId32,
             h5->path, rank, file);
  for (int p = 0; p < MZ_CKPT_NUM_PARTS; p++) {
    places[p] = (mz_place_t){.at = -1};
    MZ_TRY(
        mz_index_place(h5, mz_ckpt_part_name((mz_ckpt_part_t)p), &places[p]));
    MZ_REQUIRE(places[p].dtype == MZ_F32 &&
                   places[p].elements == elements_in_file(c, file),
               MZ_ERR_DATA, "%s: %s does not hold %" PRId64 " fp32 elements",
               h5->path, mz_ckpt_part_name((mz_ckpt_part_t)p),
               elements_in_file(c, file));
  }
  return MZ_OK;
}

mz_status_t mz_index_read_rank_file(const mz_ckpt_t *ckpt, int32_t file,
                                    mz_place_t places[MZ_CKPT_NUM_PARTS])
{
  mz_h5_t h5;
  mz_status_t st;

  mz_h5_enter();
  st = mz_h5_open(ckpt->files[file].path, &h5);
  if (st == MZ_OK) st = read_rank_file(&h5, ckpt, file, places);
  mz_h5_close(&h5);
  mz_h5_leave();
  return MZ_TRACE(st);
}

/* --- the index --- */

static mz_status_t check_tensor(const mz_ckpt_t *c, const mz_ckpt_tensor_t *t)
{
  int64_t elements = 1;
  bool good = t->ndim >= 1 && t->ndim <= 4 &&
              memchr(t->name, '\0', sizeof t->name) != NULL;

  for (int32_t d = 0; good && d < t->ndim; d++)
    good = t->shape[d] >= 1 &&
           mz_mul_i64(elements, t->shape[d], &elements) == MZ_OK;
  MZ_REQUIRE(good, MZ_ERR_DATA, "%s: a tensor's name or shape is not one",
             c->path);
  return MZ_OK;
}

/* Sources of one tensor, in order: each begins where the last one ended. */
static mz_status_t check_sources(const mz_ckpt_t *c, int32_t tensor,
                                 int64_t *next)
{
  const mz_ckpt_tensor_t *t = &c->tensors[tensor];
  int64_t at = 0;

  for (; *next < c->num_sources && c->sources[*next].tensor == tensor;
       ++*next) {
    const mz_source_row_t *s = &c->sources[*next];

    MZ_REQUIRE(s->file >= 0 && s->file < c->num_files && s->position >= 0 &&
                   s->length >= 1 && s->length <= mz_ckpt_elements(t) - at &&
                   s->offset == at,
               MZ_ERR_DATA,
               "%s: %s: elements from %" PRId64 " on lie in no file or in two",
               c->path, t->name, at);
    at += s->length;
  }
  MZ_REQUIRE(at == mz_ckpt_elements(t), MZ_ERR_DATA,
             "%s: %s: elements from %" PRId64 " on of %" PRId64
             " lie in no file",
             c->path, t->name, at, mz_ckpt_elements(t));
  return MZ_OK;
}

static int by_name(const void *a, const void *b, void *ctx)
{
  const mz_ckpt_tensor_t *tensors = ctx;

  return strcmp(tensors[*(const int32_t *)a].name,
                tensors[*(const int32_t *)b].name);
}

mz_status_t mz_index_finish(mz_ckpt_t *ckpt)
{
  mz_ckpt_t *c = ckpt;
  int num;
  int64_t next = 0;

  MZ_TRY(mz_int_from_i64(c->num_tensors, &num));
  MZ_TRY(mz_new(c->num_tensors + 1, "index", &c->first_source));
  MZ_TRY(mz_new(c->num_tensors, "names", &c->by_name));
  for (int32_t i = 0; i < num; i++) {
    MZ_TRY(check_tensor(c, &c->tensors[i]));
    c->by_name[i] = i;
    c->first_source[i] = next;
    MZ_TRY(check_sources(c, i, &next));
  }
  c->first_source[num] = next;
  MZ_REQUIRE(next == c->num_sources, MZ_ERR_DATA,
             "%s: its table of sources is not in order", c->path);
  if (num > 1)
    qsort_r(c->by_name, (size_t)num, sizeof *c->by_name, by_name, c->tensors);
  return MZ_OK;
}
