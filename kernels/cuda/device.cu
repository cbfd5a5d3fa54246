/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU as a device: memory, streams, events. Contracts: kernels/device.h. */
#include "kernels/cuda/cuda.h"

#include <cuda.h>
#include <stdio.h>
#include <string.h>

enum { MIN_MAJOR = 8, UPLOAD_BYTES = 3840, UPLOAD_THREADS = 240 };

/* --- life --- */

static mz_status_t count_devices(int *count_out)
{
  cudaError_t error = cudaGetDeviceCount(count_out);

  MZ_REQUIRE(error != cudaErrorInsufficientDriver, MZ_ERR_UNSUPPORTED,
             "no NVIDIA driver, or one too old for CUDA %d.%d: %s",
             CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
             cudaGetErrorString(error));
  MZ_REQUIRE(error == cudaSuccess && *count_out >= 1, MZ_ERR_UNSUPPORTED,
             "no GPU is visible: %s",
             error == cudaSuccess ? "the driver lists none"
                                  : cudaGetErrorString(error));
  return MZ_OK;
}

static mz_status_t attach(const mz_device_t *device)
{
  MZ_CUDA(cudaSetDevice(device->index));
  return MZ_OK;
}

static mz_status_t stream_create(const mz_device_t *device,
                                 mz_stream_t *stream_out)
{
  cudaStream_t stream;

  (void)device;
  MZ_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  *stream_out = stream;
  return MZ_OK;
}

static void stream_destroy(const mz_device_t *device, mz_stream_t stream)
{
  (void)device;
  cudaStreamDestroy(mz_cuda_stream(stream));
}

/* Streams of one priority share a few queues of the hardware, and what waits in
 * one holds up the others of its queue. The computation's stream may wait for a
 * message, those of MPI that bring it must not stand behind: so its priority is
 * its own. */
static mz_status_t create_main_stream(mz_device_t *device)
{
  cudaStream_t stream;
  int least, greatest;

  MZ_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  MZ_CUDA(
      cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
  device->stream = stream;
  return MZ_OK;
}

static mz_status_t open_device(mz_device_t *device)
{
  cudaDeviceProp prop;

  MZ_CUDA(cudaGetDeviceProperties(&prop, device->index));
  MZ_REQUIRE(prop.major >= MIN_MAJOR, MZ_ERR_UNSUPPORTED,
             "GPU %d (%s) has compute capability %d.%d, at least %d.0 is "
             "needed",
             device->index, prop.name, prop.major, prop.minor, MIN_MAJOR);
  MZ_TRY(attach(device));
  snprintf(device->name, sizeof device->name, "%.95s", prop.name);
  memcpy(device->uuid, prop.uuid.bytes, sizeof device->uuid);
  device->total_bytes = (int64_t)prop.totalGlobalMem;
  return MZ_TRACE(create_main_stream(device));
}

static void close_device(mz_device_t *device)
{
  if (device->stream) stream_destroy(device, device->stream);
}

/* --- memory --- */

static mz_status_t used(const mz_device_t *device, int64_t *bytes_out)
{
  size_t free_bytes, total;

  (void)device;
  MZ_CUDA(cudaMemGetInfo(&free_bytes, &total));
  *bytes_out = (int64_t)(total - free_bytes);
  return MZ_OK;
}

static mz_status_t alloc(const mz_device_t *device, int64_t bytes,
                         const char *what, void **out)
{
  size_t free_bytes = 0, total = 0;
  void *memory = NULL;
  cudaError_t error = cudaMalloc(&memory, (size_t)(bytes > 0 ? bytes : 1));

  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &total);
    MZ_FAIL(MZ_ERR_NOMEM,
            "%s: %" PRId64 " bytes of GPU %d (%s), of whose %zu bytes %zu are "
            "free",
            what, bytes, device->index, device->name, total, free_bytes);
  }
  MZ_CUDA(error);
  MZ_CUDA(cudaMemset(memory, 0, (size_t)bytes));
  MZ_CUDA(cudaDeviceSynchronize());
  *out = memory;
  return MZ_OK;
}

static void free_memory(const mz_device_t *device, void *pointer)
{
  (void)device;
  cudaFree(pointer);
}

static mz_status_t alloc_host(const mz_device_t *device, int64_t bytes,
                              const char *what, void **out)
{
  void *memory = NULL;
  cudaError_t error = cudaHostAlloc(&memory, (size_t)(bytes > 0 ? bytes : 1),
                                    cudaHostAllocPortable);

  (void)device;
  MZ_REQUIRE(error == cudaSuccess, MZ_ERR_NOMEM,
             "%s: %" PRId64 " bytes of pinned memory: %s", what, bytes,
             cudaGetErrorString(error));
  memset(memory, 0, (size_t)bytes);
  *out = memory;
  return MZ_OK;
}

static void free_host(const mz_device_t *device, void *pointer)
{
  (void)device;
  cudaFreeHost(pointer);
}

/* --- order --- */

static mz_status_t synchronize(const mz_device_t *device, mz_stream_t stream)
{
  (void)device;
  MZ_CUDA(cudaStreamSynchronize(mz_cuda_stream(stream)));
  return MZ_OK;
}

static mz_status_t event_create(const mz_device_t *device,
                                mz_event_t *event_out)
{
  cudaEvent_t event;

  (void)device;
  MZ_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  *event_out = event;
  return MZ_OK;
}

static void event_destroy(const mz_device_t *device, mz_event_t event)
{
  (void)device;
  cudaEventDestroy((cudaEvent_t)event);
}

static mz_status_t event_record(const mz_device_t *device, mz_event_t event,
                                mz_stream_t stream)
{
  (void)device;
  MZ_CUDA(cudaEventRecord((cudaEvent_t)event, mz_cuda_stream(stream)));
  return MZ_OK;
}

static mz_status_t event_done(const mz_device_t *device, mz_event_t event,
                              bool *done_out)
{
  cudaError_t error = cudaEventQuery((cudaEvent_t)event);

  (void)device;
  *done_out = error == cudaSuccess;
  if (error == cudaErrorNotReady) return MZ_OK;
  MZ_CUDA(error);
  return MZ_OK;
}

static mz_status_t event_wait(const mz_device_t *device, mz_event_t event)
{
  (void)device;
  MZ_CUDA(cudaEventSynchronize((cudaEvent_t)event));
  return MZ_OK;
}

/* The driver's function: libcuda is there only where a driver is. */
typedef CUresult (*wait_value_t)(CUstream, CUdeviceptr, cuuint32_t,
                                 unsigned int);

static mz_status_t find_wait_value(wait_value_t *out)
{
  static wait_value_t wait_value;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
  void *function = NULL;

  if (!wait_value) {
    MZ_CUDA(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &function,
                                             12000, cudaEnableDefault, &found));
    MZ_REQUIRE(function && found == cudaDriverEntryPointSuccess,
               MZ_ERR_UNSUPPORTED, "this driver has no cuStreamWaitValue32");
    wait_value = (wait_value_t)function;
  }
  *out = wait_value;
  return MZ_OK;
}

static mz_status_t stream_wait_flag(const mz_device_t *device,
                                    mz_stream_t stream, const uint32_t *flag,
                                    uint32_t value)
{
  wait_value_t wait_value;
  void *there = NULL;
  CUresult result;

  (void)device;
  MZ_TRY(find_wait_value(&wait_value));
  MZ_CUDA(cudaHostGetDevicePointer(&there, (void *)flag, 0));
  result = wait_value((CUstream)stream, (CUdeviceptr)there, value,
                      CU_STREAM_WAIT_VALUE_GEQ);
  MZ_REQUIRE(result == CUDA_SUCCESS, MZ_ERR_CUDA,
             "cuStreamWaitValue32: error %d", (int)result);
  return MZ_OK;
}

/* A timer is an event that keeps the time. */
static mz_status_t create_timer(const mz_device_t *device,
                                mz_timer_t *timer_out)
{
  cudaEvent_t event;

  (void)device;
  MZ_CUDA(cudaEventCreate(&event));
  *timer_out = event;
  return MZ_OK;
}

static mz_status_t elapsed(const mz_device_t *device, mz_timer_t from,
                           mz_timer_t to, double *ms_out)
{
  float ms;

  (void)device;
  MZ_CUDA(cudaEventSynchronize((cudaEvent_t)to));
  MZ_CUDA(cudaEventElapsedTime(&ms, (cudaEvent_t)from, (cudaEvent_t)to));
  *ms_out = ms;
  return MZ_OK;
}

/* --- bytes --- */

static mz_status_t copy(const mz_device_t *device, void *dst, const void *src,
                        int64_t bytes, mz_stream_t stream)
{
  cudaPointerAttributes to, from;

  (void)device;
  if (bytes == 0) return MZ_OK;
  MZ_CUDA(cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault,
                          mz_cuda_stream(stream)));
  MZ_CUDA(cudaPointerGetAttributes(&to, dst));
  MZ_CUDA(cudaPointerGetAttributes(&from, src));
  if (to.type == cudaMemoryTypeUnregistered ||
      from.type == cudaMemoryTypeUnregistered)
    MZ_CUDA(cudaStreamSynchronize(mz_cuda_stream(stream)));
  return MZ_OK;
}

/* The bytes travel as an argument of the kernel, so they are taken at once. */
typedef struct chunk {
  uint4 words[UPLOAD_BYTES / sizeof(uint4)];
} chunk_t;

static __global__ void write_chunk(char *dst, chunk_t chunk, int bytes)
{
  const char *src = (const char *)chunk.words;

  for (int i = (int)threadIdx.x; i < bytes; i += UPLOAD_THREADS)
    dst[i] = src[i];
}

static mz_status_t upload(const mz_device_t *device, void *dst, const void *src,
                          int64_t bytes, mz_stream_t stream)
{
  (void)device;
  for (int64_t at = 0; at < bytes; at += UPLOAD_BYTES) {
    int now = (int)mz_min_i64(bytes - at, UPLOAD_BYTES);
    chunk_t chunk;

    memcpy(&chunk, (const char *)src + at, (size_t)now);
    write_chunk<<<1, UPLOAD_THREADS, 0, mz_cuda_stream(stream)>>>(
        (char *)dst + at, chunk, now);
    MZ_LAUNCHED("upload");
  }
  return MZ_OK;
}

static mz_status_t fill(const mz_device_t *device, void *dst, int byte,
                        int64_t bytes, mz_stream_t stream)
{
  (void)device;
  if (bytes == 0) return MZ_OK;
  MZ_CUDA(cudaMemsetAsync(dst, byte, (size_t)bytes, mz_cuda_stream(stream)));
  return MZ_OK;
}

/* Launches that a channel of the card takes before the next call blocks. */
enum { STREAM_DEPTH = 1024 };

extern "C" const mz_device_ops_t mz_device_ops_cuda = {MZ_BACKEND_CUDA,
                                                       false,
                                                       STREAM_DEPTH,
                                                       count_devices,
                                                       open_device,
                                                       close_device,
                                                       attach,
                                                       alloc,
                                                       free_memory,
                                                       alloc_host,
                                                       free_host,
                                                       stream_create,
                                                       stream_destroy,
                                                       synchronize,
                                                       event_create,
                                                       event_destroy,
                                                       event_record,
                                                       event_done,
                                                       event_wait,
                                                       stream_wait_flag,
                                                       copy,
                                                       upload,
                                                       fill,
                                                       used,
                                                       create_timer,
                                                       event_destroy,
                                                       event_record,
                                                       elapsed};
