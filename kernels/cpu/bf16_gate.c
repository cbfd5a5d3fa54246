/* SPDX-License-Identifier: Apache-2.0 */
/* The gate of the bf16 table: fp32 logits of bf16 numbers, then the fp32
 * gate. Letters: kernels/gate.h. */
#include "kernels/cpu/bf16.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/gate.h"

/* w in fp32, and blocks of num arrays of rows. */
static mz_status_t take_arrays(const mz_kernels_t *kernels, const mz_gate_t *a,
                               int num, float **w, float **blocks,
                               int64_t *rows_out)
{
  mz_scratch_t s = mz_cpu_scratch(kernels);
  int64_t size;

  MZ_TRY(mz_mul_i64(a->num_experts, a->width, &size));
  MZ_TRY(mz_cpu_take(&s, size, w));
  MZ_TRY(mz_cpu_block_rows(&s, num * a->width, 1, rows_out));
  for (int i = 0; i < num; i++)
    MZ_TRY(mz_cpu_take(&s, *rows_out * a->width, &blocks[i]));
  mz_cpu_from_bf16(*w, a->w, 0, size);
  return MZ_OK;
}

mz_status_t mz_k_gate_cpu_bf16(const mz_kernels_t *kernels, const mz_gate_t *a,
                               mz_stream_t stream)
{
  float *w, *x;
  int64_t rows;

  MZ_TRY(mz_cpu_gate_check(a));
  if (!a->fixed_logits) {
    MZ_TRY(take_arrays(kernels, a, 1, &w, &x, &rows));
    for (int64_t first = 0; first < a->num_tokens; first += rows) {
      int64_t n = mz_min_i64(rows, a->num_tokens - first);

      mz_cpu_from_bf16(x, a->x, first * a->width, n * a->width);
      mz_cpu_gate_logits(a, first, n, x, w);
    }
  }
  mz_cpu_gate_route(a);
  return MZ_OK;
}

mz_status_t mz_k_gate_grad_cpu_bf16(const mz_kernels_t *kernels,
                                    const mz_gate_grad_t *a, mz_stream_t stream)
{
  const mz_gate_t *f = &a->forward;
  int64_t rows, first = 0;
  float *w, *blocks[2];

  MZ_TRY(mz_cpu_gate_check(f));
  MZ_TRY(take_arrays(kernels, f, 2, &w, blocks, &rows));
  mz_cpu_gate_dlogits(a);
  do { /* without tokens too: dw may have to be zeroed */
    int64_t n = mz_min_i64(rows, f->num_tokens - first), at = first * f->width;

    mz_cpu_from_bf16(blocks[0], f->x, at, n * f->width);
    mz_cpu_from_bf16(blocks[1], a->dx, at, n * f->width);
    mz_cpu_gate_products(a, first, n, blocks[0], w, blocks[1],
                         a->accumulate || first > 0);
    mz_cpu_to_bf16(a->dx, at, blocks[1], n * f->width);
    first += rows;
  } while (first < f->num_tokens);
  return MZ_OK;
}
