/* SPDX-License-Identifier: Apache-2.0 */
/* The MoE layer: what its declaration and the functions of its steps share.
 * T tokens, E experts, k choices, H width. */
#ifndef MZ_MOE_LAYER_IMPL_H
#define MZ_MOE_LAYER_IMPL_H

#include "moe/beside.h"

#include <moezero/moe.h>

/* Buffers of one round; forward and backward have their own, so that they do
 * not live in between. Pool and round buffers hold the same rows: those of the
 * round when the layer's rows are not in the pool. */
typedef struct mz_moe_round {
  int32_t recv;    /* [round, H] as it arrives, source-major; then the experts'
                      output, expert-major */
  int32_t x;       /* [round, H] expert-major */
  int32_t saved;   /* [round, saved_width] */
  int32_t scratch; /* [round, scratch_width] */
  int32_t ret;     /* [round, H] source-major, on its way back */
} mz_moe_round_t;

typedef struct mz_moe_layer {
  mz_moe_layer_opts_t opts; /* moe.name is name below; pointers are copies */
  char name[MZ_NAME_MAX];
  mz_expert_ops_t expert;
  mz_moe_beside_t beside;
  int64_t saved_width, scratch_width;
  int32_t moe;  /* id in the declaration */
  int32_t gate; /* tensor [E, H] */
  bool expert_tensors;
  /* routes, kept from forward to backward */
  int32_t probs, lse, expert_ids, weight, row, kept;
  int32_t send;     /* [T k, H] token side, in send order: x, then the experts'
                       output; backward: its gradient, then that of x. A row
                       comes back to where it was sent from, after it left. */
  int32_t d_weight; /* [T, k] */
  int32_t dlogits;  /* [T, E] */
  int32_t resend;   /* [T k, H] x again, for rows not in the pool */
  int32_t work;     /* [round, H] backward: x as it arrives again; then the
                       gradient of the output, expert-major */
  int32_t pool_x, pool_saved;
  int32_t bias;            /* [E] where kernels read it; -1: none */
  int32_t logits, table;   /* of the tests, likewise */
  mz_moe_round_t round[2]; /* by mz_pass_t */
} mz_moe_layer_t;

/* Functions of the steps (moe_steps.c). */
mz_status_t mz_moe_route(const mz_call_t *call, void *self);
mz_status_t mz_moe_experts(const mz_call_t *call, void *self);
mz_status_t mz_moe_beside(const mz_call_t *call, void *self);
mz_status_t mz_moe_combine(const mz_call_t *call, void *self);
mz_status_t mz_moe_combine_grad(const mz_call_t *call, void *self);
mz_status_t mz_moe_beside_grad(const mz_call_t *call, void *self);
mz_status_t mz_moe_experts_grad(const mz_call_t *call, void *self);
mz_status_t mz_moe_experts_wgrad(const mz_call_t *call, void *self);
mz_status_t mz_moe_route_grad(const mz_call_t *call, void *self);

#endif
