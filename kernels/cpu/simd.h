/* SPDX-License-Identifier: Apache-2.0 */
/* What the elementwise loops share: an exponential that vectorises inside of
 * functions marked MZ_CLONES. */
#ifndef MZ_KERNELS_CPU_SIMD_H
#define MZ_KERNELS_CPU_SIMD_H

#include "kernels/cpu/clones.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Unoptimised and sanitized builds do not vectorise; that is no mistake. */
#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

/**
 * exp(x), relative error below 2e-7. 0 below -87 (also for -infinity, so that
 * masked scores vanish), exp(87) above 87, NaN for NaN. Within these ends
 * neither the result nor its inverse is a slow subnormal number.
 * x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) by a polynomial through the
 * Chebyshev nodes of that interval; 2^n goes into the exponent bits. ln 2 is
 * split so that n times its first part is exact.
 */
__attribute__((always_inline)) static inline float mz_simd_exp(float x)
{
  const float rounder = 0x1.8p23f; /* adding it leaves n in the low bits */
  float y = x > 87.0f ? 87.0f : x;
  float shifted, n, r, p, power;
  uint32_t bits;

  y = y < -87.0f ? -87.0f : y;
  shifted = y * 1.44269504f + rounder;
  memcpy(&bits, &shifted, sizeof bits);
  n = shifted - rounder;
  r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  p = 0.00836323295f + r * 0.00139262504f;
  p = 0.0416665524f + r * p;
  p = 0.166665763f + r * p;
  p = 0.5f + r * p;
  p = 1.0f + (r + r * r * p);
  bits = (bits + 127u) << 23;
  memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

/** 1 / (1 + exp(-x)). */
__attribute__((always_inline)) static inline float mz_simd_sigmoid(float x)
{
  return 1.0f / (1.0f + mz_simd_exp(-x));
}

#endif
