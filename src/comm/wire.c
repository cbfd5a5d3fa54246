/* SPDX-License-Identifier: Apache-2.0 */
/**
 * How one message meets MPI. A gather is MPI_Iallgatherv, an exchange is
 * MPI_Ialltoallv. By option, between GPUs of one machine (15 to 25% faster
 * there), and where counts or displacements may pass the limit of an MPI call,
 * the blocks go pairwise, each pair cutting its own block into chunks: both
 * sides of a pair know that count, and displacements become pointers. A group
 * of one rank copies.
 *
 * Counts are elements: a row of any size is one element of a contiguous type.
 */
#include "comm/comm_impl.h"

#include "base/alloc.h"

#include <limits.h>
#include <string.h>

enum { NUM_TAGS = 32768 }; /* MPI promises this many */

static mz_status_t element_type(mz_comm_t *comm, size_t bytes,
                                MPI_Datatype *type_out)
{
  MPI_Datatype type;
  int width;

  *type_out = MPI_BYTE;
  if (bytes == 1) return MZ_OK;
  for (int i = 0; i < MZ_MAX_TYPES; i++) {
    if (comm->types[i].bytes != bytes) continue;
    *type_out = comm->types[i].type;
    return MZ_OK;
  }
  MZ_TRY(mz_int_from_i64((int64_t)bytes, &width));
  MZ_TRY_MPI(MPI_Type_contiguous(width, MPI_BYTE, &type));
  MZ_TRY_MPI(MPI_Type_commit(&type));
  /* The oldest makes room; MPI keeps a freed type until its calls are done. */
  if (comm->types[comm->next_type].bytes)
    MZ_TRY_MPI(MPI_Type_free(&comm->types[comm->next_type].type));
  comm->types[comm->next_type].bytes = bytes;
  comm->types[comm->next_type].type = type;
  comm->next_type = (comm->next_type + 1) % MZ_MAX_TYPES;
  *type_out = type;
  return MZ_OK;
}

void mz_wire_free_types(mz_comm_t *comm)
{
  for (int i = 0; i < MZ_MAX_TYPES; i++)
    if (comm->types[i].bytes) MPI_Type_free(&comm->types[i].type);
}

/* The blocks that this rank receives from, and sends to, a rank of the group.
 * The block of a gather is the same for all. */
static int64_t recv_count(const mz_msg_t *msg, int peer)
{
  return msg->recv_counts[peer];
}

static int64_t send_count(const mz_msg_t *msg, int rank, int peer)
{
  if (msg->kind == MZ_MSG_EXCHANGE) return msg->send_counts[peer];
  return msg->send ? msg->send_count : msg->recv_counts[rank];
}

static char *recv_block(const mz_msg_t *msg, int peer)
{
  return (char *)msg->recv +
         msg->recv_displs[peer] * (int64_t)msg->element_bytes;
}

static const char *send_block(const mz_msg_t *msg, int rank, int peer)
{
  if (msg->kind == MZ_MSG_EXCHANGE)
    return (const char *)msg->send +
           msg->send_displs[peer] * (int64_t)msg->element_bytes;
  return msg->send ? (const char *)msg->send : recv_block(msg, rank);
}

/* The counts exist only now: bind may have filled them. */
static mz_status_t check_blocks(const mz_msg_t *msg, int size, int rank)
{
  for (int r = 0; r < size; r++) {
    int64_t in = recv_count(msg, r), out = send_count(msg, rank, r);
    bool has_send = msg->send || msg->kind == MZ_MSG_GATHER;

    MZ_REQUIRE(in >= 0 && out >= 0, MZ_ERR_ARG,
               "%" PRId64 " elements from rank %d of the group, %" PRId64
               " to it",
               in, r, out);
    MZ_REQUIRE((in == 0 || msg->recv) && (out == 0 || has_send), MZ_ERR_ARG,
               "NULL buffer for %" PRId64 " elements from rank %d of the "
               "group, %" PRId64 " to it",
               in, r, out);
  }
  MZ_REQUIRE(recv_count(msg, rank) == send_count(msg, rank, rank), MZ_ERR_ARG,
             "%" PRId64 " elements from this rank, %" PRId64 " to it",
             recv_count(msg, rank), send_count(msg, rank, rank));
  return MZ_OK;
}

static mz_status_t copy_own(mz_comm_t *comm, mz_flight_t *f, int rank)
{
  const mz_msg_t *msg = f->msg;
  int64_t bytes = recv_count(msg, rank) * (int64_t)msg->element_bytes;
  char *to = recv_block(msg, rank);
  const char *from = send_block(msg, rank, rank);

  if (bytes == 0 || to == from) return MZ_OK;
  if (!msg->backend || !comm->device) {
    memcpy(to, from, (size_t)bytes);
    return MZ_OK;
  }
  MZ_TRY(mz_device_copy(comm->device, to, from, bytes, comm->stream));
  MZ_TRY(mz_event_record(comm->device, f->copied, comm->stream));
  f->copying = true;
  return MZ_OK;
}

static mz_status_t to_ints(const int64_t *values, int size, int *out)
{
  for (int r = 0; r < size; r++)
    MZ_TRY(mz_int_from_i64(values[r], &out[r]));
  return MZ_OK;
}

static mz_status_t start_collective(mz_comm_t *comm, MPI_Comm wire,
                                    mz_flight_t *f, const mz_msg_t *msg,
                                    int size)
{
  int *in = f->ints, *in_at = in + comm->size;
  int *out = in_at + comm->size, *out_at = out + comm->size;
  MPI_Datatype type;

  MZ_TRY(element_type(comm, msg->element_bytes, &type));
  MZ_TRY(to_ints(msg->recv_counts, size, in));
  MZ_TRY(to_ints(msg->recv_displs, size, in_at));
  if (msg->kind == MZ_MSG_GATHER) {
    MZ_TRY(to_ints(&msg->send_count, 1, out));
    MZ_TRY_MPI(MPI_Iallgatherv(msg->send ? msg->send : MPI_IN_PLACE, out[0],
                               type, msg->recv, in, in_at, type, wire,
                               f->requests));
  } else {
    MZ_TRY(to_ints(msg->send_counts, size, out));
    MZ_TRY(to_ints(msg->send_displs, size, out_at));
    MZ_TRY_MPI(MPI_Ialltoallv(msg->send, out, out_at, type, msg->recv, in,
                              in_at, type, wire, f->requests));
  }
  f->num_requests = 1;
  return MZ_OK;
}

/* Request i < N receives from rank i of the group, N + i sends to it. One chunk
 * a direction and pair is on its way, so chunks cannot overtake each other. */
static mz_status_t start_chunk(mz_comm_t *comm, int lane, mz_flight_t *f, int i)
{
  const mz_msg_t *msg = f->phase == MZ_STAGE_WIRE ? &f->staged : f->msg;
  const mz_comm_group_t *group = &comm->groups[msg->group];
  bool receives = i < group->size;
  int peer = i % group->size;
  int64_t total =
      receives ? recv_count(msg, peer) : send_count(msg, group->rank, peer);
  int64_t at = f->moved[i] * (int64_t)msg->element_bytes;
  int count = (int)mz_min_i64(total - f->moved[i], comm->opts.count_limit);
  MPI_Datatype type;

  f->requests[i] = MPI_REQUEST_NULL;
  if (count == 0 || peer == group->rank) return MZ_OK;
  MZ_TRY(element_type(comm, msg->element_bytes, &type));
  f->moved[i] += count;
  if (receives)
    MZ_TRY_MPI(MPI_Irecv(recv_block(msg, peer) + at, count, type, peer, f->tag,
                         group->lanes[lane], &f->requests[i]));
  else
    MZ_TRY_MPI(MPI_Isend(send_block(msg, group->rank, peer) + at, count, type,
                         peer, f->tag, group->lanes[lane], &f->requests[i]));
  return MZ_OK;
}

static mz_status_t start_pairwise(mz_comm_t *comm, int lane, mz_flight_t *f,
                                  const mz_msg_t *msg)
{
  const mz_comm_group_t *group = &comm->groups[msg->group];
  int size = group->size;

  f->num_requests = 2 * size;
  for (int i = 0; i < 2 * size; i++) {
    f->moved[i] = 0;
    f->requests[i] = MPI_REQUEST_NULL;
  }
  for (int k = 1; k < size; k++)
    MZ_TRY(start_chunk(comm, lane, f, (group->rank + size - k) % size));
  for (int k = 1; k < size; k++)
    MZ_TRY(start_chunk(comm, lane, f, size + (group->rank + k) % size));
  if (f->phase != MZ_STAGE_NONE) return MZ_OK; /* it does not travel */
  return MZ_TRACE(copy_own(comm, f, group->rank));
}

/* The same on all ranks of the group. */
static bool goes_pairwise(const mz_comm_t *comm, const mz_msg_t *wire)
{
  if (comm->opts.count_limit < INT_MAX || wire->bound > INT_MAX) return true;
  if (comm->opts.form != MZ_FORM_AUTO)
    return comm->opts.form == MZ_FORM_PAIRWISE;
  return comm->device && wire->backend && comm->groups[wire->group].together;
}

static mz_status_t start_wire(mz_comm_t *comm, int lane, mz_flight_t *flight,
                              const mz_msg_t *wire)
{
  const mz_comm_group_t *group = &comm->groups[wire->group];

  if (goes_pairwise(comm, wire))
    return MZ_TRACE(start_pairwise(comm, lane, flight, wire));
  return MZ_TRACE(
      start_collective(comm, group->lanes[lane], flight, wire, group->size));
}

mz_status_t mz_wire_start(mz_comm_t *comm, int lane, mz_flight_t *flight)
{
  const mz_msg_t *msg = flight->msg;
  mz_comm_group_t *group = &comm->groups[msg->group];

  flight->num_requests = 0;
  flight->copying = false;
  flight->phase = MZ_STAGE_NONE;
  flight->tag = (int)(group->started[lane]++ % NUM_TAGS);
  MZ_TRY(check_blocks(msg, group->size, group->rank));
  if (group->size == 1) return MZ_TRACE(copy_own(comm, flight, 0));
  if (msg->backend && flight->room_bytes > 0)
    return MZ_TRACE(mz_staging_out(comm, flight, group->size, group->rank));
  return MZ_TRACE(start_wire(comm, lane, flight, msg));
}

/* Messages reach MPI in the order of posting, whichever copy is found first. */
static bool is_next_out(const mz_comm_t *comm, int lane, const mz_flight_t *f)
{
  const mz_ring_t *ring = &comm->rings[lane];

  for (int i = 0; i < ring->max_flight; i++)
    if (ring->flights[i].number && ring->flights[i].number < f->number &&
        ring->flights[i].phase == MZ_STAGE_OUT)
      return false;
  return true;
}

/* One that is not staged is with MPI at once. */
bool mz_wire_may_start(const mz_comm_t *comm, int lane, const mz_msg_t *next)
{
  const mz_ring_t *ring = &comm->rings[lane];

  if (next->backend && ring->flights[0].room_bytes > 0) return true;
  for (int i = 0; i < ring->max_flight; i++)
    if (ring->flights[i].number && ring->flights[i].phase == MZ_STAGE_OUT)
      return false;
  return true;
}

/* The copies of a staged message have ended: on to MPI, or that was all. */
static mz_status_t end_stage(mz_comm_t *comm, int lane, mz_flight_t *f,
                             bool *done_out)
{
  const mz_comm_group_t *group = &comm->groups[f->msg->group];

  *done_out = f->phase == MZ_STAGE_IN;
  if (*done_out || !is_next_out(comm, lane, f)) return MZ_OK;
  f->copying = false;
  f->phase = MZ_STAGE_WIRE;
  MZ_TRY(start_wire(comm, lane, f, &f->staged));
  if (f->msg->kind == MZ_MSG_EXCHANGE || f->msg->send)
    MZ_TRY(copy_own(comm, f, group->rank));
  return MZ_OK;
}

/* What travelled through host memory still has to be brought to its place. */
static mz_status_t end_wire(mz_comm_t *comm, mz_flight_t *f, bool *done_out)
{
  const mz_comm_group_t *group = &comm->groups[f->msg->group];

  if (!*done_out || f->phase != MZ_STAGE_WIRE) return MZ_OK;
  *done_out = false;
  return MZ_TRACE(mz_staging_in(comm, f, group->size, group->rank));
}

mz_status_t mz_wire_test(mz_comm_t *comm, int lane, mz_flight_t *flight,
                         bool *done_out)
{
  int num = 0;
  bool copied = true;

  *done_out = false;
  if (flight->copying)
    MZ_TRY(mz_event_done(comm->device, flight->copied, &copied));
  if (flight->phase == MZ_STAGE_OUT || flight->phase == MZ_STAGE_IN)
    return copied ? MZ_TRACE(end_stage(comm, lane, flight, done_out)) : MZ_OK;
  /* MPI moves on meanwhile: it makes no progress but in its calls */
  flight->copying = !copied;
  if (flight->num_requests == 1) {
    MZ_TRY_MPI(MPI_Test(flight->requests, &num, MPI_STATUS_IGNORE));
    *done_out = num != 0 && copied;
    return MZ_TRACE(end_wire(comm, flight, done_out));
  }
  MZ_TRY_MPI(MPI_Testsome(flight->num_requests, flight->requests, &num,
                          flight->ints, MPI_STATUSES_IGNORE));
  *done_out = num == MPI_UNDEFINED && copied; /* no request is left */
  for (int i = 0; num != MPI_UNDEFINED && i < num; i++)
    MZ_TRY(start_chunk(comm, lane, flight, flight->ints[i]));
  return MZ_TRACE(end_wire(comm, flight, done_out));
}
