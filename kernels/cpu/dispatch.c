/* SPDX-License-Identifier: Apache-2.0 */
/* Rows between token order, send order and expert order on the CPU. T tokens,
 * K choices, H width. Contracts: kernels/gate.h. */
#include "kernels/cpu/cpu.h"

#include "kernels/cpu/clones.h"

#include <string.h>

/* Below this many elements a parallel region costs more than it saves. */
enum { MIN_PARALLEL = 16384 };

/* Partial sums of a dot product: a fixed number of them, so that the bits do
 * not depend on the width of the machine's vectors. */
enum { LANES = 16 };

static void copy_row(float *dst, const float *src, int64_t width)
{
  memcpy(dst, src, (size_t)width * sizeof *dst);
}

MZ_CLONES
static void add_row(float *restrict dst, const float *restrict src,
                    int64_t width)
{
  for (int64_t c = 0; c < width; c++)
    dst[c] += src[c];
}

MZ_CLONES
static void add_scaled_row(float *restrict dst, const float *restrict src,
                           float scale, int64_t width)
{
  for (int64_t c = 0; c < width; c++)
    dst[c] += scale * src[c];
}

/* src and dst may be the same row. */
MZ_CLONES
static void scale_row(float *dst, const float *src, float scale, int64_t width)
{
  for (int64_t c = 0; c < width; c++)
    dst[c] = scale * src[c];
}

MZ_CLONES
static float dot_rows(const float *restrict a, const float *restrict b,
                      int64_t width)
{
  float lane[LANES] = {0}, sum = 0.0f;
  int64_t c = 0;

  for (; c + LANES <= width; c += LANES)
    for (int i = 0; i < LANES; i++)
      lane[i] += a[c + i] * b[c + i];
  for (; c < width; c++)
    lane[c % LANES] += a[c] * b[c];
  for (int i = 0; i < LANES; i++)
    sum += lane[i];
  return sum;
}

mz_status_t mz_k_permute_cpu(const mz_kernels_t *kernels, const mz_permute_t *a,
                             mz_stream_t stream)
{
  const float *x = a->x;
  float *send = a->send;
  int64_t routes = a->num_tokens * a->k;

  (void)kernels;
  (void)stream;
#pragma omp parallel for schedule(static) if (routes * a->width >= MIN_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++)
    for (int64_t r = t * a->k; r < (t + 1) * a->k; r++)
      if (a->row[r] >= 0)
        copy_row(send + a->row[r] * a->width, x + t * a->width, a->width);
  return MZ_OK;
}

mz_status_t mz_k_permute_grad_cpu(const mz_kernels_t *kernels,
                                  const mz_permute_grad_t *a,
                                  mz_stream_t stream)
{
  const float *d_row = a->d_row;
  int64_t routes = a->num_tokens * a->k;

  (void)kernels;
  (void)stream;
#pragma omp parallel for schedule(static) if (routes * a->width >= MIN_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++) {
    float *dx = (float *)a->dx + t * a->width;

    memset(dx, 0, (size_t)a->width * sizeof *dx);
    for (int64_t r = t * a->k; r < (t + 1) * a->k; r++)
      if (a->row[r] >= 0) add_row(dx, d_row + a->row[r] * a->width, a->width);
  }
  return MZ_OK;
}

mz_status_t mz_k_combine_cpu(const mz_kernels_t *kernels, const mz_combine_t *a,
                             mz_stream_t stream)
{
  const float *back = a->back;
  int64_t routes = a->num_tokens * a->k;

  (void)kernels;
  (void)stream;
#pragma omp parallel for schedule(static) if (routes * a->width >= MIN_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++) {
    float *y = (float *)a->y + t * a->width;

    memset(y, 0, (size_t)a->width * sizeof *y);
    for (int64_t r = t * a->k; r < (t + 1) * a->k; r++)
      if (a->row[r] >= 0)
        add_scaled_row(y, back + a->row[r] * a->width, a->weight[r], a->width);
  }
  return MZ_OK;
}

mz_status_t mz_k_combine_grad_cpu(const mz_kernels_t *kernels,
                                  const mz_combine_grad_t *a,
                                  mz_stream_t stream)
{
  const mz_combine_t *f = &a->forward;
  const float *back = f->back;
  float *d_send = a->d_send;
  int64_t routes = f->num_tokens * f->k;

  (void)kernels;
  (void)stream;
#pragma omp parallel for schedule(static) if (routes * f->width >= MIN_PARALLEL)
  for (int64_t r = 0; r < routes; r++) {
    const float *dy = (const float *)a->dy + r / f->k * f->width;
    int64_t at = f->row[r] * f->width;

    if (f->row[r] < 0) {
      a->d_weight[r] = 0.0f;
      continue;
    }
    /* The product first: d_send may lie where back lies. */
    a->d_weight[r] = dot_rows(dy, back + at, f->width);
    scale_row(d_send + at, dy, f->weight[r], f->width);
  }
  return MZ_OK;
}

/* Rows of one expert: from each source rank in turn. Source-major rows of
 * (source, expert) start after all counts before it in row-major order. */
static void regroup_expert(const mz_regroup_t *a, int32_t expert)
{
  int64_t by_expert = a->offsets[expert], by_source = 0;
  size_t row_bytes = (size_t)a->width * sizeof(float);

  for (int32_t e = 0; e < expert; e++)
    by_source += a->counts[e];
  for (int32_t s = 0; s < a->num_sources; s++) {
    const int32_t *count = a->counts + (int64_t)s * a->num_experts + expert;
    int64_t from = a->to_source_major ? by_expert : by_source;
    int64_t to = a->to_source_major ? by_source : by_expert;

    if (*count > 0)
      memcpy((float *)a->dst + to * a->width,
             (const float *)a->src + from * a->width,
             (size_t)*count * row_bytes);
    by_expert += *count;
    if (s + 1 == a->num_sources) break;
    for (int32_t e = 0; e < a->num_experts; e++)
      by_source += count[e];
  }
}

mz_status_t mz_k_regroup_cpu(const mz_kernels_t *kernels, const mz_regroup_t *a,
                             mz_stream_t stream)
{
  int64_t size = a->offsets[a->num_experts] * a->width;

  (void)kernels;
  (void)stream;
#pragma omp parallel for schedule(dynamic, 1) if (size >= MIN_PARALLEL)
  for (int32_t e = 0; e < a->num_experts; e++)
    regroup_expert(a, e);
  return MZ_OK;
}

mz_status_t mz_k_scale_rows_cpu(const mz_kernels_t *kernels,
                                const mz_scale_rows_t *a, mz_stream_t stream)
{
  const float *x = a->x;
  float *y = a->y;

  (void)kernels;
  (void)stream;
  for (int32_t e = 0; e < a->num_experts; e++) {
    float scale = (float)(a->first_expert + e + 1);
    int64_t begin = a->offsets[e] * a->width;
    int64_t size = a->offsets[e + 1] * a->width - begin;

    if (size > 0) scale_row(y + begin, x + begin, scale, size);
  }
  return MZ_OK;
}
