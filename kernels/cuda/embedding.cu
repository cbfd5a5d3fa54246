/* SPDX-License-Identifier: Apache-2.0 */
/* Token and position embedding on the GPU. Letters: kernels/embedding.h.
 *
 * Backward sums in token order without atomics: the pairs (id, token) are
 * sorted - they all differ, so any sort is a stable one - and equal ids then
 * lie together in token order. Rows of one id are added by one warp, a column
 * always by the same thread. An id that occurs often would keep its warp busy
 * for long, so its columns are shared among many warps that read many rows
 * ahead. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dropout.cuh"
#include "kernels/cuda/vector.cuh"

enum {
  THREADS = 256,
  WARPS = THREADS / 32,
  SORT_THREADS = 512,
  TILE = 2 * SORT_THREADS, /* pairs that a block sorts in shared memory */
  OFTEN = 64,              /* more occurrences than this: an id occurs often */
  AHEAD = 32,              /* its rows that a thread reads at once */
  COLUMNS = 4,             /* accesses a row at once, of a seldom id, */
  TOKENS = 2,              /* and its rows at once */
  SEQUENCES = 8            /* rows at once of a position */
};

/* --- forward --- */

/* A warp a token. The CPU refuses an id outside of the vocabulary; here nobody
 * could be told, so the row becomes NaN, which the loss then shows. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    embed(mz_embedding_t a, mz_mask_t mask)
{
  typedef typename mz_raw<T, N>::type raw_t;
  int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
  int64_t id = t < a.num_tokens ? a.tokens[t] : 0, packs = a.width / N;
  bool known = id >= 0 && id < a.vocab;
  const raw_t *__restrict__ te =
      (const raw_t *)((const T *)a.wte + (known ? id : 0) * a.width);
  const raw_t *__restrict__ pe =
      (const raw_t *)((const T *)a.wpe + t % a.sequence * a.width);
  raw_t *__restrict__ out = (raw_t *)((T *)a.x + t * a.width);
  uint64_t first = 0;

  if (t >= a.num_tokens) return;
  if (mask.threshold) first = mz_mask_first(mask, t, a.width);
#pragma unroll 4
  for (int64_t at = threadIdx.x % 32; at < packs; at += 32) {
    float x[N], other[N];

    mz_widen_raw<T, N>(te[at], x);
    if (a.wpe) {
      mz_widen_raw<T, N>(pe[at], other);
#pragma unroll
      for (int i = 0; i < N; i++)
        x[i] += other[i];
    }
    if (mask.threshold) mz_mask_apply<N>(mask, first + (uint64_t)(at * N), x);
#pragma unroll
    for (int i = 0; i < N; i++)
      x[i] = known ? x[i] : nanf("");
    out[at] = mz_narrow_raw<T, N>(x);
  }
}

/* learned: there is a table of positions. */
static mz_status_t check_sizes(const mz_embedding_t *a, bool learned)
{
  MZ_REQUIRE(a->num_tokens >= 0 && a->num_tokens <= INT32_MAX && a->width >= 1,
             MZ_ERR_ARG, "%" PRId64 " tokens of width %" PRId64, a->num_tokens,
             a->width);
  MZ_REQUIRE(a->sequence >= 1 && (!learned || a->sequence <= a->positions),
             MZ_ERR_SHAPE, "sequence %" PRId32 ", positions %" PRId64,
             a->sequence, a->positions);
  return MZ_OK;
}

template <typename T>
static mz_status_t embedding(const mz_embedding_t *a, cudaStream_t stream)
{
  enum { N = mz_pack<T>::N };
  unsigned blocks = (unsigned)mz_div_up(a->num_tokens, WARPS);
  mz_mask_t mask;

  MZ_TRY(check_sizes(a, a->wpe != NULL));
  MZ_TRY(mz_mask_make(&a->dropout, &mask));
  if (a->num_tokens == 0) return MZ_OK;
  if (a->width % N == 0 && mz_aligned(a->wte) && mz_aligned(a->wpe) &&
      mz_aligned(a->x))
    embed<T, N><<<blocks, THREADS, 0, stream>>>(*a, mask);
  else
    embed<T, 1><<<blocks, THREADS, 0, stream>>>(*a, mask);
  MZ_LAUNCHED("embedding");
  return MZ_OK;
}

extern "C" mz_status_t mz_k_embedding_cuda(const mz_kernels_t *kernels,
                                           const mz_embedding_t *a,
                                           mz_stream_t stream)
{
  return MZ_TRACE(MZ_BY_DTYPE(kernels, embedding, a, mz_cuda_stream(stream)));
}

/* --- tokens by id --- */

/* Sorts its TILE pairs id << 32 | token by compare and exchange (Batcher 1968,
 * bitonic); behind the last token stand pairs that sort last. */
static __global__ void __launch_bounds__(SORT_THREADS)
    sort_tiles(const int32_t *tokens, int64_t count, uint64_t *pairs)
{
  __shared__ uint64_t tile[TILE];
  int64_t base = (int64_t)blockIdx.x * TILE;
  unsigned thread = threadIdx.x;

  for (unsigned i = thread; i < TILE; i += SORT_THREADS) {
    int64_t t = base + i;

    tile[i] = t < count ? (uint64_t)(uint32_t)tokens[t] << 32 | (uint64_t)t
                        : UINT64_MAX;
  }
  for (unsigned size = 2; size <= TILE; size *= 2) {
    for (unsigned apart = size / 2; apart > 0; apart /= 2) {
      unsigned low = 2 * thread - (thread & (apart - 1)), high = low + apart;
      bool ascending = (low & size) == 0;
      uint64_t a, b;

      __syncthreads();
      a = tile[low];
      b = tile[high];
      if ((a > b) == ascending) {
        tile[low] = b;
        tile[high] = a;
      }
    }
  }
  __syncthreads();
  for (unsigned i = thread; i < TILE; i += SORT_THREADS)
    if (base + i < count) pairs[base + i] = tile[i];
}

/* Merges sorted runs of `run` pairs by two: a pair's place is its own place in
 * its run plus the number of smaller ones in the other. */
static __global__ void __launch_bounds__(THREADS)
    merge_runs(const uint64_t *from, int64_t count, int64_t run, uint64_t *to)
{
  int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  int64_t base, other, low, high;
  uint64_t pair;

  if (i >= count) return;
  base = i / (2 * run) * (2 * run);
  other = i < base + run ? base + run : base; /* start of the other run */
  low = min(other, count);
  high = min(other + run, count);
  pair = from[i];
  while (low < high) {
    int64_t middle = (low + high) / 2;

    if (from[middle] < pair)
      low = middle + 1;
    else
      high = middle;
  }
  /* i counts from the start of its run, low from that of the other. */
  to[base + (i - base) % run + (low - min(other, count))] = pair;
}

/* *sorted_out: [T] pairs, one of the two buffers. */
static mz_status_t sort_tokens(const mz_embedding_t *a, uint64_t *buffers[2],
                               const uint64_t **sorted_out, cudaStream_t stream)
{
  unsigned tiles = (unsigned)mz_div_up(a->num_tokens, TILE);
  unsigned blocks = (unsigned)mz_div_up(a->num_tokens, THREADS);
  int now = 0;

  sort_tiles<<<tiles, SORT_THREADS, 0, stream>>>(a->tokens, a->num_tokens,
                                                 buffers[0]);
  MZ_LAUNCHED("embedding_grad: tiles");
  for (int64_t run = TILE; run < a->num_tokens; run *= 2, now ^= 1) {
    merge_runs<<<blocks, THREADS, 0, stream>>>(buffers[now], a->num_tokens, run,
                                               buffers[now ^ 1]);
    MZ_LAUNCHED("embedding_grad: runs");
  }
  *sorted_out = buffers[now];
  return MZ_OK;
}

static __device__ __forceinline__ int64_t id_of(uint64_t pair)
{
  return (int64_t)(pair >> 32);
}

static __device__ __forceinline__ int64_t token_of(uint64_t pair)
{
  return (int64_t)(pair & 0xffffffffu);
}

/* Whether the id at i occurs for the first time there. */
static __device__ __forceinline__ bool begins(const uint64_t *sorted, int64_t i)
{
  return i == 0 || id_of(sorted[i - 1]) != id_of(sorted[i]);
}

/* Whether the id that begins at i occurs often. */
static __device__ __forceinline__ bool is_often(const uint64_t *sorted,
                                                int64_t i, int64_t count)
{
  return i + OFTEN < count && id_of(sorted[i + OFTEN]) == id_of(sorted[i]);
}

/* Ids outside of the vocabulary have no row. */
static __device__ __forceinline__ bool is_known(const uint64_t *sorted,
                                                int64_t i, int64_t vocab)
{
  return id_of(sorted[i]) < vocab;
}

/* --- sums over rows --- */

/* sum += N elements of dx as read, masked; first: their number in the random
 * stream. */
template <typename T, int N>
static __device__ __forceinline__ void add_part(typename mz_raw<T, N>::type raw,
                                                const mz_mask_t &mask,
                                                uint64_t first, float *sum)
{
  float x[N];

  mz_widen_raw<T, N>(raw, x);
  if (mask.threshold) mz_mask_apply<N>(mask, first, x);
#pragma unroll
  for (int i = 0; i < N; i++)
    sum[i] += x[i];
}

/* N floats from and to a row of fp32 sums; with N = 8 these are two accesses.
 * Rows of dwte and dwpe are aligned where N > 2. */
template <int N>
static __device__ __forceinline__ void read_sum(const float *from, bool there,
                                                float *sum)
{
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      mz_widen<float>(
          there ? *(const uint4 *)(from + i) : make_uint4(0, 0, 0, 0), sum + i);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++)
      sum[i] = there ? from[i] : 0.0f;
  }
}

template <int N>
static __device__ __forceinline__ void write_sum(float *to, const float *sum)
{
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      *(uint4 *)(to + i) = mz_narrow<float>(sum + i);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++)
      to[i] = sum[i];
  }
}

/* All occurrences of an id, columns of COLUMNS accesses from
 * pack `at` on. */
template <typename T, int N>
static __device__ __forceinline__ void
sum_seldom(const mz_embedding_grad_t &a, const mz_mask_t &mask,
           const uint64_t *pairs, int length, int64_t at, int64_t packs,
           float *out)
{
  typedef typename mz_raw<T, N>::type raw_t;
  int64_t width = a.forward.width;
  float sum[COLUMNS][N];

#pragma unroll
  for (int c = 0; c < COLUMNS; c++)
    read_sum<N>(out + (at + c * 32) * N, a.accumulate_te && at + c * 32 < packs,
                sum[c]);
  for (int r = 0; r < length; r += TOKENS) {
    raw_t raw[TOKENS][COLUMNS];
    uint64_t first[TOKENS] = {};

#pragma unroll
    for (int k = 0; k < TOKENS; k++) {
      int64_t t = token_of(pairs[r + k < length ? r + k : r]);
      const raw_t *dx = (const raw_t *)((const T *)a.dx + t * width);

#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        if (r + k < length && at + c * 32 < packs) raw[k][c] = dx[at + c * 32];
      if (mask.threshold) first[k] = mz_mask_first(mask, t, width);
    }
#pragma unroll
    for (int k = 0; k < TOKENS; k++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        if (r + k < length && at + c * 32 < packs)
          add_part<T, N>(raw[k][c], mask,
                         first[k] + (uint64_t)((at + c * 32) * N), sum[c]);
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; c++)
    if (at + c * 32 < packs) write_sum<N>(out + (at + c * 32) * N, sum[c]);
}

/* A warp a place in the sorted pairs: it has work where a seldom id begins. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    seldom_ids(mz_embedding_grad_t a, mz_mask_t mask, const uint64_t *sorted)
{
  int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
  int64_t count = a.forward.num_tokens, packs = a.forward.width / N;
  int lane = (int)threadIdx.x % 32, length = 0;
  float *out;

  if (i >= count || !begins(sorted, i) || is_often(sorted, i, count) ||
      !is_known(sorted, i, a.forward.vocab))
    return;
  /* At most OFTEN, the lanes look at 32 places at once. */
  for (int from = 0; from < OFTEN; from += 32) {
    int64_t j = i + from + lane;
    bool equal = j < count && id_of(sorted[j]) == id_of(sorted[i]);

    length += __popc(__ballot_sync(0xffffffffu, equal));
  }
  out = a.dwte + id_of(sorted[i]) * a.forward.width;
  for (int64_t at = lane; at < packs; at += 32 * COLUMNS)
    sum_seldom<T, N>(a, mask, sorted + i, length, at, packs, out);
}

/* Reads the rows of up to AHEAD occurrences from j on; lanes hold a token each
 * and read N columns. */
template <typename T, int N>
static __device__ __forceinline__ void
read_ahead(const mz_embedding_grad_t &a, int64_t t, int live, int64_t c,
           bool mine, typename mz_raw<T, N>::type (&raw)[AHEAD])
{
  typedef typename mz_raw<T, N>::type raw_t;
  const T *dx = (const T *)a.dx + c;

#pragma unroll
  for (int k = 0; k < AHEAD; k++) {
    int64_t row = __shfl_sync(0xffffffffu, t, k);

    if (k < live && mine) raw[k] = *(const raw_t *)(dx + row * a.forward.width);
  }
}

/* The token at place j and the number of places from there on, AHEAD at most,
 * that have the id. */
static __device__ __forceinline__ int64_t look_ahead(const uint64_t *sorted,
                                                     int64_t count, int64_t id,
                                                     int64_t j, int *live)
{
  int64_t place = j + threadIdx.x % 32;
  uint64_t pair = place < count ? sorted[place] : UINT64_MAX;

  *live = __popc(__ballot_sync(0xffffffffu, id_of(pair) == id));
  return token_of(pair);
}

/* The place in the window of OFTEN from `base` on where an id begins that
 * occurs often, or -1: there is one at most. */
static __device__ __forceinline__ int64_t find_often(const uint64_t *sorted,
                                                     int64_t count,
                                                     int64_t base)
{
  for (int from = 0; from < OFTEN; from += 32) {
    int64_t i = base + from + threadIdx.x % 32;
    unsigned found =
        __ballot_sync(0xffffffffu, i < count && is_often(sorted, i, count) &&
                                       begins(sorted, i));

    if (found) return base + from + __ffs((int)found) - 1;
  }
  return -1;
}

/* Blocks (x: a window of places, y: columns); a warp has 32 N columns. The rows
 * of the next AHEAD occurrences are read before those at hand are added. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    often_ids(mz_embedding_grad_t a, mz_mask_t mask, const uint64_t *sorted)
{
  static_assert(AHEAD == 32, "a lane has the token of one row");
  typedef typename mz_raw<T, N>::type raw_t;
  int64_t count = a.forward.num_tokens, width = a.forward.width;
  int64_t i = find_often(sorted, count, (int64_t)blockIdx.x * OFTEN);
  int64_t c = ((int64_t)blockIdx.y * THREADS + threadIdx.x) * N, id, t, next_t;
  bool mine = c < width;
  int live, next_live, lane = (int)threadIdx.x % 32;
  raw_t raw[AHEAD], next[AHEAD];
  float sum[N], *out;

  /* Whole warps without columns leave, others stay for the exchange. */
  if (i < 0 || c - lane * N >= width || !is_known(sorted, i, a.forward.vocab))
    return;
  id = id_of(sorted[i]);
  out = a.dwte + id * width + c;
  read_sum<N>(out, mine && a.accumulate_te, sum);
  t = look_ahead(sorted, count, id, i, &live);
  read_ahead<T, N>(a, t, live, c, mine, raw);
  while (live > 0) {
    uint64_t first = 0;

    if (mask.threshold && lane < live) first = mz_mask_first(mask, t, width);
    i += AHEAD;
    next_t = look_ahead(sorted, count, id, i, &next_live);
    read_ahead<T, N>(a, next_t, next_live, c, mine, next);
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      uint64_t row = mask.threshold ? __shfl_sync(0xffffffffu, first, k) : 0;

      if (k < live && mine)
        add_part<T, N>(raw[k], mask, row + (uint64_t)c, sum);
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
      raw[k] = next[k];
    t = next_t;
    live = next_live;
  }
  if (mine) write_sum<N>(out, sum);
}

/* Blocks (x: positions, y: columns), a warp a position and 32 N columns. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS, 2)
    sum_positions(mz_embedding_grad_t a, mz_mask_t mask)
{
  typedef typename mz_raw<T, N>::type raw_t;
  int64_t position = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
  int64_t c = ((int64_t)blockIdx.y * 32 + threadIdx.x % 32) * N;
  int64_t width = a.forward.width, count = a.forward.num_tokens;
  int64_t sequence = a.forward.sequence, sequences;
  float sum[N], *out = a.dwpe + position * width + c;
  const T *dx = (const T *)a.dx + position * width + c;

  if (position >= a.forward.positions || c >= width) return;
  /* No token stands behind the end of a sequence. */
  sequences = position < min(sequence, count)
                  ? (count - position + sequence - 1) / sequence
                  : 0;
  read_sum<N>(out, a.accumulate_pe, sum);
  for (int64_t b = 0; b < sequences; b += SEQUENCES) {
    raw_t raw[SEQUENCES];

#pragma unroll
    for (int k = 0; k < SEQUENCES; k++)
      if (b + k < sequences)
        raw[k] = *(const raw_t *)(dx + (b + k) * sequence * width);
#pragma unroll
    for (int k = 0; k < SEQUENCES; k++) {
      uint64_t row = 0;

      if (b + k >= sequences) continue;
      if (mask.threshold)
        row = (uint64_t)(mask.samples[b + k] * sequence + position);
      add_part<T, N>(raw[k], mask, row * (uint64_t)width + (uint64_t)c, sum);
    }
  }
  write_sum<N>(out, sum);
}

/* --- backward --- */

/* N elements an access over whole rows, M where columns are shared. */
template <typename T, int N, int M>
static mz_status_t sum_rows(const mz_embedding_grad_t *a, const mz_mask_t *mask,
                            const uint64_t *sorted, cudaStream_t stream)
{
  const mz_embedding_t *f = &a->forward;
  dim3 often((unsigned)mz_div_up(f->num_tokens, OFTEN),
             (unsigned)mz_div_up(f->width, THREADS * M));
  dim3 positions((unsigned)mz_div_up(f->positions, WARPS),
                 (unsigned)mz_div_up(f->width, 32 * N));
  unsigned seldom = (unsigned)mz_div_up(f->num_tokens, WARPS);

  MZ_REQUIRE(often.y <= UINT16_MAX && positions.y <= UINT16_MAX, MZ_ERR_ARG,
             "embedding_grad: width %" PRId64, f->width);
  if (f->num_tokens > 0) {
    seldom_ids<T, N><<<seldom, THREADS, 0, stream>>>(*a, *mask, sorted);
    MZ_LAUNCHED("embedding_grad: seldom ids");
    often_ids<T, M><<<often, THREADS, 0, stream>>>(*a, *mask, sorted);
    MZ_LAUNCHED("embedding_grad: often ids");
  }
  if (a->dwpe && f->positions > 0) {
    sum_positions<T, N><<<positions, THREADS, 0, stream>>>(*a, *mask);
    MZ_LAUNCHED("embedding_grad: positions");
  }
  return MZ_OK;
}

template <typename T>
static mz_status_t embedding_grad(const mz_kernels_t *kernels,
                                  const mz_embedding_grad_t *a,
                                  cudaStream_t stream)
{
  enum { N = mz_pack<T>::N, M = sizeof(T) == 2 ? 2 : 1 };
  const mz_embedding_t *f = &a->forward;
  const uint64_t *sorted = NULL;
  uint64_t *buffers[2];
  int64_t at = 0, size;
  mz_mask_t mask;

  MZ_TRY(check_sizes(f, a->dwpe != NULL));
  MZ_TRY(mz_mask_make(&f->dropout, &mask));
  MZ_TRY(mz_mul_i64(f->vocab, f->width, &size));
  for (int i = 0; i < 2; i++)
    MZ_TRY(mz_cuda_scratch(kernels, &at, f->num_tokens, "tokens by id",
                           &buffers[i]));
  if (!a->accumulate_te)
    MZ_CUDA(cudaMemsetAsync(a->dwte, 0, (size_t)size * sizeof(float), stream));
  if (f->num_tokens > 0) MZ_TRY(sort_tokens(f, buffers, &sorted, stream));
  if (f->width % N == 0 && mz_aligned(a->dx) && mz_aligned(a->dwte) &&
      mz_aligned(a->dwpe))
    return MZ_TRACE((sum_rows<T, N, M>(a, &mask, sorted, stream)));
  return MZ_TRACE((sum_rows<T, 1, 1>(a, &mask, sorted, stream)));
}

extern "C" mz_status_t mz_k_embedding_grad_cuda(const mz_kernels_t *kernels,
                                                const mz_embedding_grad_t *a,
                                                mz_stream_t stream)
{
  return MZ_TRACE(
      MZ_BY_DTYPE(kernels, embedding_grad, kernels, a, mz_cuda_stream(stream)));
}
