/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/ffn.h"

#include "base/check.h"
#include "moe/declare.h"

mz_status_t mz_ffn_check(const mz_ffn_opts_t *opts)
{
  MZ_REQUIRE(opts->hidden_size >= 1 && opts->intermediate_size >= 1, MZ_ERR_ARG,
             "hidden_size %" PRId64 " and intermediate_size %" PRId64
             ", need at least 1",
             opts->hidden_size, opts->intermediate_size);
  switch (opts->activation) {
  case MZ_ACT_GELU:
  case MZ_ACT_SWIGLU:
  case MZ_ACT_IDENTITY_TIMES:
    return MZ_OK;
  }
  MZ_FAIL(MZ_ERR_ARG, "no activation %d", (int)opts->activation);
}

static mz_status_t declare_map(mz_decl_t *decl, const char *prefix,
                               const char *suffix, mz_map_opts_t opts,
                               mz_map_t *map_out)
{
  char name[MZ_NAME_MAX];

  opts.prefix = suffix;
  if (opts.moe < 0) {
    MZ_TRY(mz_format_name(name, "%s.%s", prefix, suffix));
    opts.prefix = name;
  }
  return MZ_TRACE(mz_map_declare(decl, &opts, map_out));
}

mz_status_t mz_ffn_declare(mz_ffn_t *ffn, mz_decl_t *decl, const char *prefix,
                           int32_t block, int32_t moe)
{
  const mz_ffn_opts_t *o = &ffn->opts;
  mz_map_t none = {.weight = -1, .bias = -1};
  mz_map_opts_t in = {.n = o->intermediate_size,
                      .k = o->hidden_size,
                      .bias = o->bias,
                      .init_std = o->init_std,
                      .block = block,
                      .moe = moe};
  mz_map_opts_t out = {.n = o->hidden_size,
                       .k = o->intermediate_size,
                       .bias = o->bias,
                       .init_std = o->output_init_std,
                       .block = block,
                       .moe = moe};

  ffn->up = ffn->gate = ffn->down = none;
  if (o->activation == MZ_ACT_IDENTITY_TIMES) return MZ_OK;
  MZ_TRY(declare_map(decl, prefix, "up", in, &ffn->up));
  if (o->activation == MZ_ACT_SWIGLU)
    MZ_TRY(declare_map(decl, prefix, "gate", in, &ffn->gate));
  return MZ_TRACE(declare_map(decl, prefix, "down", out, &ffn->down));
}

int64_t mz_ffn_saved_width(const mz_ffn_t *ffn)
{
  switch (ffn->opts.activation) {
  case MZ_ACT_GELU:
    return ffn->opts.intermediate_size;
  case MZ_ACT_SWIGLU:
    return 2 * ffn->opts.intermediate_size;
  case MZ_ACT_IDENTITY_TIMES:
    break;
  }
  return 0;
}

int64_t mz_ffn_scratch_width(const mz_ffn_t *ffn)
{
  return ffn->opts.activation == MZ_ACT_IDENTITY_TIMES
             ? 0
             : ffn->opts.intermediate_size;
}

double mz_ffn_operations(const mz_ffn_t *ffn)
{
  double matrix =
      (double)ffn->opts.hidden_size * (double)ffn->opts.intermediate_size;

  switch (ffn->opts.activation) {
  case MZ_ACT_GELU:
    return 2 * matrix;
  case MZ_ACT_SWIGLU:
    return 3 * matrix;
  case MZ_ACT_IDENTITY_TIMES:
    break;
  }
  return (double)ffn->opts.hidden_size;
}

static mz_status_t scale_rows(const mz_ffn_t *ffn, const mz_call_t *call,
                              const mz_window_t *window, const void *x, void *y)
{
  mz_scale_rows_t a = {.num_experts = window->num_experts,
                       .first_expert = window->first_expert,
                       .offsets = window->offsets,
                       .max_rows = window->rows,
                       .width = ffn->opts.hidden_size,
                       .x = x,
                       .y = y};

  return MZ_KERNEL(call, scale_rows, &a);
}

static mz_gelu_t gelu_args(const mz_ffn_t *ffn, const mz_expert_rows_t *rows)
{
  const mz_window_t *window = rows->window;
  mz_gelu_t a = {.rows = window->offsets + window->num_experts,
                 .max_rows = window->rows,
                 .width = ffn->opts.intermediate_size,
                 .pre = rows->saved,
                 .a = rows->scratch};
  return a;
}

/* The factors are the two planes of saved, and in backward their gradients
 * replace them; the scratch holds the gradient of the activation, which the
 * activation itself then replaces. */
static mz_swiglu_t swiglu_args(const mz_ffn_t *ffn, const mz_call_t *call,
                               const mz_expert_rows_t *rows)
{
  const mz_window_t *window = rows->window;
  int64_t plane = window->rows * ffn->opts.intermediate_size;
  void *up = mz_at(call, rows->saved, plane);
  mz_swiglu_t a = {.rows = window->offsets + window->num_experts,
                   .max_rows = window->rows,
                   .width = ffn->opts.intermediate_size,
                   .gate = rows->saved,
                   .up = up,
                   .a = rows->scratch,
                   .da = rows->scratch,
                   .dgate = rows->saved,
                   .dup = up};
  return a;
}

mz_status_t mz_ffn_forward(const mz_ffn_t *ffn, const mz_call_t *call,
                           const mz_expert_rows_t *rows)
{
  const mz_window_t *window = rows->window;
  mz_swiglu_t swiglu;

  switch (ffn->opts.activation) {
  case MZ_ACT_IDENTITY_TIMES:
    return MZ_TRACE(scale_rows(ffn, call, window, rows->x, rows->y));
  case MZ_ACT_GELU:
    MZ_TRY(mz_map_forward(&ffn->up, call, window, rows->x, rows->scratch,
                          MZ_EPI_GELU, rows->saved));
    break;
  case MZ_ACT_SWIGLU:
    swiglu = swiglu_args(ffn, call, rows);
    MZ_TRY(mz_map_forward(&ffn->gate, call, window, rows->x, swiglu.dgate,
                          MZ_EPI_NONE, NULL));
    MZ_TRY(mz_map_forward(&ffn->up, call, window, rows->x, swiglu.dup,
                          MZ_EPI_NONE, NULL));
    MZ_TRY(MZ_KERNEL(call, swiglu, &swiglu));
    break;
  }
  return MZ_TRACE(mz_map_forward(&ffn->down, call, window, rows->scratch,
                                 rows->y, MZ_EPI_NONE, NULL));
}

/* --- backward: what flows to the inner width, to the input, to the weights ---
 *
 * GELU: the scratch holds the gradient of its argument, or what weights_out
 * puts there, the activation. */

static mz_status_t inner(const mz_ffn_t *ffn, const mz_call_t *call,
                         const mz_expert_rows_t *rows)
{
  const mz_window_t *window = rows->window;
  mz_swiglu_t swiglu = swiglu_args(ffn, call, rows);

  if (ffn->opts.activation == MZ_ACT_GELU)
    return MZ_TRACE(mz_map_dgrad_gelu(&ffn->down, call, window, rows->dy,
                                      rows->saved, rows->scratch));
  MZ_TRY(mz_map_dgrad(&ffn->down, call, window, rows->dy, rows->scratch));
  return MZ_KERNEL(call, swiglu_grad, &swiglu);
}

static mz_status_t input(const mz_ffn_t *ffn, const mz_call_t *call,
                         const mz_expert_rows_t *rows)
{
  const mz_window_t *window = rows->window;
  mz_swiglu_t swiglu = swiglu_args(ffn, call, rows);

  if (ffn->opts.activation == MZ_ACT_GELU)
    return MZ_TRACE(
        mz_map_dgrad(&ffn->up, call, window, rows->scratch, rows->dx));
  MZ_TRY(mz_map_dgrad(&ffn->up, call, window, swiglu.dup, rows->dx));
  return MZ_TRACE(
      mz_map_dgrad_add(&ffn->gate, call, window, swiglu.dgate, rows->dx));
}

static mz_status_t weights_in(const mz_ffn_t *ffn, const mz_call_t *call,
                              const mz_expert_rows_t *rows)
{
  const mz_window_t *window = rows->window;
  mz_swiglu_t swiglu = swiglu_args(ffn, call, rows);

  if (ffn->opts.activation == MZ_ACT_GELU)
    return MZ_TRACE(
        mz_map_wgrad(&ffn->up, call, window, rows->x, rows->scratch));
  MZ_TRY(mz_map_wgrad(&ffn->up, call, window, rows->x, swiglu.dup));
  return MZ_TRACE(
      mz_map_wgrad(&ffn->gate, call, window, rows->x, swiglu.dgate));
}

static mz_status_t weights_out(const mz_ffn_t *ffn, const mz_call_t *call,
                               const mz_expert_rows_t *rows)
{
  mz_gelu_t gelu = gelu_args(ffn, rows);

  if (ffn->opts.activation == MZ_ACT_GELU) MZ_TRY(MZ_KERNEL(call, gelu, &gelu));
  return MZ_TRACE(
      mz_map_wgrad(&ffn->down, call, rows->window, rows->scratch, rows->dy));
}

mz_status_t mz_ffn_backward(const mz_ffn_t *ffn, const mz_call_t *call,
                            const mz_expert_rows_t *rows)
{
  bool gelu = ffn->opts.activation == MZ_ACT_GELU;

  if (ffn->opts.activation == MZ_ACT_IDENTITY_TIMES)
    return MZ_TRACE(mz_ffn_backward_input(ffn, call, rows));
  if (gelu) MZ_TRY(weights_out(ffn, call, rows)); /* before the scratch goes */
  MZ_TRY(inner(ffn, call, rows));
  if (!gelu) MZ_TRY(weights_out(ffn, call, rows));
  MZ_TRY(weights_in(ffn, call, rows));
  return MZ_TRACE(input(ffn, call, rows)); /* may overwrite x or dy */
}

mz_status_t mz_ffn_backward_input(const mz_ffn_t *ffn, const mz_call_t *call,
                                  const mz_expert_rows_t *rows)
{
  if (ffn->opts.activation == MZ_ACT_IDENTITY_TIMES)
    return MZ_TRACE(scale_rows(ffn, call, rows->window, rows->dy, rows->dx));
  MZ_TRY(inner(ffn, call, rows));
  return MZ_TRACE(input(ffn, call, rows));
}

mz_status_t mz_ffn_backward_weights(const mz_ffn_t *ffn, const mz_call_t *call,
                                    const mz_expert_rows_t *rows)
{
  MZ_TRY(weights_in(ffn, call, rows));
  return MZ_TRACE(weights_out(ffn, call, rows));
}
