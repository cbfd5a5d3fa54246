/* SPDX-License-Identifier: Apache-2.0 */
/* Counts what is taken from the CUDA runtime, and by whom: the return address
 * tells moezero (the program, or libmoezero where it is a shared library) from
 * other libraries. One that carries a runtime of its own inside, as cuBLASLt
 * does, is not seen here: the bytes in use on the card tell of it. Needs no
 * CUDA header, and nothing of CUDA until the program calls it. */
#include "outside.h"

#include <dlfcn.h>
#include <mpi.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

enum { MAX_BLOCKS = 1024, OF_CARD = 0, OF_HOST = 1, SUCCESS = 0 };

typedef struct block {
  const void *at;
  int64_t bytes;
  int kind;
} block_t;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static block_t blocks[MAX_BLOCKS];
static int num_blocks;
static bool warm;
static outside_device_t seen;

/* The runtime's own function. */
static void *next(const char *name)
{
  void *function = dlsym(RTLD_NEXT, name);

  if (function) return function;
  fprintf(stderr, "cudawatch: no %s\n", name);
  abort();
}

#define NEXT(function) ((__typeof__(&(function)))next(#function))
#define CALLER __builtin_return_address(0)

static bool is_own(const void *caller)
{
  Dl_info of_caller, of_program;

  if (!dladdr(caller, &of_caller)) return false;
  if (strstr(of_caller.dli_fname, "libmoezero")) return true;
  return dladdr((const void *)getauxval(AT_ENTRY), &of_program) &&
         of_caller.dli_fbase == of_program.dli_fbase;
}

/* Locks, until unlock: the line of a caller now. */
static outside_calls_t *lock_line(const void *caller)
{
  bool own = is_own(caller);
  int ready = 0;

  MPI_Initialized(&ready);
  pthread_mutex_lock(&mutex);
  if (own) seen.own_calls++;
  if (own && !ready) seen.early_calls++;
  return own ? &seen.own[warm] : &seen.others[warm];
}

static void unlock(void) { pthread_mutex_unlock(&mutex); }

static void note_new(const void *at, size_t bytes, int kind, const void *caller)
{
  outside_calls_t *line = lock_line(caller);

  line->allocations++;
  line->bytes += (int64_t)bytes;
  if (line == &seen.own[warm]) {
    if (num_blocks < MAX_BLOCKS) {
      blocks[num_blocks++] = (block_t){at, (int64_t)bytes, kind};
      seen.live_bytes[kind] += (int64_t)bytes;
    } else {
      seen.lost_blocks++;
    }
  }
  unlock();
}

static void note_gone(const void *at, const void *caller)
{
  outside_calls_t *line = lock_line(caller);

  line->frees += at != NULL;
  for (int i = 0; at && i < num_blocks; i++) {
    if (blocks[i].at != at) continue;
    seen.live_bytes[blocks[i].kind] -= blocks[i].bytes;
    blocks[i] = blocks[--num_blocks];
    break;
  }
  unlock();
}

static void note_object(const void *caller)
{
  lock_line(caller)->objects++;
  unlock();
}

void outside_mark_device(void)
{
  pthread_mutex_lock(&mutex);
  warm = true;
  seen.own[1] = seen.others[1] = (outside_calls_t){0};
  pthread_mutex_unlock(&mutex);
}

void outside_device(outside_device_t *device_out)
{
  pthread_mutex_lock(&mutex);
  *device_out = seen;
  pthread_mutex_unlock(&mutex);
}

/* For programs that do not ask: a line in the file named, at the end. */
__attribute__((destructor)) static void report(void)
{
  const char *path = getenv("MZ_OUTSIDE_REPORT");
  FILE *file = path ? fopen(path, "a") : NULL;

  if (!file) return;
  fprintf(file, "CUDA calls of moezero: %lld, before MPI_Init: %lld\n",
          (long long)seen.own_calls, (long long)seen.early_calls);
  fclose(file);
}

/* --- what stands in for the runtime's; all return its error code --- */

int cudaMalloc(void **out, size_t bytes)
{
  int error = NEXT(cudaMalloc)(out, bytes);

  if (error == SUCCESS) note_new(*out, bytes, OF_CARD, CALLER);
  return error;
}

int cudaMallocManaged(void **out, size_t bytes, unsigned flags)
{
  int error = NEXT(cudaMallocManaged)(out, bytes, flags);

  if (error == SUCCESS) note_new(*out, bytes, OF_CARD, CALLER);
  return error;
}

int cudaMallocAsync(void **out, size_t bytes, void *stream)
{
  int error = NEXT(cudaMallocAsync)(out, bytes, stream);

  if (error == SUCCESS) note_new(*out, bytes, OF_CARD, CALLER);
  return error;
}

int cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
  int error = NEXT(cudaHostAlloc)(out, bytes, flags);

  if (error == SUCCESS) note_new(*out, bytes, OF_HOST, CALLER);
  return error;
}

int cudaMallocHost(void **out, size_t bytes)
{
  int error = NEXT(cudaMallocHost)(out, bytes);

  if (error == SUCCESS) note_new(*out, bytes, OF_HOST, CALLER);
  return error;
}

int cudaHostRegister(void *at, size_t bytes, unsigned flags)
{
  int error = NEXT(cudaHostRegister)(at, bytes, flags);

  if (error == SUCCESS) note_object(CALLER);
  return error;
}

int cudaFree(void *at)
{
  note_gone(at, CALLER);
  return NEXT(cudaFree)(at);
}

int cudaFreeAsync(void *at, void *stream)
{
  note_gone(at, CALLER);
  return NEXT(cudaFreeAsync)(at, stream);
}

int cudaFreeHost(void *at)
{
  note_gone(at, CALLER);
  return NEXT(cudaFreeHost)(at);
}

int cudaStreamCreate(void **out)
{
  note_object(CALLER);
  return NEXT(cudaStreamCreate)(out);
}

int cudaStreamCreateWithFlags(void **out, unsigned flags)
{
  note_object(CALLER);
  return NEXT(cudaStreamCreateWithFlags)(out, flags);
}

int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority)
{
  note_object(CALLER);
  return NEXT(cudaStreamCreateWithPriority)(out, flags, priority);
}

int cudaEventCreate(void **out)
{
  note_object(CALLER);
  return NEXT(cudaEventCreate)(out);
}

int cudaEventCreateWithFlags(void **out, unsigned flags)
{
  note_object(CALLER);
  return NEXT(cudaEventCreateWithFlags)(out, flags);
}

/* The first calls of a program, for the order of MPI_Init and CUDA. */

int cudaGetDeviceCount(int *count_out)
{
  lock_line(CALLER);
  unlock();
  return NEXT(cudaGetDeviceCount)(count_out);
}

int cudaSetDevice(int device)
{
  lock_line(CALLER);
  unlock();
  return NEXT(cudaSetDevice)(device);
}
