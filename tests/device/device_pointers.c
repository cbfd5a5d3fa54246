/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the GPU in messages and copies, whether it was there before MPI
 * was or not: right data, or a refusal that names the cause.
 *   device_pointers before|after    GPU memory is allocated before MPI_Init,
 *                                   or after it; two ranks or more
 * Copies between all kinds of memory, then an exchange of 256 KiB with every
 * rank. device_pointers_static is the same with the CUDA runtime inside the
 * program, where a library that watches the shared one cannot see it. Prints a
 * line a check. Exit code 0: all is right; 2: no GPU. */
#include "base/check.h"
#include "comm/comm.h"
#include "kernels/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 64, BLOCK = 256 << 10, ROUNDS = 3, KINDS = 3 };

typedef struct memory {
  mz_device_t *device;
  char *send, *recv; /* [MAX_RANKS, BLOCK] of the card */
  char *host;        /* the same, pinned */
} memory_t;

static int world, me, num_failed;

static void stop(const char *text)
{
  int running = 0;

  fprintf(stderr, "rank %d: %s\n", me, text);
  MPI_Initialized(&running);
  if (running) MPI_Abort(MPI_COMM_WORLD, 1);
  exit(1);
}

static void must(mz_status_t st)
{
  if (st != MZ_OK) stop(mz_error_last());
}

static void report(bool good, const char *what, const char *more)
{
  int ok = good, all_ok;

  MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (me == 0)
    printf("%s %s%s%s\n", all_ok ? "ok" : "FAILED", what, more ? ": " : "",
           more ? more : "");
  fflush(stdout);
  num_failed += !all_ok;
}

static void take_memory(memory_t *m)
{
  const int64_t bytes = (int64_t)MAX_RANKS * BLOCK;

  must(mz_device_open(MZ_BACKEND_CUDA, 0, &m->device));
  must(mz_device_alloc(m->device, bytes, "send", (void **)&m->send));
  must(mz_device_alloc(m->device, bytes, "recv", (void **)&m->recv));
  must(mz_device_alloc_host(m->device, bytes, "host", (void **)&m->host));
}

static void give_memory_back(memory_t *m)
{
  mz_device_free(m->device, m->send);
  mz_device_free(m->device, m->recv);
  mz_device_free_host(m->device, m->host);
  mz_device_close(&m->device);
}

static char byte_of(int from, int to, int64_t i, int round)
{
  return (char)(1 + (from * 31 + to * 7 + round * 3 + i) % 251);
}

/* --- copies --- */

/* From the card, pinned or ordinary memory to each of them. */
static bool copy_kinds(const memory_t *m)
{
  static char ordinary[BLOCK], back[BLOCK];
  char *from[KINDS] = {m->send, m->host, ordinary};
  char *to[KINDS] = {m->recv, m->host + BLOCK, back};
  mz_stream_t stream = m->device->stream;
  bool good = true;

  for (int pair = 0; pair < KINDS * KINDS; pair++) {
    char *src = from[pair / KINDS], *dst = to[pair % KINDS];

    for (int64_t i = 0; i < BLOCK; i++)
      ordinary[i] = byte_of(me, pair, i, 0);
    memset(back, 0, sizeof back);
    if (src != ordinary)
      must(mz_device_copy(m->device, src, ordinary, BLOCK, stream));
    must(mz_device_copy(m->device, dst, src, BLOCK, stream));
    if (dst != back) must(mz_device_copy(m->device, back, dst, BLOCK, stream));
    must(mz_stream_synchronize(m->device, stream));
    good = good && memcmp(back, ordinary, BLOCK) == 0;
  }
  return good;
}

/* --- messages --- */

static void fill_send(const memory_t *m, int round)
{
  for (int r = 0; r < world; r++)
    for (int64_t i = 0; i < BLOCK; i++)
      m->host[(int64_t)r * BLOCK + i] = byte_of(me, r, i, round);
  must(mz_device_copy(m->device, m->send, m->host, (int64_t)world * BLOCK,
                      m->device->stream));
  must(mz_device_fill(m->device, m->recv, 0, (int64_t)world * BLOCK,
                      m->device->stream));
}

static bool came(const memory_t *m, int round)
{
  must(mz_device_copy(m->device, m->host, m->recv, (int64_t)world * BLOCK,
                      m->device->stream));
  must(mz_stream_synchronize(m->device, m->device->stream));
  for (int r = 0; r < world; r++)
    for (int64_t i = 0; i < BLOCK; i++)
      if (m->host[(int64_t)r * BLOCK + i] != byte_of(r, me, i, round))
        return false;
  return true;
}

static bool exchange(mz_comm_t *comm, const memory_t *m, int round)
{
  int64_t counts[MAX_RANKS], displs[MAX_RANKS];
  mz_msg_t msg = {.kind = MZ_MSG_EXCHANGE,
                  .element_bytes = 1,
                  .send = m->send,
                  .recv = m->recv,
                  .send_counts = counts,
                  .send_displs = displs,
                  .recv_counts = counts,
                  .recv_displs = displs,
                  .backend = true};
  mz_ticket_t ticket;

  for (int r = 0; r < world; r++) {
    counts[r] = BLOCK;
    displs[r] = (int64_t)r * BLOCK;
  }
  fill_send(m, round);
  must(mz_comm_post(comm, MZ_LANE_EXCHANGE, &msg, &ticket));
  must(mz_comm_wait(comm, ticket));
  return came(m, round);
}

/* A refusal is right, too; it says why. */
static void check_messages(const memory_t *m, mz_form_t form,
                           int64_t count_limit)
{
  mz_comm_opts_t opts = {.thread = true,
                         .watchdog_s = 30,
                         .form = form,
                         .count_limit = count_limit};
  const char *what = count_limit ? "exchange of 256 KiB, in several calls"
                     : form == MZ_FORM_PAIRWISE
                         ? "exchange of 256 KiB, pairwise"
                         : "exchange of 256 KiB";
  mz_comm_t *comm = NULL;
  mz_status_t st;
  bool good = true;

  must(mz_comm_create(MPI_COMM_WORLD, &opts, &comm));
  st = mz_comm_use_device(comm, m->device, /* the same on all ranks */
                          (int64_t[]){MAX_RANKS * BLOCK, MAX_RANKS * BLOCK});
  if (st == MZ_OK) {
    for (int round = 0; round < ROUNDS; round++)
      good = exchange(comm, m, round) && good;
    report(good, what, NULL);
  } else {
    report(st == MZ_ERR_UNSUPPORTED, "refused", mz_error_message());
  }
  mz_comm_destroy(&comm);
}

int main(int argc, char **argv)
{
  const bool before = argc == 2 && strcmp(argv[1], "before") == 0;
  memory_t m = {.device = NULL};
  int provided, count;

  if (!before && (argc != 2 || strcmp(argv[1], "after") != 0))
    stop("usage: device_pointers before|after");
  if (before && mz_device_count(MZ_BACKEND_CUDA, &count) == MZ_OK)
    take_memory(&m);
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  if (mz_device_count(MZ_BACKEND_CUDA, &count) != MZ_OK) {
    if (me == 0)
      fprintf(stderr, "device_pointers needs a GPU: %s\n", mz_error_message());
    MPI_Finalize();
    return 2;
  }
  if (world > MAX_RANKS) stop("too many ranks");
  if (!before) take_memory(&m);
  report(copy_kinds(&m), "copies between all kinds of memory", NULL);
  check_messages(&m, MZ_FORM_COLLECTIVE, 0);
  check_messages(&m, MZ_FORM_PAIRWISE, 0);
  check_messages(&m, MZ_FORM_PAIRWISE, 100000);
  give_memory_back(&m);
  MPI_Finalize();
  return num_failed > 0;
}
