/* SPDX-License-Identifier: Apache-2.0 */
/* The backward of attention on tensor cores, bf16, D a multiple of 8 up to 128,
 * in two kernels, so that no two blocks add to one number: one has 128 keys and
 * their values and walks over the query heads of the group and their queries,
 * one has 128 queries and walks over the keys. The scores are computed twice:
 * 7 products instead of 5. Tiles of the walk are copied one ahead.
 *
 * The first works on turned scores (keys x queries): then probabilities and
 * gradients of scores, as they leave the tensor cores, are the left operands of
 * the products for dv and dk. Letters: attention.h; fragments: mma.h. */
#include "kernels/cuda/attention.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/mma.h"

static const float log2_e = 1.44269504f;

/* W: the head width there is room for. M: m tiles of a warp. BLOCK: keys, or
 * queries, of a block. WALK: queries, or keys, a tile of the walk; N: n tiles
 * of it that are worked on at once. Chosen so that the accumulators, the scores
 * and their gradients fit in 255 registers. */
template <int W_, int M_, int WARPS_, int WALK_, int N_> struct shape {
  enum { W = W_, M = M_, WARPS = WARPS_, WALK = WALK_, N = N_ };
  enum { THREADS = 32 * WARPS_, ROWS = 16 * M_, BLOCK = ROWS * WARPS_ };
  enum { HELD = BLOCK * W_ * 2, TILE = WALK_ * W_ * 2, STATS = WALK_ * 4 };
};

/* dk and dv: a tile of the walk is queries, dout, lse, delta. LITTLE: for cards
 * whose blocks have 99 KiB of shared memory. */
template <int W, bool LITTLE> struct keys_shape;
template <bool LITTLE> struct keys_shape<64, LITTLE> : shape<64, 2, 4, 64, 4> {
};
template <> struct keys_shape<128, false> : shape<128, 1, 8, 64, 8> {
};
template <> struct keys_shape<128, true> : shape<128, 1, 8, 32, 4> {
};
/* dq: a tile of the walk is keys, values. */
template <int W> struct queries_shape;
template <> struct queries_shape<64> : shape<64, 2, 4, 64, 8> {
};
template <> struct queries_shape<128> : shape<128, 2, 4, 32, 4> {
};

template <typename S>
static __device__ __forceinline__ void
copy_queries(const mz_cuda_heads_t &h, int b, int head, int q0, uint32_t to)
{
  int row = (int)threadIdx.x, rows = h.sequence - q0;
  int64_t at = mz_cuda_stats_at(h, b, head, q0);
  uint32_t stats = to + 2 * S::TILE;

  mz_copy_tile<S::WALK, S::W, S::THREADS>(
      to, (const __nv_bfloat16 *)h.qkv + mz_cuda_query_at(h, b, head, q0), h.ld,
      rows, h.width);
  mz_copy_tile<S::WALK, S::W, S::THREADS>(to + S::TILE,
                                          (const __nv_bfloat16 *)h.dout +
                                              mz_cuda_out_at(h, b, head, q0),
                                          h.ldo, rows, h.width);
  if (row < S::WALK) {
    bool inside = row < rows;

    mz_copy4(stats + row * 4, h.lse + at + (inside ? row : 0), inside);
    mz_copy4(stats + S::STATS + row * 4, h.delta + at + (inside ? row : 0),
             inside);
  }
  mz_copies_commit();
}

/* s := probabilities, ds := gradients of the scores (before the scale), of keys
 * from key.. (rows) and queries from query.. (columns). Queries behind the end
 * are rows of zeros: they give nothing. */
template <int M, int N>
static __device__ __forceinline__ void
turned_tile(float (&s)[M][N][4], float (&ds)[M][N][4], const float *lse,
            const float *delta, int key, int query, float c)
{
  int lane = (int)threadIdx.x % 32;

#pragma unroll
  for (int n = 0; n < N; n++) {
    int col = 8 * n + lane % 4 * 2;
    float2 l = *(const float2 *)(lse + col), d = *(const float2 *)(delta + col);

#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        bool seen = key + 16 * m + lane / 4 + i / 2 * 8 <= query + col + i % 2;
        float shift = (i % 2 ? l.y : l.x) * log2_e;
        float e = seen ? mz_exp2(fmaf(s[m][n][i], c, -shift)) : 0.0f;

        s[m][n][i] = e;
        ds[m][n][i] = e * (ds[m][n][i] - (i % 2 ? d.y : d.x));
      }
  }
}

/* What one tile of queries gives to dk and dv. `tile` is its place in shared
 * memory. */
template <typename S>
static __device__ __forceinline__ void
add_queries(float (&dk)[S::M][S::W / 8][4], float (&dv)[S::M][S::W / 8][4],
            uint32_t key, uint32_t value, int warp_row, uint32_t tile,
            const float *stats, int first_key, int q0, float c)
{
#pragma unroll
  for (int part = 0; part < S::WALK; part += 8 * S::N) {
    float s[S::M][S::N][4], ds[S::M][S::N][4];
    uint32_t p[S::M][S::N / 2][4];

    if (q0 + part + 8 * S::N <= first_key) continue; /* none sees a key */
    mz_zero(s);
    mz_product_rows<S::W>(s, key, warp_row, tile, part);
    mz_zero(ds);
    mz_product_rows<S::W>(ds, value, warp_row, tile + S::TILE, part);
    turned_tile(s, ds, stats + part, stats + S::WALK + part, first_key,
                q0 + part, c);
    mz_pack_a(p, s);
    mz_product_add<S::W>(dv, p, tile + S::TILE, part);
    mz_pack_a(p, ds);
    mz_product_add<S::W>(dk, p, tile, part);
  }
}

template <typename S>
static __global__ void __launch_bounds__(S::THREADS)
    grad_keys(mz_cuda_heads_t h)
{
  const int W = S::W;
  const int BUFFER = 2 * S::TILE + 2 * S::STATS;
  extern __shared__ __align__(256) char shared[];
  const uint32_t key = mz_shared_at(shared), value = key + S::HELD;
  const uint32_t buffer = value + S::HELD;
  const float *stats = (const float *)(shared + 2 * S::HELD + 2 * S::TILE);
  const __nv_bfloat16 *qkv = (const __nv_bfloat16 *)h.qkv;
  mz_cuda_task_t task =
      mz_cuda_task_of(blockIdx.x, (int64_t)h.batch * h.kv_heads,
                      (h.sequence + S::BLOCK - 1) / S::BLOCK);
  int b = (int)(task.pair / h.kv_heads);
  int kv_head = (int)(task.pair % h.kv_heads), head0 = kv_head * h.group;
  int k0 = task.tile * S::BLOCK; /* the first are seen by the most queries */
  int warp_row = (int)threadIdx.x / 32 * S::ROWS, keys = h.sequence - k0;
  int tiles = (keys + S::WALK - 1) / S::WALK, all = tiles * h.group;
  float dk[S::M][W / 8][4], dv[S::M][W / 8][4], scale[S::M][2], one[S::M][2];
  __nv_bfloat16 *dqkv = (__nv_bfloat16 *)h.dqkv;

  mz_zero(dk);
  mz_zero(dv);
  for (int m = 0; m < S::M; m++)
    for (int half = 0; half < 2; half++) {
      scale[m][half] = h.scale;
      one[m][half] = 1;
    }
  mz_copy_tile<S::BLOCK, W, S::THREADS>(
      key, qkv + mz_cuda_key_at(h, b, kv_head, k0), h.ld, keys, h.width);
  mz_copy_tile<S::BLOCK, W, S::THREADS>(
      value, qkv + mz_cuda_value_at(h, b, kv_head, k0), h.ld, keys, h.width);
  copy_queries<S>(h, b, head0, k0, buffer);
  for (int i = 0; i < all; i++) {
    int next = i + 1, at = i % 2 * BUFFER;

    mz_copies_wait();
    __syncthreads(); /* this tile is there, the one before was read */
    if (next < all)
      copy_queries<S>(h, b, head0 + next / tiles, k0 + next % tiles * S::WALK,
                      buffer + next % 2 * BUFFER);
    add_queries<S>(dk, dv, key, value, warp_row, buffer + at, stats + at / 4,
                   k0 + warp_row, k0 + i % tiles * S::WALK, h.scale * log2_e);
  }
  mz_store_rows(dqkv + mz_cuda_key_at(h, b, kv_head, k0 + warp_row), h.ld,
                keys - warp_row, h.width, dk, scale);
  mz_store_rows(dqkv + mz_cuda_value_at(h, b, kv_head, k0 + warp_row), h.ld,
                keys - warp_row, h.width, dv, one);
}

/* --- dq --- */

template <typename S>
static __device__ __forceinline__ void
copy_keys(const mz_cuda_heads_t &h, int b, int kv_head, int k0, uint32_t to)
{
  const __nv_bfloat16 *qkv = (const __nv_bfloat16 *)h.qkv;
  int rows = h.sequence - k0;

  mz_copy_tile<S::WALK, S::W, S::THREADS>(
      to, qkv + mz_cuda_key_at(h, b, kv_head, k0), h.ld, rows, h.width);
  mz_copy_tile<S::WALK, S::W, S::THREADS>(
      to + S::TILE, qkv + mz_cuda_value_at(h, b, kv_head, k0), h.ld, rows,
      h.width);
  mz_copies_commit();
}

/* ds := gradients of the scores of queries from query.. (rows) and keys from
 * key.. (columns); shift is lse * log2(e). */
template <int M, int N>
static __device__ __forceinline__ void
plain_tile(float (&ds)[M][N][4], const float (&s)[M][N][4],
           const float (&shift)[M][2], const float (&delta)[M][2], int query,
           int key, float c)
{
  int lane = (int)threadIdx.x % 32;

#pragma unroll
  for (int m = 0; m < M; m++)
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        bool seen = key + 8 * n + lane % 4 * 2 + i % 2 <=
                    query + 16 * m + lane / 4 + i / 2 * 8;
        float e = mz_exp2(fmaf(s[m][n][i], c, -shift[m][i / 2]));

        ds[m][n][i] = seen ? e * (ds[m][n][i] - delta[m][i / 2]) : 0.0f;
      }
}

template <int W>
static __global__ void __launch_bounds__(queries_shape<W>::THREADS, 2)
    grad_queries(mz_cuda_heads_t h)
{
  typedef queries_shape<W> S;
  const int BUFFER = 2 * S::TILE;
  extern __shared__ __align__(256) char shared[];
  const uint32_t query = mz_shared_at(shared), dout = query + S::HELD;
  const uint32_t buffer = dout + S::HELD;
  int blocks = (h.sequence + S::BLOCK - 1) / S::BLOCK;
  mz_cuda_task_t task =
      mz_cuda_task_of(blockIdx.x, (int64_t)h.batch * h.heads, blocks);
  int b = (int)(task.pair / h.heads), head = (int)(task.pair % h.heads);
  int q0 = (blocks - 1 - task.tile) * S::BLOCK;
  int end = min(q0 + S::BLOCK, h.sequence);
  int warp_row = (int)threadIdx.x / 32 * S::ROWS, lane = (int)threadIdx.x % 32;
  float dq[S::M][W / 8][4], shift[S::M][2], delta[S::M][2], scale[S::M][2];

  mz_zero(dq);
  for (int m = 0; m < S::M; m++)
    for (int half = 0; half < 2; half++) {
      int row = q0 + warp_row + 16 * m + 8 * half + lane / 4;
      int64_t at = mz_cuda_stats_at(h, b, head, min(row, h.sequence - 1));

      shift[m][half] = h.lse[at] * log2_e;
      delta[m][half] = h.delta[at];
      scale[m][half] = h.scale;
    }
  mz_copy_tile<S::BLOCK, W, S::THREADS>(
      query, (const __nv_bfloat16 *)h.qkv + mz_cuda_query_at(h, b, head, q0),
      h.ld, h.sequence - q0, h.width);
  mz_copy_tile<S::BLOCK, W, S::THREADS>(
      dout, (const __nv_bfloat16 *)h.dout + mz_cuda_out_at(h, b, head, q0),
      h.ldo, h.sequence - q0, h.width);
  copy_keys<S>(h, b, head / h.group, 0, buffer);
  for (int k0 = 0, at = 0; k0 < end; k0 += S::WALK, at ^= BUFFER) {
    float s[S::M][S::N][4], ds[S::M][S::N][4];
    uint32_t a[S::M][S::N / 2][4];

    mz_copies_wait();
    __syncthreads(); /* this tile is there, the one before was read */
    if (k0 + S::WALK < end)
      copy_keys<S>(h, b, head / h.group, k0 + S::WALK, buffer + (at ^ BUFFER));
    if (k0 >= q0 + warp_row + S::ROWS) continue; /* no query sees a key */
    mz_zero(s);
    mz_product_rows<W>(s, query, warp_row, buffer + at, 0);
    mz_zero(ds);
    mz_product_rows<W>(ds, dout, warp_row, buffer + at + S::TILE, 0);
    plain_tile(ds, s, shift, delta, q0 + warp_row, k0, h.scale * log2_e);
    mz_pack_a(a, ds);
    mz_product_add<W>(dq, a, buffer + at, 0);
  }
  mz_store_rows((__nv_bfloat16 *)h.dqkv +
                    mz_cuda_query_at(h, b, head, q0 + warp_row),
                h.ld, h.sequence - q0 - warp_row, h.width, dq, scale);
}

/* --- launches --- */

template <typename K> static constexpr int keys_bytes(void)
{
  return 2 * K::HELD + 4 * K::TILE + 4 * K::STATS;
}

template <typename S>
static mz_status_t launch(void (*kernel)(mz_cuda_heads_t), const char *name,
                          int bytes, int heads, const mz_cuda_heads_t *h,
                          cudaStream_t stream)
{
  int64_t blocks = mz_div_up(h->sequence, S::BLOCK) * h->batch * heads;

  MZ_REQUIRE(blocks <= INT32_MAX, MZ_ERR_OVERFLOW, "%s: %" PRId64 " blocks",
             name, blocks);
  MZ_REQUIRE(bytes <= h->shared, MZ_ERR_UNSUPPORTED,
             "%s: %d bytes of shared memory, this GPU has %d for a block", name,
             bytes, h->shared);
  MZ_CUDA(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<(unsigned)blocks, S::THREADS, (size_t)bytes, stream>>>(*h);
  MZ_LAUNCHED(name);
  return MZ_OK;
}

template <typename K>
static mz_status_t run_keys(const mz_cuda_heads_t *h, cudaStream_t stream)
{
  return launch<K>(grad_keys<K>, "attention_grad of keys on tensor cores",
                   keys_bytes<K>(), h->kv_heads, h, stream);
}

template <int W>
static mz_status_t run(const mz_cuda_heads_t *h, cudaStream_t stream)
{
  typedef keys_shape<W, false> K;
  typedef queries_shape<W> Q;

  if (keys_bytes<K>() > h->shared)
    MZ_TRY((run_keys<keys_shape<W, true>>(h, stream)));
  else
    MZ_TRY(run_keys<K>(h, stream));
  return launch<Q>(grad_queries<W>, "attention_grad of queries on tensor cores",
                   2 * Q::HELD + 4 * Q::TILE, h->heads, h, stream);
}

mz_status_t mz_cuda_attention_mma_grad(const mz_cuda_heads_t *h,
                                       cudaStream_t stream)
{
  return h->width <= 64 ? run<64>(h, stream) : run<128>(h, stream);
}
