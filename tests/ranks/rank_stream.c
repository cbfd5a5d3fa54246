/* SPDX-License-Identifier: Apache-2.0 */
/* Waits of a stream, on a device whose work is done later (late_device.h): TINY
 * is the same, bit by bit, whoever waits, and nothing hangs although one rank
 * is held up at random.
 *   rank_stream [STEPS] [KEY=VALUE]...     for every ep size 1, 2 and stage
 * Prints a line a layout. SIGUSR2 prints where the messages stand. Exit code 0:
 * all agree, and streams did wait; 7: a run failed, and its engine is gone. */
#include "late_device.h"
#include "tiny.h"

#include "base/check.h"

#include <moezero/random.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 12 };

static int world, me, passed, failed;
static int64_t steps = 6;
static const char **given;
static int num_given;

/* What a run leaves. */
typedef struct run {
  double loss[64];
  uint64_t hash;
  long waits;
} run_t;

/* Nobody knows which rank is late in a step, nor by how much. */
static void hold_up(int64_t step)
{
  mz_random_t random = mz_random_make(5, (uint32_t)step, MZ_PURPOSE_OWN, 0);
  struct timespec pause = {0};

  if ((int)(mz_random_u32(&random, 0) % (uint32_t)world) != me) return;
  pause.tv_nsec = mz_random_u32(&random, 1) % 3000000;
  nanosleep(&pause, NULL);
}

static mz_status_t train(tiny_t *tiny, run_t *run)
{
  mz_step_result_t result;
  long before = late_device_waits();

  for (int64_t i = 0; i < steps; i++) {
    hold_up(i);
    MZ_TRY(tiny_step(tiny, &result));
    run->loss[i % 64] = result.loss;
  }
  run->waits = late_device_waits() - before;
  return MZ_TRACE(mz_engine_param_hash(tiny->engine, &run->hash));
}

static mz_status_t run_one(int ep, int stage, const char *wait, run_t *run)
{
  tiny_given_t all = {.num = 0};
  tiny_t tiny = {0};
  mz_status_t st;

  memset(run, 0, sizeof *run);
  tiny_give(&all, "train.device=cuda");
  tiny_give(&all, "moe.ep_size=%d", ep);
  tiny_give(&all, "zero_optimization.stage=%d", stage);
  tiny_give(&all, "train_batch_size=%d", BATCH);
  tiny_give(&all, "comm.wait=%s", wait);
  for (int i = 0; i < num_given; i++)
    tiny_give(&all, "%s", given[i]);
  MZ_TRY_GOTO(st, tiny_create(all.all, all.num, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st, train(&tiny, run), done);
done:
  tiny_destroy(&tiny);
  return st;
}

static void try_layout(int ep, int stage)
{
  run_t host, stream;
  mz_status_t st = run_one(ep, stage, "host", &host);
  int same = 0, all = 0;

  if (st == MZ_OK) st = run_one(ep, stage, "stream", &stream);
  if (st != MZ_OK) {
    printf("verdict of %d: %s\n", me, mz_error_last());
    fflush(stdout);
    sleep(1); /* the others print theirs */
    if (st == MZ_ERR_PEER || st == MZ_ERR_MPI) MPI_Abort(MPI_COMM_WORLD, 7);
    MPI_Finalize(); /* the error is that of a step, so all ranks are here */
    exit(7);
  }
  same = host.hash == stream.hash && host.waits == 0 &&
         memcmp(host.loss, stream.loss, sizeof host.loss) == 0 &&
         (stream.waits > 0 || world == 1);
  MPI_Allreduce(&same, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (me == 0)
    printf("%s ep %d stage %d: loss %.9g and %.9g, hash %016llx and %016llx, "
           "%ld waits of the stream\n",
           all ? "ok" : "FAILED", ep, stage, host.loss[(steps - 1) % 64],
           stream.loss[(steps - 1) % 64], (unsigned long long)host.hash,
           (unsigned long long)stream.hash, stream.waits);
  fflush(stdout);
  if (all)
    passed++;
  else
    failed++;
}

int main(int argc, char **argv)
{
  int provided;

  given = (const char **)argv + 1;
  num_given = argc - 1;
  if (num_given > 0 && !strchr(given[0], '=')) {
    steps = strtoll(given[0], NULL, 10);
    given++;
    num_given--;
  }
  tiny_watch();
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  late_device_use();
  for (int ep = 1; ep <= 2 && world % ep == 0; ep++)
    for (int stage = 0; stage <= 3; stage++)
      try_layout(ep, stage);
  if (me == 0) printf("%d passed, %d failed\n", passed, failed);
  MPI_Finalize();
  return failed > 0;
}
