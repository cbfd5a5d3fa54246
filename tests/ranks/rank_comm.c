/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The queue on real ranks. rank_comm FORM LIMIT; FORM is thread, inline or
 * pairwise (inline as well), LIMIT the elements that an MPI call takes (0:
 * MPI's own limit). Every case runs on the world and on its reversed order.
 * Exit code 0: all is right.
 *
 * Contents are a function of (case, sender, receiver, index), so that every
 * element is checked bit by bit. Letters: W ranks of world, N of a group.
 */
#include "comm/comm.h"

#include "base/alloc.h"
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_RANKS = 8, MAX_COUNT = 64, BLOCK = 80 };

static int num_errors;

#define CHECK(cond)                                                            \
  do {                                                                         \
    if (!(cond)) {                                                             \
      num_errors++;                                                            \
      fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #cond);               \
    }                                                                          \
  } while (0)

/* After an unexpected failure the others would wait for this rank. */
static void give_up(void)
{
  MPI_Abort(MPI_COMM_WORLD, 1);
  exit(1);
}

#define MUST(call)                                                             \
  do {                                                                         \
    if ((call) != MZ_OK) {                                                     \
      fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, mz_error_last());     \
      give_up();                                                               \
    }                                                                          \
  } while (0)

static uint32_t mix(uint32_t x)
{
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

static uint32_t value_of(uint32_t salt, int from, int to, int64_t i)
{
  return mix(mix(mix(salt * 8 + (uint32_t)from) * 8 + (uint32_t)to) +
             (uint32_t)i);
}

/* Uneven, often zero; rank 1 sends nothing at all. */
static int64_t count_of(uint32_t salt, int from, int to)
{
  uint32_t h = mix(salt * 64 + (uint32_t)(from * 8 + to) + 99);

  return from == 1 || h % 3 == 0 ? 0 : h % MAX_COUNT;
}

static void nap(uint32_t salt, int rank)
{
  uint32_t us = mix(salt * 8 + (uint32_t)rank) % 8;

  if (us < 3) usleep(us * 150);
}

/* One message with its buffers. An exchange has BLOCK elements a rank on both
 * sides; a gather lies at a stride of BLOCK. Elements are 4 bytes. */
typedef struct parcel {
  uint32_t salt;
  int size, rank; /* of the group */
  bool in_place;
  mz_msg_t msg;
  mz_ticket_t ticket;
  int64_t send_counts[MAX_RANKS], send_displs[MAX_RANKS];
  int64_t recv_counts[MAX_RANKS], recv_displs[MAX_RANKS];
  uint32_t send[MAX_RANKS * BLOCK], recv[MAX_RANKS * BLOCK];
} parcel_t;

static void fill_counts(parcel_t *p)
{
  bool gather = p->msg.kind == MZ_MSG_GATHER;

  for (int r = 0; r < p->size; r++) {
    /* blocks of the two sides lie in opposite orders */
    p->send_displs[r] = (p->size - 1 - r) * BLOCK + r;
    p->recv_displs[r] = r * BLOCK + 3;
    p->send_counts[r] = count_of(p->salt, p->rank, r);
    p->recv_counts[r] = count_of(p->salt, r, gather ? 0 : p->rank);
  }
}

static void fill_block(parcel_t *p, uint32_t *at, int to, int64_t count)
{
  for (int64_t i = 0; i < count; i++)
    at[i] = value_of(p->salt, p->rank, to, i);
}

static void make_parcel(const mz_comm_t *comm, parcel_t *p, mz_msg_kind_t kind,
                        int group, uint32_t salt)
{
  memset(p, 0, sizeof *p);
  p->salt = salt;
  p->size = mz_comm_group_size(comm, group);
  p->rank = mz_comm_group_rank(comm, group);
  p->in_place = kind == MZ_MSG_GATHER && salt % 2 == 1;
  p->msg = (mz_msg_t){.kind = kind,
                      .group = group,
                      .element_bytes = 4,
                      .send = p->in_place ? NULL : p->send,
                      .recv = p->recv,
                      .send_counts = p->send_counts,
                      .send_displs = p->send_displs,
                      .recv_counts = p->recv_counts,
                      .recv_displs = p->recv_displs};
  fill_counts(p);
  if (kind == MZ_MSG_GATHER) {
    p->msg.send_count = p->recv_counts[p->rank];
    fill_block(p, p->in_place ? p->recv + p->recv_displs[p->rank] : p->send, 0,
               p->msg.send_count);
    return;
  }
  for (int r = 0; r < p->size; r++)
    fill_block(p, p->send + p->send_displs[r], r, p->send_counts[r]);
}

/* Every element: the blocks' and the gaps between them. */
static void check_parcel(const parcel_t *p)
{
  for (int r = 0; r < p->size; r++) {
    int to = p->msg.kind == MZ_MSG_GATHER ? 0 : p->rank;

    for (int64_t i = 0; i < BLOCK; i++) {
      int64_t k = i - 3;
      bool inside = k >= 0 && k < p->recv_counts[r];
      uint32_t expected = inside ? value_of(p->salt, r, to, k) : 0;

      CHECK(p->recv[r * BLOCK + i] == expected);
    }
  }
}

static parcel_t *new_parcels(int n)
{
  parcel_t *parcels = malloc((size_t)n * sizeof *parcels);

  if (!parcels) give_up();
  return parcels;
}

/* Cases: each gets a fresh communicator. */

static void one_at_a_time(mz_comm_t *comm)
{
  parcel_t *p = new_parcels(1);

  for (uint32_t salt = 0; salt < 24; salt++) {
    mz_msg_kind_t kind = salt % 3 ? MZ_MSG_EXCHANGE : MZ_MSG_GATHER;

    make_parcel(comm, p, kind, 0, salt);
    if (salt % 5 == 0) p->msg.bound = (int64_t)1 << 31; /* goes pairwise */
    p->msg.timed = salt % 4 == 1;
    MUST(mz_comm_post(comm, (mz_lane_t)(salt / 2 % 2), &p->msg, &p->ticket));
    CHECK(p->ticket.number > 0);
    MUST(mz_comm_wait(comm, p->ticket));
    CHECK(mz_comm_done(comm, p->ticket));
    check_parcel(p);
    CHECK((mz_comm_take_timed_seconds(comm) > 0) == p->msg.timed);
  }
  MUST(mz_comm_wait(comm, (mz_ticket_t){MZ_LANE_BULK, 0}));
  free(p);
}

/* Two halves of the world: sizes differ when W is odd, and may be 1. */
static int add_half(mz_comm_t *comm)
{
  int size = mz_comm_size(comm), rank = mz_comm_rank(comm);
  int cut = size / 2, ranks[MAX_RANKS], num = 0, group = -1;

  for (int r = 0; r < size; r++)
    if ((r < cut) == (rank < cut)) ranks[num++] = r;
  MUST(mz_comm_add_group(comm, "half", ranks, num, &group));
  CHECK(mz_comm_group_size(comm, group) == num);
  CHECK(ranks[mz_comm_group_rank(comm, group)] == rank);
  return group;
}

/* The group's order is the list's: here from the last rank to the first. */
static int add_turned(mz_comm_t *comm)
{
  int size = mz_comm_size(comm), ranks[MAX_RANKS], group = -1;

  for (int r = 0; r < size; r++)
    ranks[r] = size - 1 - r;
  MUST(mz_comm_add_group(comm, "turned", ranks, size, &group));
  CHECK(mz_comm_group_rank(comm, group) == size - 1 - mz_comm_rank(comm));
  return group;
}

static int add_alone(mz_comm_t *comm)
{
  int rank = mz_comm_rank(comm), group = -1;

  MUST(mz_comm_add_group(comm, "alone", &rank, 1, &group));
  CHECK(mz_comm_group_size(comm, group) == 1);
  return group;
}

/* More messages than the ring holds, in both lanes and four groups, each rank
 * with delays of its own. */
static void many_in_two_lanes(mz_comm_t *comm)
{
  enum { NUM = 200 };
  int groups[4] = {0, add_half(comm), add_turned(comm), add_alone(comm)};
  parcel_t *p = new_parcels(NUM);
  uint64_t last[MZ_NUM_LANES] = {0};

  for (uint32_t i = 0; i < NUM; i++) {
    mz_lane_t lane = (mz_lane_t)(mix(i) % 2);
    mz_msg_kind_t kind = mix(i + 7) % 2 ? MZ_MSG_EXCHANGE : MZ_MSG_GATHER;

    make_parcel(comm, &p[i], kind, groups[mix(i + 3) % 4], 1000 + i);
    MUST(mz_comm_post(comm, lane, &p[i].msg, &p[i].ticket));
    CHECK(p[i].ticket.lane == lane);
    CHECK(last[lane] == 0 || p[i].ticket.number == last[lane] + 1);
    last[lane] = p[i].ticket.number;
    nap(i, mz_comm_rank(comm));
  }
  for (int i = NUM - 1; i >= 0; i--) {
    MUST(mz_comm_wait(comm, p[i].ticket));
    check_parcel(&p[i]);
  }
  free(p);
}

static void full_ring(mz_comm_t *comm)
{
  enum { NUM = 200 };
  parcel_t *p = new_parcels(NUM);

  for (uint32_t i = 0; i < NUM; i++) {
    make_parcel(comm, &p[i], MZ_MSG_GATHER, 0, i);
    MUST(mz_comm_post(comm, MZ_LANE_BULK, &p[i].msg, &p[i].ticket));
  }
  /* Message i is done when post takes its slot for i + 64. */
  for (int i = 0; i + 64 < NUM; i++)
    CHECK(mz_comm_done(comm, p[i].ticket));
  MUST(mz_comm_wait(comm, p[NUM - 1].ticket));
  for (int i = 0; i < NUM; i++) {
    MUST(mz_comm_wait(comm, p[i].ticket));
    check_parcel(&p[i]);
  }
  free(p);
}

/* Counts travel first; the exchange is posted before they are known. */
typedef struct late {
  parcel_t rows;
  int64_t own[MAX_RANKS];             /* rows to each rank */
  int64_t all[MAX_RANKS * MAX_RANKS]; /* [from, to] */
  int64_t counts[MAX_RANKS], displs[MAX_RANKS];
  int bound;
} late_t;

static mz_status_t bind_rows(void *ctx)
{
  late_t *late = ctx;
  parcel_t *p = &late->rows;

  late->bound++;
  for (int r = 0; r < p->size; r++) {
    p->send_counts[r] = late->all[p->rank * p->size + r];
    p->recv_counts[r] = late->all[r * p->size + p->rank];
  }
  return MZ_OK;
}

static void late_bound(mz_comm_t *comm)
{
  int group = add_half(comm);
  late_t *late = malloc(sizeof *late);

  if (!late) give_up();
  for (uint32_t salt = 0; salt < 30; salt++) {
    parcel_t *p = &late->rows;
    mz_ticket_t counts;
    /* also a wait for a message of the other lane */
    mz_lane_t lane = salt % 2 ? MZ_LANE_EXCHANGE : MZ_LANE_BULK;

    late->bound = 0;
    make_parcel(comm, p, MZ_MSG_EXCHANGE, salt % 3 ? group : 0, salt);
    memcpy(late->own, p->send_counts, sizeof late->own);
    memset(p->send_counts, 0x77, sizeof p->send_counts);
    memset(p->recv_counts, 0x77, sizeof p->recv_counts);
    for (int r = 0; r < p->size; r++) {
      late->counts[r] = 1;
      late->displs[r] = r;
    }
    MUST(mz_comm_post(comm, MZ_LANE_EXCHANGE,
                      &(mz_msg_t){.kind = MZ_MSG_GATHER,
                                  .group = p->msg.group,
                                  .element_bytes = (size_t)p->size * 8,
                                  .send = late->own,
                                  .send_count = 1,
                                  .recv = late->all,
                                  .recv_counts = late->counts,
                                  .recv_displs = late->displs},
                      &counts));
    p->msg.after = counts;
    p->msg.bind = bind_rows;
    p->msg.ctx = late;
    MUST(mz_comm_post(comm, lane, &p->msg, &p->ticket));
    nap(salt, mz_comm_rank(comm));
    MUST(mz_comm_wait(comm, p->ticket));
    CHECK(late->bound == 1);
    check_parcel(p);
  }
  free(late);
}

/* Large enough for MPI's own pieces, and more element sizes than the table of
 * types holds. */
static void large_and_odd_elements(mz_comm_t *comm)
{
  int size = mz_comm_size(comm), rank = mz_comm_rank(comm);
  int64_t counts[MAX_RANKS], displs[MAX_RANKS];

  for (size_t bytes = 1; bytes < 60000; bytes += 1 + bytes / 8) {
    size_t total = (size_t)size * 3 * bytes;
    uint8_t *recv = calloc(total, 1);
    mz_ticket_t ticket;

    if (!recv) give_up();
    for (int r = 0; r < size; r++) {
      counts[r] = 3;
      displs[r] = 3 * r;
    }
    for (size_t i = 0; i < 3 * bytes; i++)
      recv[(size_t)rank * 3 * bytes + i] =
          (uint8_t)value_of((uint32_t)bytes, rank, 0, (int64_t)i);
    MUST(mz_comm_post(comm, MZ_LANE_BULK,
                      &(mz_msg_t){.kind = MZ_MSG_GATHER,
                                  .element_bytes = bytes,
                                  .recv = recv,
                                  .recv_counts = counts,
                                  .recv_displs = displs,
                                  .send_count = 3},
                      &ticket));
    MUST(mz_comm_wait(comm, ticket));
    for (size_t i = 0; i < total; i++)
      CHECK(recv[i] == (uint8_t)value_of((uint32_t)bytes,
                                         (int)(i / (3 * bytes)), 0,
                                         (int64_t)(i % (3 * bytes))));
    free(recv);
  }
}

/* Address space, of which only the pages that are used become memory. Not
 * calloc: MALLOC_PERTURB_ and sanitizers make it write every page. */
static uint8_t *map_sparse(size_t bytes)
{
  void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

  if (map == MAP_FAILED) give_up();
  return map;
}

/* Blocks beyond element 2^31 of a buffer of which few pages are touched. */
static void far_displacements(mz_comm_t *comm)
{
  static const int64_t far = ((int64_t)1 << 31) + 5;
  int size = mz_comm_size(comm), rank = mz_comm_rank(comm);
  int64_t counts[MAX_RANKS], displs[MAX_RANKS];
  size_t bytes = (size_t)far + MAX_RANKS;
  uint8_t *send = map_sparse(bytes), *recv = map_sparse(bytes);
  mz_ticket_t ticket;

  for (int r = 0; r < size; r++) {
    counts[r] = 1;
    displs[r] = r % 2 ? r : far + r;
    send[displs[r]] = (uint8_t)value_of(1, rank, r, 0);
  }
  MUST(mz_comm_post(comm, MZ_LANE_BULK,
                    &(mz_msg_t){.kind = MZ_MSG_EXCHANGE,
                                .element_bytes = 1,
                                .send = send,
                                .recv = recv,
                                .send_counts = counts,
                                .send_displs = displs,
                                .recv_counts = counts,
                                .recv_displs = displs,
                                .bound = far + size},
                    &ticket));
  MUST(mz_comm_wait(comm, ticket));
  for (int r = 0; r < size; r++)
    CHECK(recv[displs[r]] == (uint8_t)value_of(1, r, rank, 0));
  munmap(recv, bytes);
  munmap(send, bytes);
}

static void small_collectives(mz_comm_t *comm)
{
  int size = mz_comm_size(comm), rank = mz_comm_rank(comm);
  int last = size - 1;
  int64_t min, max;
  const int64_t *values;
  char text[2000], expected[64];

  MUST(mz_comm_min_max(comm, (int64_t)rank - ((int64_t)1 << 40), &min, &max));
  CHECK(min == -((int64_t)1 << 40) && max == min + last);
  MUST(mz_comm_gather(comm, ((int64_t)rank << 33) - 1, &values));
  for (int r = 0; r < size; r++)
    CHECK(values[r] == ((int64_t)r << 33) - 1);

  for (int root = 0; root < size; root++) {
    memset(text, rank == root ? 'a' + root : 0, sizeof text);
    MUST(mz_comm_broadcast(comm, text, sizeof text, root));
    for (size_t i = 0; i < sizeof text; i++)
      CHECK(text[i] == 'a' + root);
  }

  CHECK(mz_comm_agree(comm, MZ_OK) == MZ_OK);
  mz_error_clear();
  if (rank == last) /* records "group 99 of 1" */
    CHECK(mz_comm_post(comm, MZ_LANE_BULK,
                       &(mz_msg_t){.kind = MZ_MSG_GATHER, .group = 99},
                       &(mz_ticket_t){0}) == MZ_ERR_ARG);
  CHECK(mz_comm_agree(comm, rank == last ? MZ_ERR_IO : MZ_OK) == MZ_ERR_IO);
  snprintf(expected, sizeof expected, "rank %d: group 99 of 1", last);
  CHECK(strcmp(mz_error_message(), expected) == 0);
  /* The worst code of all, the text of the lowest that failed. */
  mz_error_clear();
  CHECK(mz_comm_agree(comm, rank == 0 ? MZ_ERR_ARG : MZ_ERR_STOPPED) ==
        (size == 1 ? MZ_ERR_ARG : MZ_ERR_STOPPED));
  CHECK(strcmp(mz_error_message(), "rank 0: invalid argument") == 0);
}

/* Refused on one rank, so on all, and the queue lives on. */
static void refused_groups(mz_comm_t *comm)
{
  int size = mz_comm_size(comm), rank = mz_comm_rank(comm);
  int ranks[MAX_RANKS], group = -1;

  for (int r = 0; r < size; r++)
    ranks[r] = r;
  if (rank == size - 1) ranks[0] = size;
  CHECK(mz_comm_add_group(comm, "bad", ranks, size, &group) == MZ_ERR_ARG);
  CHECK(strstr(mz_error_message(), "group bad: rank "));
  mz_alloc_fail_at(rank == size - 1 ? 1 : 0);
  ranks[0] = 0;
  CHECK(mz_comm_add_group(comm, "bad", ranks, size, &group) == MZ_ERR_NOMEM);
  CHECK(strstr(mz_error_message(), "groups: no memory for"));
  CHECK(group == -1);
  if (size > 1) { /* lists that do not partition the ranks */
    CHECK(mz_comm_add_group(comm, "bad", rank ? &ranks[rank] : ranks,
                            rank ? 1 : size, &group) == MZ_ERR_ARG);
    CHECK(strstr(mz_error_message(), "ranks of its members differ"));
  }
  if (size == 3) { /* only the last of three counts less than there are */
    const int two[] = {0, 2};

    CHECK(mz_comm_add_group(comm, "bad", rank == 2 ? two : ranks,
                            rank == 2 ? 2 : 3, &group) == MZ_ERR_ARG);
    CHECK(strstr(mz_error_message(), "ranks of its members differ"));
  }
  many_in_two_lanes(comm);
}

static void refused_messages(mz_comm_t *comm)
{
  static const int64_t one[MAX_RANKS]; /* outlives the call: destroy waits */
  mz_ticket_t ticket = {MZ_LANE_BULK, 5};
  mz_msg_t good = {.kind = MZ_MSG_GATHER,
                   .element_bytes = 4,
                   .recv_counts = one,
                   .recv_displs = one};
  mz_msg_t msg = good;

  msg.element_bytes = 0;
  CHECK(mz_comm_post(comm, MZ_LANE_BULK, &msg, &ticket) == MZ_ERR_ARG);
  msg = good;
  msg.kind = MZ_MSG_EXCHANGE; /* without send_counts */
  CHECK(mz_comm_post(comm, MZ_LANE_BULK, &msg, &ticket) == MZ_ERR_ARG);
  msg = good;
  msg.after = (mz_ticket_t){MZ_LANE_BULK, 1000000};
  CHECK(mz_comm_post(comm, MZ_LANE_BULK, &msg, &ticket) == MZ_ERR_ARG);
  CHECK(mz_comm_post(comm, MZ_NUM_LANES, &good, &ticket) == MZ_ERR_ARG);
  CHECK(mz_comm_wait(comm, (mz_ticket_t){MZ_LANE_BULK, 1000000}) == MZ_ERR_ARG);
  CHECK(ticket.number == 5); /* outputs only on success */
  MUST(mz_comm_post(comm, MZ_LANE_BULK, &good, &ticket));
}

static void names_and_position(mz_comm_t *comm)
{
  char text[128], expected[128];
  int64_t min, max;
  double waited;

  mz_comm_take_wait_seconds(comm);
  for (int i = 0; i < 3; i++)
    MUST(mz_comm_min_max(comm, i, &min, &max));
  waited = mz_comm_take_wait_seconds(comm);
  CHECK(waited >= 0 && waited < 60);
  CHECK(mz_comm_take_wait_seconds(comm) == 0);
  mz_comm_position(comm, text, sizeof text);
  /* one message of create, three of these */
  snprintf(expected, sizeof expected, "rank %d exchange 4/4 bulk 0/0",
           mz_comm_rank(comm));
  CHECK(strcmp(text, expected) == 0);
}

/* On every rank, or on one alone: the others hear of it. */
static void refused_options(void)
{
  mz_comm_opts_t opts = {.watchdog_s = -1};
  mz_comm_t *comm = NULL;
  int size, rank, level;

  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  CHECK(mz_comm_create(MPI_COMM_WORLD, &opts, &comm) == MZ_ERR_ARG);
  opts = (mz_comm_opts_t){.count_limit = (int64_t)1 << 31};
  CHECK(mz_comm_create(MPI_COMM_WORLD, &opts, &comm) == MZ_ERR_ARG);

  opts = (mz_comm_opts_t){.thread = true};
  MPI_Query_thread(&level);
  if (level < MPI_THREAD_SERIALIZED) /* the inline form's run */
    CHECK(mz_comm_create(MPI_COMM_WORLD, &opts, &comm) == MZ_ERR_UNSUPPORTED);

  opts = (mz_comm_opts_t){0};
  for (int n = 1; !comm; n++) { /* until no allocation is left to fail */
    mz_status_t st;

    mz_alloc_fail_at(rank == size - 1 ? n : 0);
    st = mz_comm_create(MPI_COMM_WORLD, &opts, &comm);
    CHECK(comm ? st == MZ_OK && n > 20 : st == MZ_ERR_NOMEM);
    CHECK(comm ||
          strstr(mz_error_message(),
                 rank == size - 1 ? "no memory for" : "on another rank: "));
  }
  mz_alloc_fail_at(0);
  mz_comm_destroy(&comm);
}

static void run_cases(MPI_Comm world, const mz_comm_opts_t *opts)
{
  static void (*const cases[])(mz_comm_t *) = {
      one_at_a_time,     many_in_two_lanes,      full_ring,
      late_bound,        large_and_odd_elements, far_displacements,
      small_collectives, refused_groups,         refused_messages,
      names_and_position};

  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    mz_comm_t *comm = NULL;

    MUST(mz_comm_create(world, opts, &comm));
    cases[i](comm);
    mz_comm_destroy(&comm);
    CHECK(!comm);
  }
}

int main(int argc, char **argv)
{
  mz_comm_opts_t opts = {.watchdog_s = 60};
  MPI_Comm reversed;
  int level, rank, worst;

  if (argc != 3) return 2;
  opts.thread = strcmp(argv[1], "thread") == 0;
  if (strcmp(argv[1], "pairwise") == 0) opts.form = MZ_FORM_PAIRWISE;
  opts.count_limit = atoi(argv[2]);
  MPI_Init_thread(&argc, &argv,
                  opts.thread ? MPI_THREAD_SERIALIZED : MPI_THREAD_FUNNELED,
                  &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  refused_options();
  run_cases(MPI_COMM_WORLD, &opts);
  MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &reversed);
  run_cases(reversed, &opts);
  MPI_Comm_free(&reversed);
  MPI_Allreduce(&num_errors, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return worst ? 1 : 0;
}
