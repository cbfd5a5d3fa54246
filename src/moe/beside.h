/* SPDX-License-Identifier: Apache-2.0 */
/* The dense feed-forward beside the experts of a MoE layer: a grouped-product
 * expert of one group that all tokens take (mz_ffn), and its mix with what the
 * experts give (kernels/mix.h).
 *
 * T tokens, H width. Forward: the map, any time after the input is there, then
 * the mix behind the combination. Backward: the gradient of the mix before that
 * of the combination, the map's any time after it, and the gradient of the
 * input at the end. The map's steps touch no buffer that is exchanged. */
#ifndef MZ_MOE_BESIDE_H
#define MZ_MOE_BESIDE_H

#include "moe/ffn.h"

/* Ids are -1 where the kind has no such thing. */
typedef struct mz_moe_beside {
  mz_beside_t kind;
  mz_ffn_t ffn;
  int32_t in, out, d_in, d_out; /* the layer's */
  int32_t weight, bias;         /* tensors of the mix's logits */
  int32_t saved;                /* [T, saved width] */
  int32_t scratch[2];           /* [T, scratch width] by mz_pass_t */
  int32_t y;                    /* [T, H] the map's output */
  int32_t moe;                  /* [T, H] the experts' output, where backward
                                   reads it; else that is in out */
  int32_t coef;                 /* [T, 2] fp32 */
  int32_t d;                    /* [T] fp32, gradient of the logit */
  int32_t d_moe;                /* [T, H] */
  int32_t d_y; /* [T, H] gradient of y, then that of the map's input */
} mz_moe_beside_t;

/** Sets kind and all ids to -1. @return MZ_OK, MZ_ERR_ARG (no such kind, an
 * option of the map out of range, another width than @p opts->hidden_size). */
mz_status_t mz_beside_set(mz_moe_beside_t *beside,
                          const mz_moe_layer_opts_t *opts);

/** Declares tensors and buffers of layer @p name; a kind of
 * MZ_BESIDE_NONE: nothing. */
mz_status_t mz_beside_declare(mz_moe_beside_t *beside, mz_decl_t *decl,
                              const char *name, int32_t block);

/** The buffer that the experts' combination writes. */
int32_t mz_beside_combined(const mz_moe_beside_t *beside);
/** The buffer that has its gradient. */
int32_t mz_beside_d_combined(const mz_moe_beside_t *beside);

/** Declares the map's step of a pass, whose function gets @p fn's self. */
mz_status_t mz_beside_step(const mz_moe_beside_t *beside, mz_decl_t *decl,
                           mz_pass_t pass, mz_compute_fn fn);

/** What the functions below touch, added to the steps that call them: the
 * combination of forward, that of backward, and the last step of backward. */
void mz_beside_refs(const mz_moe_beside_t *beside, mz_compute_opts_t *combine);
void mz_beside_grad_refs(const mz_moe_beside_t *beside,
                         mz_compute_opts_t *combine_grad);
void mz_beside_input_refs(const mz_moe_beside_t *beside,
                          mz_compute_opts_t *route_grad);

/** The map, forward and backward. */
mz_status_t mz_beside_forward(const mz_moe_beside_t *beside,
                              const mz_call_t *call);
mz_status_t mz_beside_backward(const mz_moe_beside_t *beside,
                               const mz_call_t *call);
/** out = the mix. */
mz_status_t mz_beside_mix(const mz_moe_beside_t *beside, const mz_call_t *call);
/** Gradients of both sides of the mix and of its weights. */
mz_status_t mz_beside_mix_grad(const mz_moe_beside_t *beside,
                               const mz_call_t *call);
/** d_in += the gradient of the input by the map and by the mix. */
mz_status_t mz_beside_add_input(const mz_moe_beside_t *beside,
                                const mz_call_t *call);

/** Multiply-adds of one token, forward; 0 with MZ_BESIDE_NONE. */
double mz_beside_operations(const mz_moe_beside_t *beside);
/** ", residual MLP" and so on for the start-up print. */
const char *mz_beside_text(const mz_moe_beside_t *beside);

#endif
