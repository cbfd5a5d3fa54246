/* SPDX-License-Identifier: Apache-2.0 */
/* Messages through host memory on 2 ranks: one from host memory, posted behind
 * one that is staged, does not come to MPI first, however late a rank posts it.
 * Usage: rank_staged thread|inline. Exit code 0: both came whole. */
#include "comm/comm.h"

#include "base/check.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { BLOCK = 1000, RANKS = 2, LATE_MS = 50 };

static int me;

static void must(mz_status_t st)
{
  if (st == MZ_OK) return;
  fprintf(stderr, "rank %d: %s\n", me, mz_error_last());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static const int64_t ones[RANKS] = {1, 1}, places[RANKS] = {0, 1};
static const int64_t blocks[RANKS] = {BLOCK, BLOCK}, starts[RANKS] = {0, BLOCK};

static mz_ticket_t post_gather(mz_comm_t *comm, mz_lane_t lane,
                               const int64_t *send, int64_t *recv)
{
  mz_msg_t msg = {.kind = MZ_MSG_GATHER,
                  .element_bytes = sizeof *send,
                  .send = send,
                  .send_count = 1,
                  .recv = recv,
                  .recv_counts = ones,
                  .recv_displs = places};
  mz_ticket_t ticket;

  must(mz_comm_post(comm, lane, &msg, &ticket));
  return ticket;
}

static mz_ticket_t post_staged(mz_comm_t *comm, mz_ticket_t after,
                               const char *send, char *recv)
{
  mz_msg_t msg = {.kind = MZ_MSG_EXCHANGE,
                  .element_bytes = 1,
                  .send = send,
                  .recv = recv,
                  .send_counts = blocks,
                  .send_displs = starts,
                  .recv_counts = blocks,
                  .recv_displs = starts,
                  .after = after,
                  .backend = true};
  mz_ticket_t ticket;

  must(mz_comm_post(comm, MZ_LANE_EXCHANGE, &msg, &ticket));
  return ticket;
}

/* With progress in the inline form. */
static void pass_ms(mz_comm_t *comm, mz_ticket_t ticket, int ms)
{
  const struct timespec pause = {.tv_nsec = 1000000};

  for (int i = 0; i < ms; i++) {
    (void)mz_comm_done(comm, ticket);
    nanosleep(&pause, NULL);
  }
}

/* Rank 0 has posted all when the first message, which the staged one waits for,
 * can end; rank 1 posts the last one when the staged one is long at MPI. */
static int run(mz_comm_t *comm)
{
  char send[RANKS * BLOCK], recv[RANKS * BLOCK] = {0};
  int64_t own = 100 + me, first[RANKS], last[RANKS] = {0};
  mz_ticket_t tickets[3] = {{0}};
  int wrong = 0;

  memset(send, 'a' + me, sizeof send);
  if (me == 1) pass_ms(comm, tickets[0], LATE_MS);
  tickets[0] = post_gather(comm, MZ_LANE_BULK, &own, first);
  tickets[1] = post_staged(comm, tickets[0], send, recv);
  if (me == 1) pass_ms(comm, tickets[1], LATE_MS);
  tickets[2] = post_gather(comm, MZ_LANE_EXCHANGE, &own, last);
  for (int i = 0; i < 3; i++)
    must(mz_comm_wait(comm, tickets[i]));
  for (int r = 0; r < RANKS; r++) {
    wrong += first[r] != 100 + r || last[r] != 100 + r;
    for (int i = 0; i < BLOCK; i++)
      wrong += recv[r * BLOCK + i] != 'a' + r;
  }
  return wrong;
}

int main(int argc, char **argv)
{
  mz_comm_opts_t opts = {.watchdog_s = 10, .staged = true};
  const int64_t most[MZ_NUM_LANES] = {RANKS * BLOCK, RANKS * BLOCK};
  mz_device_t *device = NULL;
  mz_comm_t *comm = NULL;
  int provided, size, wrong, all;

  if (argc != 2) return 2;
  opts.thread = strcmp(argv[1], "thread") == 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != RANKS) MPI_Abort(MPI_COMM_WORLD, 2);
  must(mz_comm_create(MPI_COMM_WORLD, &opts, &comm));
  must(mz_device_open(MZ_BACKEND_CPU, 0, &device));
  must(mz_comm_use_device(comm, device, most));
  wrong = run(comm);
  mz_comm_destroy(&comm);
  mz_device_close(&device);
  MPI_Allreduce(&wrong, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (all && me == 0) fprintf(stderr, "%d elements are wrong\n", all);
  MPI_Finalize();
  return all > 0;
}
