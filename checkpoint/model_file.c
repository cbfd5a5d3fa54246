/* SPDX-License-Identifier: Apache-2.0 */
/* A one-file model: every dataset outside of exp_avg/ and exp_avg_sq/ is a
 * tensor of its name. */
#include "checkpoint/ckpt_impl.h"

#include "base/alloc.h"
#include "base/check.h"

#include <stdio.h>
#include <string.h>

typedef struct walk {
  const mz_h5_t *h5;
  mz_ckpt_t *ckpt;
  int64_t cap_tensors, cap_places;
  mz_status_t st;
} walk_t;

static bool is_moment(const char *name)
{
  return strncmp(name, "exp_avg/", 8) == 0 ||
         strncmp(name, "exp_avg_sq/", 11) == 0;
}

static mz_status_t read_shape(const mz_h5_t *h5, const char *name,
                              mz_ckpt_tensor_t *t)
{
  hsize_t shape[H5S_MAX_RANK] = {0};
  hid_t set = H5Dopen2(h5->file, name, H5P_DEFAULT);
  hid_t space = set < 0 ? -1 : H5Dget_space(set);
  int ndim = space < 0 ? -1 : H5Sget_simple_extent_dims(space, shape, NULL);

  if (space >= 0) H5Sclose(space);
  if (set >= 0) H5Dclose(set);
  if (ndim < 0) return mz_h5_fail(h5->path, name);
  MZ_REQUIRE(ndim >= 1 && ndim <= 4 && strlen(name) < sizeof t->name,
             MZ_ERR_DATA, "%s: %s has %d dimensions, need 1 to 4", h5->path,
             name, ndim);
  t->ndim = ndim;
  for (int d = 0; d < ndim; d++)
    t->shape[d] = (int64_t)shape[d];
  snprintf(t->name, sizeof t->name, "%s", name);
  return MZ_OK;
}

/* The moments of a tensor, where both are there with its size. */
static mz_status_t find_moments(const mz_h5_t *h5, const char *name,
                                mz_place_t *places)
{
  char moment[2 * MZ_NAME_MAX];

  for (int p = MZ_CKPT_EXP_AVG; p < MZ_CKPT_NUM_PARTS; p++) {
    const char *part = mz_ckpt_part_name((mz_ckpt_part_t)p);

    places[p] = (mz_place_t){.at = -1};
    snprintf(moment, sizeof moment, "%s/%s", part, name);
    if (H5Lexists(h5->file, part, H5P_DEFAULT) <= 0 ||
        H5Lexists(h5->file, moment, H5P_DEFAULT) <= 0)
      continue;
    MZ_TRY(mz_index_place(h5, moment, &places[p]));
    MZ_REQUIRE(places[p].elements == places[0].elements, MZ_ERR_DATA,
               "%s: %s has another size than %s", h5->path, moment, name);
  }
  return MZ_OK;
}

static mz_status_t add_tensor(walk_t *w, const char *name)
{
  mz_ckpt_t *c = w->ckpt;
  int64_t n = c->num_tensors;
  mz_place_t *places;

  MZ_TRY(mz_grow(&c->tensors, &w->cap_tensors, n + 1, "tensors"));
  MZ_TRY(mz_grow(&c->places, &w->cap_places, (n + 1) * MZ_CKPT_NUM_PARTS,
                 "places"));
  places = c->places + n * MZ_CKPT_NUM_PARTS;
  MZ_TRY(read_shape(w->h5, name, &c->tensors[n]));
  MZ_TRY(mz_index_place(w->h5, name, &places[0]));
  MZ_TRY(find_moments(w->h5, name, places));
  c->num_tensors++;
  return MZ_OK;
}

static herr_t visit(hid_t object, const char *name, const H5O_info_t *info,
                    void *ctx)
{
  walk_t *w = ctx;

  (void)object;
  if (info->type != H5O_TYPE_DATASET || is_moment(name)) return 0;
  w->st = add_tensor(w, name);
  return w->st == MZ_OK ? 0 : 1;
}

static mz_status_t read_model(const mz_h5_t *h5, mz_ckpt_t *c)
{
  walk_t w = {.h5 = h5, .ckpt = c};

  if (H5Ovisit2(h5->file, H5_INDEX_NAME, H5_ITER_INC, visit, &w,
                H5O_INFO_BASIC) < 0 &&
      w.st == MZ_OK)
    return mz_h5_fail(h5->path, "cannot be listed");
  MZ_TRY(w.st);
  MZ_REQUIRE(c->num_tensors > 0, MZ_ERR_DATA, "%s: no dataset in it", h5->path);
  return MZ_OK;
}

/* The whole tensor is one source, which begins at its place. */
static mz_status_t list_sources(mz_ckpt_t *c)
{
  c->num_sources = c->num_tensors;
  c->num_files = 1;
  MZ_TRY(mz_new(c->num_sources, "sources", &c->sources));
  MZ_TRY(mz_new(1, "files", &c->files));
  c->files[0].file = -1;
  c->files[0].known = true;
  MZ_TRY(mz_string_copy(c->path, &c->files[0].path));
  for (int p = 0; p < MZ_CKPT_NUM_PARTS; p++)
    c->has[p] = true;
  for (int32_t i = 0; i < c->num_tensors; i++) {
    c->sources[i] =
        (mz_source_row_t){0, i, 0, mz_ckpt_elements(&c->tensors[i]), 0};
    for (int p = 0; p < MZ_CKPT_NUM_PARTS; p++)
      if (c->places[i * MZ_CKPT_NUM_PARTS + p].at < 0) c->has[p] = false;
  }
  return MZ_OK;
}

mz_status_t mz_model_file_open(mz_ckpt_t *ckpt)
{
  mz_h5_t h5;
  mz_status_t st;

  ckpt->one_file = true;
  mz_h5_enter();
  st = mz_h5_open(ckpt->path, &h5);
  if (st == MZ_OK) st = read_model(&h5, ckpt);
  mz_h5_close(&h5);
  mz_h5_leave();
  MZ_TRY(st);
  MZ_TRY(list_sources(ckpt));
  return MZ_TRACE(mz_index_finish(ckpt));
}
