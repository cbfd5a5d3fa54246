/* SPDX-License-Identifier: Apache-2.0 */
/**
 * What a step measured, as a line of JSON and as a line for people.
 *
 * Doubles are written with 17 significant digits, so that they read back to the
 * same bits; a number that is not finite is null, which JSON has no other name
 * for. Not collective; called by one rank.
 */
#ifndef MZ_TRAIN_METRICS_H
#define MZ_TRAIN_METRICS_H

#include "train/load.h"

#include <moezero/status.h>
#include <moezero/types.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct mz_metrics {
  int64_t step; /* steps done, this one included: from 1 */
  double loss;  /* lm_loss + auxiliary terms with their coefficients */
  double lm_loss, aux_loss, z_loss;
  double lr, grad_norm, loss_scale;
  int64_t skipped; /* steps skipped so far */
  int64_t tokens;  /* of the step's global batch */
  double min_gap;  /* smallest distance of a k-th to a (k+1)-th gate logit */
  double tokens_per_s, step_ms;
  const mz_named_number_t *time_ms; /* [num_times] */
  int32_t num_times;
  const mz_named_number_t *parts_ms; /* [num_parts] behind them; 0: none */
  int32_t num_parts;
  const mz_expert_load_t *experts; /* [num_moes] */
  int32_t num_moes;
  int64_t expert_window; /* steps that `dead` of the loads looks back on */
  /* what all ranks have handed to token exchanges, and at most by the plan */
  int64_t exchange_bytes, planned_exchange_bytes;
  /* as in mz_step_result_t */
  double exchange_ms, exposed_ms, least_exposed_ms;
  const mz_named_number_t *bytes; /* [num_bytes] */
  int32_t num_bytes;
  bool has_param_hash;
  uint64_t param_hash; /* written as 16 hexadecimal digits */
} mz_metrics_t;

/** Writes the step as one line and flushes. @return MZ_OK, MZ_ERR_IO. */
mz_status_t mz_metrics_write(FILE *file, const mz_metrics_t *metrics);

/** An evaluation after @p step steps: mean loss of @p tokens labels. */
mz_status_t mz_metrics_write_eval(FILE *file, int64_t step, double eval_loss,
                                  int64_t tokens);

/** Drops everything behind the last whole line of step @p step or below: what
 * a resumed run will do again. @p file reads and appends ("a+").
 * @return MZ_OK, MZ_ERR_IO. */
mz_status_t mz_metrics_cut(FILE *file, int64_t step);

/**
 * The progress line without a line end: step, loss, tokens/s, time left, and
 * the expert load: the most routed expert over the mean, for up to four MoE
 * layers, or the worst layer of more; then, where there are any, the share of
 * choices dropped and the dead experts, of all layers together.
 * @param num_steps  Steps of the run.
 * @param left_s     Seconds to its end, < 0: not known.
 */
void mz_metrics_progress(const mz_metrics_t *metrics, int64_t num_steps,
                         double left_s, char *text, size_t text_bytes);

#endif
