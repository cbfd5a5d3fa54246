/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory and checked integers: the only callers of malloc in moezero. */
#ifndef MZ_BASE_ALLOC_H
#define MZ_BASE_ALLOC_H

#include <moezero/status.h>
#include <stddef.h>
#include <stdint.h>

/** Every arena and every buffer in it starts on this many bytes. */
enum { MZ_ALIGN_BYTES = 256 };

/**
 * Allocates @p count zeroed elements of **@p out; count 0 gives NULL and MZ_OK.
 * @return MZ_OK, MZ_ERR_ARG (count < 0), MZ_ERR_OVERFLOW, MZ_ERR_NOMEM; the
 * message names @p what and the bytes.
 */
#define mz_new(count, what, out)                                               \
  mz_alloc_zeroed((count), sizeof **(out), (what), (void **)(out))
mz_status_t mz_alloc_zeroed(int64_t count, size_t size, const char *what,
                            void **out);

/** An arena of @p bytes on MZ_ALIGN_BYTES, touched (so that it is resident). */
mz_status_t mz_alloc_arena(int64_t bytes, const char *what, void **out);

/** Grows an array to hold @p need elements, keeping its content. */
#define mz_grow(array, capacity, need, what)                                   \
  mz_alloc_grow((void **)(array), (capacity), (need), sizeof **(array), (what))
mz_status_t mz_alloc_grow(void **array, int64_t *capacity, int64_t need,
                          size_t size, const char *what);

/** Copies a string. */
mz_status_t mz_string_copy(const char *text, char **out);

/** Frees; NULL is fine. */
void mz_free(void *pointer);

/** Tests: the n-th allocation from now on fails (n = 1: the next); 0: off. */
void mz_alloc_fail_at(int64_t n);

mz_status_t mz_mul_i64(int64_t a, int64_t b, int64_t *out);
mz_status_t mz_add_i64(int64_t a, int64_t b, int64_t *out);
mz_status_t mz_int_from_i64(int64_t value, int *out);

static inline int64_t mz_div_up(int64_t a, int64_t b)
{
  return (a + b - 1) / b;
}

static inline int64_t mz_round_up(int64_t a, int64_t b)
{
  return mz_div_up(a, b) * b;
}

static inline int64_t mz_min_i64(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t mz_max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
