/* SPDX-License-Identifier: Apache-2.0 */
/* The operations of the "/cpu" backend: plain C with OpenMP and OpenBLAS.
 * Contracts: kernels/<family>.h. Two tables: fp32, and bf16 (names with _bf16),
 * which stores bf16 and computes in fp32. Equal bits from run to run at one
 * number of threads: no atomics, and no sum whose order depends on which thread
 * is faster. */
#ifndef MZ_KERNELS_CPU_CPU_H
#define MZ_KERNELS_CPU_CPU_H

#include "kernels/kernels.h"

#define MZ_KERNEL_DECLARE_(op, args)                                           \
  mz_status_t mz_k_##op##_cpu(const mz_kernels_t *kernels, const args *a,      \
                              mz_stream_t stream);
MZ_KERNEL_LIST(MZ_KERNEL_DECLARE_)
#undef MZ_KERNEL_DECLARE_

#define MZ_KERNEL_DECLARE_(op, args)                                           \
  mz_status_t mz_k_##op##_cpu_bf16(const mz_kernels_t *kernels, const args *a, \
                                   mz_stream_t stream);
MZ_KERNEL_DENSE_LIST(MZ_KERNEL_DECLARE_)
MZ_KERNEL_MOE_LIST(MZ_KERNEL_DECLARE_)
#undef MZ_KERNEL_DECLARE_

extern const mz_kernels_ops_t mz_kernels_ops_cpu, mz_kernels_ops_cpu_bf16;

#endif
