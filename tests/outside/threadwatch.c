/* SPDX-License-Identifier: Apache-2.0 */
/* Ends the process when two threads are in MPI at once, which a program that
 * asked for MPI_THREAD_SERIALIZED must not do. Each call that the queue makes
 * often is held up a little, so that a second one meets it. */
#include <mpi.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { HELD_US = 100 };

static atomic_int inside;

static void enter(void)
{
  static const char words[] = "threadwatch: two threads are in MPI at once\n";

  if (atomic_fetch_add(&inside, 1) > 0) {
    if (write(STDERR_FILENO, words, sizeof words - 1) < 0) _Exit(98);
    _Exit(97);
  }
  usleep(HELD_US);
}

static int leave(int code)
{
  atomic_fetch_sub(&inside, 1);
  return code;
}

int MPI_Test(MPI_Request *request, int *done, MPI_Status *status)
{
  enter();
  return leave(PMPI_Test(request, done, status));
}

int MPI_Iallgatherv(const void *send, int count, MPI_Datatype send_type,
                    void *recv, const int counts[], const int displs[],
                    MPI_Datatype recv_type, MPI_Comm comm, MPI_Request *request)
{
  enter();
  return leave(PMPI_Iallgatherv(send, count, send_type, recv, counts, displs,
                                recv_type, comm, request));
}

int MPI_Ialltoallv(const void *send, const int counts[], const int displs[],
                   MPI_Datatype type, void *recv, const int recv_counts[],
                   const int recv_displs[], MPI_Datatype recv_type,
                   MPI_Comm comm, MPI_Request *request)
{
  enter();
  return leave(PMPI_Ialltoallv(send, counts, displs, type, recv, recv_counts,
                               recv_displs, recv_type, comm, request));
}

int MPI_Get_processor_name(char *name, int *length)
{
  enter();
  return leave(PMPI_Get_processor_name(name, length));
}
