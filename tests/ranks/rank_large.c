/* SPDX-License-Identifier: Apache-2.0 */
/**
 * A block of more than 2^31 - 1 elements (bytes) from the last rank to all, by
 * both forms of the queue. Takes 2 GiB a rank, so it is not a part of the
 * tests.
 */
#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>

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

int main(int argc, char **argv)
{
  uint8_t *bytes = malloc((size_t)num_bytes);
  int64_t wrong = -1;
  int level;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  if (bytes) wrong = run(bytes, true);
  if (wrong == 0) wrong = run(bytes, false);
  printf("%lld bytes wrong\n", (long long)wrong);
  free(bytes);
  MPI_Finalize();
  return wrong == 0 ? 0 : 1;
}
