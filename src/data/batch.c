/* SPDX-License-Identifier: Apache-2.0 */
#include "data/batch.h"

#include "base/alloc.h"
#include "base/check.h"

static int64_t global_batch(const mz_batch_layout_t *layout)
{
  return layout->accumulation * layout->micro_sequences * layout->size;
}

int64_t mz_batch_num_in_order(const mz_dataset_t *dataset,
                              const mz_batch_layout_t *layout)
{
  return mz_div_up(mz_dataset_num_samples(dataset), global_batch(layout));
}

/* The sample at a position, or -1 behind the end of the data. */
static int64_t sample_at(const mz_dataset_t *dataset,
                         const mz_sampler_t *sampler, int64_t position)
{
  if (sampler) return mz_sampler_index(sampler, position);
  return position < mz_dataset_num_samples(dataset) ? position : -1;
}

/* Ranks take the places in order, so that rank 0 has the most. */
static int32_t most_sequences(const mz_dataset_t *dataset,
                              const mz_sampler_t *sampler, int64_t m,
                              int64_t first_of_rank_0)
{
  int64_t left = mz_dataset_num_samples(dataset) - first_of_rank_0;

  if (sampler) return (int32_t)m;
  return (int32_t)mz_max_i64(0, mz_min_i64(m, left));
}

static void fill_nothing(int64_t length, int32_t *tokens, int32_t *labels)
{
  for (int64_t t = 0; t < length; t++) {
    tokens[t] = 0;
    labels[t] = -1;
  }
}

mz_status_t mz_batch_fill(const mz_dataset_t *dataset,
                          const mz_sampler_t *sampler,
                          const mz_batch_layout_t *layout, int64_t step,
                          const mz_batch_t *batch)
{
  int64_t m = layout->micro_sequences, S = layout->sequence_length;
  int64_t first, end; /* positions of the step: both have to fit */

  MZ_REQUIRE(step >= 0, MZ_ERR_ARG, "step %" PRId64 " is negative", step);
  MZ_TRY(mz_mul_i64(step, global_batch(layout), &first));
  MZ_TRY(mz_add_i64(first, global_batch(layout), &end));
  for (int64_t j = 0; j < layout->accumulation; j++) {
    batch->sequences[j] = 0;
    batch->max_sequences[j] =
        most_sequences(dataset, sampler, m, first + j * layout->size * m);
    for (int64_t i = 0; i < m; i++) {
      int64_t row = j * m + i;
      int64_t place = (j * layout->size + layout->rank) * m + i;
      int64_t sample = sample_at(dataset, sampler, first + place);
      int32_t *tokens = batch->tokens + row * S;
      int32_t *labels = batch->labels + row * S;

      batch->places[row] = place;
      if (batch->samples) batch->samples[row] = sample;
      if (sample < 0) {
        fill_nothing(S, tokens, labels);
        continue;
      }
      batch->sequences[j]++;
      MZ_TRY(mz_dataset_sample(dataset, sample, tokens, labels));
    }
  }
  return MZ_OK;
}
