/* SPDX-License-Identifier: Apache-2.0 */
/* The biases on the choice of experts, of gates with a bias_update_rate: E
 * numbers a gate. They are no tensors of the declaration, for they have no
 * gradient, no shard and no bf16 form: every rank holds them in fp32 and
 * updates them by counts that all ranks know, without a message. A checkpoint
 * has them as tensors "<moe>.gate.bias" [E] of rank 0, with moments of 0, so
 * that any layout reads them and h5-gather writes them out. */
#ifndef MZ_TRAIN_BIAS_H
#define MZ_TRAIN_BIAS_H

#include "train/engine_impl.h"

#include <moezero/checkpoint.h>

/** [2 E]: biases of 0, then their moments in a checkpoint; NULL without a rate.
 * Freed with mz_free. @return MZ_OK, MZ_ERR_NOMEM. */
mz_status_t mz_bias_create(const mz_moe_opts_t *opts, float **bias_out);

/** After an update of the weights: by the routed counts of the step. */
void mz_bias_update(mz_engine_t *engine);

/** Gates with biases. */
int32_t mz_bias_count(const mz_engine_t *engine);

/** Writes mz_bias_count entries: the tensors, and this rank's slices of them,
 * tensors[i] being number first_tensor + i. Only rank 0 has slices. */
void mz_bias_list(const mz_engine_t *engine, mz_ckpt_tensor_t *tensors);
void mz_bias_slices(const mz_engine_t *engine, int32_t first_tensor,
                    mz_ckpt_slice_t *slices);

/** Whether @p values of a slice are those of a bias: host memory. */
bool mz_bias_holds(const mz_engine_t *engine, const float *values);

/** Whether a checkpoint's tensor of this name is the bias of a gate here. */
bool mz_bias_named(const mz_engine_t *engine, const char *name);

/** Reads all biases. @return MZ_OK, MZ_ERR_SHAPE (not there, or of another
 * shape), and as mz_ckpt_read. Not collective. */
mz_status_t mz_bias_read(mz_engine_t *engine, mz_ckpt_t *ckpt);

#endif
