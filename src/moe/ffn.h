/* SPDX-License-Identifier: Apache-2.0 */
/* The feed-forward map of a dense MLP (one group) and of experts (a run).
 *
 * R rows of a window, H width, F inner width. What backward needs besides x:
 * GELU keeps the argument of the activation, saved [R, F]; SwiGLU keeps both
 * of its factors as two planes, gate [R, F] then up [R, F]. The activation
 * itself is computed again. Scratch is [R, F] in either pass. */
#ifndef MZ_MOE_FFN_H
#define MZ_MOE_FFN_H

#include "moe/map.h"

#include <moezero/moe.h>

typedef struct mz_ffn {
  mz_ffn_opts_t opts;
  mz_map_t up, gate, down; /* gate: SwiGLU only */
} mz_ffn_t;

/** @return MZ_OK, MZ_ERR_ARG (a size below 1, an unknown activation). */
mz_status_t mz_ffn_check(const mz_ffn_opts_t *opts);

/** Declares the tensors of ffn->opts. @param prefix  dense: "h.0.mlp"; with
 * moe >= 0 the tensors are those of its experts, and prefix is not read. */
mz_status_t mz_ffn_declare(mz_ffn_t *ffn, mz_decl_t *decl, const char *prefix,
                           int32_t block, int32_t moe);

int64_t mz_ffn_saved_width(const mz_ffn_t *ffn);
int64_t mz_ffn_scratch_width(const mz_ffn_t *ffn);
double mz_ffn_operations(const mz_ffn_t *ffn);

mz_status_t mz_ffn_forward(const mz_ffn_t *ffn, const mz_call_t *call,
                           const mz_expert_rows_t *rows);

/** Overwrites saved and scratch. rows->dx may be rows->x or rows->dy: both are
 * read before. */
mz_status_t mz_ffn_backward(const mz_ffn_t *ffn, const mz_call_t *call,
                            const mz_expert_rows_t *rows);

/** The same in two: first dx, which lies apart, then the weights, from rows
 * that nobody wrote in between, of a map that has weights. */
mz_status_t mz_ffn_backward_input(const mz_ffn_t *ffn, const mz_call_t *call,
                                  const mz_expert_rows_t *rows);
mz_status_t mz_ffn_backward_weights(const mz_ffn_t *ffn, const mz_call_t *call,
                                    const mz_expert_rows_t *rows);

#endif
