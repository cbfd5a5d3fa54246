/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer step and what goes over the wire before and after it. */
#ifndef MZ_KERNELS_OPTIM_H
#define MZ_KERNELS_OPTIM_H

#include <moezero/types.h>

/* Elements of a stretch at most. */
enum { MZ_STRETCH = 65536 };

/* A part of one tensor that a rank sums, or updates. */
typedef struct mz_stretch {
  float *w, *m, *v;
  const float *grad;
  void *out;     /* the same weights in the model's dtype; NULL: none */
  int32_t n;     /* elements, <= MZ_STRETCH */
  int32_t group; /* parameter group */
  int32_t tensor;
  int32_t reserved; /* 0 */
} mz_stretch_t;

typedef struct mz_adamw_group {
  double lr, beta1, beta2, eps, decay;
} mz_adamw_group_t;

/* AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101; Kingma and Ba 2014,
 * arXiv:1412.6980): g = factor * grad; m = b1 m + (1-b1) g; v = b2 v + (1-b2)
 * g^2; w -= lr (m/c1 / (sqrt(v/c2) + eps) + decay w), c1 = 1 - b1^t, c2 =
 * 1 - b2^t, t from 1 (bias_correction 0: c1 = c2 = 1). l2: g += decay w first
 * and no decay term. The stretches do not overlap. */
typedef struct mz_adamw {
  const mz_stretch_t *stretches; /* [num_stretches] backend memory */
  int64_t num_stretches;
  const mz_adamw_group_t *groups; /* [num_groups] host */
  int32_t num_groups;             /* >= 1 */
  const float *factor;            /* one number, backend memory */
  int64_t t;
  int l2, bias_correction;
  mz_dtype_t out_dtype;
} mz_adamw_t;

/* out[i] (+)= sum of the ranks' numbers, in the order of the ranks, fp32 adds.
 * Those of rank `place` are own[i], the others' stand in `in`, in[j * stride +
 * i] for the j-th of them; without own all ranks stand in `in`. own may be out.
 */
typedef struct mz_reduce_ranks {
  int32_t num_ranks;
  int64_t n, stride; /* elements of in_dtype */
  const void *in;
  mz_dtype_t in_dtype;
  float *out;
  int accumulate;
  const void *own; /* NULL, or [n] of in_dtype */
  int32_t place;   /* in [0, num_ranks) with own */
} mz_reduce_ranks_t;

/* out[0] = sum of squares of the stretches' grad, in an order that depends on
 * the stretches alone; out[1] = 1 + the tensor of the first stretch whose sum
 * is not finite, 0 without one. */
typedef struct mz_sum_squares {
  const mz_stretch_t *stretches; /* [num_stretches] backend memory */
  int64_t num_stretches;
  double *partial; /* scratch [num_stretches] */
  double *out;     /* [2] */
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
