/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/device.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/device.h"

#include <string.h>

#ifdef MZ_HAVE_CUDA
extern const mz_device_ops_t mz_device_ops_cuda;
#endif

#ifdef MZ_TEST_HOOKS
static const mz_device_ops_t *stand_in;

void mz_device_stand_in(const mz_device_ops_t *ops) { stand_in = ops; }
#endif

static mz_status_t find(const char *backend, const mz_device_ops_t **ops_out)
{
  MZ_REQUIRE(backend, MZ_ERR_ARG, "no backend is named");
  if (strcmp(backend, MZ_BACKEND_CPU) == 0) {
    *ops_out = &mz_device_ops_cpu;
    return MZ_OK;
  }
  MZ_REQUIRE(strcmp(backend, MZ_BACKEND_CUDA) == 0, MZ_ERR_ARG, "no backend %s",
             backend);
#ifdef MZ_TEST_HOOKS
  *ops_out = stand_in;
  if (stand_in) return MZ_OK;
#endif
#ifdef MZ_HAVE_CUDA
  *ops_out = &mz_device_ops_cuda;
  return MZ_OK;
#else
  MZ_FAIL(MZ_ERR_UNSUPPORTED, "this build has no CUDA: build it where nvcc is "
                              "found, with -Dcuda=enabled");
#endif
}

mz_status_t mz_device_count(const char *backend, int *count_out)
{
  const mz_device_ops_t *ops;

  MZ_TRY(find(backend, &ops));
  return MZ_TRACE(ops->count(count_out));
}

mz_status_t mz_device_open(const char *backend, int index,
                           mz_device_t **device_out)
{
  const mz_device_ops_t *ops;
  mz_device_t *device = NULL;
  mz_status_t st;
  int count;

  MZ_REQUIRE(device_out, MZ_ERR_ARG, "device_out is NULL");
  *device_out = NULL;
  MZ_TRY_GOTO(st, find(backend, &ops), done);
  MZ_TRY_GOTO(st, ops->count(&count), done);
  MZ_REQUIRE_GOTO(index >= 0 && index < count, st, done, MZ_ERR_ARG,
                  "device %d of backend %s, there are %d", index, backend,
                  count);
  MZ_TRY_GOTO(st, mz_new(1, "device", &device), done);
  device->ops = ops;
  device->index = index;
  MZ_TRY_GOTO(st, ops->open(device), done);
  *device_out = device;
  device = NULL;
done:
  mz_device_close(&device);
  return st;
}

void mz_device_close(mz_device_t **device)
{
  if (!device || !*device) return;
  (*device)->ops->close(*device);
  mz_free(*device);
  *device = NULL;
}

mz_status_t mz_device_attach(const mz_device_t *device)
{
  return MZ_TRACE(device->ops->attach(device));
}

mz_status_t mz_device_alloc(const mz_device_t *device, int64_t bytes,
                            const char *what, void **out)
{
  *out = NULL;
  mz_device_settle(device);
  return MZ_TRACE(device->ops->alloc(device, bytes, what, out));
}

void mz_device_free(const mz_device_t *device, void *pointer)
{
  if (!pointer) return;
  mz_device_settle(device);
  device->ops->free(device, pointer);
}

mz_status_t mz_device_alloc_host(const mz_device_t *device, int64_t bytes,
                                 const char *what, void **out)
{
  *out = NULL;
  mz_device_settle(device);
  return MZ_TRACE(device->ops->alloc_host(device, bytes, what, out));
}

void mz_device_free_host(const mz_device_t *device, void *pointer)
{
  if (!pointer) return;
  mz_device_settle(device);
  device->ops->free_host(device, pointer);
}

mz_status_t mz_stream_create(const mz_device_t *device, mz_stream_t *stream_out)
{
  *stream_out = NULL;
  mz_device_settle(device);
  return MZ_TRACE(device->ops->stream_create(device, stream_out));
}

void mz_stream_destroy(const mz_device_t *device, mz_stream_t stream)
{
  if (!stream) return;
  mz_device_settle(device);
  device->ops->stream_destroy(device, stream);
}

mz_status_t mz_stream_synchronize(const mz_device_t *device, mz_stream_t stream)
{
  return MZ_TRACE(device->ops->synchronize(device, stream));
}

mz_status_t mz_event_create(const mz_device_t *device, mz_event_t *event_out)
{
  *event_out = NULL;
  mz_device_settle(device);
  return MZ_TRACE(device->ops->event_create(device, event_out));
}

void mz_event_destroy(const mz_device_t *device, mz_event_t event)
{
  if (!event) return;
  mz_device_settle(device);
  device->ops->event_destroy(device, event);
}

mz_status_t mz_event_record(const mz_device_t *device, mz_event_t event,
                            mz_stream_t stream)
{
  return MZ_TRACE(device->ops->event_record(device, event, stream));
}

mz_status_t mz_event_done(const mz_device_t *device, mz_event_t event,
                          bool *done_out)
{
  return MZ_TRACE(device->ops->event_done(device, event, done_out));
}

mz_status_t mz_event_wait(const mz_device_t *device, mz_event_t event)
{
  return MZ_TRACE(device->ops->event_wait(device, event));
}

mz_status_t mz_stream_wait_flag(const mz_device_t *device, mz_stream_t stream,
                                const uint32_t *flag, uint32_t value)
{
  MZ_REQUIRE(device->ops->stream_wait_flag, MZ_ERR_UNSUPPORTED,
             "no stream of %s waits for a flag", device->ops->name);
  return MZ_TRACE(device->ops->stream_wait_flag(device, stream, flag, value));
}

void mz_device_settle(const mz_device_t *device)
{
  if (device->settle) device->settle(device->settle_ctx);
}

mz_status_t mz_device_copy(const mz_device_t *device, void *dst,
                           const void *src, int64_t bytes, mz_stream_t stream)
{
  return MZ_TRACE(device->ops->copy(device, dst, src, bytes, stream));
}

mz_status_t mz_device_upload(const mz_device_t *device, void *dst,
                             const void *src, int64_t bytes, mz_stream_t stream)
{
  return MZ_TRACE(device->ops->upload(device, dst, src, bytes, stream));
}

mz_status_t mz_device_fill(const mz_device_t *device, void *dst, int byte,
                           int64_t bytes, mz_stream_t stream)
{
  return MZ_TRACE(device->ops->fill(device, dst, byte, bytes, stream));
}

mz_status_t mz_device_used(const mz_device_t *device, int64_t *bytes_out)
{
  return MZ_TRACE(device->ops->used(device, bytes_out));
}

mz_status_t mz_timer_create(const mz_device_t *device, mz_timer_t *timer_out)
{
  *timer_out = NULL;
  mz_device_settle(device);
  return MZ_TRACE(device->ops->timer_create(device, timer_out));
}

void mz_timer_destroy(const mz_device_t *device, mz_timer_t timer)
{
  if (!timer) return;
  mz_device_settle(device);
  device->ops->timer_destroy(device, timer);
}

mz_status_t mz_timer_mark(const mz_device_t *device, mz_timer_t timer,
                          mz_stream_t stream)
{
  return MZ_TRACE(device->ops->timer_mark(device, timer, stream));
}

mz_status_t mz_timer_elapsed(const mz_device_t *device, mz_timer_t from,
                             mz_timer_t to, double *ms_out)
{
  return MZ_TRACE(device->ops->timer_elapsed(device, from, to, ms_out));
}
