/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The queue: one ring a lane, and the progress function that starts messages in
 * order and finds those that are done. The caller writes a slot and then
 * `posted`; the progressing side writes `started` and the slot's `done`.
 * Nothing is allocated here.
 */
#include "comm/comm_impl.h"

#include <sched.h>
#include <signal.h>
#include <string.h>
#include <time.h>

enum {
  IDLE_POLLS = 200,   /* polls without work before the thread sleeps */
  CONTROL_POLLS = 16, /* polls between two looks at the control messages */
  SLEEP_NS = 50000000 /* an idle rank answers a query after at most this */
};

int64_t mz_comm_now_ns(void)
{
  struct timespec t;

  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Progressing side: the messages. */

/* A message that is to be timed starts (+1) or ends (-1). */
static void count_timed(mz_comm_t *comm, int change)
{
  int64_t now = mz_comm_now_ns();

  if (comm->num_timed == 0) comm->timed_since_ns = now;
  comm->num_timed += change;
  if (comm->num_timed == 0)
    atomic_fetch_add(&comm->timed_ns, now - comm->timed_since_ns);
}

static void finish(mz_comm_t *comm, int lane, mz_flight_t *flight)
{
  mz_ring_t *ring = &comm->rings[lane];
  mz_slot_t *slot = &ring->slots[flight->number % MZ_RING];

  if (flight->msg->timed) count_timed(comm, -1);
  mz_comm_raise_flag(comm, lane, flight->number);
  atomic_store_explicit(&slot->done, flight->number, memory_order_release);
  flight->number = 0;
  ring->num_flight--;
}

static mz_status_t finish_done(mz_comm_t *comm, int lane, bool *moved)
{
  mz_ring_t *ring = &comm->rings[lane];
  bool done;

  for (int i = 0; i < ring->max_flight; i++) {
    if (!ring->flights[i].number) continue;
    MZ_TRY(mz_wire_test(comm, lane, &ring->flights[i], &done));
    if (!done) continue;
    finish(comm, lane, &ring->flights[i]);
    *moved = true;
  }
  return MZ_OK;
}

static mz_status_t start_next(mz_comm_t *comm, int lane, uint64_t number)
{
  mz_ring_t *ring = &comm->rings[lane];
  const mz_msg_t *msg = &ring->slots[number % MZ_RING].msg;
  mz_flight_t *flight = ring->flights;

  while (flight->number) /* one is free: num_flight < max_flight */
    flight++;
  if (msg->bind) MZ_TRY(msg->bind(msg->ctx));
  if (msg->timed) count_timed(comm, 1);
  flight->msg = msg;
  MZ_TRY(mz_wire_start(comm, lane, flight));
  flight->number = number;
  ring->num_flight++;
  atomic_store_explicit(&ring->started, number, memory_order_release);
  if (flight->num_requests == 0 && !flight->copying) finish(comm, lane, flight);
  return MZ_OK;
}

/* Counts are there and the device has written what is sent. */
static mz_status_t is_ready(mz_comm_t *comm, int lane, const mz_slot_t *slot,
                            bool *ready_out)
{
  mz_ticket_t after = slot->msg.after;

  *ready_out = (!after.number || mz_comm_is_done(comm, after)) &&
               mz_wire_may_start(comm, lane, &slot->msg);
  if (!*ready_out || !comm->device) return MZ_OK;
  return MZ_TRACE(mz_event_done(comm->device, slot->ready, ready_out));
}

static mz_status_t start_ready(mz_comm_t *comm, int lane, bool *moved)
{
  mz_ring_t *ring = &comm->rings[lane];
  uint64_t posted = atomic_load_explicit(&ring->posted, memory_order_acquire);
  uint64_t next =
      atomic_load_explicit(&ring->started, memory_order_relaxed) + 1;

  for (; next <= posted && ring->num_flight < ring->max_flight; next++) {
    bool ready;

    MZ_TRY(is_ready(comm, lane, &ring->slots[next % MZ_RING], &ready));
    if (!ready) break;
    MZ_TRY(start_next(comm, lane, next));
    *moved = true;
  }
  return MZ_OK;
}

static bool has_work(mz_comm_t *comm)
{
  for (int lane = 0; lane < MZ_NUM_LANES; lane++) {
    mz_ring_t *ring = &comm->rings[lane];

    if (ring->num_flight > 0 ||
        atomic_load(&ring->posted) != atomic_load(&ring->started))
      return !atomic_load(&comm->failed);
  }
  return false;
}

static mz_status_t move_messages(mz_comm_t *comm, bool *moved)
{
  for (int lane = 0; lane < MZ_NUM_LANES; lane++)
    MZ_TRY(finish_done(comm, lane, moved));
  for (int lane = 0; lane < MZ_NUM_LANES; lane++)
    MZ_TRY(start_ready(comm, lane, moved));
  return MZ_OK;
}

void mz_queue_progress(mz_comm_t *comm)
{
  bool moved = false;

  if (!atomic_load(&comm->failed)) {
    mz_status_t st = move_messages(comm, &moved);
    if (st != MZ_OK) mz_watchdog_fail(comm, st, mz_error_message());
  }
  if (moved) comm->moved_ns = mz_comm_now_ns();
  if (comm->polls++ % CONTROL_POLLS == 0 || !has_work(comm))
    mz_watchdog_step(comm);
}

/* Progressing side: the thread. */

static void sleep_until_posted(mz_comm_t *comm)
{
  int64_t until = mz_comm_now_ns() + SLEEP_NS;
  struct timespec t = {.tv_sec = until / 1000000000,
                       .tv_nsec = until % 1000000000};

  pthread_mutex_lock(&comm->mutex);
  /* The caller writes `posted` and then reads `sleeping`: with this order one
   * of the two sees the other's. */
  atomic_store(&comm->sleeping, true);
  if (!has_work(comm) && !atomic_load(&comm->stop))
    pthread_cond_clockwait(&comm->wake, &comm->mutex, CLOCK_MONOTONIC, &t);
  atomic_store(&comm->sleeping, false);
  pthread_mutex_unlock(&comm->mutex);
}

static void *run_thread(void *ctx)
{
  mz_comm_t *comm = ctx;
  int idle = 0;

  if (comm->device) {
    mz_status_t st = mz_device_attach(comm->device);
    if (st != MZ_OK) mz_watchdog_fail(comm, st, mz_error_message());
  }
  while (!atomic_load(&comm->stop)) {
    mz_queue_progress(comm);
    if (has_work(comm)) idle = 0;
    if (idle++ < IDLE_POLLS) {
      sched_yield();
    } else {
      idle = IDLE_POLLS;
      sleep_until_posted(comm);
    }
  }
  return NULL;
}

static void wake_thread(mz_comm_t *comm)
{
  if (!atomic_load(&comm->sleeping)) return;
  pthread_mutex_lock(&comm->mutex);
  pthread_cond_signal(&comm->wake);
  pthread_mutex_unlock(&comm->mutex);
}

mz_status_t mz_queue_resume(mz_comm_t *comm)
{
  sigset_t all, old;
  int error;

  if (!comm->opts.thread || comm->running) return MZ_OK;
  atomic_store(&comm->stop, false);
  sigfillset(&all); /* signals are the caller's business */
  pthread_sigmask(SIG_SETMASK, &all, &old);
  error = pthread_create(&comm->thread, NULL, run_thread, comm);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  MZ_REQUIRE(error == 0, MZ_ERR_NOMEM, "communication thread: %s",
             strerror(error));
  comm->running = true;
  return MZ_OK;
}

void mz_queue_pause(mz_comm_t *comm)
{
  if (!comm->running) return;
  atomic_store(&comm->stop, true);
  wake_thread(comm);
  pthread_join(comm->thread, NULL);
  comm->running = false;
}

/* The caller's side. */

static mz_status_t check_failed(mz_comm_t *comm)
{
  int failed = atomic_load_explicit(&comm->failed, memory_order_acquire);

  MZ_REQUIRE(failed == MZ_OK, (mz_status_t)failed, "%s", comm->failure);
  return MZ_OK;
}

static mz_status_t check_message(const mz_comm_t *comm, mz_lane_t lane,
                                 const mz_msg_t *msg)
{
  bool exchange = msg->kind == MZ_MSG_EXCHANGE;

  MZ_REQUIRE(lane >= 0 && lane < MZ_NUM_LANES, MZ_ERR_ARG, "lane %d",
             (int)lane);
  MZ_REQUIRE(exchange || msg->kind == MZ_MSG_GATHER, MZ_ERR_ARG,
             "message kind %d", (int)msg->kind);
  MZ_REQUIRE(msg->group >= 0 && msg->group < comm->num_groups, MZ_ERR_ARG,
             "group %d of %d", msg->group, comm->num_groups);
  MZ_REQUIRE(msg->element_bytes >= 1, MZ_ERR_ARG, "elements of 0 bytes");
  MZ_REQUIRE(msg->recv_counts && msg->recv_displs &&
                 (!exchange || (msg->send_counts && msg->send_displs)),
             MZ_ERR_ARG, "an array of counts or displacements is NULL");
  MZ_REQUIRE(msg->after.number == 0 ||
                 (msg->after.lane < MZ_NUM_LANES &&
                  msg->after.number <=
                      atomic_load(&comm->rings[msg->after.lane].posted)),
             MZ_ERR_ARG, "after message %" PRIu64 ", which is not posted",
             msg->after.number);
  return MZ_OK;
}

mz_status_t mz_comm_post(mz_comm_t *comm, mz_lane_t lane, const mz_msg_t *msg,
                         mz_ticket_t *ticket_out)
{
  mz_ticket_t ticket = {.lane = lane};
  mz_ring_t *ring;

  MZ_REQUIRE(comm && msg && ticket_out, MZ_ERR_ARG,
             "comm, msg or ticket_out is NULL");
  MZ_TRY(check_message(comm, lane, msg));
  ring = &comm->rings[lane];
  ticket.number = atomic_load(&ring->posted) + 1;
  if (ticket.number > MZ_RING) /* whose slot it takes */
    MZ_TRY(mz_comm_wait(comm, (mz_ticket_t){lane, ticket.number - MZ_RING}));
  MZ_TRY(check_failed(comm));

  ring->slots[ticket.number % MZ_RING].msg = *msg;
  if (comm->device)
    MZ_TRY(mz_event_record(comm->device,
                           ring->slots[ticket.number % MZ_RING].ready,
                           comm->device->stream));
  atomic_store(&ring->posted, ticket.number);
  if (comm->running)
    wake_thread(comm);
  else
    mz_queue_progress(comm);
  *ticket_out = ticket;
  return MZ_OK;
}

bool mz_comm_done(mz_comm_t *comm, mz_ticket_t ticket)
{
  if (!comm->running) mz_queue_progress(comm);
  return atomic_load(&comm->failed) || mz_comm_is_done(comm, ticket);
}

static void wait_until_done(mz_comm_t *comm, mz_ticket_t ticket)
{
  int64_t begin = mz_comm_now_ns();

  atomic_store(&comm->wait_lane, (int)ticket.lane);
  atomic_store(&comm->wait_ns, begin);
  while (!mz_comm_done(comm, ticket))
    sched_yield();
  atomic_store(&comm->wait_ns, 0);
  comm->wait_s += (double)(mz_comm_now_ns() - begin) * 1e-9;
}

mz_status_t mz_comm_check_wait(mz_comm_t *comm, mz_ticket_t ticket)
{
  MZ_REQUIRE(comm && ticket.lane >= 0 && ticket.lane < MZ_NUM_LANES, MZ_ERR_ARG,
             "comm %p, lane %d", (void *)comm, (int)ticket.lane);
  if (ticket.number == 0) return MZ_OK;
  MZ_REQUIRE(ticket.number <= atomic_load(&comm->rings[ticket.lane].posted),
             MZ_ERR_ARG, "message %" PRIu64 " of the %s lane is not posted",
             ticket.number, mz_comm_lane_name((int)ticket.lane));
  return MZ_TRACE(check_failed(comm));
}

mz_status_t mz_comm_wait(mz_comm_t *comm, mz_ticket_t ticket)
{
  mz_status_t st = mz_comm_check_wait(comm, ticket);

  if (st != MZ_OK || ticket.number == 0) return MZ_TRACE(st);
  if (!mz_comm_is_done(comm, ticket)) wait_until_done(comm, ticket);
  return MZ_TRACE(check_failed(comm));
}

double mz_comm_take_timed_seconds(mz_comm_t *comm)
{
  return 1e-9 * (double)atomic_exchange(&comm->timed_ns, 0);
}

double mz_comm_take_wait_seconds(mz_comm_t *comm)
{
  double seconds = comm->wait_s;

  comm->wait_s = 0;
  return seconds;
}
