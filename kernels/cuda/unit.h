/* SPDX-License-Identifier: Apache-2.0 */
/* A *unit* of a row: N elements of T that one access moves, 16 bytes where the
 * row's width and the buffers allow, else one element. It stays as it was
 * loaded until its numbers are needed: bf16 takes half the registers of fp32.
 */
#ifndef MZ_KERNELS_CUDA_UNIT_H
#define MZ_KERNELS_CUDA_UNIT_H

#include "kernels/cuda/cuda.h"

template <typename T, int N> struct mz_unit_of {
  typedef uint4 type;
};
template <> struct mz_unit_of<float, 1> {
  typedef float type;
};
template <> struct mz_unit_of<__nv_bfloat16, 1> {
  typedef __nv_bfloat16 type;
};
template <typename T, int N> using mz_unit = typename mz_unit_of<T, N>::type;

static inline bool mz_unit_aligned(const void *pointer)
{
  return (uintptr_t)pointer % 16 == 0;
}

/* --- to fp32 --- */

static __device__ __forceinline__ void mz_unpack(float unit, float (&out)[1])
{
  out[0] = unit;
}

static __device__ __forceinline__ void mz_unpack(__nv_bfloat16 unit,
                                                 float (&out)[1])
{
  out[0] = mz_load(unit);
}

static __device__ __forceinline__ void mz_unpack(uint4 unit, float (&out)[4])
{
  out[0] = __uint_as_float(unit.x);
  out[1] = __uint_as_float(unit.y);
  out[2] = __uint_as_float(unit.z);
  out[3] = __uint_as_float(unit.w);
}

/* A bf16 number is the upper half of an fp32 number. */
static __device__ __forceinline__ void mz_unpack(uint4 unit, float (&out)[8])
{
  uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};

#pragma unroll
  for (int i = 0; i < 4; i++) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

/* --- from fp32, rounding once --- */

static __device__ __forceinline__ void mz_repack(const float (&x)[1],
                                                 float *out)
{
  *out = x[0];
}

static __device__ __forceinline__ void mz_repack(const float (&x)[1],
                                                 __nv_bfloat16 *out)
{
  *out = mz_store<__nv_bfloat16>(x[0]);
}

static __device__ __forceinline__ void mz_repack(const float (&x)[4],
                                                 uint4 *out)
{
  *out = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                    __float_as_uint(x[2]), __float_as_uint(x[3]));
}

static __device__ __forceinline__ uint32_t mz_bf16_pair(float low, float high)
{
  return (uint32_t)__bfloat16_as_ushort(mz_store<__nv_bfloat16>(low)) |
         (uint32_t)__bfloat16_as_ushort(mz_store<__nv_bfloat16>(high)) << 16;
}

static __device__ __forceinline__ void mz_repack(const float (&x)[8],
                                                 uint4 *out)
{
  *out = make_uint4(mz_bf16_pair(x[0], x[1]), mz_bf16_pair(x[2], x[3]),
                    mz_bf16_pair(x[4], x[5]), mz_bf16_pair(x[6], x[7]));
}

#endif
