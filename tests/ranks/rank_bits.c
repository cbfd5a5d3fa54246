/* SPDX-License-Identifier: Apache-2.0 */
/* Equal bits: two runs of one layout, messages by collectives and pairwise, and
 * the threaded and the inline queue. Each layout runs three times on all ranks
 * (thread; thread, pairwise; inline) and must leave the same losses, norms,
 * hash and parameters, bit by bit. With the word "overlap" it runs with
 * moe.overlap_chunks 0 (no overlap), 1, 2 and 4 in both forms of the queue:
 * neither may change a bit. Usage: rank_bits [overlap] [KEY=VALUE]... [--
 * ...]..., a variant between two
 * "--". Prints a line a variant. Exit code 0: all the same. */
#include "tiny.h"

#include "base/check.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { MAX_ASSIGNMENTS = 24, OWN = 7, STEPS = 6, BATCH = 8, MAX_RUNS = 7 };

/* How often and how a layout runs. */
typedef struct form {
  bool thread;
  int chunks; /* -1: as given */
  const char *messages;
} form_t;

static const form_t again[] = {
    {true, -1, "auto"}, {true, -1, "pairwise"}, {false, -1, "auto"}};
static const form_t overlap[] = {{true, 0, "auto"},  {true, 1, "auto"},
                                 {true, 2, "auto"},  {true, 4, "auto"},
                                 {false, 1, "auto"}, {false, 2, "auto"},
                                 {false, 4, "auto"}};

typedef struct variant {
  const char *given[MAX_ASSIGNMENTS];
  int num_given;
  int world, rank;
  const form_t *forms; /* [num_forms] */
  int num_forms;
  int num_run, num_failed;
} variant_t;

static int assemble(const variant_t *v, char own[][64], int ep, int stage,
                    int accumulation, const form_t *form, const char **all)
{
  int n = 0;

  snprintf(own[0], 64, "moe.ep_size=%d", ep);
  snprintf(own[1], 64, "zero_optimization.stage=%d", stage);
  snprintf(own[2], 64, "gradient_accumulation_steps=%d", accumulation);
  snprintf(own[3], 64, "train_batch_size=%d", BATCH);
  snprintf(own[4], 64, "comm.thread=%s", form->thread ? "true" : "false");
  snprintf(own[5], 64, "comm.messages=%s", form->messages);
  snprintf(own[6], 64, "moe.overlap_chunks=%d", form->chunks);
  for (; n < OWN - (form->chunks < 0); n++)
    all[n] = own[n];
  for (int i = 0; i < v->num_given; i++)
    all[n++] = v->given[i];
  return n;
}

/* The hash is of the parameters, so a changed bit must show in it too. */
static const char *difference(const tiny_run_t *a, const tiny_run_t *b)
{
  if (memcmp(a->loss, b->loss, sizeof a->loss) != 0) return "losses";
  if (memcmp(a->norm, b->norm, sizeof a->norm) != 0) return "norms";
  if (a->hash != b->hash) return "hash";
  if (memcmp(a->values, b->values, (size_t)a->num_values * sizeof *a->values))
    return "parameters";
  return NULL;
}

static void try_layout(variant_t *v, int ep, int stage, int accumulation)
{
  char own[OWN][64];
  const char *all[MAX_ASSIGNMENTS + OWN], *what = NULL;
  tiny_run_t runs[MAX_RUNS] = {{0}};
  mz_status_t st = MZ_OK;
  int ok, all_ok;

  for (int i = 0; i < v->num_forms && st == MZ_OK; i++) {
    int n = assemble(v, own, ep, stage, accumulation, &v->forms[i], all);

    st = tiny_run(all, n, MPI_COMM_WORLD, STEPS, &runs[i]);
    if (st == MZ_OK && i > 0 && !what) what = difference(&runs[0], &runs[i]);
  }
  if (st == MZ_OK && runs[0].hash == 0) what = "hash of nothing";
  ok = st == MZ_OK && !what;
  MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  v->num_run++;
  v->num_failed += !all_ok;
  if (!ok)
    fprintf(stderr, "rank %d: ep %d stage %d accumulation %d: %s differ\n%s\n",
            v->rank, ep, stage, accumulation, what ? what : "status",
            st ? mz_error_last() : "");
  for (int i = 0; i < v->num_forms; i++)
    tiny_run_free(&runs[i]);
}

static int run_variant(variant_t *v)
{
  for (int ep = 1; ep <= v->world; ep *= 2)
    for (int stage = 0; stage <= 3; stage++)
      try_layout(v, ep, stage, 1 + (ep + stage) % 2);
  if (v->rank == 0)
    printf("%d layouts, %d forms, %d not the same: %s\n", v->num_run,
           v->num_forms, v->num_failed, v->num_given ? v->given[0] : "plain");
  return v->num_failed == 0;
}

int main(int argc, char **argv)
{
  int provided, at = 1, good = 1;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  do {
    variant_t v = {.forms = again, .num_forms = sizeof again / sizeof *again};

    MPI_Comm_rank(MPI_COMM_WORLD, &v.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &v.world);
    if (at < argc && strcmp(argv[at], "overlap") == 0) {
      v.forms = overlap;
      v.num_forms = sizeof overlap / sizeof *overlap;
      at++;
    }
    for (; at < argc && strcmp(argv[at], "--") != 0; at++)
      if (v.num_given < MAX_ASSIGNMENTS) v.given[v.num_given++] = argv[at];
    good = run_variant(&v) && good;
  } while (++at < argc);
  MPI_Finalize();
  return !good;
}
