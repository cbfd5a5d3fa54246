/* SPDX-License-Identifier: Apache-2.0 */
/* A text that grows, and JSON written with the fewest digits that read back. */
#ifndef MZ_CONFIG_TEXT_H
#define MZ_CONFIG_TEXT_H

#include <jansson.h>
#include <moezero/status.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct mz_text {
  char *text; /* zero-terminated; NULL while empty */
  int64_t bytes, capacity;
} mz_text_t;

/** Appends (printf form). @return MZ_OK, MZ_ERR_NOMEM. */
mz_status_t mz_text_add(mz_text_t *text, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/**
 * Appends @p value as JSON: objects one member a line, indented by @p depth,
 * or everything on one line with @p depth -1.
 */
mz_status_t mz_text_add_json(mz_text_t *text, const json_t *value, int depth);

void mz_text_free(mz_text_t *text);

#endif
