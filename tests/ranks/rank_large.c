/* SPDX-License-Identifier: Apache-2.0 */
/**
 * A block of more than 2^31 - 1 elements (bytes) from the last rank to all, and
 * an exchange of as many, by both forms of the queue. Takes 4 GiB a rank, so it
 * is not a part of the tests.
 */
#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_RANKS = 16 };

static const int64_t num_bytes = ((int64_t)1 << 31) + 1001;

/* 251 is prime: a block that is moved by a power of two is seen. */
static uint8_t pattern(int64_t i) { return (uint8_t)(1 + i % 251); }

static int64_t run(uint8_t *bytes, bool thread)
{
  mz_comm_opts_t opts = {.thread = thread, .watchdog_s = 300};
  mz_comm_t *comm = NULL;
  int64_t wrong = 0;
  bool root;

  if (mz_comm_create(MPI_COMM_WORLD, &opts, &comm) != MZ_OK) return -1;
  root = mz_comm_rank(comm) == mz_comm_size(comm) - 1;
  for (int64_t i = 0; i < num_bytes; i++)
    bytes[i] = root ? pattern(i) : 0;
  if (mz_comm_broadcast(comm, bytes, num_bytes, mz_comm_size(comm) - 1) !=
      MZ_OK) {
    fprintf(stderr, "%s\n", mz_error_last());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  for (int64_t i = 0; i < num_bytes; i++)
    wrong += bytes[i] != pattern(i);
  mz_comm_destroy(&comm);
  return wrong;
}

/* Every rank gives every rank a block; displacement plus count passes 2^31. */
static int64_t run_exchange(uint8_t *send, uint8_t *recv, bool thread)
{
  mz_comm_opts_t opts = {.thread = thread, .watchdog_s = 600};
  int64_t counts[MAX_RANKS], displs[MAX_RANKS], wrong = 0, block;
  mz_comm_t *comm = NULL;
  mz_ticket_t ticket;
  int rank, size;
  mz_msg_t msg = {.kind = MZ_MSG_EXCHANGE,
                  .element_bytes = 1,
                  .send = send,
                  .recv = recv,
                  .send_counts = counts,
                  .send_displs = displs,
                  .recv_counts = counts,
                  .recv_displs = displs,
                  .bound = num_bytes};

  if (mz_comm_create(MPI_COMM_WORLD, &opts, &comm) != MZ_OK) return -1;
  rank = mz_comm_rank(comm);
  size = mz_comm_size(comm);
  block = num_bytes / size;
  for (int r = 0; r < size; r++) {
    counts[r] = block;
    displs[r] = r * block;
    for (int64_t i = 0; i < block; i++) {
      send[displs[r] + i] = pattern(i + rank + 7 * r);
      recv[displs[r] + i] = 0;
    }
  }
  if (mz_comm_post(comm, MZ_LANE_EXCHANGE, &msg, &ticket) != MZ_OK ||
      mz_comm_wait(comm, ticket) != MZ_OK) {
    fprintf(stderr, "%s\n", mz_error_last());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  for (int r = 0; r < size; r++)
    for (int64_t i = 0; i < block; i++)
      wrong += recv[displs[r] + i] != pattern(i + r + 7 * rank);
  mz_comm_destroy(&comm);
  return wrong;
}

int main(int argc, char **argv)
{
  uint8_t *bytes = malloc((size_t)num_bytes);
  uint8_t *other = malloc((size_t)num_bytes);
  int64_t wrong = bytes && other ? 0 : -1;
  int level;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  for (int thread = 1; thread >= 0 && wrong == 0; thread--) {
    wrong = run(bytes, thread);
    if (wrong == 0) wrong = run_exchange(bytes, other, thread);
  }
  printf("%lld bytes wrong\n", (long long)wrong);
  free(bytes);
  free(other);
  MPI_Finalize();
  return wrong == 0 ? 0 : 1;
}
