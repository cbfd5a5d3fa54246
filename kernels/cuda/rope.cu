/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions, in place. A block turns all heads at one position of some
 * sequences: the angles, in fp64 as on the CPU, are computed once a block.
 * Letters: kernels/attention.h. */
#include "kernels/cuda/attention.h"
#include "kernels/cuda/cuda.h"

enum {
  MAX_WIDTH = MZ_CUDA_MAX_HEAD_WIDTH,
  THREADS = 256,
  ENOUGH_BLOCKS = 1024
};

/* N pairs at a time; D / 2 is a multiple of N. */
template <typename T, int N>
static __global__ void __launch_bounds__(THREADS)
    rotate(mz_rope_t a, int sequences)
{
  struct alignas(N * sizeof(T)) piece {
    T v[N];
  };
  __shared__ float cosine[MAX_WIDTH / 2], sine[MAX_WIDTH / 2];
  int half = a.head_width / 2, position = (int)blockIdx.x;
  int first = (int)blockIdx.y * sequences;
  int end = min(first + sequences, a.batch);
  int turned = a.heads + a.kv_heads, pieces = half / N;
  int64_t ld = ((int64_t)turned + a.kv_heads) * a.head_width;
  int64_t count = (int64_t)(end - first) * turned * pieces;

  for (int i = (int)threadIdx.x; i < half; i += THREADS) {
    double angle = position * pow(a.theta, -2.0 * i / a.head_width), s, c;

    sincos(angle, &s, &c);
    cosine[i] = (float)c;
    sine[i] = (float)(a.inverse ? -s : s);
  }
  __syncthreads();
  for (int64_t n = threadIdx.x; n < count; n += THREADS) {
    int at = (int)(n % pieces) * N;
    int64_t head = n / pieces % turned, b = first + n / pieces / turned;
    T *row = (T *)a.qkv + (b * a.sequence + position) * ld;
    piece *low = (piece *)(row + head * a.head_width + at);
    piece *high = (piece *)(row + head * a.head_width + half + at);
    piece x = *low, y = *high;

#pragma unroll
    for (int i = 0; i < N; i++) {
      float u = mz_load(x.v[i]), v = mz_load(y.v[i]);
      float c = cosine[at + i], s = sine[at + i];

      x.v[i] = mz_store<T>(u * c - v * s);
      y.v[i] = mz_store<T>(u * s + v * c);
    }
    *low = x;
    *high = y;
  }
}

template <typename T>
static mz_status_t run(const mz_rope_t *a, cudaStream_t stream)
{
  const int N = mz_pack<T>::N;
  bool wide = a->head_width / 2 % N == 0 && (uintptr_t)a->qkv % 16 == 0;
  /* Enough blocks for the device, else few, whose angles serve many. The
     second extent of a grid is at most 65535. */
  int64_t parts =
      mz_max_i64(1, mz_min_i64(a->batch, ENOUGH_BLOCKS / a->sequence));
  int sequences = (int)mz_div_up(a->batch, parts);
  dim3 grid((unsigned)a->sequence, (unsigned)mz_div_up(a->batch, sequences));

  if (wide)
    rotate<T, N><<<grid, THREADS, 0, stream>>>(*a, sequences);
  else
    rotate<T, 1><<<grid, THREADS, 0, stream>>>(*a, sequences);
  MZ_LAUNCHED("rope");
  return MZ_OK;
}

extern "C" mz_status_t mz_k_rope_cuda(const mz_kernels_t *kernels,
                                      const mz_rope_t *a, mz_stream_t stream)
{
  MZ_TRY(mz_cuda_check_heads(a->batch, a->sequence, a->heads, a->kv_heads,
                             a->head_width));
  MZ_REQUIRE(a->head_width % 2 == 0, MZ_ERR_SHAPE,
             "head width %" PRId32 " is odd", a->head_width);
  if (a->batch == 0) return MZ_OK;
  return MZ_TRACE(MZ_BY_DTYPE(kernels, run, a, mz_cuda_stream(stream)));
}
