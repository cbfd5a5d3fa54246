/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer step and what goes over the wire before and after it. */
#ifndef MZ_KERNELS_OPTIM_H
#define MZ_KERNELS_OPTIM_H

#include <moezero/types.h>

/* AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101; Kingma and Ba 2014,
 * arXiv:1412.6980): g = factor * grad; m = b1 m + (1-b1) g; v = b2 v + (1-b2)
 * g^2; w -= lr (m/c1 / (sqrt(v/c2) + eps) + decay w), c1 = 1 - b1^t, c2 =
 * 1 - b2^t, t from 1 (bias_correction 0: c1 = c2 = 1). l2: g += decay w first
 * and no decay term. out: the same weights in out_dtype, NULL: none. */
typedef struct mz_adamw {
  int64_t n;
  float *w, *m, *v;
  const float *grad;
  const float *factor; /* one number, backend memory */
  double lr, beta1, beta2, eps, decay;
  int64_t t;
  int l2, bias_correction;
  void *out;
  mz_dtype_t out_dtype;
} mz_adamw_t;

/* out[i] (+)= sum over r of in[r * stride + i], in order of r, fp32 adds. */
typedef struct mz_reduce_ranks {
  int32_t num_ranks;
  int64_t n, stride; /* elements of in_dtype */
  const void *in;
  mz_dtype_t in_dtype;
  float *out;
  int accumulate;
} mz_reduce_ranks_t;

/* *out += sum of squares, fp64, in an order that depends on n alone. */
typedef struct mz_sum_squares {
  int64_t n;
  const float *x;
  double *out;
} mz_sum_squares_t;

/* Copies between unit-major [unit][rank][len_u] and rank-major
 * [rank][unit][len_u] order of a run's shards. */
typedef struct mz_reorder {
  int32_t num_ranks, num_units;
  const int64_t *lengths; /* [num_units] host: elements a shard */
  size_t element_bytes;
  const void *src;
  void *dst;
  int to_rank_major;
} mz_reorder_t;

/* fp32 to or from another type, rounded to nearest, ties to even; or a copy. */
typedef struct mz_convert {
  int64_t n;
  const void *src;
  mz_dtype_t src_dtype;
  void *dst;
  mz_dtype_t dst_dtype;
} mz_convert_t;

#endif
