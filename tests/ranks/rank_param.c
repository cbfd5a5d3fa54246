/* SPDX-License-Identifier: Apache-2.0 */
/* mz_param_gather and mz_param_release on TINY: the same on every layout as on
 * one rank. Usage: rank_param [KEY=VALUE]... */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"

#include <math.h>
#include <moezero/param.h>
#include <stdio.h>
#include <string.h>

#define EXPECT(cond)                                                           \
  do {                                                                         \
    if (!(cond)) MZ_FAIL(MZ_ERR_DATA, "not so: %s", #cond);                    \
  } while (0)

/* The call must fail with this text. */
#define EXPECT_REFUSED(call, text)                                             \
  do {                                                                         \
    EXPECT((call) == MZ_ERR_ARG);                                              \
    MZ_REQUIRE(strcmp(mz_error_message(), (text)) == 0, MZ_ERR_DATA,           \
               "\"%s\" in place of \"%s\"", mz_error_message(), (text));       \
    mz_error_clear();                                                          \
  } while (0)

static int rank_of(const tiny_t *t)
{
  int rank;

  MPI_Comm_rank(t->comm, &rank);
  return rank;
}

static int last_rank(const tiny_t *t)
{
  int size;

  MPI_Comm_size(t->comm, &size);
  return size - 1;
}

static mz_status_t gather_all(tiny_t *t, mz_params_t **params_out)
{
  int32_t num = mz_decl_num_tensors(t->decl), *ids = NULL;
  mz_status_t st;

  MZ_TRY(mz_new(num, "ids", &ids));
  for (int32_t i = 0; i < num; i++)
    ids[i] = num - 1 - i;
  st = mz_param_gather(t->engine, ids, num, params_out);
  mz_free(ids);
  return MZ_TRACE(st);
}

/* Gathered values are those of mz_engine_read. */
static mz_status_t check_values(tiny_t *t, mz_params_t *params)
{
  for (int32_t i = 0; i < mz_decl_num_tensors(t->decl); i++) {
    int64_t n = mz_decl_tensor_elements(t->decl, i);
    float *values = NULL;
    int differs = 1;
    mz_status_t st;

    MZ_TRY(mz_new(n, "values", &values));
    st = mz_engine_read(t->engine, i, MZ_PART_WEIGHTS, values);
    if (st == MZ_OK)
      differs = memcmp(values, mz_param_values(params, i),
                       (size_t)n * sizeof *values);
    mz_free(values);
    MZ_TRY(st);
    MZ_REQUIRE(!differs, MZ_ERR_DATA, "%s differs",
               mz_decl_tensor_name(t->decl, i));
  }
  return MZ_OK;
}

/* New values by name and place on the rank that counts, nonsense elsewhere. */
static void change(tiny_t *t, mz_params_t *params, int modifier)
{
  for (int32_t i = 0; i < mz_decl_num_tensors(t->decl); i++) {
    float *values = mz_param_values(params, i);

    for (int64_t j = 0; j < mz_decl_tensor_elements(t->decl, i); j++)
      values[j] = rank_of(t) == modifier
                      ? 0.5f * values[j] + 1e-3f * (float)((i + j) % 7)
                      : -1.0f;
  }
}

/* Reads, loses a change, makes one, and trains a step on it. */
static mz_status_t change_all(tiny_t *t, int modifier, uint64_t *hash_out,
                              double *loss_out)
{
  mz_params_t *params = NULL;
  mz_step_result_t result;
  uint64_t before, after;

  MZ_TRY(mz_engine_param_hash(t->engine, &before));
  MZ_TRY(gather_all(t, &params));
  MZ_TRY(check_values(t, params));
  change(t, params, modifier);
  MZ_TRY(mz_param_release(&params, MZ_NOT_MODIFIED));
  EXPECT(!params);
  MZ_TRY(mz_engine_param_hash(t->engine, &after));
  EXPECT(before == after);

  MZ_TRY(gather_all(t, &params));
  change(t, params, modifier);
  MZ_TRY(mz_param_release(&params, modifier));
  MZ_TRY(mz_engine_param_hash(t->engine, hash_out));
  EXPECT(*hash_out != before);
  MZ_TRY(tiny_step(t, &result));
  *loss_out = result.loss;
  return MZ_OK;
}

static mz_status_t check_ids(tiny_t *t)
{
  int32_t num = mz_decl_num_tensors(t->decl);
  float value = 0;
  char text[64];

  snprintf(text, sizeof text, "no tensor %d of %d", num, num);
  EXPECT_REFUSED(mz_engine_read(t->engine, num, MZ_PART_WEIGHTS, &value), text);
  snprintf(text, sizeof text, "no tensor -1 of %d", num);
  EXPECT_REFUSED(mz_engine_write(t->engine, -1, MZ_PART_WEIGHTS, &value), text);
  return MZ_OK;
}

static mz_status_t check_refusals(tiny_t *t)
{
  int32_t first[] = {2, 0}, second[] = {1, 2}, twice[] = {3, 4, 3};
  int32_t apart[] = {1, 3}, none[] = {mz_decl_num_tensors(t->decl)};
  int32_t own[] = {rank_of(t) == 0 ? 4 : 5};
  mz_params_t *a = NULL, *b = NULL;
  mz_step_result_t result;
  char text[128];

  MZ_TRY(check_ids(t));
  MZ_TRY(mz_param_gather(t->engine, first, 2, &a));
  EXPECT(!mz_param_values(a, 1) && mz_param_values(a, 0));
  snprintf(text, sizeof text, "%s is gathered already, and not yet released",
           mz_decl_tensor_name(t->decl, 2));
  EXPECT_REFUSED(mz_param_gather(t->engine, second, 2, &b), text);
  EXPECT(!b);
  snprintf(text, sizeof text, "%s is gathered already, and not yet released",
           mz_decl_tensor_name(t->decl, 3));
  EXPECT_REFUSED(mz_param_gather(t->engine, twice, 3, &b), text);
  snprintf(text, sizeof text, "tensor %d of %d", none[0], none[0]);
  EXPECT_REFUSED(mz_param_gather(t->engine, none, 1, &b), text);
  MZ_TRY(mz_param_gather(t->engine, apart, 2, &b)); /* 1 and 3 are free again */
  MZ_TRY(mz_param_release(&b, 0));
  snprintf(text, sizeof text, "rank %d modified, there are %d",
           last_rank(t) + 1, last_rank(t) + 1);
  EXPECT_REFUSED(mz_param_release(&a, last_rank(t) + 1), text);
  MZ_TRY(tiny_step(t, &result));
  EXPECT_REFUSED(mz_param_release(&a, 0),
                 "1 updates of the weights since they were gathered");
  if (last_rank(t) > 0) {
    snprintf(text, sizeof text,
             "the rank that modified differs between the ranks: 0 to %d",
             last_rank(t));
    EXPECT_REFUSED(mz_param_release(&a, rank_of(t)), text);
    b = NULL;
    EXPECT(mz_param_gather(t->engine, own, 1, &b) == MZ_ERR_ARG && !b);
  }
  EXPECT(a);
  MZ_TRY(mz_param_release(&a, MZ_NOT_MODIFIED));
  EXPECT_REFUSED(mz_param_release(&a, 0), "no parameters are gathered");
  return MZ_OK;
}

/* Nothing is allocated: a rank without memory leaves no other one waiting. */
static mz_status_t check_without_memory(tiny_t *t)
{
  int64_t elements = mz_decl_tensor_elements(t->decl, 0);
  float *values = NULL;
  uint64_t hash;
  mz_status_t st;

  MZ_TRY(mz_new(elements, "values", &values));
  mz_alloc_fail_at(rank_of(t) == last_rank(t) ? 1 : 0);
  st = mz_engine_read(t->engine, 0, MZ_PART_WEIGHTS, values);
  if (st == MZ_OK) st = mz_engine_param_hash(t->engine, &hash);
  mz_alloc_fail_at(0);
  mz_free(values);
  return MZ_TRACE(st);
}

static mz_status_t run(const char *const *given, int num, MPI_Comm comm,
                       uint64_t *hash_out, double *loss_out)
{
  tiny_t tiny = {0};
  mz_status_t st;

  MZ_TRY_GOTO(st, tiny_create(given, num, comm, &tiny), done);
  MZ_TRY_GOTO(st, change_all(&tiny, last_rank(&tiny), hash_out, loss_out),
              done);
  MZ_TRY_GOTO(st, check_refusals(&tiny), done);
  MZ_TRY_GOTO(st, check_without_memory(&tiny), done);
done:
  tiny_destroy(&tiny);
  return st;
}

static mz_status_t compare(const char *const *given, int num)
{
  uint64_t hash[2];
  double loss[2];

  MZ_TRY(run(NULL, 0, MPI_COMM_SELF, &hash[0], &loss[0]));
  MZ_TRY(run(given, num, MPI_COMM_WORLD, &hash[1], &loss[1]));
  MZ_REQUIRE(hash[0] == hash[1], MZ_ERR_DATA, "the changed weights differ");
  MZ_REQUIRE(fabs(loss[0] - loss[1]) <= 1e-5 * loss[0], MZ_ERR_DATA,
             "the loss of one rank is %.9g, here %.9g", loss[0], loss[1]);
  return MZ_OK;
}

int main(int argc, char **argv)
{
  int provided, rank, failed, any = 0;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  failed = compare((const char *const *)argv + 1, argc - 1) != MZ_OK;
  if (failed) fprintf(stderr, "rank %d: %s\n", rank, mz_error_last());
  MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return any;
}
