/* SPDX-License-Identifier: Apache-2.0 */
/* fp32 values: initial ones, which the backend makes, and those that others
 * read and write between the host and it. */
#include "zero/zero_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/kernels.h"
#include "plan/decl_impl.h"

enum {
  PIECE = 1 << 23, /* normal numbers at once, of a device */
  ONES = 960
};

/* --- initial values --- */

/* The elements that a device leaves in doubt (kernels/normals.h). */
static mz_status_t mend(const mz_zero_t *z, const mz_normals_t *a)
{
  mz_device_t *device = z->opts.kernels->device;
  int32_t count = 0, *which = NULL;
  mz_status_t st;

  MZ_TRY(mz_device_copy(device, &count, a->doubt, 4, z->opts.stream));
  MZ_TRY(mz_stream_synchronize(device, z->opts.stream));
  if (count == 0) return MZ_OK;
  MZ_TRY(mz_new(count, "initial values in doubt", &which));
  MZ_TRY_GOTO(st,
              mz_device_copy(device, which, a->doubt + 1, 4 * (int64_t)count,
                             z->opts.stream),
              done);
  MZ_TRY_GOTO(st, mz_stream_synchronize(device, z->opts.stream), done);
  for (int32_t i = 0; i < count; i++) {
    float value =
        (float)(a->scale *
                mz_random_normal(&a->random, a->first + (uint64_t)which[i]));
    MZ_TRY_GOTO(st,
                mz_device_upload(device, a->out + which[i], &value,
                                 sizeof value, z->opts.stream),
                done);
  }
done:
  mz_free(which);
  return st;
}

static mz_status_t init_normals(const mz_zero_t *z, const mz_segment_t *s,
                                uint64_t seed, float *w)
{
  const mz_tensor_t *t = &z->plan->decl->tensors[s->tensor];
  const mz_kernels_t *k = z->opts.kernels;
  bool host = k->device->ops->is_host;
  int64_t piece =
      host ? s->length : mz_min_i64(PIECE, k->workspace_bytes / 4 - 1);

  MZ_REQUIRE(piece > 0 || s->length == 0, MZ_ERR_FIT,
             "no workspace for initial values");
  for (int64_t at = 0; at < s->length; at += piece) {
    mz_normals_t a = {.random =
                          mz_random_make(seed, t->hash, MZ_PURPOSE_INIT, 0),
                      .first = (uint64_t)(s->tensor_offset + at),
                      .n = mz_min_i64(piece, s->length - at),
                      .scale = t->init_std,
                      .out = w + at,
                      .doubt = host ? NULL : (int32_t *)(void *)k->workspace};

    MZ_TRY(k->ops->normals(k, &a, z->opts.stream));
    if (!host) MZ_TRY(mend(z, &a));
  }
  return MZ_OK;
}

static mz_status_t init_ones(const mz_zero_t *z, const mz_segment_t *s,
                             float *w)
{
  float ones[ONES];

  for (int i = 0; i < ONES; i++)
    ones[i] = 1;
  for (int64_t at = 0; at < s->length; at += ONES)
    MZ_TRY(mz_device_upload(z->opts.kernels->device, w + at, ones,
                            4 * mz_min_i64(ONES, s->length - at),
                            z->opts.stream));
  return MZ_OK;
}

static mz_status_t init_segment(const mz_zero_t *z, const mz_segment_t *s,
                                uint64_t seed)
{
  float *w = mz_zero_segment(z, s, MZ_PART_WEIGHTS);

  switch (z->plan->decl->tensors[s->tensor].init) {
  case MZ_INIT_NORMAL:
    return MZ_TRACE(init_normals(z, s, seed, w));
  case MZ_INIT_ONE:
    return MZ_TRACE(init_ones(z, s, w));
  case MZ_INIT_ZERO:
    break;
  }
  return MZ_TRACE(mz_device_fill(z->opts.kernels->device, w, 0, 4 * s->length,
                                 z->opts.stream));
}

mz_status_t mz_zero_init(mz_zero_t *zero, uint64_t seed)
{
  const mz_plan_t *p = zero->plan;

  for (int32_t i = 0; i < p->num_segments[MZ_SHARE_UPDATED]; i++)
    MZ_TRY(init_segment(zero, &p->segments[MZ_SHARE_UPDATED][i], seed));
  return MZ_TRACE(
      mz_stream_synchronize(zero->opts.kernels->device, zero->opts.stream));
}

/* --- of others --- */

mz_status_t mz_zero_fetch(const mz_zero_t *zero, const float *values,
                          int64_t num, float *host_out)
{
  mz_device_t *device = zero->opts.kernels->device;

  MZ_TRY(mz_device_copy(device, host_out, values, num * 4, zero->opts.stream));
  return MZ_TRACE(mz_stream_synchronize(device, zero->opts.stream));
}

mz_status_t mz_zero_store(const mz_zero_t *zero, float *values, int64_t num,
                          const float *host)
{
  mz_device_t *device = zero->opts.kernels->device;

  MZ_TRY(mz_device_copy(device, values, host, num * 4, zero->opts.stream));
  return MZ_TRACE(mz_stream_synchronize(device, zero->opts.stream));
}
