/* SPDX-License-Identifier: Apache-2.0 */
/* The gate, and the rows it sends. fp32 arithmetic whatever the dtype.
 *
 * T tokens, E experts, K choices, H width, C capacity. A *route* is (token t,
 * choice j), number t * K + j. Send order: ascending expert, within an expert
 * ascending route. Formulas: moezero/moe.h; spec of statistics:
 * moezero/layer.h.
 *
 * The *place* of token t is samples[t / S] * S + t % S, the same on any ranks.
 * Random numbers: selection of route (t, j): uniform(place * K + j); jitter of
 * x[t, h]: uniform(place * H + h); noise of a choice of expert e:
 * gumbel(place * E + e). A field that is 0 does nothing. */
#ifndef MZ_KERNELS_GATE_H
#define MZ_KERNELS_GATE_H

#include <moezero/moe.h>
#include <moezero/random.h>
#include <moezero/types.h>

typedef struct mz_gate {
  int64_t num_tokens;
  int32_t num_experts, k;
  int64_t width;
  const void *x;              /* [T, H], table dtype */
  const void *w;              /* [E, H], table dtype */
  const float *fixed_logits;  /* [E] or NULL */
  const int32_t *route_table; /* or NULL: token id -> first choice; further
                                 choices follow cyclically */
  const int32_t *tokens;      /* [T], with route_table */
  int32_t capacity;           /* C; 0: dropless */
  mz_drop_policy_t policy;
  mz_random_t random;     /* MZ_DROP_RANDOM: key of route (t, j) is
                             uniform((samples[t / S] * S + t % S) * K + j) */
  const int64_t *samples; /* backend memory */
  int32_t sequence;       /* S */
  int norm_topk;
  mz_score_t score;
  float temperature; /* > 0: logits are divided by it; 0: by 1 */
  float jitter;      /* in [0, 1): x[t, h] *= 1 - jitter + 2 jitter uniform */
  mz_random_t jitter_random;
  mz_choice_noise_t choice_noise;
  mz_random_t choice_random;
  const float *bias;   /* [E] or NULL: choices by gate + bias; then no noise of
                          the choice */
  const int32_t *used; /* [T] or NULL; 0: a pad, which has no route; it counts
                          among the tokens and in the sums of gates */
  /* out */
  float *probs;    /* [T, E] gates */
  float *lse;      /* [T] log-sum-exp of the logits */
  int32_t *expert; /* [T, K] best first */
  float *weight;   /* [T, K]; 0 for a dropped route */
  int32_t *row;    /* [T, K] row in send order; -1: dropped, or a pad */
  int32_t *kept;   /* [E] rows to each expert */
  void *stats;     /* this rank's statistics: added to */
  double *min_gap; /* one number in backend memory: min with the smallest
                      distance of the last one chosen to the best one left, in
                      what it was chosen by (with a drawn second one also of
                      the first one to the next logit); untouched when K = E */
} mz_gate_t;

/* send[row] = x[t] for every kept route; rows of E * ... in send order. */
typedef struct mz_permute {
  int64_t num_tokens, width;
  int32_t k;
  const int32_t *row; /* [T, K] */
  const void *x;      /* [T, H] */
  void *send;         /* [rows, H] */
} mz_permute_t;

/* y[t] = sum over kept j of weight[t,j] * back[row[t,j]], in order of j, fp32
 * inside; a token without a route gets 0. */
typedef struct mz_combine {
  int64_t num_tokens, width;
  int32_t k;
  const int32_t *row;
  const float *weight;
  const void *back; /* [rows, H] */
  void *y;          /* [T, H] */
} mz_combine_t;

/* d_send[row[t,j]] = weight[t,j] * dy[t]; d_weight[t,j] = <dy[t], back[row]>,
 * 0 for a dropped route. */
typedef struct mz_combine_grad {
  mz_combine_t forward; /* row, weight, back, sizes */
  const void *dy;       /* [T, H] */
  void *d_send;         /* [rows, H]; may alias back */
  float *d_weight;      /* [T, K] */
} mz_combine_grad_t;

/* dx[t] = sum over kept j of d_row[row[t,j]], in order of j (written). */
typedef struct mz_permute_grad {
  int64_t num_tokens, width;
  int32_t k;
  const int32_t *row;
  const void *d_row; /* [rows, H] */
  void *dx;          /* [T, H] */
} mz_permute_grad_t;

/* d logits from d_weight, balance and z terms; then dx += dlogits W and
 * dw (+)= dlogits^T x, with x and dx times the factors of jitter. Weights:
 * w_j = g_j (k = 1 or norm_topk 0), else w_j = g_j / den over kept routes,
 * whose gradient is (d_j - sum_i w_i d_i) / den, 0 when den <= 2^-23 (den
 * clamped). Balance terms, by the shares p = g / sum of the token's g (softmax:
 * p = g): dL/dp[t,e] += aux_scale * aux_counts[e]
 *               + sums_scale * (aux_sums[e] - sums_mean). */
typedef struct mz_gate_grad {
  mz_gate_t forward; /* inputs and outputs of the forward call */
  const float *d_weight;
  double aux_scale;          /* 0: none */
  const int64_t *aux_counts; /* [E] */
  double sums_scale;         /* 0: none */
  const double *aux_sums;    /* [E] sums of p */
  double sums_mean;          /* of aux_sums */
  double z_scale; /* dL/dlogit[t,e] += z_scale * 2 * lse[t] * g[t,e]; softmax
                     alone */
  float *dlogits; /* scratch [T, E] */
  void *dx;       /* [T, H] added to */
  float *dw;      /* [E, H] */
  int accumulate;
} mz_gate_grad_t;

/* Source-major rows <-> expert-major rows of one window (mz_window_t). */
typedef struct mz_regroup {
  int32_t num_sources, num_experts;
  const int32_t *counts;  /* [num_sources, num_experts] */
  const int32_t *offsets; /* [num_experts + 1] */
  int64_t max_rows, width;
  const void *src;
  void *dst;
  int to_source_major;
} mz_regroup_t;

/* y[r] = (first_expert + e + 1) * x[r]: the expert of the tests. */
typedef struct mz_scale_rows {
  int32_t num_experts, first_expert;
  const int32_t *offsets;
  int64_t max_rows, width;
  const void *x;
  void *y;
} mz_scale_rows_t;

#endif
