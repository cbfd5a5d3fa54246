/* SPDX-License-Identifier: Apache-2.0 */
/* Dropout (Srivastava et al. 2014): masks from Philox, so that they do not
 * depend on ranks or threads. */
#include "kernels/cpu/dropout.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/random.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/simd.h"

/* Blocks of four numbers that cover MZ_MASK_COLUMNS from any start. */
enum { MASK_BLOCKS = MZ_MASK_COLUMNS / 4 + 1 };

mz_status_t mz_dropout_check(const mz_dropout_t *dropout)
{
  MZ_REQUIRE(dropout->p >= 0 && dropout->p < 1, MZ_ERR_ARG,
             "dropout p is %g, need 0 <= p < 1", dropout->p);
  MZ_REQUIRE(dropout->p == 0 || (dropout->samples && dropout->sequence >= 1),
             MZ_ERR_ARG, "dropout without samples or of sequence %" PRId32,
             dropout->sequence);
  return MZ_OK;
}

uint64_t mz_dropout_first(const mz_dropout_t *dropout, int64_t row,
                          int64_t width)
{
  int64_t sequence = dropout->sequence;
  uint64_t sample = (uint64_t)dropout->samples[row / sequence];

  return (sample * (uint64_t)sequence + (uint64_t)(row % sequence)) *
         (uint64_t)width;
}

/* uniform(bits) >= p, in integers: both sides are multiples of 2^-24 once p is
 * rounded up to one. */
MZ_CLONES static void choose(const uint32_t *restrict words, uint32_t threshold,
                             float kept, float *restrict mask, int64_t n)
{
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    mask[i] = words[i] >> 8 >= threshold ? kept : 0.0f;
}

void mz_dropout_mask(const mz_dropout_t *dropout, uint64_t first, int64_t n,
                     float *mask)
{
  uint32_t words[4 * MASK_BLOCKS];
  uint64_t block = first / 4;
  int64_t skip = (int64_t)(first % 4);

  MZ_ASSERT(n <= MZ_MASK_COLUMNS);
  mz_cpu_draw(&dropout->random, block, (int)mz_div_up(skip + n, 4), words);
  choose(words + skip, (uint32_t)ceil(dropout->p * 0x1p24),
         (float)(1.0 / (1.0 - dropout->p)), mask, n);
}

void mz_dropout_row(const mz_dropout_t *dropout, int64_t row, int64_t width,
                    const float *x, float *y)
{
  uint64_t first = mz_dropout_first(dropout, row, width);
  float mask[MZ_MASK_COLUMNS];

  for (int64_t c = 0; c < width; c += MZ_MASK_COLUMNS) {
    int64_t n = mz_min_i64(MZ_MASK_COLUMNS, width - c);

    mz_dropout_mask(dropout, first + (uint64_t)c, n, mask);
    mz_row_mask(x + c, mask, y + c, n);
  }
}

static void drop_row(mz_dtype_t dtype, const mz_dropout_apply_t *a, int64_t row)
{
  uint64_t first = mz_dropout_first(&a->dropout, row, a->width);
  float x[MZ_MASK_COLUMNS], mask[MZ_MASK_COLUMNS];

  for (int64_t c = 0; c < a->width; c += MZ_MASK_COLUMNS) {
    int64_t n = mz_min_i64(MZ_MASK_COLUMNS, a->width - c);

    mz_cpu_widen(dtype, x, a->x, row * a->width + c, n);
    mz_dropout_mask(&a->dropout, first + (uint64_t)c, n, mask);
    mz_row_mask(x, mask, x, n);
    mz_cpu_narrow(dtype, a->x, row * a->width + c, x, n);
  }
}

static mz_status_t dropout(mz_dtype_t dtype, const mz_dropout_apply_t *a)
{
  MZ_TRY(mz_dropout_check(&a->dropout));
  if (a->dropout.p == 0) return MZ_OK;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < a->rows; row++)
    drop_row(dtype, a, row);
  return MZ_OK;
}

MZ_CPU_BOTH_TABLES(dropout, mz_dropout_apply_t)
