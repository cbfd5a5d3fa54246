/* SPDX-License-Identifier: Apache-2.0 */
/* Rows between token order, send order and expert order on CUDA. T tokens, K
 * choices, H width. Contracts: kernels/gate.h.
 *
 * A warp has a token, or a row. Its lanes take every 32nd unit of the row,
 * several at a time, so that their loads are under way together. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/unit.h"

enum {
  THREADS = 256,
  WARPS = THREADS / 32,
  UNROLL = 4, /* units of a lane at a time */
  /* Regroup: blocks that share all rows, since each first sums the counts. */
  MAX_BLOCKS = 1056,
  MAX_STARTS = 4096 /* (source, expert) pairs, in shared memory */
};

static __device__ __forceinline__ int64_t first_row(void)
{
  return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
}

/* --- copies; U is the type of a unit --- */

template <typename U>
static __device__ __forceinline__ void
load_units(const U *row, int64_t at, int64_t units, U (&out)[UNROLL])
{
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    if (at + 32 * u < units) out[u] = row[at + 32 * u];
}

template <typename U>
static __device__ __forceinline__ void
store_units(U *row, int64_t at, int64_t units, const U (&in)[UNROLL])
{
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    if (at + 32 * u < units) row[at + 32 * u] = in[u];
}

template <typename U>
static __global__ void __launch_bounds__(THREADS)
    permute_rows(mz_permute_t a, int64_t units)
{
  int64_t t = first_row();
  const U *x = (const U *)a.x + t * units;

  if (t >= a.num_tokens) return;
  for (int64_t c = threadIdx.x % 32; c < units; c += 32 * UNROLL) {
    U tile[UNROLL] = {};

    load_units(x, c, units, tile);
    for (int64_t r = t * a.k; r < (t + 1) * a.k; r++)
      if (a.row[r] >= 0)
        store_units((U *)a.send + a.row[r] * units, c, units, tile);
  }
}

/* Source-major rows of (source, expert) start after all counts before it in
 * row-major order; expert-major ones at the expert's offset, after those of the
 * sources before. starts [pairs + 1], to [pairs]: of each pair, in that order.
 */
static __device__ void find_starts(const mz_regroup_t &a, int32_t *starts,
                                   int32_t *to)
{
  int32_t pairs = a.num_sources * a.num_experts, carry = 0;
  int lane = (int)(threadIdx.x % 32);

  for (int32_t e = (int32_t)threadIdx.x; e < a.num_experts; e += THREADS) {
    int32_t at = a.offsets[e];

    for (int32_t p = e; p < pairs; p += a.num_experts) {
      to[p] = at;
      at += a.counts[p];
    }
  }
  if (threadIdx.x < 32) {
    for (int32_t p0 = 0; p0 < pairs; p0 += 32) {
      int32_t count = p0 + lane < pairs ? a.counts[p0 + lane] : 0;
      int32_t inclusive = count;

      for (int offset = 1; offset < 32; offset *= 2) {
        int32_t other = __shfl_up_sync(0xffffffffu, inclusive, offset);

        if (lane >= offset) inclusive += other;
      }
      if (p0 + lane < pairs) starts[p0 + lane] = carry + inclusive - count;
      carry += __shfl_sync(0xffffffffu, inclusive, 31);
    }
    if (lane == 0) starts[pairs] = carry;
  }
  __syncthreads();
}

/* The pair that has source-major row i < starts[pairs]: the last one that does
 * not start behind it, so one with rows. */
static __device__ __forceinline__ int32_t pair_of(const int32_t *starts,
                                                  int32_t pairs, int64_t i)
{
  int32_t low = 0, high = pairs;

  while (high - low > 1) {
    int32_t middle = (low + high) / 2;

    if (starts[middle] <= i)
      low = middle;
    else
      high = middle;
  }
  return low;
}

template <typename U>
static __global__ void __launch_bounds__(THREADS)
    regroup_rows(mz_regroup_t a, int64_t units)
{
  extern __shared__ int32_t starts[];
  int32_t pairs = a.num_sources * a.num_experts;
  int32_t *to = starts + pairs + 1;

  find_starts(a, starts, to);
  for (int64_t i = first_row(); i < starts[pairs]; i += gridDim.x * WARPS) {
    int32_t pair = pair_of(starts, pairs, i);
    int64_t by_expert = to[pair] + (i - starts[pair]);
    const U *src =
        (const U *)a.src + (a.to_source_major ? by_expert : i) * units;
    U *dst = (U *)a.dst + (a.to_source_major ? i : by_expert) * units;

    for (int64_t c = threadIdx.x % 32; c < units; c += 32 * UNROLL) {
      U tile[UNROLL] = {};

      load_units(src, c, units, tile);
      store_units(dst, c, units, tile);
    }
  }
}

/* --- sums; a unit is N elements of T --- */

/* Zeros for a dropped route. */
template <typename U>
static __device__ __forceinline__ void load_route(const void *rows, int64_t row,
                                                  int64_t at, int64_t units,
                                                  U (&out)[UNROLL])
{
  const U *from = (const U *)rows + row * units;

#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    out[u] = U{};
    if (row >= 0 && at + 32 * u < units) out[u] = from[at + 32 * u];
  }
}

template <int N, typename U>
static __device__ __forceinline__ void
add_route(float (&sum)[UNROLL][N], float weight, const U (&units)[UNROLL])
{
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    float x[N];

    mz_unpack(units[u], x);
#pragma unroll
    for (int n = 0; n < N; n++)
      sum[u][n] += weight * x[n];
  }
}

/* The two routes from j on; -1 and 0 for one that is dropped or not there. */
typedef struct route_pair {
  int32_t row[2];
  float weight[2];
} route_pair_t;

static __device__ __forceinline__ route_pair_t pair_from(const mz_combine_t &a,
                                                         int64_t t, int32_t j)
{
  route_pair_t pair;

#pragma unroll
  for (int i = 0; i < 2; i++) {
    bool there = j + i < a.k;
    int32_t row = there ? a.row[t * a.k + j + i] : -1;

    pair.row[i] = row;
    pair.weight[i] = row < 0 ? 0.0f : a.weight ? a.weight[t * a.k + j + i] : 1;
  }
  return pair;
}

/* y = sum of weight * the row of each kept route; without weights, of 1. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    sum_routes(mz_combine_t a, int64_t units)
{
  typedef mz_unit<T, N> unit;
  int64_t t = first_row();
  unit *y = (unit *)a.y + t * units;

  if (t >= a.num_tokens) return;
  for (int64_t c = threadIdx.x % 32; c < units; c += 32 * UNROLL) {
    float sum[UNROLL][N] = {};

    for (int32_t j = 0; j < a.k; j += 2) {
      route_pair_t pair = pair_from(a, t, j);
      unit x[2][UNROLL];

      load_route(a.back, pair.row[0], c, units, x[0]);
      load_route(a.back, pair.row[1], c, units, x[1]);
      add_route(sum, pair.weight[0], x[0]);
      add_route(sum, pair.weight[1], x[1]);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (c + 32 * u < units) mz_repack(sum[u], y + c + 32 * u);
  }
}

/* One row of d_send: weight * dy; returns the lane's part of <dy, back>. Each
 * lane has read a unit of back before it writes the same one of d_send, which
 * may lie there. */
template <int N, typename U>
static __device__ __forceinline__ float
finish_route(void *rows, int64_t row, float weight, int64_t at, int64_t units,
             const U (&dy)[UNROLL], const U (&back)[UNROLL])
{
  U *to = (U *)rows + row * units;
  float dot = 0.0f;

  if (row < 0) return 0.0f;
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    float d[N], x[N];

    if (at + 32 * u >= units) break;
    mz_unpack(dy[u], d);
    mz_unpack(back[u], x);
#pragma unroll
    for (int n = 0; n < N; n++) {
      dot += d[n] * x[n];
      d[n] *= weight;
    }
    mz_repack(d, to + at + 32 * u);
  }
  return dot;
}

template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    combine_grad_rows(mz_combine_grad_t a, int64_t units)
{
  const mz_combine_t &f = a.forward;
  int64_t t = first_row();
  int lane = (int)(threadIdx.x % 32);

  if (t >= f.num_tokens) return;
  for (int32_t j = 0; j < f.k; j += 2) {
    route_pair_t pair = pair_from(f, t, j);
    float dot[2] = {0.0f, 0.0f};

    for (int64_t c = lane; c < units; c += 32 * UNROLL) {
      mz_unit<T, N> dy[UNROLL], back[2][UNROLL];

      load_route(a.dy, t, c, units, dy);
#pragma unroll
      for (int i = 0; i < 2; i++)
        load_route(f.back, pair.row[i], c, units, back[i]);
#pragma unroll
      for (int i = 0; i < 2; i++)
        dot[i] += finish_route<N>(a.d_send, pair.row[i], pair.weight[i], c,
                                  units, dy, back[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float sum = mz_warp_sum(dot[i]);

      if (lane == 0 && j + i < f.k) a.d_weight[t * f.k + j + i] = sum;
    }
  }
}

/* --- launch --- */

typedef struct launch {
  const char *name;
  bool aligned;  /* all arrays begin on 16 bytes */
  int64_t width; /* elements of a row */
  unsigned blocks;
  size_t shared_bytes;
} launch_t;

/* A kernel over rows: of 16-byte units where rows are made of them, else of
 * single elements. */
template <typename A>
static mz_status_t
launch_rows(const mz_kernels_t *kernels, const A *a, void (*units)(A, int64_t),
            void (*elements)(A, int64_t), launch_t how, mz_stream_t stream)
{
  int64_t in_unit = 16 / (int64_t)mz_dtype_bytes(kernels->dtype);
  bool whole = how.aligned && how.width % in_unit == 0;
  int64_t width = whole ? how.width / in_unit : how.width;

  (whole ? units : elements)<<<how.blocks, THREADS, how.shared_bytes,
                               mz_cuda_stream(stream)>>>(*a, width);
  MZ_LAUNCHED(how.name);
  return MZ_OK;
}

static mz_status_t blocks_of(int64_t num_tokens, unsigned *blocks_out)
{
  int blocks;

  MZ_TRY(mz_int_from_i64(mz_div_up(num_tokens, WARPS), &blocks));
  *blocks_out = (unsigned)blocks;
  return MZ_OK;
}

extern "C" mz_status_t mz_k_permute_cuda(const mz_kernels_t *kernels,
                                         const mz_permute_t *a,
                                         mz_stream_t stream)
{
  launch_t how = {"permute_rows",
                  mz_unit_aligned(a->x) && mz_unit_aligned(a->send), a->width};

  if (a->num_tokens == 0) return MZ_OK;
  MZ_TRY(blocks_of(a->num_tokens, &how.blocks));
  return MZ_TRACE(launch_rows(kernels, a, permute_rows<uint4>,
                              kernels->dtype == MZ_BF16
                                  ? permute_rows<uint16_t>
                                  : permute_rows<uint32_t>,
                              how, stream));
}

template <typename T>
static mz_status_t combine(const mz_kernels_t *kernels, const mz_combine_t *a,
                           mz_stream_t stream)
{
  launch_t how = {"sum_routes",
                  mz_unit_aligned(a->back) && mz_unit_aligned(a->y), a->width};

  if (a->num_tokens == 0) return MZ_OK;
  MZ_TRY(blocks_of(a->num_tokens, &how.blocks));
  return MZ_TRACE(launch_rows(kernels, a, sum_routes<T, mz_pack<T>::N>,
                              sum_routes<T, 1>, how, stream));
}

extern "C" mz_status_t mz_k_combine_cuda(const mz_kernels_t *kernels,
                                         const mz_combine_t *a,
                                         mz_stream_t stream)
{
  return MZ_TRACE(MZ_BY_DTYPE(kernels, combine, kernels, a, stream));
}

extern "C" mz_status_t mz_k_permute_grad_cuda(const mz_kernels_t *kernels,
                                              const mz_permute_grad_t *a,
                                              mz_stream_t stream)
{
  mz_combine_t sum = {};

  sum.num_tokens = a->num_tokens;
  sum.width = a->width;
  sum.k = a->k;
  sum.row = a->row;
  sum.back = a->d_row;
  sum.y = a->dx;
  return MZ_TRACE(MZ_BY_DTYPE(kernels, combine, kernels, &sum, stream));
}

template <typename T>
static mz_status_t combine_grad(const mz_kernels_t *kernels,
                                const mz_combine_grad_t *a, mz_stream_t stream)
{
  const mz_combine_t *f = &a->forward;
  launch_t how = {"combine_grad_rows",
                  mz_unit_aligned(f->back) && mz_unit_aligned(a->dy) &&
                      mz_unit_aligned(a->d_send),
                  f->width};

  if (f->num_tokens == 0) return MZ_OK;
  MZ_TRY(blocks_of(f->num_tokens, &how.blocks));
  return MZ_TRACE(launch_rows(kernels, a, combine_grad_rows<T, mz_pack<T>::N>,
                              combine_grad_rows<T, 1>, how, stream));
}

extern "C" mz_status_t mz_k_combine_grad_cuda(const mz_kernels_t *kernels,
                                              const mz_combine_grad_t *a,
                                              mz_stream_t stream)
{
  return MZ_TRACE(MZ_BY_DTYPE(kernels, combine_grad, kernels, a, stream));
}

extern "C" mz_status_t mz_k_regroup_cuda(const mz_kernels_t *kernels,
                                         const mz_regroup_t *a,
                                         mz_stream_t stream)
{
  launch_t how = {"regroup_rows",
                  mz_unit_aligned(a->src) && mz_unit_aligned(a->dst), a->width};
  int64_t pairs;

  if (a->max_rows == 0 || (a->num_sources == 1 && a->src == a->dst))
    return MZ_OK;
  MZ_TRY(mz_mul_i64(a->num_sources, a->num_experts, &pairs));
  MZ_REQUIRE(pairs <= MAX_STARTS, MZ_ERR_UNSUPPORTED,
             "%" PRId32 " sources with %" PRId32
             " experts each, at most %d pairs on " MZ_BACKEND_CUDA,
             a->num_sources, a->num_experts, (int)MAX_STARTS);
  how.blocks = (unsigned)mz_min_i64(mz_div_up(a->max_rows, WARPS), MAX_BLOCKS);
  how.shared_bytes = (size_t)(2 * pairs + 1) * sizeof(int32_t);
  return MZ_TRACE(launch_rows(kernels, a, regroup_rows<uint4>,
                              kernels->dtype == MZ_BF16
                                  ? regroup_rows<uint16_t>
                                  : regroup_rows<uint32_t>,
                              how, stream));
}
