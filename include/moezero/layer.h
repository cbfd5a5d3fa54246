/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moezero/layer.h
 * @brief What a layer's function is given: mz_call_t.
 *
 * All pointers are backend memory unless said otherwise, valid during the call
 * only, laid out row-major; on the CPU that is host memory. Letters as in
 * moezero/decl.h. A layer's function reads and writes what its step has named;
 * another buffer's memory may be in use elsewhere, another tensor's pointer
 * NULL. On a rank without tokens T is 0: gradients that are not accumulated are
 * still written, as zeros.
 */
#ifndef MZ_LAYER_H
#define MZ_LAYER_H

#include <moezero/decl.h>
#include <moezero/random.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mz_mode { MZ_MODE_TRAIN, MZ_MODE_EVAL } mz_mode_t;

/** One micro-batch of this rank. T = sequences * sequence_length, may be 0. */
typedef struct mz_micro {
  int64_t num_tokens;      /* T */
  int64_t max_tokens;      /* T of the rank that has most in this micro-batch */
  int32_t sequences;       /* >= 0 */
  int32_t sequence_length; /* S >= 1, positions start at 0 */
  const int32_t *tokens;   /* [T] ids */
  const int32_t *labels;   /* [T] ids; -1: no label */
  const int64_t *samples;  /* [sequences] place in the step's global batch, for
                              random numbers that do not depend on ranks */
  const int32_t *offsets;  /* [2] {0, T}: the rows of a dense layer */
  int32_t host_offsets[2]; /* the same, host */
  double token_scale; /* 1 / valid labels of the whole step; 0 without any */
  int32_t index;      /* of accumulation */
  int32_t accumulation;
} mz_micro_t;

/** Scalars of a step, fp64, in mz_call_t.scalars: layers add to them, but lower
 * the gap to the smallest one seen (the engine starts it at infinity). */
enum {
  MZ_SCALAR_LOSS_SUM = 0, /* of token losses, not divided */
  MZ_SCALAR_MIN_GAP = 1,  /* between the k-th and the next logit of a gate */
  MZ_NUM_SCALARS = 8
};

/**
 * Statistics of a MoE layer in one micro-batch, 8-byte elements: int64
 * routed[E], int64 kept[E], int64 first[E] (routes of first choices), int64
 * tokens, fp64 sum of probabilities [E], fp64 sum of squared log-sum-exp (z).
 * Routed and first before dropping. Element offsets:
 */
#define MZ_STATS_ROUTED(E) 0
#define MZ_STATS_KEPT(E) (E)
#define MZ_STATS_FIRST(E) (2 * (int64_t)(E))
#define MZ_STATS_TOKENS(E) (3 * (int64_t)(E))
#define MZ_STATS_PROBS(E) (3 * (int64_t)(E) + 1)
#define MZ_STATS_Z(E) (4 * (int64_t)(E) + 1)
#define MZ_STATS_ELEMENTS(E) (4 * (int64_t)(E) + 2)

/** The MoE whose step is running; NULL outside of one. */
typedef struct mz_moe_call {
  int32_t moe;
  int32_t capacity;    /* rows an expert takes from this rank at most (C), from
                          the largest rank's tokens; 0 when dropless */
  int32_t ep_rank;     /* this rank in its expert-parallel group */
  void *stats;         /* this rank's statistics, zeroed before the gate */
  const void *total;   /* sums over the data group, in steps that need_stats */
  double total_tokens; /* of total, host */
  const float *bias;   /* [E] on the choice of experts, host; NULL: none */
  double ranks;        /* size of the data group */
  bool saved;          /* rows are in the pool (known after the counts) */
  int64_t local_rows;  /* of this rank's experts, all runs (after the counts) */
} mz_moe_call_t;

/**
 * The current round of the current run: a window of the rows that this rank's
 * experts [first_expert, first_expert + num_experts) receive, in *expert-major*
 * order (expert, then source rank, then send order).
 */
typedef struct mz_window {
  int32_t first_expert; /* global id */
  int32_t num_experts;
  int32_t num_sources;         /* ep_size */
  const int32_t *offsets;      /* [num_experts + 1] rows in the window */
  const int32_t *host_offsets; /* the same, host */
  const int32_t *counts; /* [num_sources, num_experts] rows in the window */
  int64_t rows;          /* host: offsets[num_experts] */
  int64_t max_rows;      /* host: bound that the plan knows */
  int64_t pool_row; /* first row of the window among the layer's pool rows */
} mz_window_t;

typedef struct mz_call {
  mz_mode_t mode;
  int64_t step;  /* optimizer steps done before this one */
  uint64_t seed; /* of the run */
  int32_t layer; /* index of the layer in the declaration */
  const mz_micro_t *micro;
  const mz_kernels_t *kernels;
  mz_stream_t stream;
  void *const *buffers;       /* by buffer id; a pool buffer points to the
                                 layer's first row */
  const void *const *weights; /* by tensor id, NULL when not gathered here */
  void *const *grads;         /* by tensor id, fp32, NULL when not here */
  const uint8_t *accumulate;  /* by tensor id: 0: write every element of the
                                 gradient, 1: add to it */
  double *scalars;            /* [MZ_NUM_SCALARS] add to them */
  const mz_moe_call_t *moe;
  const mz_window_t *window; /* NULL outside of a round */
} mz_call_t;

/** A layer's random numbers of one purpose in this step (mz_random_t). */
#define MZ_CALL_RANDOM(call, purpose)                                          \
  mz_random_make((call)->seed, (uint32_t)(call)->step, (purpose),              \
                 (uint32_t)(call)->layer)

#ifdef __cplusplus
}
#endif
#endif
