/* SPDX-License-Identifier: Apache-2.0 */
/* The loops are static, for clang 14 does not export a cloned function. */
#include "kernels/cpu/convert.h"

#include "kernels/cpu/clones.h"

#include <string.h>

/* Floats as their bits and back. */
static inline uint32_t bits_of(float value)
{
  uint32_t bits;

  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits)
{
  float value;

  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Round to nearest, ties to even; a NaN keeps its upper bits and turns quiet,
 * since cutting the lower ones alone could leave an infinity. */
static inline uint16_t to_bf16(float value)
{
  uint32_t bits = bits_of(value);
  uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  uint32_t nan = bits >> 16 | 0x40u;

  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

static inline float from_bf16(uint16_t half)
{
  return float_of((uint32_t)half << 16);
}

/* IEEE binary16, round to nearest, ties to even, without a branch, so that the
 * loop becomes vector code. With e the exponent, at least -14, binary16's step
 * is 2^(e - 10), which is the step of fp32 at 2^(e + 13): that sum rounds as
 * wanted and holds the steps in its lower bits, normal numbers and small ones
 * alike. All from 65520 on round as 65520 does, to infinity. */
static inline uint16_t to_f16(float value)
{
  uint32_t bits = bits_of(value), size = bits & 0x7fffffffu;
  uint32_t nan = size > 0x7f800000u ? 0x200u : 0u;
  uint32_t below = size < 0x477ff000u ? size : 0x477ff000u;
  uint32_t above = below & 0x7f800000u;
  uint32_t exponent = above > 0x38800000u ? above : 0x38800000u;
  uint32_t grid = exponent + (13u << 23);
  uint32_t steps = bits_of(float_of(below) + float_of(grid)) - grid;
  uint32_t rounded = ((exponent - 0x38800000u) >> 13) + steps;

  return (uint16_t)((bits >> 16 & 0x8000u) | rounded | nan);
}

/* The same bits read as fp32 are 2^112 too small; infinity and NaN need all
 * bits of the exponent. */
static inline float from_f16(uint16_t half)
{
  uint32_t size = half & 0x7fffu;
  uint32_t finite = bits_of(float_of(size << 13) * 0x1p112f);
  uint32_t special = size >= 0x7c00u ? 0x7f800000u : 0u;

  return float_of((uint32_t)(half & 0x8000u) << 16 | finite | special);
}

MZ_CLONES
static void narrow_bf16(uint16_t *restrict dst, const float *restrict src,
                        int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    dst[i] = to_bf16(src[i]);
}

MZ_CLONES
static void narrow_f16(uint16_t *restrict dst, const float *restrict src,
                       int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    dst[i] = to_f16(src[i]);
}

MZ_CLONES
static void widen_bf16(float *restrict dst, const uint16_t *restrict src,
                       int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    dst[i] = from_bf16(src[i]);
}

MZ_CLONES
static void widen_f16(float *restrict dst, const uint16_t *restrict src,
                      int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    dst[i] = from_f16(src[i]);
}

int mz_cpu_is_float(mz_dtype_t dtype)
{
  return dtype == MZ_F32 || dtype == MZ_BF16 || dtype == MZ_F16;
}

void mz_cpu_narrow(mz_dtype_t dtype, void *dst, int64_t at, const float *src,
                   int64_t n)
{
  if (dtype == MZ_BF16)
    narrow_bf16((uint16_t *)dst + at, src, n);
  else if (dtype == MZ_F16)
    narrow_f16((uint16_t *)dst + at, src, n);
  else
    memcpy((float *)dst + at, src, (size_t)n * sizeof(float));
}

void mz_cpu_widen(mz_dtype_t dtype, float *dst, const void *src, int64_t at,
                  int64_t n)
{
  if (dtype == MZ_BF16)
    widen_bf16(dst, (const uint16_t *)src + at, n);
  else if (dtype == MZ_F16)
    widen_f16(dst, (const uint16_t *)src + at, n);
  else
    memcpy(dst, (const float *)src + at, (size_t)n * sizeof(float));
}

const float *mz_cpu_read(mz_dtype_t dtype, const void *src, int64_t at,
                         int64_t n, float *tile)
{
  if (dtype == MZ_F32) return (const float *)src + at;
  mz_cpu_widen(dtype, tile, src, at, n);
  return tile;
}
