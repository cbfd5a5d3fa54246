/* SPDX-License-Identifier: Apache-2.0 */
/**
 * What the files of src/comm share. Two sides touch these structures: the
 * *caller* (post, wait, done) and the *progressing side* (the thread, or the
 * caller itself in the inline form). A field belongs to one side unless it is
 * atomic. Letters: W ranks of world, N ranks of a group.
 */
#ifndef MZ_COMM_COMM_IMPL_H
#define MZ_COMM_COMM_IMPL_H

#include "comm/comm.h"

#include "base/check.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
  MZ_RING = 64,      /* messages of a lane between post and done */
  MZ_MAX_FLIGHT = 4, /* started and not done, whatever the lane */
  MZ_MAX_TYPES = 32, /* element sizes with an MPI type of their own */
  MZ_TEXT_BYTES = 256
};

#define MZ_TRY_MPI(call) MZ_TRY(mz_comm_mpi_status((call), #call))

/** Where a message in backend memory stands that MPI cannot take from there. */
typedef enum mz_stage {
  MZ_STAGE_NONE, /* it goes as it is */
  MZ_STAGE_OUT,  /* to host memory */
  MZ_STAGE_WIRE,
  MZ_STAGE_IN /* to its place */
} mz_stage_t;

/** A started message. The arrays are as long as the largest group, world. */
typedef struct mz_flight {
  uint64_t number; /* 0: free */
  const mz_msg_t *msg;
  int num_requests; /* 0: done at its start */
  int tag;
  MPI_Request *requests; /* [2 W]: one; pairwise: receives, then sends */
  mz_event_t copied;     /* of the own part in backend memory */
  bool copying;          /* it is not done yet */
  mz_stage_t phase;
  mz_msg_t staged;    /* what travels in its stead */
  char *room;         /* [2, room_bytes] host memory: sent, received */
  int64_t room_bytes; /* 0: MPI takes backend memory */
  int64_t *blocks;    /* [4, W] counts and displacements of staged */
  int *ints;          /* [4, W] counts and displacements; or indices */
  int64_t *moved;     /* [2 W] pairwise: elements of the chunks so far */
} mz_flight_t;

typedef struct mz_slot {
  mz_msg_t msg;          /* written by the caller before `posted` passes it */
  mz_event_t ready;      /* likewise: recorded when it is posted */
  _Atomic uint64_t done; /* number of the last message of this slot done */
} mz_slot_t;

typedef struct mz_ring {
  _Atomic uint64_t posted;  /* written by the caller */
  _Atomic uint64_t started; /* written by the progressing side */
  mz_slot_t slots[MZ_RING]; /* message n lies in slot n mod MZ_RING */
  mz_flight_t flights[MZ_MAX_FLIGHT];
  int max_flight, num_flight;
} mz_ring_t;

typedef struct mz_comm_group {
  char name[MZ_NAME_MAX];
  int size, rank;
  bool together;                  /* its ranks share a machine */
  MPI_Comm lanes[MZ_NUM_LANES];   /* MPI_COMM_NULL when size is 1 */
  uint32_t started[MZ_NUM_LANES]; /* for tags: same on all ranks of the group */
} mz_comm_group_t;

typedef enum mz_control_kind {
  MZ_CONTROL_QUERY,  /* where are you? */
  MZ_CONTROL_ANSWER, /* here: positions */
  MZ_CONTROL_VERDICT /* it is over: text */
} mz_control_kind_t;

/** Where a rank stands on a lane. Groups send different numbers of messages, so
 * only those of all ranks together compare; then the lane's, which do so within
 * a group. */
typedef struct mz_position {
  uint64_t shared;  /* messages of group 0 started */
  uint64_t started; /* of any group */
} mz_position_t;

/** What travels on the control communicator. */
typedef struct mz_control {
  int64_t kind;
  mz_position_t positions[MZ_NUM_LANES];
  char text[MZ_TEXT_BYTES];
} mz_control_t;

/** Each rank sends at most one query and one verdict: an alarm is final. */
typedef struct mz_watchdog {
  mz_control_t received, query, verdict;
  mz_control_t *answers;    /* [W] */
  MPI_Request receive;      /* from anybody; persistent */
  MPI_Request *sends;       /* [3, W] queries, answers, verdicts */
  bool *answered;           /* [W] */
  mz_position_t *positions; /* [W, lanes] of those that answered */
  bool asked;
  int64_t asked_ns;
} mz_watchdog_t;

struct mz_comm {
  mz_comm_opts_t opts;
  mz_device_t *device; /* NULL: messages are ready when they are posted */
  mz_stream_t stream;  /* of own copies in backend memory */
  uint32_t *flags;     /* of stream.c; NULL: the stream does not wait */
  int rank, size;
  MPI_Comm control;
  mz_comm_group_t *groups;
  int64_t max_groups;
  int num_groups;

  /* Progressing side. */
  int next_type;
  struct {
    size_t bytes;
    MPI_Datatype type;
  } types[MZ_MAX_TYPES];
  mz_ring_t rings[MZ_NUM_LANES];
  mz_watchdog_t watchdog;
  int64_t moved_ns; /* time of the last start or completion */
  int num_timed;    /* messages under way that are to be timed */
  int64_t timed_since_ns;
  _Atomic int64_t timed_ns; /* read by the caller between them */
  uint32_t polls;

  /* The first failure; `failure` is written before `failed`. */
  _Atomic int failed;
  char failure[MZ_TEXT_BYTES];

  /* The caller's wait; 0: it does not wait. */
  _Atomic int64_t wait_ns;
  double wait_s;
  _Atomic int wait_lane;

  /* The message that the device's stream was last told to wait for, written by
     the caller; number 0: none. `ns` and `lane` are written before `number`. */
  struct {
    _Atomic uint64_t number;
    _Atomic int lane;
    _Atomic int64_t ns;
  } awaited;

  _Atomic int patience; /* what watchdog_s is multiplied by */

  /* The thread; while it does not run, progress is inline. */
  bool running;
  atomic_bool stop, sleeping;
  pthread_t thread;
  pthread_mutex_t mutex; /* for `wake` only */
  pthread_cond_t wake;

  int64_t *counts, *displs; /* [W] of the calls in agree.c */
  int64_t *values;          /* [W] */
};

/* comm.c */
mz_status_t mz_comm_mpi_status(int code, const char *call);
const char *mz_comm_lane_name(int lane);

/* staging.c: messages through host memory; progressing side but for the first
 * two. */
mz_status_t mz_staging_create(mz_comm_t *comm,
                              const int64_t bytes[MZ_NUM_LANES]);
void mz_staging_destroy(mz_comm_t *comm);
mz_status_t mz_staging_out(mz_comm_t *comm, mz_flight_t *f, int size, int rank);
mz_status_t mz_staging_in(mz_comm_t *comm, mz_flight_t *f, int size, int rank);

/* device.c: events and stream of a device. */
void mz_comm_leave_device(mz_comm_t *comm);

/* stream.c: waits of the device's stream. */
mz_status_t mz_comm_make_flags(mz_comm_t *comm);
/** The stream is done with them first. */
void mz_comm_free_flags(mz_comm_t *comm);
/** A message is done. Progressing side. */
void mz_comm_raise_flag(mz_comm_t *comm, int lane, uint64_t number);
/** Ends all waits of the stream. Progressing side. */
void mz_comm_raise_all_flags(mz_comm_t *comm);

/* queue.c */
/* What mz_comm_wait refuses, and a failure that is known. */
mz_status_t mz_comm_check_wait(mz_comm_t *comm, mz_ticket_t ticket);
int64_t mz_comm_now_ns(void);
mz_status_t mz_queue_resume(mz_comm_t *comm); /* starts the thread, if wanted */
void mz_queue_pause(mz_comm_t *comm);         /* stops and joins it */
void mz_queue_progress(mz_comm_t *comm);

/* wire.c: starts and tests one message; progressing side. */
mz_status_t mz_wire_start(mz_comm_t *comm, int lane, mz_flight_t *flight);
/* Whether the next message of the lane reaches MPI behind those before it. */
bool mz_wire_may_start(const mz_comm_t *comm, int lane, const mz_msg_t *next);
mz_status_t mz_wire_test(mz_comm_t *comm, int lane, mz_flight_t *flight,
                         bool *done_out);
void mz_wire_free_types(mz_comm_t *comm);

/* watchdog.c: all but create and destroy on the progressing side. */
mz_status_t mz_watchdog_create(mz_comm_t *comm);
mz_status_t mz_watchdog_listen(mz_comm_t *comm);
void mz_watchdog_close(mz_comm_t *comm);
void mz_watchdog_destroy(mz_comm_t *comm);
void mz_watchdog_step(mz_comm_t *comm);
/** Records the first failure and tells it to the other ranks. */
void mz_watchdog_fail(mz_comm_t *comm, mz_status_t status, const char *text);

static inline bool mz_comm_is_done(const mz_comm_t *comm, mz_ticket_t ticket)
{
  const mz_slot_t *slot =
      &comm->rings[ticket.lane].slots[ticket.number % MZ_RING];

  return atomic_load_explicit(&slot->done, memory_order_acquire) >=
         ticket.number;
}

#endif
