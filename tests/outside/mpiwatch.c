/* SPDX-License-Identifier: Apache-2.0 */
/* Counts MPI calls and bytes by the name of the communicator, through MPI's
 * profiling interface. */
#include "outside.h"

#include <mpi.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static outside_line_t lines[OUTSIDE_MAX_LINES];
static int num_lines;

void mz_outside_mark(const char *phase)
{
  if (strcmp(phase, "warm") != 0) return;
  outside_mark_device();
  outside_mark_memory();
  outside_mark_messages();
}

void outside_mark_messages(void)
{
  pthread_mutex_lock(&mutex);
  memset(lines, 0, sizeof lines);
  num_lines = 0;
  pthread_mutex_unlock(&mutex);
}

int outside_messages(outside_line_t *lines_out)
{
  int num;

  pthread_mutex_lock(&mutex);
  memcpy(lines_out, lines, sizeof lines);
  num = num_lines;
  pthread_mutex_unlock(&mutex);
  return num;
}

/* Locks, until unlock. The last line takes what has no line of its own. */
static outside_line_t *lock_line(MPI_Comm comm)
{
  char name[MPI_MAX_OBJECT_NAME] = "";
  int length, i = 0;

  PMPI_Comm_get_name(comm, name, &length);
  pthread_mutex_lock(&mutex);
  while (i < num_lines && strcmp(lines[i].name, name) != 0)
    i++;
  if (i == OUTSIDE_MAX_LINES) return &lines[i - 1];
  if (i == num_lines) {
    num_lines++;
    memccpy(lines[i].name, name, 0, sizeof lines[i].name - 1);
  }
  return &lines[i];
}

static void unlock(void) { pthread_mutex_unlock(&mutex); }

static int64_t width_of(MPI_Datatype type)
{
  int bytes;

  PMPI_Type_size(type, &bytes);
  return bytes;
}

int MPI_Iallgatherv(const void *send, int count, MPI_Datatype send_type,
                    void *recv, const int counts[], const int displs[],
                    MPI_Datatype recv_type, MPI_Comm comm, MPI_Request *request)
{
  int64_t bytes = send == MPI_IN_PLACE ? 0 : count * width_of(send_type);
  outside_line_t *line;
  int rank;

  PMPI_Comm_rank(comm, &rank);
  if (send == MPI_IN_PLACE) bytes = counts[rank] * width_of(recv_type);
  line = lock_line(comm);
  line->gather_calls++;
  line->gather_bytes += bytes;
  unlock();
  return PMPI_Iallgatherv(send, count, send_type, recv, counts, displs,
                          recv_type, comm, request);
}

int MPI_Ialltoallv(const void *send, const int counts[], const int displs[],
                   MPI_Datatype type, void *recv, const int recv_counts[],
                   const int recv_displs[], MPI_Datatype recv_type,
                   MPI_Comm comm, MPI_Request *request)
{
  int64_t bytes = 0;
  outside_line_t *line;
  int size;

  PMPI_Comm_size(comm, &size);
  for (int r = 0; r < size; r++)
    bytes += counts[r] * width_of(type);
  line = lock_line(comm);
  line->exchange_calls++;
  line->exchange_bytes += bytes;
  unlock();
  return PMPI_Ialltoallv(send, counts, displs, type, recv, recv_counts,
                         recv_displs, recv_type, comm, request);
}

int MPI_Isend(const void *send, int count, MPI_Datatype type, int to, int tag,
              MPI_Comm comm, MPI_Request *request)
{
  outside_line_t *line = lock_line(comm);

  line->pair_calls++;
  line->pair_bytes += count * width_of(type);
  unlock();
  return PMPI_Isend(send, count, type, to, tag, comm, request);
}

/* What moezero's queue must not use between steps. */

static void note_other(MPI_Comm comm)
{
  lock_line(comm)->other_calls++;
  unlock();
}

int MPI_Send(const void *send, int count, MPI_Datatype type, int to, int tag,
             MPI_Comm comm)
{
  note_other(comm);
  return PMPI_Send(send, count, type, to, tag, comm);
}

int MPI_Barrier(MPI_Comm comm)
{
  note_other(comm);
  return PMPI_Barrier(comm);
}

int MPI_Bcast(void *bytes, int count, MPI_Datatype type, int root,
              MPI_Comm comm)
{
  note_other(comm);
  return PMPI_Bcast(bytes, count, type, root, comm);
}

int MPI_Allreduce(const void *send, void *recv, int count, MPI_Datatype type,
                  MPI_Op op, MPI_Comm comm)
{
  note_other(comm);
  return PMPI_Allreduce(send, recv, count, type, op, comm);
}

int MPI_Iallreduce(const void *send, void *recv, int count, MPI_Datatype type,
                   MPI_Op op, MPI_Comm comm, MPI_Request *request)
{
  note_other(comm);
  return PMPI_Iallreduce(send, recv, count, type, op, comm, request);
}

int MPI_Alltoallv(const void *send, const int counts[], const int displs[],
                  MPI_Datatype type, void *recv, const int recv_counts[],
                  const int recv_displs[], MPI_Datatype recv_type,
                  MPI_Comm comm)
{
  note_other(comm);
  return PMPI_Alltoallv(send, counts, displs, type, recv, recv_counts,
                        recv_displs, recv_type, comm);
}

int MPI_Allgatherv(const void *send, int count, MPI_Datatype send_type,
                   void *recv, const int counts[], const int displs[],
                   MPI_Datatype recv_type, MPI_Comm comm)
{
  note_other(comm);
  return PMPI_Allgatherv(send, count, send_type, recv, counts, displs,
                         recv_type, comm);
}
