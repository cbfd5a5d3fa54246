/* SPDX-License-Identifier: Apache-2.0 */
#include "train/bias.h"

#include "base/alloc.h"
#include "base/check.h"

#include <stdio.h>
#include <string.h>

mz_status_t mz_bias_create(const mz_moe_opts_t *opts, float **bias_out)
{
  *bias_out = NULL;
  if (opts->bias_update_rate <= 0) return MZ_OK;
  return MZ_TRACE(
      mz_new(2 * (int64_t)opts->num_experts, "biases of a gate", bias_out));
}

/* Wang et al. 2024 (arXiv:2408.15664) alg. 1. */
static void update(const mz_moe_opts_t *o, const int64_t *routed, float *bias)
{
  float rate = (float)o->bias_update_rate;
  int64_t all = 0;

  for (int32_t e = 0; e < o->num_experts; e++)
    all += routed[e];
  for (int32_t e = 0; e < o->num_experts; e++) {
    int64_t over = routed[e] * o->num_experts - all;

    if (over < 0) bias[e] += rate;
    if (over > 0) bias[e] -= rate;
  }
}

void mz_bias_update(mz_engine_t *engine)
{
  for (int32_t m = 0; m < engine->plan->num_moes; m++)
    if (engine->moes[m].bias)
      update(&engine->decl->moes[m].opts, engine->moes[m].routed_sum,
             engine->moes[m].bias);
}

int32_t mz_bias_count(const mz_engine_t *engine)
{
  int32_t count = 0;

  for (int32_t m = 0; m < engine->plan->num_moes; m++)
    count += engine->moes[m].bias != NULL;
  return count;
}

static mz_ckpt_tensor_t tensor_of(const mz_engine_t *e, int32_t moe)
{
  const mz_moe_opts_t *o = &e->decl->moes[moe].opts;
  mz_ckpt_tensor_t tensor = {.ndim = 1, .shape = {o->num_experts}};

  snprintf(tensor.name, sizeof tensor.name, "%s.gate.bias", o->name);
  return tensor;
}

void mz_bias_list(const mz_engine_t *engine, mz_ckpt_tensor_t *tensors)
{
  for (int32_t m = 0; m < engine->plan->num_moes; m++)
    if (engine->moes[m].bias) *tensors++ = tensor_of(engine, m);
}

void mz_bias_slices(const mz_engine_t *engine, int32_t first_tensor,
                    mz_ckpt_slice_t *slices)
{
  for (int32_t m = 0; m < engine->plan->num_moes; m++) {
    int32_t experts = engine->decl->moes[m].opts.num_experts;
    const float *bias = engine->moes[m].bias;

    if (!bias) continue;
    *slices++ =
        (mz_ckpt_slice_t){.tensor = first_tensor++,
                          .length = experts,
                          .values = {bias, bias + experts, bias + experts}};
  }
}

bool mz_bias_holds(const mz_engine_t *engine, const float *values)
{
  for (int32_t m = 0; m < engine->plan->num_moes; m++) {
    uintptr_t first = (uintptr_t)engine->moes[m].bias, at = (uintptr_t)values;
    size_t bytes =
        2 * (size_t)engine->decl->moes[m].opts.num_experts * sizeof *values;

    if (first && at >= first && at < first + bytes) return true;
  }
  return false;
}

bool mz_bias_named(const mz_engine_t *engine, const char *name)
{
  for (int32_t m = 0; m < engine->plan->num_moes; m++)
    if (engine->moes[m].bias && strcmp(tensor_of(engine, m).name, name) == 0)
      return true;
  return false;
}

mz_status_t mz_bias_read(mz_engine_t *engine, mz_ckpt_t *ckpt)
{
  for (int32_t m = 0; m < engine->plan->num_moes; m++) {
    mz_ckpt_tensor_t tensor = tensor_of(engine, m);
    int32_t at = mz_ckpt_find(ckpt, tensor.name);

    if (!engine->moes[m].bias) continue;
    MZ_REQUIRE(at >= 0, MZ_ERR_SHAPE, "%s: it has no tensor %s",
               mz_ckpt_path(ckpt), tensor.name);
    MZ_REQUIRE(mz_ckpt_elements(mz_ckpt_tensor(ckpt, at)) == tensor.shape[0],
               MZ_ERR_SHAPE,
               "%s: %s has %" PRId64 " elements, the model has %" PRId64
               " experts",
               mz_ckpt_path(ckpt), tensor.name,
               mz_ckpt_elements(mz_ckpt_tensor(ckpt, at)), tensor.shape[0]);
    MZ_TRY(mz_ckpt_read(ckpt, at, MZ_CKPT_WEIGHTS, 0, tensor.shape[0],
                        engine->moes[m].bias));
  }
  return MZ_OK;
}
