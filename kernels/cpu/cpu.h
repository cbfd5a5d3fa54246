/* SPDX-License-Identifier: Apache-2.0 */
/* The operations of the "/cpu" backend: plain C with OpenMP and OpenBLAS, fp32.
 * Contracts: kernels/<family>.h. Equal bits from run to run at one number of
 * threads: no atomics, and no sum whose order depends on which thread is
 * faster. */
#ifndef MZ_KERNELS_CPU_CPU_H
#define MZ_KERNELS_CPU_CPU_H

#include "kernels/kernels.h"

#define MZ_KERNEL_DECLARE_(op, args)                                           \
  mz_status_t mz_k_##op##_cpu(const mz_kernels_t *kernels, const args *a,      \
                              mz_stream_t stream);
MZ_KERNEL_LIST(MZ_KERNEL_DECLARE_)
#undef MZ_KERNEL_DECLARE_

extern const mz_kernels_ops_t mz_kernels_ops_cpu;

#endif
