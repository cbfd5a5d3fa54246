/* SPDX-License-Identifier: Apache-2.0 */
/* Whole tensors, from and to the shards that the ranks own. */
#include "train/engine_impl.h"

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
  return MZ_TRACE(
      gather(engine, sizeof(float),
             s ? mz_zero_segment(engine->zero, s, part) : values_out, mine[1],
             values_out, counts, displs,
             mz_decl_tensor_elements(engine->decl, tensor)));
}

void mz_engine_put(mz_engine_t *engine, int32_t tensor, mz_tensor_part_t part,
                   const float *values)
{
  mz_share_t share = part == MZ_PART_GRADS ? MZ_SHARE_OWNED : MZ_SHARE_UPDATED;
  const mz_segment_t *s = find_segment(engine, share, tensor);

  if (s)
    memcpy(mz_zero_segment(engine->zero, s, part), values + s->tensor_offset,
           (size_t)s->length * sizeof *values);
}

mz_status_t mz_engine_write(mz_engine_t *engine, int32_t tensor,
                            mz_tensor_part_t part, const float *values)
{
  MZ_TRY(check_access(engine, tensor, part));
  mz_engine_put(engine, tensor, part, values);
  return part == MZ_PART_WEIGHTS ? MZ_TRACE(mz_engine_publish(engine)) : MZ_OK;
}

static uint64_t mix(uint64_t x)
{
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

/* A sum over elements of a mix of (tensor, index, bits): the order and the
 * owner do not matter. */
mz_status_t mz_engine_param_hash(mz_engine_t *engine, uint64_t *hash_out)
{
  int world = engine->plan->opts.world_size;
  int64_t *all = engine->extents, *counts = all + 2 * world;
  uint64_t own = 0;

  for (int32_t i = 0; i < engine->plan->num_segments[MZ_SHARE_OWNED]; i++) {
    const mz_segment_t *s = &engine->plan->segments[MZ_SHARE_OWNED][i];
    const float *w = mz_zero_segment(engine->zero, s, MZ_PART_WEIGHTS);
    uint64_t base = mix(engine->decl->tensors[s->tensor].hash);

    for (int64_t j = 0; j < s->length; j++) {
      uint32_t bits;
      memcpy(&bits, &w[j], sizeof bits);
      own += mix(mix(base + (uint64_t)(s->tensor_offset + j)) + bits);
    }
  }
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
