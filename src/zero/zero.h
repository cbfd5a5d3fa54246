/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Units at run time: gather and release weights, reduce gradients, update. It
 * knows no model and no expert: everything is driven by the plan's entries and
 * operations. Functions that post or wait are collective on the entry's group.
 */
#ifndef MZ_ZERO_ZERO_H
#define MZ_ZERO_ZERO_H

#include "comm/comm.h"
#include "kernels/kernels.h"
#include "plan/plan.h"

typedef struct mz_zero mz_zero_t;

typedef struct mz_zero_opts {
  const mz_plan_t *plan; /* all borrowed until destroy */
  mz_comm_t *comm;
  const int *comm_groups; /* plan group -> communicator group */
  const mz_kernels_t *kernels;
  mz_stream_t stream;
  char *arena;      /* backend memory, plan->arena_bytes */
  char *host_arena; /* host memory of the device, plan->host_bytes */
} mz_zero_opts_t;

/** @return MZ_OK, MZ_ERR_NOMEM. Not collective. */
mz_status_t mz_zero_create(const mz_zero_opts_t *opts, mz_zero_t **zero_out);
void mz_zero_destroy(mz_zero_t **zero);

/** Pointer tables by tensor, as mz_call_t wants them; borrowed. */
const void *const *mz_zero_weights(const mz_zero_t *zero);
void *const *mz_zero_grads(const mz_zero_t *zero);
uint8_t *mz_zero_accumulate(mz_zero_t *zero);

/** Start of a buffer of the plan. */
char *mz_zero_buffer(const mz_zero_t *zero, int32_t buffer);

/** Initial values of the fp32 weights: (seed, hash of the tensor's name, flat
 * index); made on the host whatever the backend. Not collective. */
mz_status_t mz_zero_init(mz_zero_t *zero, uint64_t seed);

/** Rounds the fp32 weights that this rank updates to the model's dtype; nothing
 * with fp32, where they are one. The gathers after the optimizer then bring
 * them to all. Not collective. */
mz_status_t mz_zero_publish(mz_zero_t *zero);

/** The next gradient contributions of whole accumulators are the first. */
void mz_zero_begin_step(mz_zero_t *zero);

/* Operations of the plan; @p op of the kind that the name says. */
mz_status_t mz_zero_post(mz_zero_t *zero, int32_t entry);
/** @param on_stream  The stream waits (mz_comm_wait_on_stream), not the host.
 */
mz_status_t mz_zero_wait(mz_zero_t *zero, int32_t entry, bool on_stream);
mz_status_t mz_zero_pack(mz_zero_t *zero, int32_t entry);
mz_status_t mz_zero_place(mz_zero_t *zero, int32_t entry);
/** @param first  The first micro-batch of a step: write, do not add. */
mz_status_t mz_zero_sum(mz_zero_t *zero, int32_t entry, bool first);
void mz_zero_prepare(mz_zero_t *zero, const mz_op_t *op);
void mz_zero_release(mz_zero_t *zero, const mz_op_t *op);

/**
 * Sum of squares of this rank's owned gradients, in order of segments, in the
 * order of the stream.
 * @param[out] out  [2] in backend memory: the sum; 1 + the first tensor whose
 * sum is not finite, 0 without one.
 */
mz_status_t mz_zero_norm(mz_zero_t *zero, double *out);

typedef struct mz_zero_update {
  const mz_adamw_group_t *groups; /* by parameter group */
  int32_t num_groups;
  int64_t t; /* from 1 */
  bool l2, bias_correction;
  float factor; /* on gradients: clipping */
} mz_zero_update_t;

mz_status_t mz_zero_adamw(mz_zero_t *zero, const mz_zero_update_t *update);

/** Where a segment's fp32 value of a part lies; the segment is of the owned
 * share (gradients) or of either share (weights, moments). Backend memory. */
float *mz_zero_segment(const mz_zero_t *zero, const mz_segment_t *segment,
                       mz_tensor_part_t part);

/** Values of backend memory to and from the host's; they wait. */
mz_status_t mz_zero_fetch(const mz_zero_t *zero, const float *values,
                          int64_t num, float *host_out);
mz_status_t mz_zero_store(const mz_zero_t *zero, float *values, int64_t num,
                          const float *host);

#endif
