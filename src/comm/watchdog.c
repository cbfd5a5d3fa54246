/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Who is late, who is dead. Every rank listens on the control communicator
 * whenever it makes progress. A rank whose wait saw no progress for watchdog_s
 * asks all others where they are, gives them a few seconds, and tells the
 * verdict to all, so that every rank that still listens ends with the same
 * text.
 */
#include "comm/comm_impl.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

enum { CONTROL_TAG = 1 };

static const int64_t answer_ns = 3000000000; /* time for answers */
static const int64_t flush_ns = 200000000;   /* for the verdict to leave */

mz_status_t mz_watchdog_create(mz_comm_t *comm)
{
  mz_watchdog_t *dog = &comm->watchdog;

  dog->receive = MPI_REQUEST_NULL;
  MZ_TRY(mz_new(comm->size, "watchdog answers", &dog->answers));
  /* a request may be a pointer: NOLINTNEXTLINE(bugprone-sizeof-*) */
  MZ_TRY(mz_new(3 * (int64_t)comm->size, "watchdog sends", &dog->sends));
  MZ_TRY(mz_new(comm->size, "watchdog answered", &dog->answered));
  MZ_TRY(mz_new(MZ_NUM_LANES * (int64_t)comm->size, "watchdog positions",
                &dog->positions));
  for (int i = 0; i < 3 * comm->size; i++)
    dog->sends[i] = MPI_REQUEST_NULL;
  return MZ_OK;
}

void mz_watchdog_destroy(mz_comm_t *comm)
{
  mz_free(comm->watchdog.positions);
  mz_free(comm->watchdog.answered);
  mz_free(comm->watchdog.sends);
  mz_free(comm->watchdog.answers);
}

mz_status_t mz_watchdog_listen(mz_comm_t *comm)
{
  mz_watchdog_t *dog = &comm->watchdog;

  if (comm->size == 1) return MZ_OK;
  MZ_TRY_MPI(MPI_Recv_init(&dog->received, sizeof dog->received, MPI_BYTE,
                           MPI_ANY_SOURCE, CONTROL_TAG, comm->control,
                           &dog->receive));
  MZ_TRY_MPI(MPI_Start(&dog->receive));
  return MZ_OK;
}

/* Local: the receive must not outlive its buffer. */
void mz_watchdog_close(mz_comm_t *comm)
{
  mz_watchdog_t *dog = &comm->watchdog;

  if (dog->receive == MPI_REQUEST_NULL) return;
  MPI_Cancel(&dog->receive);
  /* started by MPI_Start: NOLINTNEXTLINE(clang-analyzer-optin.mpi.*) */
  MPI_Wait(&dog->receive, MPI_STATUS_IGNORE);
  MPI_Request_free(&dog->receive);
}

/* The outcome of a control send does not matter: a peer that cannot be reached
 * is one that does not answer. */
static void send_control(mz_comm_t *comm, mz_control_t *control, int to)
{
  mz_watchdog_t *dog = &comm->watchdog;

  MPI_Isend(control, sizeof *control, MPI_BYTE, to, CONTROL_TAG, comm->control,
            &dog->sends[control->kind * comm->size + to]);
}

static void send_to_others(mz_comm_t *comm, mz_control_t *control)
{
  for (int k = 1; k < comm->size; k++)
    send_control(comm, control, (comm->rank + k) % comm->size);
}

static mz_position_t own_position(const mz_comm_t *comm, int lane)
{
  return (mz_position_t){.shared = comm->groups[0].started[lane],
                         .started = atomic_load(&comm->rings[lane].started)};
}

static void fill_position(mz_comm_t *comm, mz_control_t *control)
{
  for (int lane = 0; lane < MZ_NUM_LANES; lane++)
    control->positions[lane] = own_position(comm, lane);
}

static void record_failure(mz_comm_t *comm, mz_status_t status,
                           const char *text)
{
  snprintf(comm->failure, sizeof comm->failure, "%s", text);
  atomic_store_explicit(&comm->failed, (int)status, memory_order_release);
  mz_comm_raise_all_flags(comm);
}

static void tell_verdict(mz_comm_t *comm)
{
  mz_watchdog_t *dog = &comm->watchdog;
  int64_t until = mz_comm_now_ns() + flush_ns;
  int sent = 0;

  send_to_others(comm, &dog->verdict);
  while (!sent && mz_comm_now_ns() < until)
    if (MPI_Testall(comm->size, dog->sends + MZ_CONTROL_VERDICT * comm->size,
                    &sent, MPI_STATUSES_IGNORE) != MPI_SUCCESS)
      return;
}

void mz_watchdog_fail(mz_comm_t *comm, mz_status_t status, const char *text)
{
  mz_watchdog_t *dog = &comm->watchdog;

  if (atomic_load(&comm->failed)) return;
  dog->verdict.kind = MZ_CONTROL_VERDICT;
  snprintf(dog->verdict.text, sizeof dog->verdict.text, "rank %d failed: %s",
           comm->rank, text);
  record_failure(comm, status, text);
  tell_verdict(comm);
}

/* Progressing side: what others say. */

static void take(mz_comm_t *comm, int from)
{
  mz_watchdog_t *dog = &comm->watchdog;
  const mz_control_t *received = &dog->received;

  switch ((mz_control_kind_t)received->kind) {
  case MZ_CONTROL_QUERY:
    dog->answers[from].kind = MZ_CONTROL_ANSWER;
    fill_position(comm, &dog->answers[from]);
    send_control(comm, &dog->answers[from], from);
    break;
  case MZ_CONTROL_ANSWER:
    dog->answered[from] = true;
    memcpy(dog->positions + from * MZ_NUM_LANES, received->positions,
           sizeof received->positions);
    break;
  case MZ_CONTROL_VERDICT:
    if (!atomic_load(&comm->failed))
      record_failure(comm, MZ_ERR_PEER, received->text);
    break;
  }
}

static void listen(mz_comm_t *comm)
{
  mz_watchdog_t *dog = &comm->watchdog;
  MPI_Status status;
  int arrived = 1;

  while (dog->receive != MPI_REQUEST_NULL) {
    if (MPI_Test(&dog->receive, &arrived, &status) != MPI_SUCCESS || !arrived)
      return;
    take(comm, status.MPI_SOURCE);
    if (MPI_Start(&dog->receive) != MPI_SUCCESS) return;
  }
}

/* Progressing side: the alarm. */

static bool all_answered(const mz_comm_t *comm)
{
  for (int r = 0; r < comm->size; r++)
    if (r != comm->rank && !comm->watchdog.answered[r]) return false;
  return true;
}

static bool is_behind(mz_position_t a, mz_position_t b)
{
  return a.shared != b.shared ? a.shared < b.shared : a.started < b.started;
}

/* The rank that is furthest behind this one on the lane; -1: none. */
static int find_late(const mz_comm_t *comm, int lane)
{
  const mz_watchdog_t *dog = &comm->watchdog;
  mz_position_t lowest = own_position(comm, lane);
  int late = -1;

  for (int r = 0; r < comm->size; r++) {
    mz_position_t position = dog->positions[r * MZ_NUM_LANES + lane];

    if (r == comm->rank || !dog->answered[r] || !is_behind(position, lowest))
      continue;
    lowest = position;
    late = r;
  }
  return late;
}

/* In the numbers that tell who is behind. */
static void write_late(const mz_comm_t *comm, int lane, int late, char *text,
                       size_t bytes, const char *before)
{
  mz_position_t own = own_position(comm, lane);
  mz_position_t his = comm->watchdog.positions[late * MZ_NUM_LANES + lane];
  bool shared = own.shared != his.shared;

  snprintf(text, bytes,
           "%srank %d is late: %s lane at %" PRIu64 ", rank %d at %" PRIu64,
           before, late, mz_comm_lane_name(lane),
           shared ? his.shared : his.started, comm->rank,
           shared ? own.shared : own.started);
}

static void write_verdict(mz_comm_t *comm, char *text, size_t bytes)
{
  const mz_watchdog_t *dog = &comm->watchdog;
  int first = atomic_load(&comm->wait_lane);
  size_t used = 0;

  for (int r = 0; r < comm->size && used < bytes; r++)
    if (r != comm->rank && !dog->answered[r])
      used +=
          (size_t)snprintf(text + used, bytes - used,
                           "%srank %d does not answer", used ? "; " : "", r);
  for (int k = 0; k < MZ_NUM_LANES && used < bytes; k++) {
    int lane = (first + k) % MZ_NUM_LANES;
    int late = find_late(comm, lane);

    if (late < 0) continue;
    write_late(comm, lane, late, text + used, bytes - used, used ? "; " : "");
    return;
  }
  if (used == 0)
    snprintf(text, bytes,
             "no progress of rank %d in %g s: %s lane at %" PRIu64
             ", no rank is behind it",
             comm->rank, comm->opts.watchdog_s, mz_comm_lane_name(first),
             (uint64_t)atomic_load(&comm->rings[first].started));
}

/* When the caller, or else the device's stream, began to wait; 0: none does. */
static int64_t waiting_since(const mz_comm_t *comm)
{
  int64_t since = atomic_load(&comm->wait_ns);

  if (since != 0 || mz_comm_awaited(comm).number == 0) return since;
  return atomic_load(&comm->awaited.ns);
}

static void raise_alarm(mz_comm_t *comm)
{
  mz_watchdog_t *dog = &comm->watchdog;
  int64_t now = mz_comm_now_ns();
  int64_t since = waiting_since(comm);

  if (!dog->asked) {
    double limit_s = comm->opts.watchdog_s * atomic_load(&comm->patience);

    if (since == 0 ||
        (double)(now - mz_max_i64(since, comm->moved_ns)) * 1e-9 < limit_s)
      return;
    dog->asked = true;
    dog->asked_ns = now;
    dog->query.kind = MZ_CONTROL_QUERY;
    send_to_others(comm, &dog->query);
  } else if (all_answered(comm) || now - dog->asked_ns > answer_ns) {
    dog->verdict.kind = MZ_CONTROL_VERDICT;
    write_verdict(comm, dog->verdict.text, sizeof dog->verdict.text);
    record_failure(comm, MZ_ERR_PEER, dog->verdict.text);
    tell_verdict(comm);
  }
}

void mz_comm_stretch_watchdog(mz_comm_t *comm, int factor)
{
  atomic_store(&comm->patience, factor);
}

void mz_watchdog_step(mz_comm_t *comm)
{
  listen(comm);
  if (comm->opts.watchdog_s > 0 && !atomic_load(&comm->failed))
    raise_alarm(comm);
}
