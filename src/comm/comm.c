/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Communicators: a control communicator, and one a lane and group. They are
 * made and freed while the communication thread is stopped.
 */
#include "comm/comm_impl.h"

#include "base/alloc.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

static const int max_flight[MZ_NUM_LANES] = {4, 2};

const char *mz_comm_lane_name(int lane)
{
  return lane == MZ_LANE_EXCHANGE ? "exchange" : "bulk";
}

mz_status_t mz_comm_mpi_status(int code, const char *call)
{
  char text[MPI_MAX_ERROR_STRING] = "unknown error";
  int length;

  if (code == MPI_SUCCESS) return MZ_OK;
  MPI_Error_string(code, text, &length);
  MZ_FAIL(MZ_ERR_MPI, "%.*s: %s", (int)strcspn(call, "("), call, text);
}

/* Local: what a communicator needs besides MPI's own objects. */

static mz_status_t create_flights(mz_comm_t *comm)
{
  int64_t size = comm->size;

  for (int lane = 0; lane < MZ_NUM_LANES; lane++) {
    mz_ring_t *ring = &comm->rings[lane];

    ring->max_flight = max_flight[lane];
    for (int i = 0; i < ring->max_flight; i++) {
      mz_flight_t *flight = &ring->flights[i];

      /* a request may be a pointer: NOLINTNEXTLINE(bugprone-sizeof-*) */
      MZ_TRY(mz_new(2 * size, "requests", &flight->requests));
      MZ_TRY(mz_new(4 * size, "counts of a message", &flight->ints));
      MZ_TRY(mz_new(2 * size, "chunks of a message", &flight->moved));
    }
  }
  return MZ_OK;
}

/* Room for one more group, so that adding it cannot fail half way. */
static mz_status_t append_group(mz_comm_t *comm, const char *name, int size,
                                int rank)
{
  mz_comm_group_t *group;

  MZ_TRY(mz_grow(&comm->groups, &comm->max_groups, comm->num_groups + 1,
                 "groups"));
  group = &comm->groups[comm->num_groups];
  *group = (mz_comm_group_t){.size = size, .rank = rank};
  snprintf(group->name, sizeof group->name, "%s", name);
  for (int lane = 0; lane < MZ_NUM_LANES; lane++)
    group->lanes[lane] = MPI_COMM_NULL;
  return MZ_OK;
}

static void free_memory(mz_comm_t *comm)
{
  if (!comm) return;
  for (int lane = 0; lane < MZ_NUM_LANES; lane++) {
    for (int i = 0; i < comm->rings[lane].max_flight; i++) {
      mz_free(comm->rings[lane].flights[i].moved);
      mz_free(comm->rings[lane].flights[i].ints);
      mz_free(comm->rings[lane].flights[i].requests);
    }
  }
  mz_watchdog_destroy(comm);
  pthread_cond_destroy(&comm->wake);
  pthread_mutex_destroy(&comm->mutex);
  mz_free(comm->values);
  mz_free(comm->displs);
  mz_free(comm->counts);
  mz_free(comm->groups);
  mz_free(comm);
}

static mz_status_t create_memory(const mz_comm_opts_t *opts, MPI_Comm control,
                                 mz_comm_t **comm_out)
{
  mz_comm_t *comm = NULL;
  mz_status_t st;
  int level;

  MZ_TRY(mz_new(1, "communicator", &comm));
  comm->opts = *opts;
  atomic_store(&comm->patience, 1);
  if (opts->count_limit == 0) comm->opts.count_limit = INT_MAX;
  comm->control = control;
  comm->mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  comm->wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
  MZ_TRY_GOTO(
      st,
      mz_comm_mpi_status(MPI_Comm_rank(control, &comm->rank), "MPI_Comm_rank"),
      done);
  MZ_TRY_GOTO(
      st,
      mz_comm_mpi_status(MPI_Comm_size(control, &comm->size), "MPI_Comm_size"),
      done);
  MZ_TRY_GOTO(st,
              mz_comm_mpi_status(MPI_Query_thread(&level), "MPI_Query_thread"),
              done);
  MZ_REQUIRE_GOTO(!opts->thread || level >= MPI_THREAD_SERIALIZED, st, done,
                  MZ_ERR_UNSUPPORTED,
                  "a communication thread needs MPI_THREAD_SERIALIZED, MPI "
                  "provides level %d",
                  level);
  /* one rank only copies: a thread would just take a core from the kernels */
  if (comm->size == 1) comm->opts.thread = false;
  MZ_TRY_GOTO(st, create_flights(comm), done);
  MZ_TRY_GOTO(st, mz_watchdog_create(comm), done);
  MZ_TRY_GOTO(st, append_group(comm, "data", comm->size, comm->rank), done);
  MZ_TRY_GOTO(st, mz_new(comm->size, "counts", &comm->counts), done);
  MZ_TRY_GOTO(st, mz_new(comm->size, "displacements", &comm->displs), done);
  MZ_TRY_GOTO(st, mz_new(comm->size, "values", &comm->values), done);
  *comm_out = comm;
  comm = NULL;
done:
  free_memory(comm);
  return st;
}

/* Collective: MPI's objects. */

/* Before there is a queue, ranks agree by an integer maximum. */
static mz_status_t agree_early(MPI_Comm control, mz_status_t status)
{
  int own = (int)status, worst;

  MZ_TRY_MPI(MPI_Allreduce(&own, &worst, 1, MPI_INT, MPI_MAX, control));
  if (status != MZ_OK) return status;
  MZ_REQUIRE(worst == MZ_OK, (mz_status_t)worst, "on another rank: %s",
             mz_status_text((mz_status_t)worst));
  return MZ_OK;
}

static mz_status_t name_communicator(MPI_Comm wire, const char *lane,
                                     const char *group)
{
  char name[MPI_MAX_OBJECT_NAME];

  snprintf(name, sizeof name, "mz.%s%s%s", lane, group[0] ? "." : "", group);
  MZ_TRY_MPI(MPI_Comm_set_errhandler(wire, MPI_ERRORS_RETURN));
  MZ_TRY_MPI(MPI_Comm_set_name(wire, name));
  return MZ_OK;
}

/* Whether MPI finds as many ranks of the group on this machine as it has: if
 * not, no rank of it does. */
static mz_status_t find_together(mz_comm_group_t *group)
{
  MPI_Comm node;
  int size;

  if (group->size == 1) return MZ_OK;
  MZ_TRY_MPI(MPI_Comm_split_type(group->lanes[0], MPI_COMM_TYPE_SHARED,
                                 group->rank, MPI_INFO_NULL, &node));
  MZ_TRY_MPI(MPI_Comm_size(node, &size));
  MZ_TRY_MPI(MPI_Comm_free(&node));
  group->together = size == group->size;
  return MZ_OK;
}

/* The group of this rank appears under its index only when all is well. Every
 * rank of world calls, ranks that are alone with MPI_UNDEFINED. */
static mz_status_t open_group(mz_comm_t *comm, int color)
{
  mz_comm_group_t *group = &comm->groups[comm->num_groups];
  int size, rank;

  for (int lane = 0; lane < MZ_NUM_LANES; lane++)
    MZ_TRY_MPI(MPI_Comm_split(comm->control,
                              group->size == 1 ? MPI_UNDEFINED : color,
                              group->rank, &group->lanes[lane]));
  if (group->size == 1) return MZ_OK;
  for (int lane = 0; lane < MZ_NUM_LANES; lane++)
    MZ_TRY(name_communicator(group->lanes[lane], mz_comm_lane_name(lane),
                             group->name));
  MZ_TRY_MPI(MPI_Comm_size(group->lanes[0], &size));
  MZ_TRY_MPI(MPI_Comm_rank(group->lanes[0], &rank));
  MZ_REQUIRE(size == group->size && rank == group->rank, MZ_ERR_ARG,
             "group %s: the ranks of its members differ: place %d of %d here, "
             "%d of %d together",
             group->name, group->rank, group->size, rank, size);
  return MZ_OK;
}

static void close_group(mz_comm_group_t *group)
{
  for (int lane = 0; lane < MZ_NUM_LANES; lane++)
    if (group->lanes[lane] != MPI_COMM_NULL) MPI_Comm_free(&group->lanes[lane]);
}

static mz_status_t start_queue(mz_comm_t *comm)
{
  mz_status_t st;

  MZ_TRY(open_group(comm, 0));
  MZ_TRY(find_together(&comm->groups[0]));
  comm->num_groups = 1;
  MZ_TRY(mz_watchdog_listen(comm));
  st = mz_queue_resume(comm);
  return MZ_TRACE(mz_comm_agree(comm, st));
}

mz_status_t mz_comm_create(MPI_Comm world, const mz_comm_opts_t *opts,
                           mz_comm_t **comm_out)
{
  MPI_Comm control = MPI_COMM_NULL;
  mz_comm_t *comm = NULL;
  mz_status_t st;

  MZ_REQUIRE(opts && comm_out, MZ_ERR_ARG, "opts or comm_out is NULL");
  *comm_out = NULL;
  MZ_REQUIRE(opts->watchdog_s >= 0 && opts->count_limit >= 0 &&
                 opts->count_limit <= INT_MAX,
             MZ_ERR_ARG, "watchdog_s %g, count_limit %" PRId64,
             opts->watchdog_s, opts->count_limit);
  MZ_TRY_MPI(MPI_Comm_dup(world, &control));
  MZ_TRY(name_communicator(control, "control", ""));

  st = create_memory(opts, control, &comm);
  st = agree_early(control, st);
  if (st != MZ_OK) {
    free_memory(comm);
    MPI_Comm_free(&control);
    return MZ_TRACE(st);
  }
  MZ_ASSERT(comm);
  MZ_TRY_GOTO(st, start_queue(comm), done);
  *comm_out = comm;
  comm = NULL;
done:
  mz_comm_destroy(&comm);
  return st;
}

/* Messages that nobody waited for end first; MPI_Comm_free would not. */
static bool drain(mz_comm_t *comm)
{
  for (int lane = 0; lane < MZ_NUM_LANES; lane++) {
    uint64_t last = atomic_load(&comm->rings[lane].posted);
    uint64_t first = last > MZ_RING ? last - MZ_RING + 1 : 1;

    for (uint64_t n = first; n <= last; n++)
      if (mz_comm_wait(comm, (mz_ticket_t){(mz_lane_t)lane, n}) != MZ_OK)
        return false;
  }
  return !atomic_load(&comm->failed);
}

void mz_comm_destroy(mz_comm_t **comm)
{
  mz_comm_t *c;
  bool whole;

  if (!comm || !*comm) return;
  c = *comm;
  whole = drain(c);
  mz_queue_pause(c);
  mz_watchdog_close(c);
  /* After a failure the others may never come: MPI's objects stay. */
  if (whole) {
    mz_wire_free_types(c);
    for (int i = 0; i < c->num_groups; i++)
      close_group(&c->groups[i]);
    MPI_Comm_free(&c->control);
  }
  mz_comm_leave_device(c);
  free_memory(c);
  *comm = NULL;
}

static mz_status_t find_place(const mz_comm_t *comm, const char *name,
                              const int *ranks, int size, int *place_out)
{
  int place = -1;

  MZ_REQUIRE(name && ranks && size >= 1 && size <= comm->size, MZ_ERR_ARG,
             "group %s of %d ranks in %d", name ? name : "NULL", size,
             comm->size);
  for (int i = 0; i < size; i++) {
    MZ_REQUIRE(ranks[i] >= 0 && ranks[i] < comm->size, MZ_ERR_ARG,
               "group %s: rank %d of %d", name, ranks[i], comm->size);
    if (ranks[i] == comm->rank) place = i;
  }
  MZ_REQUIRE(place >= 0, MZ_ERR_ARG, "group %s: rank %d is not in it", name,
             comm->rank);
  *place_out = place;
  return MZ_OK;
}

/* While the thread is stopped: agree makes progress inline. */
static mz_status_t join_group(mz_comm_t *comm, const char *name,
                              const int *ranks, int size)
{
  mz_status_t st;
  int place = 0;

  st = find_place(comm, name, ranks, size, &place);
  if (st == MZ_OK) st = append_group(comm, name, size, place);
  MZ_TRY(mz_comm_agree(comm, st));
  st = open_group(comm, ranks[0]);
  comm->num_groups++;              /* in any case, so that destroy frees it */
  MZ_TRY(mz_comm_agree(comm, st)); /* or some would wait for the others below */
  st = find_together(&comm->groups[comm->num_groups - 1]);
  return MZ_TRACE(mz_comm_agree(comm, st));
}

mz_status_t mz_comm_add_group(mz_comm_t *comm, const char *name,
                              const int *ranks, int size, int *group_out)
{
  mz_status_t st, resumed;

  MZ_REQUIRE(comm && group_out, MZ_ERR_ARG, "comm or group_out is NULL");
  mz_queue_pause(comm);
  st = join_group(comm, name, ranks, size); /* the same on all ranks */
  resumed = mz_queue_resume(comm);
  if (st != MZ_OK) return MZ_TRACE(st);
  MZ_TRY(mz_comm_agree(comm, resumed));
  *group_out = comm->num_groups - 1;
  return MZ_OK;
}

int mz_comm_rank(const mz_comm_t *comm) { return comm->rank; }

int mz_comm_size(const mz_comm_t *comm) { return comm->size; }

int mz_comm_group_size(const mz_comm_t *comm, int group)
{
  return comm->groups[group].size;
}

int mz_comm_group_rank(const mz_comm_t *comm, int group)
{
  return comm->groups[group].rank;
}

void mz_comm_position(const mz_comm_t *comm, char *text, size_t text_bytes)
{
  const mz_ring_t *rings = comm->rings;
  mz_ticket_t awaited = mz_comm_awaited(comm);
  int used;

  used = snprintf(
      text, text_bytes,
      "rank %d exchange %" PRIu64 "/%" PRIu64 " bulk %" PRIu64 "/%" PRIu64,
      comm->rank, (uint64_t)atomic_load(&rings[MZ_LANE_EXCHANGE].started),
      (uint64_t)atomic_load(&rings[MZ_LANE_EXCHANGE].posted),
      (uint64_t)atomic_load(&rings[MZ_LANE_BULK].started),
      (uint64_t)atomic_load(&rings[MZ_LANE_BULK].posted));
  if (awaited.number > 0 && (size_t)used < text_bytes)
    snprintf(text + used, text_bytes - (size_t)used,
             ", the stream waits for %s %" PRIu64,
             mz_comm_lane_name((int)awaited.lane), awaited.number);
}
