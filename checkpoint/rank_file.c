/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/rank_file.h"

#include "base/alloc.h"
#include "base/check.h"
#include "checkpoint/bulk.h"

#include <stdio.h>

const char *mz_ckpt_part_name(mz_ckpt_part_t part)
{
  static const char *const names[] = {"weights", "exp_avg", "exp_avg_sq"};
  return names[part];
}

typedef struct content {
  const mz_save_head_t *head;
  const mz_source_row_t *rows;
  int32_t num;
} content_t;

static mz_status_t describe(const mz_h5_t *h5, const void *ctx)
{
  const content_t *c = ctx;

  MZ_TRY(mz_h5_put_text(h5, "format", MZ_FORMAT_RANK));
  MZ_TRY(mz_h5_put_i64(h5, "version", MZ_FORMAT_VERSION));
  MZ_TRY(mz_h5_put_text(h5, "save_id", c->head->save_id));
  MZ_TRY(mz_h5_put_i64(h5, "step", c->head->step));
  MZ_TRY(mz_h5_put_i64(h5, "rank", c->head->rank));
  MZ_TRY(mz_h5_put_i64(h5, "ranks", c->head->ranks));
  MZ_TRY(mz_h5_write_table(h5, "tensors", mz_h5_tensor_type(),
                           c->head->num_tensors, c->head->tensors));
  return MZ_TRACE(mz_h5_write_table(h5, "segments", mz_h5_source_type(false),
                                    c->num, c->rows));
}

enum { FETCHED = 1 << 22 /* values in host memory at a time */ };

static mz_status_t append(mz_bulk_t *bulk, int part, const float *values,
                          int64_t num, const mz_ckpt_save_opts_t *opts,
                          float *piece)
{
  if (!opts->fetch) return MZ_TRACE(mz_bulk_append(bulk, part, values, num));
  for (int64_t at = 0; at < num; at += FETCHED) {
    int64_t now = mz_min_i64(FETCHED, num - at);

    MZ_TRY(opts->fetch(opts->ctx, values + at, now, piece));
    MZ_TRY(mz_bulk_append(bulk, part, piece, now));
  }
  return MZ_OK;
}

static mz_status_t write_values(mz_bulk_t *bulk,
                                const mz_ckpt_save_opts_t *opts)
{
  float *piece = NULL;
  mz_status_t st = MZ_OK;

  if (opts->fetch) MZ_TRY(mz_new(FETCHED, "values to write", &piece));
  for (int part = 0; part < MZ_CKPT_NUM_PARTS; part++)
    for (int32_t i = 0; i < opts->num_slices; i++)
      MZ_TRY_GOTO(st,
                  append(bulk, part, opts->slices[i].values[part],
                         opts->slices[i].length, opts, piece),
                  done);
done:
  mz_free(piece);
  return st;
}

mz_status_t mz_rank_file_write(const char *path, const mz_save_head_t *head,
                               const mz_ckpt_save_opts_t *save,
                               const mz_source_row_t *rows, bool reserve,
                               mz_file_row_t *file_out)
{
  content_t content = {head, rows, save->num_slices};
  mz_bulk_set_t sets[MZ_CKPT_NUM_PARTS];
  mz_bulk_opts_t opts = {
      .path = path,
      .sets = sets,
      .num_sets = MZ_CKPT_NUM_PARTS,
      .table_bytes = head->num_tensors * (int64_t)sizeof *head->tensors +
                     save->num_slices * (int64_t)sizeof *rows,
      .describe = describe,
      .ctx = &content};
  mz_bulk_t *bulk = NULL;
  int64_t elements = 0;
  mz_status_t st;

  for (int32_t i = 0; i < save->num_slices; i++)
    elements += save->slices[i].length;
  for (int part = 0; part < MZ_CKPT_NUM_PARTS; part++) {
    sets[part] = (mz_bulk_set_t){.ndim = 1, .shape = {elements}};
    snprintf(sets[part].name, sizeof sets[part].name, "%s",
             mz_ckpt_part_name((mz_ckpt_part_t)part));
  }
  if (reserve) return MZ_TRACE(mz_bulk_reserve(&opts));
  MZ_TRY_GOTO(st, mz_bulk_create(&opts, &bulk), done);
  MZ_TRY_GOTO(st, write_values(bulk, save), done);
  snprintf(file_out->name, sizeof file_out->name, "rank_%d.h5", head->rank);
  MZ_TRY_GOTO(st, mz_bulk_finish(&bulk, file_out), done);
done:
  mz_bulk_abandon(&bulk);
  return st;
}
