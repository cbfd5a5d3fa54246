/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Communicators and the queue: the only code that calls MPI.
 *
 * Two wire primitives, *exchange* (bytes to every peer) and *gather*; two lanes
 * a rank, *exchange* (counts, tokens, scalars) and *bulk* (parameters,
 * gradients), each on its own communicator per group, named
 * "mz.<lane>.<group>". The caller posts messages into one single-producer ring
 * a lane. The communication thread (or, with thread = false, the same progress
 * function inside post and wait) starts the messages of a lane strictly in the
 * order of posting, each when it is ready and, if late-bound, when the message
 * that it waits for is done; started messages finish in any order, at most 4
 * (exchange) or 2 (bulk) in flight. Only non-blocking calls, collective or
 * between pairs, and MPI_Test. No MPI reduction ever sees a number.
 *
 * Collectivity: create, add_group, agree and destroy are collective on the
 * communicator; post is collective on the message's group, in the same order of
 * a lane on all its ranks; done and wait are local.
 *
 * Failure: after a time-out of watchdog_s without progress in a wait, the ranks
 * exchange (lane, number) on a control communicator: a lower number is late, no
 * answer is dead. From then on every call returns MZ_ERR_PEER with that text,
 * on all ranks that still answer. A message that cannot be started (bind
 * failed, MPI failed) ends the queue in the same way: its own rank keeps its
 * code, the others get MZ_ERR_PEER with "rank R failed: text".
 *
 * Devices: with a GPU (mz_comm_use_device) a message is ready when the work
 * that the device's stream had when it was posted is done. Buffers of a message
 * are host memory, or backend memory where it says so: those go to MPI as they
 * are, or through host memory where this MPI does not take them.
 *
 * Threads: one thread calls these functions. While a communicator with a thread
 * exists, the program makes no other MPI call, unless MPI was initialised with
 * MPI_THREAD_MULTIPLE.
 */
#ifndef MZ_COMM_COMM_H
#define MZ_COMM_COMM_H

#include "kernels/device.h"

#include <moezero/status.h>
#include <moezero/types.h>
#include <mpi.h>
#include <stdbool.h>

typedef struct mz_comm mz_comm_t;

typedef enum mz_lane { MZ_LANE_EXCHANGE, MZ_LANE_BULK, MZ_NUM_LANES } mz_lane_t;

typedef struct mz_comm_opts {
  bool thread;       /* a communication thread where there are other ranks; else
                        inline progress */
  double watchdog_s; /* > 0; 0: no watchdog */
  bool staged;       /* tests: backend memory never goes to MPI as it is */
  /* Elements an MPI call may take, same on all ranks; 0: INT_MAX. A lower limit
     (tests: 7) sends every message pairwise, cut into calls of that many. */
  int64_t count_limit;
  mz_form_t form; /* pairwise the own block is copied by the device; same on all
                     ranks */
} mz_comm_opts_t;

/** Dups @p world and sets MPI_ERRORS_RETURN on the dup. Group 0 is the data
 * group: all ranks of @p world in their order, named "data". Collective.
 * @return MZ_OK, MZ_ERR_MPI, MZ_ERR_NOMEM, MZ_ERR_UNSUPPORTED (thread wanted
 * but MPI provides less than MPI_THREAD_SERIALIZED). */
mz_status_t mz_comm_create(MPI_Comm world, const mz_comm_opts_t *opts,
                           mz_comm_t **comm_out);

/** Stops the thread, frees all. Collective (local after MZ_ERR_PEER). */
void mz_comm_destroy(mz_comm_t **comm);

/**
 * Adds the group that this rank belongs to: every rank of world calls with the
 * list of its own group; the lists partition the ranks. A group of size 1 has
 * no communicator and sends no message. Collective on world.
 * @param ranks  [size] ranks in world, in group order, same on all members.
 * @param[out] group_out  Index for mz_msg_t.group.
 */
mz_status_t mz_comm_add_group(mz_comm_t *comm, const char *name,
                              const int *ranks, int size, int *group_out);

/**
 * From now on messages wait for the device's stream, and may lie in its memory.
 * A backend that is not the host's is tried with a real transfer; where this
 * MPI does not take its pointers, messages are staged in host memory that is
 * allocated here. Collective; no message may be under way. The device is
 * borrowed until destroy.
 * @param bytes  Of the largest message of a lane in backend memory, either
 * side, own block included; same on all ranks.
 * @return MZ_OK, MZ_ERR_NOMEM, MZ_ERR_DATA (the transfer changed bytes),
 * MZ_ERR_CUDA, MZ_ERR_MPI.
 */
mz_status_t mz_comm_use_device(mz_comm_t *comm, mz_device_t *device,
                               const int64_t bytes[MZ_NUM_LANES]);

/** Whether messages in backend memory go through host memory. */
bool mz_comm_is_staged(const mz_comm_t *comm);

/** This rank among those of its machine (shared memory). Collective; no message
 * may be under way. */
mz_status_t mz_comm_node(mz_comm_t *comm, int *rank_out, int *size_out);

int mz_comm_rank(const mz_comm_t *comm);
int mz_comm_size(const mz_comm_t *comm);
int mz_comm_group_size(const mz_comm_t *comm, int group);
int mz_comm_group_rank(const mz_comm_t *comm, int group);

/** lane and running number (from 1) of a message; 0: none. */
typedef struct mz_ticket {
  mz_lane_t lane;
  uint64_t number;
} mz_ticket_t;

typedef enum mz_msg_kind {
  MZ_MSG_GATHER,  /* every rank's send block to every rank */
  MZ_MSG_EXCHANGE /* block j of send to rank j; block i of recv from rank i */
} mz_msg_kind_t;

/**
 * One message. Counts and displacements in elements of element_bytes. The
 * arrays and buffers are borrowed until the message is done.
 *  - gather: send_count elements from send; recv_counts[r] elements of rank r
 *    go to recv + recv_displs[r]. send may be NULL, on all ranks or on none:
 *    the own block already lies in recv (MPI_IN_PLACE).
 *  - exchange: all four arrays [group size].
 *  - late-bound: bind(ctx) is called once, when `after` is done and before the
 *    start, on the progressing thread, and fills the arrays; it must not post.
 * In a group of size 1 the block is copied by the progress function.
 *
 * MPI takes 32-bit counts and displacements, and no rank can see whether those
 * of the others fit. So a message that may pass 2^31 - 1 elements says so by
 * `bound`, and goes pairwise in several calls. Without it a larger number is
 * MZ_ERR_OVERFLOW.
 */
typedef struct mz_msg {
  mz_msg_kind_t kind;
  int group;
  size_t element_bytes;
  const void *send;
  void *recv;
  int64_t send_count;
  const int64_t *send_counts, *send_displs;
  const int64_t *recv_counts, *recv_displs;
  mz_ticket_t after;
  mz_status_t (*bind)(void *ctx);
  void *ctx;
  bool backend;  /* send and recv are backend memory of the device */
  bool timed;    /* counts in mz_comm_take_timed_seconds */
  int64_t bound; /* same on all ranks: no displacement + count of any rank is
                    above it; 0: none is above INT_MAX */
} mz_msg_t;

/** Posts a ready message; blocks only while the ring (64) is full.
 * @return MZ_OK, MZ_ERR_ARG, or what mz_comm_wait returns after a failure. */
mz_status_t mz_comm_post(mz_comm_t *comm, mz_lane_t lane, const mz_msg_t *msg,
                         mz_ticket_t *ticket_out);

/** Whether the message is done; makes progress in the inline form. True after a
 * failure, so that nobody polls for ever: mz_comm_wait then says what failed.
 */
bool mz_comm_done(mz_comm_t *comm, mz_ticket_t ticket);

/** Waits for it. @return MZ_OK; MZ_ERR_PEER (time-out, or another rank failed);
 * on the rank that failed MZ_ERR_MPI, MZ_ERR_ARG, MZ_ERR_OVERFLOW or the code
 * of its bind. A zero ticket returns MZ_OK at once. */
mz_status_t mz_comm_wait(mz_comm_t *comm, mz_ticket_t ticket);

/**
 * Work that the device's stream gets from now on starts when the message is
 * done; the host goes on, unless the stream waits for an earlier message still:
 * then until that is done. Without a thread, without a device that is not the
 * host's and where the message is done already it is mz_comm_wait. From here to
 * mz_comm_settle the caller uses nothing of the device for the first time but
 * after mz_device_settle.
 * Where the device refuses, the host waits.
 * @return as mz_comm_wait as far as is known now.
 */
mz_status_t mz_comm_wait_on_stream(mz_comm_t *comm, mz_ticket_t ticket);

/** What the device's stream waits for and is not done; number 0: nothing. */
mz_ticket_t mz_comm_awaited(const mz_comm_t *comm);

/** Waits until the device's stream waits for no message. @return as
 * mz_comm_wait. */
mz_status_t mz_comm_settle(mz_comm_t *comm);

/**
 * While the ranks wait for a disk: an alarm is raised after @p factor >= 1
 * times watchdog_s, until the next call. Local; 1 is the start.
 */
void mz_comm_stretch_watchdog(mz_comm_t *comm, int factor);

/** Outside of a step: all ranks get the worst status, with the message of the
 * lowest failing rank, prefixed "rank R: ". Collective on world. */
mz_status_t mz_comm_agree(mz_comm_t *comm, mz_status_t status);

/** One integer of every rank. Collective. @param[out] values_out  [size],
 * borrowed until the next call for all ranks. */
mz_status_t mz_comm_gather(mz_comm_t *comm, int64_t value,
                           const int64_t **values_out);

/** Integer extremes over world, for checks. Collective. */
mz_status_t mz_comm_min_max(mz_comm_t *comm, int64_t value, int64_t *min_out,
                            int64_t *max_out);

/** Root's bytes to all, for names and tables (not numbers). Collective. */
mz_status_t mz_comm_broadcast(mz_comm_t *comm, void *bytes, int64_t num_bytes,
                              int root);

/** Writes "rank R lane number/posted ...", and what the stream waits for, into
 * @p text: for SIGUSR2. */
void mz_comm_position(const mz_comm_t *comm, char *text, size_t text_bytes);

/** Seconds in which a message that is to be timed was under way, from its start
 * on this rank until it was found done, since the last call; several at once
 * count once. None may be under way. */
double mz_comm_take_timed_seconds(mz_comm_t *comm);

/** Seconds that callers spent in mz_comm_wait since the last call. */
double mz_comm_take_wait_seconds(mz_comm_t *comm);

#endif
