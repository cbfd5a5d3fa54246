/* SPDX-License-Identifier: Apache-2.0 */
/* The last rank has no memory for its n-th allocation while an engine is made,
 * for every n but the first (the engine itself, before there is a communicator
 * to agree on): all ranks fail for that reason, and none waits for it. */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"

#include <stdio.h>

enum { FIRST = 2, ENOUGH = 1000 };

/* Ends with the first n that is behind the last allocation. */
static mz_status_t fail_each(tiny_t *t, bool last, int *num_out)
{
  for (int n = FIRST; n < ENOUGH; n++) {
    mz_engine_t *engine = NULL;
    mz_status_t st;

    mz_alloc_fail_at(last ? n : 0);
    st = mz_engine_create(t->config, t->decl, t->comm, &engine);
    mz_alloc_fail_at(0);
    mz_engine_destroy(&engine);
    *num_out = n - FIRST;
    if (st == MZ_OK) return MZ_OK;
    if (st != MZ_ERR_NOMEM) MZ_FAIL(st, "allocation %d", n);
  }
  MZ_FAIL(MZ_ERR_DATA, "more than %d allocations", ENOUGH);
}

int main(int argc, char **argv)
{
  tiny_t tiny = {0};
  int provided, rank, size, num = 0;
  mz_status_t st;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  st = tiny_create((const char *const *)argv + 1, argc - 1, MPI_COMM_WORLD,
                   &tiny);
  if (st == MZ_OK) st = fail_each(&tiny, rank == size - 1, &num);
  if (st == MZ_OK && num == 0)
    st = MZ_ERROR(MZ_ERR_DATA, "no allocation failed");
  if (st != MZ_OK) {
    fprintf(stderr, "rank %d: %s\n", rank, mz_error_last());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  tiny_destroy(&tiny);
  MPI_Finalize();
  return 0;
}
