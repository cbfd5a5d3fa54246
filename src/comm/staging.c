/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Messages in backend memory where MPI takes none: the blocks for others are
 * copied to host memory of the device, travel from there, and what arrived is
 * copied to its place. The own block stays in backend memory. Every flight has
 * room for the largest message; the progressing side never waits for a copy.
 */
#include "comm/comm_impl.h"

#include "base/alloc.h"

mz_status_t mz_staging_create(mz_comm_t *comm,
                              const int64_t bytes[MZ_NUM_LANES])
{
  for (int lane = 0; lane < MZ_NUM_LANES; lane++)
    for (int i = 0; i < comm->rings[lane].max_flight; i++) {
      mz_flight_t *f = &comm->rings[lane].flights[i];

      f->room_bytes = bytes[lane];
      MZ_TRY(mz_device_alloc_host(comm->device, 2 * bytes[lane],
                                  "staging of messages", (void **)&f->room));
      MZ_TRY(mz_new(4 * (int64_t)comm->size, "blocks of a staged message",
                    &f->blocks));
    }
  return MZ_OK;
}

void mz_staging_destroy(mz_comm_t *comm)
{
  for (int lane = 0; lane < MZ_NUM_LANES; lane++)
    for (int i = 0; i < comm->rings[lane].max_flight; i++) {
      mz_flight_t *f = &comm->rings[lane].flights[i];

      mz_device_free_host(comm->device, f->room);
      mz_free(f->blocks);
      f->room = NULL;
      f->blocks = NULL;
    }
}

/* Blocks one behind another; the own one takes no room. @return elements. */
static int64_t pack(const int64_t *counts, int size, int rank, int64_t *out,
                    int64_t *displs_out)
{
  int64_t at = 0;

  for (int r = 0; r < size; r++) {
    out[r] = r == rank ? 0 : counts[r];
    displs_out[r] = at;
    at += out[r];
  }
  return at;
}

/* The message between the rooms of the ranks, without the own block. A gather's
 * send block goes out whole, whoever it is for. */
static mz_status_t describe(mz_comm_t *comm, mz_flight_t *f, int size, int rank)
{
  const mz_msg_t *m = f->msg;
  int64_t *in = f->blocks, *in_at = in + comm->size;
  int64_t *out = in_at + comm->size, *out_at = out + comm->size;
  int64_t element = (int64_t)m->element_bytes;
  int64_t received = pack(m->recv_counts, size, rank, in, in_at);
  int64_t sent = m->send ? m->send_count : m->recv_counts[rank];

  if (m->kind == MZ_MSG_EXCHANGE)
    sent = pack(m->send_counts, size, rank, out, out_at);
  MZ_REQUIRE(mz_max_i64(received, sent) * element <= f->room_bytes,
             MZ_ERR_INTERNAL,
             "a staged message of %" PRId64 " and %" PRId64
             " bytes, planned are %" PRId64,
             received * element, sent * element, f->room_bytes);
  if (m->kind == MZ_MSG_GATHER) { /* MPI wants the own block's place, too */
    in[rank] = sent;
    in_at[rank] = received;
    MZ_REQUIRE((received + sent) * element <= f->room_bytes, MZ_ERR_INTERNAL,
               "a staged gather of %" PRId64 " bytes, planned are %" PRId64,
               (received + sent) * element, f->room_bytes);
  }
  f->staged = *m;
  f->staged.backend = false;
  f->staged.send = f->room;
  f->staged.recv = f->room + f->room_bytes;
  f->staged.send_count = sent;
  f->staged.recv_counts = in;
  f->staged.recv_displs = in_at;
  f->staged.send_counts = out;
  f->staged.send_displs = out_at;
  return MZ_OK;
}

static mz_status_t copy_blocks(mz_comm_t *comm, const mz_flight_t *f, int size,
                               int rank, bool out)
{
  const mz_msg_t *m = f->msg, *s = &f->staged;
  int64_t element = (int64_t)m->element_bytes;

  for (int r = 0; r < size; r++) {
    int64_t num = out ? s->send_counts[r] : s->recv_counts[r];

    if (r == rank || num == 0) continue;
    if (out)
      MZ_TRY(mz_device_copy(comm->device,
                            (char *)s->send + s->send_displs[r] * element,
                            (const char *)m->send + m->send_displs[r] * element,
                            num * element, comm->stream));
    else
      MZ_TRY(mz_device_copy(comm->device,
                            (char *)m->recv + m->recv_displs[r] * element,
                            (const char *)s->recv + s->recv_displs[r] * element,
                            num * element, comm->stream));
  }
  return MZ_OK;
}

static mz_status_t mark(mz_comm_t *comm, mz_flight_t *f)
{
  MZ_TRY(mz_event_record(comm->device, f->copied, comm->stream));
  f->copying = true;
  return MZ_OK;
}

mz_status_t mz_staging_out(mz_comm_t *comm, mz_flight_t *f, int size, int rank)
{
  const mz_msg_t *m = f->msg;
  const char *own;

  MZ_TRY(describe(comm, f, size, rank));
  if (m->kind == MZ_MSG_EXCHANGE) {
    MZ_TRY(copy_blocks(comm, f, size, rank, true));
  } else {
    own = m->send ? (const char *)m->send
                  : (const char *)m->recv +
                        m->recv_displs[rank] * (int64_t)m->element_bytes;
    MZ_TRY(mz_device_copy(comm->device, f->room, own,
                          f->staged.send_count * (int64_t)m->element_bytes,
                          comm->stream));
  }
  f->phase = MZ_STAGE_OUT;
  return MZ_TRACE(mark(comm, f));
}

mz_status_t mz_staging_in(mz_comm_t *comm, mz_flight_t *f, int size, int rank)
{
  MZ_TRY(copy_blocks(comm, f, size, rank, false));
  f->phase = MZ_STAGE_IN;
  return MZ_TRACE(mark(comm, f));
}
