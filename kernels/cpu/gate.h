/* SPDX-License-Identifier: Apache-2.0 */
/* The gate and its gradient without their products with x, for a table that
 * brings x to fp32 a few rows at a time. Letters: kernels/gate.h. */
#ifndef MZ_KERNELS_CPU_GATE_H
#define MZ_KERNELS_CPU_GATE_H

#include "kernels/gate.h"

#include <float.h>
#include <moezero/status.h>

/* Below this many logits a parallel region costs more than it saves. */
enum { MZ_CPU_GATE_PARALLEL = 4096 };

/* Smallest sum that weights are divided by: fp32's epsilon. */
#define MZ_CPU_GATE_MIN_SUM FLT_EPSILON

static inline int mz_cpu_gate_is_divided(const mz_gate_t *a)
{
  return a->k > 1 && a->norm_topk;
}

/* Sum of the gates of a token's kept routes, in order of j. */
static inline float mz_cpu_gate_kept_sum(const mz_gate_t *a, int64_t t)
{
  const float *gate = a->probs + t * a->num_experts;
  float sum = 0.0f;

  for (int64_t r = t * a->k; r < (t + 1) * a->k; r++)
    if (a->row[r] >= 0) sum += gate[a->expert[r]];
  return sum;
}

/** @return MZ_OK, MZ_ERR_ARG (k), MZ_ERR_OVERFLOW. */
mz_status_t mz_cpu_gate_check(const mz_gate_t *a);

/** Logits of the tokens [first, first + rows), from their x and all of w, to
 * probs. Not with fixed_logits. */
void mz_cpu_gate_logits(const mz_gate_t *a, int64_t first, int64_t rows,
                        const float *x, const float *w);

/** The same with jitter, which mz_cpu_gate_logits takes to here. */
void mz_cpu_jittered_logits(const mz_gate_t *a, int64_t first, int64_t rows,
                            const float *x, const float *w);

/** All else, once the logits are there. */
void mz_cpu_gate_route(const mz_gate_t *a);

/** d logits of all tokens. */
void mz_cpu_gate_dlogits(const mz_gate_grad_t *a);

/** What the d logits of the tokens [first, first + rows) give to their dx,
 * which is added to, and to dw. */
void mz_cpu_gate_products(const mz_gate_grad_t *a, int64_t first, int64_t rows,
                          const float *x, const float *w, float *dx,
                          int accumulate);

/** The same with jitter, which mz_cpu_gate_products takes to here. */
void mz_cpu_jittered_products(const mz_gate_grad_t *a, int64_t first,
                              int64_t rows, const float *x, const float *w,
                              float *dx, int accumulate);

/** Number of the first of the @p width random numbers of token t. */
uint64_t mz_cpu_gate_number(const mz_gate_t *a, int64_t t, int64_t width);

#endif
