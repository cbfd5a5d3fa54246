/* SPDX-License-Identifier: Apache-2.0 */
#include "moezero/param.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/engine_impl.h"

struct mz_params {
  mz_engine_t *engine;
  int32_t num;
  int32_t *tensors; /* [num] */
  int64_t *offsets; /* [num]: of their values in memory */
  float *memory;
  int64_t updates; /* of the weights when they were gathered */
};

/* The least and the most of a number over the ranks must be one. */
static mz_status_t check_same(mz_engine_t *e, const char *what, int64_t number)
{
  int64_t low, high;

  MZ_TRY(mz_comm_min_max(e->comm, number, &low, &high));
  MZ_REQUIRE(low == high, MZ_ERR_ARG,
             "%s differs between the ranks: %" PRId64 " to %" PRId64, what, low,
             high);
  return MZ_OK;
}

static int64_t hash_list(const int32_t *tensors, int32_t num)
{
  uint64_t hash = (uint64_t)num;

  for (int32_t i = 0; i < num; i++)
    hash = (hash ^ (uint32_t)tensors[i]) * UINT64_C(0x100000001b3);
  return (int64_t)(hash >> 1);
}

/* Marks the tensors as gathered; on an error none of them. */
static mz_status_t take(mz_engine_t *e, const int32_t *tensors, int32_t num)
{
  mz_status_t st;
  int32_t i;

  for (i = 0; i < num; i++) {
    int32_t t = tensors[i];

    MZ_REQUIRE_GOTO(t >= 0 && t < e->decl->num_tensors, st, undo, MZ_ERR_ARG,
                    "tensor %d of %" PRId64, t, e->decl->num_tensors);
    MZ_REQUIRE_GOTO(!e->gathered[t], st, undo, MZ_ERR_ARG,
                    "%s is gathered already, and not yet released",
                    mz_decl_tensor_name(e->decl, t));
    e->gathered[t] = 1;
  }
  return MZ_OK;
undo:
  while (i-- > 0)
    e->gathered[tensors[i]] = 0;
  return st;
}

static mz_status_t create(mz_engine_t *e, const int32_t *tensors, int32_t num,
                          mz_params_t **params_out)
{
  mz_params_t *p;
  int64_t total = 0;

  MZ_TRY(mz_new(1, "gathered parameters", params_out));
  p = *params_out;
  p->engine = e;
  p->num = num;
  p->updates = e->updates;
  MZ_TRY(mz_new(num, "gathered tensors", &p->tensors));
  MZ_TRY(mz_new(num, "offsets of gathered tensors", &p->offsets));
  for (int32_t i = 0; i < num; i++) {
    p->tensors[i] = tensors[i];
    p->offsets[i] = total;
    MZ_TRY(mz_add_i64(total, e->decl->tensors[tensors[i]].elements, &total));
  }
  return MZ_TRACE(mz_new(total, "values of gathered tensors", &p->memory));
}

static void free_params(mz_params_t **params)
{
  mz_params_t *p = *params;

  if (!p) return;
  mz_free(p->tensors);
  mz_free(p->offsets);
  mz_free(p->memory);
  mz_free(p);
  *params = NULL;
}

mz_status_t mz_param_gather(mz_engine_t *engine, const int32_t *tensors,
                            int32_t num, mz_params_t **params_out)
{
  mz_params_t *p = NULL;
  mz_status_t st;

  MZ_REQUIRE(engine && params_out && num >= 0 && (tensors || num == 0),
             MZ_ERR_ARG, "engine, params_out or %d tensors missing", num);
  *params_out = NULL;
  MZ_TRY(check_same(engine, "the list of tensors", hash_list(tensors, num)));
  MZ_TRY(take(engine, tensors, num));
  st = mz_comm_agree(engine->comm, create(engine, tensors, num, &p));
  for (int32_t i = 0; i < num && st == MZ_OK; i++)
    st = MZ_TRACE(mz_engine_read(engine, tensors[i], MZ_PART_WEIGHTS,
                                 p->memory + p->offsets[i]));
  if (st == MZ_OK) {
    *params_out = p;
    return MZ_OK;
  }
  free_params(&p);
  for (int32_t i = 0; i < num; i++)
    engine->gathered[tensors[i]] = 0;
  return MZ_TRACE(st);
}

float *mz_param_values(mz_params_t *params, int32_t tensor)
{
  for (int32_t i = 0; i < params->num; i++)
    if (params->tensors[i] == tensor)
      return params->memory + params->offsets[i];
  return NULL;
}

/* One message a tensor, then one publication for all. */
static mz_status_t write_back(mz_params_t *p, int modifier)
{
  mz_engine_t *e = p->engine;

  for (int32_t i = 0; i < p->num; i++) {
    float *values = p->memory + p->offsets[i];
    int64_t bytes = e->decl->tensors[p->tensors[i]].elements * 4;

    MZ_TRY(mz_comm_broadcast(e->comm, values, bytes, modifier));
    MZ_TRY(mz_comm_agree(
        e->comm, mz_engine_put(e, p->tensors[i], MZ_PART_WEIGHTS, values)));
  }
  return p->num ? MZ_TRACE(mz_engine_publish(e)) : MZ_OK;
}

mz_status_t mz_param_release(mz_params_t **params, int modifier)
{
  mz_params_t *p = params ? *params : NULL;
  mz_status_t st = MZ_OK;

  MZ_REQUIRE(p, MZ_ERR_ARG, "no parameters are gathered");
  MZ_TRY(check_same(p->engine, "the rank that modified", modifier));
  if (modifier != MZ_NOT_MODIFIED) {
    MZ_REQUIRE(modifier >= 0 && modifier < mz_comm_size(p->engine->comm),
               MZ_ERR_ARG, "rank %d modified, there are %d", modifier,
               mz_comm_size(p->engine->comm));
    MZ_REQUIRE(p->updates == p->engine->updates, MZ_ERR_ARG,
               "%" PRId64 " updates of the weights since they were gathered",
               p->engine->updates - p->updates);
    st = write_back(p, modifier);
  }
  for (int32_t i = 0; i < p->num; i++)
    p->engine->gathered[p->tensors[i]] = 0;
  free_params(params);
  return MZ_TRACE(st);
}
