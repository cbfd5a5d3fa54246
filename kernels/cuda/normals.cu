/* SPDX-License-Identifier: Apache-2.0 */
/* Normal numbers on CUDA, with the bits of the C library: see
 * kernels/cpu/random.c, whose test of the last bit this is. Errors, as parts of
 * the radius: ours below 2e-15 (log, sincos and sqrt of CUDA are within 2 units
 * in the last place of a double), mz_random_normal's below 3e-15. */
#include "kernels/cuda/cuda.h"

enum { THREADS = 256 };

static __device__ __forceinline__ void
place(const mz_normals_t &a, uint64_t element, double radius, double ratio)
{
  const double bound = 0x1p-45; /* of the radius: 2.8e-14 */
  uint64_t i = element - a.first;
  double x = radius * ratio, apart = radius * bound;
  float low = (float)(a.scale * (x - apart));
  float high = (float)(a.scale * (x + apart));

  if (i >= (uint64_t)a.n) return; /* of the first block and the last */
  a.out[i] = low;
  if (__float_as_uint(low) != __float_as_uint(high)) /* signs of zero too */
    a.doubt[1 + atomicAdd(a.doubt, 1)] = (int32_t)i;
}

/* A thread has a block of Philox, four elements. */
static __global__ void __launch_bounds__(THREADS)
    draw_normals(mz_normals_t a, uint64_t first_block, int64_t num_blocks)
{
  int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  uint64_t block = first_block + (uint64_t)at;
  uint32_t words[4];

  if (at >= num_blocks) return;
  mz_philox_block(&a.random, block, words);
#pragma unroll
  for (int pair = 0; pair < 4; pair += 2) {
    double u = ((double)words[pair] + 1.0) * 0x1p-32;
    double angle = (double)words[pair + 1] * 0x1p-32 * 6.283185307179586;
    double radius = sqrt(-2.0 * log(u)), sine, cosine;

    sincos(angle, &sine, &cosine);
    place(a, 4 * block + pair, radius, cosine);
    place(a, 4 * block + pair + 1, radius, sine);
  }
}

extern "C" mz_status_t mz_k_normals_cuda(const mz_kernels_t *kernels,
                                         const mz_normals_t *a,
                                         mz_stream_t stream)
{
  cudaStream_t s = mz_cuda_stream(stream);
  uint64_t first = a->first / 4;
  int64_t blocks = (int64_t)((a->first + (uint64_t)a->n + 3) / 4 - first);

  MZ_REQUIRE(a->n >= 0 && a->n <= INT32_MAX && a->doubt, MZ_ERR_ARG,
             "%" PRId64 " normal numbers, at most %d, and a list of those in "
             "doubt are needed",
             a->n, INT32_MAX);
  MZ_CUDA(cudaMemsetAsync(a->doubt, 0, sizeof *a->doubt, s));
  if (a->n == 0) return MZ_OK;
  draw_normals<<<(unsigned)mz_div_up(blocks, THREADS), THREADS, 0, s>>>(
      *a, first, blocks);
  MZ_LAUNCHED("draw_normals");
  return MZ_OK;
}
