/* SPDX-License-Identifier: Apache-2.0 */
/* GPT's layers but the MoE layer: each declares its tensors, the buffers that
 * are its own and one compute step each way. The composition (gpt.c) declares
 * the buffers between layers and passes their ids.
 *
 * T tokens of a micro-batch, H width, V vocabulary, F inner width; A query
 * heads, G key/value heads, D head width. Buffers are [T, H] of the model's
 * dtype unless said otherwise. `d_` marks the gradient of a buffer; -1 means no
 * such buffer. All functions: not collective; errors as mz_decl_tensor. */
#ifndef MZ_MODEL_LAYERS_H
#define MZ_MODEL_LAYERS_H

#include "kernels/norm.h"

#include <moezero/decl.h>
#include <moezero/moe.h>

/** Token and position embedding; also writes the row counts that every dense
 * layer reads. */
typedef struct mz_embedding_opts {
  int64_t vocab_size, hidden_size;
  int64_t positions; /* learned ones; 0: none */
  int32_t block;
  double init_std;
  double dropout; /* in [0, 1) */
  int32_t x;      /* written */
  int32_t d_x;    /* read backward */
} mz_embedding_opts_t;

mz_status_t mz_embedding_declare(mz_decl_t *decl,
                                 const mz_embedding_opts_t *opts);

/** sum = x + dropout(y), h = norm(sum). Backward: d_sum (+)= norm'(d_h), and
 * d_y is the gradient of y where it differs from d_sum. */
typedef struct mz_norm_opts {
  const char *prefix; /* "h.3.ln_1": also the layer's name */
  int64_t hidden_size;
  mz_norm_kind_t kind;
  double eps;
  bool bias; /* LayerNorm only */
  int32_t block;
  double dropout; /* of y */
  int32_t x, y;   /* read; y -1: sum is x */
  int32_t sum;    /* written when there is a y */
  int32_t h;      /* written */
  int32_t d_h;    /* read backward */
  int32_t d_sum;  /* backward: added to, or written when last */
  int32_t d_y;    /* written with dropout; else -1 */
  bool last;      /* nothing else uses sum: d_sum is not read */
} mz_norm_opts_t;

mz_status_t mz_norm_declare(mz_decl_t *decl, const mz_norm_opts_t *opts);

/** Causal self-attention with its two linear maps. */
typedef struct mz_attention_opts {
  const char *prefix; /* "h.3.attn" */
  int64_t hidden_size;
  int32_t heads, kv_heads; /* A, G; A divides H, G divides A */
  double rope_theta;       /* 0: no rotary positions */
  bool qkv_bias, proj_bias;
  int32_t block;
  double init_std, output_init_std;
  int32_t in, out; /* read, written */
  int32_t d_out;   /* read backward */
  int32_t d_in;    /* written backward; may be in */
} mz_attention_opts_t;

mz_status_t mz_attention_declare(mz_decl_t *decl,
                                 const mz_attention_opts_t *opts);

/** The dense feed-forward map. */
typedef struct mz_mlp_opts {
  const char *prefix; /* "h.3.mlp" */
  mz_ffn_opts_t ffn;
  int32_t block;
  int32_t in, out; /* read, written */
  int32_t d_out;   /* read backward */
  int32_t d_in;    /* written backward; may be in */
} mz_mlp_opts_t;

mz_status_t mz_mlp_declare(mz_decl_t *decl, const mz_mlp_opts_t *opts);

/** Logits and cross-entropy; in training the loss comes with the backward step,
 * so that each chunk of logits is computed once. */
typedef struct mz_head_opts {
  const char *tied; /* a tensor [V, H] to borrow; NULL: lm_head.weight */
  int64_t vocab_size, hidden_size;
  int32_t block;
  double init_std;
  int64_t chunk_rows; /* tokens whose logits exist at a time */
  int32_t in;         /* read */
  int32_t d_in;       /* written backward; may be in */
  float
      *logits_out; /* NULL, or for generation: host [V], borrowed. Those of the
                     last token go there, instead of a loss and gradients */
} mz_head_opts_t;

mz_status_t mz_head_declare(mz_decl_t *decl, const mz_head_opts_t *opts);

#endif
