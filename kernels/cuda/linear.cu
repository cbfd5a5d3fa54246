/* SPDX-License-Identifier: Apache-2.0 */
/* Linear maps: products through cuBLASLt, one a group, with the host's offsets;
 * GELU and its derivative where no epilogue does them; column sums for bias
 * gradients. Letters and contracts: kernels/linear.h. */
#include "kernels/cuda/products_impl.h"

/* Threads of an elementwise kernel and accesses of each that are in flight. */
enum { THREADS = 256, FLIGHT = 4 };
/* Column sums: rows of one partial sum; rows and accesses side by side in a
 * block; groups whose pointers travel in one launch. */
enum { SUM_ROWS = 256, SUM_LANES = 8, SUM_WIDE = 32, SUM_GROUPS = 128 };

/* --- activations --- */

/* N elements at a time: 16 bytes, or one element of odd arrays. */
template <typename T, int N> struct alignas(N * sizeof(T)) piece {
  T v[N];
};

/* gelu_tanh(u) = u sigmoid(2 z), z = sqrt(2 / pi) (u + 0.044715 u^3)
 * (Hendrycks and Gimpel 2016, arXiv:1606.08415, sec. 2). */
static const float gelu_linear = 1.59576912f;  /* 2 sqrt(2 / pi) */
static const float gelu_cubic = 0.0713548163f; /* 0.044715 of it */

static __device__ __forceinline__ float sigmoid(float z)
{
  return __fdividef(1.0f, 1.0f + __expf(-z));
}

static __device__ __forceinline__ float gelu(float u)
{
  return u * sigmoid(u * (gelu_linear + gelu_cubic * u * u));
}

static __device__ __forceinline__ float gelu_slope(float u)
{
  float square = gelu_cubic * u * u;
  float s = sigmoid(u * (gelu_linear + square));

  return s + u * s * (1.0f - s) * (gelu_linear + 3.0f * square);
}

/* d is read only by the derivative; it may be out. */
template <typename T, bool SLOPE>
static __device__ __forceinline__ T activate(T u, T d)
{
  return mz_store<T>(SLOPE ? mz_load(d) * gelu_slope(mz_load(u))
                           : gelu(mz_load(u)));
}

/* out = gelu(pre), or with SLOPE out *= gelu'(pre). The first block also takes
 * the elements behind the last whole piece. */
template <typename T, int N, bool SLOPE>
static __global__ void __launch_bounds__(THREADS)
    activate_all(const T *pre, T *out, int64_t count)
{
  typedef piece<T, N> piece_t;
  int64_t pieces = count / N, tail = count - pieces * N;
  int64_t first = (int64_t)blockIdx.x * (THREADS * FLIGHT) + threadIdx.x;
  piece_t u[FLIGHT], d[FLIGHT];

#pragma unroll
  for (int f = 0; f < FLIGHT; f++) {
    int64_t i = first + f * THREADS;

    if (i >= pieces) continue;
    u[f] = ((const piece_t *)pre)[i];
    if (SLOPE) d[f] = ((const piece_t *)out)[i];
  }
#pragma unroll
  for (int f = 0; f < FLIGHT; f++) {
    int64_t i = first + f * THREADS;

    if (i >= pieces) continue;
#pragma unroll
    for (int j = 0; j < N; j++)
      u[f].v[j] = activate<T, SLOPE>(u[f].v[j], d[f].v[j]);
    ((piece_t *)out)[i] = u[f];
  }
  if (first < tail) {
    T *last = out + pieces * N + first;

    *last = activate<T, SLOPE>(pre[pieces * N + first], *last);
  }
}

template <typename T, bool SLOPE>
static mz_status_t start_activation(const void *pre, void *out, int64_t count,
                                    cudaStream_t stream)
{
  enum { N = 16 / sizeof(T) };
  bool wide = ((uintptr_t)pre | (uintptr_t)out) % 16 == 0;
  int64_t pieces = wide ? count / N : count;
  int64_t blocks = mz_max_i64(mz_div_up(pieces, THREADS * FLIGHT), 1);

  if (count == 0) return MZ_OK;
  MZ_REQUIRE(blocks <= INT32_MAX, MZ_ERR_OVERFLOW, "%" PRId64 " activations",
             count);
  if (wide)
    activate_all<T, N, SLOPE><<<(unsigned)blocks, THREADS, 0, stream>>>(
        (const T *)pre, (T *)out, count);
  else
    activate_all<T, 1, SLOPE><<<(unsigned)blocks, THREADS, 0, stream>>>(
        (const T *)pre, (T *)out, count);
  MZ_LAUNCHED(SLOPE ? "dgelu" : "gelu");
  return MZ_OK;
}

mz_status_t mz_cuda_gelu(mz_dtype_t dtype, const void *pre, void *y,
                         int64_t count, cudaStream_t stream)
{
  return dtype == MZ_BF16
             ? start_activation<__nv_bfloat16, false>(pre, y, count, stream)
             : start_activation<float, false>(pre, y, count, stream);
}

mz_status_t mz_cuda_dgelu(mz_dtype_t dtype, const void *pre, void *d,
                          int64_t count, cudaStream_t stream)
{
  return dtype == MZ_BF16
             ? start_activation<__nv_bfloat16, true>(pre, d, count, stream)
             : start_activation<float, true>(pre, d, count, stream);
}

/* --- column sums --- */

/* Where the partial sums of a group begin, without a scan over the groups: each
 * group has ceil(rows / SUM_ROWS) of them, and these ranges do not overlap. */
static __host__ __device__ __forceinline__ int64_t first_part(int32_t offset,
                                                              int32_t group)
{
  return (int64_t)(offset / SUM_ROWS) + group;
}

/* The last group whose partial sums begin at or before this one. */
static __device__ __forceinline__ int32_t group_of_part(const int32_t *offsets,
                                                        int32_t num_groups,
                                                        int64_t part)
{
  int32_t low = 0, high = num_groups - 1;

  while (low < high) {
    int32_t middle = (low + high + 1) / 2;

    if (first_part(offsets[middle], middle) <= part)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

/* One block: SUM_ROWS rows of SUM_WIDE pieces of columns to parts [., n]. */
template <typename T, int N>
static __global__ void __launch_bounds__(SUM_LANES *SUM_WIDE)
    sum_parts(const T *dy, int64_t n, const int32_t *offsets,
              int32_t num_groups, int64_t tiles, float *parts)
{
  typedef piece<T, N> piece_t;
  __shared__ float shared[SUM_LANES][N][SUM_WIDE];
  int64_t part = blockIdx.x / tiles;
  int64_t tile = blockIdx.x % tiles * (SUM_WIDE * N);
  int32_t group = group_of_part(offsets, num_groups, part);
  int64_t first =
      offsets[group] + (part - first_part(offsets[group], group)) * SUM_ROWS;
  int64_t rows = min((int64_t)SUM_ROWS, offsets[group + 1] - first);
  int wide = (int)(threadIdx.x % SUM_WIDE), lane = (int)threadIdx.x / SUM_WIDE;
  int64_t column = tile + wide * N;
  float sum[N] = {};

  if (rows <= 0) return; /* the whole block: a number between two groups */
  if (column < n) {
    const T *at = dy + first * n + column;

#pragma unroll 4
    for (int64_t r = lane; r < rows; r += SUM_LANES) {
      piece_t piece = *(const piece_t *)(at + r * n);

#pragma unroll
      for (int j = 0; j < N; j++)
        sum[j] += mz_load(piece.v[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < N; j++)
    shared[lane][j][wide] = sum[j];
  __syncthreads();
  for (int c = (int)threadIdx.x; c < SUM_WIDE * N; c += SUM_LANES * SUM_WIDE) {
    float total = 0;

    if (tile + c >= n) break;
    for (int l = 0; l < SUM_LANES; l++)
      total += shared[l][c % N][c / N];
    parts[part * n + tile + c] = total;
  }
}

typedef struct sum_targets {
  float *db[SUM_GROUPS];
  uint8_t add[SUM_GROUPS];
} sum_targets_t;

/* db (+)= the partial sums of a group, a block for SUM_WIDE columns. */
static __global__ void __launch_bounds__(SUM_LANES *SUM_WIDE)
    sum_groups(const float *parts, int64_t n, const int32_t *offsets,
               int32_t first_group, sum_targets_t targets)
{
  __shared__ float shared[SUM_LANES][SUM_WIDE];
  int32_t group = first_group + (int32_t)blockIdx.y;
  int32_t rows = offsets[group + 1] - offsets[group];
  int64_t first = first_part(offsets[group], group);
  int64_t end = first + (rows + SUM_ROWS - 1) / SUM_ROWS;
  int wide = (int)(threadIdx.x % SUM_WIDE), lane = (int)threadIdx.x / SUM_WIDE;
  int64_t column = (int64_t)blockIdx.x * SUM_WIDE + wide;
  float sum = 0;

  if (column < n) {
#pragma unroll 4
    for (int64_t p = first + lane; p < end; p += SUM_LANES)
      sum += parts[p * n + column];
  }
  shared[lane][wide] = sum;
  __syncthreads();
  if (lane == 0 && column < n) {
    float *db = targets.db[blockIdx.y] + column;
    float total = 0;

    for (int l = 0; l < SUM_LANES; l++)
      total += shared[l][wide];
    *db = targets.add[blockIdx.y] ? *db + total : total;
  }
}

template <typename T>
static mz_status_t start_parts(const mz_linear_wgrad_t *a, int64_t num_parts,
                               float *parts, cudaStream_t stream)
{
  enum { N = 16 / sizeof(T), BLOCK = SUM_LANES * SUM_WIDE };
  bool wide = a->n % N == 0 && (uintptr_t)a->dy % 16 == 0;
  int64_t tiles = mz_div_up(a->n, SUM_WIDE * (wide ? N : 1)), blocks;
  const T *dy = (const T *)a->dy;

  MZ_TRY(mz_mul_i64(tiles, num_parts, &blocks));
  MZ_REQUIRE(blocks <= INT32_MAX, MZ_ERR_OVERFLOW,
             "bias gradient in %" PRId64 " blocks", blocks);
  if (wide)
    sum_parts<T, N><<<(unsigned)blocks, BLOCK, 0, stream>>>(
        dy, a->n, a->offsets, a->num_groups, tiles, parts);
  else
    sum_parts<T, 1><<<(unsigned)blocks, BLOCK, 0, stream>>>(
        dy, a->n, a->offsets, a->num_groups, tiles, parts);
  MZ_LAUNCHED("bias gradient");
  return MZ_OK;
}

static mz_status_t sum_bias(const mz_kernels_t *kernels,
                            const mz_linear_wgrad_t *a, cudaStream_t stream)
{
  int64_t num_parts = first_part(a->host_offsets[a->num_groups], a->num_groups);
  int64_t at = mz_cuda_state(kernels)->products->bytes, size;
  float *parts;

  MZ_TRY(mz_mul_i64(num_parts, a->n, &size));
  MZ_TRY(mz_cuda_scratch(kernels, &at, size, "bias gradient", &parts));
  if (a->host_offsets[a->num_groups] > 0)
    MZ_TRY(MZ_BY_DTYPE(kernels, start_parts, a, num_parts, parts, stream));
  for (int32_t g = 0; g < a->num_groups; g += SUM_GROUPS) {
    int32_t count = (int32_t)mz_min_i64(SUM_GROUPS, a->num_groups - g);
    dim3 grid((unsigned)mz_div_up(a->n, SUM_WIDE), (unsigned)count);
    sum_targets_t targets = {};

    for (int32_t i = 0; i < count; i++) {
      targets.db[i] = (float *)a->db[g + i];
      targets.add[i] = a->accumulate_bias[g + i];
    }
    sum_groups<<<grid, SUM_LANES * SUM_WIDE, 0, stream>>>(
        parts, a->n, a->offsets, g, targets);
    MZ_LAUNCHED("bias gradient of groups");
  }
  return MZ_OK;
}

/* --- operations --- */

static mz_status_t check(int32_t num_groups, const int32_t *offsets,
                         int64_t max_rows, int64_t n, int64_t k)
{
  int narrow;

  MZ_REQUIRE(num_groups >= 1 && n >= 1 && k >= 1, MZ_ERR_ARG,
             "%" PRId32 " groups of [%" PRId64 ", %" PRId64 "]", num_groups, n,
             k);
  MZ_TRY(mz_int_from_i64(n, &narrow));
  MZ_TRY(mz_int_from_i64(k, &narrow));
  MZ_REQUIRE(offsets, MZ_ERR_ARG, "no offsets on the host");
  MZ_REQUIRE(offsets[0] == 0, MZ_ERR_ARG, "first offset is %" PRId32,
             offsets[0]);
  for (int32_t g = 0; g < num_groups; g++)
    MZ_REQUIRE(offsets[g] <= offsets[g + 1], MZ_ERR_ARG,
               "group %" PRId32 " has rows %" PRId32 " to %" PRId32, g,
               offsets[g], offsets[g + 1]);
  MZ_REQUIRE(offsets[num_groups] <= max_rows, MZ_ERR_ARG,
             "%" PRId32 " rows, bound %" PRId64, offsets[num_groups], max_rows);
  return MZ_OK;
}

/* Where a row of an array begins. What is only read goes through here, too. */
static char *at_row(const void *base, mz_dtype_t dtype, int64_t row,
                    int64_t width)
{
  return (char *)base + row * width * (int64_t)mz_dtype_bytes(dtype);
}

/* Rows [first, end) whose activation own kernels still owe. */
typedef struct owed {
  mz_product_epilogue_t epilogue;
  mz_dtype_t dtype;
  const void *pre;
  void *out;
  int64_t width, first, end;
  cudaStream_t stream;
} owed_t;

static mz_status_t pay(const owed_t *o)
{
  const void *pre = at_row(o->pre, o->dtype, o->first, o->width);
  void *out = at_row(o->out, o->dtype, o->first, o->width);
  int64_t count = (o->end - o->first) * o->width;

  if (count == 0) return MZ_OK;
  return o->epilogue == MZ_PRODUCT_GELU
             ? MZ_TRACE(mz_cuda_gelu(o->dtype, pre, out, count, o->stream))
             : MZ_TRACE(mz_cuda_dgelu(o->dtype, pre, out, count, o->stream));
}

/* Adds rows; neighbours on one stream become one launch. */
static mz_status_t owe(owed_t *o, int64_t first, int64_t end,
                       cudaStream_t stream)
{
  if (o->first < o->end && (o->end != first || o->stream != stream)) {
    MZ_TRY(pay(o));
    o->first = o->end;
  }
  if (o->first == o->end) o->first = first;
  o->end = end;
  o->stream = stream;
  return MZ_OK;
}

/* Sets what differs from group to group: a, b, d, bias, aux. */
typedef void (*fill_fn)(const void *args, mz_dtype_t dtype, int32_t group,
                        int64_t first, mz_product_t *p);

/* One product a group; p holds what the groups share. */
static mz_status_t multiply_groups(const mz_kernels_t *kernels,
                                   int32_t num_groups, const int32_t *offsets,
                                   mz_product_t p, const void *args,
                                   fill_fn fill, owed_t owed,
                                   mz_stream_t stream)
{
  mz_product_spread_t spread;

  MZ_TRY(mz_cuda_spread_begin(mz_cuda_state(kernels)->products,
                              mz_cuda_stream(stream), num_groups, &spread));
  for (int32_t g = 0; g < num_groups; g++) {
    mz_product_place_t place;
    bool finished;

    p.rows = offsets[g + 1] - offsets[g];
    if (p.rows == 0) continue;
    place = mz_cuda_spread_next(&spread);
    fill(args, kernels->dtype, g, offsets[g], &p);
    MZ_TRY(mz_cuda_product(spread.products, &p, &place, &finished));
    if (!finished) MZ_TRY(owe(&owed, offsets[g], offsets[g + 1], place.stream));
  }
  MZ_TRY(pay(&owed));
  return MZ_TRACE(mz_cuda_spread_end(&spread));
}

static void fill_forward(const void *args, mz_dtype_t dtype, int32_t group,
                         int64_t first, mz_product_t *p)
{
  const mz_linear_t *a = (const mz_linear_t *)args;

  p->a = a->w[group];
  p->b = at_row(a->x, dtype, first, a->k);
  p->d = at_row(a->y, dtype, first, a->n);
  p->bias = a->b ? a->b[group] : NULL;
  if (a->epilogue == MZ_EPI_GELU) p->aux = at_row(a->pre, dtype, first, a->n);
}

extern "C" mz_status_t mz_k_linear_cuda(const mz_kernels_t *kernels,
                                        const mz_linear_t *a,
                                        mz_stream_t stream)
{
  mz_dtype_t dtype = kernels->dtype;
  mz_product_t p = {MZ_PRODUCT_FORWARD, MZ_PRODUCT_PLAIN, dtype, dtype};
  owed_t owed = {MZ_PRODUCT_GELU, dtype, a->pre, a->y, a->n, 0, 0, NULL};

  MZ_TRY(check(a->num_groups, a->host_offsets, a->max_rows, a->n, a->k));
  MZ_REQUIRE(a->epilogue != MZ_EPI_DGELU, MZ_ERR_ARG,
             "DGELU is an epilogue of linear_dgrad");
  if (a->epilogue == MZ_EPI_GELU)
    p.epilogue = MZ_PRODUCT_GELU;
  else if (a->b)
    p.epilogue = MZ_PRODUCT_BIAS;
  p.n = p.ldn = a->n;
  p.k = a->k;
  return MZ_TRACE(multiply_groups(kernels, a->num_groups, a->host_offsets, p, a,
                                  fill_forward, owed, stream));
}

static void fill_dgrad(const void *args, mz_dtype_t dtype, int32_t group,
                       int64_t first, mz_product_t *p)
{
  const mz_linear_dgrad_t *a = (const mz_linear_dgrad_t *)args;

  p->a = a->w[group];
  p->b = at_row(a->dy, dtype, first, a->n);
  p->d = at_row(a->dx, dtype, first, a->k);
  if (a->epilogue == MZ_EPI_DGELU) p->aux = at_row(a->pre, dtype, first, a->k);
}

extern "C" mz_status_t mz_k_linear_dgrad_cuda(const mz_kernels_t *kernels,
                                              const mz_linear_dgrad_t *a,
                                              mz_stream_t stream)
{
  mz_dtype_t dtype = kernels->dtype;
  mz_product_t p = {MZ_PRODUCT_DGRAD, MZ_PRODUCT_PLAIN, dtype, dtype, a->add};
  owed_t owed = {MZ_PRODUCT_DGELU, dtype, a->pre, a->dx, a->k, 0, 0, NULL};

  MZ_TRY(check(a->num_groups, a->host_offsets, a->max_rows, a->n, a->k));
  MZ_REQUIRE(a->epilogue != MZ_EPI_GELU, MZ_ERR_ARG,
             "GELU is an epilogue of linear");
  MZ_REQUIRE(!a->add || a->epilogue == MZ_EPI_NONE, MZ_ERR_ARG,
             "dgrad cannot add behind an epilogue");
  if (a->epilogue == MZ_EPI_DGELU) p.epilogue = MZ_PRODUCT_DGELU;
  p.n = p.ldn = a->n;
  p.k = a->k;
  return MZ_TRACE(multiply_groups(kernels, a->num_groups, a->host_offsets, p, a,
                                  fill_dgrad, owed, stream));
}

static void fill_wgrad(const void *args, mz_dtype_t dtype, int32_t group,
                       int64_t first, mz_product_t *p)
{
  const mz_linear_wgrad_t *a = (const mz_linear_wgrad_t *)args;

  p->a = at_row(a->x, dtype, first, a->k);
  p->b = at_row(a->dy, dtype, first, a->n);
  p->d = a->dw[group];
  p->add = a->accumulate[group];
}

extern "C" mz_status_t mz_k_linear_wgrad_cuda(const mz_kernels_t *kernels,
                                              const mz_linear_wgrad_t *a,
                                              mz_stream_t stream)
{
  mz_product_t p = {MZ_PRODUCT_WGRAD, MZ_PRODUCT_PLAIN, kernels->dtype, MZ_F32};
  const int32_t *offsets = a->host_offsets;
  owed_t none = {};
  int64_t bytes;

  MZ_TRY(check(a->num_groups, offsets, a->max_rows, a->n, a->k));
  MZ_TRY(mz_mul_i64(a->n * a->k, sizeof(float), &bytes));
  for (int32_t g = 0; g < a->num_groups; g++)
    if (offsets[g] == offsets[g + 1] && !a->accumulate[g])
      MZ_CUDA(
          cudaMemsetAsync(a->dw[g], 0, (size_t)bytes, mz_cuda_stream(stream)));
  p.n = p.ldn = a->n;
  p.k = a->k;
  MZ_TRY(multiply_groups(kernels, a->num_groups, offsets, p, a, fill_wgrad,
                         none, stream));
  return a->db ? MZ_TRACE(sum_bias(kernels, a, mz_cuda_stream(stream))) : MZ_OK;
}
