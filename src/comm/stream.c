/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Waits of the device's stream. Each slot of a ring has a flag in host memory
 * of the device: the number of the slot's last message that is done, written by
 * the progressing side. The stream waits until it is at least the number of the
 * message, so a flag is never reset.
 *
 * Why no wait lasts for ever. All ranks of a group post the same messages in
 * one order. Of two things that a rank posts or starts, call the one of the
 * earlier operation of the walk the earlier. Then
 *  - work of the stream waits for earlier work of the stream, and for messages
 *    that were posted earlier;
 *  - a message waits for earlier work of the stream (its event `ready`), for
 *    earlier messages of its lane and for the one it names (`after`), for a
 *    place in flight, which earlier messages hold, and for the same message on
 *    the other ranks;
 *  - the host waits for messages posted earlier (counts and scalars, which it
 *    reads itself; a full ring) and for earlier work of the stream.
 * Nothing waits for what is later, so there is no circle: exactly as when the
 * host waits, which only adds waits for earlier messages.
 *
 * What CUDA adds to this: a call of the host that has to wait for the whole
 * device (memory, the first use of a kernel) waits for the stream, and may keep
 * the thread that would end the wait out of CUDA meanwhile; likewise a launch
 * when the device has no room for more. So there is at most one wait that is
 * not over, mz_device_settle ends it before such a call, and the walk does not
 * go far ahead of it.
 */
#include "comm/comm_impl.h"

static uint32_t *flag_of(const mz_comm_t *comm, int lane, uint64_t number)
{
  return comm->flags + (uint64_t)(unsigned)lane * MZ_RING + number % MZ_RING;
}

/* A failure is told by the caller's next call. */
static void settle(void *comm) { (void)mz_comm_settle(comm); }

mz_status_t mz_comm_make_flags(mz_comm_t *comm)
{
  if (!comm->opts.thread || comm->device->ops->is_host) return MZ_OK;
  MZ_TRY(mz_device_alloc_host(
      comm->device, MZ_NUM_LANES * MZ_RING * (int64_t)sizeof *comm->flags,
      "flags of messages", (void **)&comm->flags));
  comm->device->settle_ctx = comm;
  comm->device->settle = settle;
  return MZ_OK;
}

void mz_comm_free_flags(mz_comm_t *comm)
{
  if (!comm->flags) return;
  comm->device->settle = NULL;
  mz_comm_raise_all_flags(comm);
  (void)mz_stream_synchronize(comm->device, comm->device->stream);
  mz_device_free_host(comm->device, comm->flags);
  comm->flags = NULL;
}

/* Behind what the message brought, for those who see the flag. */
static void write_flag(uint32_t *flag, uint64_t number)
{
  __atomic_store_n(flag, (uint32_t)number, __ATOMIC_RELEASE);
}

void mz_comm_raise_flag(mz_comm_t *comm, int lane, uint64_t number)
{
  if (comm->flags) write_flag(flag_of(comm, lane, number), number);
}

/* Above every number that a wait may have, at most one post may be under way.
 */
void mz_comm_raise_all_flags(mz_comm_t *comm)
{
  for (int lane = 0; comm->flags && lane < MZ_NUM_LANES; lane++)
    for (uint64_t i = 0; i < MZ_RING; i++)
      write_flag(flag_of(comm, lane, i),
                 atomic_load(&comm->rings[lane].posted) + MZ_RING);
}

mz_ticket_t mz_comm_awaited(const mz_comm_t *comm)
{
  mz_ticket_t ticket = {.number = atomic_load(&comm->awaited.number)};

  ticket.lane = (mz_lane_t)atomic_load(&comm->awaited.lane);
  if (ticket.number > 0 && mz_comm_is_done(comm, ticket)) ticket.number = 0;
  return ticket;
}

mz_status_t mz_comm_settle(mz_comm_t *comm)
{
  mz_ticket_t ticket = mz_comm_awaited(comm);

  MZ_TRY(mz_comm_wait(comm, ticket));
  atomic_store(&comm->awaited.number, 0);
  return MZ_OK;
}

mz_status_t mz_comm_wait_on_stream(mz_comm_t *comm, mz_ticket_t ticket)
{
  mz_ticket_t before;

  MZ_TRY(mz_comm_check_wait(comm, ticket));
  if (ticket.number == 0 || !comm->flags || mz_comm_is_done(comm, ticket))
    return MZ_TRACE(mz_comm_wait(comm, ticket));
  before = mz_comm_awaited(comm);
  if (before.number > 0) MZ_TRY(mz_comm_wait(comm, before));
  /* A device that fails is met again by the next launch, whose error is one of
     the step's; here no rank may leave the others. */
  if (mz_stream_wait_flag(comm->device, comm->device->stream,
                          flag_of(comm, (int)ticket.lane, ticket.number),
                          (uint32_t)ticket.number) != MZ_OK)
    return MZ_TRACE(mz_comm_wait(comm, ticket));
  /* the watchdog reads number first: the time is there before it */
  atomic_store(&comm->awaited.number, 0);
  atomic_store(&comm->awaited.ns, mz_comm_now_ns());
  atomic_store(&comm->wait_lane, (int)ticket.lane);
  atomic_store(&comm->awaited.lane, (int)ticket.lane);
  atomic_store(&comm->awaited.number, ticket.number);
  return MZ_OK;
}
