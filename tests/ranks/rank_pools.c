/* SPDX-License-Identifier: Apache-2.0 */
/* The room for saved expert rows changes no gradient: TINY with pools of 1.0,
 * 1.25 and the worst case, one of a quarter, in which most layers send their
 * rows again, and one between them. Usage: rank_pools [ragged] [KEY=VALUE]...
 * With ragged every second micro-batch is half as large: its rows may be saved
 * where those of the others are not. Prints a line a pool; exit code 0: all
 * agree. */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"

#include <stdio.h>
#include <string.h>

enum { MAX_ALL = 24, EXPERTS = 4 };

/* Rows of a rank at most: every token of every rank, all choices. */
static const double pools[] = {1.0, 1.25, EXPERTS, 0.25, 0.65, 0.8};

enum { NUM_POOLS = sizeof pools / sizeof *pools };

/* Sums over rows in rounds have another order. */
static const double bound = 1e-5;

static int me;
static bool ragged;

static mz_status_t gradients(const char *const *given, int num, double pool,
                             tiny_run_t *run)
{
  char saved[64];
  const char *all[MAX_ALL];
  mz_step_result_t result;
  tiny_t tiny = {0};
  mz_status_t st;

  MZ_REQUIRE(num + 1 < MAX_ALL, MZ_ERR_ARG, "%d assignments", num);
  for (int i = 0; i < num; i++)
    all[i] = given[i];
  snprintf(saved, sizeof saved, "moe.saved_rows=%g", pool);
  all[num] = saved;
  MZ_TRY_GOTO(st, tiny_create(all, num + 1, MPI_COMM_WORLD, &tiny), done);
  tiny.ragged = ragged;
  MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
  run->num_steps = 1;
  run->loss[0] = result.loss;
  run->norm[0] = result.grad_norm;
  MZ_TRY_GOTO(st, tiny_read(&tiny, MZ_PART_GRADS, run), done);
done:
  tiny_destroy(&tiny);
  return st;
}

static bool compare(const tiny_run_t *first, const tiny_run_t *run, double pool)
{
  tiny_apart_t apart = tiny_compare(first, run);
  int ok = apart.loss <= bound && apart.norm <= bound && apart.tensor <= bound;
  int all = 0;

  MPI_Allreduce(&ok, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (me == 0)
    printf("%s pool %g: loss %.1e, norm %.1e, gradient %.1e (%s) apart\n",
           all ? "ok" : "FAILED", pool, apart.loss, apart.norm, apart.tensor,
           apart.name);
  return all;
}

static mz_status_t run_all(const char *const *given, int num, bool *good_out)
{
  tiny_run_t runs[NUM_POOLS] = {{0}};
  mz_status_t st = MZ_OK;

  *good_out = true;
  for (int i = 0; i < NUM_POOLS; i++) {
    MZ_TRY_GOTO(st, gradients(given, num, pools[i], &runs[i]), done);
    if (i > 0) *good_out = compare(&runs[0], &runs[i], pools[i]) && *good_out;
  }
done:
  for (int i = 0; i < NUM_POOLS; i++)
    tiny_run_free(&runs[i]);
  return st;
}

int main(int argc, char **argv)
{
  int provided, first = 1;
  bool good;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  ragged = argc > 1 && strcmp(argv[1], "ragged") == 0;
  first += ragged;
  if (run_all((const char *const *)argv + first, argc - first, &good) !=
      MZ_OK) {
    fprintf(stderr, "rank %d: %s\n", me, mz_error_last());
    good = false;
  }
  MPI_Finalize();
  return !good;
}
