/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Where a backend computes: its memory, its streams, events and timers. The CPU
 * has one device, whose work is done when a call returns: its streams are NULL,
 * its events are always done, its timers read the clock, its two kinds of
 * memory are the same.
 *
 * *Backend memory* is what kernels read and write; *host memory* of a device is
 * what the host reads and writes and the device copies fast (pinned). Copies,
 * uploads and fills are in order of their stream and may not be done at return.
 * Nothing here is collective. A thread other than the one that opened the
 * device calls mz_device_attach first.
 *
 * Errors are MZ_ERR_CUDA with the library's text unless said otherwise; work
 * that failed on the device is reported by a later call.
 */
#ifndef MZ_KERNELS_DEVICE_H
#define MZ_KERNELS_DEVICE_H

#include <moezero/status.h>
#include <moezero/types.h>
#include <stdbool.h>

typedef void *mz_event_t; /* a place in a stream's work */
typedef void *mz_timer_t; /* the moment when a stream came to a place */

typedef struct mz_device mz_device_t;

typedef struct mz_device_ops {
  const char *name; /* MZ_BACKEND_CPU, MZ_BACKEND_CUDA */
  bool is_host;     /* backend memory can be read and written by the host */
  int32_t depth;    /* launches that a stream holds before one more blocks; 0:
                       each is done when it returns */
  mz_status_t (*count)(int *count_out);
  mz_status_t (*open)(mz_device_t *device);
  void (*close)(mz_device_t *device);
  mz_status_t (*attach)(const mz_device_t *device);
  mz_status_t (*alloc)(const mz_device_t *device, int64_t bytes,
                       const char *what, void **out);
  void (*free)(const mz_device_t *device, void *pointer);
  mz_status_t (*alloc_host)(const mz_device_t *device, int64_t bytes,
                            const char *what, void **out);
  void (*free_host)(const mz_device_t *device, void *pointer);
  mz_status_t (*stream_create)(const mz_device_t *device,
                               mz_stream_t *stream_out);
  void (*stream_destroy)(const mz_device_t *device, mz_stream_t stream);
  mz_status_t (*synchronize)(const mz_device_t *device, mz_stream_t stream);
  mz_status_t (*event_create)(const mz_device_t *device, mz_event_t *event_out);
  void (*event_destroy)(const mz_device_t *device, mz_event_t event);
  mz_status_t (*event_record)(const mz_device_t *device, mz_event_t event,
                              mz_stream_t stream);
  mz_status_t (*event_done)(const mz_device_t *device, mz_event_t event,
                            bool *done_out);
  mz_status_t (*event_wait)(const mz_device_t *device, mz_event_t event);
  /* NULL: no stream of the backend waits */
  mz_status_t (*stream_wait_flag)(const mz_device_t *device, mz_stream_t stream,
                                  const uint32_t *flag, uint32_t value);
  mz_status_t (*copy)(const mz_device_t *device, void *dst, const void *src,
                      int64_t bytes, mz_stream_t stream);
  mz_status_t (*upload)(const mz_device_t *device, void *dst, const void *src,
                        int64_t bytes, mz_stream_t stream);
  mz_status_t (*fill)(const mz_device_t *device, void *dst, int byte,
                      int64_t bytes, mz_stream_t stream);
  mz_status_t (*used)(const mz_device_t *device, int64_t *bytes_out);
  mz_status_t (*timer_create)(const mz_device_t *device, mz_timer_t *timer_out);
  void (*timer_destroy)(const mz_device_t *device, mz_timer_t timer);
  mz_status_t (*timer_mark)(const mz_device_t *device, mz_timer_t timer,
                            mz_stream_t stream);
  mz_status_t (*timer_elapsed)(const mz_device_t *device, mz_timer_t from,
                               mz_timer_t to, double *ms_out);
} mz_device_ops_t;

struct mz_device {
  const mz_device_ops_t *ops;
  int index;
  mz_stream_t stream;        /* of the computation */
  char name[96];             /* for messages: "NVIDIA H200" */
  uint8_t uuid[16];          /* zeros on the CPU */
  int64_t total_bytes;       /* of the card; 0 on the CPU */
  void (*settle)(void *ctx); /* of mz_device_settle; NULL: nothing waits */
  void *settle_ctx;
};

#ifdef MZ_TEST_HOOKS
/** A test's devices stand in for those of MZ_BACKEND_CUDA; NULL: no more. */
void mz_device_stand_in(const mz_device_ops_t *ops);
#endif

/** Devices of a backend. @return MZ_OK with at least 1; MZ_ERR_UNSUPPORTED with
 * the reason: not compiled in, no driver, no device. */
mz_status_t mz_device_count(const char *backend, int *count_out);

/** Opens device @p index; its stream is made. @return MZ_OK, MZ_ERR_ARG (no
 * such backend or index), MZ_ERR_UNSUPPORTED (also: too old), MZ_ERR_CUDA,
 * MZ_ERR_NOMEM. */
mz_status_t mz_device_open(const char *backend, int index,
                           mz_device_t **device_out);
void mz_device_close(mz_device_t **device);

/** Makes the device the calling thread's. */
mz_status_t mz_device_attach(const mz_device_t *device);

/** Backend memory on MZ_ALIGN_BYTES, zeroed. @return MZ_OK, MZ_ERR_NOMEM with
 * the bytes wanted and free. */
mz_status_t mz_device_alloc(const mz_device_t *device, int64_t bytes,
                            const char *what, void **out);
void mz_device_free(const mz_device_t *device, void *pointer);
/** Host memory of the device, zeroed; likewise. */
mz_status_t mz_device_alloc_host(const mz_device_t *device, int64_t bytes,
                                 const char *what, void **out);
void mz_device_free_host(const mz_device_t *device, void *pointer);

mz_status_t mz_stream_create(const mz_device_t *device,
                             mz_stream_t *stream_out);
void mz_stream_destroy(const mz_device_t *device, mz_stream_t stream);
/** Waits until all work of a stream is done. */
mz_status_t mz_stream_synchronize(const mz_device_t *device,
                                  mz_stream_t stream);
mz_status_t mz_event_create(const mz_device_t *device, mz_event_t *event_out);
void mz_event_destroy(const mz_device_t *device, mz_event_t event);
mz_status_t mz_event_record(const mz_device_t *device, mz_event_t event,
                            mz_stream_t stream);
/** Whether the work before the event is done; an event that was never recorded
 * is. */
mz_status_t mz_event_done(const mz_device_t *device, mz_event_t event,
                          bool *done_out);
mz_status_t mz_event_wait(const mz_device_t *device, mz_event_t event);

/** Later work of @p stream starts when the host has written @p value, or a
 * number up to 2^31 after it, to @p flag in host memory of the device. Until
 * then mz_device_settle holds. @return also MZ_ERR_UNSUPPORTED (CPU). */
mz_status_t mz_stream_wait_flag(const mz_device_t *device, mz_stream_t stream,
                                const uint32_t *flag, uint32_t value);

/**
 * Returns when no stream waits for a flag any more, as whoever makes streams
 * wait has set it up (device->settle). Called before all that may wait for the
 * whole device, or keep other threads from using it meanwhile: memory, streams
 * and events that come and go (the functions here do it), a kernel's or an
 * algorithm's first use. On the thread that computes.
 */
void mz_device_settle(const mz_device_t *device);

/** Copies between any two of backend memory, host memory of the device and
 * ordinary memory; with the last it returns when the copy is done. */
mz_status_t mz_device_copy(const mz_device_t *device, void *dst,
                           const void *src, int64_t bytes, mz_stream_t stream);
/** Copies a few bytes (some thousand) from the host to backend memory in order
 * of the stream; src may be changed as soon as the call returns. */
mz_status_t mz_device_upload(const mz_device_t *device, void *dst,
                             const void *src, int64_t bytes,
                             mz_stream_t stream);
mz_status_t mz_device_fill(const mz_device_t *device, void *dst, int byte,
                           int64_t bytes, mz_stream_t stream);

/** Bytes in use on the card by anybody; on the CPU 0. */
mz_status_t mz_device_used(const mz_device_t *device, int64_t *bytes_out);

/** @return MZ_OK, MZ_ERR_NOMEM, MZ_ERR_CUDA. */
mz_status_t mz_timer_create(const mz_device_t *device, mz_timer_t *timer_out);
void mz_timer_destroy(const mz_device_t *device, mz_timer_t timer);
/** Takes the time when the work that the stream has now is done. */
mz_status_t mz_timer_mark(const mz_device_t *device, mz_timer_t timer,
                          mz_stream_t stream);
/** Milliseconds from one mark to a later one of the same stream; waits until
 * the later one is there. */
mz_status_t mz_timer_elapsed(const mz_device_t *device, mz_timer_t from,
                             mz_timer_t to, double *ms_out);

#endif
