/* SPDX-License-Identifier: Apache-2.0 */
/* Causal attention of the "/cuda" table: checks a call, chooses its form, and
 * sums dout * out for the backward of the own forms. Letters: attention.h. */
#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_form.h"
#include "kernels/cuda/cuda.h"

enum { THREADS = 256 };

struct mz_cuda_attention {
  mz_cuda_cudnn_t *cudnn; /* NULL: there is none */
  bool own_only;
  int shared; /* bytes that a block may have */
};

mz_status_t mz_cuda_attention_create(const mz_kernels_t *kernels,
                                     mz_cuda_attention_t **out)
{
  mz_cuda_attention_t *attention = NULL;

  mz_status_t st;

  MZ_TRY(mz_new(1, "forms of attention", &attention));
  st = mz_cuda_shared_bytes(&attention->shared);
  if (st == MZ_OK && kernels->dtype == MZ_BF16)
    st = mz_cuda_cudnn_create(&attention->cudnn);
  if (st != MZ_OK)
    mz_cuda_attention_destroy(attention);
  else
    *out = attention;
  return MZ_TRACE(st);
}

void mz_cuda_attention_destroy(mz_cuda_attention_t *attention)
{
  if (!attention) return;
  mz_cuda_cudnn_destroy(attention->cudnn);
  mz_free(attention);
}

/* --- delta --- */

/* One (token, head) by `lanes` neighbours, a power of two up to 32, N elements
 * at a time. */
template <typename T, int N>
static __global__ void sum_products(mz_cuda_heads_t h, int64_t pairs, int lanes)
{
  struct alignas(N * sizeof(T)) piece {
    T v[N];
  };
  int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  int64_t pair = at / lanes;
  int lane = (int)(at % lanes);
  bool there = pair < pairs;
  const piece *x = (const piece *)((const T *)h.out + pair * h.width);
  const piece *y = (const piece *)((const T *)h.dout + pair * h.width);
  float sum = 0;

  for (int i = lane; there && i < h.width / N; i += lanes) {
    piece u = x[i], v = y[i];
#pragma unroll
    for (int k = 0; k < N; k++)
      sum = fmaf(mz_load(u.v[k]), mz_load(v.v[k]), sum);
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (there && lane == 0) {
    int64_t token = pair / h.heads;
    int b = (int)(token / h.sequence), row = (int)(token % h.sequence);

    h.delta[mz_cuda_stats_at(h, b, (int)(pair % h.heads), row)] = sum;
  }
}

template <typename T>
static mz_status_t run_delta(const mz_cuda_heads_t *h, cudaStream_t stream)
{
  const int N = mz_pack<T>::N;
  bool wide =
      h->width % N == 0 && ((uintptr_t)h->out | (uintptr_t)h->dout) % 16 == 0;
  int64_t pairs = (int64_t)h->batch * h->sequence * h->heads, blocks;
  int lanes = 1;

  while (lanes < 32 && lanes < h->width / (wide ? N : 1))
    lanes *= 2;
  blocks = mz_div_up(pairs * lanes, THREADS);
  MZ_REQUIRE(blocks <= INT32_MAX, MZ_ERR_OVERFLOW, "%" PRId64 " blocks",
             blocks);
  if (wide)
    sum_products<T, N>
        <<<(unsigned)blocks, THREADS, 0, stream>>>(*h, pairs, lanes);
  else
    sum_products<T, 1>
        <<<(unsigned)blocks, THREADS, 0, stream>>>(*h, pairs, lanes);
  MZ_LAUNCHED("attention_grad of delta");
  return MZ_OK;
}

/* --- operations --- */

mz_status_t mz_cuda_check_heads(int32_t batch, int32_t sequence, int32_t heads,
                                int32_t kv_heads, int32_t head_width)
{
  MZ_REQUIRE(batch >= 0 && sequence >= 1 && heads >= 1 && kv_heads >= 1 &&
                 head_width >= 1,
             MZ_ERR_ARG,
             "%" PRId32 " sequences of %" PRId32 ", %" PRId32 " heads, %" PRId32
             " kv heads of width %" PRId32,
             batch, sequence, heads, kv_heads, head_width);
  MZ_REQUIRE(heads % kv_heads == 0, MZ_ERR_SHAPE,
             "%" PRId32 " heads not divisible by %" PRId32 " kv heads", heads,
             kv_heads);
  MZ_REQUIRE(head_width <= MZ_CUDA_MAX_HEAD_WIDTH, MZ_ERR_UNSUPPORTED,
             "head width %" PRId32 ", at most %d", head_width,
             (int)MZ_CUDA_MAX_HEAD_WIDTH);
  return MZ_OK;
}

static mz_status_t heads_of(const mz_kernels_t *kernels,
                            const mz_attention_t *a, mz_cuda_heads_t *h)
{
  int64_t ld;

  MZ_TRY(mz_cuda_check_heads(a->batch, a->sequence, a->heads, a->kv_heads,
                             a->head_width));
  MZ_TRY(mz_mul_i64((int64_t)a->heads + 2 * (int64_t)a->kv_heads, a->head_width,
                    &ld));
  *h = mz_cuda_heads_t{};
  h->batch = a->batch;
  h->sequence = a->sequence;
  h->heads = a->heads;
  h->kv_heads = a->kv_heads;
  h->group = a->heads / a->kv_heads;
  h->width = a->head_width;
  h->ld = ld;
  h->ldo = (int64_t)a->heads * a->head_width;
  h->scale = (float)(1.0 / sqrt((double)a->head_width));
  h->shared = mz_cuda_state(kernels)->attention->shared;
  h->qkv = a->qkv;
  h->out = a->out;
  h->lse = a->lse;
  return MZ_OK;
}

/* What cuDNN serves, unless the own forms are wanted. */
static mz_status_t try_cudnn(const mz_kernels_t *kernels,
                             const mz_cuda_heads_t *h, bool grad,
                             cudaStream_t stream, bool *served_out)
{
  mz_cuda_attention_t *attention = mz_cuda_state(kernels)->attention;

  *served_out = false;
  if (!attention->cudnn || attention->own_only) return MZ_OK;
  return MZ_TRACE(mz_cuda_cudnn_attention(kernels, attention->cudnn, h, grad,
                                          stream, served_out));
}

extern "C" mz_status_t mz_k_attention_cuda(const mz_kernels_t *kernels,
                                           const mz_attention_t *a,
                                           mz_stream_t stream)
{
  cudaStream_t on = mz_cuda_stream(stream);
  mz_cuda_heads_t h;
  bool served;

  MZ_TRY(heads_of(kernels, a, &h));
  if (h.batch == 0) return MZ_OK;
  MZ_TRY(try_cudnn(kernels, &h, false, on, &served));
  if (served) return MZ_OK;
  if (mz_cuda_attention_mma_serves(kernels->dtype, &h))
    return MZ_TRACE(mz_cuda_attention_mma(&h, on));
  return MZ_TRACE(mz_cuda_attention_fma(kernels->dtype, &h, false, on));
}

extern "C" mz_status_t mz_k_attention_grad_cuda(const mz_kernels_t *kernels,
                                                const mz_attention_grad_t *a,
                                                mz_stream_t stream)
{
  cudaStream_t on = mz_cuda_stream(stream);
  mz_cuda_heads_t h;
  bool served;

  MZ_TRY(heads_of(kernels, &a->forward, &h));
  h.dout = a->dout;
  h.dqkv = a->dqkv;
  h.delta = a->delta;
  if (h.batch == 0) return MZ_OK;
  MZ_TRY(try_cudnn(kernels, &h, true, on, &served));
  if (served) return MZ_OK;
  MZ_TRY(MZ_BY_DTYPE(kernels, run_delta, &h, on));
  if (mz_cuda_attention_mma_serves(kernels->dtype, &h))
    return MZ_TRACE(mz_cuda_attention_mma_grad(&h, on));
  return MZ_TRACE(mz_cuda_attention_fma(kernels->dtype, &h, true, on));
}

/* --- which form --- */

extern "C" void mz_cuda_attention_own_only(mz_kernels_t *kernels, int on)
{
  mz_cuda_state(kernels)->attention->own_only = on != 0;
}

extern "C" mz_status_t mz_cuda_attention_shared(mz_kernels_t *kernels,
                                                int bytes)
{
  int *shared = &mz_cuda_state(kernels)->attention->shared;

  if (bytes == 0) return MZ_TRACE(mz_cuda_shared_bytes(shared));
  *shared = bytes;
  return MZ_OK;
}

extern "C" const char *mz_cuda_attention_form(const mz_kernels_t *kernels,
                                              const mz_attention_t *a, int grad)
{
  const mz_cuda_attention_t *attention = mz_cuda_state(kernels)->attention;
  mz_cuda_heads_t h;

  if (heads_of(kernels, a, &h) != MZ_OK) return "none";
  if (attention->cudnn && !attention->own_only &&
      mz_cuda_cudnn_serves(kernels, attention->cudnn, &h, grad != 0))
    return mz_cuda_cudnn_name(attention->cudnn);
  return mz_cuda_attention_mma_serves(kernels->dtype, &h) ? "tensor cores"
                                                          : "plain";
}
