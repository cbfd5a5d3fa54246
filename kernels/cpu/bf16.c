/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/bf16.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/convert.h"

enum { BLOCK_ROWS = 256, PIECE = 4096 /* elements a thread takes at a time */ };

mz_scratch_t mz_cpu_scratch(const mz_kernels_t *kernels)
{
  mz_scratch_t scratch = {(float *)(void *)kernels->workspace,
                          kernels->workspace_bytes / (int64_t)sizeof(float)};
  return scratch;
}

mz_status_t mz_cpu_take(mz_scratch_t *scratch, int64_t n, float **out)
{
  MZ_REQUIRE(n <= scratch->left, MZ_ERR_FIT,
             "%" PRId64 " floats of workspace are left, %" PRId64 " are needed",
             scratch->left, n);
  *out = scratch->at;
  scratch->at += n;
  scratch->left -= n;
  return MZ_OK;
}

mz_status_t mz_cpu_block_rows(const mz_scratch_t *scratch, int64_t columns,
                              int64_t unit, int64_t *rows_out)
{
  int64_t units = mz_max_i64(1, BLOCK_ROWS / unit);
  int64_t fit = scratch->left / columns / unit;

  MZ_REQUIRE(fit >= 1, MZ_ERR_FIT,
             "%" PRId64 " floats of workspace are left, %" PRId64
             " rows of %" PRId64 " are needed",
             scratch->left, unit, columns);
  *rows_out = mz_min_i64(units, fit) * unit;
  return MZ_OK;
}

void mz_cpu_from_bf16(float *dst, const void *src, int64_t at, int64_t n)
{
#pragma omp parallel for schedule(static) if (n > PIECE)
  for (int64_t i = 0; i < n; i += PIECE)
    mz_cpu_widen(MZ_BF16, dst + i, src, at + i, mz_min_i64(PIECE, n - i));
}

void mz_cpu_to_bf16(void *dst, int64_t at, const float *src, int64_t n)
{
#pragma omp parallel for schedule(static) if (n > PIECE)
  for (int64_t i = 0; i < n; i += PIECE)
    mz_cpu_narrow(MZ_BF16, dst, at + i, src + i, mz_min_i64(PIECE, n - i));
}
