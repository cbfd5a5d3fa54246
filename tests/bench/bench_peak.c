/* SPDX-License-Identifier: Apache-2.0 */
/* The machine's ceiling for fp32 arithmetic: fused multiply-adds on registers,
 * one chain for each of 12 accumulators a thread, and nothing else.
 * Usage: bench_peak [SECONDS]; threads as OMP_NUM_THREADS says. Prints one
 * number, GFLOP/s of all threads, the best of the repetitions. */
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { CHAINS = 12, ROUNDS = 2000000 };

#if defined(__x86_64__)
#include <immintrin.h>

/* No optimizer may shorten the chains: the factor is only known at run time. */
__attribute__((target("avx512f"))) static double chains_512(float factor)
{
  __m512 sum[CHAINS], f = _mm512_set1_ps(factor);

  for (int i = 0; i < CHAINS; i++)
    sum[i] = _mm512_set1_ps((float)i);
  for (int64_t r = 0; r < ROUNDS; r++)
    for (int i = 0; i < CHAINS; i++)
      sum[i] = _mm512_fmadd_ps(sum[i], f, f);
  for (int i = 1; i < CHAINS; i++)
    sum[0] = _mm512_add_ps(sum[0], sum[i]);
  return (double)_mm512_reduce_add_ps(sum[0]);
}

__attribute__((target("avx2,fma"))) static double chains_256(float factor)
{
  __m256 sum[CHAINS], f = _mm256_set1_ps(factor);
  float out[8];

  for (int i = 0; i < CHAINS; i++)
    sum[i] = _mm256_set1_ps((float)i);
  for (int64_t r = 0; r < ROUNDS; r++)
    for (int i = 0; i < CHAINS; i++)
      sum[i] = _mm256_fmadd_ps(sum[i], f, f);
  for (int i = 1; i < CHAINS; i++)
    sum[0] = _mm256_add_ps(sum[0], sum[i]);
  _mm256_storeu_ps(out, sum[0]);
  return (double)out[0];
}

static int lanes(void)
{
  if (__builtin_cpu_supports("avx512f")) return 16;
  return __builtin_cpu_supports("fma") ? 8 : 0;
}

static double chains(int width, float factor)
{
  return width == 16 ? chains_512(factor) : chains_256(factor);
}
#else
static int lanes(void) { return 0; }

static double chains(int width, float factor) { return width * (double)factor; }
#endif

int main(int argc, char **argv)
{
  double limit = argc > 1 ? atof(argv[1]) : 2, best = 0, sink = 0;
  double end = omp_get_wtime() + limit;
  int width = lanes(), threads = omp_get_max_threads();
  float factor = argc > 2 ? (float)atof(argv[2]) : 0.5f;

  if (!width) {
    fprintf(stderr, "bench_peak: needs a processor with FMA\n");
    return 1;
  }
  while (omp_get_wtime() < end) {
    double start = omp_get_wtime(), rate;

#pragma omp parallel reduction(+ : sink)
    sink += chains(width, factor);
    rate = 2.0 * width * CHAINS * ROUNDS * threads / (omp_get_wtime() - start) *
           1e-9;
    if (rate > best) best = rate;
  }
  printf("%.1f\n", sink == 12345.0 ? 0.0 : best);
  return 0;
}
