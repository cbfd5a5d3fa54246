/* SPDX-License-Identifier: Apache-2.0 */
/* Which device a rank computes on: by its place among the ranks of its machine,
 * so that each has a GPU of its own where there are enough. */
#include "train/engine_impl.h"

#include "base/alloc.h"
#include "base/check.h"

static mz_status_t open_own(mz_engine_t *e, const char *backend, int place)
{
  int count;

  MZ_TRY(mz_device_count(backend, &count));
  return MZ_TRACE(mz_device_open(backend, place % count, &e->device));
}

/* Ranks with the same GPU, told by its number as the driver gives it: what a
 * rank calls device 0 may be another one for its neighbour. */
static mz_status_t count_sharing(mz_engine_t *e, int32_t *sharing_out)
{
  uint64_t hash = UINT64_C(14695981039346656037);
  const int64_t *hashes;
  int32_t sharing = 0;

  for (size_t i = 0; i < sizeof e->device->uuid; i++)
    hash = (hash ^ e->device->uuid[i]) * UINT64_C(1099511628211);
  MZ_TRY(mz_comm_gather(e->comm, (int64_t)(hash >> 1), &hashes));
  for (int r = 0; r < mz_comm_size(e->comm); r++)
    sharing += hashes[r] == (int64_t)(hash >> 1);
  *sharing_out = sharing;
  return MZ_OK;
}

static int64_t rows_bytes(const mz_engine_t *e, int32_t decl_buffer)
{
  return e->plan->buffers[e->plan->buffer_of_decl[decl_buffer]].bytes;
}

/* The largest message of a lane that lies in backend memory, either side. */
static void measure_messages(const mz_engine_t *e, int64_t bytes[MZ_NUM_LANES])
{
  const mz_plan_t *p = e->plan;

  for (int lane = 0; lane < MZ_NUM_LANES; lane++)
    bytes[lane] = 0;
  for (int32_t i = 0; i < p->num_entries; i++) {
    const mz_entry_t *entry = &p->entries[i];
    int64_t *most = &bytes[entry->lane];

    if (entry->lane == MZ_LANE_BULK)
      *most =
          mz_max_i64(*most, p->units[entry->first_unit].ranks * entry->length *
                                (int64_t)mz_dtype_bytes(entry->dtype));
    if (entry->kind == MZ_ENTRY_TOKENS)
      *most = mz_max_i64(*most, mz_max_i64(rows_bytes(e, entry->send),
                                           rows_bytes(e, entry->recv)));
  }
}

mz_status_t mz_engine_open_device(mz_engine_t *engine)
{
  bool cuda = mz_config_uses_cuda(engine->config);
  const char *backend = cuda ? MZ_BACKEND_CUDA : MZ_BACKEND_CPU;
  int64_t bytes[MZ_NUM_LANES];
  int place, size;
  mz_status_t st;

  MZ_REQUIRE(cuda || engine->config->comm.wait == MZ_WAIT_HOST,
             MZ_ERR_UNSUPPORTED,
             "comm.wait \"stream\" needs train.device \"cuda\": on the CPU "
             "there is no stream that could wait");
  MZ_TRY(mz_comm_node(engine->comm, &place, &size));
  st = open_own(engine, backend, cuda ? place : 0);
  MZ_TRY(mz_comm_agree(engine->comm, st));
  engine->sharing = 1;
  if (cuda) MZ_TRY(count_sharing(engine, &engine->sharing));
  measure_messages(engine, bytes);
  return MZ_TRACE(mz_comm_use_device(engine->comm, engine->device, bytes));
}

const char *mz_engine_device_name(const mz_engine_t *engine, int32_t *sharing)
{
  *sharing = engine->sharing;
  return engine->device->name;
}
