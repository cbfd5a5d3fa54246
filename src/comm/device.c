/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Messages of a device: its events, the trial of its pointers, and which ranks
 * share a machine. All calls here are made while the thread is paused. The
 * waits of its stream are in stream.c.
 */
#include "comm/comm_impl.h"

#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif

#include <string.h>

enum { TRIAL_BYTES = 1 << 20, TRIAL_TAG = 7 };

static mz_status_t make_events(mz_comm_t *comm)
{
  for (int lane = 0; lane < MZ_NUM_LANES; lane++) {
    mz_ring_t *ring = &comm->rings[lane];

    for (int i = 0; i < MZ_RING; i++)
      MZ_TRY(mz_event_create(comm->device, &ring->slots[i].ready));
    for (int i = 0; i < MZ_MAX_FLIGHT; i++)
      MZ_TRY(mz_event_create(comm->device, &ring->flights[i].copied));
  }
  MZ_TRY(mz_comm_make_flags(comm));
  return MZ_TRACE(mz_stream_create(comm->device, &comm->stream));
}

void mz_comm_leave_device(mz_comm_t *comm)
{
  if (!comm->device) return;
  mz_comm_free_flags(comm);
  mz_staging_destroy(comm);
  for (int lane = 0; lane < MZ_NUM_LANES; lane++) {
    mz_ring_t *ring = &comm->rings[lane];

    for (int i = 0; i < MZ_RING; i++)
      mz_event_destroy(comm->device, ring->slots[i].ready);
    for (int i = 0; i < MZ_MAX_FLIGHT; i++)
      mz_event_destroy(comm->device, ring->flights[i].copied);
  }
  mz_stream_destroy(comm->device, comm->stream);
  comm->device = NULL;
}

/* Whether the library says so; the transfer then shows it. */
static bool takes_memory(const mz_comm_t *comm)
{
  if (comm->opts.staged) return false;
#if defined(OPEN_MPI) && defined(MPIX_CUDA_AWARE_SUPPORT)
  return MPIX_Query_cuda_support() == 1;
#else
  return true;
#endif
}

/* One message around all ranks, from backend memory to backend memory. */
static mz_status_t try_transfer(mz_comm_t *comm, char *memory, char *host)
{
  int next = (comm->rank + 1) % comm->size;
  int before = (comm->rank + comm->size - 1) % comm->size;
  mz_device_t *device = comm->device;

  MZ_TRY(mz_device_fill(device, memory, comm->rank % 100 + 1, TRIAL_BYTES,
                        device->stream));
  MZ_TRY(mz_stream_synchronize(device, device->stream));
  MZ_TRY_MPI(MPI_Sendrecv(memory, TRIAL_BYTES, MPI_BYTE, next, TRIAL_TAG,
                          memory + TRIAL_BYTES, TRIAL_BYTES, MPI_BYTE, before,
                          TRIAL_TAG, comm->groups[0].lanes[MZ_LANE_BULK],
                          MPI_STATUS_IGNORE));
  MZ_TRY(mz_device_copy(device, host, memory + TRIAL_BYTES, TRIAL_BYTES,
                        device->stream));
  MZ_TRY(mz_stream_synchronize(device, device->stream));
  for (int64_t i = 0; i < TRIAL_BYTES; i++)
    MZ_REQUIRE(host[i] == before % 100 + 1, MZ_ERR_DATA,
               "MPI moved byte %" PRId64 " of GPU memory wrongly: found %d, "
               "sent was %d",
               i, host[i], before % 100 + 1);
  return MZ_OK;
}

/* What one rank alone can fail at is agreed before the next transfer. */
static mz_status_t try_memory(mz_comm_t *comm)
{
  mz_device_t *device = comm->device;
  void *memory = NULL, *host = NULL;
  mz_status_t st = mz_device_alloc(device, 2 * (int64_t)TRIAL_BYTES,
                                   "trial of MPI", &memory);

  if (st == MZ_OK)
    st = mz_device_alloc_host(device, TRIAL_BYTES, "trial of MPI", &host);
  MZ_TRY_GOTO(st, mz_comm_agree(comm, st), done);
  MZ_ASSERT(memory && host);
  st = try_transfer(comm, memory, host);
  MZ_TRY_GOTO(st, mz_comm_agree(comm, st), done);
done:
  mz_device_free_host(device, host);
  mz_device_free(device, memory);
  return st;
}

/* While the thread is stopped: agree makes progress inline. One rank whose MPI
 * does not take the memory makes all of them stage. */
static mz_status_t join_device(mz_comm_t *comm, mz_device_t *device,
                               const int64_t bytes[MZ_NUM_LANES])
{
  int64_t all, any;
  mz_status_t st;

  comm->device = device;
  st = make_events(comm);
  if (st != MZ_OK) mz_comm_leave_device(comm);
  MZ_TRY(mz_comm_agree(comm, st));
  if (comm->size == 1) return MZ_OK;
  MZ_TRY(mz_comm_min_max(comm, takes_memory(comm), &all, &any));
  if (all) return MZ_TRACE(try_memory(comm));
  return MZ_TRACE(mz_comm_agree(comm, mz_staging_create(comm, bytes)));
}

mz_status_t mz_comm_use_device(mz_comm_t *comm, mz_device_t *device,
                               const int64_t bytes[MZ_NUM_LANES])
{
  mz_status_t st, resumed;

  MZ_REQUIRE(comm && device && !comm->device, MZ_ERR_ARG,
             "comm or device is NULL, or a device is in use already");
  if (device->ops->is_host && !comm->opts.staged) return MZ_OK;
  mz_queue_pause(comm);
  st = join_device(comm, device, bytes); /* the same on all ranks */
  resumed = mz_queue_resume(comm);
  return MZ_TRACE(st != MZ_OK ? st : resumed);
}

bool mz_comm_is_staged(const mz_comm_t *comm)
{
  return comm->rings[0].flights[0].room != NULL;
}

mz_status_t mz_comm_node(mz_comm_t *comm, int *rank_out, int *size_out)
{
  MPI_Comm node;

  mz_queue_pause(comm);
  MZ_TRY_MPI(MPI_Comm_split_type(comm->control, MPI_COMM_TYPE_SHARED,
                                 comm->rank, MPI_INFO_NULL, &node));
  MZ_TRY_MPI(MPI_Comm_rank(node, rank_out));
  MZ_TRY_MPI(MPI_Comm_size(node, size_out));
  MZ_TRY_MPI(MPI_Comm_free(&node));
  return MZ_TRACE(mz_queue_resume(comm));
}
