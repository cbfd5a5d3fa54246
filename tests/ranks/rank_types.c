/* SPDX-License-Identifier: Apache-2.0 */
/* Training in bf16 follows fp32: the loss of every one of 50 steps of TINY is
 * within 1% of fp32's, and it falls. All ranks in one layout, the one of the
 * arguments; the gradients travel in bf16, then in fp32.
 * Usage: rank_types [KEY=VALUE]... Exit code 0: it does. */
#include "tiny.h"

#include "base/check.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_ASSIGNMENTS = 24, STEPS = 50 };

typedef struct given {
  const char *words[MAX_ASSIGNMENTS + 2];
  int num;
} given_t;

static mz_status_t run_typed(given_t given, const char *model, const char *wire,
                             tiny_run_t *run)
{
  given.words[given.num++] = model;
  given.words[given.num++] = wire;
  return MZ_TRACE(tiny_run(given.words, given.num, MPI_COMM_WORLD, STEPS, run));
}

static double largest_distance(const tiny_run_t *a, const tiny_run_t *b)
{
  double worst = 0;

  for (int i = 0; i < STEPS; i++) {
    double d = fabs(a->loss[i] - b->loss[i]) / a->loss[i];
    if (!(d <= worst)) worst = isfinite(d) ? d : HUGE_VAL;
  }
  return worst;
}

static mz_status_t compare(const given_t *given, int rank)
{
  static const char *const wires[] = {"communication_data_type=bf16",
                                      "communication_data_type=fp32"};
  tiny_run_t full = {0}, half = {0};
  double distance, fall;
  mz_status_t st;

  MZ_TRY_GOTO(st, run_typed(*given, "bf16.enabled=false", wires[1], &full),
              done);
  for (int i = 0; i < 2; i++) {
    tiny_run_free(&half);
    MZ_TRY_GOTO(st, run_typed(*given, "bf16.enabled=true", wires[i], &half),
                done);
    distance = largest_distance(&full, &half);
    fall = half.loss[0] - half.loss[STEPS - 1];
    if (rank == 0)
      printf("%s: loss %.4f to %.4f, at most %.2g from fp32\n", wires[i],
             half.loss[0], half.loss[STEPS - 1], distance);
    MZ_REQUIRE_GOTO(distance <= 0.01 && fall > 0.5, st, done, MZ_ERR_DATA,
                    "loss is %g from fp32's, falls by %g", distance, fall);
    MZ_REQUIRE_GOTO(full.hash != half.hash, st, done, MZ_ERR_DATA,
                    "bf16 left the parameters of fp32");
  }
done:
  tiny_run_free(&full);
  tiny_run_free(&half);
  return st;
}

/* A model of one's own that ignores bf16.enabled is refused. */
static mz_status_t check_refusal(void)
{
  static const char *const given[] = {"bf16.enabled=true"};
  mz_config_t *config = NULL;
  mz_decl_t *decl = NULL;
  mz_engine_t *engine = NULL;
  mz_status_t st;

  MZ_TRY_GOTO(st, tiny_config(given, 1, MPI_COMM_WORLD, &config), done);
  MZ_TRY_GOTO(st, mz_decl_create(&decl), done);
  st = mz_engine_create(config, decl, MPI_COMM_WORLD, &engine);
  MZ_REQUIRE_GOTO(st == MZ_ERR_CONFIG &&
                      strstr(mz_error_message(),
                             "bf16.enabled is true, but the "
                             "declaration's element type is 0"),
                  st, done, MZ_ERR_DATA, "an fp32 declaration was not refused");
  st = MZ_OK;
done:
  mz_engine_destroy(&engine);
  mz_decl_destroy(&decl);
  mz_config_destroy(&config);
  return st;
}

int main(int argc, char **argv)
{
  int provided, rank;
  given_t given = {0};
  mz_status_t st;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int i = 1; i < argc && given.num < MAX_ASSIGNMENTS; i++)
    given.words[given.num++] = argv[i];
  st = compare(&given, rank);
  if (st == MZ_OK) st = check_refusal();
  if (st) fprintf(stderr, "rank %d: %s\n", rank, mz_error_last());
  MPI_Finalize();
  return st != MZ_OK;
}
