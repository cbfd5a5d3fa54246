/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer step and the work on shards before and after the wire, on the
 * CPU. Everything here is bound by memory: one pass, in pieces that stay in
 * the first cache. Contracts: kernels/optim.h. */
#include "kernels/cpu/cpu.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/clones.h"

#include <math.h>
#include <string.h>

enum {
  PIECE = 2048, /* elements a thread works on at a time */
  PARTS = 64,   /* of a sum: fixed, so that the order depends on n alone */
  LANES = 16    /* partial sums in a part, whatever the vectors' width */
};

/* Floats as their bits and back. */
static inline uint32_t bits_of(float value)
{
  uint32_t bits;

  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits)
{
  float value;

  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Round to nearest, ties to even; a NaN keeps its upper bits and turns quiet,
 * since cutting the lower ones alone could leave an infinity. */
static inline uint16_t to_bf16(float value)
{
  uint32_t bits = bits_of(value);
  uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  uint32_t nan = bits >> 16 | 0x40u;

  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

static inline float from_bf16(uint16_t half)
{
  return float_of((uint32_t)half << 16);
}

/* IEEE binary16, round to nearest, ties to even, without a branch, so that the
 * loop becomes vector code. With e the exponent, at least -14, binary16's step
 * is 2^(e - 10), which is the step of fp32 at 2^(e + 13): that sum rounds as
 * wanted and holds the steps in its lower bits, normal numbers and small ones
 * alike. All from 65520 on round as 65520 does, to infinity. */
static inline uint16_t to_f16(float value)
{
  uint32_t bits = bits_of(value), size = bits & 0x7fffffffu;
  uint32_t nan = size > 0x7f800000u ? 0x200u : 0u;
  uint32_t below = size < 0x477ff000u ? size : 0x477ff000u;
  uint32_t above = below & 0x7f800000u;
  uint32_t exponent = above > 0x38800000u ? above : 0x38800000u;
  uint32_t grid = exponent + (13u << 23);
  uint32_t steps = bits_of(float_of(below) + float_of(grid)) - grid;
  uint32_t rounded = ((exponent - 0x38800000u) >> 13) + steps;

  return (uint16_t)((bits >> 16 & 0x8000u) | rounded | nan);
}

/* The same bits read as fp32 are 2^112 too small; infinity and NaN need all
 * bits of the exponent. */
static inline float from_f16(uint16_t half)
{
  uint32_t size = half & 0x7fffu;
  uint32_t finite = bits_of(float_of(size << 13) * 0x1p112f);
  uint32_t special = size >= 0x7c00u ? 0x7f800000u : 0u;

  return float_of((uint32_t)(half & 0x8000u) << 16 | finite | special);
}

MZ_CLONES
static void narrow_bf16(uint16_t *restrict dst, const float *restrict src,
                        int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    dst[i] = to_bf16(src[i]);
}

MZ_CLONES
static void narrow_f16(uint16_t *restrict dst, const float *restrict src,
                       int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    dst[i] = to_f16(src[i]);
}

MZ_CLONES
static void widen_bf16(float *restrict dst, const uint16_t *restrict src,
                       int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    dst[i] = from_bf16(src[i]);
}

MZ_CLONES
static void widen_f16(float *restrict dst, const uint16_t *restrict src,
                      int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    dst[i] = from_f16(src[i]);
}

static int is_float_dtype(mz_dtype_t dtype)
{
  return dtype == MZ_F32 || dtype == MZ_BF16 || dtype == MZ_F16;
}

/* n fp32 elements to dst, written from element @p at in @p dtype. */
static void narrow(mz_dtype_t dtype, void *dst, int64_t at, const float *src,
                   int64_t n)
{
  if (dtype == MZ_BF16)
    narrow_bf16((uint16_t *)dst + at, src, n);
  else if (dtype == MZ_F16)
    narrow_f16((uint16_t *)dst + at, src, n);
  else
    memcpy((float *)dst + at, src, (size_t)n * sizeof(float));
}

/* n elements of @p dtype from element @p at of src, as fp32. */
static void widen(mz_dtype_t dtype, float *dst, const void *src, int64_t at,
                  int64_t n)
{
  if (dtype == MZ_BF16)
    widen_bf16(dst, (const uint16_t *)src + at, n);
  else if (dtype == MZ_F16)
    widen_f16(dst, (const uint16_t *)src + at, n);
  else
    memcpy(dst, (const float *)src + at, (size_t)n * sizeof(float));
}

/* The numbers of a step, rounded to fp32 once. */
typedef struct adamw_step {
  float factor, lr, eps, decay, l2;
  float beta1, rest1, beta2, rest2; /* rest = 1 - beta */
  float scale1, scale2;             /* 1 / c1, 1 / c2 */
} adamw_step_t;

static adamw_step_t adamw_step(const mz_adamw_t *a)
{
  double c1 = a->bias_correction ? 1.0 - pow(a->beta1, (double)a->t) : 1.0;
  double c2 = a->bias_correction ? 1.0 - pow(a->beta2, (double)a->t) : 1.0;
  adamw_step_t s = {
      .factor = a->factor[0],
      .lr = (float)a->lr,
      .eps = (float)a->eps,
      .decay = a->l2 ? 0.0f : (float)a->decay,
      .l2 = a->l2 ? (float)a->decay : 0.0f,
      .beta1 = (float)a->beta1,
      .rest1 = (float)(1.0 - a->beta1),
      .beta2 = (float)a->beta2,
      .rest2 = (float)(1.0 - a->beta2),
      .scale1 = (float)(1.0 / c1),
      .scale2 = (float)(1.0 / c2),
  };

  return s;
}

MZ_CLONES
static void adamw_range(const adamw_step_t *step, int64_t n, float *restrict w,
                        float *restrict m, float *restrict v,
                        const float *restrict grad)
{
  const adamw_step_t s = *step;

  for (int64_t i = 0; i < n; i++) {
    float g = s.factor * grad[i] + s.l2 * w[i];
    float mean = s.beta1 * m[i] + s.rest1 * g;
    float square = s.beta2 * v[i] + s.rest2 * g * g;
    float update = mean * s.scale1 / (sqrtf(square * s.scale2) + s.eps);

    m[i] = mean;
    v[i] = square;
    w[i] -= s.lr * (update + s.decay * w[i]);
  }
}

mz_status_t mz_k_adamw_cpu(const mz_kernels_t *kernels, const mz_adamw_t *a,
                           mz_stream_t stream)
{
  adamw_step_t step = adamw_step(a);

  (void)kernels;
  (void)stream;
  MZ_REQUIRE(a->t >= 1, MZ_ERR_ARG, "adamw: t is %" PRId64 ", need 1 or more",
             a->t);
  MZ_REQUIRE(!a->out || is_float_dtype(a->out_dtype), MZ_ERR_UNSUPPORTED,
             "adamw: no weights of dtype %d", (int)a->out_dtype);
#pragma omp parallel for schedule(static) if (a->n > PIECE)
  for (int64_t at = 0; at < a->n; at += PIECE) {
    int64_t n = mz_min_i64(PIECE, a->n - at);

    adamw_range(&step, n, a->w + at, a->m + at, a->v + at, a->grad + at);
    if (a->out) narrow(a->out_dtype, a->out, at, a->w + at, n);
  }
  return MZ_OK;
}

MZ_CLONES
static void add_range(float *restrict sum, const float *restrict x, int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    sum[i] += x[i];
}

/* Elements [at, at + n) of the result, n <= PIECE. */
static void reduce_piece(const mz_reduce_ranks_t *a, int64_t at, int64_t n)
{
  float sum[PIECE], other[PIECE];

  widen(a->in_dtype, sum, a->in, at, n);
  for (int64_t r = 1; r < a->num_ranks; r++) {
    const float *x = other;

    if (a->in_dtype == MZ_F32)
      x = (const float *)a->in + r * a->stride + at;
    else
      widen(a->in_dtype, other, a->in, r * a->stride + at, n);
    add_range(sum, x, n);
  }
  if (a->accumulate)
    add_range(a->out + at, sum, n);
  else
    memcpy(a->out + at, sum, (size_t)n * sizeof *sum);
}

mz_status_t mz_k_reduce_ranks_cpu(const mz_kernels_t *kernels,
                                  const mz_reduce_ranks_t *a,
                                  mz_stream_t stream)
{
  (void)kernels;
  (void)stream;
  MZ_REQUIRE(a->num_ranks >= 1, MZ_ERR_ARG, "reduce_ranks: %" PRId32 " ranks",
             a->num_ranks);
  MZ_REQUIRE(is_float_dtype(a->in_dtype), MZ_ERR_UNSUPPORTED,
             "reduce_ranks: no input of dtype %d", (int)a->in_dtype);
#pragma omp parallel for schedule(static) if (a->n > PIECE)
  for (int64_t at = 0; at < a->n; at += PIECE)
    reduce_piece(a, at, mz_min_i64(PIECE, a->n - at));
  return MZ_OK;
}

MZ_CLONES
static double squares_of(const float *x, int64_t n)
{
  double lane[LANES] = {0}, sum = 0.0;
  int64_t i = 0;

  for (; i + LANES <= n; i += LANES)
    for (int j = 0; j < LANES; j++)
      lane[j] += (double)x[i + j] * (double)x[i + j];
  for (; i < n; i++)
    lane[i % LANES] += (double)x[i] * (double)x[i];
  for (int j = 0; j < LANES; j++)
    sum += lane[j];
  return sum;
}

mz_status_t mz_k_sum_squares_cpu(const mz_kernels_t *kernels,
                                 const mz_sum_squares_t *a, mz_stream_t stream)
{
  double part[PARTS], sum = 0.0;
  int64_t size = mz_round_up(mz_div_up(a->n, PARTS), LANES);

  (void)kernels;
  (void)stream;
  if (a->n == 0) return MZ_OK;
#pragma omp parallel for schedule(static) if (a->n > PIECE)
  for (int p = 0; p < PARTS; p++) {
    int64_t begin = mz_min_i64(p * size, a->n);
    int64_t end = mz_min_i64(begin + size, a->n);

    part[p] = squares_of(a->x + begin, end - begin);
  }
  for (int p = 0; p < PARTS; p++)
    sum += part[p];
  a->out[0] += sum;
  return MZ_OK;
}

/* Copies the shards of one rank; bases in elements. */
static void reorder_rank(const mz_reorder_t *a, int64_t rank, int64_t total)
{
  int64_t by_unit = 0, by_rank = rank * total;
  char *dst = a->dst;
  const char *src = a->src;

  for (int32_t u = 0; u < a->num_units; u++) {
    int64_t length = a->lengths[u];
    int64_t in_unit = by_unit + rank * length;
    int64_t from = a->to_rank_major ? in_unit : by_rank;
    int64_t to = a->to_rank_major ? by_rank : in_unit;

    if (length > 0)
      memcpy(dst + (size_t)to * a->element_bytes,
             src + (size_t)from * a->element_bytes,
             (size_t)length * a->element_bytes);
    by_unit += a->num_ranks * length;
    by_rank += length;
  }
}

mz_status_t mz_k_reorder_cpu(const mz_kernels_t *kernels, const mz_reorder_t *a,
                             mz_stream_t stream)
{
  int64_t total = 0;

  (void)kernels;
  (void)stream;
  for (int32_t u = 0; u < a->num_units; u++)
    total += a->lengths[u];
#pragma omp parallel for schedule(static) if (total > PIECE)
  for (int32_t rank = 0; rank < a->num_ranks; rank++)
    reorder_rank(a, rank, total);
  return MZ_OK;
}

static void convert_piece(const mz_convert_t *a, int64_t at, int64_t n)
{
  if (a->src_dtype == MZ_F32)
    narrow(a->dst_dtype, a->dst, at, (const float *)a->src + at, n);
  else
    widen(a->src_dtype, (float *)a->dst + at, a->src, at, n);
}

mz_status_t mz_k_convert_cpu(const mz_kernels_t *kernels, const mz_convert_t *a,
                             mz_stream_t stream)
{
  int known = is_float_dtype(a->src_dtype) && is_float_dtype(a->dst_dtype) &&
              (a->src_dtype == MZ_F32 || a->dst_dtype == MZ_F32);

  (void)kernels;
  (void)stream;
  MZ_REQUIRE(known, MZ_ERR_UNSUPPORTED, "convert: no way from dtype %d to %d",
             (int)a->src_dtype, (int)a->dst_dtype);
#pragma omp parallel for schedule(static) if (a->n > PIECE)
  for (int64_t at = 0; at < a->n; at += PIECE)
    convert_piece(a, at, mz_min_i64(PIECE, a->n - at));
  return MZ_OK;
}
