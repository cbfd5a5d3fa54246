/* SPDX-License-Identifier: Apache-2.0 */
#include "late_device.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/cpu.h"
#include "kernels/kernels.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MAX_STREAMS = 8, MAX_MEMORIES = 256, QUEUE = 256, MAX_KEPT = 6 };

/* Work of a stream; the structs of the several kinds begin with it. */
typedef struct work {
  mz_status_t (*run)(struct work *work);
  void *kept[MAX_KEPT]; /* freed with it */
  int num_kept;
} work_t;

typedef struct stream {
  pthread_t thread;
  work_t *queue[QUEUE]; /* work n lies at n mod QUEUE */
  uint64_t pushed, done;
  bool used, stop;
} stream_t;

typedef struct event {
  stream_t *stream; /* NULL: never recorded */
  uint64_t place;
} event_t;

/* Who uses the device, as a process uses a GPU: one call at a time. */
static pthread_mutex_t calls = PTHREAD_MUTEX_INITIALIZER;

/* The fields of streams and events, and `moved`: one of them has changed. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;

static stream_t streams[MAX_STREAMS];
static struct {
  char *begin;
  size_t bytes;
} memories[MAX_MEMORIES];
static bool known[MZ_NUM_KERNELS];
static _Atomic int failed;
static atomic_long waits;

/* --- streams --- */

static void *run_stream(void *ctx)
{
  stream_t *s = ctx;

  pthread_mutex_lock(&lock);
  for (;;) {
    work_t *work;
    mz_status_t st;

    while (s->done == s->pushed && !s->stop)
      pthread_cond_wait(&moved, &lock);
    if (s->done == s->pushed) break;
    work = s->queue[s->done % QUEUE];
    pthread_mutex_unlock(&lock);
    st = work->run(work);
    if (st != MZ_OK) {
      fprintf(stderr, "late work failed: %s\n", mz_error_last());
      atomic_store(&failed, (int)st);
    }
    for (int i = 0; i < work->num_kept; i++)
      mz_free(work->kept[i]);
    mz_free(work);
    pthread_mutex_lock(&lock);
    s->done++;
    pthread_cond_broadcast(&moved);
  }
  pthread_mutex_unlock(&lock);
  return NULL;
}

static void wait_for_place(stream_t *s, uint64_t place)
{
  pthread_mutex_lock(&lock);
  while (s->done < place)
    pthread_cond_wait(&moved, &lock);
  pthread_mutex_unlock(&lock);
}

/* With `calls`. */
static void wait_for_all(void)
{
  for (int i = 0; i < MAX_STREAMS; i++)
    if (streams[i].used) wait_for_place(&streams[i], streams[i].pushed);
}

/* What every stream has to be done for. */
static void begin_alone(void)
{
  pthread_mutex_lock(&calls);
  wait_for_all();
}

static void end_alone(void) { pthread_mutex_unlock(&calls); }

/* With `calls`. Takes the work, also when there is no room for a while. */
static mz_status_t push(mz_stream_t stream, work_t *work)
{
  stream_t *s = stream;
  int code = atomic_load(&failed);

  pthread_mutex_lock(&lock);
  while (s->pushed - s->done == QUEUE)
    pthread_cond_wait(&moved, &lock);
  s->queue[s->pushed++ % QUEUE] = work;
  pthread_cond_broadcast(&moved);
  pthread_mutex_unlock(&lock);
  MZ_REQUIRE(code == MZ_OK, MZ_ERR_CUDA, "earlier work failed: code %d", code);
  return MZ_OK;
}

static mz_status_t launch(mz_stream_t stream, work_t *work)
{
  mz_status_t st;

  pthread_mutex_lock(&calls);
  st = push(stream, work);
  pthread_mutex_unlock(&calls);
  return st;
}

static mz_status_t stream_create(const mz_device_t *device, mz_stream_t *out)
{
  stream_t *s = streams;

  (void)device;
  begin_alone();
  while (s < streams + MAX_STREAMS && s->used)
    s++;
  if (s == streams + MAX_STREAMS) abort();
  *s = (stream_t){.used = true};
  if (pthread_create(&s->thread, NULL, run_stream, s) != 0) abort();
  *out = s;
  end_alone();
  return MZ_OK;
}

static void stream_destroy(const mz_device_t *device, mz_stream_t stream)
{
  stream_t *s = stream;

  (void)device;
  begin_alone();
  pthread_mutex_lock(&lock);
  s->stop = true;
  pthread_cond_broadcast(&moved);
  pthread_mutex_unlock(&lock);
  pthread_join(s->thread, NULL);
  s->used = false;
  end_alone();
}

static mz_status_t synchronize(const mz_device_t *device, mz_stream_t stream)
{
  stream_t *s = stream;
  uint64_t place;

  (void)device;
  pthread_mutex_lock(&calls);
  place = s->pushed;
  pthread_mutex_unlock(&calls);
  wait_for_place(s, place);
  return MZ_OK;
}

/* --- events --- */

static mz_status_t event_create(const mz_device_t *device, mz_event_t *out)
{
  event_t *event;

  (void)device;
  begin_alone();
  end_alone();
  MZ_TRY(mz_new(1, "event", &event));
  *out = event;
  return MZ_OK;
}

static void event_destroy(const mz_device_t *device, mz_event_t event)
{
  (void)device;
  begin_alone();
  end_alone();
  mz_free(event);
}

static mz_status_t event_record(const mz_device_t *device, mz_event_t event,
                                mz_stream_t stream)
{
  event_t *e = event;

  (void)device;
  pthread_mutex_lock(&calls);
  pthread_mutex_lock(&lock);
  e->stream = stream;
  e->place = e->stream->pushed;
  pthread_mutex_unlock(&lock);
  pthread_mutex_unlock(&calls);
  return MZ_OK;
}

static mz_status_t event_done(const mz_device_t *device, mz_event_t event,
                              bool *done_out)
{
  event_t *e = event;

  (void)device;
  pthread_mutex_lock(&calls);
  pthread_mutex_lock(&lock);
  *done_out = !e->stream || e->stream->done >= e->place;
  pthread_mutex_unlock(&lock);
  pthread_mutex_unlock(&calls);
  return MZ_OK;
}

static mz_status_t event_wait(const mz_device_t *device, mz_event_t event)
{
  bool done = false;

  while (!done) {
    MZ_TRY(event_done(device, event, &done));
    sched_yield();
  }
  return MZ_OK;
}

/* --- flags --- */

typedef struct flag_work {
  work_t work;
  const uint32_t *flag;
  uint32_t value;
} flag_work_t;

static mz_status_t run_flag(work_t *work)
{
  const flag_work_t *w = (const flag_work_t *)work;

  while ((int32_t)(__atomic_load_n(w->flag, __ATOMIC_ACQUIRE) - w->value) < 0)
    sched_yield();
  return MZ_OK;
}

static mz_status_t stream_wait_flag(const mz_device_t *device,
                                    mz_stream_t stream, const uint32_t *flag,
                                    uint32_t value)
{
  flag_work_t *w;

  (void)device;
  MZ_TRY(mz_new(1, "wait", &w));
  *w = (flag_work_t){.work.run = run_flag, .flag = flag, .value = value};
  atomic_fetch_add(&waits, 1);
  return launch(stream, &w->work);
}

long late_device_waits(void) { return atomic_load(&waits); }

/* --- memory --- */

static mz_status_t alloc(const mz_device_t *device, int64_t bytes,
                         const char *what, void **out)
{
  int i = 0;

  (void)device;
  begin_alone();
  while (i < MAX_MEMORIES && memories[i].begin)
    i++;
  if (i == MAX_MEMORIES) abort();
  memories[i].bytes = (size_t)mz_max_i64(bytes, 1);
  *out = mmap(NULL, memories[i].bytes, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*out == MAP_FAILED) *out = NULL;
  memories[i].begin = *out;
  end_alone();
  MZ_REQUIRE(*out, MZ_ERR_NOMEM, "%s: %" PRId64 " bytes", what, bytes);
  return MZ_OK;
}

static void free_memory(const mz_device_t *device, void *pointer)
{
  (void)device;
  begin_alone();
  for (int i = 0; i < MAX_MEMORIES; i++) {
    if (memories[i].begin != pointer) continue;
    munmap(pointer, memories[i].bytes);
    memories[i].begin = NULL;
  }
  end_alone();
}

static bool is_ours(const void *pointer)
{
  bool found = false;

  pthread_mutex_lock(&calls);
  for (int i = 0; i < MAX_MEMORIES && !found; i++)
    found = memories[i].begin && (const char *)pointer >= memories[i].begin &&
            (const char *)pointer < memories[i].begin + memories[i].bytes;
  pthread_mutex_unlock(&calls);
  return found;
}

typedef struct copy_work {
  work_t work;
  void *dst;
  const void *src; /* NULL: byte */
  int byte;
  size_t bytes;
} copy_work_t;

static mz_status_t run_copy(work_t *work)
{
  const copy_work_t *w = (const copy_work_t *)work;

  if (!w->src)
    memset(w->dst, w->byte, w->bytes);
  else if (w->src != w->dst)
    memcpy(w->dst, w->src, w->bytes);
  return MZ_OK;
}

static mz_status_t start_copy(copy_work_t copied, mz_stream_t stream)
{
  copy_work_t *w;

  MZ_TRY(mz_new(1, "copy", &w));
  *w = copied;
  w->work.run = run_copy;
  return launch(stream, &w->work);
}

static mz_status_t copy(const mz_device_t *device, void *dst, const void *src,
                        int64_t bytes, mz_stream_t stream)
{
  if (bytes == 0) return MZ_OK;
  MZ_TRY(start_copy(
      (copy_work_t){.dst = dst, .src = src, .bytes = (size_t)bytes}, stream));
  return is_ours(dst) && is_ours(src) ? MZ_OK : synchronize(device, stream);
}

static mz_status_t upload(const mz_device_t *device, void *dst, const void *src,
                          int64_t bytes, mz_stream_t stream)
{
  char *taken;

  (void)device;
  if (bytes == 0) return MZ_OK;
  MZ_TRY(mz_new(bytes, "uploaded bytes", &taken));
  memcpy(taken, src, (size_t)bytes);
  return start_copy((copy_work_t){.work = {.kept = {taken}, .num_kept = 1},
                                  .dst = dst,
                                  .src = taken,
                                  .bytes = (size_t)bytes},
                    stream);
}

static mz_status_t fill(const mz_device_t *device, void *dst, int byte,
                        int64_t bytes, mz_stream_t stream)
{
  (void)device;
  if (bytes == 0) return MZ_OK;
  return start_copy(
      (copy_work_t){.dst = dst, .byte = byte, .bytes = (size_t)bytes}, stream);
}

/* --- the rest of a device --- */

static mz_status_t count(int *count_out)
{
  *count_out = 1;
  return MZ_OK;
}

static mz_status_t open_late(mz_device_t *device)
{
  snprintf(device->name, sizeof device->name, "late CPU");
  memset(known, 0, sizeof known);
  atomic_store(&failed, MZ_OK);
  return stream_create(device, &device->stream);
}

static void close_late(mz_device_t *device)
{
  if (device->stream) stream_destroy(device, device->stream);
}

static mz_status_t attach(const mz_device_t *device)
{
  (void)device;
  return MZ_OK;
}

static mz_status_t used(const mz_device_t *device, int64_t *bytes_out)
{
  (void)device;
  *bytes_out = 0;
  return MZ_OK;
}

/* No timers: no step is timed by parts. */
static const mz_device_ops_t device_ops = {.name = MZ_BACKEND_CUDA,
                                           .depth = QUEUE,
                                           .count = count,
                                           .open = open_late,
                                           .close = close_late,
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
                                           .stream_wait_flag = stream_wait_flag,
                                           .copy = copy,
                                           .upload = upload,
                                           .fill = fill,
                                           .used = used};

/* --- operations: host arrays of their arguments are theirs for the call --- */

static const void *keep(work_t *work, const void *array, size_t bytes)
{
  char *copied = NULL;

  if (!array || bytes == 0) return array;
  if (mz_new((int64_t)bytes, "arguments", &copied) != MZ_OK) abort();
  memcpy(copied, array, bytes);
  work->kept[work->num_kept++] = copied;
  return copied;
}

static void own_linear(mz_linear_t *a, work_t *work)
{
  size_t bytes = (size_t)a->num_groups * sizeof(void *);

  a->host_offsets = NULL;
  a->w = keep(work, a->w, bytes);
  a->b = keep(work, a->b, bytes);
}

static void own_dgrad(mz_linear_dgrad_t *a, work_t *work)
{
  a->host_offsets = NULL;
  a->w = keep(work, a->w, (size_t)a->num_groups * sizeof(void *));
}

static void own_wgrad(mz_linear_wgrad_t *a, work_t *work)
{
  size_t num = (size_t)a->num_groups;

  a->host_offsets = NULL;
  a->dw = keep(work, a->dw, num * sizeof(void *));
  a->db = keep(work, a->db, num * sizeof(void *));
  a->accumulate = keep(work, a->accumulate, num);
  a->accumulate_bias = keep(work, a->accumulate_bias, num);
}

static void own_adamw(mz_adamw_t *a, work_t *work)
{
  a->groups = keep(work, a->groups, (size_t)a->num_groups * sizeof *a->groups);
}

static void own_reorder(mz_reorder_t *a, work_t *work)
{
  a->lengths =
      keep(work, a->lengths, (size_t)a->num_units * sizeof *a->lengths);
}

static void own_nothing(void *a, work_t *work)
{
  (void)a;
  (void)work;
}

/* The first use of an operation loads it. */
static mz_status_t launch_op(mz_stream_t stream, work_t *work, int op)
{
  mz_status_t st;

  pthread_mutex_lock(&calls);
  if (!known[op]) wait_for_all();
  known[op] = true;
  st = push(stream, work);
  pthread_mutex_unlock(&calls);
  return st;
}

#define LATE_OPERATION(op, args)                                               \
  typedef struct op##_work {                                                   \
    work_t work;                                                               \
    const mz_kernels_t *kernels;                                               \
    args a;                                                                    \
  } op##_work_t;                                                               \
  static mz_status_t run_##op(work_t *work)                                    \
  {                                                                            \
    const op##_work_t *w = (const op##_work_t *)work;                          \
    return mz_k_##op##_cpu(w->kernels, &w->a, NULL);                           \
  }                                                                            \
  static mz_status_t late_##op(const mz_kernels_t *kernels, const args *a,     \
                               mz_stream_t stream)                             \
  {                                                                            \
    op##_work_t *w;                                                            \
    MZ_TRY(mz_new(1, #op, &w));                                                \
    *w = (op##_work_t){.work.run = run_##op, .kernels = kernels, .a = *a};     \
    _Generic(&w->a, mz_linear_t *                                              \
             : own_linear, mz_linear_dgrad_t *                                 \
             : own_dgrad, mz_linear_wgrad_t *                                  \
             : own_wgrad, mz_adamw_t *                                         \
             : own_adamw, mz_reorder_t *                                       \
             : own_reorder, default                                            \
             : own_nothing)(&w->a, &w->work);                                  \
    return launch_op(stream, &w->work, MZ_KERNEL_##op);                        \
  }
MZ_KERNEL_LIST(LATE_OPERATION)
#undef LATE_OPERATION

static const mz_kernels_ops_t kernels_ops = {.name = MZ_BACKEND_CUDA,
#define LATE_ROW(op, args) .op = late_##op,
                                             MZ_KERNEL_LIST(LATE_ROW)
#undef LATE_ROW
};

void late_device_use(void)
{
  mz_device_stand_in(&device_ops);
  mz_kernels_stand_in(&kernels_ops);
}
