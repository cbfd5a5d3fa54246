/* SPDX-License-Identifier: Apache-2.0 */
#include "base/alloc.h"

#include "base/check.h"

#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static atomic_llong fail_countdown;

static int told_to_fail(void)
{
  if (atomic_load_explicit(&fail_countdown, memory_order_relaxed) <= 0)
    return 0;
  return atomic_fetch_sub(&fail_countdown, 1) == 1;
}

void mz_alloc_fail_at(int64_t n) { atomic_store(&fail_countdown, n); }

mz_status_t mz_mul_i64(int64_t a, int64_t b, int64_t *out)
{
  MZ_REQUIRE(!__builtin_mul_overflow(a, b, out), MZ_ERR_OVERFLOW,
             "%" PRId64 " x %" PRId64 " does not fit into 64 bits", a, b);
  return MZ_OK;
}

mz_status_t mz_add_i64(int64_t a, int64_t b, int64_t *out)
{
  MZ_REQUIRE(!__builtin_add_overflow(a, b, out), MZ_ERR_OVERFLOW,
             "%" PRId64 " + %" PRId64 " does not fit into 64 bits", a, b);
  return MZ_OK;
}

mz_status_t mz_int_from_i64(int64_t value, int *out)
{
  MZ_REQUIRE(value >= INT_MIN && value <= INT_MAX, MZ_ERR_OVERFLOW,
             "%" PRId64 " does not fit into a 32-bit integer", value);
  *out = (int)value;
  return MZ_OK;
}

/* At least one byte: @p out is not NULL after MZ_OK. */
static mz_status_t take(int64_t bytes, const char *what, void **out)
{
  *out = told_to_fail() ? NULL : calloc(1, (size_t)bytes);
  MZ_REQUIRE(*out, MZ_ERR_NOMEM, "%s: no memory for %" PRId64 " bytes", what,
             bytes);
  return MZ_OK;
}

mz_status_t mz_alloc_zeroed(int64_t count, size_t size, const char *what,
                            void **out)
{
  int64_t bytes;

  *out = NULL;
  MZ_REQUIRE(count >= 0, MZ_ERR_ARG, "%s: %" PRId64 " elements", what, count);
  MZ_TRY(mz_mul_i64(count, (int64_t)size, &bytes));
  if (bytes == 0) return MZ_OK;
  return MZ_TRACE(take(bytes, what, out));
}

mz_status_t mz_alloc_arena(int64_t bytes, const char *what, void **out)
{
  *out = NULL;
  MZ_REQUIRE(bytes >= 0, MZ_ERR_ARG, "%s: %" PRId64 " bytes", what, bytes);
  if (bytes == 0) return MZ_OK;
  bytes = mz_round_up(bytes, MZ_ALIGN_BYTES);
  *out = told_to_fail() ? NULL : aligned_alloc(MZ_ALIGN_BYTES, (size_t)bytes);
  MZ_REQUIRE(*out, MZ_ERR_NOMEM, "%s: no memory for %" PRId64 " bytes", what,
             bytes);
  memset(*out, 0, (size_t)bytes);
  return MZ_OK;
}

mz_status_t mz_alloc_grow(void **array, int64_t *capacity, int64_t need,
                          size_t size, const char *what)
{
  int64_t wanted = mz_max_i64(need, *capacity * 2), bytes;
  void *bigger;

  if (need <= *capacity) return MZ_OK;
  MZ_TRY(mz_mul_i64(wanted, (int64_t)size, &bytes));
  MZ_TRY(take(bytes, what, &bigger));
  if (*array) memcpy(bigger, *array, (size_t)*capacity * size);
  free(*array);
  *array = bigger;
  *capacity = wanted;
  return MZ_OK;
}

mz_status_t mz_string_copy(const char *text, char **out)
{
  size_t bytes = strlen(text) + 1;
  void *copy;

  *out = NULL;
  MZ_TRY(take((int64_t)bytes, "string", &copy));
  *out = memcpy(copy, text, bytes);
  return MZ_OK;
}

void mz_free(void *pointer) { free(pointer); }
