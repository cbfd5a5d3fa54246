/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Generation: the model goes on with a prompt, a token at a time.
 *
 * Rank 0 holds the text; the others walk without tokens, since experts and
 * shards of weights are theirs too. Every walk takes the last tokens of the
 * text, a sequence of the plan at most. Rank 0 draws, all ranks get the token.
 */
#ifndef MZ_TRAIN_GENERATE_H
#define MZ_TRAIN_GENERATE_H

#include "train/sample.h"

#include <moezero/engine.h>

typedef struct mz_generate_opts {
  const int32_t *prompt; /* [num_prompt] ids below the vocabulary */
  int32_t num_prompt;    /* 1 to the sequence of the plan */
  const float *logits;   /* [V] of mz_gpt_declare_generation */
  int32_t vocab_size;    /* V */
  int64_t num_tokens;    /* generated at most, >= 0 */
  int32_t end;           /* ends the text, not part of it; -1: none */
  mz_sample_opts_t sample;
  uint64_t seed; /* Philox: element i is for the token at place i of the text */
  /** Takes each new token, on every rank. */
  void (*take)(void *ctx, int32_t token);
  void *ctx;
} mz_generate_opts_t;

/** An id outside the vocabulary, a prompt that is empty or longer than a
 * sequence: MZ_ERR_CONFIG with the numbers. */
mz_status_t mz_generate_check(const mz_generate_opts_t *opts, int64_t sequence);

/**
 * Collective; the same options on all ranks.
 * @param engine  Of mz_engine_create_inference.
 * @return MZ_OK or the same error on all ranks: those of mz_generate_check,
 * mz_sample_check, mz_sample and mz_engine_eval, MZ_ERR_NOMEM.
 */
mz_status_t mz_generate(mz_engine_t *engine, const mz_generate_opts_t *opts);

#endif
