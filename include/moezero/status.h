/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moezero/status.h
 * @brief Status codes and the last error of the calling thread.
 *
 * Every function that can fail returns mz_status_t. The library never prints,
 * exits or aborts: whoever detects an error writes one message with the value
 * found, the bound and the unit, and its callers only add a frame.
 */
#ifndef MZ_STATUS_H
#define MZ_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* name, text. The order is fixed: codes travel between ranks. */
#define MZ_STATUS_LIST(X)                                                      \
  X(OK, "success")                                                             \
  X(ERR_ARG, "invalid argument")                                               \
  X(ERR_NOMEM, "out of memory")                                                \
  X(ERR_OVERFLOW, "number out of range")                                       \
  X(ERR_SHAPE, "shapes do not fit")                                            \
  X(ERR_CONFIG, "invalid configuration")                                       \
  X(ERR_UNSUPPORTED, "not supported")                                          \
  X(ERR_DATA, "invalid data")                                                  \
  X(ERR_IO, "input/output error")                                              \
  X(ERR_MPI, "MPI error")                                                      \
  X(ERR_CUDA, "CUDA error")                                                    \
  X(ERR_FIT, "does not fit into memory")                                       \
  X(ERR_PEER, "another rank failed or is late")                                \
  X(ERR_STOPPED, "stopped by a signal")                                        \
  X(ERR_INTERNAL, "internal error")

typedef enum mz_status {
#define MZ_STATUS_ENUM_(name, text) MZ_##name,
  MZ_STATUS_LIST(MZ_STATUS_ENUM_)
#undef MZ_STATUS_ENUM_
      MZ_STATUS_COUNT
} mz_status_t;

/** The fixed text of a code; "unknown status" outside the list. */
const char *mz_status_text(mz_status_t status);

/**
 * Message and frames of the last error of this thread, newest frame last;
 * "" when none was recorded. Borrowed until the next error of this thread.
 */
const char *mz_error_last(void);

/** The message alone, without frames. Borrowed until the next error. */
const char *mz_error_message(void);

/**
 * Records the message (printf form) and returns @p status: for the functions of
 * an application's own layers and experts, whose error the engine tells all
 * ranks with the rank's number and the step.
 */
mz_status_t mz_error_set(mz_status_t status, const char *file, int line,
                         const char *func, const char *format, ...)
#ifdef __GNUC__
    __attribute__((format(printf, 5, 6)))
#endif
    ;

/** Forgets the last error of this thread. */
void mz_error_clear(void);

#ifdef __cplusplus
}
#endif
#endif
