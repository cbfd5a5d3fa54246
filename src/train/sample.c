/* SPDX-License-Identifier: Apache-2.0 */
#include "train/sample.h"

#include "base/check.h"

#include <math.h>
#include <stdlib.h>

mz_status_t mz_sample_check(const mz_sample_opts_t *opts)
{
  MZ_REQUIRE(isfinite(opts->temperature) && opts->temperature >= 0, MZ_ERR_ARG,
             "temperature %g: need a number of at least 0", opts->temperature);
  MZ_REQUIRE(opts->top_p >= 0 && opts->top_p <= 1, MZ_ERR_ARG,
             "top_p %g: need a number from 0 to 1", opts->top_p);
  return MZ_OK;
}

static mz_status_t find_largest(const float *logits, int32_t vocab_size,
                                int32_t *token_out)
{
  int32_t best = 0;

  for (int32_t i = 0; i < vocab_size; i++) {
    MZ_REQUIRE(!isnan(logits[i]), MZ_ERR_DATA,
               "the logit of token %" PRId32 " is not a number", i);
    if (logits[i] > logits[best]) best = i;
  }
  MZ_REQUIRE(isfinite(logits[best]), MZ_ERR_DATA,
             "the largest logit, of token %" PRId32 ", is %g", best,
             (double)logits[best]);
  *token_out = best;
  return MZ_OK;
}

static int by_weight(const void *a, const void *b)
{
  const mz_choice_t *x = a, *y = b;

  if (x->weight != y->weight) return x->weight > y->weight ? -1 : 1;
  return x->token < y->token ? -1 : 1;
}

/* Cuts the sorted choices to the nucleus. @return how many remain. */
static int32_t cut(const mz_choice_t *choices, int32_t num, double least,
                   double *sum_out)
{
  int32_t kept = 0;

  *sum_out = 0;
  while (kept < num && (kept == 0 || *sum_out < least))
    *sum_out += choices[kept++].weight;
  return kept;
}

mz_status_t mz_sample(const mz_sample_opts_t *opts, int32_t vocab_size,
                      const float *logits, double u, mz_choice_t *scratch,
                      int32_t *token_out)
{
  int32_t best = 0, kept, at = 0;
  double sum = 0, below;

  MZ_TRY(find_largest(logits, vocab_size, &best));
  if (opts->temperature == 0) {
    *token_out = best;
    return MZ_OK;
  }
  for (int32_t i = 0; i < vocab_size; i++) {
    double z = (double)logits[i] - (double)logits[best];

    scratch[i] = (mz_choice_t){exp(z / opts->temperature), i};
    sum += scratch[i].weight;
  }
  qsort(scratch, (size_t)vocab_size, sizeof *scratch, by_weight);
  /* all of them, even where rounding of the sum would end it early */
  kept = cut(scratch, vocab_size,
             opts->top_p < 1 ? opts->top_p * sum : INFINITY, &sum);
  below = scratch[0].weight;
  while (at < kept - 1 && below <= u * sum)
    below += scratch[++at].weight;
  *token_out = scratch[at].token;
  return MZ_OK;
}
