/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of arguments that both tables make. Letters: kernels/linear.h. */
#ifndef MZ_KERNELS_CPU_LINEAR_H
#define MZ_KERNELS_CPU_LINEAR_H

#include <moezero/status.h>
#include <stdint.h>

/** @return MZ_OK, MZ_ERR_ARG (a size, offsets that fall or pass max_rows),
 * MZ_ERR_OVERFLOW (n or k is no BLAS extent). */
mz_status_t mz_cpu_linear_check(int32_t num_groups, const int32_t *offsets,
                                int64_t max_rows, int64_t n, int64_t k);

/** Elements of rows[0] rows of @p width. @return MZ_OK, MZ_ERR_ARG,
 * MZ_ERR_OVERFLOW. */
mz_status_t mz_cpu_rows_check(const int32_t *rows, int64_t max_rows,
                              int64_t width, int64_t *elements_out);

#endif
