/* SPDX-License-Identifier: Apache-2.0 */
/* What experts give and what a dense map beside them gives, mixed token by
 * token. fp32 arithmetic whatever the dtype.
 *
 * T tokens, H width: y = c0 moe + c1 side.
 *   MZ_MIX_SOFTMAX  (c0, c1) = softmax(x W^T + b), W [2, H], b [2]
 *   MZ_MIX_SIGMOID  c0 = 1, c1 = sigmoid(x W^T), W [1, H]
 *   MZ_MIX_SUM      c0 = c1 = 1
 * Backward has one number a token, d: the gradient of the logit of c1. That of
 * c0 under softmax is -d. */
#ifndef MZ_KERNELS_MIX_H
#define MZ_KERNELS_MIX_H

#include <moezero/types.h>

typedef enum mz_mix_kind {
  MZ_MIX_SOFTMAX,
  MZ_MIX_SIGMOID,
  MZ_MIX_SUM /* has no gradient of its own: mix_grad does not take it */
} mz_mix_kind_t;

typedef struct mz_mix {
  mz_mix_kind_t kind;
  int64_t num_tokens, width;
  const void *x;     /* [T, H] */
  const void *w, *b; /* of the kind; b NULL: 0 */
  const void *moe;   /* [T, H] */
  const void *side;  /* [T, H] */
  float *coef;       /* [T, 2] (c0, c1): written; MZ_MIX_SUM: NULL */
  void *y;           /* [T, H]; may alias moe */
} mz_mix_t;

/* d = c1 (1 - c1) <dy, side - moe> (MZ_MIX_SIGMOID: <dy, side>), dW (+)= d x
 * and db (+)= d for the row of c1, minus that for the one of c0. Equal bits
 * whatever the number of threads. */
typedef struct mz_mix_grad {
  mz_mix_t forward; /* kind, sizes, x, side, coef; MZ_MIX_SOFTMAX: moe */
  const void *dy;   /* [T, H] */
  void *d_moe;      /* [T, H] c0 dy; MZ_MIX_SOFTMAX alone */
  void *d_side;     /* [T, H] c1 dy */
  float *d;         /* [T] */
  float *dw;        /* as W, fp32 */
  float *db;        /* [2] fp32; NULL: no bias */
  int accumulate_w, accumulate_b;
} mz_mix_grad_t;

/* dx += d_side + d (W of c1 - W of c0); MZ_MIX_SUM: dx += d_side. */
typedef struct mz_mix_dgrad {
  mz_mix_kind_t kind;
  int64_t num_tokens, width;
  const void *w;
  const float *d;     /* [T] */
  const void *d_side; /* [T, H]: the gradient of the map's input */
  void *dx;           /* [T, H] */
} mz_mix_dgrad_t;

#endif
