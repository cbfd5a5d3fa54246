/* SPDX-License-Identifier: Apache-2.0 */
/* Linear maps on ragged groups of rows: y = act(x W^T + b). A dense layer is
 * one group; the experts of a run are several.
 *
 * G groups, R rows in all, N outputs, K inputs. Group g owns the rows
 * [offsets[g], offsets[g+1]); offsets is int32 [G + 1] in backend memory and
 * may hold empty groups, also all of them. host_offsets has the same numbers in
 * host memory: a backend whose products are started one by one reads them there
 * (on the CPU it may be NULL). max_rows is the host's bound of R.
 * Weights are [N, K] as in a checkpoint; w, b, dw, db are host arrays of G
 * pointers to backend memory. Element type: the table's dtype; dw and db are
 * fp32.
 *
 * experts: the groups are some of more, so the bits of a group do not depend on
 * G: runs of any length give the same. */
#ifndef MZ_KERNELS_LINEAR_H
#define MZ_KERNELS_LINEAR_H

#include <moezero/types.h>

typedef enum mz_epilogue {
  MZ_EPI_NONE,
  MZ_EPI_GELU,  /* y = gelu_tanh(u), u kept in pre */
  MZ_EPI_DGELU, /* of a dgrad: dx = (dy W) * gelu_tanh'(pre) */
} mz_epilogue_t;

typedef struct mz_linear {
  int32_t num_groups; /* G >= 1 */
  bool experts;
  const int32_t *offsets; /* [G + 1] */
  const int32_t *host_offsets;
  int64_t max_rows;
  int64_t n, k;
  const void *const *w; /* [G] of [N, K] */
  const void *const *b; /* [G] of [N]; NULL: no bias */
  const void *x;        /* [R, K] */
  void *y;              /* [R, N] */
  mz_epilogue_t epilogue;
  void *pre; /* [R, N] written with MZ_EPI_GELU */
} mz_linear_t;

/* dx = dy W (epilogue), [R, K]. add: dx += (only with MZ_EPI_NONE). */
typedef struct mz_linear_dgrad {
  int32_t num_groups;
  bool experts;
  const int32_t *offsets, *host_offsets;
  int64_t max_rows;
  int64_t n, k;
  const void *const *w;
  const void *dy; /* [R, N] */
  void *dx;       /* [R, K] */
  mz_epilogue_t epilogue;
  const void *pre; /* [R, K] read with MZ_EPI_DGELU */
  int add;
} mz_linear_dgrad_t;

/* dW_g (+)= dy_g^T x_g, db_g (+)= column sums of dy_g. accumulate[g] 0: write
 * (zeros for an empty group), 1: add. */
typedef struct mz_linear_wgrad {
  int32_t num_groups;
  bool experts;
  const int32_t *offsets, *host_offsets;
  int64_t max_rows;
  int64_t n, k;
  const void *x;                  /* [R, K] */
  const void *dy;                 /* [R, N] */
  void *const *dw;                /* [G] of [N, K] fp32 */
  void *const *db;                /* [G] of [N] fp32; NULL: no bias */
  const uint8_t *accumulate;      /* [G] host, for dw */
  const uint8_t *accumulate_bias; /* [G] host, for db */
} mz_linear_wgrad_t;

/* Elementwise. swiglu: a = silu(gate) * up over rows [R, F], R from
 * rows[0] (int32, backend memory). swiglu_grad gives a again with the
 * gradients. */
typedef struct mz_swiglu {
  const int32_t *rows; /* one number */
  int64_t max_rows, width;
  const void *gate, *up; /* [R, F] */
  void *a;               /* [R, F]; backward: may alias da */
  const void *da;        /* backward: [R, F] */
  void *dgate, *dup;     /* backward: [R, F]; may alias gate, up */
} mz_swiglu_t;

/* gelu_tanh(pre) -> a over rows, to recompute the activation in backward. */
typedef struct mz_gelu {
  const int32_t *rows;
  int64_t max_rows, width;
  const void *pre;
  void *a;
} mz_gelu_t;

#endif
