/* SPDX-License-Identifier: Apache-2.0 */
/* Layout does not matter: TINY on any (ranks, ep_size, stage, accumulation)
 * equals one rank with the same micro-batches. Layouts of fewer ranks run on a
 * part of the ranks. Variants of the configuration follow each other:
 *   rank_layouts all|cover [OWN=N]... [KEY=VALUE]... [-- ...]...
 * OWN is batch, experts or seed, the first one to try; bounds=L,N,T are those
 * of losses, norms and tensors, 1e-5 each where not given. The word same_ranks:
 * layouts of all ranks alone, against ep_size 1 and stage 0 on all ranks; for a
 * capacity, which is of a rank's tokens. The word ep_of_last: the first of the
 * two MoE layers has ep_size 1 in every layout.
 * Layouts run with the communication thread and inline in turn. "cover" takes
 * every third layout, the next variant the layouts after those. Prints a line a
 * variant. Exit code 0: all agree. */
#include "tiny.h"

#include "base/check.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ASSIGNMENTS = 24, OWN = 6, STEPS = 10, MAX_SEEDS = 16 };

typedef struct variant {
  const char *given[MAX_ASSIGNMENTS];
  int num_given;
  int batch, experts, seed;
  int world, rank;
  bool same_ranks, ep_of_last;
  int num_run, num_failed;
  double gap;
  tiny_apart_t bound, worst;
  char worst_name[MZ_NAME_MAX];
} variant_t;

static int assemble(const variant_t *v, char own[][64], int ep, int stage,
                    int micro, const char **all)
{
  int n = 0;

  snprintf(own[0], 64, v->ep_of_last ? "moe.ep_size=[1,%d]" : "moe.ep_size=%d",
           ep);
  snprintf(own[1], 64, "zero_optimization.stage=%d", stage);
  snprintf(own[2], 64, "train_micro_batch_size_per_gpu=%d", micro);
  snprintf(own[3], 64, "train_batch_size=%d", v->batch);
  snprintf(own[4], 64, "moe.num_experts=%d", v->experts);
  snprintf(own[5], 64, "train.seed=%d", v->seed);
  for (; n < OWN; n++)
    all[n] = own[n];
  for (int i = 0; i < v->num_given; i++)
    all[n++] = v->given[i];
  return n;
}

static void report(variant_t *v, const char *name, mz_status_t st,
                   const tiny_apart_t *apart)
{
  const tiny_apart_t *bound = &v->bound;
  int ok = st == MZ_OK && apart->loss <= bound->loss &&
           apart->norm <= bound->norm && apart->tensor <= bound->tensor;
  int all_ok = 0;

  v->num_run++;
  v->worst.loss = fmax(v->worst.loss, apart->loss);
  v->worst.norm = fmax(v->worst.norm, apart->norm);
  if (apart->tensor > v->worst.tensor) {
    v->worst.tensor = apart->tensor;
    snprintf(v->worst_name, sizeof v->worst_name, "%s", apart->name);
  }
  MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (all_ok) return;
  v->num_failed++;
  if (!ok)
    fprintf(stderr, "rank %d: %s: %s, loss %g, norm %g, %s %g apart\n%s\n",
            v->rank, name, mz_status_text(st), apart->loss, apart->norm,
            apart->name, apart->tensor, st ? mz_error_last() : "");
}

static void try_layout(variant_t *v, const tiny_run_t *reference, int np,
                       int ep, int stage, int accumulation)
{
  char own[OWN][64], name[64];
  const char *all[MAX_ASSIGNMENTS + OWN];
  int micro = v->batch / np / accumulation;
  int n = assemble(v, own, ep, stage, micro, all);
  MPI_Comm part;
  tiny_run_t run = {0};
  tiny_apart_t apart = {.name = "nothing"};
  mz_status_t st = MZ_OK;

  snprintf(name, sizeof name, "np %d ep %d stage %d accumulation %d", np, ep,
           stage, accumulation);
  MPI_Comm_split(MPI_COMM_WORLD, v->rank < np ? 0 : MPI_UNDEFINED, v->rank,
                 &part);
  if (part != MPI_COMM_NULL) {
    st = tiny_run(all, n, part, STEPS, &run);
    if (st == MZ_OK) apart = tiny_compare(reference, &run);
    MPI_Comm_free(&part);
  }
  report(v, name, st, &apart);
  tiny_run_free(&run);
}

/* Everything divides; a batch of 6 is there for 3 ranks. */
static int fits(const variant_t *v, int np, int ep, int accumulation)
{
  return np % ep == 0 && v->experts % ep == 0 &&
         v->batch % (np * accumulation) == 0;
}

static void try_layouts(variant_t *v, const tiny_run_t *references, int all,
                        int place)
{
  int index = 0;

  for (int np = v->same_ranks ? v->world : 1; np <= v->world; np++)
    for (int ep = 1; ep <= np; ep++)
      for (int stage = 0; stage <= 3; stage++)
        for (int a = 1; a <= 2; a++) {
          if (!fits(v, np, ep, a)) continue;
          tiny_inline = index / 3 % 2 == 1;
          if (all || (index + place) % 3 == 0)
            try_layout(v, &references[a - 1], np, ep, stage, a);
          index++;
        }
}

static mz_status_t run_references(variant_t *v, tiny_run_t *references)
{
  char own[OWN][64];
  const char *all[MAX_ASSIGNMENTS + OWN];

  v->gap = 1;
  for (int a = 1; a <= 2; a++) {
    tiny_run_t *run = &references[a - 1];
    int np = v->same_ranks ? v->world : 1;
    int n = assemble(v, own, 1, 0, v->batch / np / a, all);

    tiny_run_free(run);
    MZ_TRY(tiny_run(all, n, v->same_ranks ? MPI_COMM_WORLD : MPI_COMM_SELF,
                    STEPS, run));
    if (run->min_gap < v->gap) v->gap = run->min_gap;
  }
  return MZ_OK;
}

/* Rounding may flip a near-tie of the gate: the first seed without one. */
static mz_status_t find_references(variant_t *v, tiny_run_t *references)
{
  for (int i = 0; i < MAX_SEEDS; i++, v->seed++) {
    MZ_TRY(run_references(v, references));
    if (v->gap > 1e-5) return MZ_OK;
  }
  MZ_FAIL(MZ_ERR_DATA, "a gate gap of %g at every seed", v->gap);
}

static void print_variant(const variant_t *v)
{
  printf("%d layouts, %d differ, at most loss %.2g, norm %.2g, tensor %.2g "
         "(%s) apart, gate gap %.2g, seed %d:",
         v->num_run, v->num_failed, v->worst.loss, v->worst.norm,
         v->worst.tensor, v->worst_name, v->gap, v->seed);
  for (int i = 0; i < v->num_given; i++)
    printf(" %s", v->given[i]);
  printf("\n");
}

static int run_variant(variant_t *v, int all, int place)
{
  tiny_run_t references[2] = {{0}};
  mz_status_t st = find_references(v, references);

  if (st == MZ_OK)
    try_layouts(v, references, all, place);
  else
    fprintf(stderr, "rank %d: %s\n", v->rank, mz_error_last());
  tiny_run_free(&references[0]);
  tiny_run_free(&references[1]);
  if (v->rank == 0) print_variant(v);
  return st == MZ_OK && v->num_failed == 0 && v->num_run > 0;
}

/* Takes the words up to "--". @return the place after it. */
static int read_variant(int argc, char **argv, int at, variant_t *v)
{
  *v = (variant_t){.batch = 8,
                   .experts = 4,
                   .seed = 1234,
                   .bound = {.loss = 1e-5, .norm = 1e-5, .tensor = 1e-5}};
  MPI_Comm_rank(MPI_COMM_WORLD, &v->rank);
  MPI_Comm_size(MPI_COMM_WORLD, &v->world);
  for (; at < argc && strcmp(argv[at], "--") != 0; at++) {
    if (strncmp(argv[at], "batch=", 6) == 0)
      v->batch = atoi(argv[at] + 6);
    else if (strncmp(argv[at], "experts=", 8) == 0)
      v->experts = atoi(argv[at] + 8);
    else if (strncmp(argv[at], "seed=", 5) == 0)
      v->seed = atoi(argv[at] + 5);
    else if (strcmp(argv[at], "same_ranks") == 0)
      v->same_ranks = true;
    else if (strcmp(argv[at], "ep_of_last") == 0)
      v->ep_of_last = true;
    else if (strncmp(argv[at], "bounds=", 7) == 0)
      sscanf(argv[at] + 7, "%lf,%lf,%lf", &v->bound.loss, &v->bound.norm,
             &v->bound.tensor);
    else if (v->num_given < MAX_ASSIGNMENTS)
      v->given[v->num_given++] = argv[at];
  }
  return at + 1;
}

int main(int argc, char **argv)
{
  int provided, place = 0, at = 2, good = 1;
  variant_t v;

  if (argc < 2) return 2;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  do {
    at = read_variant(argc, argv, at, &v);
    good = run_variant(&v, strcmp(argv[1], "all") == 0, place++) && good;
  } while (at < argc);
  MPI_Finalize();
  return !good;
}
