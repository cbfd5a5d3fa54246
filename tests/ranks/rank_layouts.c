/* SPDX-License-Identifier: Apache-2.0 */
/* Layout does not matter: TINY on any (ranks, ep_size, stage, accumulation)
 * equals one rank. Layouts of fewer ranks run on a part of the ranks.
 * Usage: rank_layouts all|cover|stage S [KEY=VALUE]... */
#include "tiny.h"

#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ASSIGNMENTS = 24, STEPS = 10 };

typedef struct plan_of_tests {
  const char *given[MAX_ASSIGNMENTS];
  int num_given;
  int batch;
  int world, rank;
  int num_run, num_failed;
  double bound, worst;
} tests_t;

static int assemble(const tests_t *t, char own[][64], int ep, int stage,
                    int micro, const char **all)
{
  int n = 0;

  snprintf(own[0], 64, "moe.ep_size=%d", ep);
  snprintf(own[1], 64, "zero_optimization.stage=%d", stage);
  snprintf(own[2], 64, "train_micro_batch_size_per_gpu=%d", micro);
  snprintf(own[3], 64, "train_batch_size=%d", t->batch);
  while (n < 4)
    all[n] = own[n], n++;
  for (int i = 0; i < t->num_given; i++)
    all[n++] = t->given[i];
  return n;
}

static void report(tests_t *t, const char *name, mz_status_t st, double apart,
                   const char *what, double gap)
{
  int ok = st == MZ_OK && apart <= t->bound && gap > 1e-5;
  int all_ok = 0;

  t->num_run++;
  if (st == MZ_OK && apart > t->worst) t->worst = apart;
  MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (all_ok) return;
  t->num_failed++;
  if (!ok)
    fprintf(stderr, "rank %d: %s: %s, %g apart in %s, gate gap %g\n%s\n",
            t->rank, name, mz_status_text(st), apart, what, gap,
            st ? mz_error_last() : "");
}

static void try_layout(tests_t *t, const tiny_run_t *reference, int np, int ep,
                       int stage, int accumulation)
{
  char own[4][64], name[128];
  const char *all[MAX_ASSIGNMENTS + 4], *what = "nothing";
  int micro = t->batch / np / accumulation;
  int n = assemble(t, own, ep, stage, micro, all);
  MPI_Comm part;
  tiny_run_t run = {0};
  mz_status_t st = MZ_OK;
  double apart = 0;

  snprintf(name, sizeof name, "np %d ep %d stage %d accumulation %d", np, ep,
           stage, accumulation);
  MPI_Comm_split(MPI_COMM_WORLD, t->rank < np ? 0 : MPI_UNDEFINED, t->rank,
                 &part);
  if (part != MPI_COMM_NULL) {
    st = tiny_run(all, n, part, STEPS, &run);
    if (st == MZ_OK) apart = tiny_compare(reference, &run, &what);
    MPI_Comm_free(&part);
  }
  report(t, name, st, apart, what, reference->min_gap);
  tiny_run_free(&run);
}

static int covered(const char *set, int index)
{
  if (strcmp(set, "all") == 0) return 1;
  return index % 3 == 0; /* a third, each value of each factor among them */
}

static mz_status_t run_all(tests_t *t, const char *set, int only_stage)
{
  char own[4][64];
  const char *all[MAX_ASSIGNMENTS + 4];
  tiny_run_t reference[2] = {{0}};
  mz_status_t st = MZ_OK;
  int index = 0;

  for (int a = 1; a <= 2 && st == MZ_OK; a++)
    st = tiny_run(all, assemble(t, own, 1, 0, t->batch / a, all), MPI_COMM_SELF,
                  STEPS, &reference[a - 1]);
  MZ_TRY(st);
  for (int np = 1; np <= t->world; np++)
    for (int ep = 1; ep <= np; ep++)
      for (int stage = 0; stage <= 3; stage++)
        for (int a = 1; a <= 2; a++) {
          if (np % ep || ep == 3 || t->batch % (np * a)) continue;
          if (np == 3 && t->batch != 6) continue;
          if (only_stage >= 0 && stage != only_stage) continue;
          if (covered(set, index++))
            try_layout(t, &reference[a - 1], np, ep, stage, a);
        }
  tiny_run_free(&reference[0]);
  tiny_run_free(&reference[1]);
  return MZ_OK;
}

int main(int argc, char **argv)
{
  tests_t t = {.batch = 8, .bound = 1e-5};
  int provided, first = 2, stage = -1;
  mz_status_t st;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &t.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &t.world);
  if (argc > 2 && strcmp(argv[1], "stage") == 0) stage = atoi(argv[first++]);
  for (int i = first; i < argc && t.num_given < MAX_ASSIGNMENTS; i++) {
    if (strncmp(argv[i], "batch=", 6) == 0)
      t.batch = atoi(argv[i] + 6);
    else
      t.given[t.num_given++] = argv[i];
  }
  st = run_all(&t, argc > 1 ? argv[1] : "cover", stage);
  if (st) fprintf(stderr, "rank %d: %s\n", t.rank, mz_error_last());
  if (t.rank == 0)
    printf("%d layouts, %d differ, at most %.2g apart\n", t.num_run,
           t.num_failed, t.worst);
  MPI_Finalize();
  return st != MZ_OK || t.num_failed > 0 || t.num_run == 0;
}
