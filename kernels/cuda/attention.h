/* SPDX-License-Identifier: Apache-2.0 */
/* What the forms of attention share: how they see one call, and which form
 * serves it. Letters: kernels/attention.h.
 *
 * Three forms: cuDNN's (attention_cudnn.cc, bf16, where the library is found),
 * tensor cores (attention_mma.cu, attention_mma_grad.cu, bf16, D a multiple of
 * 8 up to 128), plain arithmetic (attention_fma.cu, any dtype and D). All read
 * and write the statistics in one layout, so a backward of one form may follow
 * a forward of another: lse and delta are [B, A, S] here, the only layout that
 * cuDNN's backward takes; lse is the natural logarithm. */
#ifndef MZ_KERNELS_CUDA_ATTENTION_H
#define MZ_KERNELS_CUDA_ATTENTION_H

/* Not cuda.h: attention_cudnn.cc goes to the host's compiler alone, since
 * nvcc takes minutes over the frontend's headers. */
extern "C" {
#include "base/alloc.h"
#include "base/check.h"
#include "kernels/kernels.h"
}

#include <cuda_bf16.h>
#include <cuda_runtime.h>

enum { MZ_CUDA_MAX_HEAD_WIDTH = 256 };

/* What attention and rope ask of B, S, A, G and D alike (attention.cu). @return
 * MZ_OK, MZ_ERR_ARG, MZ_ERR_SHAPE, MZ_ERR_UNSUPPORTED (D too large). */
mz_status_t mz_cuda_check_heads(int32_t batch, int32_t sequence, int32_t heads,
                                int32_t kv_heads, int32_t head_width);

/* A call as the kernels see it; passed to them by value. */
typedef struct mz_cuda_heads {
  int batch, sequence, heads, kv_heads, group, width; /* B S A G A/G D */
  int64_t ld, ldo; /* elements from one token to the next in qkv and in out */
  float scale;     /* 1 / sqrt(D) */
  int shared;      /* bytes of shared memory that a block may have */
  const void *qkv;
  void *out;
  float *lse;
  const void *dout; /* this and the rest: of the backward only */
  void *dqkv;
  float *delta;
} mz_cuda_heads_t;

/* Where a query head begins in qkv, a key and a value head too. */
static __host__ __device__ __forceinline__ int64_t
mz_cuda_query_at(const mz_cuda_heads_t &h, int b, int head, int row)
{
  return ((int64_t)b * h.sequence + row) * h.ld + (int64_t)head * h.width;
}

static __host__ __device__ __forceinline__ int64_t
mz_cuda_key_at(const mz_cuda_heads_t &h, int b, int kv_head, int row)
{
  return mz_cuda_query_at(h, b, h.heads + kv_head, row);
}

static __host__ __device__ __forceinline__ int64_t
mz_cuda_value_at(const mz_cuda_heads_t &h, int b, int kv_head, int row)
{
  return mz_cuda_query_at(h, b, h.heads + h.kv_heads + kv_head, row);
}

static __host__ __device__ __forceinline__ int64_t
mz_cuda_out_at(const mz_cuda_heads_t &h, int b, int head, int row)
{
  return ((int64_t)b * h.sequence + row) * h.ldo + (int64_t)head * h.width;
}

static __host__ __device__ __forceinline__ int64_t
mz_cuda_stats_at(const mz_cuda_heads_t &h, int b, int head, int row)
{
  return ((int64_t)b * h.heads + head) * h.sequence + row;
}

/* Which (sequence, head) and which of its tiles block i has: tile after tile of
 * as many heads as keep the device busy, so that what these heads read again
 * and again stays in its cache. Tile 0 comes first: let it be the longest. */
typedef struct mz_cuda_task {
  int64_t pair;
  int tile;
} mz_cuda_task_t;

static __host__ __device__ __forceinline__ mz_cuda_task_t
mz_cuda_task_of(int64_t i, int64_t pairs, int tiles)
{
  const int64_t busy = 512; /* blocks: some for each multiprocessor */
  int64_t many = (busy + tiles - 1) / tiles, first = i / (many * tiles) * many;
  int64_t here = pairs - first < many ? pairs - first : many;
  mz_cuda_task_t task;

  i -= first * tiles;
  task.pair = first + i % here;
  task.tile = (int)(i / here);
  return task;
}

/* The own forms. Backward: delta has been computed. */
mz_status_t mz_cuda_attention_fma(mz_dtype_t dtype, const mz_cuda_heads_t *h,
                                  bool grad, cudaStream_t stream);
bool mz_cuda_attention_mma_serves(mz_dtype_t dtype, const mz_cuda_heads_t *h);
mz_status_t mz_cuda_attention_mma(const mz_cuda_heads_t *h,
                                  cudaStream_t stream);
mz_status_t mz_cuda_attention_mma_grad(const mz_cuda_heads_t *h,
                                       cudaStream_t stream);

/* cuDNN's form: a handle and the plans made so far; *out is NULL where this
 * build or this machine has no cuDNN. */
typedef struct mz_cuda_cudnn mz_cuda_cudnn_t;

mz_status_t mz_cuda_cudnn_create(mz_cuda_cudnn_t **out);
void mz_cuda_cudnn_destroy(mz_cuda_cudnn_t *cudnn);
/* Runs one direction. *served_out false: cuDNN has no plan for it (with the
 * workspace at hand, and deterministic where that is asked), nothing was
 * written. */
mz_status_t mz_cuda_cudnn_attention(const mz_kernels_t *kernels,
                                    mz_cuda_cudnn_t *cudnn,
                                    const mz_cuda_heads_t *h, bool grad,
                                    cudaStream_t stream, bool *served_out);
/* "cuDNN 9.14.0". */
const char *mz_cuda_cudnn_name(const mz_cuda_cudnn_t *cudnn);
/* Whether a plan was made and serves the shape. */
bool mz_cuda_cudnn_serves(const mz_kernels_t *kernels, mz_cuda_cudnn_t *cudnn,
                          const mz_cuda_heads_t *h, bool grad);

#endif
