/* SPDX-License-Identifier: Apache-2.0 */
/* Messages wait for the kernels before them, and kernels for the messages
 * before them: slow work goes into the stream where a missing wait would show.
 *   rank_delay DEVICE    cuda or cpu; two ranks or more, which may share a GPU
 * First an exchange that is posted right behind slow work and the write of
 * what it sends, then training with slow work before every kernel (so before
 * each pack, and after each receive) against training without: equal bits of
 * the losses. On the CPU work is done when it is asked for, so nothing is slow
 * there. Exit code 0: all is right. */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"
#include "comm/comm.h"
#include "kernels/kernels.h"
#include "train/engine_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  STEPS = 20,
  EXCHANGE_MS = 50,
  ROUNDS = 4,
  ELEMENTS = 65536, /* a block: 256 KiB */
  TIMED = 20,       /* fills */
  KERNEL_US = 1500
};

static const int64_t slow_bytes = INT64_C(256) << 20;

static int world, me, num_failed;
static const char *backend;
static mz_device_t *device; /* of the slow work's memory */
static char *slow_memory;
static double fill_us; /* of slow_bytes */
static const mz_kernels_ops_t *true_ops;

static void stop(const char *text)
{
  fprintf(stderr, "rank %d: %s\n", me, text);
  MPI_Abort(MPI_COMM_WORLD, 1);
  exit(1);
}

static void must(mz_status_t st)
{
  if (st != MZ_OK) stop(mz_error_last());
}

static void report(bool good, const char *what)
{
  int ok = good, all_ok;

  MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (me == 0) printf("%s %s\n", all_ok ? "ok" : "FAILED", what);
  fflush(stdout);
  num_failed += !all_ok;
}

/* --- slow work: memory that is filled again and again --- */

static mz_status_t be_slow(mz_stream_t stream, double us)
{
  if (device->ops->is_host) return MZ_OK;
  for (double left = us; left > 0; left -= fill_us)
    MZ_TRY(mz_device_fill(device, slow_memory, 0, slow_bytes, stream));
  return MZ_OK;
}

static void measure_fill(void)
{
  double begin;

  must(mz_device_fill(device, slow_memory, 0, slow_bytes, device->stream));
  must(mz_stream_synchronize(device, device->stream));
  begin = MPI_Wtime();
  for (int i = 0; i < TIMED; i++)
    must(mz_device_fill(device, slow_memory, 0, slow_bytes, device->stream));
  must(mz_stream_synchronize(device, device->stream));
  fill_us = (MPI_Wtime() - begin) * 1e6 / TIMED;
  if (me == 0 && !device->ops->is_host)
    printf("slow work: %.0f us a fill, %d ms before a message, %.1f ms before "
           "a kernel\n",
           fill_us, EXCHANGE_MS, KERNEL_US * 1e-3);
}

/* --- one exchange --- */

typedef struct blocks {
  mz_comm_t *comm;
  float *send, *recv, *host; /* [W, ELEMENTS] */
  int64_t counts[64], displs[64];
} blocks_t;

static void put(const blocks_t *b, float *to, float value)
{
  for (int64_t i = 0; i < (int64_t)world * ELEMENTS; i++)
    b->host[i] = value;
  must(mz_device_copy(device, to, b->host, (int64_t)world * ELEMENTS * 4,
                      device->stream));
  must(mz_stream_synchronize(device, device->stream));
}

static bool all_are(const blocks_t *b, const float *from, float value)
{
  must(mz_device_copy(device, b->host, from, (int64_t)world * ELEMENTS * 4,
                      device->stream));
  must(mz_stream_synchronize(device, device->stream));
  for (int64_t i = 0; i < (int64_t)world * ELEMENTS; i++)
    if (b->host[i] != value) return false;
  return true;
}

/* sevens: where the numbers wait that are packed behind the slow work. */
static bool exchange(blocks_t *b, const float *sevens)
{
  mz_msg_t msg = {.kind = MZ_MSG_EXCHANGE,
                  .element_bytes = 4,
                  .send = b->send,
                  .recv = b->recv,
                  .send_counts = b->counts,
                  .send_displs = b->displs,
                  .recv_counts = b->counts,
                  .recv_displs = b->displs,
                  .backend = true};
  mz_ticket_t ticket;

  put(b, b->send, -1);
  put(b, b->recv, -1);
  must(be_slow(device->stream, EXCHANGE_MS * 1e3));
  must(mz_device_copy(device, b->send, sevens, (int64_t)world * ELEMENTS * 4,
                      device->stream));
  must(mz_comm_post(b->comm, MZ_LANE_EXCHANGE, &msg, &ticket));
  must(mz_comm_wait(b->comm, ticket));
  return all_are(b, b->recv, 7);
}

static void check_exchange(bool thread, mz_form_t form)
{
  mz_comm_opts_t opts = {.thread = thread, .watchdog_s = 30, .form = form};
  int64_t bytes = (int64_t)world * ELEMENTS * 4;
  blocks_t b = {.comm = NULL};
  float *sevens;
  bool good = true;
  char what[96];

  must(mz_comm_create(MPI_COMM_WORLD, &opts, &b.comm));
  must(mz_comm_use_device(b.comm, device, (int64_t[]){bytes, bytes}));
  must(mz_device_alloc(device, bytes, "send", (void **)&b.send));
  must(mz_device_alloc(device, bytes, "recv", (void **)&b.recv));
  must(mz_device_alloc(device, bytes, "sevens", (void **)&sevens));
  must(mz_device_alloc_host(device, bytes, "host", (void **)&b.host));
  for (int r = 0; r < world; r++) {
    b.counts[r] = ELEMENTS;
    b.displs[r] = (int64_t)r * ELEMENTS;
  }
  put(&b, sevens, 7);
  for (int i = 0; i < ROUNDS; i++)
    good = exchange(&b, sevens) && good;
  snprintf(what, sizeof what, "exchange behind slow work, %s, %s",
           thread ? "thread" : "inline",
           form == MZ_FORM_PAIRWISE ? "pairwise" : "collective");
  report(good, what);
  mz_comm_destroy(&b.comm);
  mz_device_free(device, b.send);
  mz_device_free(device, b.recv);
  mz_device_free(device, sevens);
  mz_device_free_host(device, b.host);
}

/* --- training --- */

#define SLOW(op, args)                                                         \
  static mz_status_t slow_##op(const mz_kernels_t *kernels, const args *a,     \
                               mz_stream_t stream)                             \
  {                                                                            \
    MZ_TRY(be_slow(stream, KERNEL_US));                                        \
    return MZ_TRACE(true_ops->op(kernels, a, stream));                         \
  }
MZ_KERNEL_LIST(SLOW)
#undef SLOW

static mz_status_t train(tiny_t *t, bool slow, double loss[STEPS])
{
  mz_kernels_ops_t slow_ops = *t->engine->kernels->ops;
  mz_status_t st = MZ_OK;

  true_ops = t->engine->kernels->ops;
#define REPLACE(op, args) slow_ops.op = slow_##op;
  MZ_KERNEL_LIST(REPLACE)
#undef REPLACE
  if (slow) t->engine->kernels->ops = &slow_ops;
  for (int i = 0; i < STEPS && st == MZ_OK; i++) {
    mz_step_result_t result;

    st = tiny_step(t, &result);
    loss[i] = result.loss;
  }
  t->engine->kernels->ops = true_ops;
  return MZ_TRACE(st);
}

static void give(tiny_given_t *given, int stage, bool thread)
{
  tiny_give(given, "train.device=%s", backend);
  tiny_give(given, "zero_optimization.stage=%d", stage);
  tiny_give(given, "moe.ep_size=2");
  tiny_give(given, "moe.num_experts=%d", 2 * world);
  tiny_give(given, "train_batch_size=%d", 2 * world);
  tiny_give(given, "comm.thread=%s", thread ? "true" : "false");
}

/* The algorithms that a first step finds the fastest: bits repeat with one
 * table. */
static char *make_table(const tiny_given_t *given)
{
  mz_step_result_t result;
  char *table = NULL;
  tiny_t tiny;

  must(tiny_create(given->all, given->num, MPI_COMM_WORLD, &tiny));
  must(tiny_step(&tiny, &result));
  must(mz_engine_tuning_text(tiny.engine, &table));
  tiny_destroy(&tiny);
  return table;
}

static void check_training(int stage, bool thread)
{
  double loss[2][STEPS];
  char what[96], *table;
  tiny_given_t given = {.num = 0};

  give(&given, stage, thread);
  table = make_table(&given);
  tiny_tuning = table[0] ? table : NULL;
  for (int slow = 0; slow < 2; slow++) {
    tiny_t tiny;

    must(tiny_create(given.all, given.num, MPI_COMM_WORLD, &tiny));
    must(train(&tiny, slow, loss[slow]));
    tiny_destroy(&tiny);
  }
  tiny_tuning = NULL;
  mz_free(table);
  snprintf(what, sizeof what, "%d steps at stage %d, %s: loss %.9g after both",
           STEPS, stage, thread ? "thread" : "inline", loss[0][STEPS - 1]);
  report(memcmp(loss[0], loss[1], sizeof loss[0]) == 0, what);
}

int main(int argc, char **argv)
{
  int provided;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  backend = argc == 2 ? argv[1] : "";
  if (world % 2 != 0 || world > 64 ||
      (strcmp(backend, "cuda") != 0 && strcmp(backend, "cpu") != 0))
    stop("usage: rank_delay cuda|cpu, on an even number of ranks");
  must(mz_device_open(backend[1] == 'u' ? MZ_BACKEND_CUDA : MZ_BACKEND_CPU, 0,
                      &device));
  must(mz_device_alloc(device, slow_bytes, "slow", (void **)&slow_memory));
  measure_fill();
  for (int form = 0; form < 4; form++)
    check_exchange(form % 2 == 0,
                   form < 2 ? MZ_FORM_COLLECTIVE : MZ_FORM_PAIRWISE);
  for (int stage = 0; stage <= 3; stage++)
    check_training(stage, stage % 2 == 0);
  mz_device_free(device, slow_memory);
  mz_device_close(&device);
  MPI_Finalize();
  return num_failed > 0;
}
