/* SPDX-License-Identifier: Apache-2.0 */
/* Residual add and normalisation in one pass.
 *
 * T rows of H. Forward: s = x + dropout(y) (y NULL: s = x), h = norm(s).
 * LayerNorm (Ba et al. 2016, arXiv:1607.06450): (s - mean) * rstd * w + b;
 * RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467): s * rstd * w. mean and
 * rstd are fp32 [T]. Dropout: element (t, c) of the rank is element
 * i = (samples[t / S] * S + t % S) * H + c of the random stream; it stays when
 * uniform(i) >= p and is scaled by 1 / (1 - p). */
#ifndef MZ_KERNELS_NORM_H
#define MZ_KERNELS_NORM_H

#include <moezero/random.h>
#include <moezero/types.h>

typedef enum mz_norm_kind { MZ_NORM_LAYER, MZ_NORM_RMS } mz_norm_kind_t;

typedef struct mz_dropout {
  double p; /* in [0, 1); 0: off, nothing else is read */
  mz_random_t random;
  const int64_t *samples; /* [sequences] backend memory */
  int32_t sequence;       /* S */
} mz_dropout_t;

typedef struct mz_add_norm {
  mz_norm_kind_t kind;
  int64_t rows, width;
  double eps;
  const void *x; /* [T, H] */
  const void *y; /* [T, H] or NULL */
  mz_dropout_t dropout;
  void *sum;     /* [T, H]; may alias x; with y NULL may be NULL (not stored) */
  void *h;       /* [T, H]; NULL: only the sum */
  const void *w; /* [H] */
  const void *b; /* [H] or NULL */
  float *mean;   /* [T]; not written by RMSNorm */
  float *rstd;   /* [T] */
} mz_add_norm_t;

/* Backward: d = (add ? d_sum : 0) + norm'(dh); d_sum := d; with dropout p > 0
 * also dy := d * mask / (1 - p), otherwise dy is d_sum itself (dy ignored).
 * dw, db fp32 [H]; deterministic whatever the number of threads. */
typedef struct mz_add_norm_grad {
  mz_norm_kind_t kind;
  int64_t rows, width;
  const void *sum; /* [T, H] */
  const void *dh;  /* [T, H] */
  const void *w;   /* [H] */
  const float *mean, *rstd;
  int add;
  void *d_sum; /* [T, H] */
  mz_dropout_t dropout;
  void *dy;       /* [T, H] */
  float *dw, *db; /* db NULL: no bias */
  int accumulate_w, accumulate_b;
  float *partial; /* scratch, [MZ_NORM_PARTIALS, 2, H] */
} mz_add_norm_grad_t;

/* Rows of the scratch; a backend may use fewer, in an order that does not
 * depend on timing. */
enum { MZ_NORM_PARTIALS = 256 };

/* x *= mask / (1 - p), in place on [rows, width]. */
typedef struct mz_dropout_apply {
  int64_t rows, width;
  mz_dropout_t dropout;
  void *x;
} mz_dropout_apply_t;

#endif
