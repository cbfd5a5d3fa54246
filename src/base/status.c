/* SPDX-License-Identifier: Apache-2.0 */
/* The thread's last error: one message and the frames it passed through. */
#include "base/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MESSAGE_MAX = 1024, RECORD_MAX = 3072 };

static _Thread_local char message[MESSAGE_MAX];
static _Thread_local char record[RECORD_MAX];

static const char *base_name(const char *file)
{
  const char *slash = strrchr(file, '/');
  return slash ? slash + 1 : file;
}

static void append_frame(const char *file, int line, const char *func)
{
  size_t used = strlen(record);
  snprintf(record + used, sizeof record - used, "\n  at %s (%s:%d)", func,
           base_name(file), line);
}

const char *mz_status_text(mz_status_t status)
{
  switch (status) {
#define MZ_STATUS_CASE_(name, text)                                            \
  case MZ_##name:                                                              \
    return text;
    MZ_STATUS_LIST(MZ_STATUS_CASE_)
#undef MZ_STATUS_CASE_
  case MZ_STATUS_COUNT:
    break;
  }
  return "unknown status";
}

const char *mz_error_last(void) { return record; }

const char *mz_error_message(void) { return message; }

void mz_error_clear(void)
{
  message[0] = '\0';
  record[0] = '\0';
}

mz_status_t mz_error_set(mz_status_t status, const char *file, int line,
                         const char *func, const char *format, ...)
{
  va_list args;

  va_start(args, format);
  vsnprintf(message, sizeof message, format, args);
  va_end(args);
  memcpy(record, message, strlen(message) + 1);
  append_frame(file, line, func);
  return status;
}

mz_status_t mz_error_frame(mz_status_t status, const char *file, int line,
                           const char *func)
{
  if (status != MZ_OK) append_frame(file, line, func);
  return status;
}
