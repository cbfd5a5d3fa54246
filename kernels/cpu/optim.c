/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer step and the work on shards before and after the wire, on the
 * CPU. Everything here is bound by memory: one pass, in pieces that stay in
 * the first cache. Contracts: kernels/optim.h. */
#include "kernels/cpu/cpu.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/clones.h"
#include "kernels/cpu/convert.h"

#include <math.h>
#include <string.h>

enum {
  PIECE = 2048, /* elements a thread works on at a time */
  LANES = 16    /* partial sums in a stretch, whatever the vectors' width */
};

/* The numbers of a step and a group, rounded to fp32 once. */
typedef struct adamw_step {
  float factor, lr, eps, decay, l2;
  float beta1, rest1, beta2, rest2; /* rest = 1 - beta */
  float scale1, scale2;             /* 1 / c1, 1 / c2 */
} adamw_step_t;

static adamw_step_t adamw_step(const mz_adamw_t *a, int32_t group)
{
  const mz_adamw_group_t *g = &a->groups[group];
  double c1 = a->bias_correction ? 1.0 - pow(g->beta1, (double)a->t) : 1.0;
  double c2 = a->bias_correction ? 1.0 - pow(g->beta2, (double)a->t) : 1.0;
  adamw_step_t s = {
      .factor = a->factor[0],
      .lr = (float)g->lr,
      .eps = (float)g->eps,
      .decay = a->l2 ? 0.0f : (float)g->decay,
      .l2 = a->l2 ? (float)g->decay : 0.0f,
      .beta1 = (float)g->beta1,
      .rest1 = (float)(1.0 - g->beta1),
      .beta2 = (float)g->beta2,
      .rest2 = (float)(1.0 - g->beta2),
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

static void adamw_stretch(const mz_adamw_t *a, const mz_stretch_t *s)
{
  adamw_step_t step = adamw_step(a, s->group);

  for (int64_t at = 0; at < s->n; at += PIECE) {
    int64_t n = mz_min_i64(PIECE, s->n - at);

    adamw_range(&step, n, s->w + at, s->m + at, s->v + at, s->grad + at);
    if (s->out) mz_cpu_narrow(a->out_dtype, s->out, at, s->w + at, n);
  }
}

mz_status_t mz_k_adamw_cpu(const mz_kernels_t *kernels, const mz_adamw_t *a,
                           mz_stream_t stream)
{
  (void)kernels;
  (void)stream;
  MZ_REQUIRE(a->t >= 1, MZ_ERR_ARG, "adamw: t is %" PRId64 ", need 1 or more",
             a->t);
  MZ_REQUIRE(mz_cpu_is_float(a->out_dtype), MZ_ERR_UNSUPPORTED,
             "adamw: no weights of dtype %d", (int)a->out_dtype);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < a->num_stretches; i++)
    adamw_stretch(a, &a->stretches[i]);
  return MZ_OK;
}

MZ_CLONES
static void add_range(float *restrict sum, const float *restrict x, int64_t n)
{
  for (int64_t i = 0; i < n; i++)
    sum[i] += x[i];
}

/* A rank's numbers begin at element *at_out of the array. */
static const void *numbers_of(const mz_reduce_ranks_t *a, int64_t rank,
                              int64_t *at_out)
{
  bool own = a->own && rank == a->place;

  *at_out = own ? 0 : (rank - (a->own && rank > a->place)) * a->stride;
  return own ? a->own : a->in;
}

/* Elements [at, at + n) of the result, n <= PIECE. */
static void reduce_piece(const mz_reduce_ranks_t *a, int64_t at, int64_t n)
{
  float sum[PIECE], other[PIECE];
  int64_t first;
  const void *in = numbers_of(a, 0, &first);

  mz_cpu_widen(a->in_dtype, sum, in, first + at, n);
  for (int64_t r = 1; r < a->num_ranks; r++) {
    const float *x = other;

    in = numbers_of(a, r, &first);
    if (a->in_dtype == MZ_F32)
      x = (const float *)in + first + at;
    else
      mz_cpu_widen(a->in_dtype, other, in, first + at, n);
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
  MZ_REQUIRE(mz_cpu_is_float(a->in_dtype), MZ_ERR_UNSUPPORTED,
             "reduce_ranks: no input of dtype %d", (int)a->in_dtype);
  MZ_REQUIRE(!a->own || (a->place >= 0 && a->place < a->num_ranks), MZ_ERR_ARG,
             "reduce_ranks: place %" PRId32 " of %" PRId32, a->place,
             a->num_ranks);
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
  (void)kernels;
  (void)stream;
  a->out[0] = a->out[1] = 0;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < a->num_stretches; i++)
    a->partial[i] = squares_of(a->stretches[i].grad, a->stretches[i].n);
  for (int64_t i = 0; i < a->num_stretches; i++) {
    if (!isfinite(a->partial[i]) && a->out[1] == 0)
      a->out[1] = a->stretches[i].tensor + 1;
    a->out[0] += a->partial[i];
  }
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
  size_t bytes = mz_dtype_bytes(a->src_dtype);

  if (a->src_dtype == a->dst_dtype)
    memcpy((char *)a->dst + (size_t)at * bytes,
           (const char *)a->src + (size_t)at * bytes, (size_t)n * bytes);
  else if (a->src_dtype == MZ_F32)
    mz_cpu_narrow(a->dst_dtype, a->dst, at, (const float *)a->src + at, n);
  else
    mz_cpu_widen(a->src_dtype, (float *)a->dst + at, a->src, at, n);
}

mz_status_t mz_k_convert_cpu(const mz_kernels_t *kernels, const mz_convert_t *a,
                             mz_stream_t stream)
{
  int known = mz_cpu_is_float(a->src_dtype) && mz_cpu_is_float(a->dst_dtype) &&
              (a->src_dtype == MZ_F32 || a->dst_dtype == MZ_F32 ||
               a->src_dtype == a->dst_dtype);

  (void)kernels;
  (void)stream;
  MZ_REQUIRE(known, MZ_ERR_UNSUPPORTED, "convert: no way from dtype %d to %d",
             (int)a->src_dtype, (int)a->dst_dtype);
#pragma omp parallel for schedule(static) if (a->n > PIECE)
  for (int64_t at = 0; at < a->n; at += PIECE)
    convert_piece(a, at, mz_min_i64(PIECE, a->n - at));
  return MZ_OK;
}
