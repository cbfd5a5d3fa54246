/* SPDX-License-Identifier: Apache-2.0 */
/* Whole tensors, from and to the shards that the ranks own. */
#include "train/engine_impl.h"

#include "base/alloc.h"
#include "base/check.h"

#include <string.h>

static const mz_segment_t *find_segment(const mz_engine_t *e, mz_share_t share,
                                        int32_t tensor)
{
  for (int32_t i = 0; i < e->plan->num_segments[share]; i++)
    if (e->plan->segments[share][i].tensor == tensor)
      return &e->plan->segments[share][i];
  return NULL;
}

/* Elements of @p bytes; no rank's block ends behind @p end. */
static mz_status_t gather(mz_engine_t *e, size_t bytes, const void *send,
                          int64_t count, void *recv, const int64_t *counts,
                          const int64_t *displs, int64_t end)
{
  mz_msg_t msg = {.kind = MZ_MSG_GATHER,
                  .group = 0,
                  .element_bytes = bytes,
                  .send = send,
                  .recv = recv,
                  .send_count = count,
                  .recv_counts = counts,
                  .recv_displs = displs,
                  .bound = end};
  mz_ticket_t ticket;

  MZ_TRY(mz_comm_post(e->comm, MZ_LANE_EXCHANGE, &msg, &ticket));
  return MZ_TRACE(mz_comm_wait(e->comm, ticket));
}

static mz_status_t check_access(const mz_engine_t *e, int32_t tensor,
                                mz_tensor_part_t part)
{
  MZ_REQUIRE(tensor >= 0 && tensor < mz_decl_num_tensors(e->decl), MZ_ERR_ARG,
             "no tensor %" PRId32 " of %" PRId32, tensor,
             mz_decl_num_tensors(e->decl));
  MZ_REQUIRE(part == MZ_PART_WEIGHTS || !e->plan->opts.inference, MZ_ERR_ARG,
             "an engine made for inference has only weights");
  return MZ_OK;
}

/* Several ranks may own nothing of a tensor, one owns each element. */
mz_status_t mz_engine_read(mz_engine_t *engine, int32_t tensor,
                           mz_tensor_part_t part, float *values_out)
{
  const mz_segment_t *s = find_segment(engine, MZ_SHARE_OWNED, tensor);
  float *copy = NULL;
  const float *own = values_out; /* of a rank that has nothing */
  mz_status_t st = MZ_OK;
  int world = engine->plan->opts.world_size;
  int64_t mine[2] = {s ? s->tensor_offset : 0, s ? s->length : 0};
  int64_t *all = engine->extents, *counts = all + 2 * world;
  int64_t *displs = counts + world;

  MZ_TRY(check_access(engine, tensor, part));
  for (int r = 0; r < world; r++) {
    counts[r] = 2;
    displs[r] = 2 * r;
  }
  MZ_TRY(gather(engine, 8, mine, 2, all, counts, displs, 2 * (int64_t)world));
  for (int r = 0; r < world; r++) {
    displs[r] = all[2 * r];
    counts[r] = all[2 * r + 1];
  }
  if (s) own = mz_zero_segment(engine->zero, s, part);
  if (s && !engine->device->ops->is_host) {
    st = mz_new(s->length, "values of a tensor", &copy);
    if (st == MZ_OK) st = mz_zero_fetch(engine->zero, own, s->length, copy);
    own = copy;
  }
  MZ_TRY_GOTO(st, mz_comm_agree(engine->comm, st), done);
  MZ_TRY_GOTO(st,
              gather(engine, sizeof(float), own, mine[1], values_out, counts,
                     displs, mz_decl_tensor_elements(engine->decl, tensor)),
              done);
done:
  mz_free(copy);
  return st;
}

mz_status_t mz_engine_put(mz_engine_t *engine, int32_t tensor,
                          mz_tensor_part_t part, const float *values)
{
  mz_share_t share = part == MZ_PART_GRADS ? MZ_SHARE_OWNED : MZ_SHARE_UPDATED;
  const mz_segment_t *s = find_segment(engine, share, tensor);

  if (!s) return MZ_OK;
  return MZ_TRACE(mz_zero_store(engine->zero,
                                mz_zero_segment(engine->zero, s, part),
                                s->length, values + s->tensor_offset));
}

mz_status_t mz_engine_write(mz_engine_t *engine, int32_t tensor,
                            mz_tensor_part_t part, const float *values)
{
  MZ_TRY(check_access(engine, tensor, part));
  MZ_TRY(
      mz_comm_agree(engine->comm, mz_engine_put(engine, tensor, part, values)));
  return part == MZ_PART_WEIGHTS ? MZ_TRACE(mz_engine_publish(engine)) : MZ_OK;
}

static uint64_t mix(uint64_t x)
{
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

enum { HASHED = 1 << 20 /* values in host memory at a time */ };

/* Adds the hash of this rank's part of a tensor. @param piece  [HASHED], or
 * NULL where the values lie in host memory. */
static mz_status_t hash_segment(mz_engine_t *e, const mz_segment_t *s,
                                float *piece, uint64_t *hash)
{
  const float *w = mz_zero_segment(e->zero, s, MZ_PART_WEIGHTS);
  uint64_t base = mix(e->decl->tensors[s->tensor].hash), sum = 0;

  for (int64_t at = 0; at < s->length; at += HASHED) {
    int64_t num = mz_min_i64(HASHED, s->length - at);

    if (piece) MZ_TRY(mz_zero_fetch(e->zero, w + at, num, piece));
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (int64_t j = 0; j < num; j++) {
      uint32_t bits;

      memcpy(&bits, piece ? &piece[j] : &w[at + j], sizeof bits);
      sum += mix(mix(base + (uint64_t)(s->tensor_offset + at + j)) + bits);
    }
  }
  *hash += sum;
  return MZ_OK;
}

static mz_status_t hash_own(mz_engine_t *e, uint64_t *hash_out)
{
  float *piece = NULL;
  mz_status_t st = MZ_OK;

  *hash_out = 0;
  if (!e->device->ops->is_host) MZ_TRY(mz_new(HASHED, "hashed values", &piece));
  for (int32_t i = 0; i < e->plan->num_segments[MZ_SHARE_OWNED]; i++)
    MZ_TRY_GOTO(
        st,
        hash_segment(e, &e->plan->segments[MZ_SHARE_OWNED][i], piece, hash_out),
        done);
done:
  mz_free(piece);
  return st;
}

/* A sum over elements of a mix of (tensor, index, bits): the order and the
 * owner do not matter. */
mz_status_t mz_engine_param_hash(mz_engine_t *engine, uint64_t *hash_out)
{
  int world = engine->plan->opts.world_size;
  int64_t *all = engine->extents, *counts = all + 2 * world;
  uint64_t own;

  MZ_TRY(mz_comm_agree(engine->comm, hash_own(engine, &own)));
  for (int r = 0; r < world; r++) {
    counts[r] = 1;
    counts[world + r] = r;
  }
  MZ_TRY(gather(engine, 8, &own, 1, all, counts, counts + world, world));
  *hash_out = 0;
  for (int r = 0; r < world; r++)
    *hash_out += (uint64_t)all[r];
  return MZ_OK;
}
