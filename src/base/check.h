/* SPDX-License-Identifier: Apache-2.0 */
/* Error macros: detect once with MZ_REQUIRE or MZ_FAIL, pass on with MZ_TRY. */
#ifndef MZ_BASE_CHECK_H
#define MZ_BASE_CHECK_H

#include <inttypes.h>
#include <moezero/status.h>

/** Adds the frame to the recorded error if @p status is one; returns it. */
mz_status_t mz_error_frame(mz_status_t status, const char *file, int line,
                           const char *func);

/* These macros hand on the status that they were given, and not what a function
 * returns, so that a reader of one file (clang-tidy) sees that it is an error.
 */
#define MZ_ERROR(status, ...)                                                  \
  ({                                                                           \
    mz_status_t set_ = (status);                                               \
    mz_error_set(set_, __FILE__, __LINE__, __func__, __VA_ARGS__);             \
    set_;                                                                      \
  })

#define MZ_FAIL(status, ...) return MZ_ERROR((status), __VA_ARGS__)

#define MZ_REQUIRE(cond, status, ...)                                          \
  do {                                                                         \
    if (!(cond)) return MZ_ERROR((status), __VA_ARGS__);                       \
  } while (0)

/* The same, but leaves through @p label with the code in @p st. */
#define MZ_REQUIRE_GOTO(cond, st, label, status, ...)                          \
  do {                                                                         \
    if (!(cond)) {                                                             \
      (st) = MZ_ERROR((status), __VA_ARGS__);                                  \
      goto label;                                                              \
    }                                                                          \
  } while (0)

#define MZ_TRACE(call)                                                         \
  ({                                                                           \
    mz_status_t traced_ = (call);                                              \
    mz_error_frame(traced_, __FILE__, __LINE__, __func__);                     \
    traced_;                                                                   \
  })

#define MZ_TRY(call)                                                           \
  do {                                                                         \
    mz_status_t st_ = (call);                                                  \
    if (st_ != MZ_OK) {                                                        \
      mz_error_frame(st_, __FILE__, __LINE__, __func__);                       \
      return st_;                                                              \
    }                                                                          \
  } while (0)

#define MZ_TRY_GOTO(st, call, label)                                           \
  do {                                                                         \
    (st) = (call);                                                             \
    if ((st) != MZ_OK) {                                                       \
      mz_error_frame((st), __FILE__, __LINE__, __func__);                      \
      goto label;                                                              \
    }                                                                          \
  } while (0)

#ifdef NDEBUG
#define MZ_ASSERT(cond) ((void)0)
#else
#include <assert.h>
#define MZ_ASSERT(cond) assert(cond)
#endif

#endif
