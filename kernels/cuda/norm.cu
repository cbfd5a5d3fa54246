/* SPDX-License-Identifier: Apache-2.0 */
/* Residual add and normalisation on the GPU. Letters: kernels/norm.h. RMSNorm
 * is the same code with a mean of 0.
 *
 * A row stays in registers: WARPS warps own it, and a thread PACKS times 16
 * bytes of it. Rows that are too long for that, or of a width or an address
 * without 16-byte accesses, go element by element and are read again for each
 * step. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/dropout.cuh"
#include "kernels/cuda/norm.cuh"

enum { SUM_WARPS = 16 }; /* of a block that sums partial sums */

/* --- forward --- */

/* s = x + dropout(y) of a thread's part of a row, stored where wanted; 0 behind
 * the end of the row. */
template <typename T, int PACKS, int LANES>
static __device__ __forceinline__ void
add_row(const mz_add_norm_t &a, const mz_mask_t &mask, int64_t row, int lane,
        int packs, float (&s)[PACKS][mz_pack<T>::N])
{
  enum { N = mz_pack<T>::N };
  const uint4 *x = (const uint4 *)((const T *)a.x + row * a.width);
  const uint4 *y = (const uint4 *)((const T *)a.y + row * a.width);
  uint4 *sum = (uint4 *)((T *)a.sum + row * a.width);
  uint4 raw_x[PACKS], raw_y[PACKS];
  uint64_t first = 0;

#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    int at = lane + p * LANES;

    raw_x[p] = at < packs ? __ldcs(x + at) : zero_pack();
    raw_y[p] = at < packs && a.y ? __ldcs(y + at) : zero_pack();
  }
  if (mask.threshold && packs > 0) first = mz_mask_first(mask, row, a.width);
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    int at = lane + p * LANES;

    mz_widen<T>(raw_x[p], s[p]);
    if (a.y) {
      float other[N];

      mz_widen<T>(raw_y[p], other);
      if (mask.threshold)
        mz_mask_apply<N>(mask, first + (uint64_t)at * N, other);
#pragma unroll
      for (int i = 0; i < N; i++)
        s[p][i] += other[i];
    }
    if (a.sum && at < packs) sum[at] = mz_narrow<T>(s[p]);
  }
}

/* h = (s - mean) rstd w + b */
template <typename T, int PACKS, int LANES>
static __device__ __forceinline__ void
write_row(const mz_add_norm_t &a, int64_t row, int lane, int packs, float mean,
          float rstd, const float (&s)[PACKS][mz_pack<T>::N])
{
  enum { N = mz_pack<T>::N };
  uint4 *h = (uint4 *)((T *)a.h + row * a.width);

#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    int at = lane + p * LANES;
    float w[N], b[N] = {}, y[N];

    if (at >= packs) continue;
    mz_widen<T>(__ldg((const uint4 *)a.w + at), w);
    if (a.b) mz_widen<T>(__ldg((const uint4 *)a.b + at), b);
#pragma unroll
    for (int i = 0; i < N; i++)
      y[i] = (s[p][i] - mean) * rstd * w[i] + b[i];
    h[at] = mz_narrow<T>(y);
  }
}

template <typename T, int PACKS, int WARPS>
static __global__ void __launch_bounds__(cut<WARPS>::THREADS)
    forward_packs(mz_add_norm_t a, mz_mask_t mask)
{
  enum { N = mz_pack<T>::N, LANES = cut<WARPS>::LANES };
  __shared__ float shared[2][cut<WARPS>::THREADS / 32];
  int lane = (int)threadIdx.x % LANES;
  int64_t row = (int64_t)blockIdx.x * cut<WARPS>::ROWS + threadIdx.x / LANES;
  /* A row behind the last takes part in the barriers and in nothing else. */
  int packs = row < a.rows ? (int)(a.width / N) : 0;
  float s[PACKS][N], mean = 0.0f, sum = 0.0f, rstd;

  add_row<T, PACKS, LANES>(a, mask, row, lane, packs, s);
  if (!a.h) return;
  if (a.kind == MZ_NORM_LAYER) {
#pragma unroll
    for (int p = 0; p < PACKS; p++)
#pragma unroll
      for (int i = 0; i < N; i++)
        sum += s[p][i];
    mean = row_sum<WARPS>(sum, shared[0]) / (float)a.width;
  }
  sum = 0.0f;
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    if (lane + p * LANES >= packs) continue;
#pragma unroll
    for (int i = 0; i < N; i++)
      sum += (s[p][i] - mean) * (s[p][i] - mean);
  }
  sum = row_sum<WARPS>(sum, shared[1]) / (float)a.width;
  rstd = 1.0f / sqrtf(sum + (float)a.eps);
  if (lane == 0 && packs > 0) {
    if (a.kind == MZ_NORM_LAYER) a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
  write_row<T, PACKS, LANES>(a, row, lane, packs, mean, rstd, s);
}

/* s of one element; first: the number of the row's first one in the stream. */
template <typename T>
static __device__ __forceinline__ float
sum_at(const mz_add_norm_t &a, const mz_mask_t &mask, uint64_t first,
       int64_t at, int64_t c)
{
  float s = mz_load(((const T *)a.x)[at + c]);

  if (a.y) {
    float y = mz_load(((const T *)a.y)[at + c]);

    if (mask.threshold) mz_mask_apply<1>(mask, first + (uint64_t)c, &y);
    s += y;
  }
  return s;
}

/* A block a row. s is computed anew for each step, because what is stored of it
 * is rounded; it is stored in the last step, because it may be x. */
template <typename T>
static __global__ void forward_elements(mz_add_norm_t a, mz_mask_t mask)
{
  __shared__ float shared[2][33];
  int64_t row = blockIdx.x, at = row * a.width;
  float mean = 0.0f, rstd = 0.0f, sum = 0.0f;
  uint64_t first = mask.threshold ? mz_mask_first(mask, row, a.width) : 0;

  if (a.h && a.kind == MZ_NORM_LAYER) {
    for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x)
      sum += sum_at<T>(a, mask, first, at, c);
    mean = mz_block_sum(sum, shared[0]) / (float)a.width;
  }
  if (a.h) {
    sum = 0.0f;
    for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) {
      float centred = sum_at<T>(a, mask, first, at, c) - mean;

      sum += centred * centred;
    }
    sum = mz_block_sum(sum, shared[1]) / (float)a.width;
    rstd = 1.0f / sqrtf(sum + (float)a.eps);
    if (threadIdx.x == 0) {
      if (a.kind == MZ_NORM_LAYER) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
  }
  for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) {
    float s = sum_at<T>(a, mask, first, at, c);

    if (a.sum) ((T *)a.sum)[at + c] = mz_store<T>(s);
    if (a.h) {
      float b = a.b ? mz_load(((const T *)a.b)[c]) : 0.0f;
      float w = mz_load(((const T *)a.w)[c]);

      ((T *)a.h)[at + c] = mz_store<T>((s - mean) * rstd * w + b);
    }
  }
}

template <typename T, int PACKS, int WARPS>
static void start_forward(const mz_add_norm_t *a, const mz_mask_t *mask,
                          cudaStream_t stream)
{
  unsigned blocks = (unsigned)mz_div_up(a->rows, cut<WARPS>::ROWS);

  forward_packs<T, PACKS, WARPS>
      <<<blocks, cut<WARPS>::THREADS, 0, stream>>>(*a, *mask);
}

template <typename T>
static mz_status_t add_norm(const mz_add_norm_t *args, cudaStream_t stream)
{
  mz_add_norm_t local = *args, *a = &local;
  const void *arrays[] = {a->x, a->y, a->sum, a->h, a->w, a->b};
  int64_t packs = packs_of<T>(a->width, arrays, 6);
  mz_mask_t mask;

  MZ_TRY(mz_mask_make(&a->dropout, &mask));
  MZ_TRY(check_rows(a->rows, a->width));
  MZ_REQUIRE(!a->y || a->sum, MZ_ERR_ARG, "a residual add without a sum");
  if (!a->y && a->sum == a->x) a->sum = NULL; /* it is there already */
  if (!a->y) mask.threshold = 0;
  if (a->rows == 0 || (!a->sum && !a->h)) return MZ_OK;
  if (packs < 0)
    forward_elements<T>
        <<<(unsigned)a->rows, element_threads(a->width), 0, stream>>>(*a, mask);
  else if (packs <= 32)
    start_forward<T, 1, 1>(a, &mask, stream);
  else if (packs <= 64)
    start_forward<T, 2, 1>(a, &mask, stream);
  else if (packs <= 96)
    start_forward<T, 3, 1>(a, &mask, stream);
  else if (packs <= 128)
    start_forward<T, 4, 1>(a, &mask, stream);
  else if (packs <= 256)
    start_forward<T, 4, 2>(a, &mask, stream);
  else if (packs <= 512)
    start_forward<T, 4, 4>(a, &mask, stream);
  else
    start_forward<T, 4, 8>(a, &mask, stream);
  MZ_LAUNCHED("add_norm");
  return MZ_OK;
}

extern "C" mz_status_t mz_k_add_norm_cuda(const mz_kernels_t *kernels,
                                          const mz_add_norm_t *a,
                                          mz_stream_t stream)
{
  return MZ_TRACE(MZ_BY_DTYPE(kernels, add_norm, a, mz_cuda_stream(stream)));
}

/* --- backward --- */

/* A thread's part of a row as it was read; zeros where there is none. */
template <int PACKS> struct row_part {
  uint4 s[PACKS], dh[PACKS], d[PACKS];
  float mean, rstd;
};

template <typename T, int PACKS, int LANES>
static __device__ __forceinline__ void read_row(const mz_add_norm_grad_t &a,
                                                int64_t row, int lane,
                                                row_part<PACKS> *part)
{
  int packs = row < a.rows ? (int)(a.width / mz_pack<T>::N) : 0;
  const uint4 *s = (const uint4 *)((const T *)a.sum + row * a.width);
  const uint4 *dh = (const uint4 *)((const T *)a.dh + row * a.width);
  const uint4 *d = (const uint4 *)((const T *)a.d_sum + row * a.width);

#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    int at = lane + p * LANES;

    part->s[p] = at < packs ? __ldcs(s + at) : zero_pack();
    part->dh[p] = at < packs ? __ldcs(dh + at) : zero_pack();
    part->d[p] = at < packs && a.add ? __ldcs(d + at) : zero_pack();
  }
  part->mean = packs > 0 && a.kind == MZ_NORM_LAYER ? a.mean[row] : 0.0f;
  part->rstd = packs > 0 ? a.rstd[row] : 0.0f;
}

/* The row's share of dw and db, and the sums of dh w and dh w xhat. */
template <typename T, int PACKS>
static __device__ __forceinline__ float2
reduce_row(const row_part<PACKS> &part, const uint4 (&raw_w)[PACKS],
           float (&dw)[PACKS][mz_pack<T>::N], float (&db)[PACKS][mz_pack<T>::N])
{
  enum { N = mz_pack<T>::N };
  float plain = 0.0f, centred = 0.0f;

#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    float s[N], dh[N], w[N];

    mz_widen<T>(part.s[p], s);
    mz_widen<T>(part.dh[p], dh);
    mz_widen<T>(raw_w[p], w);
#pragma unroll
    for (int i = 0; i < N; i++) {
      float xhat = (s[i] - part.mean) * part.rstd, g = dh[i] * w[i];

      plain += g;
      centred += g * xhat;
      dw[p][i] += dh[i] * xhat;
      db[p][i] += dh[i];
    }
  }
  return make_float2(plain, centred);
}

/* d (+)= rstd (dh w - plain - xhat centred), and dy. */
template <typename T, int PACKS, int LANES>
static __device__ __forceinline__ void
write_input(const mz_add_norm_grad_t &a, const mz_mask_t &mask, int64_t row,
            int lane, const row_part<PACKS> &part, const uint4 (&raw_w)[PACKS],
            float plain, float centred)
{
  enum { N = mz_pack<T>::N };
  int packs = row < a.rows ? (int)(a.width / N) : 0;
  uint4 *d_sum = (uint4 *)((T *)a.d_sum + row * a.width);
  uint4 *dy = (uint4 *)((T *)a.dy + row * a.width);
  uint64_t first = 0;

  if (mask.threshold && packs > 0) first = mz_mask_first(mask, row, a.width);
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    int at = lane + p * LANES;
    float s[N], dh[N], w[N], d[N];

    if (at >= packs) continue;
    mz_widen<T>(part.s[p], s);
    mz_widen<T>(part.dh[p], dh);
    mz_widen<T>(raw_w[p], w);
    mz_widen<T>(part.d[p], d);
#pragma unroll
    for (int i = 0; i < N; i++) {
      float xhat = (s[i] - part.mean) * part.rstd;

      d[i] += part.rstd * (dh[i] * w[i] - plain - xhat * centred);
    }
    d_sum[at] = mz_narrow<T>(d);
    if (mask.threshold) {
      mz_mask_apply<N>(mask, first + (uint64_t)at * N, d);
      dy[at] = mz_narrow<T>(d);
    }
  }
}

/* Four floats a time to or onto sums of columns. */
template <int PACKS, int N>
static __device__ __forceinline__ void
put_columns(float *out, int lane, int lanes, int packs, bool add,
            const float (&x)[PACKS][N])
{
#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    int at = lane + p * lanes;

    if (at >= packs) continue;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      float4 *to = (float4 *)(out + at * N + i), old = {};

      if (add) old = *to;
      *to = make_float4(old.x + x[p][i], old.y + x[p][i + 1],
                        old.z + x[p][i + 2], old.w + x[p][i + 3]);
    }
  }
}

/* The block's sums to its row of partial; columns is shared memory [2, H] of a
 * block with several rows at a time, whose sums are added in their order. */
template <typename T, int PACKS, int WARPS>
static __device__ __forceinline__ void
put_partials(const mz_add_norm_grad_t &a, float *columns,
             const float (&dw)[PACKS][mz_pack<T>::N],
             const float (&db)[PACKS][mz_pack<T>::N])
{
  enum { LANES = cut<WARPS>::LANES, ROWS = cut<WARPS>::ROWS };
  int lane = (int)threadIdx.x % LANES, group = (int)threadIdx.x / LANES;
  int width = (int)a.width, packs = width / mz_pack<T>::N;
  float *out = a.partial + (int64_t)blockIdx.x * 2 * width;

  if constexpr (ROWS == 1) {
    put_columns(out, lane, LANES, packs, false, dw);
    put_columns(out + width, lane, LANES, packs, false, db);
  } else {
    for (int g = 0; g < ROWS; g++) {
      if (group == g) {
        put_columns(columns, lane, LANES, packs, g > 0, dw);
        put_columns(columns + width, lane, LANES, packs, g > 0, db);
      }
      __syncthreads();
    }
    for (int c = (int)threadIdx.x; c < 2 * width; c += cut<WARPS>::THREADS)
      out[c] = columns[c];
  }
}

/* The next row is read while this one is worked on: there are too few warps to
 * hide the way to memory otherwise, as the sums of columns fill registers. */
template <typename T, int PACKS, int WARPS>
static __global__ void __launch_bounds__(cut<WARPS>::THREADS)
    backward_packs(mz_add_norm_grad_t a, mz_mask_t mask)
{
  enum { N = mz_pack<T>::N, LANES = cut<WARPS>::LANES };
  extern __shared__ float4 columns[];
  /* Twice, in turns: one barrier a row is enough then. */
  __shared__ float shared[2][2][cut<WARPS>::THREADS / 32];
  int lane = (int)threadIdx.x % LANES, turn = 0;
  int64_t step = (int64_t)gridDim.x * cut<WARPS>::ROWS;
  int64_t first = (int64_t)blockIdx.x * cut<WARPS>::ROWS;
  int64_t group = threadIdx.x / LANES;
  float dw[PACKS][N] = {}, db[PACKS][N] = {};
  row_part<PACKS> now, next;
  uint4 w[PACKS];

#pragma unroll
  for (int p = 0; p < PACKS; p++) {
    int at = lane + p * LANES;

    w[p] = at < a.width / N ? __ldg((const uint4 *)a.w + at) : zero_pack();
  }
  read_row<T, PACKS, LANES>(a, first + group, lane, &now);
  for (int64_t base = first; base < a.rows; base += step, turn ^= 1) {
    int64_t row = base + group;
    float2 sums;
    float plain = 0.0f, centred;

    read_row<T, PACKS, LANES>(a, row + step, lane, &next);
    sums = reduce_row<T, PACKS>(now, w, dw, db);
    if (a.kind == MZ_NORM_LAYER)
      plain = row_sum<WARPS>(sums.x, shared[turn][0]) / (float)a.width;
    centred = row_sum<WARPS>(sums.y, shared[turn][1]) / (float)a.width;
    write_input<T, PACKS, LANES>(a, mask, row, lane, now, w, plain, centred);
    now = next;
  }
  put_partials<T, PACKS, WARPS>(a, (float *)columns, dw, db);
}

/* A block goes through its rows one by one, a thread owns columns: also of
 * dw and db, which grow in partial. */
template <typename T>
static __global__ void backward_elements(mz_add_norm_grad_t a, mz_mask_t mask)
{
  __shared__ float shared[2][33];
  float *dw = a.partial + (int64_t)blockIdx.x * 2 * a.width, *db = dw + a.width;
  const T *w = (const T *)a.w;

  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T *s = (const T *)a.sum + row * a.width;
    const T *dh = (const T *)a.dh + row * a.width;
    T *d_sum = (T *)a.d_sum + row * a.width, *dy = (T *)a.dy + row * a.width;
    float mean = a.kind == MZ_NORM_LAYER ? a.mean[row] : 0.0f;
    float rstd = a.rstd[row], plain = 0.0f, centred = 0.0f;
    bool add = row >= gridDim.x;
    uint64_t first = mask.threshold ? mz_mask_first(mask, row, a.width) : 0;

    for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) {
      float xhat = (mz_load(s[c]) - mean) * rstd, slope = mz_load(dh[c]);
      float g = slope * mz_load(w[c]);

      plain += g;
      centred += g * xhat;
      dw[c] = (add ? dw[c] : 0.0f) + slope * xhat;
      db[c] = (add ? db[c] : 0.0f) + slope;
    }
    plain = mz_block_sum(plain, shared[0]) / (float)a.width;
    centred = mz_block_sum(centred, shared[1]) / (float)a.width;
    if (a.kind == MZ_NORM_RMS) plain = 0.0f;
    for (int64_t c = threadIdx.x; c < a.width; c += blockDim.x) {
      float xhat = (mz_load(s[c]) - mean) * rstd;
      float g = mz_load(dh[c]) * mz_load(w[c]);
      float d = a.add ? mz_load(d_sum[c]) : 0.0f;

      d += rstd * (g - plain - xhat * centred);
      d_sum[c] = mz_store<T>(d);
      if (mask.threshold) {
        mz_mask_apply<1>(mask, first + (uint64_t)c, &d);
        dy[c] = mz_store<T>(d);
      }
    }
  }
}

/* dw (blockIdx.y 0) and db (1) (+)= the partial sums: SUM_WARPS warps take
 * them in turns, and the warps' sums are added in order. */
static __global__ void __launch_bounds__(32 * SUM_WARPS)
    sum_partials(mz_add_norm_grad_t a, int count)
{
  __shared__ float shared[SUM_WARPS][32];
  int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
  int64_t c = (int64_t)blockIdx.x * 32 + lane;
  const float *partial = a.partial + blockIdx.y * a.width + c;
  float sum = 0.0f;

  if (c < a.width) {
#pragma unroll
    for (int k = 0; k < MZ_NORM_PARTIALS / SUM_WARPS; k++) {
      int i = warp + k * SUM_WARPS;

      if (i < count) sum += partial[(int64_t)i * 2 * a.width];
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && c < a.width) {
    float *out = blockIdx.y ? a.db : a.dw;
    int accumulate = blockIdx.y ? a.accumulate_b : a.accumulate_w;

    for (int i = 1; i < SUM_WARPS; i++)
      sum += shared[i][lane];
    out[c] = accumulate ? out[c] + sum : sum;
  }
}

/* Blocks of a backward pass: they depend on the rows alone. */
template <typename T, int PACKS, int WARPS>
static int start_backward(const mz_add_norm_grad_t *a, const mz_mask_t *mask,
                          cudaStream_t stream)
{
  enum { ROWS = cut<WARPS>::ROWS };
  int blocks = (int)mz_min_i64(mz_div_up(a->rows, ROWS), MZ_NORM_PARTIALS);
  size_t shared = ROWS > 1 ? (size_t)(2 * a->width) * sizeof(float) : 0;

  backward_packs<T, PACKS, WARPS>
      <<<(unsigned)blocks, cut<WARPS>::THREADS, shared, stream>>>(*a, *mask);
  return blocks;
}

template <typename T>
static int start_elements(const mz_add_norm_grad_t *a, const mz_mask_t *mask,
                          cudaStream_t stream)
{
  int blocks = (int)mz_min_i64(a->rows, MZ_NORM_PARTIALS);

  backward_elements<T>
      <<<(unsigned)blocks, element_threads(a->width), 0, stream>>>(*a, *mask);
  return blocks;
}

template <typename T>
static mz_status_t add_norm_grad(const mz_add_norm_grad_t *a,
                                 cudaStream_t stream)
{
  const void *arrays[] = {a->sum, a->dh, a->w, a->d_sum, a->dy, a->partial};
  int64_t packs = packs_of<T>(a->width, arrays, 6);
  dim3 columns((unsigned)mz_div_up(a->width, 32), a->db ? 2 : 1);
  int partials = 0;
  mz_mask_t mask;

  MZ_TRY(mz_mask_make(&a->dropout, &mask));
  MZ_TRY(check_rows(a->rows, a->width));
  if (a->rows == 0)
    partials = 0;
  else if (packs < 0)
    partials = start_elements<T>(a, &mask, stream);
  else if (packs <= 32)
    partials = start_backward<T, 1, 1>(a, &mask, stream);
  else if (packs <= 64)
    partials = start_backward<T, 2, 1>(a, &mask, stream);
  else if (packs <= 96)
    partials = start_backward<T, 3, 1>(a, &mask, stream);
  else if (packs <= 128)
    partials = start_backward<T, 4, 1>(a, &mask, stream);
  else if (packs <= 256)
    partials = start_backward<T, 4, 2>(a, &mask, stream);
  else if (packs <= 512)
    partials = start_backward<T, 4, 4>(a, &mask, stream);
  else
    partials = start_backward<T, 4, 8>(a, &mask, stream);
  MZ_LAUNCHED("add_norm_grad");
  sum_partials<<<columns, 32 * SUM_WARPS, 0, stream>>>(*a, partials);
  MZ_LAUNCHED("add_norm_grad: sums");
  return MZ_OK;
}

extern "C" mz_status_t mz_k_add_norm_grad_cuda(const mz_kernels_t *kernels,
                                               const mz_add_norm_grad_t *a,
                                               mz_stream_t stream)
{
  return MZ_TRACE(
      MZ_BY_DTYPE(kernels, add_norm_grad, a, mz_cuda_stream(stream)));
}
