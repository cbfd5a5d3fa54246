/* SPDX-License-Identifier: Apache-2.0 */
/* fp32 values between the host and the backend: initial ones, which are made
 * there, and those that others read and write. */
#include "zero/zero_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/random.h"
#include "plan/decl_impl.h"

enum {
  PIECE = 1 << 20, /* elements that pass through the host at once */
  CHUNK = 1 << 12  /* of them, that a thread makes at once */
};

/* --- initial values --- */

static void init_chunk(const mz_tensor_t *t, const mz_random_t *random,
                       int64_t first, int64_t num, float *w)
{
  if (t->init == MZ_INIT_NORMAL) {
    mz_cpu_normals(random, (uint64_t)first, num, t->init_std, w);
    return;
  }
  for (int64_t i = 0; i < num; i++)
    w[i] = t->init == MZ_INIT_ONE ? 1.0f : 0.0f;
}

static void init_piece(const mz_tensor_t *t, uint64_t seed, int64_t first,
                       int64_t num, float *w)
{
  mz_random_t random = mz_random_make(seed, t->hash, MZ_PURPOSE_INIT, 0);

#pragma omp parallel for schedule(static)
  for (int64_t at = 0; at < num; at += CHUNK)
    init_chunk(t, &random, first + at, mz_min_i64(CHUNK, num - at), w + at);
}

/* Where pieces are made for memory that is not the host's: one is filled while
 * the other is copied. */
typedef struct pieces {
  float *memory[2]; /* [PIECE] host memory of the device; NULL: not needed */
  mz_event_t copied[2];
  int next;
} pieces_t;

static mz_status_t create_pieces(const mz_device_t *device, pieces_t *pieces)
{
  for (int i = 0; i < 2 && !device->ops->is_host; i++) {
    MZ_TRY(mz_device_alloc_host(device, PIECE * (int64_t)sizeof(float),
                                "initial values", (void **)&pieces->memory[i]));
    MZ_TRY(mz_event_create(device, &pieces->copied[i]));
  }
  return MZ_OK;
}

static void destroy_pieces(const mz_device_t *device, pieces_t *pieces)
{
  for (int i = 0; i < 2; i++) {
    mz_event_destroy(device, pieces->copied[i]);
    mz_device_free_host(device, pieces->memory[i]);
  }
}

static mz_status_t init_segment(const mz_zero_t *z, const mz_segment_t *s,
                                uint64_t seed, pieces_t *pieces)
{
  const mz_tensor_t *t = &z->plan->decl->tensors[s->tensor];
  const mz_device_t *device = z->opts.kernels->device;
  float *w = mz_zero_segment(z, s, MZ_PART_WEIGHTS);

  for (int64_t at = 0; at < s->length; at += PIECE) {
    int64_t num = mz_min_i64(PIECE, s->length - at);
    float *made = pieces->memory[pieces->next];
    mz_event_t copied = pieces->copied[pieces->next];

    MZ_TRY(mz_event_wait(device, copied));
    init_piece(t, seed, s->tensor_offset + at, num, made ? made : w + at);
    if (!made) continue;
    MZ_TRY(mz_device_copy(device, w + at, made, num * 4, z->opts.stream));
    MZ_TRY(mz_event_record(device, copied, z->opts.stream));
    pieces->next = !pieces->next;
  }
  return MZ_OK;
}

mz_status_t mz_zero_init(mz_zero_t *zero, uint64_t seed)
{
  const mz_plan_t *p = zero->plan;
  const mz_device_t *device = zero->opts.kernels->device;
  pieces_t pieces = {.next = 0};
  mz_status_t st, end;

  MZ_TRY_GOTO(st, create_pieces(device, &pieces), done);
  for (int32_t i = 0; i < p->num_segments[MZ_SHARE_UPDATED]; i++)
    MZ_TRY_GOTO(
        st,
        init_segment(zero, &p->segments[MZ_SHARE_UPDATED][i], seed, &pieces),
        done);
done:
  /* No copy may be under way when its source goes. */
  end = mz_stream_synchronize(device, zero->opts.stream);
  destroy_pieces(device, &pieces);
  return st != MZ_OK ? st : end;
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
