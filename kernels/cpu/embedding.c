/* SPDX-License-Identifier: Apache-2.0 */
/* Token and position embedding. Letters: kernels/embedding.h. */
#include "kernels/cpu/cpu.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/dropout.h"
#include "kernels/cpu/rows.h"

#include <string.h>

/* Columns of dwte and dwpe that one task owns. */
enum { STRIPE = 64 };

/* learned: there is a table of positions. */
static mz_status_t check_tokens(const mz_embedding_t *a, int learned)
{
  MZ_REQUIRE(a->num_tokens >= 0 && a->width >= 1, MZ_ERR_ARG,
             "%" PRId64 " tokens of width %" PRId64, a->num_tokens, a->width);
  MZ_REQUIRE(a->sequence >= 1 && (!learned || a->sequence <= a->positions),
             MZ_ERR_SHAPE, "sequence %" PRId32 ", positions %" PRId64,
             a->sequence, a->positions);
  for (int64_t t = 0; t < a->num_tokens; t++)
    MZ_REQUIRE(a->tokens[t] >= 0 && a->tokens[t] < a->vocab, MZ_ERR_ARG,
               "token %" PRId64 " is %" PRId32 ", vocabulary %" PRId64, t,
               a->tokens[t], a->vocab);
  return MZ_TRACE(mz_dropout_check(&a->dropout));
}

static void embed_row(mz_dtype_t dtype, const mz_embedding_t *a, int64_t t)
{
  int64_t te = a->tokens[t] * a->width, pe = t % a->sequence * a->width;
  float x[MZ_MASK_COLUMNS], other[MZ_MASK_COLUMNS];
  uint64_t first = 0;

  if (a->dropout.p > 0) first = mz_dropout_first(&a->dropout, t, a->width);
  for (int64_t c = 0; c < a->width; c += MZ_MASK_COLUMNS) {
    int64_t n = mz_min_i64(MZ_MASK_COLUMNS, a->width - c);

    mz_cpu_widen(dtype, x, a->wte, te + c, n);
    if (a->wpe)
      mz_row_add(x, mz_cpu_read(dtype, a->wpe, pe + c, n, other), x, n);
    if (a->dropout.p > 0) {
      mz_dropout_mask(&a->dropout, first + (uint64_t)c, n, other);
      mz_row_mask(x, other, x, n);
    }
    mz_cpu_narrow(dtype, a->x, t * a->width + c, x, n);
  }
}

static mz_status_t embedding(mz_dtype_t dtype, const mz_embedding_t *a)
{
  MZ_TRY(check_tokens(a, a->wpe != NULL));
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < a->num_tokens; t++)
    embed_row(dtype, a, t);
  return MZ_OK;
}

MZ_CPU_BOTH_TABLES(embedding, mz_embedding_t)

/* Columns [c, c + n) of both gradients, tokens in order: a task owns its
 * columns, so nothing depends on the threads. */
static void grad_stripe(const mz_embedding_grad_t *a, int64_t c, int64_t n)
{
  const mz_embedding_t *f = &a->forward;
  float mask[STRIPE];

  for (int64_t t = 0; t < f->num_tokens; t++) {
    const float *dx = (const float *)a->dx + t * f->width + c;
    float *te = a->dwte + f->tokens[t] * f->width + c;
    float *pe = a->dwpe ? a->dwpe + t % f->sequence * f->width + c : NULL;

    if (f->dropout.p > 0) {
      uint64_t first = mz_dropout_first(&f->dropout, t, f->width);

      mz_dropout_mask(&f->dropout, first + (uint64_t)c, n, mask);
      mz_row_add_masked(te, dx, mask, te, n);
      if (pe) mz_row_add_masked(pe, dx, mask, pe, n);
    } else {
      mz_row_add(te, dx, te, n);
      if (pe) mz_row_add(pe, dx, pe, n);
    }
  }
}

static void clear_rows(float *x, int64_t rows, int64_t width)
{
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++)
    memset(x + r * width, 0, (size_t)width * sizeof *x);
}

mz_status_t mz_k_embedding_grad_cpu(const mz_kernels_t *kernels,
                                    const mz_embedding_grad_t *a,
                                    mz_stream_t stream)
{
  const mz_embedding_t *f = &a->forward;

  MZ_TRY(check_tokens(f, a->dwpe != NULL));
  if (!a->accumulate_te) clear_rows(a->dwte, f->vocab, f->width);
  if (a->dwpe && !a->accumulate_pe) clear_rows(a->dwpe, f->positions, f->width);
#pragma omp parallel for schedule(dynamic)
  for (int64_t c = 0; c < f->width; c += STRIPE)
    grad_stripe(a, c, mz_min_i64(STRIPE, f->width - c));
  return MZ_OK;
}
