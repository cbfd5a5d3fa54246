/* SPDX-License-Identifier: Apache-2.0 */
#include "train/plan_opts.h"

void mz_plan_opts_from_config(const mz_config_values_t *values, int world_size,
                              int rank, mz_plan_opts_t *opts_out)
{
  const mz_zero_config_t *z = &values->zero;

  *opts_out = (mz_plan_opts_t){
      .world_size = world_size,
      .rank = rank,
      .stage = z->stage,
      .micro_sequences = values->train_micro_batch_size_per_gpu,
      .sequence_length = values->data.sequence_length,
      .accumulation = values->gradient_accumulation_steps,
      .reduce_bucket_size = z->reduce_bucket_size,
      .allgather_bucket_size = z->allgather_bucket_size,
      .prefetch_bucket_size = z->stage3_prefetch_bucket_size,
      .persistence_threshold = z->stage3_param_persistence_threshold,
      .model_persistence_threshold = z->stage3_model_persistence_threshold,
      .max_live_parameters = z->stage3_max_live_parameters,
      .max_reuse_distance = z->stage3_max_reuse_distance,
      .piece_bytes = values->comm.piece_bytes,
      .saved_rows = values->moe.saved_rows,
      .overlap_chunks = values->moe.overlap_chunks,
      .data_before_expert = values->use_data_before_expert_parallelism,
      .communication_dtype = values->communication_data_type,
      .cuda = mz_config_uses_cuda(values),
  };
}
