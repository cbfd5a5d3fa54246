/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of the bf16 table: a few whole sequences at a time. Letters:
 * kernels/attention.h. */
#include "kernels/cpu/bf16.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/cpu.h"

#include <string.h>

static int64_t qkv_width(const mz_attention_t *a)
{
  return ((int64_t)a->heads + 2 * (int64_t)a->kv_heads) * a->head_width;
}

static int64_t out_width(const mz_attention_t *a)
{
  return (int64_t)a->heads * a->head_width;
}

/* Statistics of the tokens [first, first + count), [A, T] of all and
 * [A, count] of the block. */
static void copy_stats(const mz_attention_t *a, float *all, int64_t first,
                       int64_t count, float *block, bool out)
{
  int64_t tokens = (int64_t)a->batch * a->sequence;

  for (int64_t head = 0; head < a->heads; head++) {
    float *there = all + head * tokens + first, *here = block + head * count;

    memcpy(out ? there : here, out ? here : there,
           (size_t)count * sizeof(float));
  }
}

mz_status_t mz_k_attention_cpu_bf16(const mz_kernels_t *kernels,
                                    const mz_attention_t *a, mz_stream_t stream)
{
  mz_scratch_t s = mz_cpu_scratch(kernels);
  int64_t wide = qkv_width(a), narrow = out_width(a);
  int64_t tokens = (int64_t)a->batch * a->sequence, rows;
  mz_attention_t part = *a;
  float *qkv, *out, *lse;

  part.batch = 0; /* checks the shape, computes nothing */
  MZ_TRY(mz_k_attention_cpu(kernels, &part, stream));
  MZ_TRY(mz_cpu_block_rows(&s, wide + narrow + a->heads, a->sequence, &rows));
  MZ_TRY(mz_cpu_take(&s, rows * wide, &qkv));
  MZ_TRY(mz_cpu_take(&s, rows * narrow, &out));
  MZ_TRY(mz_cpu_take(&s, rows * a->heads, &lse));
  part.qkv = qkv;
  part.out = out;
  part.lse = lse;
  for (int64_t first = 0; first < tokens; first += rows) {
    int64_t count = mz_min_i64(rows, tokens - first);

    part.batch = (int32_t)(count / a->sequence);
    mz_cpu_from_bf16(qkv, a->qkv, first * wide, count * wide);
    MZ_TRY(mz_k_attention_cpu(kernels, &part, stream));
    mz_cpu_to_bf16(a->out, first * narrow, out, count * narrow);
    copy_stats(a, a->lse, first, count, lse, true);
  }
  return MZ_OK;
}

static mz_status_t grad_block(const mz_kernels_t *kernels,
                              const mz_attention_grad_t *a,
                              mz_attention_grad_t part, int64_t first,
                              int64_t count)
{
  const mz_attention_t *f = &a->forward;
  int64_t wide = qkv_width(f), narrow = out_width(f);

  part.forward.batch = (int32_t)(count / f->sequence);
  mz_cpu_from_bf16((float *)part.forward.qkv, f->qkv, first * wide,
                   count * wide);
  mz_cpu_from_bf16(part.forward.out, f->out, first * narrow, count * narrow);
  mz_cpu_from_bf16((float *)part.dout, a->dout, first * narrow, count * narrow);
  copy_stats(f, f->lse, first, count, part.forward.lse, false);
  MZ_TRY(mz_k_attention_grad_cpu(kernels, &part, NULL));
  mz_cpu_to_bf16(a->dqkv, first * wide, part.dqkv, count * wide);
  return MZ_OK;
}

mz_status_t mz_k_attention_grad_cpu_bf16(const mz_kernels_t *kernels,
                                         const mz_attention_grad_t *a,
                                         mz_stream_t stream)
{
  const mz_attention_t *f = &a->forward;
  mz_scratch_t s = mz_cpu_scratch(kernels);
  int64_t wide = qkv_width(f), narrow = out_width(f);
  int64_t tokens = (int64_t)f->batch * f->sequence, rows;
  mz_attention_grad_t part = *a;
  float *qkv, *dqkv, *out, *dout;

  part.forward.batch = 0; /* checks the shape, computes nothing */
  MZ_TRY(mz_k_attention_grad_cpu(kernels, &part, stream));
  MZ_TRY(mz_cpu_block_rows(&s, 2 * (wide + narrow) + f->heads, f->sequence,
                           &rows));
  MZ_TRY(mz_cpu_take(&s, rows * wide, &qkv));
  MZ_TRY(mz_cpu_take(&s, rows * wide, &dqkv));
  MZ_TRY(mz_cpu_take(&s, rows * narrow, &out));
  MZ_TRY(mz_cpu_take(&s, rows * narrow, &dout));
  MZ_TRY(mz_cpu_take(&s, rows * f->heads, &part.forward.lse));
  part.forward.qkv = qkv;
  part.forward.out = out;
  part.dout = dout;
  part.dqkv = dqkv;
  for (int64_t first = 0; first < tokens; first += rows)
    MZ_TRY(
        grad_block(kernels, a, part, first, mz_min_i64(rows, tokens - first)));
  return MZ_OK;
}

mz_status_t mz_k_rope_cpu_bf16(const mz_kernels_t *kernels, const mz_rope_t *a,
                               mz_stream_t stream)
{
  mz_scratch_t s = mz_cpu_scratch(kernels);
  int64_t wide = ((int64_t)a->heads + 2 * (int64_t)a->kv_heads) * a->head_width;
  int64_t tokens = (int64_t)a->batch * a->sequence, rows;
  mz_rope_t part = *a;
  float *qkv;

  part.batch = 0; /* checks the shape, computes nothing */
  MZ_TRY(mz_k_rope_cpu(kernels, &part, stream));
  MZ_TRY(mz_cpu_block_rows(&s, wide, a->sequence, &rows));
  MZ_TRY(mz_cpu_take(&s, rows * wide, &qkv));
  part.qkv = qkv;
  for (int64_t first = 0; first < tokens; first += rows) {
    int64_t n = mz_min_i64(rows, tokens - first);

    part.batch = (int32_t)(n / a->sequence);
    mz_cpu_from_bf16(qkv, a->qkv, first * wide, n * wide);
    MZ_TRY(mz_k_rope_cpu(kernels, &part, stream));
    mz_cpu_to_bf16(a->qkv, first * wide, qkv, n * wide);
  }
  return MZ_OK;
}
