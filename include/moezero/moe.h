/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moezero/moe.h
 * @brief The MoE layer: a gate and any expert of equal input and output width.
 *
 * Letters: T tokens, E experts over all ranks, k choices, H width, C capacity.
 *
 * Gate (fp32 whatever the model's dtype): logits = x Wg^T / temperature; g =
 * softmax(logits), or sigmoid(logits) each; the k largest gates of a token,
 * equal ones to the lower id. Noise, in training alone: jitter multiplies every
 * element of x by a number around 1; a drawn choice takes the largest of logits
 * + Gumbel noise and leaves gates and weights clean. Capacity, when tokens
 * drop: C = max(min_capacity, ceil(fl32(fl32(T/E) * fl32(cf * k)))), T from the
 * largest rank, or a number that is given. Weights: k = 1: the gate itself; k
 * >= 2 with norm_topk: divided by max(sum of the kept gates, 2^-23).
 *
 * Balance losses of f = routed / (T k), f1 = first choices / T and P = mean
 * share, where a token's share is p = g / sum g (softmax: g itself). Routed and
 * first are counted before dropping.
 *   load_balancing  E * sum_e f_e P_e: Fedus et al. 2021 (arXiv:2101.03961) eq.
 *                   4 for k choices. 1 when balanced.
 *   first_choice    E * sum_e f1_e P_e: Lepikhin et al. 2020 (arXiv:2006.16668)
 *                   sec. 2.2; with k = 1 the same.
 *   squared         sum_e (P_e - 1/E)^2. P sums to 1, so 1/E is what balance
 *                   means; another target, such as 1/k, adds a constant to the
 *                   value and nothing to the gradient.
 * Scope "group": f, P and T over all data-parallel ranks of the micro-batch;
 * "rank": of each rank, averaged. z-loss: Zoph et al. 2022 (arXiv:2202.08906)
 * eq. 5, mean of logsumexp(logits)^2; of softmax alone.
 *
 * Balance without a loss (bias_update_rate u): Wang et al. 2024
 * (arXiv:2408.15664) alg. 1. Experts are chosen by g + b, weights are of g;
 * after every update b_e += u * sign(mean count - count_e), counts routed over
 * all ranks and micro-batches of the step. b starts at 0 and is saved in
 * checkpoints.
 */
#ifndef MZ_MOE_H
#define MZ_MOE_H

#include <moezero/layer.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Rows of a run of experts, expert-major; offsets as in mz_window_t. */
typedef struct mz_expert_rows {
  const mz_window_t *window;
  const void *x;  /* [rows, H] */
  void *saved;    /* [rows, saved_width]: written forward, read backward, which
                     may overwrite it */
  void *scratch;  /* [rows, scratch_width] */
  void *y;        /* forward: [rows, H] output */
  const void *dy; /* backward: [rows, H] gradient of the output; may be
                     overwritten: the layer does not read it again */
  void *dx;       /* backward: [rows, H] gradient of the input */
} mz_expert_rows_t;

/**
 * An expert: a map of H to H. Its tensors are declared once for all experts of
 * the layer with mz_decl_expert_tensor. Weights of expert j of the run:
 * call->weights[first + window->first_expert + j], an array of consecutive
 * pointers; gradients likewise, with call->accumulate: 0 until the expert has
 * had rows since its gradient began, in whichever round they come: then
 * backward writes it, where there are no rows with zeros.
 */
typedef struct mz_expert_ops {
  const char *name; /* for the start-up print; borrowed until the layer's end */
  mz_status_t (*declare)(void *self, mz_decl_t *decl, int32_t moe);
  /** Model-dtype elements a row that backward needs besides x. */
  int64_t (*saved_width)(const void *self);
  int64_t (*scratch_width)(const void *self);
  mz_status_t (*forward)(void *self, const mz_call_t *call,
                         const mz_expert_rows_t *rows);
  /** Writes dx; without backward_weights adds to the gradients as well. */
  mz_status_t (*backward)(void *self, const mz_call_t *call,
                          const mz_expert_rows_t *rows);
  /** Adds to the gradients, behind backward and while dx travels. The rows are
   * as backward left them, without dx (NULL); weights are there. May be NULL.
   */
  mz_status_t (*backward_weights)(void *self, const mz_call_t *call,
                                  const mz_expert_rows_t *rows);
  /** Multiply-adds of one row, forward. */
  double (*operations)(const void *self);
  void (*destroy)(void *self); /* may be NULL */
} mz_expert_ops_t;

typedef enum mz_drop_policy {
  MZ_DROP_PROBS,    /* the most probable stay; equal ones: the earlier token */
  MZ_DROP_POSITION, /* the earlier tokens stay */
  MZ_DROP_RANDOM    /* random token selection */
} mz_drop_policy_t;

typedef enum mz_score {
  MZ_SCORE_SOFTMAX, /* gates of a token sum to 1 */
  MZ_SCORE_SIGMOID  /* each gate by itself: Wang et al. 2024 (arXiv:2408.15664)
                     */
} mz_score_t;

/** Choices by the largest of logits + Gumbel noise: draws with the
 * probabilities of softmax, without repetition. */
typedef enum mz_choice_noise {
  MZ_CHOICE_GREEDY,
  MZ_CHOICE_DRAWN,        /* RSample */
  MZ_CHOICE_DRAWN_SECOND, /* the first one greedy, the others drawn among the
                             rest */
} mz_choice_noise_t;

typedef enum mz_activation {
  MZ_ACT_GELU,   /* tanh form: Hendrycks and Gimpel 2016, arXiv:1606.08415 */
  MZ_ACT_SWIGLU, /* silu(x Wg^T) * (x Wu^T): Shazeer 2020, arXiv:2002.05202 */
  MZ_ACT_IDENTITY_TIMES /* tests: expert e returns (e + 1) x; no weights */
} mz_activation_t;

/** A feed-forward map of rows [R, hidden_size]. */
typedef struct mz_ffn_opts {
  int64_t hidden_size, intermediate_size; /* each at least 1 */
  mz_activation_t activation;
  bool bias;
  /* deviations of the first matrix, or two, and of the last; 0: zeros */
  double init_std, output_init_std;
} mz_ffn_opts_t;

/** A dense feed-forward map beside the experts, that all tokens take. */
typedef enum mz_beside {
  MZ_BESIDE_NONE,
  /* c0 experts(x) + c1 map(x), (c0, c1) = softmax(x Wc^T + bc): DeepSpeed's
     residual MoE (Rajbhandari et al. 2022, arXiv:2201.05596) */
  MZ_BESIDE_RESIDUAL,
  /* experts(x) + map(x): Dai et al. 2024 (arXiv:2401.06066) */
  MZ_BESIDE_SHARED,
  MZ_BESIDE_SHARED_GATED /* experts(x) + sigmoid(x w^T) map(x): Qwen2-MoE */
} mz_beside_t;

typedef struct mz_moe_layer_opts {
  mz_moe_opts_t moe;   /* routing, as the plan sees it */
  int64_t hidden_size; /* H */
  int32_t block;       /* unit of the gate's weight */
  double init_std;     /* of the gate's weight */
  mz_drop_policy_t drop_policy;
  bool norm_topk; /* k >= 2: weights divided by their sum after dropping */
  mz_score_t score;
  /* Logits are divided by a number that goes from temperature to
     temperature_end in temperature_steps optimizer steps and then stays; with 0
     steps it is temperature, where 0 means 1. All >= 0. */
  double temperature, temperature_end;
  int64_t temperature_steps;
  /* In training alone: */
  double jitter;                  /* in [0, 1): half the width of its factors */
  mz_choice_noise_t choice_noise; /* not with moe.bias_update_rate */
  bool has_pads;   /* a token with 0 in used is a pad: it has no route, so its
                      experts' output is 0, but it counts as a token */
  int32_t used;    /* buffer [T] int32, written before; with has_pads */
  int32_t in, out; /* buffers [T, H] of the model's dtype */
  int32_t d_in, d_out; /* their gradients; d_in is written, d_out read */
  mz_beside_t beside;
  /* of the map beside: its hidden_size is H; not of MZ_ACT_IDENTITY_TIMES */
  mz_ffn_opts_t beside_ffn;
  const mz_expert_ops_t *expert; /* copied */
  void *expert_self;             /* owned by the layer from here on, also when
                                    mz_moe_layer returns an error */
  const float *fixed_logits;     /* tests: [E], copied; NULL: none */
  const int32_t *route_table;    /* tests: [route_tokens] first choice by token
                                    id, copied; NULL: none */
  int64_t route_tokens;
} mz_moe_layer_opts_t;

/**
 * Declares a MoE layer: its gate's weight "<name>.gate.weight" [E, H], its
 * experts' tensors "<name>.experts.<e>.<suffix>", its steps. Beside the
 * experts: MZ_BESIDE_RESIDUAL "<name>.residual." with the tensors of
 * mz_ffn_expert, "<name>.coefficient.weight" [2, H] and ".bias" [2];
 * MZ_BESIDE_SHARED "<name>.shared." likewise, gated also
 * "<name>.shared_gate.weight" [1, H]. These are dense, of the layer's block.
 * Not collective, the same on all ranks.
 * @return MZ_OK, MZ_ERR_ARG (an option out of range), MZ_ERR_NOMEM, and what
 * the expert's declare returns.
 */
mz_status_t mz_moe_layer(mz_decl_t *decl, const mz_moe_layer_opts_t *opts);

/**
 * The feed-forward expert: tensors up.weight [F, H], up.bias [F], down.weight
 * [H, F], down.bias [H]; with SwiGLU also gate.weight [F, H] and
 * gate.bias [F].
 * @param[out] ops_out, self_out  For mz_moe_layer_opts_t; self is owned by the
 * caller until a layer takes it.
 * @return MZ_OK, MZ_ERR_ARG (a size below 1, an unknown activation),
 * MZ_ERR_NOMEM.
 */
mz_status_t mz_ffn_expert(const mz_ffn_opts_t *opts, mz_expert_ops_t *ops_out,
                          void **self_out);

/**
 * Value of the balance loss of one micro-batch (coefficient not applied).
 * @param stats  [num_ranks] statistics of E experts (moezero/layer.h), in rank
 * order, host; those of a rank begin stride_elements 8-byte elements after
 * those of the one before. @return 0 without tokens. Not collective.
 */
double mz_moe_aux_value(const mz_moe_opts_t *opts, const void *stats,
                        int num_ranks, int64_t stride_elements);
/** Likewise the router z-loss. */
double mz_moe_z_value(const mz_moe_opts_t *opts, const void *stats,
                      int num_ranks, int64_t stride_elements);

#ifdef __cplusplus
}
#endif
#endif
