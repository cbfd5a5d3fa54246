/* SPDX-License-Identifier: Apache-2.0 */
/**
 * A rank's part of a step's global batch.
 *
 * D data-parallel ranks, m sequences a rank in a micro-batch, A micro-batches,
 * S tokens a sequence. Global micro-batch j holds the places [j m D, (j+1) m D)
 * of the step's global batch of A m D samples; rank d takes the m places from
 * j m D + d m. Training reads the sampler's position step * A m D + place.
 * Validation reads the samples in order, each once: the last batch may be
 * partial, and then some ranks have fewer sequences than m, or none.
 */
#ifndef MZ_DATA_BATCH_H
#define MZ_DATA_BATCH_H

#include "data/data.h"
#include "data/sampler.h"

typedef struct mz_batch_layout {
  int rank, size;          /* d, D */
  int64_t micro_sequences; /* m >= 1 */
  int64_t accumulation;    /* A >= 1 */
  int64_t sequence_length; /* S, of the data set */
} mz_batch_layout_t;

/** Memory of the caller, which mz_batch_fill writes. */
typedef struct mz_batch {
  int32_t *tokens;    /* [A, m, S]; 0 where there is no sequence */
  int32_t *labels;    /* [A, m, S]; -1 where there is no sequence */
  int64_t *places;    /* [A, m] within the step's global batch */
  int64_t *samples;   /* [A, m] index in the data set, -1: none; may be NULL */
  int32_t *sequences; /* [A] sequences of this rank, the first ones of m */
  int32_t *max_sequences; /* [A] of the rank that has most */
} mz_batch_t;

/** Global batches that cover the data set once, the last one maybe partial. */
int64_t mz_batch_num_in_order(const mz_dataset_t *dataset,
                              const mz_batch_layout_t *layout);

/**
 * Fills the batch of step @p step >= 0. Not collective.
 * @param sampler  NULL: in order, each sample once (validation).
 * @return MZ_OK, MZ_ERR_ARG, MZ_ERR_OVERFLOW, MZ_ERR_DATA (of
 * mz_dataset_sample).
 */
mz_status_t mz_batch_fill(const mz_dataset_t *dataset,
                          const mz_sampler_t *sampler,
                          const mz_batch_layout_t *layout, int64_t step,
                          const mz_batch_t *batch);

#endif
