/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU forms of the gate, the dispatch and the optimizer (gate.c,
 * dispatch.c, optim.c); contracts in kernels/gate.h and kernels/optim.h.
 * Activations and weights are fp32. The stream is not used: a call has done
 * its work when it returns. Results do not depend on the number of threads,
 * except for the matrix products of the gate, which are OpenBLAS's.
 *
 * Each returns MZ_OK, MZ_ERR_OVERFLOW (an extent above 31 bits where BLAS or
 * the int32 rows need it) or MZ_ERR_UNSUPPORTED (a dtype of the wire). */
#ifndef MZ_KERNELS_CPU_MOE_H
#define MZ_KERNELS_CPU_MOE_H

#include "kernels/gate.h"
#include "kernels/optim.h"

#include <moezero/status.h>

/* gate.c */
mz_status_t mz_k_gate_cpu(const mz_kernels_t *kernels, const mz_gate_t *a,
                          mz_stream_t stream);
mz_status_t mz_k_gate_grad_cpu(const mz_kernels_t *kernels,
                               const mz_gate_grad_t *a, mz_stream_t stream);

/* dispatch.c */
mz_status_t mz_k_permute_cpu(const mz_kernels_t *kernels, const mz_permute_t *a,
                             mz_stream_t stream);
mz_status_t mz_k_permute_grad_cpu(const mz_kernels_t *kernels,
                                  const mz_permute_grad_t *a,
                                  mz_stream_t stream);
mz_status_t mz_k_combine_cpu(const mz_kernels_t *kernels, const mz_combine_t *a,
                             mz_stream_t stream);
mz_status_t mz_k_combine_grad_cpu(const mz_kernels_t *kernels,
                                  const mz_combine_grad_t *a,
                                  mz_stream_t stream);
mz_status_t mz_k_regroup_cpu(const mz_kernels_t *kernels, const mz_regroup_t *a,
                             mz_stream_t stream);
mz_status_t mz_k_scale_rows_cpu(const mz_kernels_t *kernels,
                                const mz_scale_rows_t *a, mz_stream_t stream);

/* optim.c */
mz_status_t mz_k_adamw_cpu(const mz_kernels_t *kernels, const mz_adamw_t *a,
                           mz_stream_t stream);
mz_status_t mz_k_reduce_ranks_cpu(const mz_kernels_t *kernels,
                                  const mz_reduce_ranks_t *a,
                                  mz_stream_t stream);
mz_status_t mz_k_sum_squares_cpu(const mz_kernels_t *kernels,
                                 const mz_sum_squares_t *a, mz_stream_t stream);
mz_status_t mz_k_reorder_cpu(const mz_kernels_t *kernels, const mz_reorder_t *a,
                             mz_stream_t stream);
mz_status_t mz_k_convert_cpu(const mz_kernels_t *kernels, const mz_convert_t *a,
                             mz_stream_t stream);

#endif
