/* SPDX-License-Identifier: Apache-2.0 */
#include "train/save.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/bias.h"
#include "train/differ.h"
#include "train/engine_impl.h"
#include "train/tuning.h"

#include <limits.h>
#include <moezero/checkpoint.h>
#include <stdio.h>
#include <string.h>

static const mz_tensor_part_t part_of[MZ_CKPT_NUM_PARTS] = {
    [MZ_CKPT_WEIGHTS] = MZ_PART_WEIGHTS,
    [MZ_CKPT_EXP_AVG] = MZ_PART_EXP_AVG,
    [MZ_CKPT_EXP_AVG_SQ] = MZ_PART_EXP_AVG_SQ};

/* --- out --- */

/* Those of the declaration, then the biases of gates. */
static mz_status_t list_tensors(const mz_engine_t *e,
                                mz_ckpt_tensor_t **tensors_out)
{
  const mz_decl_t *decl = e->decl;
  int32_t num = mz_decl_num_tensors(decl);
  mz_ckpt_tensor_t *tensors;

  MZ_TRY(mz_new(num + mz_bias_count(e), "tensors of a checkpoint", &tensors));
  mz_bias_list(e, tensors + num);
  for (int32_t i = 0; i < num; i++) {
    snprintf(tensors[i].name, sizeof tensors[i].name, "%s",
             mz_decl_tensor_name(decl, i));
    tensors[i].ndim = mz_decl_tensor_shape(decl, i, tensors[i].shape);
  }
  *tensors_out = tensors;
  return MZ_OK;
}

static mz_status_t fetch(void *ctx, const float *values, int64_t num,
                         float *host_out)
{
  const mz_engine_t *e = ctx;

  if (!mz_bias_holds(e, values))
    return MZ_TRACE(mz_zero_fetch(e->zero, values, num, host_out));
  memcpy(host_out, values, (size_t)num * sizeof *values);
  return MZ_OK;
}

static mz_status_t list_slices(const mz_engine_t *e, int32_t num,
                               mz_ckpt_slice_t **slices_out)
{
  int32_t segments = e->plan->num_segments[MZ_SHARE_OWNED];
  mz_ckpt_slice_t *slices;

  MZ_TRY(mz_new(num, "slices of a checkpoint", &slices));
  if (num > segments)
    mz_bias_slices(e, mz_decl_num_tensors(e->decl), slices + segments);
  for (int32_t i = 0; i < segments; i++) {
    const mz_segment_t *s = &e->plan->segments[MZ_SHARE_OWNED][i];

    slices[i] = (mz_ckpt_slice_t){
        .tensor = s->tensor, .offset = s->tensor_offset, .length = s->length};
    for (int p = 0; p < MZ_CKPT_NUM_PARTS; p++)
      slices[i].values[p] = mz_zero_segment(e->zero, s, part_of[p]);
  }
  *slices_out = slices;
  return MZ_OK;
}

mz_status_t mz_save_check(mz_engine_t *engine, const char *dir, int64_t step)
{
  int64_t newest = -1;
  mz_status_t st = MZ_OK;

  if (engine->plan->opts.rank == 0) newest = mz_ckpt_newest(dir);
  if (newest > step)
    st = MZ_ERROR(MZ_ERR_IO,
                  "%s/global_step%" PRId64
                  " is complete, and this run starts at step %" PRId64
                  ": saves would not overwrite it. Resume from it, or name "
                  "another folder",
                  dir, newest, step);
  return MZ_TRACE(mz_comm_agree(engine->comm, st));
}

static mz_dtype_t dtype_named(const char *name)
{
  if (strcmp(name, "bf16") == 0) return MZ_BF16;
  return strcmp(name, "fp16") == 0 ? MZ_F16 : MZ_F32;
}

/* Rank 0 alone. */
static mz_status_t gather(const mz_engine_t *e, const char *dir)
{
  char folder[PATH_MAX], path[PATH_MAX + 16];
  mz_ckpt_gather_opts_t opts = {
      .path = path, .dtype = dtype_named(e->config->checkpoint.gather_dtype)};
  mz_ckpt_t *ckpt = NULL;
  mz_status_t st;

  snprintf(folder, sizeof folder, "%s/global_step%" PRId64, dir, e->steps);
  snprintf(path, sizeof path, "%s/model.h5", folder);
  MZ_TRY_GOTO(st, mz_ckpt_open(folder, &ckpt), done);
  MZ_TRY_GOTO(st, mz_ckpt_gather(ckpt, &opts), done);
done:
  mz_ckpt_close(&ckpt);
  return st;
}

/* Ranks wait while others write or read: disks may take longer than a step. */
enum { DISK_PATIENCE = 20 };

mz_status_t mz_save_step(mz_engine_t *engine, const mz_config_t *config,
                         const char *dir)
{
  mz_engine_t *e = engine;
  mz_ckpt_tensor_t *tensors = NULL;
  mz_ckpt_slice_t *slices = NULL;
  char *text = NULL, *tuning = NULL;
  int32_t biases = mz_bias_count(e);
  mz_ckpt_save_opts_t opts = {
      .dir = dir,
      .state = {.step = e->steps,
                .updates = e->updates,
                .sampler_position = e->steps * e->config->train_batch_size,
                .seed = (uint64_t)e->config->train.seed},
      .num_tensors = mz_decl_num_tensors(e->decl) + biases,
      .num_slices = e->plan->num_segments[MZ_SHARE_OWNED] +
                    (e->plan->opts.rank == 0 ? biases : 0),
      .keep = e->config->checkpoint.keep,
      .fetch = e->device->ops->is_host ? NULL : fetch,
      .ctx = e};
  mz_status_t st = mz_config_to_json(config, &text);

  mz_comm_stretch_watchdog(e->comm, DISK_PATIENCE);
  if (st == MZ_OK && e->late != MZ_OK)
    st = MZ_ERROR(e->late, "%s", e->late_text);
  if (st == MZ_OK) st = list_tensors(e, &tensors);
  if (st == MZ_OK) st = list_slices(e, opts.num_slices, &slices);
  if (st == MZ_OK) st = mz_engine_tuning_text(e, &tuning);
  MZ_TRY_GOTO(st, mz_comm_agree(e->comm, st), done);
  opts.state.config = text;
  opts.state.tuning = tuning;
  opts.tensors = tensors;
  opts.slices = slices;
  MZ_TRY_GOTO(st, mz_ckpt_save(e->comm, &opts), done);
  if (!e->config->checkpoint.gather_on_save) goto done;
  if (e->plan->opts.rank == 0) st = gather(e, dir);
  MZ_TRY_GOTO(st, mz_comm_agree(e->comm, st), done);
done:
  mz_comm_stretch_watchdog(e->comm, 1);
  mz_free(tuning);
  mz_free(slices);
  mz_free(tensors);
  mz_config_free_text(&text);
  return st;
}

/* --- in --- */

/* Rank 0 says which folder `latest` means, so that all read the same one. */
static mz_status_t open_together(mz_engine_t *e, const char *path,
                                 mz_ckpt_t **ckpt_out)
{
  char found[PATH_MAX] = "";
  int rank = e->plan->opts.rank;
  mz_status_t st = MZ_OK;

  *ckpt_out = NULL;
  if (rank == 0) st = mz_ckpt_open(path, ckpt_out);
  MZ_TRY(mz_comm_agree(e->comm, st));
  if (rank == 0) snprintf(found, sizeof found, "%s", mz_ckpt_path(*ckpt_out));
  MZ_TRY(mz_comm_broadcast(e->comm, found, sizeof found, 0));
  if (rank != 0) st = mz_ckpt_open(found, ckpt_out);
  if (st == MZ_OK)
    st = mz_ckpt_verify(*ckpt_out, rank, e->plan->opts.world_size);
  return MZ_TRACE(mz_comm_agree(e->comm, st));
}

static void shape_text(int32_t ndim, const int64_t *shape, char text[96])
{
  int used = snprintf(text, 96, "[");

  for (int32_t d = 0; d < ndim && used < 90; d++)
    used += snprintf(text + used, 96 - (size_t)used, "%s%" PRId64,
                     d ? ", " : "", shape[d]);
  snprintf(text + used, 96 - (size_t)used, "]");
}

static mz_status_t check_shape(const mz_ckpt_t *ckpt, const mz_decl_t *decl,
                               int32_t tensor)
{
  const char *name = mz_decl_tensor_name(decl, tensor);
  int32_t at = mz_ckpt_find(ckpt, name), ndim;
  const mz_ckpt_tensor_t *saved;
  int64_t shape[4];
  char found[96], wanted[96];

  MZ_REQUIRE(at >= 0, MZ_ERR_SHAPE, "%s: it has no tensor %s",
             mz_ckpt_path(ckpt), name);
  saved = mz_ckpt_tensor(ckpt, at);
  ndim = mz_decl_tensor_shape(decl, tensor, shape);
  shape_text(saved->ndim, saved->shape, found);
  shape_text(ndim, shape, wanted);
  MZ_REQUIRE(strcmp(found, wanted) == 0, MZ_ERR_SHAPE,
             "%s: %s has the shape %s, the model's is %s", mz_ckpt_path(ckpt),
             name, found, wanted);
  return MZ_OK;
}

/* The same names with the same shapes, on both sides. */
static mz_status_t check_tensors(const mz_ckpt_t *ckpt, const mz_engine_t *e)
{
  for (int32_t i = 0; i < mz_decl_num_tensors(e->decl); i++)
    MZ_TRY(check_shape(ckpt, e->decl, i));
  for (int32_t i = 0; i < mz_ckpt_num_tensors(ckpt); i++) {
    const char *name = mz_ckpt_tensor(ckpt, i)->name;

    MZ_REQUIRE(mz_decl_find_tensor(e->decl, name) >= 0 ||
                   mz_bias_named(e, name),
               MZ_ERR_SHAPE, "%s: it holds %s, which the model has not",
               mz_ckpt_path(ckpt), name);
  }
  return MZ_OK;
}

enum { READ = 1 << 22 /* values in host memory at a time */ };

/* @param piece  [READ], or NULL where the values' place is host memory. */
static mz_status_t read_segment(mz_engine_t *e, mz_ckpt_t *ckpt,
                                const mz_segment_t *s, int part, float *piece)
{
  int32_t from = mz_ckpt_find(ckpt, mz_decl_tensor_name(e->decl, s->tensor));
  float *values = mz_zero_segment(e->zero, s, part_of[part]);

  for (int64_t at = 0; at < s->length; at += READ) {
    int64_t num = mz_min_i64(READ, s->length - at);

    MZ_TRY(mz_ckpt_read(ckpt, from, (mz_ckpt_part_t)part, s->tensor_offset + at,
                        num, piece ? piece : values + at));
    if (piece) MZ_TRY(mz_zero_store(e->zero, values + at, num, piece));
  }
  return MZ_OK;
}

static mz_status_t read_segments(mz_engine_t *e, mz_ckpt_t *ckpt, int num_parts)
{
  float *piece = NULL;
  mz_status_t st = MZ_OK;

  if (!e->device->ops->is_host)
    MZ_TRY(mz_new(READ, "values that are read", &piece));
  for (int32_t i = 0; i < e->plan->num_segments[MZ_SHARE_UPDATED]; i++)
    for (int p = 0; p < num_parts; p++)
      MZ_TRY_GOTO(st,
                  read_segment(e, ckpt, &e->plan->segments[MZ_SHARE_UPDATED][i],
                               p, piece),
                  done);
done:
  mz_free(piece);
  return st;
}

/* Reads what this rank updates; the gathers then tell the others. */
static mz_status_t load(mz_engine_t *e, mz_ckpt_t *ckpt, int num_parts)
{
  mz_status_t st = check_tensors(ckpt, e);

  if (st == MZ_OK) st = mz_bias_read(e, ckpt);
  if (st == MZ_OK) st = read_segments(e, ckpt, num_parts);
  MZ_TRY(mz_comm_agree(e->comm, st));
  return MZ_TRACE(mz_engine_publish(e));
}

static void say_position(const mz_engine_t *e, const mz_ckpt_state_t *s,
                         mz_say_t say, void *ctx)
{
  int64_t here = e->steps * e->config->train_batch_size;
  char line[160];

  if (!say || here == s->sampler_position) return;
  snprintf(line, sizeof line,
           "the saved run had taken %" PRId64
           " samples; with this batch size step %" PRId64
           " goes on at %" PRId64,
           s->sampler_position, e->steps, here);
  say(ctx, line);
}

mz_status_t mz_save_resume(mz_engine_t *engine, const mz_config_t *config,
                           const char *path, mz_say_t say, void *ctx)
{
  mz_engine_t *e = engine;
  mz_ckpt_t *ckpt = NULL;
  const mz_ckpt_state_t *state;
  char *text = NULL;
  mz_status_t st;

  mz_comm_stretch_watchdog(e->comm, DISK_PATIENCE);
  MZ_TRY_GOTO(st, open_together(e, path, &ckpt), done);
  state = mz_ckpt_state(ckpt);
  MZ_REQUIRE_GOTO(state, st, done, MZ_ERR_DATA,
                  "%s: a one-file model has no step to resume from; start from "
                  "its weights instead",
                  path);
  MZ_TRY_GOTO(st, load(e, ckpt, MZ_CKPT_NUM_PARTS), done);
  MZ_TRY_GOTO(
      st, mz_tuning_take(e, mz_ckpt_path(ckpt), state->tuning, say, ctx), done);
  mz_engine_set_steps(e, state->step);
  e->updates = state->updates;
  st = mz_config_to_json(config, &text);
  if (st == MZ_OK && say) st = mz_differ(state->config, text, say, ctx);
  MZ_TRY_GOTO(st, mz_comm_agree(e->comm, st), done);
  say_position(e, state, say, ctx);
done:
  mz_comm_stretch_watchdog(e->comm, 1);
  mz_config_free_text(&text);
  mz_ckpt_close(&ckpt);
  return st;
}

mz_status_t mz_save_init_from(mz_engine_t *engine, const char *path)
{
  mz_ckpt_t *ckpt = NULL;
  mz_status_t st;

  mz_comm_stretch_watchdog(engine->comm, DISK_PATIENCE);
  MZ_TRY_GOTO(st, open_together(engine, path, &ckpt), done);
  MZ_TRY_GOTO(st, load(engine, ckpt, 1), done);
done:
  mz_comm_stretch_watchdog(engine->comm, 1);
  mz_ckpt_close(&ckpt);
  return st;
}
