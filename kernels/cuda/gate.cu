/* SPDX-License-Identifier: Apache-2.0 */
/* The gate, first half: logits, gates and choices of a tile of tokens by one
 * block, which also leaves the tile's counts and sums. Letters, tiles:
 * kernels/cuda/gate.h; formulas: kernels/gate.h.
 *
 * x is read once where E <= 64 (in bf16; 8 otherwise), from then on out of the
 * cache. Logits take the way through probs: a block reads there only what it
 * has written itself. A gate without noise, bias, temperature and pads, of
 * softmax, has kernels that know nothing of them. */
#include "kernels/cuda/gate_logits.cuh"

enum { LANES = THREADS / MZ_GATE_TILE /* of a token while it chooses */ };

/* --- gates and choices: LANES lanes a token, each with every LANES-th expert.
 * Each reads and writes its own logits alone. --- */

static __device__ __forceinline__ float group_sum(float x)
{
  for (int offset = LANES / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

static __device__ __forceinline__ float group_max(float x)
{
  for (int offset = LANES / 2; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

/* NaN ranks last, so that a broken model still gives K distinct experts. */
static __device__ __forceinline__ float rank_of(float logit)
{
  return isnan(logit) ? -INFINITY : logit;
}

typedef struct candidate {
  float key;
  int32_t id;
} candidate_t;

static __device__ __forceinline__ bool better(candidate_t a, candidate_t b)
{
  return a.key > b.key || (a.key == b.key && a.id < b.id);
}

/* What the experts of a token are chosen by: logits or gates, to which noise or
 * a bias is added. */
typedef struct keys {
  const float *row;
  bool drawn;
  uint64_t first;  /* place of the token's first number */
  int32_t without; /* an expert that is not among them; -1: none */
} keys_t;

template <int KNOWS>
static __device__ __forceinline__ float key_of(const mz_gate_t &a,
                                               const keys_t &keys, int32_t e)
{
  float key = keys.row[e];

  if constexpr (KNOWS != PLAIN) {
    if (a.bias) key += a.bias[e];
    if (keys.drawn)
      key +=
          mz_gumbel_of(mz_gate_bits(a.choice_random, keys.first + (uint64_t)e));
  }
  return rank_of(key);
}

/* The best expert that comes after @p last; id INT32_MAX: none is left. */
template <int KNOWS>
static __device__ candidate_t next_best(const mz_gate_t &a, const keys_t &keys,
                                        int32_t experts, int lane,
                                        candidate_t last)
{
  candidate_t best = {-INFINITY, INT32_MAX};

  for (int32_t e = lane; e < experts; e += LANES) {
    candidate_t next = {key_of<KNOWS>(a, keys, e), e};

    if (KNOWS != PLAIN && e == keys.without) continue;
    if (better(last, next) && better(next, best)) best = next;
  }
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    candidate_t other = {__shfl_xor_sync(0xffffffffu, best.key, offset),
                         __shfl_xor_sync(0xffffffffu, best.id, offset)};

    if (better(other, best)) best = other;
  }
  return best;
}

static __device__ __forceinline__ bool has_choice(const mz_gate_t &a)
{
  return !a.fixed_logits && !a.route_table && a.k < a.num_experts;
}

/* The lower half of a count is of all choices, the upper one of first choices:
 * a tile has no more than MZ_GATE_TILE of either. */
static __device__ __forceinline__ void count(int32_t *counts, int32_t expert,
                                             int32_t j)
{
  atomicAdd(&counts[expert], j == 0 ? 0x10001 : 1);
}

/* After a greedy first choice: the distance to the next one, and from then on
 * the others are drawn. */
template <int KNOWS>
static __device__ float draw_rest(const mz_gate_t &a, int32_t experts, int lane,
                                  keys_t *keys, candidate_t *last)
{
  candidate_t left = next_best<KNOWS>(a, *keys, experts, lane, *last);
  float gap = left.id < INT32_MAX ? last->key - left.key : INFINITY;

  keys->drawn = true;
  keys->without = last->id;
  *last = {INFINITY, -1};
  return gap;
}

/* Every lane of the warp comes here; those of a token past the end have no
 * experts. Returns the distance from the last one chosen to the best one left,
 * infinity where that is not a choice. */
template <int KNOWS>
static __device__ float choose(const mz_gate_t &a, int64_t t, int32_t experts,
                               int lane, int32_t *counts)
{
  keys_t keys = {a.probs + t * a.num_experts, false, 0, -1};
  bool writes = experts > 0 && lane == 0, counted = writes;
  int64_t table = a.route_table && writes ? a.route_table[a.tokens[t]] : 0;
  candidate_t last = {INFINITY, -1}, left;
  float gap = INFINITY;

  if constexpr (KNOWS != PLAIN) {
    counted = writes && !mz_gate_is_pad(a, t);
    keys.drawn = a.choice_noise == MZ_CHOICE_DRAWN;
    if (a.choice_noise != MZ_CHOICE_GREEDY && experts > 0)
      keys.first = mz_gate_number(a, t, a.num_experts);
  }
  for (int32_t j = 0; j < a.k; j++) {
    if (a.route_table)
      last.id = (int32_t)((table + j) % a.num_experts);
    else
      last = next_best<KNOWS>(a, keys, experts, lane, last);
    if (writes) a.expert[t * a.k + j] = last.id;
    if (counted) count(counts, last.id, j);
    if constexpr (KNOWS != PLAIN)
      if (j == 0 && a.k > 1 && !a.route_table &&
          a.choice_noise == MZ_CHOICE_DRAWN_SECOND)
        gap = draw_rest<KNOWS>(a, experts, lane, &keys, &last);
  }
  if (!has_choice(a)) return INFINITY;
  left = next_best<KNOWS>(a, keys, experts, lane, last);
  return fminf(gap, last.key - left.key);
}

/* What a block knows of its tokens. */
typedef struct token {
  float lse; /* 0 past the end */
  float gap; /* infinity past the end */
  float sum; /* of the gates, where they are no shares */
} token_t;

/* Logits become gates; returns what they sum to. top, sum: of softmax. */
template <int KNOWS>
static __device__ float write_gates(const mz_gate_t &a, float *row,
                                    int32_t experts, int lane, float top,
                                    float sum)
{
  float scale = 1.0f / sum;

  if constexpr (KNOWS != PLAIN)
    if (a.score != MZ_SCORE_SOFTMAX) {
      float all = 0.0f;

      for (int32_t e = lane; e < experts; e += LANES) {
        row[e] = 1.0f / (1.0f + expf(-row[e]));
        all += row[e];
      }
      return group_sum(all);
    }
  for (int32_t e = lane; e < experts; e += LANES)
    row[e] = expf(row[e] - top) * scale;
  return 1.0f;
}

/* Logits of token t to gates and choices. */
template <int KNOWS>
static __device__ void finish_token(const mz_gate_t &a, int64_t t, int lane,
                                    int32_t *counts, token_t *token)
{
  int32_t experts = t < a.num_tokens ? a.num_experts : 0;
  float *row = a.probs + t * a.num_experts;
  float top = -INFINITY, sum = 0.0f, gap = 0.0f, all = 1.0f;
  bool by_gates = KNOWS != PLAIN && a.bias;

  if (KNOWS != PLAIN && a.temperature > 0.0f) {
    float cool = 1.0f / a.temperature;

    for (int32_t e = lane; e < experts; e += LANES)
      row[e] *= cool;
  }
  for (int32_t e = lane; e < experts; e += LANES)
    top = fmaxf(top, row[e]);
  top = group_max(top);
  for (int32_t e = lane; e < experts; e += LANES)
    sum += expf(row[e] - top);
  sum = group_sum(sum);
  if (by_gates) all = write_gates<KNOWS>(a, row, experts, lane, top, sum);
  gap = choose<KNOWS>(a, t, experts, lane, counts);
  if (!by_gates) all = write_gates<KNOWS>(a, row, experts, lane, top, sum);
  if (lane > 0) return;
  *token = {0.0f, INFINITY, all};
  if (experts == 0) return;
  token->lse = a.lse[t] = top + logf(sum);
  token->gap = gap;
}

/* --- the tile --- */

template <int KNOWS>
static __device__ void write_partials(const mz_cuda_gate_t &g, int64_t first,
                                      const int32_t *counts,
                                      const token_t *tokens)
{
  const mz_gate_t &a = g.a;
  int64_t left = a.num_tokens - first, tile = blockIdx.x;
  int n = (int)(left < MZ_GATE_TILE ? left : MZ_GATE_TILE);
  double z;
  float distance;

  for (int32_t e = (int32_t)threadIdx.x; e < a.num_experts; e += THREADS) {
    const float *gate = a.probs + first * a.num_experts + e;
    double sum = 0.0;

    for (int i = 0; i < n; i++) {
      double share = (double)gate[(int64_t)i * a.num_experts];

      if (KNOWS != PLAIN && a.score != MZ_SCORE_SOFTMAX)
        share /= (double)tokens[i].sum;
      sum += share;
    }
    g.sums[e * g.tiles + tile] = sum;
    g.counts[e * g.tiles + tile] = counts[e] & 0xffff;
    g.firsts[e * g.tiles + tile] = counts[e] >> 16;
  }
  if (threadIdx.x >= MZ_GATE_TILE) return;
  z = (double)tokens[threadIdx.x].lse * (double)tokens[threadIdx.x].lse;
  distance = tokens[threadIdx.x].gap;
  for (int offset = MZ_GATE_TILE / 2; offset > 0; offset /= 2) {
    z += __shfl_xor_sync(0xffffffffu, z, offset);
    distance = fminf(distance, __shfl_xor_sync(0xffffffffu, distance, offset));
  }
  if (threadIdx.x > 0) return;
  g.z[tile] = z;
  g.gap[tile] = distance;
}

/* Blocks that a processor holds at once: while some wait for x, others choose.
 */
static constexpr int blocks_at_once(int how, int knows)
{
  return how == 1 && knows == PLAIN ? 4 : 2;
}

template <typename T, int HOW, int KNOWS>
static __global__ void __launch_bounds__(THREADS, blocks_at_once(HOW, KNOWS))
    gate_tile(mz_cuda_gate_t g)
{
  extern __shared__ int32_t counts[];
  __shared__ token_t tokens[MZ_GATE_TILE];
  int64_t first = (int64_t)blockIdx.x * MZ_GATE_TILE;
  int token = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES;

  for (int32_t e = (int32_t)threadIdx.x; e < g.a.num_experts; e += THREADS)
    counts[e] = 0;
  if (g.a.fixed_logits)
    copy_fixed_logits(g.a, first);
  else if constexpr (HOW > 0)
    tensor_logits<HOW>(g.a, first);
  else
    plain_logits<T, HOW == PACKS ? mz_pack<T>::N : 1, KNOWS>(g.a, first);
  __syncthreads();
  finish_token<KNOWS>(g.a, first + token, lane, counts, &tokens[token]);
  __syncthreads();
  write_partials<KNOWS>(g, first, counts, tokens);
}

/* --- launch --- */

mz_status_t mz_cuda_gate_check(const mz_gate_t *a)
{
  int64_t routes;
  int narrow;

  MZ_REQUIRE(a->k >= 1 && a->k <= a->num_experts, MZ_ERR_ARG,
             "k is %" PRId32 ", need 1..num_experts=%" PRId32, a->k,
             a->num_experts);
  MZ_REQUIRE(a->num_experts <= MZ_GATE_MAX_EXPERTS, MZ_ERR_UNSUPPORTED,
             "num_experts is %" PRId32 ", at most %d on " MZ_BACKEND_CUDA,
             a->num_experts, (int)MZ_GATE_MAX_EXPERTS);
  MZ_REQUIRE(a->temperature >= 0 && a->jitter >= 0 && a->jitter < 1, MZ_ERR_ARG,
             "temperature %g, need at least 0; jitter %g, need 0 <= jitter < 1",
             (double)a->temperature, (double)a->jitter);
  MZ_REQUIRE(!a->bias || a->choice_noise == MZ_CHOICE_GREEDY, MZ_ERR_ARG,
             "a bias and noise of the choice exclude each other");
  MZ_TRY(mz_int_from_i64(a->num_tokens, &narrow));
  MZ_TRY(mz_int_from_i64(a->width, &narrow));
  MZ_TRY(mz_mul_i64(a->num_tokens, a->k, &routes));
  return MZ_TRACE(mz_int_from_i64(routes, &narrow));
}

static mz_status_t take_scratch(const mz_kernels_t *kernels, const mz_gate_t *a,
                                mz_cuda_gate_t *g)
{
  int64_t at = 0, routes = a->capacity > 0 ? a->num_tokens * a->k : 0;

  g->a = *a;
  g->tiles = mz_div_up(a->num_tokens, MZ_GATE_TILE);
  MZ_TRY(mz_cuda_scratch(kernels, &at, a->num_experts * g->tiles, "gate counts",
                         &g->counts));
  MZ_TRY(mz_cuda_scratch(kernels, &at, a->num_experts * g->tiles,
                         "gate first choices", &g->firsts));
  MZ_TRY(mz_cuda_scratch(kernels, &at, a->num_experts * g->tiles, "gate sums",
                         &g->sums));
  MZ_TRY(mz_cuda_scratch(kernels, &at, g->tiles, "gate z", &g->z));
  MZ_TRY(mz_cuda_scratch(kernels, &at, g->tiles, "gate gaps", &g->gap));
  MZ_TRY(mz_cuda_scratch(kernels, &at, (int64_t)a->num_experts, "gate totals",
                         &g->totals));
  MZ_TRY(mz_cuda_scratch(kernels, &at, routes, "gate keys", &g->keys));
  return MZ_TRACE(
      mz_cuda_scratch(kernels, &at, routes, "gate routes", &g->routes));
}

template <typename T, int HOW, int KNOWS>
static mz_status_t launch_tiles(const mz_cuda_gate_t *g, cudaStream_t stream)
{
  size_t shared_bytes = (size_t)g->a.num_experts * sizeof(int32_t);

  gate_tile<T, HOW, KNOWS>
      <<<(unsigned)g->tiles, THREADS, shared_bytes, stream>>>(*g);
  MZ_LAUNCHED("gate_tile");
  return MZ_OK;
}

template <int KNOWS>
static mz_status_t launch_tensor_tiles(const mz_cuda_gate_t *g,
                                       cudaStream_t stream)
{
  int32_t experts = g->a.num_experts;

  if (experts <= 8) return launch_tiles<__nv_bfloat16, 1, KNOWS>(g, stream);
  if (experts <= 16) return launch_tiles<__nv_bfloat16, 2, KNOWS>(g, stream);
  if (experts <= 32) return launch_tiles<__nv_bfloat16, 4, KNOWS>(g, stream);
  return launch_tiles<__nv_bfloat16, 8, KNOWS>(g, stream);
}

/* x with jitter is no bf16 number, so tensor cores do not take it. */
template <typename T, int KNOWS>
static mz_status_t launch_gate(const mz_cuda_gate_t *g, cudaStream_t stream)
{
  bool aligned = mz_unit_aligned(g->a.x) && mz_unit_aligned(g->a.w);

  if constexpr (sizeof(T) == 2 && KNOWS != JITTER)
    if (aligned && g->a.width % 32 == 0)
      return launch_tensor_tiles<KNOWS>(g, stream);
  if (aligned && g->a.width % mz_pack<T>::N == 0)
    return launch_tiles<T, PACKS, KNOWS>(g, stream);
  return launch_tiles<T, SCALARS, KNOWS>(g, stream);
}

template <typename T>
static mz_status_t gate(const mz_cuda_gate_t *g, cudaStream_t stream)
{
  const mz_gate_t *a = &g->a;

  if (a->jitter > 0.0f && !a->fixed_logits)
    return launch_gate<T, JITTER>(g, stream);
  if (a->score != MZ_SCORE_SOFTMAX || a->temperature > 0.0f || a->bias ||
      a->choice_noise != MZ_CHOICE_GREEDY || a->used)
    return launch_gate<T, OPTIONS>(g, stream);
  return launch_gate<T, PLAIN>(g, stream);
}

extern "C" mz_status_t mz_k_gate_cuda(const mz_kernels_t *kernels,
                                      const mz_gate_t *a, mz_stream_t stream)
{
  cudaStream_t s = mz_cuda_stream(stream);
  mz_cuda_gate_t g;

  MZ_TRY(mz_cuda_gate_check(a));
  if (a->num_tokens == 0) {
    MZ_CUDA(cudaMemsetAsync(a->kept, 0,
                            (size_t)a->num_experts * sizeof *a->kept, s));
    return MZ_OK;
  }
  MZ_TRY(take_scratch(kernels, a, &g));
  MZ_TRY(MZ_BY_DTYPE(kernels, gate, &g, s));
  return MZ_TRACE(mz_cuda_gate_route(&g, s));
}
