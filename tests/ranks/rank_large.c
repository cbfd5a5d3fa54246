/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Messages whose counts and displacements pass 2^31 - 1, by both forms of the
 * queue. Too large for the tests; ci/soak runs it.
 *   rank_large                 a block of 2^31 + 1001 bytes from the last rank
 *                              to all, and an exchange of as many in all
 *   rank_large ROWS ROW_BYTES  exchange of ROWS rows with every rank, itself
 *                              included, and gather of 2 ROWS rows in all
 * A rank holds what it receives, and no more: what it sends is one short
 * pattern, mapped again and again. Exit code 0: every byte is right.
 */
#include "base/alloc.h"
#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* PERIOD is prime: a block that is moved by a power of two is seen. */
enum { MAX_RANKS = 16, PERIOD = 251, BLOCK_BYTES = PERIOD << 16 };

static const int64_t num_bytes = ((int64_t)1 << 31) + 1001;

typedef struct large {
  mz_comm_t *comm;
  int rank, size;
  int64_t row_bytes;
  uint8_t *pattern;    /* every byte of row i is 1 + (i + 7 rank) % PERIOD */
  uint8_t *bytes;      /* what arrives; 0 where nothing has */
  size_t mapped_bytes; /* of bytes */
} large_t;

static void stop(const char *text)
{
  fprintf(stderr, "%s\n", text);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

/* A block of whole periods, as often as it takes for @p at_least bytes from any
 * row of the first period on. */
static void map_pattern(large_t *l, size_t at_least)
{
  int file = memfd_create("pattern", 0);
  size_t total;

  if (file < 0 || ftruncate(file, BLOCK_BYTES) != 0) stop("no pattern");
  total = (at_least / BLOCK_BYTES + 2) * BLOCK_BYTES;
  l->pattern = mmap(NULL, total, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (l->pattern == MAP_FAILED) stop("no address space");
  for (size_t at = 0; at < total; at += BLOCK_BYTES)
    if (mmap(l->pattern + at, BLOCK_BYTES, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
      stop("no place for the pattern");
  close(file);
  for (int64_t i = 0; i < BLOCK_BYTES; i++)
    l->pattern[i] = (uint8_t)(1 + (i / l->row_bytes + 7 * l->rank) % PERIOD);
}

/* Pages of zeros, which take no memory before something arrives. */
static void map_bytes(large_t *l, int64_t rows)
{
  l->mapped_bytes = (size_t)(rows * l->row_bytes);
  l->bytes = mmap(NULL, l->mapped_bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (l->bytes == MAP_FAILED) stop("no address space");
}

/* Whether @p rows rows from @p at on are those of rank @p from, from its row
 * @p first on. */
static bool came(const large_t *l, int64_t at, int64_t rows, int from,
                 int64_t first)
{
  int64_t same = first + 7 * from + PERIOD * l->rank - 7 * l->rank;

  return memcmp(l->bytes + at * l->row_bytes,
                l->pattern + same % PERIOD * l->row_bytes,
                (size_t)(rows * l->row_bytes)) == 0;
}

static void stop_if(mz_status_t st)
{
  if (st != MZ_OK) stop(mz_error_last());
}

/* Every part returns how many blocks are not what they have to be. */
static int broadcast(large_t *l, int64_t rows)
{
  int root = l->size - 1, wrong;

  map_bytes(l, rows);
  if (l->rank == root) memcpy(l->bytes, l->pattern, l->mapped_bytes);
  stop_if(mz_comm_broadcast(l->comm, l->bytes, rows * l->row_bytes, root));
  wrong = !came(l, 0, rows, root, 0);
  munmap(l->bytes, l->mapped_bytes);
  return wrong;
}

static void move(large_t *l, const mz_msg_t *msg)
{
  mz_ticket_t ticket;

  stop_if(mz_comm_post(l->comm, MZ_LANE_EXCHANGE, msg, &ticket));
  stop_if(mz_comm_wait(l->comm, ticket));
}

/* Each rank's part of @p rows rows, from its row 0 on, to all; the last one's
 * is longer where they do not divide. */
static int gather(large_t *l, int64_t rows)
{
  int64_t counts[MAX_RANKS], displs[MAX_RANKS];
  int wrong = 0;

  for (int r = 0; r < l->size; r++) {
    displs[r] = rows / l->size * r;
    counts[r] = r < l->size - 1 ? rows / l->size : rows - displs[r];
  }
  map_bytes(l, rows);
  memcpy(l->bytes + displs[l->rank] * l->row_bytes, l->pattern,
         (size_t)(counts[l->rank] * l->row_bytes));
  move(l, &(mz_msg_t){.kind = MZ_MSG_GATHER,
                      .element_bytes = (size_t)l->row_bytes,
                      .recv = l->bytes,
                      .recv_counts = counts,
                      .recv_displs = displs,
                      .bound = rows});
  for (int r = 0; r < l->size; r++)
    wrong += !came(l, displs[r], counts[r], r, 0);
  munmap(l->bytes, l->mapped_bytes);
  return wrong;
}

/* @p rows rows from every rank to every rank. */
static int exchange(large_t *l, int64_t rows)
{
  int64_t counts[MAX_RANKS], displs[MAX_RANKS];
  int wrong = 0;

  for (int r = 0; r < l->size; r++) {
    counts[r] = rows;
    displs[r] = r * rows;
  }
  map_bytes(l, l->size * rows);
  move(l, &(mz_msg_t){.kind = MZ_MSG_EXCHANGE,
                      .element_bytes = (size_t)l->row_bytes,
                      .send = l->pattern,
                      .recv = l->bytes,
                      .send_counts = counts,
                      .send_displs = displs,
                      .recv_counts = counts,
                      .recv_displs = displs,
                      .bound = l->size * rows});
  for (int r = 0; r < l->size; r++)
    wrong += !came(l, displs[r], rows, r, displs[l->rank]);
  munmap(l->bytes, l->mapped_bytes);
  return wrong;
}

/* @p rows 0: the message of 2^31 + 1001 bytes. Returns the same on all ranks.
 */
static int run(large_t *l, int64_t rows, bool thread)
{
  mz_comm_opts_t opts = {.thread = thread, .watchdog_s = 600};
  int64_t first = rows > 0 ? 2 * rows : num_bytes;
  int64_t each = rows > 0 ? rows : num_bytes / l->size;
  double begin = MPI_Wtime(), middle, end;
  int wrong[2], sum[2];

  stop_if(mz_comm_create(MPI_COMM_WORLD, &opts, &l->comm));
  wrong[0] = rows > 0 ? gather(l, first) : broadcast(l, first);
  middle = MPI_Wtime();
  wrong[1] = exchange(l, each);
  end = MPI_Wtime();
  mz_comm_destroy(&l->comm);
  MPI_Allreduce(wrong, sum, 2, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (l->rank == 0)
    printf("%s: %s of %lld rows of %lld bytes: %d blocks wrong, %.1f s; "
           "exchange of %lld with each of %d ranks: %d wrong, %.1f s\n",
           thread ? "thread" : "inline", rows > 0 ? "gather" : "broadcast",
           (long long)first, (long long)l->row_bytes, sum[0], middle - begin,
           (long long)each, l->size, sum[1], end - middle);
  fflush(stdout);
  return sum[0] + sum[1];
}

int main(int argc, char **argv)
{
  int64_t rows = argc == 3 ? atoll(argv[1]) : 0;
  large_t l = {.row_bytes = argc == 3 ? atoll(argv[2]) : 1};
  int level, wrong = 0;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &l.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &l.size);
  if ((argc != 1 && argc != 3) || (argc == 3 && rows < 1) ||
      l.size > MAX_RANKS || l.row_bytes < 1 || (1 << 16) % l.row_bytes != 0)
    stop("usage: rank_large [ROWS ROW_BYTES]; ROW_BYTES a power of two up to "
         "65536, at most 16 ranks");
  map_pattern(&l, (size_t)(rows > 0 ? mz_max_i64(2, l.size) * rows * l.row_bytes
                                    : num_bytes));
  for (int thread = 1; thread >= 0; thread--)
    wrong += run(&l, rows, thread);
  MPI_Finalize();
  return wrong == 0 ? 0 : 1;
}
