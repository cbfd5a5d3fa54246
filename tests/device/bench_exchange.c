/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Rates of what src/comm moves from device to device, in both of its forms:
 *   bench_exchange BACKEND FORM MIB...
 * on 2, 4 or 8 ranks; BACKEND is cuda or cpu, FORM thread or inline, MIB the
 * sizes. A size is that of the larger buffer of a rank: what an exchange or a
 * reduction sends, own part included, what a gather receives. Rates are size /
 * time, and a time is one of two:
 *  - until the host knows that all is done, one operation at a time, median of
 *    50 after 20;
 *  - units, queued: of 50 one behind another as the engine posts them, two
 *    under way, the host never waiting for a sum; the end of all included.
 *
 * An exchange is one message of token rows. Units travel in pieces of 32 MiB
 * (comm.piece_bytes) as the engine posts them, and for comparison whole and in
 * other pieces. A reduction exchanges bf16 and adds into fp32, the own part
 * where it is.
 *
 * Prints a line a measurement. Exit code 0: all that arrived was right.
 * Letters: N ranks.
 */
#include "comm/comm.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  MAX_RANKS = 8,
  WARM = 20,
  TIMED = 50,
  ROW_BYTES = 4096, /* a token of width 2048 in bf16 */
  UNIT_BYTES = 2,   /* bf16 */
  MIB = 1 << 20,
  PIECE = 32 * MIB,
  MAX_PIECES = 64, /* what the queue's ring holds */
  PENDING = 2,     /* reductions posted and not yet added, as in the engine */
  SLOTS = 2 * MAX_PIECES,
  SAMPLES = 64 /* places of a block that are looked at */
};

/* A message and what it borrows until it is done. */
typedef struct piece {
  int64_t send_counts[MAX_RANKS], send_displs[MAX_RANKS];
  int64_t recv_counts[MAX_RANKS], recv_displs[MAX_RANKS];
  mz_ticket_t ticket;
  mz_reduce_ranks_t sum; /* then; without out: none */
} piece_t;

typedef struct bench {
  mz_comm_t *comm;
  mz_device_t *device;
  mz_kernels_t *kernels;
  char *send;    /* [bytes of the largest size] */
  char *recv[2]; /* [bytes of the largest size] operations take turns */
  float *sum;    /* [elements of the largest size / N] */
  int size, rank, turn;
  piece_t pieces[SLOTS];
  int first, num;  /* pieces posted and not yet waited for */
  int64_t reduced; /* pieces of reductions so far */
} bench_t;

static int world_rank, wrong;

static void must(mz_status_t st)
{
  if (st == MZ_OK) return;
  fprintf(stderr, "rank %d: %s\n", world_rank, mz_error_last());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static double now_ms(void)
{
  struct timespec t;

  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* --- operations; each returns when all is posted --- */

typedef void (*op_fn)(bench_t *b, int64_t bytes, int64_t piece_bytes);

/* Waits for the oldest pieces until @p keep are left; then their sums. */
static void drain(bench_t *b, int keep)
{
  for (; b->num > keep; b->num--) {
    const piece_t *p = &b->pieces[b->first];

    must(mz_comm_wait(b->comm, p->ticket));
    if (p->sum.out)
      must(b->kernels->ops->reduce_ranks(b->kernels, &p->sum,
                                         b->device->stream));
    b->first = (b->first + 1) % SLOTS;
  }
}

static void end(bench_t *b)
{
  drain(b, 0);
  if (b->reduced) must(mz_stream_synchronize(b->device, b->device->stream));
  b->reduced = 0;
}

/* N blocks of @p count elements on both sides, at strides of their own. */
static piece_t *next_piece(bench_t *b, int64_t count, int64_t send_stride,
                           int64_t recv_stride)
{
  piece_t *p = &b->pieces[(b->first + b->num) % SLOTS];

  for (int r = 0; r < b->size; r++) {
    p->send_counts[r] = p->recv_counts[r] = count;
    p->send_displs[r] = r * send_stride;
    p->recv_displs[r] = r * recv_stride;
  }
  p->sum.out = NULL;
  return p;
}

static void post(bench_t *b, piece_t *p, mz_lane_t lane, mz_msg_t msg)
{
  msg.backend = true;
  msg.send_counts = p->send_counts;
  msg.send_displs = p->send_displs;
  msg.recv_counts = p->recv_counts;
  msg.recv_displs = p->recv_displs;
  must(mz_comm_post(b->comm, lane, &msg, &p->ticket));
  b->num++;
}

static void exchange(bench_t *b, int64_t bytes, int64_t piece_bytes)
{
  int64_t rows = bytes / b->size / ROW_BYTES;
  mz_msg_t msg = {.kind = MZ_MSG_EXCHANGE,
                  .element_bytes = ROW_BYTES,
                  .send = b->send,
                  .recv = b->recv[b->turn]};

  (void)piece_bytes;
  post(b, next_piece(b, rows, rows, rows), MZ_LANE_EXCHANGE, msg);
}

/* Shards into their places of a unit. */
static void gather(bench_t *b, int64_t bytes, int64_t piece_bytes)
{
  int64_t shard = bytes / b->size / UNIT_BYTES;
  int64_t step = mz_min_i64(shard, piece_bytes / b->size / UNIT_BYTES);

  drain(b, (int)mz_div_up(shard, step)); /* the arrivals before the last */
  b->turn = !b->turn;
  for (int64_t at = 0; at < shard; at += step) {
    int64_t count = mz_min_i64(step, shard - at);
    mz_msg_t msg = {.kind = MZ_MSG_GATHER,
                    .element_bytes = UNIT_BYTES,
                    .send = b->send + at * UNIT_BYTES,
                    .send_count = count,
                    .recv = b->recv[b->turn] + at * UNIT_BYTES};

    post(b, next_piece(b, count, 0, shard), MZ_LANE_BULK, msg);
  }
}

/* Contributions, packed a piece after the other, to the owners of the shards;
 * the own one stays. Arrivals take turns: a message starts when the sum of the
 * one before the last is out of its way. */
static void reduce(bench_t *b, int64_t bytes, int64_t piece_bytes)
{
  int64_t shard = bytes / b->size / UNIT_BYTES;
  int64_t step = mz_min_i64(shard, piece_bytes / b->size / UNIT_BYTES);

  for (int64_t at = 0; at < shard; at += step) {
    int64_t count = mz_min_i64(step, shard - at);
    char *send = b->send + at * b->size * UNIT_BYTES;
    mz_msg_t msg = {.kind = MZ_MSG_EXCHANGE,
                    .element_bytes = UNIT_BYTES,
                    .send = send,
                    .recv = b->recv[b->reduced++ % PENDING]};
    piece_t *p;

    drain(b, PENDING - 1);
    p = next_piece(b, count, count, count);
    p->send_counts[b->rank] = p->recv_counts[b->rank] = 0;
    for (int r = b->rank + 1; r < b->size; r++)
      p->recv_displs[r] -= count;
    p->sum = (mz_reduce_ranks_t){.num_ranks = b->size,
                                 .n = count,
                                 .stride = count,
                                 .in = msg.recv,
                                 .in_dtype = MZ_BF16,
                                 .out = b->sum + at,
                                 .own = send + b->rank * count * UNIT_BYTES,
                                 .place = b->rank};
    post(b, p, MZ_LANE_BULK, msg);
  }
}

/* --- what arrived --- */

/* Rank r sends bytes of this value alone. */
static int mark_of(int rank) { return 0x3c + rank; }

/* bf16 of two such bytes, exact in fp32. */
static float value_of(int rank)
{
  uint32_t byte = (uint32_t)mark_of(rank), bits = byte << 24 | byte << 16;
  float value;

  memcpy(&value, &bits, sizeof value);
  return value;
}

static void fetch(const bench_t *b, const void *at, int64_t bytes, void *out)
{
  must(mz_device_copy(b->device, out, at, bytes, b->device->stream));
  must(mz_stream_synchronize(b->device, b->device->stream));
}

static void check_blocks(const bench_t *b, int64_t bytes)
{
  int64_t block = bytes / b->size;

  for (int r = 0; r < b->size; r++)
    for (int64_t i = 0; i < SAMPLES; i++) {
      char got;

      fetch(b, b->recv[b->turn] + r * block + (block - 1) * i / (SAMPLES - 1),
            1, &got);
      wrong += got != mark_of(r);
    }
}

static void check_sum(const bench_t *b, int64_t bytes)
{
  int64_t shard = bytes / b->size / UNIT_BYTES;
  float expected = 0;

  for (int r = 0; r < b->size; r++)
    expected += value_of(r);
  for (int64_t i = 0; i < SAMPLES; i++) {
    float got;

    fetch(b, b->sum + (shard - 1) * i / (SAMPLES - 1), sizeof got, &got);
    wrong += got != expected;
  }
}

/* --- times --- */

typedef struct operation {
  const char *name;
  op_fn run;
  void (*check)(const bench_t *b, int64_t bytes);
  bool units;
} operation_t;

static const operation_t operations[] = {
    {"exchange", exchange, check_blocks, false},
    {"gather", gather, check_blocks, true},
    {"reduce", reduce, check_sum, true}};

static int by_value(const void *a, const void *b)
{
  double x = *(const double *)a, y = *(const double *)b;

  return (x > y) - (x < y);
}

static void clear(bench_t *b, int64_t bytes)
{
  mz_stream_t stream = b->device->stream;

  for (int i = 0; i < 2; i++)
    must(mz_device_fill(b->device, b->recv[i], 0, bytes, stream));
  must(mz_device_fill(b->device, b->sum, 0, bytes / b->size / UNIT_BYTES * 4,
                      stream));
  must(mz_stream_synchronize(b->device, stream));
}

static void print(const bench_t *b, const char *name, const char *parts,
                  int64_t bytes, double ms)
{
  if (b->rank == 0)
    printf("%s %s %" PRId64 " MiB: %.4f ms, %.1f GB/s\n", name, parts,
           bytes / MIB, ms, (double)bytes / ms * 1e-6);
  fflush(stdout);
}

/* How a unit is cut. */
typedef struct cut {
  const char *name, *queued;
  int64_t piece_bytes;
} cut_t;

static void measure(bench_t *b, const operation_t *o, const char *form,
                    const cut_t *cut, int64_t bytes)
{
  double ms[TIMED], begin;
  char name[64];

  snprintf(name, sizeof name, "%s %s", o->name, form);
  clear(b, bytes);
  for (int i = 0; i < WARM + TIMED; i++) {
    begin = now_ms();
    o->run(b, bytes, cut->piece_bytes);
    end(b);
    if (i >= WARM) ms[i - WARM] = now_ms() - begin;
  }
  o->check(b, bytes);
  qsort(ms, TIMED, sizeof *ms, by_value);
  print(b, name, cut->name, bytes, ms[TIMED / 2]);
  if (!o->units) return;
  clear(b, bytes);
  begin = now_ms();
  for (int i = 0; i < TIMED; i++)
    o->run(b, bytes, cut->piece_bytes);
  end(b);
  ms[0] = (now_ms() - begin) / TIMED;
  o->check(b, bytes);
  print(b, name, cut->queued, bytes, ms[0]);
}

static void measure_all(bench_t *b, const char *form, const int64_t *sizes,
                        int num_sizes)
{
  for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
    for (int s = 0; s < num_sizes; s++) {
      const operation_t *o = &operations[i];
      const cut_t cuts[] = {{"whole", "whole_queued", sizes[s]},
                            {"pieces", "pieces_queued", PIECE},
                            {"pieces8", "pieces8_queued", PIECE / 4}};

      for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++)
        if (c == 0 || (o->units && sizes[s] > cuts[c].piece_bytes))
          measure(b, o, form, &cuts[c], sizes[s]);
    }
}

/* --- life --- */

/* MPI tells ranks of one machine apart before there is a queue. */
static void open_device(bench_t *b, const char *name, int64_t most)
{
  const char *backend =
      strcmp(name, "cuda") == 0 ? MZ_BACKEND_CUDA : MZ_BACKEND_CPU;
  mz_kernels_opts_t opts = {.dtype = MZ_BF16};
  MPI_Comm node;
  void *out;
  int place, count;

  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, b->rank,
                      MPI_INFO_NULL, &node);
  MPI_Comm_rank(node, &place);
  MPI_Comm_free(&node);
  must(mz_device_count(backend, &count));
  must(mz_device_open(backend, place % count, &b->device));
  opts.device = b->device;
  must(mz_kernels_create(&opts, &b->kernels));
  must(mz_device_alloc(b->device, most, "what is sent", &out));
  b->send = out;
  for (int i = 0; i < 2; i++) {
    must(mz_device_alloc(b->device, most, "what arrives", &out));
    b->recv[i] = out;
  }
  must(mz_device_alloc(b->device, most / b->size / UNIT_BYTES * 4, "sums",
                       &out));
  b->sum = out;
  must(mz_device_fill(b->device, b->send, mark_of(b->rank), most,
                      b->device->stream));
  must(mz_stream_synchronize(b->device, b->device->stream));
}

static void close_device(bench_t *b)
{
  mz_device_free(b->device, b->sum);
  mz_device_free(b->device, b->recv[1]);
  mz_device_free(b->device, b->recv[0]);
  mz_device_free(b->device, b->send);
  mz_kernels_destroy(&b->kernels);
  mz_device_close(&b->device);
}

static int64_t take_sizes(int num, char **args, int64_t *sizes)
{
  int64_t most = 0;

  for (int i = 0; i < num; i++) {
    sizes[i] = atoll(args[i]) * MIB;
    if (sizes[i] < MIB || sizes[i] > (int64_t)MAX_PIECES * PIECE) return 0;
    most = mz_max_i64(most, sizes[i]);
  }
  return most;
}

int main(int argc, char **argv)
{
  enum { MAX_SIZES = 16 };
  mz_comm_opts_t opts = {.watchdog_s = 60};
  int64_t sizes[MAX_SIZES], most;
  static bench_t b;
  int level, sum;

  if (argc < 4 || argc > 3 + MAX_SIZES) return 2;
  most = take_sizes(argc - 3, argv + 3, sizes);
  opts.thread = strcmp(argv[2], "thread") == 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  MPI_Comm_size(MPI_COMM_WORLD, &b.size);
  MPI_Comm_rank(MPI_COMM_WORLD, &b.rank);
  world_rank = b.rank;
  if (most == 0 || (b.size != 2 && b.size != 4 && b.size != MAX_RANKS))
    MPI_Abort(MPI_COMM_WORLD, 2);
  open_device(&b, argv[1], most);
  for (int pairwise = 0; pairwise < 2; pairwise++) {
    opts.form = pairwise ? MZ_FORM_PAIRWISE : MZ_FORM_COLLECTIVE;
    must(mz_comm_create(MPI_COMM_WORLD, &opts, &b.comm));
    must(mz_comm_use_device(b.comm, b.device, (int64_t[]){most, most}));
    if (mz_comm_is_staged(b.comm) && b.rank == 0)
      printf("staged: this MPI does not take GPU memory\n");
    measure_all(&b, pairwise ? "pairwise" : "collective", sizes, argc - 3);
    mz_comm_destroy(&b.comm);
  }
  close_device(&b);
  MPI_Allreduce(&wrong, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (b.rank == 0 && sum) printf("FAILED: %d samples are wrong\n", sum);
  MPI_Finalize();
  return sum > 0;
}
