/* SPDX-License-Identifier: Apache-2.0 */
/* 16 bytes of elements at a time: T in storage, floats in registers. mz_pack<T>
 * has their number N. */
#ifndef MZ_KERNELS_CUDA_VECTOR_CUH
#define MZ_KERNELS_CUDA_VECTOR_CUH

#include "kernels/cuda/cuda.h"

#include <cuda_fp16.h>

static __device__ __forceinline__ float mz_load(__half x)
{
  return __half2float(x);
}

template <> __device__ __forceinline__ __half mz_store<__half>(float x)
{
  return __float2half_rn(x);
}

/* Two elements in a word; the first is in the lower half. */
template <typename T>
static __device__ __forceinline__ float2 mz_widen_word(uint32_t word);
template <>
__device__ __forceinline__ float2 mz_widen_word<__nv_bfloat16>(uint32_t word)
{
  return make_float2(__uint_as_float(word << 16),
                     __uint_as_float(word & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 mz_widen_word<__half>(uint32_t word)
{
  return __half22float2(*(const __half2 *)&word);
}

template <typename T>
static __device__ __forceinline__ uint32_t mz_narrow_word(float low,
                                                          float high);
template <>
__device__ __forceinline__ uint32_t mz_narrow_word<__nv_bfloat16>(float low,
                                                                  float high)
{
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);

  return *(const uint32_t *)&pair;
}
template <>
__device__ __forceinline__ uint32_t mz_narrow_word<__half>(float low,
                                                           float high)
{
  __half2 pair = __floats2half2_rn(low, high);

  return *(const uint32_t *)&pair;
}

/* The N floats of 16 bytes. */
template <typename T>
static __device__ __forceinline__ void mz_widen(uint4 raw, float *x)
{
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};

#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else {
      float2 pair = mz_widen_word<T>(words[i]);

      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}

/* 16 bytes of N floats. */
template <typename T>
static __device__ __forceinline__ uint4 mz_narrow(const float *x)
{
  uint32_t words[4];

#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(T) == 4)
      words[i] = __float_as_uint(x[i]);
    else
      words[i] = mz_narrow_word<T>(x[2 * i], x[2 * i + 1]);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/* How N elements travel in one access: 16 bytes, two in a word, or one. */
template <typename T, int N> struct mz_raw {
  typedef uint4 type;
  static_assert(N * sizeof(T) == 16, "16 bytes, a pair or one element");
};
template <> struct mz_raw<__nv_bfloat16, 2> {
  typedef uint32_t type;
};
template <typename T> struct mz_raw<T, 1> {
  typedef T type;
};

template <typename T, int N>
static __device__ __forceinline__ void
mz_widen_raw(typename mz_raw<T, N>::type raw, float *x)
{
  if constexpr (N == 1) {
    x[0] = mz_load(raw);
  } else if constexpr (N == 2) {
    float2 pair = mz_widen_word<T>(raw);

    x[0] = pair.x;
    x[1] = pair.y;
  } else {
    mz_widen<T>(raw, x);
  }
}

template <typename T, int N>
static __device__ __forceinline__ typename mz_raw<T, N>::type
mz_narrow_raw(const float *x)
{
  if constexpr (N == 1)
    return mz_store<T>(x[0]);
  else if constexpr (N == 2)
    return mz_narrow_word<T>(x[0], x[1]);
  else
    return mz_narrow<T>(x);
}

/* Whether 16-byte accesses may start there; NULL, an array that is not there,
 * is no obstacle. */
static inline bool mz_aligned(const void *pointer, size_t bytes = 16)
{
  return (uintptr_t)pointer % bytes == 0;
}

#endif
