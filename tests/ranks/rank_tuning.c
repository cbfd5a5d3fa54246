/* SPDX-License-Identifier: Apache-2.0 */
/* The tuning table: one on all ranks after the first step; runs that take it
 * have the same bits; one of another GPU or library is not used. On the CPU,
 * which has no choices, it is empty and changes nothing.
 * Usage: rank_tuning [KEY=VALUE]... (train.device=cuda needs a GPU). Exit code
 * 0: all is so. */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"
#include "comm/comm.h"
#include "train/tuning.h"

#include <stdio.h>
#include <string.h>

enum { STEPS = 4 };

static int me, world;
static const char *const *given;
static int num_given;

/* Of the choices whatever their order and marks; the sum over the lines. */
static uint64_t hash_of_choices(const char *text)
{
  uint64_t sum = 0;

  while (*text) {
    size_t bytes = strcspn(text, "\n");
    uint64_t hash = UINT64_C(14695981039346656037);

    for (size_t i = 1; i < bytes; i++)
      hash = (hash ^ (uint8_t)text[i]) * UINT64_C(1099511628211);
    sum += hash;
    text += bytes + (text[bytes] == '\n');
  }
  return sum;
}

static bool same_on_all(uint64_t value)
{
  uint64_t low, high;

  MPI_Allreduce(&value, &low, 1, MPI_UINT64_T, MPI_MIN, MPI_COMM_WORLD);
  MPI_Allreduce(&value, &high, 1, MPI_UINT64_T, MPI_MAX, MPI_COMM_WORLD);
  return low == high;
}

static mz_status_t run(const char *table, tiny_run_t *run_out)
{
  tiny_tuning = table;
  return MZ_TRACE(tiny_run(given, num_given, MPI_COMM_WORLD, STEPS, run_out));
}

static bool same_bits(const tiny_run_t *a, const tiny_run_t *b)
{
  return a->hash == b->hash && memcmp(a->loss, b->loss, sizeof a->loss) == 0;
}

/* Runs with one table, and without one where there is nothing to choose or
 * nobody to agree with. */
static mz_status_t check_runs(mz_comm_t *comm, bool cuda)
{
  tiny_run_t free_run = {0}, one = {0}, two = {0};
  char *table = NULL;
  mz_status_t st;

  MZ_TRY_GOTO(st, run(NULL, &free_run), done);
  MZ_REQUIRE_GOTO(same_on_all(hash_of_choices(free_run.tuning)), st, done,
                  MZ_ERR_DATA, "the tables of the ranks differ");
  MZ_REQUIRE_GOTO((strchr(free_run.tuning, '\n') != NULL) == cuda, st, done,
                  MZ_ERR_DATA, "the table is \"%.60s\"", free_run.tuning);
  MZ_TRY_GOTO(st, mz_tuning_share(comm, 0, MZ_OK, free_run.tuning, &table),
              done);
  MZ_TRY_GOTO(st, run(table, &one), done);
  MZ_TRY_GOTO(st, run(table, &two), done);
  MZ_REQUIRE_GOTO(same_bits(&one, &two), st, done, MZ_ERR_DATA,
                  "two runs with one table differ");
  MZ_REQUIRE_GOTO((cuda && world > 1) || same_bits(&free_run, &one), st, done,
                  MZ_ERR_DATA,
                  "a run differs from the one that made its table");
  if (me == 0)
    printf("table of %zu bytes, loss %.17g\n", strlen(table),
           one.loss[STEPS - 1]);
done:
  tiny_tuning = NULL;
  mz_free(table);
  tiny_run_free(&free_run);
  tiny_run_free(&one);
  tiny_run_free(&two);
  return st;
}

static void keep_line(void *ctx, const char *line)
{
  snprintf(ctx, 512, "%s", line);
}

/* Of another library: said, and the run goes on. Another text: refused. */
static mz_status_t check_foreign(bool cuda)
{
  char said[512] = "";
  tiny_t tiny;
  mz_status_t st;

  MZ_TRY_GOTO(st, tiny_create(given, num_given, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st,
              mz_tuning_take(tiny.engine, "FILE", "cublaslt 1 sm 90\n",
                             keep_line, said),
              done);
  MZ_REQUIRE_GOTO(cuda == (strstr(said, "FILE is not used: ") != NULL), st,
                  done, MZ_ERR_DATA, "said was \"%s\"", said);
  st = mz_tuning_take(tiny.engine, "FILE", "nonsense\n", NULL, NULL);
  MZ_REQUIRE_GOTO(st == (cuda ? MZ_ERR_DATA : MZ_OK), st, done, MZ_ERR_DATA,
                  "nonsense is taken with status %d", (int)st);
  st = MZ_OK;
done:
  tiny_destroy(&tiny);
  return st;
}

/* Texts of different lengths from each rank, then a root that failed. */
static mz_status_t check_share(mz_comm_t *comm)
{
  static const char letters[] = "abcdefghijklmnop"; /* from its rank on */
  const char *own = letters + me % 16, *expected;
  char *text = NULL;
  mz_status_t st;

  for (int root = 0; root < world; root++) {
    expected = letters + root % 16;
    MZ_TRY(mz_tuning_share(comm, root, MZ_OK, own, &text));
    st = strcmp(text, expected) == 0
             ? MZ_OK
             : MZ_ERROR(MZ_ERR_DATA, "rank %d's text is \"%s\"", root, text);
    mz_free(text);
    MZ_TRY(mz_comm_agree(comm, st));
  }
  st = me == world - 1 ? MZ_ERROR(MZ_ERR_IO, "no file") : MZ_OK;
  st = mz_tuning_share(comm, world - 1, st, NULL, &text);
  MZ_REQUIRE(st == MZ_ERR_IO && !text && strstr(mz_error_message(), "no file"),
             MZ_ERR_DATA, "a failed root gives status %d, \"%s\"", (int)st,
             mz_error_message());
  return MZ_OK;
}

static mz_status_t check_all(mz_comm_t *comm)
{
  bool cuda = false;

  for (int i = 0; i < num_given; i++)
    cuda = cuda || strcmp(given[i], "train.device=cuda") == 0;
  MZ_TRY(check_share(comm));
  MZ_TRY(check_foreign(cuda));
  return MZ_TRACE(check_runs(comm, cuda));
}

int main(int argc, char **argv)
{
  const mz_comm_opts_t opts = {.watchdog_s = 30};
  mz_comm_t *comm = NULL;
  int provided, ok, all_ok;
  mz_status_t st;

  given = (const char *const *)argv + 1;
  num_given = argc - 1;
  tiny_inline = true;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  st = mz_comm_create(MPI_COMM_WORLD, &opts, &comm);
  if (st == MZ_OK) st = check_all(comm);
  if (st != MZ_OK) fprintf(stderr, "rank %d: %s\n", me, mz_error_last());
  ok = st == MZ_OK;
  MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  mz_comm_destroy(&comm);
  MPI_Finalize();
  return !all_ok;
}
