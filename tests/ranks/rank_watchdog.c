/* SPDX-License-Identifier: Apache-2.0 */
/**
 * What the queue says when a rank fails. rank_watchdog MODE FORM; FORM is
 * thread or inline. Ends with MPI_Abort(7), as a program does after
 * MZ_ERR_PEER; "patient" ends with 0. Every rank prints "verdict of R: CODE
 * TEXT". Modes:
 *  - stall: the last rank stops calling for a while, the others wait for it;
 *  - full: the same, but the others are stopped by a full ring in post;
 *  - patient: as stall, with a stretched watchdog, so that nothing fails;
 *  - broken, negative, overflow: the bind of the last rank fails.
 */
#include "comm/comm.h"

#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RANKS = 8, NUM_GOOD = 9, NUM_FULL = 100, ABORT_CODE = 7 };

static int64_t own, all[MAX_RANKS], counts[MAX_RANKS], displs[MAX_RANKS];

static mz_status_t post(mz_comm_t *comm, mz_status_t (*bind)(void *),
                        mz_ticket_t *ticket_out)
{
  mz_msg_t msg = {.kind = MZ_MSG_GATHER,
                  .element_bytes = 8,
                  .send = &own,
                  .send_count = 1,
                  .recv = all,
                  .recv_counts = counts,
                  .recv_displs = displs,
                  .bind = bind};

  for (int r = 0; r < mz_comm_size(comm); r++) {
    counts[r] = 1;
    displs[r] = r;
  }
  return mz_comm_post(comm, MZ_LANE_BULK, &msg, ticket_out);
}

static mz_status_t fail_to_bind(void *ctx)
{
  MZ_FAIL(MZ_ERR_DATA, "no counts");
}

static mz_status_t bind_negative(void *ctx)
{
  counts[0] = -1;
  return MZ_OK;
}

static mz_status_t bind_overflow(void *ctx)
{
  displs[0] = (int64_t)1 << 31;
  return MZ_OK;
}

static mz_status_t post_and_wait(mz_comm_t *comm, mz_status_t (*bind)(void *))
{
  mz_ticket_t ticket;

  MZ_TRY(post(comm, bind, &ticket));
  return mz_comm_wait(comm, ticket);
}

static mz_status_t fill_ring(mz_comm_t *comm)
{
  mz_ticket_t ticket;

  for (int i = 0; i < NUM_FULL; i++)
    MZ_TRY(post(comm, NULL, &ticket));
  return MZ_OK;
}

static const struct {
  const char *mode;
  mz_status_t (*bind)(void *ctx);
} faults[] = {{"broken", fail_to_bind},
              {"negative", bind_negative},
              {"overflow", bind_overflow}};

static mz_status_t run_mode(mz_comm_t *comm, const char *mode)
{
  bool last = mz_comm_rank(comm) == mz_comm_size(comm) - 1;

  if (strcmp(mode, "patient") == 0) mz_comm_stretch_watchdog(comm, 20);
  for (int i = 0; i < NUM_GOOD; i++)
    MZ_TRY(post_and_wait(comm, NULL));
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
    if (strcmp(mode, faults[i].mode) == 0)
      return post_and_wait(comm, last ? faults[i].bind : NULL);
  if (last) sleep(7); /* watchdog_s, the time for answers, and some more */
  return strcmp(mode, "full") == 0 ? fill_ring(comm)
                                   : post_and_wait(comm, NULL);
}

int main(int argc, char **argv)
{
  mz_comm_opts_t opts = {.watchdog_s = 2};
  mz_comm_t *comm = NULL;
  mz_status_t st;
  int level, rank;

  if (argc != 3) return 2;
  opts.thread = strcmp(argv[2], "thread") == 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  if (mz_comm_create(MPI_COMM_WORLD, &opts, &comm) != MZ_OK) return 3;
  rank = mz_comm_rank(comm);
  st = run_mode(comm, argv[1]);
  printf("verdict of %d: %s: %s\n", rank, mz_status_text(st),
         mz_error_message());
  if (strcmp(argv[1], "patient") == 0) {
    mz_comm_destroy(&comm);
    MPI_Finalize();
    return st == MZ_OK ? 0 : 1;
  }
  /* Every later call says the same, and done does not let anybody poll on. */
  if (st == MZ_OK || mz_comm_wait(comm, (mz_ticket_t){MZ_LANE_BULK, 1}) != st ||
      !mz_comm_done(comm, (mz_ticket_t){MZ_LANE_BULK, NUM_GOOD + 1}))
    printf("rank %d lives on\n", rank);
  mz_comm_destroy(&comm);
  if (comm) printf("rank %d is not destroyed\n", rank);
  fflush(stdout);
  /* The others print their verdicts meanwhile. */
  sleep(argv[1][0] == 's' || argv[1][0] == 'f' ? 6 : 1);
  MPI_Abort(MPI_COMM_WORLD, ABORT_CODE);
  return 0;
}
