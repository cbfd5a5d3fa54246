/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers of 16 bits to and from fp32. */
#ifndef MZ_KERNELS_CPU_CONVERT_H
#define MZ_KERNELS_CPU_CONVERT_H

#include <moezero/types.h>

/** MZ_F32, MZ_BF16 or MZ_F16: what the two functions below take. */
int mz_cpu_is_float(mz_dtype_t dtype);

/** n fp32 elements to dst, written from element @p at on in @p dtype: round to
 * nearest, ties to even. */
void mz_cpu_narrow(mz_dtype_t dtype, void *dst, int64_t at, const float *src,
                   int64_t n);

/** n elements of @p dtype from element @p at of src on, as fp32. */
void mz_cpu_widen(mz_dtype_t dtype, float *dst, const void *src, int64_t at,
                  int64_t n);

/** The same without a copy where there is nothing to convert: a part of src, or
 * @p tile [n], which is filled. */
const float *mz_cpu_read(mz_dtype_t dtype, const void *src, int64_t at,
                         int64_t n, float *tile);

/** Defines the operation of both tables from a function of the dtype. */
#define MZ_CPU_BOTH_TABLES(op, args)                                           \
  mz_status_t mz_k_##op##_cpu(const mz_kernels_t *kernels, const args *a,      \
                              mz_stream_t stream)                              \
  {                                                                            \
    return op(MZ_F32, a);                                                      \
  }                                                                            \
  mz_status_t mz_k_##op##_cpu_bf16(const mz_kernels_t *kernels, const args *a, \
                                   mz_stream_t stream)                         \
  {                                                                            \
    return op(MZ_BF16, a);                                                     \
  }

#endif
