/* SPDX-License-Identifier: Apache-2.0 */
/* Token and position embedding; the head with its loss.
 * T tokens in sequences of S, V vocabulary, H width. */
#ifndef MZ_KERNELS_EMBEDDING_H
#define MZ_KERNELS_EMBEDDING_H

#include "kernels/norm.h"

#include <moezero/types.h>

typedef struct mz_embedding {
  int64_t num_tokens, width, vocab, positions;
  int32_t sequence;      /* S <= positions */
  const int32_t *tokens; /* [T] in [0, V) */
  const void *wte;       /* [V, H] */
  const void *wpe;       /* [positions, H] or NULL */
  mz_dropout_t dropout;
  void *x; /* [T, H] */
} mz_embedding_t;

/* Sums in token order, so equal bits whatever the threads. Writes or adds to
 * every element of dwte [V, H] and dwpe [positions, H], fp32. With dropout, dx
 * is masked on the fly. */
typedef struct mz_embedding_grad {
  mz_embedding_t forward; /* tokens, sizes, dropout */
  const void *dx;         /* [T, H] */
  float *dwte, *dwpe;
  int accumulate_te, accumulate_pe;
} mz_embedding_grad_t;

/* Cross-entropy of x W^T against labels, in chunks of rows, so that logits
 * exist for one chunk only. loss = sum over labelled rows of
 * logsumexp(logits) - logits[label], added to *loss (fp64, rows in order).
 * With dx: dx = scale * (softmax - onehot) W, rows without a label give 0;
 * dw (+)= scale * (softmax - onehot)^T x. */
typedef struct mz_xent {
  int64_t rows, width, vocab;
  const void *x;         /* [T, H] */
  const void *w;         /* [V, H] */
  const int32_t *labels; /* [T], -1: none; NULL: no loss, logits keeps those of
                            the last chunk */
  double scale;
  double *loss; /* one number, backend memory */
  void *dx;     /* [T, H] or NULL: loss only; may alias x */
  float *dw;    /* [V, H], with dx */
  int accumulate;
  int64_t chunk_rows; /* >= 1 */
  void *logits;       /* scratch, 4 * chunk_rows * V bytes; fp32 logits after a
                         call without labels. A backend that keeps 16-bit logits
                         takes twice the rows at a time */
} mz_xent_t;

#endif
