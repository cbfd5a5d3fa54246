/* SPDX-License-Identifier: Apache-2.0 */
/* A step that fails on one rank updates nothing: the steps behind it are those
 * of a run without it, bit by bit, whether the weights are left alone or
 * written back. 2 ranks x stage x dtype. Usage: rank_failed [KEY=VALUE]...
 * Prints a line a layout; exit code 0: all are. */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"

#include <stdio.h>
#include <string.h>

enum { STEPS = 3, NEVER = STEPS, FAULT = 1000 };

/* The failing step has a number of its own, so that it fails in every run. */
static mz_status_t fail_once(tiny_t *tiny)
{
  int64_t steps = mz_engine_steps(tiny->engine);
  mz_step_result_t result;
  mz_status_t st;

  mz_engine_set_steps(tiny->engine, FAULT - 1);
  st = tiny_step(tiny, &result);
  mz_engine_set_steps(tiny->engine, steps);
  MZ_REQUIRE(st != MZ_OK, MZ_ERR_DATA, "the step did not fail");
  return MZ_OK;
}

static mz_status_t write_back(tiny_t *tiny, const tiny_run_t *weights)
{
  for (int t = 0; t < weights->num_tensors; t++)
    MZ_TRY(mz_engine_write(tiny->engine, t, MZ_PART_WEIGHTS,
                           weights->values + weights->offsets[t]));
  return MZ_OK;
}

/* @param at  Behind so many steps one fails. */
static mz_status_t run(const tiny_given_t *g, int at, bool writes,
                       tiny_run_t *run_out)
{
  tiny_run_t before = {0};
  mz_step_result_t result;
  tiny_t tiny;
  mz_status_t st;

  MZ_TRY_GOTO(st, tiny_create(g->all, g->num, MPI_COMM_WORLD, &tiny), done);
  for (int i = 0; i < STEPS; i++) {
    if (i == at) {
      MZ_TRY_GOTO(st, tiny_read(&tiny, MZ_PART_WEIGHTS, &before), done);
      MZ_TRY_GOTO(st, fail_once(&tiny), done);
      if (writes) MZ_TRY_GOTO(st, write_back(&tiny, &before), done);
    }
    MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
    run_out->loss[i] = result.loss;
    run_out->norm[i] = result.grad_norm;
  }
  MZ_TRY_GOTO(st, tiny_read(&tiny, MZ_PART_WEIGHTS, run_out), done);
done:
  tiny_destroy(&tiny);
  tiny_run_free(&before);
  return st;
}

static mz_status_t try_layout(int stage, const char *dtype, bool writes)
{
  tiny_run_t plain = {0}, failed = {0};
  tiny_given_t g = {.num = 0};
  mz_status_t st;

  tiny_give(&g, "zero_optimization.stage=%d", stage);
  tiny_give(&g, "bf16.enabled=%s", dtype);
  tiny_give(&g, "moe.ep_size=%d", 1 + stage % 2);
  tiny_give(&g, "debug.fault=oom:rank0:step%d", FAULT);
  MZ_TRY_GOTO(st, run(&g, NEVER, false, &plain), done);
  for (int at = 0; at < 2; at++) {
    tiny_run_free(&failed);
    MZ_TRY_GOTO(st, run(&g, at, writes, &failed), done);
    MZ_REQUIRE_GOTO(memcmp(plain.loss, failed.loss, sizeof plain.loss) == 0 &&
                        memcmp(plain.norm, failed.norm, sizeof plain.norm) ==
                            0 &&
                        plain.hash == failed.hash,
                    st, done, MZ_ERR_DATA,
                    "failed behind step %d: loss %.9g, %.9g without that", at,
                    failed.loss[STEPS - 1], plain.loss[STEPS - 1]);
  }
done:
  tiny_run_free(&plain);
  tiny_run_free(&failed);
  return st;
}

int main(int argc, char **argv)
{
  int provided;

  tiny_inline = argc > 1 && strcmp(argv[1], "inline") == 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  for (int stage = 0; stage <= 3; stage++)
    for (int i = 0; i < 4; i++)
      tiny_report(try_layout(stage, i % 2 ? "true" : "false", i / 2),
                  "stage %d, %s, weights %s", stage, i % 2 ? "bf16" : "fp32",
                  i / 2 ? "written back" : "left alone");
  MPI_Finalize();
  return tiny_num_failed > 0;
}
