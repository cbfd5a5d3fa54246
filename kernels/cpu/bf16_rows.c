/* SPDX-License-Identifier: Apache-2.0 */
/* Norm, embedding and head of the bf16 table. Letters: kernels/norm.h,
 * kernels/embedding.h. */
#include "kernels/cpu/bf16.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/dropout.h"

/* Rows that must stay together: the mask counts from the start of a sequence.
 */
static int64_t unit_of(const mz_dropout_t *dropout)
{
  return dropout->p > 0 ? dropout->sequence : 1;
}

/* The dropout of the rows from @p first on, the first of a sequence. */
static mz_dropout_t dropout_from(mz_dropout_t dropout, int64_t first)
{
  if (dropout.p > 0) dropout.samples += first / dropout.sequence;
  return dropout;
}

static mz_status_t norm_block(const mz_kernels_t *kernels,
                              const mz_add_norm_t *a, mz_add_norm_t part,
                              int64_t first, int64_t count)
{
  int64_t at = first * a->width, n = count * a->width;

  part.rows = count;
  part.dropout = dropout_from(a->dropout, first);
  if (a->mean) part.mean = a->mean + first;
  if (a->rstd) part.rstd = a->rstd + first;
  mz_cpu_from_bf16((float *)part.x, a->x, at, n);
  if (a->y) mz_cpu_from_bf16((float *)part.y, a->y, at, n);
  MZ_TRY(mz_k_add_norm_cpu(kernels, &part, NULL));
  if (a->sum) mz_cpu_to_bf16(a->sum, at, part.sum, n);
  if (a->h) mz_cpu_to_bf16(a->h, at, part.h, n);
  return MZ_OK;
}

/* h comes from the sum before that is rounded. */
mz_status_t mz_k_add_norm_cpu_bf16(const mz_kernels_t *kernels,
                                   const mz_add_norm_t *a, mz_stream_t stream)
{
  mz_scratch_t s = mz_cpu_scratch(kernels);
  float *w = NULL, *b = NULL, *x, *y = NULL, *h = NULL;
  mz_add_norm_t part = *a;
  int64_t rows;

  MZ_TRY(mz_dropout_check(&a->dropout));
  if (a->h) MZ_TRY(mz_cpu_take(&s, a->width, &w));
  if (a->h && a->b) MZ_TRY(mz_cpu_take(&s, a->width, &b));
  MZ_TRY(mz_cpu_block_rows(&s, 3 * a->width, unit_of(&a->dropout), &rows));
  MZ_TRY(mz_cpu_take(&s, rows * a->width, &x));
  if (a->y) MZ_TRY(mz_cpu_take(&s, rows * a->width, &y));
  if (a->h) MZ_TRY(mz_cpu_take(&s, rows * a->width, &h));
  if (w) mz_cpu_from_bf16(w, a->w, 0, a->width);
  if (b) mz_cpu_from_bf16(b, a->b, 0, a->width);
  part.w = w;
  part.b = b;
  part.x = x;
  part.y = y;
  part.sum = a->sum ? x : NULL;
  part.h = h;
  for (int64_t first = 0; first < a->rows; first += rows)
    MZ_TRY(
        norm_block(kernels, a, part, first, mz_min_i64(rows, a->rows - first)));
  return MZ_OK;
}

static mz_status_t norm_grad_block(const mz_kernels_t *kernels,
                                   const mz_add_norm_grad_t *a,
                                   mz_add_norm_grad_t part, int64_t first,
                                   int64_t count)
{
  int64_t at = first * a->width, n = count * a->width;

  part.rows = count;
  part.dropout = dropout_from(a->dropout, first);
  part.accumulate_w = a->accumulate_w || first > 0;
  part.accumulate_b = a->accumulate_b || first > 0;
  if (a->mean) part.mean = a->mean + first;
  if (a->rstd) part.rstd = a->rstd + first;
  mz_cpu_from_bf16((float *)part.sum, a->sum, at, n);
  mz_cpu_from_bf16((float *)part.dh, a->dh, at, n);
  if (a->add) mz_cpu_from_bf16(part.d_sum, a->d_sum, at, n);
  MZ_TRY(mz_k_add_norm_grad_cpu(kernels, &part, NULL));
  mz_cpu_to_bf16(a->d_sum, at, part.d_sum, n);
  if (a->dropout.p > 0) mz_cpu_to_bf16(a->dy, at, part.dy, n);
  return MZ_OK;
}

mz_status_t mz_k_add_norm_grad_cpu_bf16(const mz_kernels_t *kernels,
                                        const mz_add_norm_grad_t *a,
                                        mz_stream_t stream)
{
  mz_scratch_t s = mz_cpu_scratch(kernels);
  float *w, *sum, *dh, *d_sum, *dy;
  mz_add_norm_grad_t part = *a;
  int64_t rows, first = 0;

  MZ_TRY(mz_dropout_check(&a->dropout));
  MZ_TRY(mz_cpu_take(&s, a->width, &w));
  MZ_TRY(mz_cpu_block_rows(&s, 4 * a->width, unit_of(&a->dropout), &rows));
  MZ_TRY(mz_cpu_take(&s, rows * a->width, &sum));
  MZ_TRY(mz_cpu_take(&s, rows * a->width, &dh));
  MZ_TRY(mz_cpu_take(&s, rows * a->width, &d_sum));
  MZ_TRY(mz_cpu_take(&s, rows * a->width, &dy));
  mz_cpu_from_bf16(w, a->w, 0, a->width);
  part.w = w;
  part.sum = sum;
  part.dh = dh;
  part.d_sum = d_sum;
  part.dy = dy;
  do { /* without rows too: dw and db may have to be zeroed */
    MZ_TRY(norm_grad_block(kernels, a, part, first,
                           mz_min_i64(rows, a->rows - first)));
    first += rows;
  } while (first < a->rows);
  return MZ_OK;
}

/* Blocks of whole sequences: position 0 is the first row of each. */
mz_status_t mz_k_embedding_grad_cpu_bf16(const mz_kernels_t *kernels,
                                         const mz_embedding_grad_t *a,
                                         mz_stream_t stream)
{
  const mz_embedding_t *f = &a->forward;
  mz_scratch_t s = mz_cpu_scratch(kernels);
  mz_embedding_grad_t part = *a;
  int64_t rows, first = 0;
  float *dx;

  MZ_REQUIRE(f->sequence >= 1 && f->width >= 1, MZ_ERR_ARG,
             "sequence %" PRId32 " of width %" PRId64, f->sequence, f->width);
  MZ_TRY(mz_cpu_block_rows(&s, f->width, f->sequence, &rows));
  MZ_TRY(mz_cpu_take(&s, rows * f->width, &dx));
  part.dx = dx;
  do {
    int64_t count = mz_min_i64(rows, f->num_tokens - first);

    part.forward.num_tokens = count;
    part.forward.tokens = f->tokens + first;
    part.forward.dropout = dropout_from(f->dropout, first);
    part.accumulate_te = a->accumulate_te || first > 0;
    part.accumulate_pe = a->accumulate_pe || first > 0;
    mz_cpu_from_bf16(dx, a->dx, first * f->width, count * f->width);
    MZ_TRY(mz_k_embedding_grad_cpu(kernels, &part, stream));
    first += rows;
  } while (first < f->num_tokens);
  return MZ_OK;
}

/* dx takes the place of x in fp32 too. */
mz_status_t mz_k_xent_cpu_bf16(const mz_kernels_t *kernels, const mz_xent_t *a,
                               mz_stream_t stream)
{
  mz_scratch_t s = mz_cpu_scratch(kernels);
  mz_xent_t part = *a;
  int64_t rows, size, first = 0;
  float *x, *w;

  MZ_REQUIRE(a->width >= 1 && a->vocab >= 1 && a->chunk_rows >= 1, MZ_ERR_ARG,
             "width %" PRId64 ", vocabulary %" PRId64 ", chunks of %" PRId64
             " rows",
             a->width, a->vocab, a->chunk_rows);
  MZ_TRY(mz_mul_i64(a->vocab, a->width, &size));
  MZ_TRY(mz_cpu_take(&s, size, &w));
  MZ_TRY(mz_cpu_block_rows(&s, a->width, 1, &rows));
  rows = mz_min_i64(rows, a->chunk_rows);
  MZ_TRY(mz_cpu_take(&s, rows * a->width, &x));
  mz_cpu_from_bf16(w, a->w, 0, size);
  part.w = w;
  part.x = x;
  part.dx = a->dx ? x : NULL;
  do {
    int64_t at = first * a->width;

    part.rows = mz_min_i64(rows, a->rows - first);
    part.labels = a->labels ? a->labels + first : NULL;
    part.accumulate = a->accumulate || first > 0;
    mz_cpu_from_bf16(x, a->x, at, part.rows * a->width);
    MZ_TRY(mz_k_xent_cpu(kernels, &part, stream));
    if (a->dx) mz_cpu_to_bf16(a->dx, at, x, part.rows * a->width);
    first += rows;
  } while (first < a->rows);
  return MZ_OK;
}
