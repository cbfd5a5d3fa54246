/* SPDX-License-Identifier: Apache-2.0 */
/* How the bf16 table works: an operation brings a block of rows to fp32 in the
 * table's workspace, calls the fp32 operation and rounds the results. Weights
 * are brought to fp32 whole, once a call.
 *
 * Blocks have a fixed number of rows where the workspace allows, so sums over
 * rows have one order. */
#ifndef MZ_KERNELS_CPU_BF16_H
#define MZ_KERNELS_CPU_BF16_H

#include "kernels/kernels.h"

/* What is left of the workspace in one call. */
typedef struct mz_scratch {
  float *at;
  int64_t left; /* floats */
} mz_scratch_t;

mz_scratch_t mz_cpu_scratch(const mz_kernels_t *kernels);

/** Takes n floats. @return MZ_OK, MZ_ERR_FIT. */
mz_status_t mz_cpu_take(mz_scratch_t *scratch, int64_t n, float **out);

/** Rows of a block that has @p columns floats a row in all its operands: about
 * 256, a multiple of @p unit. @return MZ_OK, MZ_ERR_FIT (not even one unit). */
mz_status_t mz_cpu_block_rows(const mz_scratch_t *scratch, int64_t columns,
                              int64_t unit, int64_t *rows_out);

/** dst = n elements of src from @p at on. */
void mz_cpu_from_bf16(float *dst, const void *src, int64_t at, int64_t n);

/** n elements of dst from @p at on = src, rounded. */
void mz_cpu_to_bf16(void *dst, int64_t at, const float *src, int64_t n);

#endif
