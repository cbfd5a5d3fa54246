/* SPDX-License-Identifier: Apache-2.0 */
/* Counts the allocations that moezero makes. The return address tells the
 * caller: inside the segments of the executable, or of libmoezero where it is a
 * shared library, or not. glibc's
 * functions are reached by their second names, so nothing has to be looked up
 * before the first allocation. */
/* with it the name mmap would mean mmap64, and both are wanted */
#undef _FILE_OFFSET_BITS

#include "outside.h"

#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *block, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);
void __libc_free(void *block);

enum { MAX_BLOCKS = 4096 };

typedef struct block {
  void *at;
  size_t bytes;
} block_t;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static block_t blocks[MAX_BLOCKS];
static int num_blocks;
static bool warm;
static outside_memory_t seen;

/* Where instructions of the executable [0] and of libmoezero [1] lie. */
typedef struct range {
  uintptr_t first, last;
} range_t;

static range_t ranges[2];

static range_t range_of(const struct dl_phdr_info *info)
{
  range_t r = {.first = UINTPTR_MAX};

  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *h = &info->dlpi_phdr[i];
    uintptr_t begin = info->dlpi_addr + h->p_vaddr;

    if (h->p_type != PT_LOAD || !(h->p_flags & PF_X)) continue;
    if (begin < r.first) r.first = begin;
    if (begin + h->p_memsz > r.last) r.last = begin + h->p_memsz;
  }
  return r;
}

/* The executable is the first object of the list. */
static int take_object(struct dl_phdr_info *info, size_t bytes, void *ctx)
{
  bool *first = ctx;

  (void)bytes;
  if (*first) ranges[0] = range_of(info);
  if (strstr(info->dlpi_name, "libmoezero")) ranges[1] = range_of(info);
  *first = false;
  return 0;
}

__attribute__((constructor)) static void find_program(void)
{
  bool first = true;

  dl_iterate_phdr(take_object, &first);
}

static bool from_program(const void *caller)
{
  uintptr_t at = (uintptr_t)caller;

  return (at >= ranges[0].first && at < ranges[0].last) ||
         (at >= ranges[1].first && at < ranges[1].last);
}

static void note_new(void *at, size_t bytes, const void *caller)
{
  if (!at || !from_program(caller)) return;
  pthread_mutex_lock(&mutex);
  seen.calls++;
  if (warm && bytes > OUTSIDE_LARGE) {
    seen.late_calls++;
    seen.late_bytes += (int64_t)bytes;
  }
  if (bytes >= OUTSIDE_LARGE) {
    if (num_blocks < MAX_BLOCKS) {
      blocks[num_blocks++] = (block_t){at, bytes};
      seen.live_bytes += (int64_t)bytes;
    } else {
      seen.lost_blocks++;
    }
  }
  pthread_mutex_unlock(&mutex);
}

static void note_gone(const void *at)
{
  if (!at) return;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < num_blocks; i++) {
    if (blocks[i].at != at) continue;
    seen.live_bytes -= (int64_t)blocks[i].bytes;
    blocks[i] = blocks[--num_blocks];
    break;
  }
  pthread_mutex_unlock(&mutex);
}

void outside_mark_memory(void)
{
  pthread_mutex_lock(&mutex);
  warm = true;
  seen.late_calls = seen.late_bytes = 0;
  pthread_mutex_unlock(&mutex);
}

void outside_memory(outside_memory_t *memory_out)
{
  pthread_mutex_lock(&mutex);
  *memory_out = seen;
  pthread_mutex_unlock(&mutex);
}

/* --- what stands in for glibc's --- */

void *malloc(size_t bytes)
{
  void *at = __libc_malloc(bytes);

  note_new(at, bytes, __builtin_return_address(0));
  return at;
}

void *calloc(size_t count, size_t size)
{
  void *at = __libc_calloc(count, size);

  note_new(at, count * size, __builtin_return_address(0));
  return at;
}

void *realloc(void *block, size_t bytes)
{
  void *at;

  note_gone(block);
  at = __libc_realloc(block, bytes);
  note_new(at, bytes, __builtin_return_address(0));
  return at;
}

void *aligned_alloc(size_t align, size_t bytes)
{
  void *at = __libc_memalign(align, bytes);

  note_new(at, bytes, __builtin_return_address(0));
  return at;
}

void *memalign(size_t align, size_t bytes)
{
  void *at = __libc_memalign(align, bytes);

  note_new(at, bytes, __builtin_return_address(0));
  return at;
}

int posix_memalign(void **block_out, size_t align, size_t bytes)
{
  void *at = __libc_memalign(align, bytes);

  if (!at) return ENOMEM;
  note_new(at, bytes, __builtin_return_address(0));
  *block_out = at;
  return 0;
}

void free(void *block)
{
  note_gone(block);
  __libc_free(block);
}

static void *map(void *at, size_t bytes, int protection, int flags, int file,
                 off_t offset)
{
  return (void *)syscall(SYS_mmap, at, bytes, protection, flags, file, offset);
}

void *mmap(void *at, size_t bytes, int protection, int flags, int file,
           off_t offset)
{
  void *mapped = map(at, bytes, protection, flags, file, offset);

  if (mapped != MAP_FAILED)
    note_new(mapped, bytes, __builtin_return_address(0));
  return mapped;
}

void *mmap64(void *at, size_t bytes, int protection, int flags, int file,
             off64_t offset)
{
  void *mapped = map(at, bytes, protection, flags, file, offset);

  if (mapped != MAP_FAILED)
    note_new(mapped, bytes, __builtin_return_address(0));
  return mapped;
}

int munmap(void *at, size_t bytes)
{
  note_gone(at);
  return (int)syscall(SYS_munmap, at, bytes);
}
