/* SPDX-License-Identifier: Apache-2.0 */
/* mz_random_normal for many elements, in loops that vectorise.
 *
 * The C library's log, sin and cos do not vectorise, and other ones differ from
 * them in the last bits of a double. An initial value is a float, which has 29
 * bits less: where all that lies within BOUND of an approximation rounds to the
 * same float, mz_random_normal gives that float too. The few others (2 of
 * 10,000) are left to it. (The idea is that of Ziv 1991, "Fast evaluation of
 * elementary mathematical functions with correctly rounded last bit".)
 *
 * Errors, as parts of the radius: ours below 7e-14 (logarithm 4e-14 relative,
 * halved by the root; sine and cosine 3e-14 absolute; roundings; seen 3.2e-14),
 * that of mz_random_normal below 3e-15 (its angle is rounded, up to 1e-15). */
#include "kernels/cpu/random.h"

#include "base/alloc.h"
#include "kernels/cpu/simd.h"
#include "kernels/kernels.h"

#include <stdbool.h>

enum {
  BLOCKS = 64, /* at once */
  VALUES = 4 * BLOCKS,
  CHUNK = 1 << 12 /* elements of a thread at once */
};

static const double BOUND = 0x1p-40; /* of the radius: 9e-13 */

MZ_CLONES static void draw_blocks(const mz_random_t *random, uint64_t first,
                                  int n, uint32_t *restrict words)
{
#pragma omp simd
  for (int i = 0; i < n; i++)
    mz_philox_block(random, first + (uint64_t)i, words + 4 * i);
}

/* Apart, since clang 14 gives clones a name that other files do not find. */
void mz_cpu_draw(const mz_random_t *random, uint64_t first, int n,
                 uint32_t *restrict words)
{
  draw_blocks(random, first, n, words);
}

__attribute__((always_inline)) static inline double of_bits(uint64_t bits)
{
  double x;

  memcpy(&x, &bits, sizeof x);
  return x;
}

/* x < 2^52 as a double, without the conversions that AVX2 lacks. */
__attribute__((always_inline)) static inline double to_double(uint64_t x)
{
  return of_bits(x | UINT64_C(0x4330000000000000)) - 0x1p52;
}

/* sqrt(-2 ln u), u = (word + 1) / 2^32 = 2^k m with m in [sqrt 1/2, sqrt 2);
 * ln m = 2 atanh s, s = (m - 1) / (m + 1), by its series. */
MZ_CLONES static void radii(const uint32_t *restrict words,
                            double *restrict radius)
{
  /* Bits of sqrt 1/2, 64 below in the exponent: k + 64 is never negative. */
  const uint64_t base = UINT64_C(0x3fe6a09e667f3bcd) - (UINT64_C(64) << 52);

#pragma omp simd
  for (int i = 0; i < BLOCKS; i++) {
    double u = (to_double(words[4 * i]) + 1.0) * 0x1p-32, m, s, z, p;
    uint64_t bits, k;

    memcpy(&bits, &u, sizeof bits);
    k = (bits - base) >> 52;
    m = of_bits(bits - ((k - 64) << 52));
    s = (m - 1.0) / (m + 1.0);
    z = s * s;
    p = 1.0 / 13 + z * (1.0 / 15);
    p = 1.0 / 11 + z * p;
    p = 1.0 / 9 + z * p;
    p = 1.0 / 7 + z * p;
    p = 1.0 / 5 + z * p;
    p = 1.0 / 3 + z * p;
    p = 2.0 * s * (1.0 + z * p);
    radius[i] = sqrt(-2.0 * ((to_double(k) - 64.0) * 0.6931471805599453 + p));
  }
}

/* Cosine and sine of word / 2^32 turns: of the rest to the nearest quarter, by
 * their series, then turned by the quarters. */
MZ_CLONES static void turns(const uint32_t *restrict words,
                            double *restrict cosine, double *restrict sine)
{
#pragma omp simd
  for (int i = 0; i < BLOCKS; i++) {
    uint32_t quarters = (words[4 * i] + (UINT32_C(1) << 29)) >> 30;
    /* Half a quarter is added, to stay positive, and taken away. */
    uint32_t rest = words[4 * i] + (UINT32_C(1) << 29) - (quarters << 30);
    double x = (to_double(rest) - 0x1p29) * (6.283185307179586 * 0x1p-32);
    double z = x * x, c, s;

    c = 1.0 / 479001600 - z * (1.0 / 87178291200);
    c = 1.0 / 3628800 - z * c;
    c = 1.0 / 40320 - z * c;
    c = 1.0 / 720 - z * c;
    c = 1.0 / 24 - z * c;
    c = 1.0 - z * (0.5 - z * c);
    s = 1.0 / 39916800 - z * (1.0 / 6227020800);
    s = 1.0 / 362880 - z * s;
    s = 1.0 / 5040 - z * s;
    s = 1.0 / 120 - z * s;
    s = x - x * z * (1.0 / 6 - z * s);
    cosine[i] = quarters & 1 ? s : c;
    sine[i] = quarters & 1 ? c : s;
    cosine[i] = (quarters + 1) & 2 ? -cosine[i] : cosine[i];
    sine[i] = quarters & 2 ? -sine[i] : sine[i];
  }
}

/* Returns whether any value is in doubt. */
MZ_CLONES static bool narrow(const double *restrict radius,
                             const double *restrict ratio, double scale,
                             float *restrict values, uint32_t *restrict doubt)
{
  uint32_t any = 0;

#pragma omp simd reduction(| : any)
  for (int i = 0; i < BLOCKS; i++) {
    double x = radius[i] * ratio[i], apart = radius[i] * BOUND;
    float low = (float)(scale * (x - apart));
    float high = (float)(scale * (x + apart));
    uint32_t bits[2];

    memcpy(&bits[0], &low, sizeof low);
    memcpy(&bits[1], &high, sizeof high);
    values[i] = low;
    doubt[i] = bits[0] ^ bits[1]; /* signs of zero too */
    any |= doubt[i];
  }
  return any != 0;
}

/* Elements 4 * first to 4 * (first + BLOCKS) - 1. */
static void fill(const mz_random_t *random, uint64_t first, double scale,
                 float out[VALUES])
{
  uint32_t words[VALUES], doubt[4][BLOCKS];
  double radius[BLOCKS], ratio[2][BLOCKS];
  float values[4][BLOCKS];
  bool any = false;

  draw_blocks(random, first, BLOCKS, words);
  for (int pair = 0; pair < 4; pair += 2) {
    radii(words + pair, radius);
    turns(words + pair + 1, ratio[0], ratio[1]);
    for (int i = 0; i < 2; i++)
      any |= narrow(radius, ratio[i], scale, values[pair + i], doubt[pair + i]);
  }
  for (int i = 0; i < BLOCKS; i++)
    for (int j = 0; j < 4; j++)
      out[4 * i + j] = values[j][i];
  for (int i = 0; any && i < VALUES; i++)
    if (doubt[i % 4][i / 4])
      out[i] =
          (float)(scale * mz_random_normal(random, 4 * first + (uint64_t)i));
}

void mz_cpu_normals(const mz_random_t *random, uint64_t first, int64_t n,
                    double scale, float *out)
{
  float values[VALUES];
  int64_t part;

  for (; n > 0; first += (uint64_t)part, out += part, n -= part) {
    int64_t skip = (int64_t)(first % 4);

    part = n < VALUES - skip ? n : VALUES - skip;
    if (part == VALUES) {
      fill(random, first / 4, scale, out);
      continue;
    }
    fill(random, first / 4, scale, values);
    memcpy(out, values + skip, (size_t)part * sizeof *out);
  }
}

mz_status_t mz_k_normals_cpu(const mz_kernels_t *kernels, const mz_normals_t *a,
                             mz_stream_t stream)
{
#pragma omp parallel for schedule(static)
  for (int64_t at = 0; at < a->n; at += CHUNK)
    mz_cpu_normals(&a->random, a->first + (uint64_t)at,
                   mz_min_i64(CHUNK, a->n - at), a->scale, a->out + at);
  return MZ_OK;
}
