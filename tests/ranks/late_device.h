/* SPDX-License-Identifier: Apache-2.0 */
/* A device whose work is done later: each stream is a thread that takes its
 * work in order, each operation is the CPU's, run by that thread. It stands in
 * for a GPU where what matters is the order of things, and has a GPU's bad
 * manners: what makes, frees or uses something for the first time waits for all
 * streams, and nobody else can use the device meanwhile; so does a launch into
 * a full stream. */
#ifndef MZ_TESTS_LATE_DEVICE_H
#define MZ_TESTS_LATE_DEVICE_H

/* From now on MZ_BACKEND_CUDA is such a device. */
void late_device_use(void);

/* Work that streams waited for a flag with, since the start. */
long late_device_waits(void);

#endif
