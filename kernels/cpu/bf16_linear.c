/* SPDX-License-Identifier: Apache-2.0 */
/* Linear maps and activations of the bf16 table. Letters: kernels/linear.h. */
#include "kernels/cpu/bf16.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/linear.h"

enum { PIECE = 65536 /* elements of an activation at a time */ };

/* The rows [first, first + count) of a group as a product of one group. */
typedef struct block {
  int64_t first, count;
  int32_t offsets[2];
} block_t;

static block_t block_at(int64_t first, int64_t end, int64_t rows)
{
  block_t b = {.first = first, .count = mz_min_i64(rows, end - first)};

  b.offsets[1] = (int32_t)b.count;
  return b;
}

static mz_status_t linear_group(const mz_kernels_t *kernels,
                                const mz_linear_t *a, int32_t g,
                                mz_linear_t part, int64_t rows)
{
  bool gelu = a->epilogue == MZ_EPI_GELU;
  float *x = (float *)part.x;
  int64_t end = a->offsets[g + 1];

  for (int64_t first = a->offsets[g]; first < end; first += rows) {
    block_t b = block_at(first, end, rows);

    part.offsets = b.offsets;
    part.max_rows = b.count;
    mz_cpu_from_bf16(x, a->x, first * a->k, b.count * a->k);
    MZ_TRY(mz_k_linear_cpu(kernels, &part, NULL));
    mz_cpu_to_bf16(a->y, first * a->n, part.y, b.count * a->n);
    if (gelu) mz_cpu_to_bf16(a->pre, first * a->n, part.pre, b.count * a->n);
  }
  return MZ_OK;
}

mz_status_t mz_k_linear_cpu_bf16(const mz_kernels_t *kernels,
                                 const mz_linear_t *a, mz_stream_t stream)
{
  mz_scratch_t s = mz_cpu_scratch(kernels);
  bool gelu = a->epilogue == MZ_EPI_GELU;
  float *w, *b = NULL, *x, *y, *pre = NULL;
  const void *ws[1], *bs[1];
  mz_linear_t part = *a;
  int64_t rows;

  MZ_TRY(
      mz_cpu_linear_check(a->num_groups, a->offsets, a->max_rows, a->n, a->k));
  MZ_TRY(mz_cpu_take(&s, a->n * a->k, &w));
  if (a->b) MZ_TRY(mz_cpu_take(&s, a->n, &b));
  MZ_TRY(mz_cpu_block_rows(&s, a->k + (gelu ? 2 : 1) * a->n, 1, &rows));
  MZ_TRY(mz_cpu_take(&s, rows * a->k, &x));
  MZ_TRY(mz_cpu_take(&s, rows * a->n, &y));
  if (gelu) MZ_TRY(mz_cpu_take(&s, rows * a->n, &pre));
  ws[0] = w;
  bs[0] = b;
  part.num_groups = 1;
  part.w = ws;
  part.b = a->b ? bs : NULL;
  part.x = x;
  part.y = y;
  part.pre = pre;
  for (int32_t g = 0; g < a->num_groups; g++) {
    if (a->offsets[g] == a->offsets[g + 1]) continue;
    mz_cpu_from_bf16(w, a->w[g], 0, a->n * a->k);
    if (a->b) mz_cpu_from_bf16(b, a->b[g], 0, a->n);
    MZ_TRY(linear_group(kernels, a, g, part, rows));
  }
  return MZ_OK;
}

static mz_status_t dgrad_group(const mz_kernels_t *kernels,
                               const mz_linear_dgrad_t *a, int32_t g,
                               mz_linear_dgrad_t part, int64_t rows)
{
  bool gelu = a->epilogue == MZ_EPI_DGELU;
  float *dy = (float *)part.dy, *pre = (float *)part.pre;
  int64_t end = a->offsets[g + 1];

  for (int64_t first = a->offsets[g]; first < end; first += rows) {
    block_t b = block_at(first, end, rows);

    part.offsets = b.offsets;
    part.max_rows = b.count;
    mz_cpu_from_bf16(dy, a->dy, first * a->n, b.count * a->n);
    if (gelu) mz_cpu_from_bf16(pre, a->pre, first * a->k, b.count * a->k);
    if (a->add) mz_cpu_from_bf16(part.dx, a->dx, first * a->k, b.count * a->k);
    MZ_TRY(mz_k_linear_dgrad_cpu(kernels, &part, NULL));
    mz_cpu_to_bf16(a->dx, first * a->k, part.dx, b.count * a->k);
  }
  return MZ_OK;
}

mz_status_t mz_k_linear_dgrad_cpu_bf16(const mz_kernels_t *kernels,
                                       const mz_linear_dgrad_t *a,
                                       mz_stream_t stream)
{
  mz_scratch_t s = mz_cpu_scratch(kernels);
  bool gelu = a->epilogue == MZ_EPI_DGELU;
  float *w, *dy, *dx, *pre = NULL;
  const void *ws[1];
  mz_linear_dgrad_t part = *a;
  int64_t rows;

  MZ_TRY(
      mz_cpu_linear_check(a->num_groups, a->offsets, a->max_rows, a->n, a->k));
  MZ_TRY(mz_cpu_take(&s, a->n * a->k, &w));
  MZ_TRY(mz_cpu_block_rows(&s, a->n + (gelu ? 2 : 1) * a->k, 1, &rows));
  MZ_TRY(mz_cpu_take(&s, rows * a->n, &dy));
  MZ_TRY(mz_cpu_take(&s, rows * a->k, &dx));
  if (gelu) MZ_TRY(mz_cpu_take(&s, rows * a->k, &pre));
  ws[0] = w;
  part.num_groups = 1;
  part.w = ws;
  part.dy = dy;
  part.dx = dx;
  part.pre = pre;
  for (int32_t g = 0; g < a->num_groups; g++) {
    if (a->offsets[g] == a->offsets[g + 1]) continue;
    mz_cpu_from_bf16(w, a->w[g], 0, a->n * a->k);
    MZ_TRY(dgrad_group(kernels, a, g, part, rows));
  }
  return MZ_OK;
}

/* A group without rows is passed on too: its gradients may have to be zeroed.
 */
static mz_status_t wgrad_group(const mz_kernels_t *kernels,
                               const mz_linear_wgrad_t *a, int32_t g, float *x,
                               float *dy, int64_t rows)
{
  uint8_t add = a->accumulate[g];
  uint8_t add_bias = a->db ? a->accumulate_bias[g] : 0;
  int64_t first = a->offsets[g], end = a->offsets[g + 1];
  mz_linear_wgrad_t part = *a;

  part.num_groups = 1;
  part.x = x;
  part.dy = dy;
  part.dw = a->dw + g;
  part.db = a->db ? a->db + g : NULL;
  part.accumulate = &add;
  part.accumulate_bias = &add_bias;
  do {
    block_t b = block_at(first, end, rows);

    part.offsets = b.offsets;
    part.max_rows = b.count;
    mz_cpu_from_bf16(x, a->x, first * a->k, b.count * a->k);
    mz_cpu_from_bf16(dy, a->dy, first * a->n, b.count * a->n);
    MZ_TRY(mz_k_linear_wgrad_cpu(kernels, &part, NULL));
    add = add_bias = 1;
    first += rows;
  } while (first < end);
  return MZ_OK;
}

mz_status_t mz_k_linear_wgrad_cpu_bf16(const mz_kernels_t *kernels,
                                       const mz_linear_wgrad_t *a,
                                       mz_stream_t stream)
{
  mz_scratch_t s = mz_cpu_scratch(kernels);
  float *x, *dy;
  int64_t rows;

  MZ_TRY(
      mz_cpu_linear_check(a->num_groups, a->offsets, a->max_rows, a->n, a->k));
  MZ_TRY(mz_cpu_block_rows(&s, a->k + a->n, 1, &rows));
  MZ_TRY(mz_cpu_take(&s, rows * a->k, &x));
  MZ_TRY(mz_cpu_take(&s, rows * a->n, &dy));
  for (int32_t g = 0; g < a->num_groups; g++)
    MZ_TRY(wgrad_group(kernels, a, g, x, dy, rows));
  return MZ_OK;
}

/* Arrays of an activation at hand: as many elements of each as fit. */
static mz_status_t take_pieces(const mz_kernels_t *kernels, int num,
                               float **pieces, int64_t *size_out)
{
  mz_scratch_t s = mz_cpu_scratch(kernels);

  *size_out = mz_min_i64(PIECE, s.left / num);
  MZ_REQUIRE(*size_out >= 1, MZ_ERR_FIT, "no workspace for an activation");
  for (int i = 0; i < num; i++)
    MZ_TRY(mz_cpu_take(&s, *size_out, &pieces[i]));
  return MZ_OK;
}

mz_status_t mz_k_gelu_cpu_bf16(const mz_kernels_t *kernels, const mz_gelu_t *a,
                               mz_stream_t stream)
{
  float *at[2];
  int32_t count;
  mz_gelu_t part = {.rows = &count, .width = 1};
  int64_t n, size;

  MZ_TRY(mz_cpu_rows_check(a->rows, a->max_rows, a->width, &n));
  MZ_TRY(take_pieces(kernels, 2, at, &size));
  part.pre = at[0];
  part.a = at[1];
  for (int64_t i = 0; i < n; i += size) {
    count = (int32_t)mz_min_i64(size, n - i);
    part.max_rows = count;
    mz_cpu_from_bf16(at[0], a->pre, i, count);
    MZ_TRY(mz_k_gelu_cpu(kernels, &part, stream));
    mz_cpu_to_bf16(a->a, i, at[1], count);
  }
  return MZ_OK;
}

mz_status_t mz_k_swiglu_cpu_bf16(const mz_kernels_t *kernels,
                                 const mz_swiglu_t *a, mz_stream_t stream)
{
  float *at[3];
  int32_t count;
  mz_swiglu_t part = {.rows = &count, .width = 1};
  int64_t n, size;

  MZ_TRY(mz_cpu_rows_check(a->rows, a->max_rows, a->width, &n));
  MZ_TRY(take_pieces(kernels, 3, at, &size));
  part.gate = at[0];
  part.up = at[1];
  part.a = at[2];
  for (int64_t i = 0; i < n; i += size) {
    count = (int32_t)mz_min_i64(size, n - i);
    part.max_rows = count;
    mz_cpu_from_bf16(at[0], a->gate, i, count);
    mz_cpu_from_bf16(at[1], a->up, i, count);
    MZ_TRY(mz_k_swiglu_cpu(kernels, &part, stream));
    mz_cpu_to_bf16(a->a, i, at[2], count);
  }
  return MZ_OK;
}

mz_status_t mz_k_swiglu_grad_cpu_bf16(const mz_kernels_t *kernels,
                                      const mz_swiglu_t *a, mz_stream_t stream)
{
  float *at[3];
  int32_t count;
  mz_swiglu_t part = {.rows = &count, .width = 1};
  int64_t n, size;

  MZ_TRY(mz_cpu_rows_check(a->rows, a->max_rows, a->width, &n));
  MZ_TRY(take_pieces(kernels, 3, at, &size));
  part.gate = part.dgate = at[0];
  part.up = part.dup = at[1];
  part.da = part.a = at[2];
  for (int64_t i = 0; i < n; i += size) {
    count = (int32_t)mz_min_i64(size, n - i);
    part.max_rows = count;
    mz_cpu_from_bf16(at[0], a->gate, i, count);
    mz_cpu_from_bf16(at[1], a->up, i, count);
    mz_cpu_from_bf16(at[2], a->da, i, count);
    MZ_TRY(mz_k_swiglu_grad_cpu(kernels, &part, stream));
    mz_cpu_to_bf16(a->dgate, i, at[0], count);
    mz_cpu_to_bf16(a->dup, i, at[1], count);
    mz_cpu_to_bf16(a->a, i, at[2], count);
  }
  return MZ_OK;
}
