/* SPDX-License-Identifier: Apache-2.0 */
/* The gradient of the gate on the CPU. Letters: kernels/gate.h. */
#include "kernels/cpu/gate.h"

#include "base/check.h"
#include "kernels/cpu/clones.h"
#include "kernels/cpu/cpu.h"

#include <cblas.h>
#include <string.h>

/* Adds what reaches the gates of token t through the weights of its routes. */
static void add_weight_grad(const mz_gate_grad_t *a, int64_t t, float *dgate)
{
  const mz_gate_t *f = &a->forward;
  int64_t first = t * f->k;
  float sum, dot = 0.0f;

  if (!mz_cpu_gate_is_divided(f)) {
    for (int64_t r = first; r < first + f->k; r++)
      if (f->row[r] >= 0) dgate[f->expert[r]] += a->d_weight[r];
    return;
  }
  sum = mz_cpu_gate_kept_sum(f, t);
  if (sum <= MZ_CPU_GATE_MIN_SUM) return;
  for (int64_t r = first; r < first + f->k; r++)
    if (f->row[r] >= 0) dot += f->weight[r] * a->d_weight[r];
  for (int64_t r = first; r < first + f->k; r++)
    if (f->row[r] >= 0) dgate[f->expert[r]] += (a->d_weight[r] - dot) / sum;
}

/* d of the logits of token t: dz = g (dg - <g, dg>) + z_scale 2 lse g. */
MZ_CLONES
static void softmax_grad(const mz_gate_grad_t *a, int64_t t, float *dlogit)
{
  const mz_gate_t *f = &a->forward;
  const float *gate = f->probs + t * f->num_experts;
  float z = (float)(a->z_scale * 2.0 * (double)f->lse[t]), shift;
  double dot = 0.0;

  for (int32_t e = 0; e < f->num_experts; e++)
    dot += (double)gate[e] * (double)dlogit[e];
  shift = z - (float)dot;
  for (int32_t e = 0; e < f->num_experts; e++)
    dlogit[e] = gate[e] * (dlogit[e] + shift);
}

/* From d of the shares p = g / sum to d of the gates: (dp - <p, dp>) / sum. */
static void shares_grad(const mz_gate_grad_t *a, int64_t t, float *dshare)
{
  const mz_gate_t *f = &a->forward;
  const float *gate = f->probs + t * f->num_experts;
  double sum = 0.0, dot = 0.0;

  for (int32_t e = 0; e < f->num_experts; e++) {
    sum += (double)gate[e];
    dot += (double)gate[e] * (double)dshare[e];
  }
  for (int32_t e = 0; e < f->num_experts; e++)
    dshare[e] = (float)(((double)dshare[e] - dot / sum) / sum);
}

static void sigmoid_grad(const mz_gate_grad_t *a, int64_t t, float *dlogit)
{
  const float *gate = a->forward.probs + t * a->forward.num_experts;

  for (int32_t e = 0; e < a->forward.num_experts; e++)
    dlogit[e] *= gate[e] * (1.0f - gate[e]);
}

/* What the balance terms give to the share of expert e of every token. */
static float balance_slope(const mz_gate_grad_t *a, int32_t e)
{
  double slope = 0.0;

  if (a->aux_scale != 0.0) slope += a->aux_scale * (double)a->aux_counts[e];
  if (a->sums_scale != 0.0)
    slope += a->sums_scale * (a->aux_sums[e] - a->sums_mean);
  return (float)slope;
}

static void token_dlogits(const mz_gate_grad_t *a, int64_t t, float *dlogit)
{
  const mz_gate_t *f = &a->forward;

  for (int32_t e = 0; e < f->num_experts; e++)
    dlogit[e] = balance_slope(a, e);
  if (f->score == MZ_SCORE_SOFTMAX) {
    add_weight_grad(a, t, dlogit);
    softmax_grad(a, t, dlogit);
  } else {
    shares_grad(a, t, dlogit);
    add_weight_grad(a, t, dlogit);
    sigmoid_grad(a, t, dlogit);
  }
  if (f->temperature > 0.0f)
    for (int32_t e = 0; e < f->num_experts; e++)
      dlogit[e] /= f->temperature;
}

void mz_cpu_gate_dlogits(const mz_gate_grad_t *a)
{
  const mz_gate_t *f = &a->forward;
  int64_t size = f->num_tokens * f->num_experts;

#pragma omp parallel for schedule(static) if (size >= MZ_CPU_GATE_PARALLEL)
  for (int64_t t = 0; t < f->num_tokens; t++)
    token_dlogits(a, t, a->dlogits + t * f->num_experts);
}

void mz_cpu_gate_products(const mz_gate_grad_t *a, int64_t first, int64_t rows,
                          const float *x, const float *w, float *dx,
                          int accumulate)
{
  int experts = a->forward.num_experts, width = (int)a->forward.width;
  const float *dlogits = a->dlogits + first * experts;

  if (rows == 0 || a->forward.fixed_logits) {
    /* Logits that do not come from x and w send them nothing. */
    if (!accumulate)
      memset(a->dw, 0, (size_t)experts * (size_t)width * sizeof(float));
    return;
  }
  if (a->forward.jitter > 0.0f) {
    mz_cpu_jittered_products(a, first, rows, x, w, dx, accumulate);
    return;
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, width,
              experts, 1.0f, dlogits, experts, w, width, 1.0f, dx, width);
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, experts, width,
              (int)rows, 1.0f, dlogits, experts, x, width,
              accumulate ? 1.0f : 0.0f, a->dw, width);
}

mz_status_t mz_k_gate_grad_cpu(const mz_kernels_t *kernels,
                               const mz_gate_grad_t *a, mz_stream_t stream)
{
  const mz_gate_t *f = &a->forward;

  (void)kernels;
  (void)stream;
  MZ_TRY(mz_cpu_gate_check(f));
  mz_cpu_gate_dlogits(a);
  mz_cpu_gate_products(a, 0, f->num_tokens, f->x, f->w, a->dx, a->accumulate);
  return MZ_OK;
}
