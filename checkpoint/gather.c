/* SPDX-License-Identifier: Apache-2.0 */
/* From slices to the one-file model. */
#include "checkpoint/bulk.h"

#include "base/alloc.h"
#include "base/check.h"
#include "checkpoint/disk.h"

#include <stdio.h>
#include <unistd.h>

enum { CHUNK_ELEMENTS = 1 << 20 };

typedef struct gather {
  mz_ckpt_t *ckpt;
  mz_bulk_set_t *sets; /* [parts, num_tensors] */
  int32_t num_tensors;
  int parts;
  float *chunk;
} gather_t;

static mz_status_t describe(const mz_h5_t *h5, const void *ctx)
{
  const gather_t *g = ctx;
  const mz_ckpt_state_t *state = mz_ckpt_state(g->ckpt);

  MZ_TRY(mz_h5_put_text(h5, "format", MZ_FORMAT_MODEL));
  MZ_TRY(mz_h5_put_i64(h5, "version", MZ_FORMAT_VERSION));
  if (state) MZ_TRY(mz_h5_put_i64(h5, "step", state->step));
  return MZ_OK;
}

static mz_status_t list_sets(gather_t *g, const mz_ckpt_gather_opts_t *opts)
{
  int64_t num;

  MZ_TRY(mz_mul_i64(g->parts, g->num_tensors, &num));
  MZ_TRY(mz_new(num, "datasets", &g->sets));
  for (int p = 0; p < g->parts; p++)
    for (int32_t i = 0; i < g->num_tensors; i++) {
      mz_bulk_set_t *set = &g->sets[p * (int64_t)g->num_tensors + i];
      const mz_ckpt_tensor_t *t = mz_ckpt_tensor(g->ckpt, i);

      set->ndim = t->ndim;
      for (int32_t d = 0; d < t->ndim; d++)
        set->shape[d] = t->shape[d];
      set->dtype = p == MZ_CKPT_WEIGHTS ? opts->dtype : MZ_F32;
      snprintf(set->name, sizeof set->name, "%s%s%s",
               p ? mz_ckpt_part_name((mz_ckpt_part_t)p) : "", p ? "/" : "",
               t->name);
    }
  return MZ_OK;
}

static mz_status_t copy_tensor(gather_t *g, mz_bulk_t *bulk, int part,
                               int32_t tensor)
{
  int64_t end = mz_ckpt_elements(mz_ckpt_tensor(g->ckpt, tensor));

  for (int64_t at = 0, some; at < end; at += some) {
    some = mz_min_i64(end - at, CHUNK_ELEMENTS);
    MZ_TRY(mz_ckpt_read(g->ckpt, tensor, (mz_ckpt_part_t)part, at, some,
                        g->chunk));
    MZ_TRY(
        mz_bulk_append(bulk, part * g->num_tensors + tensor, g->chunk, some));
  }
  return MZ_OK;
}

static mz_status_t write_file(gather_t *g, const char *path)
{
  mz_bulk_opts_t opts = {.path = path,
                         .sets = g->sets,
                         .num_sets = g->parts * g->num_tensors,
                         .describe = describe,
                         .ctx = g};
  mz_bulk_t *bulk = NULL;
  mz_status_t st;

  MZ_TRY_GOTO(st, mz_bulk_reserve(&opts), done);
  MZ_TRY_GOTO(st, mz_bulk_create(&opts, &bulk), done);
  for (int p = 0; p < g->parts; p++)
    for (int32_t i = 0; i < g->num_tensors; i++)
      MZ_TRY_GOTO(st, copy_tensor(g, bulk, p, i), done);
  MZ_TRY_GOTO(st, mz_bulk_finish(&bulk, NULL), done);
done:
  mz_bulk_abandon(&bulk);
  return st;
}

mz_status_t mz_ckpt_gather(mz_ckpt_t *ckpt, const mz_ckpt_gather_opts_t *opts)
{
  gather_t g = {.ckpt = ckpt,
                .num_tensors = mz_ckpt_num_tensors(ckpt),
                .parts = opts->optimizer ? MZ_CKPT_NUM_PARTS : 1};
  char part[PATH_MAX];
  mz_status_t st;

  MZ_REQUIRE(
      opts->dtype == MZ_F32 || opts->dtype == MZ_BF16 || opts->dtype == MZ_F16,
      MZ_ERR_UNSUPPORTED, "%s: weights are fp32, bf16 or fp16", opts->path);
  for (int p = 0; p < g.parts; p++)
    MZ_REQUIRE(mz_ckpt_has(ckpt, (mz_ckpt_part_t)p), MZ_ERR_ARG,
               "%s: it holds no %s", mz_ckpt_path(ckpt),
               mz_ckpt_part_name((mz_ckpt_part_t)p));
  MZ_TRY(mz_disk_path(part, "%s.%ld.part", opts->path, (long)getpid()));
  MZ_TRY(mz_ckpt_verify(ckpt, 0, 1));
  MZ_TRY_GOTO(st, list_sets(&g, opts), done);
  MZ_TRY_GOTO(st, mz_new(CHUNK_ELEMENTS, "chunk", &g.chunk), done);
  MZ_TRY_GOTO(st, write_file(&g, part), failed);
  MZ_TRY_GOTO(st, mz_disk_rename(part, opts->path), failed);
failed:
  if (st != MZ_OK) unlink(part);
done:
  mz_free(g.chunk);
  mz_free(g.sets);
  return st;
}
