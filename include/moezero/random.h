/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moezero/random.h
 * @brief Random numbers that do not depend on ranks: a function of their place.
 *
 * Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as
 * 1, 2, 3", sec. 3.3). Key = seed; counter = (i/4 low, i/4 high, x,
 * purpose << 16 | layer); element i takes component i mod 4. That is cuRAND's
 * addressing. Element i of a layer's random numbers is that of the global batch
 * of the step: (sample * S + position) * width + channel, where sample comes
 * from mz_micro_t.samples. Nothing here can fail or is collective.
 */
#ifndef MZ_RANDOM_H
#define MZ_RANDOM_H

#include <math.h>
#include <stdint.h>

/* In CUDA code the functions exist on both sides. */
#ifdef __CUDACC__
#define MZ_RANDOM_FN static inline __host__ __device__
#else
#define MZ_RANDOM_FN static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** What a number is drawn for: the upper half of counter word 3. */
enum mz_purpose {
  MZ_PURPOSE_INIT = 0,
  MZ_PURPOSE_DROPOUT = 1,
  MZ_PURPOSE_TOKEN_SELECTION = 2,
  MZ_PURPOSE_GATE_NOISE = 3,
  MZ_PURPOSE_SECOND_CHOICE = 4,
  MZ_PURPOSE_SAMPLER = 5,
  MZ_PURPOSE_GENERATE = 6,
  MZ_PURPOSE_OWN = 0x8000 /* this and above: the application's, to 0xffff */
};

typedef struct mz_random {
  uint64_t seed;
  uint32_t x;     /* step, or the hash of a tensor's name */
  uint32_t where; /* purpose << 16 | layer */
} mz_random_t;

/** The sequence of (seed, x, purpose, layer); of layer 16 bits count. */
MZ_RANDOM_FN mz_random_t mz_random_make(uint64_t seed, uint32_t x,
                                        uint32_t purpose, uint32_t layer)
{
  mz_random_t r = {seed, x, (purpose << 16) | (layer & 0xffffu)};
  return r;
}

/** The block of four 32-bit words that holds elements 4b .. 4b + 3. */
MZ_RANDOM_FN void mz_philox_block(const mz_random_t *random, uint64_t b,
                                  uint32_t out[4])
{
  uint32_t k0 = (uint32_t)random->seed, k1 = (uint32_t)(random->seed >> 32);
  uint32_t c0 = (uint32_t)b, c1 = (uint32_t)(b >> 32);
  uint32_t c2 = random->x, c3 = random->where;

  for (int round = 0; round < 10; round++) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c0;
    uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
    uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    uint32_t n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;

    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

/** 32 random bits of element @p i. */
MZ_RANDOM_FN uint32_t mz_random_u32(const mz_random_t *random, uint64_t i)
{
  uint32_t block[4];
  mz_philox_block(random, i / 4, block);
  return block[i % 4];
}

/** Bits to a uniform number in [0, 1), a multiple of 2^-24: exact in fp32. */
MZ_RANDOM_FN float mz_uniform_of(uint32_t bits)
{
  return (float)(bits >> 8) * 0x1p-24f;
}

/** A uniform number in [0, 1) of element @p i. */
MZ_RANDOM_FN float mz_random_uniform(const mz_random_t *random, uint64_t i)
{
  return mz_uniform_of(mz_random_u32(random, i));
}

/**
 * Bits to a number of the standard Gumbel distribution, -ln(-ln u), u in (0, 1)
 * an odd multiple of 2^-24, which fp32 holds. The largest of logits plus such
 * numbers is drawn with the probabilities of their softmax (Maddison et al.
 * 2014, arXiv:1411.0030, sec. 2).
 */
MZ_RANDOM_FN float mz_gumbel_of(uint32_t bits)
{
  return -logf(-logf(((float)(bits >> 9) + 0.5f) * 0x1p-23f));
}

/** A Gumbel number of element @p i. */
MZ_RANDOM_FN float mz_random_gumbel(const mz_random_t *random, uint64_t i)
{
  return mz_gumbel_of(mz_random_u32(random, i));
}

/**
 * Standard normal of element @p i: Box and Muller 1958 on the two words of the
 * pair (i & ~1, i | 1) of its block; the even element takes the cosine.
 */
MZ_RANDOM_FN double mz_random_normal(const mz_random_t *random, uint64_t i)
{
  uint32_t block[4];
  double u, angle;

  mz_philox_block(random, i / 4, block);
  u = ((double)block[i % 4 & 2] + 1.0) * 0x1p-32; /* (0, 1] */
  angle = (double)block[(i % 4 & 2) + 1] * 0x1p-32 * 6.283185307179586;
  return sqrt(-2.0 * log(u)) * (i & 1 ? sin(angle) : cos(angle));
}

/** FNV-1a, 32 bits: the hash of a tensor's global name. */
static inline uint32_t mz_fnv1a(const char *text)
{
  uint32_t hash = 2166136261u;
  for (; *text; text++)
    hash = (hash ^ (uint8_t)*text) * 16777619u;
  return hash;
}

#ifdef __cplusplus
}
#endif
#endif
