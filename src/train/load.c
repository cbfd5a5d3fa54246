/* SPDX-License-Identifier: Apache-2.0 */
#include "train/load.h"

#include "base/alloc.h"
#include "base/check.h"
#include "plan/decl_impl.h"

struct mz_loads {
  int32_t num_moes;
  int64_t steps;         /* taken */
  mz_expert_load_t *all; /* [num_moes] */
  int64_t **last;        /* [num_moes][E] number of the step, of those taken,
                            that last gave it a token; 0: none has */
  int64_t *numbers;      /* where they lie */
};

static int64_t sum_of(const int64_t *counts, int32_t num)
{
  int64_t sum = 0;

  for (int32_t e = 0; e < num; e++)
    sum += counts[e];
  return sum;
}

double mz_load_dropped(const mz_expert_load_t *load)
{
  int64_t routed = sum_of(load->routed, load->num_experts);
  int64_t kept = sum_of(load->kept, load->num_experts);

  return routed > 0 ? (double)(routed - kept) / (double)routed : 0;
}

double mz_load_variance(const mz_expert_load_t *load)
{
  int32_t num = load->num_experts;
  double mean = (double)sum_of(load->routed, num) / num, sum = 0;

  for (int32_t e = 0; e < num && mean > 0; e++) {
    double over = (double)load->routed[e] / mean - 1;
    sum += over * over;
  }
  return sum / num;
}

double mz_load_largest(const mz_expert_load_t *load)
{
  int64_t sum = sum_of(load->routed, load->num_experts), most = 0;

  for (int32_t e = 0; e < load->num_experts; e++)
    most = mz_max_i64(most, load->routed[e]);
  return sum > 0 ? (double)most * load->num_experts / (double)sum : 1;
}

/* --- what a layer keeps --- */

static bool uses(const mz_decl_t *decl, const mz_layer_t *layer, mz_pass_t pass,
                 int32_t buffer)
{
  const mz_step_t *steps = decl->steps[pass] + layer->first[pass];

  for (int32_t s = 0; s < layer->num[pass]; s++)
    if (mz_step_touches(&steps[s], buffer)) return true;
  return false;
}

static bool has_moe(const mz_decl_t *decl, const mz_layer_t *layer, int32_t moe)
{
  const mz_step_t *steps = decl->steps[MZ_FORWARD] + layer->first[MZ_FORWARD];

  for (int32_t s = 0; s < layer->num[MZ_FORWARD]; s++)
    if (steps[s].kind == MZ_STEP_COUNTS && steps[s].moe == moe) return true;
  return false;
}

/* Buffers of routes that both passes of the layer use. */
static int64_t routing_bytes(const mz_plan_t *plan, int32_t moe)
{
  const mz_decl_t *decl = plan->decl;
  int64_t bytes = 0;

  for (int64_t l = 0; l < decl->num_layers; l++) {
    const mz_layer_t *layer = &decl->layers[l];

    if (!has_moe(decl, layer, moe)) continue;
    for (int32_t b = 0; b < decl->num_buffers; b++)
      if (decl->buffers[b].category == MZ_CAT_ROUTING &&
          uses(decl, layer, MZ_FORWARD, b) && uses(decl, layer, MZ_BACKWARD, b))
        bytes += plan->buffers[plan->buffer_of_decl[b]].bytes;
  }
  return bytes;
}

int64_t mz_load_planned_bytes(const mz_plan_t *plan)
{
  int64_t bytes = 0;

  for (int32_t i = 0; i < plan->num_traffic; i++)
    if (plan->traffic[i].kind == MZ_ENTRY_TOKENS)
      bytes += plan->traffic[i].bytes_micro * plan->opts.accumulation;
  return bytes * plan->opts.world_size; /* a bound that all ranks share */
}

/* --- the window --- */

mz_status_t mz_loads_create(const mz_plan_t *plan, mz_loads_t **loads_out)
{
  int64_t experts = 0;
  mz_loads_t *loads = NULL;
  mz_status_t st;

  *loads_out = NULL;
  for (int32_t m = 0; m < plan->num_moes; m++)
    experts += plan->decl->moes[m].opts.num_experts;
  MZ_TRY_GOTO(st, mz_new(1, "loads", &loads), done);
  MZ_TRY_GOTO(st, mz_new(plan->num_moes, "expert loads", &loads->all), done);
  MZ_TRY_GOTO(st, mz_new(plan->num_moes, "last steps", &loads->last), done);
  MZ_TRY_GOTO(st, mz_new(experts, "last steps", &loads->numbers), done);
  loads->num_moes = plan->num_moes;
  for (int32_t m = 0, at = 0; m < plan->num_moes; m++) {
    loads->last[m] = loads->numbers + at;
    loads->all[m].num_experts = plan->decl->moes[m].opts.num_experts;
    loads->all[m].routing_bytes = routing_bytes(plan, m);
    at += loads->all[m].num_experts;
  }
  *loads_out = loads;
  loads = NULL;
done:
  mz_loads_destroy(&loads);
  return st;
}

void mz_loads_destroy(mz_loads_t **loads)
{
  if (!*loads) return;
  mz_free((*loads)->all);
  mz_free((*loads)->last);
  mz_free((*loads)->numbers);
  mz_free(*loads);
  *loads = NULL;
}

void mz_loads_take(mz_loads_t *loads, const mz_step_result_t *result)
{
  int64_t now = ++loads->steps, first = now - mz_loads_window(loads);

  for (int32_t m = 0; m < loads->num_moes; m++) {
    mz_expert_load_t *load = &loads->all[m];

    load->routed = result->moes[m].routed;
    load->kept = result->moes[m].kept;
    load->dead = 0;
    for (int32_t e = 0; e < load->num_experts; e++) {
      if (load->kept[e] > 0) loads->last[m][e] = now;
      load->dead += loads->last[m][e] <= first;
    }
  }
}

const mz_expert_load_t *mz_loads_all(const mz_loads_t *loads)
{
  return loads->all;
}

int64_t mz_loads_window(const mz_loads_t *loads)
{
  return mz_min_i64(loads->steps, MZ_LOAD_WINDOW);
}
