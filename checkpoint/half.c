/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/half.h"

#include <math.h>
#include <string.h>

static uint32_t bits_of(float value)
{
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float value_of(uint32_t bits)
{
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Drops the lowest @p drop bits of @p x, to nearest, ties to even. */
static uint32_t round_off(uint32_t x, uint32_t drop)
{
  uint32_t half = (1u << (drop - 1)) - 1 + (x >> drop & 1);
  return (x + half) >> drop;
}

static uint16_t to_bf16(uint32_t bits)
{
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)round_off(bits, 16);
}

static uint16_t to_f16(uint32_t bits)
{
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  uint32_t size = bits & 0x7fffffffu, fraction, shift;

  if (size > 0x7f800000u) return sign | 0x7e00;
  if (size >= 0x47800000u) return sign | 0x7c00; /* 2^16 and above */
  /* Rebias by 127 - 15; a carry out of the fraction raises the exponent. */
  if (size >= 0x38800000u)
    return (uint16_t)(sign | round_off(size - 0x38000000u, 13));
  if (size < 0x33000000u) return sign; /* below half of the least number */
  fraction = (size & 0x7fffffu) | 0x800000u;
  shift = 126 - (size >> 23); /* to multiples of 2^-24 */
  return (uint16_t)(sign | round_off(fraction, shift));
}

int64_t mz_half_from_f32(mz_dtype_t dtype, int64_t num, const float *values,
                         uint16_t *half_out)
{
  uint16_t infinite = dtype == MZ_BF16 ? 0x7f80 : 0x7c00;
  int64_t first = -1;

  for (int64_t i = 0; i < num; i++) {
    uint32_t bits = bits_of(values[i]);

    half_out[i] = dtype == MZ_BF16 ? to_bf16(bits) : to_f16(bits);
    if ((half_out[i] & 0x7fff) == infinite && first < 0 && isfinite(values[i]))
      first = i;
  }
  return first;
}

static float from_f16(uint16_t half)
{
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, size = half & 0x7fff;

  if (size >= 0x7c00)
    return value_of(sign | 0x7f800000u | (size & 0x3ff) << 13);
  if (size >= 0x400) return value_of(sign | ((size << 13) + 0x38000000u));
  return value_of(sign | bits_of((float)size * 0x1p-24f));
}

void mz_half_to_f32(mz_dtype_t dtype, int64_t num, const uint16_t *half,
                    float *values_out)
{
  for (int64_t i = 0; i < num; i++)
    values_out[i] = dtype == MZ_BF16 ? value_of((uint32_t)half[i] << 16)
                                     : from_f16(half[i]);
}
