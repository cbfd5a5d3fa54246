/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Times of the queue on this machine: bench_comm FORM; FORM is thread or
 * inline. Prints the latency of an 8-byte gather with a wait after each, the
 * same with a pause between (the thread sleeps), the rate of 4 MiB blocks while
 * the caller computes and while it waits, and the CPU time of an idle second.
 */
#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 64, NUM_GATHERS = 5000, NUM_PAUSED = 100, NUM_BLOCKS = 20 };

static const int64_t block_bytes = 4 << 20;

static int64_t counts[MAX_RANKS], displs[MAX_RANKS];

static double seconds(clockid_t clock)
{
  struct timespec t;

  clock_gettime(clock, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void must(mz_status_t st)
{
  if (st == MZ_OK) return;
  fprintf(stderr, "%s\n", mz_error_last());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static mz_ticket_t post(mz_comm_t *comm, mz_lane_t lane, void *recv,
                        int64_t block)
{
  mz_ticket_t ticket;

  for (int r = 0; r < mz_comm_size(comm); r++) {
    counts[r] = block;
    displs[r] = r * block;
  }
  must(mz_comm_post(comm, lane,
                    &(mz_msg_t){.kind = MZ_MSG_GATHER,
                                .element_bytes = 8,
                                .recv = recv,
                                .recv_counts = counts,
                                .recv_displs = displs},
                    &ticket));
  return ticket;
}

static double time_gathers(mz_comm_t *comm, int num, useconds_t pause)
{
  int64_t values[MAX_RANKS] = {0};
  double total = 0;

  for (int i = 0; i < num; i++) {
    double begin;

    if (pause) usleep(pause);
    begin = seconds(CLOCK_MONOTONIC);
    must(mz_comm_wait(comm, post(comm, MZ_LANE_EXCHANGE, values, 1)));
    total += seconds(CLOCK_MONOTONIC) - begin;
  }
  return total / num * 1e6;
}

/* Work of about 10 ms; its result keeps the compiler from dropping it. */
static double compute(void)
{
  volatile double x = 1;

  for (int i = 0; i < 3000000; i++)
    x = x * 1.0000001 + 1e-9;
  return x;
}

static double time_blocks(mz_comm_t *comm, char *recv, bool computes)
{
  double begin = seconds(CLOCK_MONOTONIC);

  for (int i = 0; i < NUM_BLOCKS; i++) {
    mz_ticket_t ticket = post(comm, MZ_LANE_BULK, recv, block_bytes / 8);

    if (computes) compute();
    must(mz_comm_wait(comm, ticket));
  }
  return (seconds(CLOCK_MONOTONIC) - begin) / NUM_BLOCKS * 1e3;
}

static void measure(mz_comm_t *comm, char *recv)
{
  bool first = mz_comm_rank(comm) == 0;
  double begin, pure, us;

  time_gathers(comm, 200, 0);
  us = time_gathers(comm, NUM_GATHERS, 0);
  if (first) printf("gather of 8 bytes: %.1f us\n", us);
  us = time_gathers(comm, NUM_PAUSED, 5000);
  if (first) printf("after a pause of 5 ms: %.1f us\n", us);
  time_blocks(comm, recv, false);
  us = time_blocks(comm, recv, false);
  if (first) printf("4 MiB blocks, waiting: %.2f ms\n", us);
  begin = seconds(CLOCK_MONOTONIC);
  for (int i = 0; i < NUM_BLOCKS; i++)
    compute();
  pure = (seconds(CLOCK_MONOTONIC) - begin) / NUM_BLOCKS * 1e3;
  us = time_blocks(comm, recv, true);
  if (first) printf("4 MiB blocks, computing %.2f ms: %.2f ms\n", pure, us);
  begin = seconds(CLOCK_PROCESS_CPUTIME_ID);
  sleep(1);
  us = (seconds(CLOCK_PROCESS_CPUTIME_ID) - begin) * 1e3;
  if (first) printf("CPU time of an idle second: %.2f ms\n", us);
}

int main(int argc, char **argv)
{
  mz_comm_opts_t opts = {.watchdog_s = 30};
  mz_comm_t *comm = NULL;
  char *recv;
  int level;

  if (argc != 2) return 2;
  opts.thread = strcmp(argv[1], "thread") == 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  must(mz_comm_create(MPI_COMM_WORLD, &opts, &comm));
  recv = calloc((size_t)mz_comm_size(comm), (size_t)block_bytes);
  if (!recv || mz_comm_size(comm) > MAX_RANKS) MPI_Abort(MPI_COMM_WORLD, 1);
  measure(comm, recv);
  mz_comm_destroy(&comm);
  free(recv);
  MPI_Finalize();
  return 0;
}
