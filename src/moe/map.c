/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/map.h"

#include "base/check.h"
#include "moe/declare.h"

static mz_status_t declare_one(mz_decl_t *decl, const mz_map_opts_t *opts,
                               const char *suffix, mz_tensor_opts_t tensor,
                               int32_t *tensor_out)
{
  char name[MZ_NAME_MAX];

  MZ_TRY(mz_format_name(name, "%s.%s", opts->prefix, suffix));
  tensor.name = name;
  tensor.block = opts->block;
  if (opts->moe < 0) return MZ_TRACE(mz_decl_tensor(decl, &tensor, tensor_out));
  return MZ_TRACE(mz_decl_expert_tensor(decl, opts->moe, &tensor, tensor_out));
}

mz_status_t mz_map_declare(mz_decl_t *decl, const mz_map_opts_t *opts,
                           mz_map_t *map_out)
{
  mz_map_t map = {.n = opts->n,
                  .k = opts->k,
                  .experts = opts->moe >= 0,
                  .weight = -1,
                  .bias = -1};

  MZ_TRY(declare_one(decl, opts, "weight",
                     (mz_tensor_opts_t){.ndim = 2,
                                        .shape = {opts->n, opts->k},
                                        .init = MZ_INIT_NORMAL,
                                        .init_std = opts->init_std,
                                        .param_group = MZ_GROUP_DECAY},
                     &map.weight));
  if (opts->bias)
    MZ_TRY(declare_one(decl, opts, "bias",
                       (mz_tensor_opts_t){.ndim = 1,
                                          .shape = {opts->n},
                                          .init = MZ_INIT_ZERO,
                                          .param_group = MZ_GROUP_NO_DECAY},
                       &map.bias));
  *map_out = map;
  return MZ_OK;
}

mz_status_t mz_map_forward(const mz_map_t *map, const mz_call_t *call,
                           const mz_window_t *window, const void *x, void *y,
                           mz_epilogue_t epilogue, void *pre)
{
  int32_t first = window->first_expert;
  mz_linear_t a = {.num_groups = window->num_experts,
                   .experts = map->experts,
                   .offsets = window->offsets,
                   .host_offsets = window->host_offsets,
                   .max_rows = window->rows,
                   .n = map->n,
                   .k = map->k,
                   .w = call->weights + map->weight + first,
                   .b =
                       map->bias < 0 ? NULL : call->weights + map->bias + first,
                   .x = x,
                   .y = y,
                   .epilogue = epilogue,
                   .pre = pre};

  return MZ_KERNEL(call, linear, &a);
}

mz_status_t mz_map_wgrad(const mz_map_t *map, const mz_call_t *call,
                         const mz_window_t *window, const void *x,
                         const void *dy)
{
  int32_t first = window->first_expert;
  mz_linear_wgrad_t a = {.num_groups = window->num_experts,
                         .experts = map->experts,
                         .offsets = window->offsets,
                         .host_offsets = window->host_offsets,
                         .max_rows = window->rows,
                         .n = map->n,
                         .k = map->k,
                         .x = x,
                         .dy = dy,
                         .dw = call->grads + map->weight + first,
                         .accumulate = call->accumulate + map->weight + first};

  if (map->bias >= 0) {
    a.db = call->grads + map->bias + first;
    a.accumulate_bias = call->accumulate + map->bias + first;
  }
  return MZ_KERNEL(call, linear_wgrad, &a);
}

static mz_linear_dgrad_t dgrad_args(const mz_map_t *map, const mz_call_t *call,
                                    const mz_window_t *window, const void *dy,
                                    void *dx)
{
  mz_linear_dgrad_t a = {.num_groups = window->num_experts,
                         .experts = map->experts,
                         .offsets = window->offsets,
                         .host_offsets = window->host_offsets,
                         .max_rows = window->rows,
                         .n = map->n,
                         .k = map->k,
                         .w =
                             call->weights + map->weight + window->first_expert,
                         .dy = dy,
                         .dx = dx,
                         .epilogue = MZ_EPI_NONE};
  return a;
}

mz_status_t mz_map_dgrad(const mz_map_t *map, const mz_call_t *call,
                         const mz_window_t *window, const void *dy, void *dx)
{
  mz_linear_dgrad_t a = dgrad_args(map, call, window, dy, dx);

  return MZ_KERNEL(call, linear_dgrad, &a);
}

mz_status_t mz_map_dgrad_add(const mz_map_t *map, const mz_call_t *call,
                             const mz_window_t *window, const void *dy,
                             void *dx)
{
  mz_linear_dgrad_t a = dgrad_args(map, call, window, dy, dx);

  a.add = 1;
  return MZ_KERNEL(call, linear_dgrad, &a);
}

mz_status_t mz_map_dgrad_gelu(const mz_map_t *map, const mz_call_t *call,
                              const mz_window_t *window, const void *dy,
                              const void *pre, void *dx)
{
  mz_linear_dgrad_t a = dgrad_args(map, call, window, dy, dx);

  a.epilogue = MZ_EPI_DGELU;
  a.pre = pre;
  return MZ_KERNEL(call, linear_dgrad, &a);
}

mz_window_t mz_token_window(const mz_call_t *call)
{
  mz_window_t window = {.num_experts = 1,
                        .num_sources = 1,
                        .offsets = call->micro->offsets,
                        .host_offsets = call->micro->host_offsets,
                        .rows = call->micro->num_tokens,
                        .max_rows = call->micro->num_tokens};
  return window;
}
