/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The next token from the logits of the last one. V tokens in the vocabulary.
 *
 * Temperature 0 takes the largest logit, of equal ones the lowest id. Otherwise
 * p = softmax(logits / temperature) in fp64, cut to the nucleus (Holtzman et
 * al. 2020, arXiv:1904.09751, sec. 3.1): tokens in order of falling p, equal
 * ones by id, the fewest, one at least, whose p sum to top_p. Among them the
 * token is the first whose running sum is above u times the nucleus' sum.
 */
#ifndef MZ_TRAIN_SAMPLE_H
#define MZ_TRAIN_SAMPLE_H

#include <moezero/status.h>
#include <stdint.h>

typedef struct mz_sample_opts {
  double temperature; /* finite, >= 0 */
  double top_p;       /* in [0, 1] */
} mz_sample_opts_t;

/** Scratch: a token and its weight. */
typedef struct mz_choice {
  double weight;
  int32_t token;
} mz_choice_t;

/** @return MZ_OK, MZ_ERR_ARG with the value and its range. */
mz_status_t mz_sample_check(const mz_sample_opts_t *opts);

/**
 * @param[in] logits   [V] host
 * @param u            In [0, 1); not used at temperature 0.
 * @param     scratch  [V] of the caller
 * @return MZ_OK, MZ_ERR_DATA (a logit is NaN, or the largest is not finite).
 */
mz_status_t mz_sample(const mz_sample_opts_t *opts, int32_t vocab_size,
                      const float *logits, double u, mz_choice_t *scratch,
                      int32_t *token_out);

#endif
