/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU as a device: one, whose work is done when a call returns. */
#include "kernels/cpu/device.h"

#include "base/alloc.h"
#include "base/check.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static mz_status_t count(int *count_out)
{
  *count_out = 1;
  return MZ_OK;
}

static mz_status_t open_cpu(mz_device_t *device)
{
  snprintf(device->name, sizeof device->name, "CPU");
  return MZ_OK;
}

static void close_cpu(mz_device_t *device) { (void)device; }

static mz_status_t attach(const mz_device_t *device)
{
  (void)device;
  return MZ_OK;
}

static mz_status_t alloc(const mz_device_t *device, int64_t bytes,
                         const char *what, void **out)
{
  (void)device;
  return MZ_TRACE(mz_alloc_arena(bytes, what, out));
}

static void free_memory(const mz_device_t *device, void *pointer)
{
  (void)device;
  mz_free(pointer);
}

static mz_status_t stream_create(const mz_device_t *device,
                                 mz_stream_t *stream_out)
{
  (void)device;
  *stream_out = NULL;
  return MZ_OK;
}

static void stream_destroy(const mz_device_t *device, mz_stream_t stream)
{
  (void)device;
  (void)stream;
}

static mz_status_t synchronize(const mz_device_t *device, mz_stream_t stream)
{
  (void)device;
  (void)stream;
  return MZ_OK;
}

static mz_status_t event_create(const mz_device_t *device,
                                mz_event_t *event_out)
{
  (void)device;
  *event_out = NULL;
  return MZ_OK;
}

static void event_destroy(const mz_device_t *device, mz_event_t event)
{
  (void)device;
  (void)event;
}

static mz_status_t event_record(const mz_device_t *device, mz_event_t event,
                                mz_stream_t stream)
{
  (void)device;
  (void)event;
  (void)stream;
  return MZ_OK;
}

static mz_status_t event_done(const mz_device_t *device, mz_event_t event,
                              bool *done_out)
{
  (void)device;
  (void)event;
  *done_out = true;
  return MZ_OK;
}

static mz_status_t event_wait(const mz_device_t *device, mz_event_t event)
{
  (void)device;
  (void)event;
  return MZ_OK;
}

static mz_status_t copy(const mz_device_t *device, void *dst, const void *src,
                        int64_t bytes, mz_stream_t stream)
{
  (void)device;
  (void)stream;
  if (bytes > 0 && dst != src) memcpy(dst, src, (size_t)bytes);
  return MZ_OK;
}

static mz_status_t fill(const mz_device_t *device, void *dst, int byte,
                        int64_t bytes, mz_stream_t stream)
{
  (void)device;
  (void)stream;
  if (bytes > 0) memset(dst, byte, (size_t)bytes);
  return MZ_OK;
}

static mz_status_t used(const mz_device_t *device, int64_t *bytes_out)
{
  (void)device;
  *bytes_out = 0;
  return MZ_OK;
}

static mz_status_t create_timer(const mz_device_t *device,
                                mz_timer_t *timer_out)
{
  struct timespec *timer;

  (void)device;
  MZ_TRY(mz_new(1, "timer", &timer));
  *timer_out = timer;
  return MZ_OK;
}

static mz_status_t mark_timer(const mz_device_t *device, mz_timer_t timer,
                              mz_stream_t stream)
{
  (void)device;
  (void)stream;
  clock_gettime(CLOCK_MONOTONIC, timer);
  return MZ_OK;
}

static mz_status_t elapsed(const mz_device_t *device, mz_timer_t from,
                           mz_timer_t to, double *ms_out)
{
  const struct timespec *a = from, *b = to;

  (void)device;
  *ms_out = 1e3 * (double)(b->tv_sec - a->tv_sec) +
            1e-6 * (double)(b->tv_nsec - a->tv_nsec);
  return MZ_OK;
}

const mz_device_ops_t mz_device_ops_cpu = {.name = MZ_BACKEND_CPU,
                                           .is_host = true,
                                           .count = count,
                                           .open = open_cpu,
                                           .close = close_cpu,
                                           .attach = attach,
                                           .alloc = alloc,
                                           .free = free_memory,
                                           .alloc_host = alloc,
                                           .free_host = free_memory,
                                           .stream_create = stream_create,
                                           .stream_destroy = stream_destroy,
                                           .synchronize = synchronize,
                                           .event_create = event_create,
                                           .event_destroy = event_destroy,
                                           .event_record = event_record,
                                           .event_done = event_done,
                                           .event_wait = event_wait,
                                           .copy = copy,
                                           .upload = copy,
                                           .fill = fill,
                                           .used = used,
                                           .timer_create = create_timer,
                                           .timer_destroy = free_memory,
                                           .timer_mark = mark_timer,
                                           .timer_elapsed = elapsed};
