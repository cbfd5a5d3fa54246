/* SPDX-License-Identifier: Apache-2.0 */
/* Balance by a bias, the capacity that is given and the temperature, on TINY.
 *   rank_balance bias|variance|capacity|temperature      any ranks
 * Exit code 0: all is right. */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/engine_impl.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { EXPERTS = 4, MOES = 2, STEPS = 8 };

static int world_rank, world_size, num_failed;

static void report(mz_status_t st, const char *name, int number)
{
  int ok = st == MZ_OK, all_ok = 0;

  MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  num_failed += !all_ok;
  if (!ok)
    fprintf(stderr, "rank %d: %s %d: %s: %s\n", world_rank, name, number,
            mz_status_text(st), mz_error_last());
}

/* --- bias --- */

/* The rule of moezero/moe.h, by hand. */
static void follow(const mz_step_result_t *r, double rate,
                   double bias[MOES][EXPERTS])
{
  for (int m = 0; m < MOES; m++) {
    double mean = 0;

    for (int e = 0; e < EXPERTS; e++)
      mean += (double)r->moes[m].routed[e] / EXPERTS;
    for (int e = 0; e < EXPERTS; e++) {
      double over = (double)r->moes[m].routed[e] - mean;

      if (over != 0) bias[m][e] += over > 0 ? -rate : rate;
    }
  }
}

static mz_status_t same_biases(const mz_step_result_t *r,
                               double bias[MOES][EXPERTS])
{
  for (int m = 0; m < MOES; m++)
    for (int e = 0; e < EXPERTS; e++)
      MZ_REQUIRE(fabs((double)r->moes[m].bias[e] - bias[m][e]) < 1e-6,
                 MZ_ERR_DATA, "bias %d of layer %d is %g, need %g", e, m,
                 (double)r->moes[m].bias[e], bias[m][e]);
  return MZ_OK;
}

static mz_status_t write_nan(tiny_t *tiny)
{
  int32_t tensor = mz_decl_find_tensor(tiny->decl, "h.0.attn.qkv.weight");
  int64_t n = mz_decl_tensor_elements(tiny->decl, tensor);
  float *values = NULL;
  mz_status_t st;

  MZ_TRY(mz_new(n, "values", &values));
  memset(values, 0xff, (size_t)n * sizeof *values);
  st = mz_engine_write(tiny->engine, tensor, MZ_PART_WEIGHTS, values);
  mz_free(values);
  return MZ_TRACE(st);
}

static mz_status_t try_bias(int stage)
{
  const double rate = 0.0625;
  double bias[MOES][EXPERTS] = {{0}};
  tiny_given_t g = {.num = 0};
  mz_step_result_t r;
  int64_t moved = 0;
  tiny_t tiny;
  mz_status_t st;

  tiny_give(&g, "zero_optimization.stage=%d", stage);
  tiny_give(&g, "moe.bias_update_rate=%g", rate);
  tiny_give(&g, "moe.ep_size=%d", world_size % 2 ? 1 : 2);
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  for (int i = 0; i < STEPS; i++) {
    MZ_TRY_GOTO(st, tiny_step(&tiny, &r), done);
    follow(&r, rate, bias);
    MZ_TRY_GOTO(st, same_biases(&r, bias), done);
  }
  for (int e = 0; e < EXPERTS; e++)
    moved += bias[0][e] != 0;
  MZ_REQUIRE_GOTO(moved > 0, st, done, MZ_ERR_DATA, "no bias has moved");
  MZ_TRY_GOTO(st, write_nan(&tiny), done);
  MZ_TRY_GOTO(st, tiny_step(&tiny, &r), done);
  MZ_REQUIRE_GOTO(r.skipped, st, done, MZ_ERR_DATA, "the step was taken");
  MZ_TRY_GOTO(st, same_biases(&r, bias), done);
done:
  tiny_destroy(&tiny);
  return st;
}

/* A bias changes what is chosen: one that is far ahead wins every token. */
static mz_status_t try_choice(void)
{
  tiny_given_t g = {.num = 0};
  mz_step_result_t r;
  tiny_t tiny;
  mz_status_t st;

  tiny_give(&g, "moe.bias_update_rate=0.001");
  tiny_give(&g, "moe.k=1");
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  tiny.engine->moes[1].bias[3] = 4;
  MZ_TRY_GOTO(st, tiny_step(&tiny, &r), done);
  MZ_REQUIRE_GOTO(r.moes[1].routed[3] == r.tokens, st, done, MZ_ERR_DATA,
                  "%" PRId64 " of %" PRId64 " tokens follow the bias",
                  r.moes[1].routed[3], r.tokens);
  MZ_REQUIRE_GOTO(r.moes[0].routed[3] < r.tokens, st, done, MZ_ERR_DATA,
                  "the other layer follows it too");
done:
  tiny_destroy(&tiny);
  return st;
}

static void test_bias(void)
{
  for (int stage = 0; stage <= 3; stage++)
    report(try_bias(stage), "bias, stage", stage);
  report(try_choice(), "choice", 0);
}

/* --- variance --- */

/* Mean over the last steps and the layers of (count / mean - 1)^2. Weights are
 * large, so that gates begin with favourites. */
static mz_status_t load_variance(double rate, double *variance_out)
{
  enum { ALL = 100, LAST = 20 };
  tiny_given_t g = {.num = 0};
  double sum = 0;
  tiny_t tiny;
  mz_status_t st;

  tiny_give(&g, "moe.bias_update_rate=%g", rate);
  tiny_give(&g, "moe.k=1");
  tiny_give(&g, "model.initializer_range=0.2");
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  for (int i = 0; i < ALL; i++) {
    mz_step_result_t r;

    MZ_TRY_GOTO(st, tiny_step(&tiny, &r), done);
    for (int m = 0; i >= ALL - LAST && m < MOES; m++)
      for (int e = 0; e < EXPERTS; e++) {
        double mean = (double)r.tokens / EXPERTS; /* k = 1 */
        double over = (double)r.moes[m].routed[e] / mean - 1;

        sum += over * over;
      }
  }
  *variance_out = sum / (LAST * MOES * EXPERTS);
done:
  tiny_destroy(&tiny);
  return st;
}

static void test_variance(void)
{
  double without = 0, with = 0;

  report(load_variance(0, &without), "variance without a bias", 0);
  report(load_variance(0.01, &with), "variance with a bias", 0);
  if (world_rank == 0) printf("%g without, %g with a bias\n", without, with);
  report(3 * with <= without
             ? MZ_OK
             : MZ_ERROR(MZ_ERR_DATA, "%g without, %g with", without, with),
         "a third of the variance", 0);
}

/* --- temperature --- */

/* The z-loss of given logits tells it: both layers, each a mean of one value.
 */
static mz_status_t try_temperature(void)
{
  static const double logits[EXPERTS] = {2, 0, 0, -1};
  static const double wanted[] = {2, 1.625, 1.25, 0.875, 0.5, 0.5};
  tiny_given_t g = {.num = 0};
  tiny_t tiny;
  mz_status_t st;

  tiny_give(&g, "debug.fixed_logits=[2, 0, 0, -1]");
  tiny_give(&g, "moe.temperature={\"start\": 2, \"end\": 0.5, \"steps\": 4}");
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
    mz_step_result_t r;
    double sum = 0, z;

    for (int e = 0; e < EXPERTS; e++)
      sum += exp(logits[e] / wanted[i]);
    z = MOES * log(sum) * log(sum);
    MZ_TRY_GOTO(st, tiny_step(&tiny, &r), done);
    MZ_REQUIRE_GOTO(fabs(r.z_loss - z) <= 1e-5 * z, st, done, MZ_ERR_DATA,
                    "step %zu: a z-loss of %.9g, need %.9g", i, r.z_loss, z);
  }
done:
  tiny_destroy(&tiny);
  return st;
}

/* --- capacity --- */

typedef struct rows {
  int64_t routed, kept, most; /* most: kept rows of one expert */
} rows_t;

static rows_t rows_of(const mz_engine_t *e)
{
  rows_t rows = {0};

  for (int m = 0; m < MOES; m++)
    for (int x = 0; x < EXPERTS; x++) {
      rows.routed += e->moes[m].routed_sum[x];
      rows.kept += e->moes[m].kept_sum[x];
      rows.most = mz_max_i64(rows.most, e->moes[m].kept_sum[x]);
    }
  return rows;
}

/* Rows an expert takes from all ranks; 0: all. */
static mz_status_t expect(const mz_engine_t *e, int64_t limit, const char *name)
{
  rows_t rows = rows_of(e);

  MZ_REQUIRE(rows.routed > 0, MZ_ERR_DATA, "%s: no routes", name);
  if (limit == 0)
    MZ_REQUIRE(rows.kept == rows.routed, MZ_ERR_DATA,
               "%s: %" PRId64 " of %" PRId64 " routes kept, need all", name,
               rows.kept, rows.routed);
  else
    MZ_REQUIRE(rows.most == limit && rows.kept < rows.routed, MZ_ERR_DATA,
               "%s: %" PRId64 " rows to one expert, need %" PRId64, name,
               rows.most, limit);
  return MZ_OK;
}

static mz_status_t run_capacity(tiny_given_t *g, int64_t train, int64_t eval,
                                double *loss_out)
{
  mz_step_result_t r;
  int64_t labels;
  tiny_t tiny;
  mz_status_t st;

  MZ_TRY_GOTO(st, tiny_create(g->all, g->num, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st, tiny_eval(&tiny, loss_out, &labels), done);
  MZ_TRY_GOTO(st, expect(tiny.engine, eval * world_size, "evaluation"), done);
  MZ_TRY_GOTO(st, tiny_step(&tiny, &r), done);
  MZ_TRY_GOTO(st, expect(tiny.engine, train * world_size, "training"), done);
  MZ_TRY_GOTO(st, tiny_eval(&tiny, &(double){0}, &labels), done);
  MZ_TRY_GOTO(st, expect(tiny.engine, eval * world_size, "evaluation"), done);
done:
  tiny_destroy(&tiny);
  return st;
}

/* What evaluation drops does not depend on what training does. */
static mz_status_t try_capacity(bool training, bool evaluation, int ep,
                                double *loss_out)
{
  tiny_given_t g = {.num = 0};

  tiny_give(&g, "moe.drop_tokens=%s", training ? "true" : "false");
  tiny_give(&g, "moe.eval_drop_tokens=%s", evaluation ? "true" : "false");
  tiny_give(&g, "moe.expert_capacity=3");
  tiny_give(&g, "moe.min_capacity=9");
  tiny_give(&g, "moe.saved_rows=0.25");
  tiny_give(&g, "moe.ep_size=%d", ep);
  return MZ_TRACE(
      run_capacity(&g, training ? 3 : 0, evaluation ? 3 : 0, loss_out));
}

static void test_capacity(void)
{
  double loss[2][2] = {{0}};

  for (int ep = 1; ep <= 2 - world_size % 2; ep++)
    for (int i = 0; i < 4; i++) {
      report(try_capacity(i / 2, i % 2, ep, &loss[i / 2][i % 2]),
             "capacity, case", i);
      if (i < 2) continue;
      report(fabs(loss[1][i % 2] - loss[0][i % 2]) <=
                     1e-9 * fabs(loss[0][i % 2])
                 ? MZ_OK
                 : MZ_ERROR(MZ_ERR_DATA, "losses %.12g and %.12g",
                            loss[0][i % 2], loss[1][i % 2]),
             "equal losses of evaluation, case", i);
    }
}

int main(int argc, char **argv)
{
  int provided;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  if (argc == 2 && strcmp(argv[1], "bias") == 0)
    test_bias();
  else if (argc == 2 && strcmp(argv[1], "variance") == 0)
    test_variance();
  else if (argc == 2 && strcmp(argv[1], "capacity") == 0)
    test_capacity();
  else if (argc == 2 && strcmp(argv[1], "temperature") == 0)
    report(try_temperature(), "temperature", 0);
  else
    num_failed = 1;
  MPI_Finalize();
  return num_failed > 0;
}
