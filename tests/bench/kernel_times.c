/* SPDX-License-Identifier: Apache-2.0 */
/* Every kernel, copy and fill on the GPU with its start and end, of any
 * program:
 *
 *   CUDA_INJECTION64_PATH=.../libkernel_times.so MZ_KERNEL_TIMES=FILE program
 *
 * FILE gets a line each, "start end stream name" in nanoseconds, when the
 * program ends; ".<process>" is added to the name. tests/bench/gpu_bench.py
 * --kernels makes a table of it. libcupti is opened when it is needed, so that
 * the library can be built without it. */
#include <cupti.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BUFFER_BYTES = 8 << 20 };

typedef struct record {
  uint64_t start, end; /* ns */
  uint32_t stream;
  char *name;
} record_t;

static struct {
  CUptiResult (*callbacks)(CUpti_BuffersCallbackRequestFunc,
                           CUpti_BuffersCallbackCompleteFunc);
  CUptiResult (*enable)(CUpti_ActivityKind);
  CUptiResult (*next)(uint8_t *, size_t, CUpti_Activity **);
  CUptiResult (*flush)(uint32_t);
} cupti;

static record_t *records;
static size_t num_records, cap_records;

/* CUPTI calls back from one thread at a time. */
static void add(uint64_t start, uint64_t end, uint32_t stream, const char *name)
{
  if (num_records == cap_records) {
    size_t cap = cap_records ? 2 * cap_records : 4096;
    record_t *more = realloc(records, cap * sizeof *more);

    if (!more) return;
    records = more;
    cap_records = cap;
  }
  records[num_records++] = (record_t){start, end, stream, strdup(name)};
}

static void take(const CUpti_Activity *activity)
{
  switch (activity->kind) {
  case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
    const CUpti_ActivityKernel10 *k = (const void *)activity;
    add(k->start, k->end, k->streamId, k->name ? k->name : "?");
    break;
  }
  case CUPTI_ACTIVITY_KIND_MEMCPY: {
    static const char *const names[] = {"copy",
                                        "copy host to device",
                                        "copy device to host",
                                        "copy",
                                        "copy",
                                        "copy",
                                        "copy",
                                        "copy",
                                        "copy on the device"};
    const CUpti_ActivityMemcpy6 *c = (const void *)activity;
    size_t num = sizeof names / sizeof *names;
    add(c->start, c->end, c->streamId,
        names[c->copyKind < num ? c->copyKind : 0]);
    break;
  }
  case CUPTI_ACTIVITY_KIND_MEMSET: {
    const CUpti_ActivityMemset4 *m = (const void *)activity;
    add(m->start, m->end, m->streamId, "fill");
    break;
  }
  default:
    break;
  }
}

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *bytes, size_t *most)
{
  *most = 0;
  *bytes = BUFFER_BYTES;
  *buffer = aligned_alloc(8, BUFFER_BYTES);
  if (!*buffer) *bytes = 0;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream,
                                 uint8_t *buffer, size_t bytes, size_t valid)
{
  CUpti_Activity *activity = NULL;

  (void)context;
  (void)stream;
  (void)bytes;
  while (cupti.next(buffer, valid, &activity) == CUPTI_SUCCESS)
    take(activity);
  free(buffer);
}

static void write_records(void)
{
  const char *name = getenv("MZ_KERNEL_TIMES");
  char path[4096];
  FILE *file;

  cupti.flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  if (num_records == 0) return; /* mpirun itself */
  snprintf(path, sizeof path, "%s.%ld", name ? name : "kernel_times",
           (long)getpid());
  file = fopen(path, "w");
  if (!file) {
    perror(path);
    return;
  }
  for (size_t i = 0; i < num_records; i++)
    fprintf(file, "%" PRIu64 " %" PRIu64 " %" PRIu32 " %s\n", records[i].start,
            records[i].end, records[i].stream, records[i].name);
  fclose(file);
}

static void *open_cupti(void)
{
  static const char *const paths[] = {
      "libcupti.so", "libcupti.so.13", "libcupti.so.12",
      "/usr/local/cuda/lib64/libcupti.so",
      "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"};

  for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
    void *library = dlopen(paths[i], RTLD_NOW | RTLD_GLOBAL);
    if (library) return library;
  }
  fprintf(stderr, "kernel_times: no libcupti: %s\n", dlerror());
  return NULL;
}

static int find(void *library, const char *name, void *function_out)
{
  void *symbol = dlsym(library, name);

  memcpy(function_out, &symbol, sizeof symbol);
  return symbol != NULL;
}

/* Called by the driver when the program starts to use it. */
int InitializeInjection(void);
int InitializeInjection(void)
{
  void *library = open_cupti();

  if (!library ||
      !find(library, "cuptiActivityRegisterCallbacks", &cupti.callbacks) ||
      !find(library, "cuptiActivityEnable", &cupti.enable) ||
      !find(library, "cuptiActivityGetNextRecord", &cupti.next) ||
      !find(library, "cuptiActivityFlushAll", &cupti.flush))
    return 0;
  if (cupti.callbacks(give_buffer, take_buffer) != CUPTI_SUCCESS ||
      cupti.enable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) != CUPTI_SUCCESS ||
      cupti.enable(CUPTI_ACTIVITY_KIND_MEMCPY) != CUPTI_SUCCESS ||
      cupti.enable(CUPTI_ACTIVITY_KIND_MEMSET) != CUPTI_SUCCESS) {
    fputs("kernel_times: CUPTI refuses\n", stderr);
    return 0;
  }
  return atexit(write_records) == 0;
}
