/* SPDX-License-Identifier: Apache-2.0 */
/* Budgets of the kernels' workspaces, from the declaration alone, so that every
 * build and every machine plans the same bytes. */
#include "plan/plan_impl.h"

#include "base/alloc.h"
#include "base/check.h"

/* The bf16 table of the CPU (kernels/kernels.h) holds one weight and two
 * vectors in fp32, and ROWS rows, or a whole sequence, of what an operation
 * works on. The widest is the gradient of attention: qkv and its gradient, out
 * and its gradient, no wider than they, and a number a head. */
enum { ROWS = 256, ARRAYS = 6 };

/* On GPUs the products have a share of their own, and what the other operations
 * need grows with the tokens: sums of the gradients of attention in fp32, ranks
 * of a sort, parts of column sums. */
enum { CUDA_BYTES = 192 << 20, CUDA_TOKEN_BYTES = 16 };

static bool is_activation(const mz_plan_t *plan, const mz_decl_buffer_t *b)
{
  return b->category == MZ_CAT_ACTIVATIONS && b->dtype == plan->dtype &&
         b->kind == MZ_ROWS_TOKENS;
}

/* H: the width that most activations have; of two the wider one. */
static int64_t usual_width(const mz_plan_t *plan)
{
  const mz_decl_t *d = plan->decl;
  int64_t width = 0, most = 0;

  for (int64_t i = 0; i < d->num_buffers; i++) {
    const mz_decl_buffer_t *b = &d->buffers[i];
    int64_t num = 0;

    if (!is_activation(plan, b) || b->width == width) continue;
    for (int64_t j = i; j < d->num_buffers; j++)
      num += is_activation(plan, &d->buffers[j]) &&
             d->buffers[j].width == b->width;
    if (num < most || (num == most && b->width < width)) continue;
    most = num;
    width = b->width;
  }
  return width;
}

static mz_status_t cuda_bytes(const mz_plan_t *plan, int64_t *bytes_out)
{
  int64_t bytes;

  MZ_TRY(mz_mul_i64(plan->max_tokens, usual_width(plan), &bytes));
  MZ_TRY(mz_mul_i64(bytes, CUDA_TOKEN_BYTES, &bytes));
  return MZ_TRACE(mz_add_i64(bytes, CUDA_BYTES, bytes_out));
}

mz_status_t mz_plan_workspace_bytes(const mz_plan_t *plan, int64_t *bytes_out)
{
  const mz_decl_t *d = plan->decl;
  int64_t rows = mz_max_i64(ROWS, plan->opts.sequence_length);
  int64_t weight = 0, width = 0, floats;

  *bytes_out = 0;
  if (plan->opts.cuda) return MZ_TRACE(cuda_bytes(plan, bytes_out));
  if (plan->dtype == MZ_F32) return MZ_OK;
  for (int64_t i = 0; i < d->num_tensors; i++)
    weight = mz_max_i64(weight, d->tensors[i].elements);
  for (int64_t i = 0; i < d->num_buffers; i++)
    if (d->buffers[i].dtype == plan->dtype)
      width = mz_max_i64(width, d->buffers[i].width);
  MZ_TRY(mz_mul_i64(width, ARRAYS * rows + 2, &floats));
  MZ_TRY(mz_add_i64(floats, weight, &floats));
  return MZ_TRACE(mz_mul_i64(floats, (int64_t)sizeof(float), bytes_out));
}
