/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/cpu.h"

const mz_kernels_ops_t mz_kernels_ops_cpu = {.name = MZ_BACKEND_CPU,
#define MZ_KERNEL_ENTRY_(op, args) .op = mz_k_##op##_cpu,
                                             MZ_KERNEL_LIST(MZ_KERNEL_ENTRY_)
#undef MZ_KERNEL_ENTRY_
};
