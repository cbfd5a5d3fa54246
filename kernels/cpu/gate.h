/* SPDX-License-Identifier: Apache-2.0 */
/* The gate and its gradient without their products with x, for a table that
 * brings x to fp32 a few rows at a time. Letters: kernels/gate.h. */
#ifndef MZ_KERNELS_CPU_GATE_H
#define MZ_KERNELS_CPU_GATE_H

#include "kernels/gate.h"

#include <moezero/status.h>

/** @return MZ_OK, MZ_ERR_ARG (k), MZ_ERR_OVERFLOW. */
mz_status_t mz_cpu_gate_check(const mz_gate_t *a);

/** Logits of the tokens [first, first + rows), from their x and all of w, to
 * probs. Not with fixed_logits. */
void mz_cpu_gate_logits(const mz_gate_t *a, int64_t first, int64_t rows,
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

#endif
