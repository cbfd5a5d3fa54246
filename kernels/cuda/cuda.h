/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the "/cuda" backend share: error checks, conversions
 * between storage and fp32, 16-byte loads, sums over warps and blocks.
 *
 * Rules of this folder: everything runs on the stream given; no kernel uses
 * atomics on floating-point numbers, and no sum's order depends on timing; a
 * kernel with nothing to do (no rows) is not launched, but outputs that the
 * contract says are written are still written. Scratch comes from the front of
 * kernels->workspace; it is free again when the operation returns, since all
 * operations share one stream. */
#ifndef MZ_KERNELS_CUDA_CUDA_H
#define MZ_KERNELS_CUDA_CUDA_H

extern "C" {
#include "base/alloc.h"
#include "base/check.h"
#include "kernels/kernels.h"
}

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#define MZ_CUDA(call)                                                          \
  do {                                                                         \
    cudaError_t error_ = (call);                                               \
    MZ_REQUIRE(error_ == cudaSuccess, MZ_ERR_CUDA, "%s: %s", #call,            \
               cudaGetErrorString(error_));                                    \
  } while (0)

#define MZ_CUBLAS(call)                                                        \
  do {                                                                         \
    cublasStatus_t status_ = (call);                                           \
    MZ_REQUIRE(status_ == CUBLAS_STATUS_SUCCESS, MZ_ERR_CUDA, "%s: %s", #call, \
               cublasLtGetStatusString(status_));                              \
  } while (0)

/* After a launch: what is wrong with its arguments. */
#define MZ_LAUNCHED(name)                                                      \
  do {                                                                         \
    cudaError_t error_ = cudaPeekAtLastError();                                \
    MZ_REQUIRE(error_ == cudaSuccess, MZ_ERR_CUDA, "kernel %s: %s", (name),    \
               cudaGetErrorString(error_));                                    \
  } while (0)

/* The operation of a template on the table's dtype. */
#define MZ_BY_DTYPE(kernels, function, ...)                                    \
  ((kernels)->dtype == MZ_BF16 ? function<__nv_bfloat16>(__VA_ARGS__)          \
                               : function<float>(__VA_ARGS__))

#define MZ_KERNEL_DECLARE_(op, args)                                           \
  extern "C" mz_status_t mz_k_##op##_cuda(const mz_kernels_t *kernels,         \
                                          const args *a, mz_stream_t stream);
MZ_KERNEL_LIST(MZ_KERNEL_DECLARE_)
#undef MZ_KERNEL_DECLARE_

/* The backend's own state, kernels->state: made by the files that own it. */
typedef struct mz_cuda_products mz_cuda_products_t;   /* linear.cu */
typedef struct mz_cuda_attention mz_cuda_attention_t; /* attention.cu */

typedef struct mz_cuda_state {
  mz_cuda_products_t *products;
  mz_cuda_attention_t *attention;
} mz_cuda_state_t;

static inline mz_cuda_state_t *mz_cuda_state(const mz_kernels_t *kernels)
{
  return (mz_cuda_state_t *)kernels->state;
}

/* Called once by create, before any operation, with the workspace set; on an
 * error *out stays NULL. destroy takes NULL. */
mz_status_t mz_cuda_products_create(const mz_kernels_t *kernels,
                                    mz_cuda_products_t **out);
void mz_cuda_products_destroy(mz_cuda_products_t *products);
mz_status_t mz_cuda_attention_create(const mz_kernels_t *kernels,
                                     mz_cuda_attention_t **out);
void mz_cuda_attention_destroy(mz_cuda_attention_t *attention);

/* Bytes of shared memory that a block of this card may have. */
mz_status_t mz_cuda_shared_bytes(int *bytes_out);

static inline cudaStream_t mz_cuda_stream(mz_stream_t stream)
{
  return (cudaStream_t)stream;
}

/* Scratch from the workspace: *at goes on behind it. */
template <typename T>
static inline mz_status_t mz_cuda_scratch(const mz_kernels_t *kernels,
                                          int64_t *at, int64_t count,
                                          const char *what, T **out)
{
  int64_t bytes = mz_round_up(count * (int64_t)sizeof(T), MZ_ALIGN_BYTES);

  MZ_REQUIRE(*at + bytes <= kernels->workspace_bytes, MZ_ERR_FIT,
             "%s: %" PRId64 " bytes of workspace behind %" PRId64
             ", there are %" PRId64,
             what, bytes, *at, kernels->workspace_bytes);
  *out = (T *)(kernels->workspace + *at);
  *at += bytes;
  return MZ_OK;
}

/* --- storage and arithmetic --- */

static __device__ __forceinline__ float mz_load(float x) { return x; }
static __device__ __forceinline__ float mz_load(__nv_bfloat16 x)
{
  return __bfloat162float(x);
}

template <typename T> static __device__ __forceinline__ T mz_store(float x);
template <> __device__ __forceinline__ float mz_store<float>(float x)
{
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 mz_store<__nv_bfloat16>(float x)
{
  return __float2bfloat16_rn(x);
}

/* 16 bytes of elements: one load. */
template <typename T> struct alignas(16) mz_pack {
  enum { N = 16 / sizeof(T) };
  T v[N];
};

/* --- sums: a fixed tree, so equal bits from run to run --- */

static __device__ __forceinline__ float mz_warp_sum(float x)
{
  for (int offset = 16; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

static __device__ __forceinline__ float mz_warp_max(float x)
{
  for (int offset = 16; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

/* Of all threads of a block of whole warps; every thread gets it. shared has
 * room for 33 numbers and may be used again after the next barrier. */
static __device__ __forceinline__ float mz_block_sum(float x, float *shared)
{
  int lane = (int)(threadIdx.x % 32), warp = (int)(threadIdx.x / 32);

  x = mz_warp_sum(x);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  if (warp == 0) {
    x = lane < (int)(blockDim.x / 32) ? shared[lane] : 0.0f;
    x = mz_warp_sum(x);
    if (lane == 0) shared[32] = x;
  }
  __syncthreads();
  return shared[32];
}

#endif
