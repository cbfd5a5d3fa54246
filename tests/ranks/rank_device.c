/* SPDX-License-Identifier: Apache-2.0 */
/* TINY on GPUs, where ranks may share one: every layout of the ranks equals one
 * CPU rank, whatever waits, and a run repeats its bits. Needs a GPU.
 *   rank_device [soak=STEPS | overlap] [KEY=VALUE]...
 * Prints a line a layout; the last one counts. With soak only that many steps
 * of routing that changes, one rank held up at random. With overlap each layout
 * runs with moe.overlap_chunks 1, 2, 4 and 0, which must have the same bits.
 * Layouts make progress by the thread and inline in turn, with comm.wait=stream
 * by the thread. SIGUSR2 prints where the messages stand. Built as rank_late it
 * needs no GPU: late_device.h stands in for it. Exit code 0: all agree.
 */
#ifdef MZ_LATE_DEVICE
#include "late_device.h"
#endif
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"

#include <math.h>
#include <moezero/random.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  STEPS = 10,
  BATCH = 8,
  OWN = 6,
  MAX_ALL = 32,
  MAX_SEEDS = 16,
  MAX_RUNS = 4
};

/* Sums of another order over ten steps of an optimizer (the design's bound). */
static const double bound = 1e-4;

static const char wait_on_stream[] = "comm.wait=stream";

static int world, me, seed = 1, passed, failed;
static const char **given;
static int num_given;
static bool stream_waits;

/* moe.overlap_chunks of the runs of a layout. */
static int chunks[MAX_RUNS] = {1, 1}, num_runs = 2;

static mz_status_t run_one(const char *device, int ep, int stage, int cut,
                           MPI_Comm comm, int num_steps, tiny_run_t *run)
{
  char own[OWN][64];
  const char *all[MAX_ALL];
  int n = 0, size;

  MPI_Comm_size(comm, &size);
  snprintf(own[0], sizeof own[0], "train.device=%s", device);
  snprintf(own[1], sizeof own[1], "moe.ep_size=%d", ep);
  snprintf(own[2], sizeof own[2], "zero_optimization.stage=%d", stage);
  snprintf(own[3], sizeof own[3], "train_micro_batch_size_per_gpu=%d",
           BATCH / size);
  snprintf(own[4], sizeof own[4], "train.seed=%d", seed);
  snprintf(own[5], sizeof own[5], "moe.overlap_chunks=%d", cut);
  for (; n < OWN; n++)
    all[n] = own[n];
  for (int i = 0; i < num_given; i++)
    if (strcmp(given[i], wait_on_stream) != 0 || strcmp(device, "cuda") == 0)
      all[n++] = given[i];
  return MZ_TRACE(tiny_run(all, n, comm, num_steps, run));
}

/* A near-tie of the gate may flip: the first seed without one. */
static mz_status_t find_reference(tiny_run_t *run)
{
  for (int i = 0; i < MAX_SEEDS; i++, seed++) {
    tiny_run_free(run);
    MZ_TRY(run_one("cpu", 1, 0, 1, MPI_COMM_SELF, STEPS, run));
    if (run->min_gap > 1e-4) return MZ_OK;
  }
  MZ_FAIL(MZ_ERR_DATA, "a gate gap below 1e-4 at every seed");
}

static void note(bool ok, const char *name, mz_status_t st,
                 const tiny_apart_t *apart, bool same)
{
  int own = ok, all = 0;

  MPI_Allreduce(&own, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (!ok && st != MZ_OK) printf("rank %d: %s\n", me, mz_error_last());
  if (me == 0)
    printf("%s %s: loss %.1e, norm %.1e, tensor %.1e (%s) apart, %s\n",
           all ? "ok" : "FAILED", name, apart->loss, apart->norm, apart->tensor,
           apart->name, same ? "same bits again" : "other bits");
  fflush(stdout);
  if (all)
    passed++;
  else
    failed++;
}

/* Where a run that should have the bits of another one first has not. */
static void tell_difference(const tiny_run_t *runs, int other)
{
  const tiny_run_t *a = &runs[0], *b = &runs[other];
  tiny_apart_t apart = tiny_compare(a, b);
  int step = 0;

  while (step < a->num_steps && a->loss[step] == b->loss[step] &&
         a->norm[step] == b->norm[step])
    step++;
  if (me == 0)
    printf("chunks %d and %d, run %d: other loss or norm from step %d of %d; "
           "loss %.1e, norm %.1e, tensor %.1e (%s) apart\n",
           chunks[0], chunks[other], other, step + 1, a->num_steps, apart.loss,
           apart.norm, apart.tensor, apart.name);
}

/* Runs with rank 0's table of a first step: bits repeat with one table. */
static mz_status_t run_all(int ep, int stage, MPI_Comm comm, tiny_run_t *runs)
{
  tiny_run_t first = {0};
  char *table = NULL;
  int bytes;
  mz_status_t st;

  MZ_TRY_GOTO(st, run_one("cuda", ep, stage, 1, comm, 1, &first), done);
  bytes = (int)strlen(first.tuning) + 1;
  MPI_Bcast(&bytes, 1, MPI_INT, 0, comm);
  MZ_TRY_GOTO(st, mz_new(bytes, "table", &table), done);
  if (me == 0) memcpy(table, first.tuning, (size_t)bytes);
  MPI_Bcast(table, bytes, MPI_CHAR, 0, comm);
  tiny_tuning = table;
  for (int i = 0; i < num_runs; i++)
    MZ_TRY_GOTO(
        st, run_one("cuda", ep, stage, chunks[i], comm, STEPS, &runs[i]), done);
done:
  tiny_tuning = NULL;
  mz_free(table);
  tiny_run_free(&first);
  return st;
}

static void try_layout(const tiny_run_t *reference, int np, int ep, int stage)
{
  tiny_run_t runs[MAX_RUNS] = {{0}};
  tiny_apart_t apart = {.name = "nothing"};
  bool same = true;
  mz_status_t st = MZ_OK;
  char name[64];
  MPI_Comm part;

  snprintf(name, sizeof name, "np %d ep %d stage %d%s%s", np, ep, stage,
           tiny_inline ? " inline" : "", stream_waits ? " stream" : "");
  MPI_Comm_split(MPI_COMM_WORLD, me < np ? 0 : MPI_UNDEFINED, me, &part);
  if (part != MPI_COMM_NULL) {
    st = run_all(ep, stage, part, runs);
    if (st == MZ_OK) apart = tiny_compare(reference, &runs[0]);
    for (int i = 1; st == MZ_OK && i < num_runs; i++)
      if (runs[0].hash != runs[i].hash) {
        tell_difference(runs, i);
        same = false;
      }
    MPI_Comm_free(&part);
  }
  note(st == MZ_OK && same && apart.loss <= bound && apart.norm <= bound &&
           apart.tensor <= bound,
       name, st, &apart, same);
  for (int i = 0; i < num_runs; i++)
    tiny_run_free(&runs[i]);
}

/* Nobody knows which rank is late in a step, nor by how much. */
static void hold_up(int64_t step)
{
  mz_random_t random = mz_random_make(5, (uint32_t)step, MZ_PURPOSE_OWN, 0);
  struct timespec pause = {0};

  if ((int)(mz_random_u32(&random, 0) % (uint32_t)world) != me) return;
  pause.tv_nsec = mz_random_u32(&random, 1) % 3000000;
  nanosleep(&pause, NULL);
}

static mz_status_t soak(int64_t steps)
{
  char own[3][64];
  const char *all[MAX_ALL];
  int n = 0;
  tiny_t tiny;
  mz_step_result_t result;
  struct timespec begin, end;

  snprintf(own[0], sizeof own[0], "train.device=cuda");
  snprintf(own[1], sizeof own[1], "moe.ep_size=%d", world > 1 ? 2 : 1);
  snprintf(own[2], sizeof own[2], "train_micro_batch_size_per_gpu=%d",
           BATCH / world);
  for (; n < 3; n++)
    all[n] = own[n];
  for (int i = 0; i < num_given; i++)
    all[n++] = given[i];
  MZ_TRY(tiny_create(all, n, MPI_COMM_WORLD, &tiny));
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int64_t i = 0; i < steps; i++) {
    hold_up(i);
    MZ_TRY(tiny_step(&tiny, &result));
    MZ_REQUIRE(isfinite(result.loss), MZ_ERR_DATA,
               "the loss of step %" PRId64 " is %g", i + 1, result.loss);
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  if (me == 0)
    printf("soak: %" PRId64 " steps in %.1f s, loss %.4f\n", steps,
           (double)(end.tv_sec - begin.tv_sec) +
               1e-9 * (double)(end.tv_nsec - begin.tv_nsec),
           result.loss);
  tiny_destroy(&tiny);
  return MZ_OK;
}

static int run_soak(int64_t steps)
{
  mz_status_t st = soak(steps);

  if (st != MZ_OK) {
    printf("rank %d: %s\n", me, mz_error_last());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}

int main(int argc, char **argv)
{
  tiny_run_t reference = {0};
  int provided, index = 0;
  int64_t steps = 0;

  given = (const char **)argv + 1;
  num_given = argc - 1;
  if (num_given > 0 && strncmp(given[0], "soak=", 5) == 0) {
    steps = strtoll(given[0] + 5, NULL, 10);
    given++;
    num_given--;
  }
  if (num_given > 0 && strcmp(given[0], "overlap") == 0) {
    num_runs = 4;
    chunks[1] = 2;
    chunks[2] = 4;
    chunks[3] = 0;
    given++;
    num_given--;
  }
  for (int i = 0; i < num_given; i++)
    stream_waits = stream_waits || strcmp(given[i], wait_on_stream) == 0;
  tiny_watch();
#ifdef MZ_LATE_DEVICE
  late_device_use();
#endif
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  if (steps > 0) return run_soak(steps);
  if (find_reference(&reference) != MZ_OK) {
    printf("rank %d: %s\n", me, mz_error_last());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  for (int ep = 1; ep <= 2 && ep <= world; ep++)
    for (int stage = 0; stage <= 3; stage++) {
      tiny_inline = index++ % 2 == 1 && !stream_waits;
      try_layout(&reference, world, ep, stage);
    }
  if (me == 0) printf("%d passed, %d failed\n", passed, failed);
  tiny_run_free(&reference);
  MPI_Finalize();
  return failed > 0;
}
