/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU as a device (kernels/device.h). */
#ifndef MZ_KERNELS_CPU_DEVICE_H
#define MZ_KERNELS_CPU_DEVICE_H

#include "kernels/device.h"

extern const mz_device_ops_t mz_device_ops_cpu;

#endif
