/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/cpu.h"

#define MZ_KERNEL_ENTRY_(op, args) .op = mz_k_##op##_cpu,
#define MZ_KERNEL_ENTRY_BF16_(op, args) .op = mz_k_##op##_cpu_bf16,

const mz_kernels_ops_t mz_kernels_ops_cpu = {.name = MZ_BACKEND_CPU,
                                             MZ_KERNEL_LIST(MZ_KERNEL_ENTRY_)};

const mz_kernels_ops_t mz_kernels_ops_cpu_bf16 = {
    .name = MZ_BACKEND_CPU,
    MZ_KERNEL_DENSE_LIST(MZ_KERNEL_ENTRY_BF16_)
        MZ_KERNEL_MOE_LIST(MZ_KERNEL_ENTRY_BF16_)
            MZ_KERNEL_OPTIM_LIST(MZ_KERNEL_ENTRY_)};
