/* SPDX-License-Identifier: Apache-2.0 */
/* The forward of attention on tensor cores (Dao 2023, arXiv:2307.08691, alg.
 * 1), bf16, D a multiple of 8 up to 128. A block has 128 queries of one head,
 * a warp 32 of them; keys and values come in tiles of 64, the one while the
 * other is worked on. Letters: attention.h; fragments: mma.h. */
#include "kernels/cuda/attention.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/mma.h"

enum { WARPS = 4, THREADS = 32 * WARPS, M = 2, ROWS = 16 * M };
enum { QUERIES = ROWS * WARPS, KEYS = 64, N = KEYS / 8 };

static const float log2_e = 1.44269504f;

/* Of the 32 queries of a warp: thread rows g and g + 8 of each m tile. */
template <int W> struct rows_state {
  float o[M][W / 8][4];
  float top[M][2], sum[M][2]; /* of the raw scores; the thread's own part */
};

static __device__ __forceinline__ float quad_max(float x)
{
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

static __device__ __forceinline__ float quad_sum(float x)
{
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* row: the warp's first query, col: the tile's first key. */
static __device__ __forceinline__ void hide_later_keys(float (&s)[M][N][4],
                                                       int row, int col)
{
  int lane = (int)threadIdx.x % 32;

#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (col + 8 * n + lane % 4 * 2 + i % 2 >
            row + 16 * m + lane / 4 + i / 2 * 8)
          s[m][n][i] = -INFINITY;
}

/* Scores to exp(score - top); c = scale * log2(e). */
template <int W>
static __device__ __forceinline__ void softmax_tile(float (&s)[M][N][4],
                                                    rows_state<W> &r, float c)
{
#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float high = r.top[m][half], low = high, shrink, shift, sum = 0;

#pragma unroll
      for (int n = 0; n < N; n++)
        high = fmaxf(high, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      /* Finite: the first tile has key 0, which every query sees. */
      high = quad_max(high);
      shift = high * c;
      shrink = mz_exp2(fmaf(low, c, -shift));
      r.top[m][half] = high;
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++) {
          s[m][n][i] = mz_exp2(fmaf(s[m][n][i], c, -shift));
          sum += s[m][n][i];
        }
      r.sum[m][half] = fmaf(r.sum[m][half], shrink, sum);
#pragma unroll
      for (int n = 0; n < W / 8; n++)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++)
          r.o[m][n][i] *= shrink;
    }
}

template <int W>
static __device__ __forceinline__ void write_rows(const mz_cuda_heads_t &h,
                                                  int b, int head, int first,
                                                  rows_state<W> &r)
{
  int lane = (int)threadIdx.x % 32;
  float factor[M][2];

#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = quad_sum(r.sum[m][half]);
      int row = first + 16 * m + 8 * half + lane / 4;

      factor[m][half] = 1.0f / sum;
      if (lane % 4 == 0 && row < h.sequence)
        h.lse[mz_cuda_stats_at(h, b, head, row)] =
            fmaf(r.top[m][half], h.scale, logf(sum));
    }
  mz_store_rows((__nv_bfloat16 *)h.out + mz_cuda_out_at(h, b, head, first),
                h.ldo, h.sequence - first, h.width, r.o, factor);
}

template <int W>
static __global__ void __launch_bounds__(THREADS, 2) forward(mz_cuda_heads_t h)
{
  extern __shared__ __align__(256) char shared[];
  const uint32_t query = mz_shared_at(shared), key = query + QUERIES * W * 2;
  const uint32_t value = key + KEYS * W * 2;
  const __nv_bfloat16 *qkv = (const __nv_bfloat16 *)h.qkv;
  int tiles = (h.sequence + QUERIES - 1) / QUERIES;
  mz_cuda_task_t task =
      mz_cuda_task_of(blockIdx.x, (int64_t)h.batch * h.heads, tiles);
  int b = (int)(task.pair / h.heads), head = (int)(task.pair % h.heads);
  int q0 = (tiles - 1 - task.tile) * QUERIES; /* the last see the most keys */
  int warp_row = (int)threadIdx.x / 32 * ROWS;
  int end = min(q0 + QUERIES, h.sequence);
  const __nv_bfloat16 *keys = qkv + mz_cuda_key_at(h, b, head / h.group, 0);
  const __nv_bfloat16 *values = qkv + mz_cuda_value_at(h, b, head / h.group, 0);
  rows_state<W> r;

  mz_zero(r.o);
  for (int m = 0; m < M; m++)
    for (int half = 0; half < 2; half++) {
      r.top[m][half] = -INFINITY;
      r.sum[m][half] = 0;
    }
  mz_copy_tile<QUERIES, W, THREADS>(query,
                                    qkv + mz_cuda_query_at(h, b, head, q0),
                                    h.ld, h.sequence - q0, h.width);
  mz_copy_tile<KEYS, W, THREADS>(key, keys, h.ld, h.sequence, h.width);
  mz_copies_commit();
  for (int k0 = 0; k0 < end; k0 += KEYS) {
    /* A warp whose queries are all before the tile only copies. */
    bool works = k0 < q0 + warp_row + ROWS;
    float s[M][N][4];
    uint32_t p[M][N / 2][4];

    mz_copies_wait();
    __syncthreads(); /* the keys are there, the last values were read */
    mz_copy_tile<KEYS, W, THREADS>(value, values + k0 * h.ld, h.ld,
                                   h.sequence - k0, h.width);
    mz_copies_commit();
    mz_zero(s);
    if (works) mz_product_rows<W>(s, query, warp_row, key, 0);
    mz_copies_wait();
    __syncthreads(); /* the values are there, the keys were read */
    if (k0 + KEYS < end)
      mz_copy_tile<KEYS, W, THREADS>(key, keys + (k0 + KEYS) * h.ld, h.ld,
                                     h.sequence - k0 - KEYS, h.width);
    mz_copies_commit();
    if (!works) continue;
    if (k0 + KEYS > q0 + warp_row + 1) hide_later_keys(s, q0 + warp_row, k0);
    softmax_tile(s, r, h.scale * log2_e);
    mz_pack_a(p, s);
    mz_product_add<W>(r.o, p, value, 0);
  }
  write_rows(h, b, head, q0 + warp_row, r);
}

bool mz_cuda_attention_mma_serves(mz_dtype_t dtype, const mz_cuda_heads_t *h)
{
  uintptr_t pointers = (uintptr_t)h->qkv | (uintptr_t)h->out |
                       (uintptr_t)h->dout | (uintptr_t)h->dqkv;

  return dtype == MZ_BF16 && h->width % 8 == 0 && h->width <= 128 &&
         pointers % 16 == 0;
}

template <int W>
static mz_status_t run(const mz_cuda_heads_t *h, cudaStream_t stream)
{
  const int bytes = (QUERIES + 2 * KEYS) * W * 2;
  int64_t blocks = mz_div_up(h->sequence, QUERIES) * h->batch * h->heads;

  MZ_REQUIRE(blocks <= INT32_MAX, MZ_ERR_OVERFLOW,
             "attention: %" PRId64 " blocks", blocks);
  MZ_CUDA(cudaFuncSetAttribute(
      forward<W>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  forward<W><<<(unsigned)blocks, THREADS, (size_t)bytes, stream>>>(*h);
  MZ_LAUNCHED("attention on tensor cores");
  return MZ_OK;
}

mz_status_t mz_cuda_attention_mma(const mz_cuda_heads_t *h, cudaStream_t stream)
{
  return h->width <= 64 ? run<64>(h, stream) : run<128>(h, stream);
}
