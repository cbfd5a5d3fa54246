/* SPDX-License-Identifier: Apache-2.0 */
/* Causal self-attention, softmax(q k^T / sqrt(D)) v, that never stores S x S
 * for all heads (Dao et al. 2022, arXiv:2205.14135, alg. 1).
 *
 * B sequences of S tokens, T = B * S; A query heads, G key/value heads (G
 * divides A), D head width, at most 256. qkv is [T, (A + 2 G) * D]: query
 * heads, then key heads, then value heads. Statistics are fp32. */
#ifndef MZ_KERNELS_ATTENTION_H
#define MZ_KERNELS_ATTENTION_H

#include <moezero/types.h>

typedef struct mz_attention {
  int32_t batch;      /* B >= 0 */
  int32_t sequence;   /* S >= 1 */
  int32_t heads;      /* A */
  int32_t kv_heads;   /* G */
  int32_t head_width; /* D */
  const void *qkv;
  void *out;  /* [T, A * D] */
  float *lse; /* [A, T] log-sum-exp of the scaled scores; only a backend's own
                 backward reads it: "/cuda" has it as [B, A, S] */
} mz_attention_t;

typedef struct mz_attention_grad {
  mz_attention_t forward; /* qkv, out, lse are read */
  const void *dout;       /* [T, A * D] */
  void *dqkv;             /* [T, (A + 2 G) * D], written */
  float *delta;           /* [A, T] scratch: rowsum(dout * out); likewise */
} mz_attention_grad_t;

/* Rotary positions (Su et al. 2021, arXiv:2104.09864), in place on the query
 * and key heads of qkv. Pairs are (i, i + D/2), angle p * theta^(-2i/D).
 * inverse: rotate back (the gradient). D is even. */
typedef struct mz_rope {
  int32_t batch, sequence, heads, kv_heads, head_width;
  double theta;
  int inverse;
  void *qkv;
} mz_rope_t;

#endif
