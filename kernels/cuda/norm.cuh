/* SPDX-License-Identifier: Apache-2.0 */
/* How norm.cu shares rows among threads. */
#ifndef MZ_KERNELS_CUDA_NORM_CUH
#define MZ_KERNELS_CUDA_NORM_CUH

#include "kernels/cuda/vector.cuh"

enum {
  MIN_THREADS = 128, /* of a block */
  MAX_WARPS = 8,     /* of a row in registers */
  SHORT_ROW = 128,   /* elements that one warp is enough for */
};

/* How a block is cut up: ROWS rows at a time, LANES threads each. */
template <int WARPS> struct cut {
  enum {
    LANES = 32 * WARPS,
    THREADS = LANES > MIN_THREADS ? LANES : MIN_THREADS,
    ROWS = THREADS / LANES
  };
};

/* Of the threads of a row; shared has a place a warp of the block and is used
 * again only behind another barrier. */
template <int WARPS>
static __device__ __forceinline__ float row_sum(float x, float *shared)
{
  x = mz_warp_sum(x);
  if constexpr (WARPS > 1) {
    int warp = (int)(threadIdx.x / 32), first = warp / WARPS * WARPS;

    if (threadIdx.x % 32 == 0) shared[warp] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++)
      x += shared[first + i];
  }
  return x;
}

static __device__ __forceinline__ uint4 zero_pack(void)
{
  return make_uint4(0, 0, 0, 0);
}

static inline mz_status_t check_rows(int64_t rows, int64_t width)
{
  MZ_REQUIRE(rows >= 0 && rows <= INT32_MAX && width >= 1, MZ_ERR_ARG,
             "norm of %" PRId64 " rows of %" PRId64, rows, width);
  return MZ_OK;
}

/* Threads of a block that works element by element. */
static inline unsigned element_threads(int64_t width)
{
  return width <= SHORT_ROW ? 32 : 256;
}

/* 16-byte packs of a row, -1 where rows cannot be held in them. */
template <typename T>
static int64_t packs_of(int64_t width, const void *const *arrays, int count)
{
  int64_t packs = width / mz_pack<T>::N;

  if (width % mz_pack<T>::N || packs > 4 * 32 * MAX_WARPS) return -1;
  for (int i = 0; i < count; i++)
    if (!mz_aligned(arrays[i])) return -1;
  return packs;
}

#endif
