/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint.h5. It is small, so HDF5 builds it in memory: a full disk meets
 * our own write, not HDF5's. */
#include "checkpoint/rank_file.h"

#include "base/alloc.h"
#include "base/check.h"
#include "checkpoint/disk.h"
#include "checkpoint/sum64.h"

#include <math.h>
#include <stdio.h>

typedef struct master {
  mz_h5_t h5;
  const mz_save_head_t *head;
  const mz_ckpt_state_t *state;
  const mz_file_row_t *files;
  const mz_source_row_t *sources;
  int64_t num_sources;
  int64_t *elements; /* [ranks] of each rank file's datasets */
  int64_t hidden;    /* tensors in too many files to be shown */
} master_t;

static mz_status_t write_state(const master_t *m)
{
  const mz_ckpt_state_t *s = m->state;
  char seed[24];

  snprintf(seed, sizeof seed, "%" PRIu64, s->seed);
  MZ_TRY(mz_h5_put_text(&m->h5, "format", MZ_FORMAT_CHECKPOINT));
  MZ_TRY(mz_h5_put_i64(&m->h5, "version", MZ_FORMAT_VERSION));
  MZ_TRY(mz_h5_put_text(&m->h5, "save_id", m->head->save_id));
  MZ_TRY(mz_h5_put_i64(&m->h5, "step", s->step));
  MZ_TRY(mz_h5_put_i64(&m->h5, "updates", s->updates));
  MZ_TRY(mz_h5_put_i64(&m->h5, "sampler_position", s->sampler_position));
  MZ_TRY(mz_h5_put_text(&m->h5, "seed", seed));
  MZ_TRY(mz_h5_put_i64(&m->h5, "ranks", m->head->ranks));
  MZ_TRY(mz_h5_write_text(&m->h5, "config", s->config));
  MZ_TRY(mz_h5_write_text(&m->h5, "client_state",
                          s->client_state ? s->client_state : ""));
  MZ_TRY(mz_h5_write_text(&m->h5, "tuning", s->tuning ? s->tuning : ""));
  MZ_TRY(mz_h5_write_table(&m->h5, "tensors", mz_h5_tensor_type(),
                           m->head->num_tensors, m->head->tensors));
  MZ_TRY(mz_h5_write_table(&m->h5, "files", mz_h5_file_type(), m->head->ranks,
                           m->files));
  return MZ_TRACE(mz_h5_write_table(&m->h5, "sources", mz_h5_source_type(true),
                                    m->num_sources, m->sources));
}

/* The largest box of a tensor that starts at flat element @p at, is contiguous
 * there and ends by @p end. Returns its elements. */
static int64_t next_box(const mz_ckpt_tensor_t *t, int64_t at, int64_t end,
                        hsize_t start[4], hsize_t count[4])
{
  int64_t stride[4], rows;
  int32_t d, cut = t->ndim - 1;

  stride[cut] = 1;
  for (d = cut; d > 0; d--)
    stride[d - 1] = stride[d] * t->shape[d];
  for (d = t->ndim - 1; d >= 0; d--)
    if (at % stride[d] == 0 && end - at >= stride[d]) cut = d;
  for (d = 0; d < t->ndim; d++) {
    start[d] = (hsize_t)(at / stride[d] % t->shape[d]);
    count[d] = d < cut ? 1 : (hsize_t)t->shape[d];
  }
  rows =
      mz_min_i64((end - at) / stride[cut], t->shape[cut] - (int64_t)start[cut]);
  count[cut] = (hsize_t)rows;
  return rows * stride[cut];
}

/* Maps one source: its range is a box, or a few. */
static herr_t map_source(const master_t *m, const mz_source_row_t *s,
                         hid_t space, hid_t layout)
{
  const mz_ckpt_tensor_t *t = &m->head->tensors[s->tensor];
  hsize_t all = (hsize_t)m->elements[s->file], start[4], count[4], from, num;
  hid_t file_space = H5Screate_simple(1, &all, NULL);
  int64_t end = s->offset + s->length, part;
  herr_t result = file_space < 0 ? -1 : 0;

  for (int64_t at = s->offset; at < end && result >= 0; at += part) {
    part = next_box(t, at, end, start, count);
    from = (hsize_t)(s->position + at - s->offset);
    num = (hsize_t)part;
    result = H5Sselect_hyperslab(file_space, H5S_SELECT_SET, &from, NULL, &num,
                                 NULL);
    if (result >= 0)
      result =
          H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, count, NULL);
    if (result >= 0)
      result = H5Pset_virtual(layout, space, m->files[s->file].name, "weights",
                              file_space);
  }
  if (file_space >= 0) H5Sclose(file_space);
  return result;
}

/* A missing file reads as NaN, not as zeros. */
static mz_status_t show_tensor(const master_t *m, hid_t group, hid_t links,
                               const mz_source_row_t *sources, int64_t num)
{
  const mz_ckpt_tensor_t *t = &m->head->tensors[sources->tensor];
  const float nothing = NAN;
  hsize_t shape[4];
  hid_t layout = H5Pcreate(H5P_DATASET_CREATE), space, made = -1;
  herr_t result;

  for (int32_t d = 0; d < t->ndim; d++)
    shape[d] = (hsize_t)t->shape[d];
  space = H5Screate_simple(t->ndim, shape, NULL);
  result = layout < 0 || space < 0
               ? -1
               : H5Pset_fill_value(layout, H5T_NATIVE_FLOAT, &nothing);
  for (int64_t i = 0; i < num && result >= 0; i++)
    result = map_source(m, &sources[i], space, layout);
  if (result >= 0) H5Sselect_all(space);
  if (result >= 0)
    made = H5Dcreate2(group, t->name, H5T_IEEE_F32LE, space, links, layout,
                      H5P_DEFAULT);
  result = made < 0 ? -1 : H5Dclose(made);
  if (space >= 0) H5Sclose(space);
  if (layout >= 0) H5Pclose(layout);
  return result < 0 ? mz_h5_fail(m->h5.path, t->name) : MZ_OK;
}

static mz_status_t show_tensors(master_t *m, hid_t group, hid_t links)
{
  for (int64_t first = 0, next; first < m->num_sources; first = next) {
    next = first;
    while (next < m->num_sources &&
           m->sources[next].tensor == m->sources[first].tensor)
      next++;
    if (next - first > MZ_MAX_VIRTUAL_SOURCES)
      m->hidden++;
    else
      MZ_TRY(show_tensor(m, group, links, &m->sources[first], next - first));
  }
  return MZ_OK;
}

static mz_status_t write_model(master_t *m)
{
  hid_t group =
      H5Gcreate2(m->h5.file, "model", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  hid_t links = H5Pcreate(H5P_LINK_CREATE);
  char note[160];
  mz_status_t st;

  if (group < 0 || H5Pset_create_intermediate_group(links, 1) < 0)
    st = mz_h5_fail(m->h5.path, "model");
  else
    st = show_tensors(m, group, links);
  if (links >= 0) H5Pclose(links);
  if (group >= 0) H5Gclose(group);
  if (st != MZ_OK || m->hidden == 0) return MZ_TRACE(st);
  snprintf(note, sizeof note,
           "%" PRId64 " tensors lie in more than %d files each and are not "
           "shown here: h5-gather writes them into one file",
           m->hidden, MZ_MAX_VIRTUAL_SOURCES);
  return MZ_TRACE(mz_h5_put_object_text(&m->h5, "model", "note", note));
}

/* The memory driver with nothing behind it. */
static hid_t create_in_memory(const char *path)
{
  hid_t access = mz_h5_access(), file = -1;

  if (access >= 0 && H5Pset_fapl_core(access, 1 << 20, 0) >= 0)
    file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, access);
  if (access >= 0) H5Pclose(access);
  return file;
}

/* The file with room for the user block in front: an image has none, and HDF5
 * finds the rest wherever it begins at 512 bytes. */
static mz_status_t build(master_t *m, char **image_out, size_t *bytes_out)
{
  ssize_t bytes = -1;
  char *image = NULL;
  mz_status_t st;

  m->h5.file = create_in_memory(m->h5.path);
  if (m->h5.file < 0) return mz_h5_fail(m->h5.path, "cannot be built");
  st = write_state(m);
  if (st == MZ_OK) st = write_model(m);
  if (st == MZ_OK) {
    H5Fflush(m->h5.file, H5F_SCOPE_GLOBAL);
    bytes = H5Fget_file_image(m->h5.file, NULL, 0);
    st = bytes <= 0 ? mz_h5_fail(m->h5.path, "has no image")
                    : mz_new(MZ_USER_BLOCK_BYTES + (int64_t)bytes,
                             "image of checkpoint.h5", &image);
  }
  if (st == MZ_OK && H5Fget_file_image(m->h5.file, image + MZ_USER_BLOCK_BYTES,
                                       (size_t)bytes) != bytes)
    st = mz_h5_fail(m->h5.path, "has no image");
  mz_h5_close(&m->h5);
  if (st != MZ_OK) {
    mz_free(image);
    return st;
  }
  *image_out = image;
  *bytes_out = MZ_USER_BLOCK_BYTES + (size_t)bytes;
  return MZ_OK;
}

static void seal(char *image, size_t bytes)
{
  int64_t rest = (int64_t)bytes - MZ_USER_BLOCK_BYTES;
  uint64_t parts = mz_sum64_part(image + MZ_USER_BLOCK_BYTES, 0, rest);

  snprintf(image, MZ_USER_BLOCK_BYTES,
           MZ_FORMAT_CHECKPOINT "\nsum64 %016" PRIx64 "\n",
           mz_sum64_end(parts, rest));
}

static mz_status_t count_elements(master_t *m)
{
  MZ_TRY(mz_new(m->head->ranks, "elements of files", &m->elements));
  for (int64_t i = 0; i < m->num_sources; i++)
    m->elements[m->sources[i].file] += m->sources[i].length;
  return MZ_OK;
}

mz_status_t mz_master_write(const char *folder, const mz_save_head_t *head,
                            const mz_ckpt_state_t *state,
                            const mz_file_row_t *files,
                            const mz_source_row_t *sources, int64_t num_sources)
{
  char path[PATH_MAX], part[PATH_MAX], *image = NULL;
  master_t m = {.head = head,
                .state = state,
                .files = files,
                .sources = sources,
                .num_sources = num_sources};
  size_t bytes = 0;
  mz_status_t st;

  MZ_TRY(mz_disk_path(path, "%s/" MZ_MASTER_NAME, folder));
  MZ_TRY(mz_disk_path(part, "%s.part", path));
  m.h5.path = path;
  MZ_TRY_GOTO(st, count_elements(&m), done);
  mz_h5_enter();
  st = build(&m, &image, &bytes);
  mz_h5_leave();
  if (st != MZ_OK) goto done;
  seal(image, bytes);
  MZ_TRY_GOTO(st, mz_disk_write(part, image, bytes), done);
  MZ_TRY_GOTO(st, mz_disk_rename(part, path), done);
  MZ_TRY_GOTO(st, mz_disk_sync_folder(folder), done);
done:
  mz_free(image);
  mz_free(m.elements);
  return st;
}
