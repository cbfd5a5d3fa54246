/* SPDX-License-Identifier: Apache-2.0 */
/* The gate, second half: rows, weights and statistics from the choices and
 * counts of all tiles. Letters, tiles: kernels/cuda/gate.h.
 *
 * Dropless: totals (a prefix sum over the tiles), places (a row for each
 * route). With a capacity places sorts the routes by expert instead, select
 * keeps the best C of each expert and knows their rows, and weights follow. */
#include "kernels/cuda/gate.h"

enum {
  THREADS = 256,
  SELECT_THREADS = 512,
  MAX_WARPS = 8, /* of a tile's places */
  DIGIT = 8,     /* bits of a key at a time */
  BINS = 1 << DIGIT
};

/* Bytes of shared memory that a block may have without asking. */
enum { SHARED_BYTES = 48 * 1024 };

/* --- sums over a block, in a fixed order --- */

/* Sum of x over the threads before this one; *all_out: over all of them.
 * shared: 32 numbers, which may be used again on return. */
static __device__ int32_t scan_block(int32_t x, int32_t *shared,
                                     int32_t *all_out)
{
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
  int32_t inclusive = x, before = 0, all = 0;

  for (int offset = 1; offset < 32; offset *= 2) {
    int32_t other = __shfl_up_sync(0xffffffffu, inclusive, offset);

    if (lane >= offset) inclusive += other;
  }
  if (lane == 31) shared[warp] = inclusive;
  __syncthreads();
  for (int w = 0; w < (int)(blockDim.x / 32); w++) {
    if (w < warp) before += shared[w];
    all += shared[w];
  }
  __syncthreads();
  *all_out = all;
  return before + inclusive - x;
}

/* Sum of x over the block; thread 0 gets it. */
static __device__ double sum_block(double x, double *shared)
{
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
  double sum = 0.0;

  for (int offset = 16; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  for (int w = 0; threadIdx.x == 0 && w < (int)(blockDim.x / 32); w++)
    sum += shared[w];
  return sum;
}

/* --- totals: a block an expert, and one for the rest --- */

static __device__ int32_t num_kept(const mz_gate_t &a, int32_t total)
{
  return a.capacity > 0 && total > a.capacity ? a.capacity : total;
}

static __device__ void finish_expert(const mz_cuda_gate_t &g, int32_t e)
{
  __shared__ int32_t counts[32];
  __shared__ double sums[32];
  const mz_gate_t &a = g.a;
  int64_t per = (g.tiles + THREADS - 1) / THREADS;
  int64_t begin = threadIdx.x * per, end = begin + per;
  int32_t count = 0, firsts = 0, total, at;
  double sum = 0.0;
  int64_t *stats = (int64_t *)a.stats;

  end = end < g.tiles ? end : g.tiles;
  for (int64_t i = begin; i < end; i++) {
    count += g.counts[e * g.tiles + i];
    firsts += g.firsts[e * g.tiles + i];
    sum += g.sums[e * g.tiles + i];
  }
  scan_block(firsts, counts, &firsts);
  at = scan_block(count, counts, &total);
  sum = sum_block(sum, sums);
  for (int64_t i = begin; i < end; i++) {
    int32_t here = g.counts[e * g.tiles + i];

    g.counts[e * g.tiles + i] = at;
    at += here;
  }
  if (threadIdx.x > 0) return;
  g.totals[e] = total;
  a.kept[e] = num_kept(a, total);
  stats[MZ_STATS_ROUTED(a.num_experts) + e] += total;
  stats[MZ_STATS_KEPT(a.num_experts) + e] += num_kept(a, total);
  stats[MZ_STATS_FIRST(a.num_experts) + e] += firsts;
  ((double *)a.stats)[MZ_STATS_PROBS(a.num_experts) + e] += sum;
}

static __device__ void finish_tokens(const mz_cuda_gate_t &g)
{
  __shared__ double sums[32];
  __shared__ float gaps[32];
  const mz_gate_t &a = g.a;
  double z = 0.0;
  float gap = INFINITY;

  for (int64_t i = threadIdx.x; i < g.tiles; i += THREADS) {
    z += g.z[i];
    gap = fminf(gap, g.gap[i]);
  }
  for (int offset = 16; offset > 0; offset /= 2)
    gap = fminf(gap, __shfl_xor_sync(0xffffffffu, gap, offset));
  if (threadIdx.x % 32 == 0) gaps[threadIdx.x / 32] = gap;
  z = sum_block(z, sums); /* with a barrier, after which gaps are there */
  if (threadIdx.x > 0) return;
  for (int w = 1; w < THREADS / 32; w++)
    gap = fminf(gap, gaps[w]);
  /* Infinity where there was no choice; min_gap is then left alone, and may be
   * NULL. */
  if (gap < INFINITY && (double)gap < *a.min_gap) *a.min_gap = (double)gap;
  ((double *)a.stats)[MZ_STATS_Z(a.num_experts)] += z;
  ((int64_t *)a.stats)[MZ_STATS_TOKENS(a.num_experts)] += a.num_tokens;
}

static __global__ void __launch_bounds__(THREADS) gate_totals(mz_cuda_gate_t g)
{
  if ((int32_t)blockIdx.x < g.a.num_experts)
    finish_expert(g, (int32_t)blockIdx.x);
  else
    finish_tokens(g);
}

/* --- places: a block a tile --- */

/* base[e]: place of the tile's first route to expert e, when all routes are
 * sorted by (expert, route). By one warp. */
static __device__ void find_bases(const mz_cuda_gate_t &g, int32_t *base)
{
  int lane = (int)(threadIdx.x % 32);
  int32_t carry = 0;

  for (int32_t e0 = 0; e0 < g.a.num_experts; e0 += 32) {
    int32_t e = e0 + lane;
    bool valid = e < g.a.num_experts;
    int32_t total = valid ? g.totals[e] : 0, inclusive = total;
    int32_t before = valid ? g.counts[e * g.tiles + blockIdx.x] : 0;

    for (int offset = 1; offset < 32; offset *= 2) {
      int32_t other = __shfl_up_sync(0xffffffffu, inclusive, offset);

      if (lane >= offset) inclusive += other;
    }
    if (valid) base[e] = carry + inclusive - total + before;
    carry += __shfl_sync(0xffffffffu, inclusive, 31);
  }
}

/* The next place of the lane's expert (-1: no route), lower lanes first; counts
 * are the warp's own. Every lane of the warp comes here. */
static __device__ __forceinline__ int32_t take_place(int32_t *counts,
                                                     int32_t expert)
{
  unsigned lower = (1u << threadIdx.x % 32) - 1;
  unsigned peers = __match_any_sync(0xffffffffu, expert);
  int32_t place = expert >= 0 ? counts[expert] : 0;

  __syncwarp();
  if (expert >= 0 && (peers & lower) == 0) counts[expert] += __popc(peers);
  __syncwarp();
  return place + __popc(peers & lower);
}

/* Counts become the first places of each warp's routes. */
static __device__ void places_of_warps(const int32_t *base, int32_t *counts,
                                       int warps, int32_t experts)
{
  for (int32_t e = (int32_t)threadIdx.x; e < experts; e += (int)blockDim.x) {
    int32_t at = base[e];

    for (int w = 0; w < warps; w++) {
      int32_t count = counts[w * experts + e];

      counts[w * experts + e] = at;
      at += count;
    }
  }
}

/* What a chosen gate is divided by, with the routes that count given by
 * kept_sum. */
static __device__ __forceinline__ float weight_of(const mz_gate_t &a, int64_t r,
                                                  float kept_sum)
{
  float sum = mz_gate_is_divided(a) ? fmaxf(kept_sum, MZ_GATE_MIN_SUM) : 1.0f;

  return a.probs[r / a.k * a.num_experts + a.expert[r]] / sum;
}

/* Sum of the gates of a token's routes, in order of j. */
static __device__ __forceinline__ float chosen_sum(const mz_gate_t &a,
                                                   int64_t t)
{
  const float *gate = a.probs + t * a.num_experts;
  float sum = 0.0f;

  for (int64_t r = t * a.k; r < (t + 1) * a.k; r++)
    sum += gate[a.expert[r]];
  return sum;
}

/* The smaller, the better. Numbers that are not negative are in the order of
 * their bits. With two choices all first ones go before the second ones. */
static __device__ uint32_t key_of(const mz_gate_t &a, int64_t r)
{
  int64_t t = r / a.k, j = r % a.k;

  if (a.policy == MZ_DROP_POSITION) return a.k == 2 ? (uint32_t)j : 0u;
  if (a.policy == MZ_DROP_RANDOM) {
    uint64_t i = mz_gate_number(a, t, a.k) + (uint64_t)j;

    return ~__float_as_uint(mz_uniform_of(mz_gate_bits(a.random, i)));
  }
  return ~__float_as_uint(a.probs[t * a.num_experts + a.expert[r]]);
}

/* -1: the route of a pad. */
static __device__ __forceinline__ int32_t expert_of(const mz_gate_t &a,
                                                    int64_t r)
{
  return mz_gate_is_pad(a, r / a.k) ? -1 : a.expert[r];
}

/* shared: base [E], counts [warps, E]. A warp has a stretch of the routes. */
static __global__ void gate_places(mz_cuda_gate_t g)
{
  extern __shared__ int32_t shared[];
  const mz_gate_t &a = g.a;
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);
  int warps = (int)(blockDim.x / 32);
  int32_t *base = shared, *counts = shared + a.num_experts;
  int32_t *mine = counts + warp * a.num_experts;
  int64_t first = (int64_t)blockIdx.x * MZ_GATE_TILE;
  int64_t left = a.num_tokens - first;
  int64_t n = (left < MZ_GATE_TILE ? left : MZ_GATE_TILE) * a.k;
  int64_t stretch = (n + warps * 32 - 1) / (warps * 32) * 32;
  int64_t begin = warp * stretch, end = begin + stretch;

  end = end < n ? end : n;
  for (int i = (int)threadIdx.x; i < warps * a.num_experts;
       i += (int)blockDim.x)
    counts[i] = 0;
  if (warp == 0) find_bases(g, base);
  __syncthreads();
  for (int64_t i = begin; i < end; i += 32)
    take_place(mine,
               i + lane < end ? expert_of(a, first * a.k + i + lane) : -1);
  __syncthreads();
  places_of_warps(base, counts, warps, a.num_experts);
  __syncthreads();
  for (int64_t i = begin; i < end; i += 32) {
    int64_t r = first * a.k + i + lane;
    bool valid = i + lane < end;
    int32_t expert = valid ? expert_of(a, r) : -1;
    int32_t place = take_place(mine, expert);

    if (!valid) continue;
    if (expert < 0) {
      a.row[r] = -1;
      a.weight[r] = 0.0f;
    } else if (a.capacity > 0) {
      g.keys[place] = key_of(a, r);
      g.routes[place] = (int32_t)r;
    } else {
      a.row[r] = place;
      a.weight[r] = weight_of(a, r, chosen_sum(a, r / a.k));
    }
  }
}

/* --- select: a block an expert --- */

/* The routes of an expert, in rising order, and where they go. */
typedef struct expert_routes {
  const uint32_t *keys;
  const int32_t *routes;
  int32_t count;
  int32_t row; /* of the first one kept */
} expert_routes_t;

static __device__ expert_routes_t routes_of(const mz_cuda_gate_t &g,
                                            int32_t expert, int32_t *shared)
{
  int32_t places = 0, rows = 0;

  for (int32_t e = (int32_t)threadIdx.x; e < expert; e += (int)blockDim.x) {
    places += g.totals[e];
    rows += num_kept(g.a, g.totals[e]);
  }
  scan_block(places, shared, &places);
  scan_block(rows, shared, &rows);
  return {g.keys + places, g.routes + places, g.totals[expert], rows};
}

/* Which bin holds the number that has *rank_io numbers before it, counted in
 * bins; *rank_io becomes its rank in that bin. The first BINS threads look. */
static __device__ uint32_t find_bin(const int32_t *bins, int32_t *rank_io,
                                    int32_t *shared)
{
  __shared__ int32_t found[2];
  bool looks = threadIdx.x < BINS;
  int32_t all, count = looks ? bins[threadIdx.x] : 0;
  int32_t before = scan_block(count, shared, &all);

  if (looks && before <= *rank_io && *rank_io < before + count) {
    found[0] = (int32_t)threadIdx.x;
    found[1] = *rank_io - before;
  }
  __syncthreads();
  *rank_io = found[1];
  return (uint32_t)found[0];
}

/* The key with *rank_io (< count) keys before it, digit by digit from the
 * highest one; *rank_io becomes the number of equal keys before it. */
static __device__ uint32_t find_key(const expert_routes_t *s, int shift,
                                    int32_t *rank_io, int32_t *shared)
{
  __shared__ int32_t bins[BINS];
  uint32_t key = 0, mask = 0;

  for (; shift >= 0; shift -= DIGIT) {
    for (int i = (int)threadIdx.x; i < BINS; i += (int)blockDim.x)
      bins[i] = 0;
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < s->count; i += (int)blockDim.x)
      if ((s->keys[i] & mask) == key)
        atomicAdd(&bins[s->keys[i] >> shift & (BINS - 1)], 1);
    __syncthreads();
    key |= find_bin(bins, rank_io, shared) << shift;
    mask |= (uint32_t)(BINS - 1) << shift;
  }
  return key;
}

/* Kept are keys before @p key, and the first @p ties equal to it. Rows go up in
 * the order of routes. less and equal counts of a step share one number: each
 * is at most SELECT_THREADS. */
static __device__ void keep_best(const mz_gate_t &a, const expert_routes_t *s,
                                 uint32_t key, int32_t ties, int32_t *shared)
{
  int32_t less = 0, equal = 0;

  for (int32_t i0 = 0; i0 < s->count; i0 += (int)blockDim.x) {
    int32_t i = i0 + (int32_t)threadIdx.x, all, before, n;
    bool valid = i < s->count;
    bool is_less = valid && s->keys[i] < key;
    bool is_equal = valid && s->keys[i] == key;

    before =
        scan_block((int32_t)is_less | (int32_t)is_equal << 16, shared, &all);
    n = equal + (before >> 16);
    if (valid) {
      bool kept = is_less || (is_equal && n < ties);
      int32_t rank = less + (before & 0xffff) + (n < ties ? n : ties);

      a.row[s->routes[i]] = kept ? s->row + rank : -1;
    }
    less += all & 0xffff;
    equal += all >> 16;
  }
}

/* Where the highest digit of a key begins that is not the same for all; -1:
 * keys are all 0. */
static __device__ int highest_digit(const mz_gate_t &a)
{
  if (a.policy != MZ_DROP_POSITION) return 32 - DIGIT;
  return a.k == 2 ? 0 : -1;
}

static __global__ void __launch_bounds__(SELECT_THREADS)
    gate_select(mz_cuda_gate_t g)
{
  __shared__ int32_t shared[32];
  expert_routes_t s = routes_of(g, (int32_t)blockIdx.x, shared);
  int32_t rank = g.a.capacity - 1;
  uint32_t key;

  if (s.count <= g.a.capacity) {
    for (int32_t i = (int32_t)threadIdx.x; i < s.count; i += (int)blockDim.x)
      g.a.row[s.routes[i]] = s.row + i;
    return;
  }
  key = find_key(&s, highest_digit(g.a), &rank, shared);
  keep_best(g.a, &s, key, rank + 1, shared);
}

/* --- weights of routes that may be dropped --- */

static __global__ void __launch_bounds__(THREADS) gate_weights(mz_gate_t a)
{
  int64_t r = (int64_t)blockIdx.x * THREADS + threadIdx.x;

  if (r >= a.num_tokens * a.k) return;
  a.weight[r] =
      a.row[r] < 0 ? 0.0f : weight_of(a, r, mz_gate_kept_sum(a, r / a.k));
}

/* --- launch --- */

static mz_status_t launch_places(const mz_cuda_gate_t *g, cudaStream_t stream)
{
  int64_t expert_bytes = g->a.num_experts * (int64_t)sizeof(int32_t);
  int64_t warps = mz_min_i64(g->a.k, MAX_WARPS);

  warps = mz_min_i64(warps, SHARED_BYTES / expert_bytes - 1);
  gate_places<<<(unsigned)g->tiles, (unsigned)warps * 32,
                (size_t)((warps + 1) * expert_bytes), stream>>>(*g);
  MZ_LAUNCHED("gate_places");
  return MZ_OK;
}

static mz_status_t launch_select(const mz_cuda_gate_t *g, cudaStream_t stream)
{
  int64_t blocks = mz_div_up(g->a.num_tokens * g->a.k, THREADS);

  gate_select<<<(unsigned)g->a.num_experts, SELECT_THREADS, 0, stream>>>(*g);
  MZ_LAUNCHED("gate_select");
  gate_weights<<<(unsigned)blocks, THREADS, 0, stream>>>(g->a);
  MZ_LAUNCHED("gate_weights");
  return MZ_OK;
}

mz_status_t mz_cuda_gate_route(const mz_cuda_gate_t *g, cudaStream_t stream)
{
  gate_totals<<<(unsigned)g->a.num_experts + 1, THREADS, 0, stream>>>(*g);
  MZ_LAUNCHED("gate_totals");
  MZ_TRY(launch_places(g, stream));
  if (g->a.capacity > 0) MZ_TRY(launch_select(g, stream));
  return MZ_OK;
}
