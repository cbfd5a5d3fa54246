/* SPDX-License-Identifier: Apache-2.0 */
/* The head's product with its cross-entropy, forward and backward in one pass
 * over chunks of rows. Letters: kernels/embedding.h. */
#include "kernels/cpu/cpu.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/simd.h"

#include <cblas.h>
#include <string.h>

/* Rows whose losses wait on the stack to be added in order; columns whose
 * exponentials are added in fp32 before the sum goes on in fp64. */
enum { LOSS_ROWS = 128, SUM_COLUMNS = 1024 };

MZ_CLONES static float row_maximum(const float *restrict z, int64_t n)
{
  float maximum = z[0];

#pragma omp simd reduction(max : maximum)
  for (int64_t i = 0; i < n; i++)
    maximum = z[i] > maximum ? z[i] : maximum;
  return maximum;
}

/* z := exp(z - maximum); returns the sum. */
MZ_CLONES static float exponentials(float *restrict z, float maximum, int64_t n)
{
  float sum = 0;

#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) {
    z[i] = mz_simd_exp(z[i] - maximum);
    sum += z[i];
  }
  return sum;
}

/* One row of logits to its loss and, in place, to the gradient of
 * scale * loss. */
static double loss_row(const mz_xent_t *a, float *z, int32_t label)
{
  float maximum, chosen;
  double sum = 0;

  if (label < 0) {
    memset(z, 0, (size_t)a->vocab * sizeof *z);
    return 0;
  }
  chosen = z[label];
  maximum = row_maximum(z, a->vocab);
  for (int64_t c = 0; c < a->vocab; c += SUM_COLUMNS)
    sum += (double)exponentials(z + c, maximum,
                                mz_min_i64(SUM_COLUMNS, a->vocab - c));
  if (a->dx) {
    mz_row_scale(z, (float)(a->scale / sum), a->vocab);
    z[label] -= (float)a->scale;
  }
  return log(sum) + (double)maximum - (double)chosen;
}

/* All rows of a chunk; losses are added in order of the rows. */
static void loss_chunk(const mz_xent_t *a, int64_t first, int64_t rows)
{
  double loss[LOSS_ROWS];
  float *logits = a->logits;

  for (int64_t r0 = 0; r0 < rows; r0 += LOSS_ROWS) {
    int64_t n = mz_min_i64(LOSS_ROWS, rows - r0);

#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < n; r++)
      loss[r] =
          loss_row(a, logits + (r0 + r) * a->vocab, a->labels[first + r0 + r]);
    for (int64_t r = 0; r < n; r++)
      *a->loss += loss[r];
  }
}

static mz_status_t check_labels(const mz_xent_t *a)
{
  int narrow;

  MZ_REQUIRE(a->rows >= 0 && a->width >= 1 && a->vocab >= 1 &&
                 a->chunk_rows >= 1,
             MZ_ERR_ARG,
             "%" PRId64 " rows of %" PRId64 ", vocabulary %" PRId64
             ", chunks of %" PRId64 " rows",
             a->rows, a->width, a->vocab, a->chunk_rows);
  MZ_REQUIRE(a->labels || !a->dx, MZ_ERR_ARG, "gradients without labels");
  MZ_TRY(mz_int_from_i64(a->width, &narrow));
  MZ_TRY(mz_int_from_i64(a->vocab, &narrow));
  MZ_TRY(mz_int_from_i64(a->chunk_rows, &narrow));
  for (int64_t t = 0; a->labels && t < a->rows; t++)
    MZ_REQUIRE(a->labels[t] >= -1 && a->labels[t] < a->vocab, MZ_ERR_ARG,
               "label %" PRId64 " is %" PRId32 ", vocabulary %" PRId64, t,
               a->labels[t], a->vocab);
  return MZ_OK;
}

mz_status_t mz_k_xent_cpu(const mz_kernels_t *kernels, const mz_xent_t *a,
                          mz_stream_t stream)
{
  int width, vocab;

  MZ_TRY(check_labels(a));
  width = (int)a->width;
  vocab = (int)a->vocab;
  if (a->dx && a->rows == 0 && !a->accumulate)
    memset(a->dw, 0, (size_t)(a->vocab * a->width) * sizeof *a->dw);
  for (int64_t first = 0; first < a->rows; first += a->chunk_rows) {
    int rows = (int)mz_min_i64(a->chunk_rows, a->rows - first);
    const float *x = (const float *)a->x + first * a->width;

    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, vocab, width,
                1.0f, x, width, a->w, width, 0.0f, a->logits, vocab);
    if (a->labels) loss_chunk(a, first, rows);
    if (!a->dx) continue;
    /* dw reads x before dx, which may be the same memory, is written. */
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, vocab, width, rows,
                1.0f, a->logits, vocab, x, width,
                a->accumulate || first > 0 ? 1.0f : 0.0f, a->dw, width);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, width, vocab,
                1.0f, a->logits, vocab, a->w, width, 0.0f,
                (float *)a->dx + first * a->width, width);
  }
  return MZ_OK;
}
