/* SPDX-License-Identifier: Apache-2.0 */
/* Attention by plain fp32 arithmetic, for every dtype and head width: tiles of
 * TILE queries x TILE keys as on the CPU, one block of 16 x 16 threads each.
 * Thread (ty, tx) owns rows ty + 16 i and columns tx + 16 j of a product, so
 * that the reads of a warp fall on different banks. Letters: attention.h.
 *
 * Forward and dq: a block has a query tile and walks over the keys. dk, dv: a
 * block has a key tile and walks over the query heads of its group and their
 * queries, in that order: every sum has one order. */
#include "kernels/cuda/attention.h"
#include "kernels/cuda/cuda.h"

enum { SIDE = 16, THREADS = SIDE * SIDE };

/* W: the head width the tiles have room for; HALF: tiles of half as many rows,
 * for cards whose blocks have little shared memory (99 KiB, where the GPUs of
 * large machines have 163 and more). LD is odd: no bank conflicts down a
 * column. */
template <int W_, bool HALF> struct shape {
  enum { W = W_, TILE = (W_ > 128 ? 32 : 64) / (HALF ? 2 : 1) };
  enum { R = TILE / SIDE, C = W_ / SIDE };
  enum { LD = W_ + 1, LDP = TILE + 1, ROWS = TILE * LD, SCORES = TILE * LDP };
};

struct place {
  int tx, ty, b, head, first;
};

/* Longest tiles first: `from_end` where the last see the most. */
template <int TILE>
static __device__ place place_of(const mz_cuda_heads_t &h, int heads,
                                 bool from_end)
{
  place p;
  int64_t pairs = (int64_t)h.batch * heads;
  int64_t tile = blockIdx.x / pairs, pair = blockIdx.x % pairs;
  int64_t tiles = (h.sequence + TILE - 1) / TILE;

  p.tx = (int)threadIdx.x % SIDE;
  p.ty = (int)threadIdx.x / SIDE;
  p.b = (int)(pair / heads);
  p.head = (int)(pair % heads);
  p.first = (int)(from_end ? tiles - 1 - tile : tile) * TILE;
  return p;
}

/* TILE rows of a head from `from`; rows behind `rows` and columns behind the
 * width are zeros. */
template <typename S, typename T>
static __device__ void load_rows(float *to, const T *from, int64_t ld, int rows,
                                 int width)
{
  for (int i = (int)threadIdx.x; i < S::TILE * S::W; i += THREADS) {
    int row = i / S::W, col = i % S::W;
    bool inside = row < rows && col < width;

    to[row * S::LD + col] = inside ? mz_load(from[row * ld + col]) : 0.0f;
  }
}

/* s[i][j] = the product of rows ty + 16 i of a and tx + 16 j of b. */
template <typename S>
static __device__ void product_rows(float (&s)[S::R][S::R], const float *a,
                                    const float *b, const place &p, int width)
{
  for (int i = 0; i < S::R; i++)
    for (int j = 0; j < S::R; j++)
      s[i][j] = 0;
  for (int k = 0; k < width; k++) {
    float x[S::R], y[S::R];
#pragma unroll
    for (int i = 0; i < S::R; i++) {
      x[i] = a[(p.ty + SIDE * i) * S::LD + k];
      y[i] = b[(p.tx + SIDE * i) * S::LD + k];
    }
#pragma unroll
    for (int i = 0; i < S::R; i++)
#pragma unroll
      for (int j = 0; j < S::R; j++)
        s[i][j] = fmaf(x[i], y[j], s[i][j]);
  }
}

/* o[i][j] += sum over n of m(row, n) x[n, tx + 16 j]; row ty + 16 i of m, or,
 * turned, its column. */
template <typename S, bool TURNED>
static __device__ void product_add(float (&o)[S::R][S::C], const float *m,
                                   const float *x, const place &p)
{
  for (int n = 0; n < S::TILE; n++) {
    float u[S::R];
#pragma unroll
    for (int i = 0; i < S::R; i++) {
      int row = p.ty + SIDE * i;
      u[i] = TURNED ? m[n * S::LDP + row] : m[row * S::LDP + n];
    }
#pragma unroll
    for (int j = 0; j < S::C; j++) {
      float y = x[n * S::LD + p.tx + SIDE * j];
#pragma unroll
      for (int i = 0; i < S::R; i++)
        o[i][j] = fmaf(u[i], y, o[i][j]);
    }
  }
}

template <typename S> static __device__ void zero(float (&o)[S::R][S::C])
{
#pragma unroll
  for (int i = 0; i < S::R; i++)
#pragma unroll
    for (int j = 0; j < S::C; j++)
      o[i][j] = 0;
}

/* Rows behind `rows` and columns behind the width are not there. */
template <typename S, typename T>
static __device__ void store_rows(T *to, int64_t ld, int rows, int width,
                                  const float (&o)[S::R][S::C],
                                  const float (&factor)[S::R], const place &p)
{
#pragma unroll
  for (int i = 0; i < S::R; i++) {
    int row = p.ty + SIDE * i;
#pragma unroll
    for (int j = 0; j < S::C; j++) {
      int col = p.tx + SIDE * j;
      if (row < rows && col < width)
        to[row * ld + col] = mz_store<T>(o[i][j] * factor[i]);
    }
  }
}

/* Over the 16 threads of a row: a half warp. */
static __device__ float row_max(float x)
{
  for (int offset = SIDE / 2; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

static __device__ float row_sum(float x)
{
  for (int offset = SIDE / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

/* One key tile's scores to exp(score - top) in `scores`; top rises, sums and
 * outputs shrink. sum is the thread's own part of its row. */
template <typename S>
static __device__ void softmax_tile(float (&s)[S::R][S::R],
                                    float (&o)[S::R][S::C], float (&top)[S::R],
                                    float (&sum)[S::R], float *scores,
                                    const place &p, int k0, float scale)
{
#pragma unroll
  for (int i = 0; i < S::R; i++) {
    int row = p.ty + SIDE * i;
    float high = -INFINITY, before = top[i], shrink;
#pragma unroll
    for (int j = 0; j < S::R; j++) {
      bool seen = k0 + p.tx + SIDE * j <= p.first + row;
      s[i][j] = seen ? s[i][j] * scale : -INFINITY;
      high = fmaxf(high, s[i][j]);
    }
    /* Finite: the first tile has key 0, which every query sees. */
    top[i] = fmaxf(before, row_max(high));
    shrink = expf(before - top[i]);
    sum[i] *= shrink;
#pragma unroll
    for (int j = 0; j < S::R; j++) {
      float e = expf(s[i][j] - top[i]);
      sum[i] += e;
      scores[row * S::LDP + p.tx + SIDE * j] = e;
    }
#pragma unroll
    for (int j = 0; j < S::C; j++)
      o[i][j] *= shrink;
  }
}

template <typename S, typename T>
static __global__ void __launch_bounds__(THREADS) forward(mz_cuda_heads_t h)
{
  extern __shared__ __align__(16) float shared[];
  float *query = shared, *other = query + S::ROWS, *scores = other + S::ROWS;
  const T *qkv = (const T *)h.qkv;
  place p = place_of<S::TILE>(h, h.heads, true);
  int rows = h.sequence - p.first, kv_head = p.head / h.group;
  float s[S::R][S::R], o[S::R][S::C], top[S::R], sum[S::R];

  zero<S>(o);
  for (int i = 0; i < S::R; i++) {
    top[i] = -INFINITY;
    sum[i] = 0;
  }
  load_rows<S>(query, qkv + mz_cuda_query_at(h, p.b, p.head, p.first), h.ld,
               rows, h.width);
  for (int k0 = 0; k0 <= p.first; k0 += S::TILE) {
    int keys = h.sequence - k0;

    __syncthreads(); /* the values of the last tile were read */
    load_rows<S>(other, qkv + mz_cuda_key_at(h, p.b, kv_head, k0), h.ld, keys,
                 h.width);
    __syncthreads();
    product_rows<S>(s, query, other, p, h.width);
    softmax_tile<S>(s, o, top, sum, scores, p, k0, h.scale);
    __syncthreads(); /* the keys were read, the scores written */
    load_rows<S>(other, qkv + mz_cuda_value_at(h, p.b, kv_head, k0), h.ld, keys,
                 h.width);
    __syncthreads();
    product_add<S, false>(o, scores, other, p);
  }
  for (int i = 0; i < S::R; i++) {
    int row = p.ty + SIDE * i;
    float all = row_sum(sum[i]);

    if (p.tx == 0 && row < rows)
      h.lse[mz_cuda_stats_at(h, p.b, p.head, p.first + row)] =
          top[i] + logf(all);
    sum[i] = 1.0f / all;
  }
  store_rows<S>((T *)h.out + mz_cuda_out_at(h, p.b, p.head, p.first), h.ldo,
                rows, h.width, o, sum, p);
}

/* Probabilities p and the gradient ds of the scores (before the scale) of a
 * tile, into shared memory; probs may be NULL. */
template <typename S>
static __device__ void
grad_tile(const float *query, const float *key, const float *dout,
          const float *value, const mz_cuda_heads_t &h, const place &p,
          int head, int q0, int k0, float *probs, float *dscores)
{
  float s[S::R][S::R], ds[S::R][S::R];

  product_rows<S>(s, query, key, p, h.width);
  product_rows<S>(ds, dout, value, p, h.width);
#pragma unroll
  for (int i = 0; i < S::R; i++) {
    int row = p.ty + SIDE * i, q = q0 + row;
    bool there = q < h.sequence;
    int64_t at = mz_cuda_stats_at(h, p.b, head, there ? q : 0);
    float lse = h.lse[at], delta = h.delta[at];
#pragma unroll
    for (int j = 0; j < S::R; j++) {
      int col = p.tx + SIDE * j;
      bool seen = there && k0 + col <= q;
      float e = seen ? expf(s[i][j] * h.scale - lse) : 0.0f;

      if (probs) probs[row * S::LDP + col] = e;
      dscores[row * S::LDP + col] = e * (ds[i][j] - delta);
    }
  }
}

template <typename S, typename T>
static __global__ void __launch_bounds__(THREADS) grad_keys(mz_cuda_heads_t h)
{
  extern __shared__ __align__(16) float shared[];
  float *key = shared, *value = key + S::ROWS, *query = value + S::ROWS;
  float *dout = query + S::ROWS, *probs = dout + S::ROWS;
  float *dscores = probs + S::SCORES;
  const T *qkv = (const T *)h.qkv;
  place p = place_of<S::TILE>(h, h.kv_heads, false);
  int keys = h.sequence - p.first, head0 = p.head * h.group;
  float dk[S::R][S::C], dv[S::R][S::C], scale[S::R], one[S::R];

  zero<S>(dk);
  zero<S>(dv);
  for (int i = 0; i < S::R; i++) {
    scale[i] = h.scale;
    one[i] = 1;
  }
  load_rows<S>(key, qkv + mz_cuda_key_at(h, p.b, p.head, p.first), h.ld, keys,
               h.width);
  load_rows<S>(value, qkv + mz_cuda_value_at(h, p.b, p.head, p.first), h.ld,
               keys, h.width);
  for (int head = head0; head < head0 + h.group; head++)
    for (int q0 = p.first; q0 < h.sequence; q0 += S::TILE) {
      int rows = h.sequence - q0;

      __syncthreads(); /* the last tile was read */
      load_rows<S>(query, qkv + mz_cuda_query_at(h, p.b, head, q0), h.ld, rows,
                   h.width);
      load_rows<S>(dout, (const T *)h.dout + mz_cuda_out_at(h, p.b, head, q0),
                   h.ldo, rows, h.width);
      __syncthreads();
      grad_tile<S>(query, key, dout, value, h, p, head, q0, p.first, probs,
                   dscores);
      __syncthreads();
      product_add<S, true>(dv, probs, dout, p);
      product_add<S, true>(dk, dscores, query, p);
    }
  store_rows<S>((T *)h.dqkv + mz_cuda_key_at(h, p.b, p.head, p.first), h.ld,
                keys, h.width, dk, scale, p);
  store_rows<S>((T *)h.dqkv + mz_cuda_value_at(h, p.b, p.head, p.first), h.ld,
                keys, h.width, dv, one, p);
}

template <typename S, typename T>
static __global__ void __launch_bounds__(THREADS)
    grad_queries(mz_cuda_heads_t h)
{
  extern __shared__ __align__(16) float shared[];
  float *key = shared, *value = key + S::ROWS, *query = value + S::ROWS;
  float *dout = query + S::ROWS, *dscores = dout + S::ROWS;
  const T *qkv = (const T *)h.qkv;
  place p = place_of<S::TILE>(h, h.heads, true);
  int rows = h.sequence - p.first, kv_head = p.head / h.group;
  float dq[S::R][S::C], scale[S::R];

  zero<S>(dq);
  for (int i = 0; i < S::R; i++)
    scale[i] = h.scale;
  load_rows<S>(query, qkv + mz_cuda_query_at(h, p.b, p.head, p.first), h.ld,
               rows, h.width);
  load_rows<S>(dout,
               (const T *)h.dout + mz_cuda_out_at(h, p.b, p.head, p.first),
               h.ldo, rows, h.width);
  for (int k0 = 0; k0 <= p.first; k0 += S::TILE) {
    int keys = h.sequence - k0;

    __syncthreads(); /* the last tile was read */
    load_rows<S>(key, qkv + mz_cuda_key_at(h, p.b, kv_head, k0), h.ld, keys,
                 h.width);
    load_rows<S>(value, qkv + mz_cuda_value_at(h, p.b, kv_head, k0), h.ld, keys,
                 h.width);
    __syncthreads();
    grad_tile<S>(query, key, dout, value, h, p, p.head, p.first, k0, NULL,
                 dscores);
    __syncthreads();
    product_add<S, false>(dq, dscores, key, p);
  }
  store_rows<S>((T *)h.dqkv + mz_cuda_query_at(h, p.b, p.head, p.first), h.ld,
                rows, h.width, dq, scale, p);
}

/* --- launches --- */

typedef void (*kernel_t)(mz_cuda_heads_t);

static mz_status_t launch(kernel_t kernel, const char *name, int64_t floats,
                          int64_t blocks, const mz_cuda_heads_t *h,
                          cudaStream_t stream)
{
  int bytes = (int)(floats * (int64_t)sizeof(float));

  MZ_REQUIRE(blocks <= INT32_MAX, MZ_ERR_OVERFLOW, "%s: %" PRId64 " blocks",
             name, blocks);
  MZ_REQUIRE(bytes <= h->shared, MZ_ERR_UNSUPPORTED,
             "%s: %d bytes of shared memory, this GPU has %d for a block", name,
             bytes, h->shared);
  MZ_CUDA(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<(unsigned)blocks, THREADS, (size_t)bytes, stream>>>(*h);
  MZ_LAUNCHED(name);
  return MZ_OK;
}

/* The most floats that a kernel of a shape has. */
template <typename S> static constexpr int64_t most_floats(void)
{
  return 4 * S::ROWS + 2 * S::SCORES;
}

template <typename S, typename T>
static mz_status_t run_shape(const mz_cuda_heads_t *h, bool grad,
                             cudaStream_t stream)
{
  int64_t tiles = mz_div_up(h->sequence, S::TILE) * h->batch;

  if (!grad)
    return launch(forward<S, T>, "attention", 2 * S::ROWS + S::SCORES,
                  tiles * h->heads, h, stream);
  MZ_TRY(launch(grad_keys<S, T>, "attention_grad of keys", most_floats<S>(),
                tiles * h->kv_heads, h, stream));
  return launch(grad_queries<S, T>, "attention_grad of queries",
                4 * S::ROWS + S::SCORES, tiles * h->heads, h, stream);
}

/* The width decides and the card, forward and backward alike. */
template <int W, typename T>
static mz_status_t run(const mz_cuda_heads_t *h, bool grad, cudaStream_t stream)
{
  if constexpr (W > 64)
    if (most_floats<shape<W, false>>() * 4 > h->shared)
      return run_shape<shape<W, true>, T>(h, grad, stream);
  return run_shape<shape<W, false>, T>(h, grad, stream);
}

template <typename T>
static mz_status_t run_width(const mz_cuda_heads_t *h, bool grad,
                             cudaStream_t stream)
{
  if (h->width <= 32) return run<32, T>(h, grad, stream);
  if (h->width <= 64) return run<64, T>(h, grad, stream);
  if (h->width <= 128) return run<128, T>(h, grad, stream);
  return run<256, T>(h, grad, stream);
}

mz_status_t mz_cuda_attention_fma(mz_dtype_t dtype, const mz_cuda_heads_t *h,
                                  bool grad, cudaStream_t stream)
{
  return dtype == MZ_BF16 ? run_width<__nv_bfloat16>(h, grad, stream)
                          : run_width<float>(h, grad, stream);
}
