/* SPDX-License-Identifier: Apache-2.0 */
/* Tensor cores on tiles of bf16 in shared memory: mma.sync m16n8k16, ldmatrix
 * and cp.async, on sm_80 and later.
 *
 * A tile has rows of W elements (W a multiple of 64), in chunks of 8 elements,
 * 16 bytes; chunk c of row r lies at place c ^ (r % 8) of the row, so that the
 * eight rows which one phase of ldmatrix reads fall on different banks.
 *
 * Fragments, lane l of a warp, g = l / 4, t = l % 4 (PTX ISA, mma.m16n8k16):
 * - C (16 x 8, fp32): c[0], c[1] are row g, columns 2 t, 2 t + 1; c[2], c[3]
 * are row g + 8.
 * - A (16 x 16): a[0] is row g, columns 2 t, 2 t + 1; a[1] row g + 8; a[2] and
 *   a[3] the same at columns + 8. So two neighbouring C tiles, rounded and
 *   packed, are an A tile without any exchange.
 * - B (16 x 8): b[0] is column g, rows 2 t, 2 t + 1; b[1] rows + 8. */
#ifndef MZ_KERNELS_CUDA_MMA_H
#define MZ_KERNELS_CUDA_MMA_H

#include <cuda_bf16.h>
#include <stdint.h>

static __device__ __forceinline__ uint32_t mz_shared_at(const void *pointer)
{
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* 16 bytes to shared memory, behind the thread's back; zeros unless `inside`,
 * and then nothing is read. */
static __device__ __forceinline__ void mz_copy16(uint32_t to, const void *from,
                                                 bool inside)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(inside ? 16 : 0)
               : "memory");
}

static __device__ __forceinline__ void mz_copy4(uint32_t to, const void *from,
                                                bool inside)
{
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(inside ? 4 : 0)
               : "memory");
}

static __device__ __forceinline__ void mz_copies_commit(void)
{
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/* All of this thread's copies are done; others see them after a barrier. */
static __device__ __forceinline__ void mz_copies_wait(void)
{
  asm volatile("cp.async.wait_group 0;\n" ::: "memory");
}

/* Four 8 x 8 matrices; lanes 8 i .. 8 i + 7 give the rows of matrix i. */
static __device__ __forceinline__ void mz_load_matrices(uint32_t (&r)[4],
                                                        uint32_t at)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

static __device__ __forceinline__ void mz_load_turned(uint32_t (&r)[4],
                                                      uint32_t at)
{
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(at)
      : "memory");
}

/* c += a b. */
static __device__ __forceinline__ void
mz_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two numbers as bf16, the first in the low half. */
static __device__ __forceinline__ uint32_t mz_bf16_pair(float low, float high)
{
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);

  return *(uint32_t *)&pair;
}

static __device__ __forceinline__ float mz_exp2(float x)
{
  float y;

  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

/* --- tiles of rows of W elements --- */

template <int W>
static __device__ __forceinline__ uint32_t mz_chunk_at(uint32_t tile, int row,
                                                       int chunk)
{
  return tile + (uint32_t)(row * W * 2 + ((chunk ^ (row & 7)) << 4));
}

/* ROWS rows of a head, by THREADS threads; rows from `rows` on and columns from
 * `width` (a multiple of 8) on are zeros. */
template <int ROWS, int W, int THREADS>
static __device__ __forceinline__ void
mz_copy_tile(uint32_t to, const __nv_bfloat16 *from, int64_t ld, int rows,
             int width)
{
  const int CHUNKS = W / 8, STEP = THREADS / CHUNKS; /* rows a round */
  int row = (int)threadIdx.x / CHUNKS, chunk = (int)threadIdx.x % CHUNKS;
  const __nv_bfloat16 *at = from + row * ld + chunk * 8;
  bool column = chunk * 8 < width;

  static_assert(STEP % 8 == 0 && ROWS % STEP == 0, "one swizzle, whole rounds");
  to = mz_chunk_at<W>(to, row, chunk);
#pragma unroll
  for (int n = 0; n < ROWS / STEP; n++) {
    bool inside = column && n * STEP + row < rows;

    mz_copy16(to + n * STEP * W * 2, inside ? at : from, inside);
    at += STEP * ld;
  }
}

/* Where a lane reads, for the fragments below, at rows row.. (a multiple of 8)
 * and columns 0.. of a tile. 16 columns on: ^ 32, which needs tiles on 256
 * bytes; 8 rows on: + 8 rows' bytes. */
template <int W>
static __device__ __forceinline__ uint32_t mz_lane_at(uint32_t tile, int row,
                                                      int lane_row,
                                                      int lane_chunk)
{
  return mz_chunk_at<W>(tile + (uint32_t)(row * W * 2), lane_row, lane_chunk);
}

/* An A fragment; or the B fragments of two neighbouring n tiles, b[0], b[1] and
 * b[2], b[3], where k is the tile's row and n its column (mz_load_turned). */
template <int W>
static __device__ __forceinline__ uint32_t mz_lane_of_a(uint32_t tile, int row)
{
  int lane = (int)threadIdx.x % 32;

  return mz_lane_at<W>(tile, row, lane % 16, lane / 16);
}

/* The B fragments of two neighbouring n tiles where n is the tile's row and k
 * its column. */
template <int W>
static __device__ __forceinline__ uint32_t mz_lane_of_b(uint32_t tile, int row)
{
  int lane = (int)threadIdx.x % 32;

  return mz_lane_at<W>(tile, row, lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

template <int M, int N>
static __device__ __forceinline__ void mz_zero(float (&c)[M][N][4])
{
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        c[m][n][i] = 0;
}

/* c += the products of rows arow.. of a and brow.. of b, both W wide. */
template <int W, int M, int N>
static __device__ __forceinline__ void
mz_product_rows(float (&c)[M][N][4], uint32_t a, int arow, uint32_t b, int brow)
{
  uint32_t from_a = mz_lane_of_a<W>(a, arow), from_b = mz_lane_of_b<W>(b, brow);

#pragma unroll
  for (int k = 0; k < W / 16; k++) {
    uint32_t x[M][4];

#pragma unroll
    for (int m = 0; m < M; m++)
      mz_load_matrices(x[m], (from_a ^ (k << 5)) + 16 * m * W * 2);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t y[4];

      mz_load_matrices(y, (from_b ^ (k << 5)) + 8 * n * W * 2);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mz_mma(c[m][n], x[m], y[0], y[1]);
        mz_mma(c[m][n + 1], x[m], y[2], y[3]);
      }
    }
  }
}

/* c += a b: a is K A fragments from registers, b rows brow.. of a tile. */
template <int W, int M, int K, int N>
static __device__ __forceinline__ void
mz_product_add(float (&c)[M][N][4], const uint32_t (&a)[M][K][4], uint32_t b,
               int brow)
{
  uint32_t from = mz_lane_of_a<W>(b, brow);

#pragma unroll
  for (int k = 0; k < K; k++)
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t y[4];

      mz_load_turned(y, (from ^ (n << 4)) + 16 * k * W * 2);
#pragma unroll
      for (int m = 0; m < M; m++) {
        mz_mma(c[m][n], a[m][k], y[0], y[1]);
        mz_mma(c[m][n + 1], a[m][k], y[2], y[3]);
      }
    }
}

/* C tiles as A fragments. */
template <int M, int N>
static __device__ __forceinline__ void mz_pack_a(uint32_t (&a)[M][N / 2][4],
                                                 const float (&c)[M][N][4])
{
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++) {
      a[m][n / 2][n % 2 * 2] = mz_bf16_pair(c[m][n][0], c[m][n][1]);
      a[m][n / 2][n % 2 * 2 + 1] = mz_bf16_pair(c[m][n][2], c[m][n][3]);
    }
}

/* C tiles, times a factor a row, to rows of a head in memory: row 0 of `to` is
 * row 0 of the first tile. */
template <int M, int N>
static __device__ __forceinline__ void
mz_store_rows(__nv_bfloat16 *to, int64_t ld, int rows, int width,
              const float (&c)[M][N][4], const float (&factor)[M][2])
{
  int lane = (int)threadIdx.x % 32;

#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = 16 * m + 8 * half + lane / 4;

      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < N; n++)
        if (8 * n < width)
          *(uint32_t *)(to + row * ld + 8 * n + lane % 4 * 2) =
              mz_bf16_pair(c[m][n][2 * half] * factor[m][half],
                           c[m][n][2 * half + 1] * factor[m][half]);
    }
}

#endif
