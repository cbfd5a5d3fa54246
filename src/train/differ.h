/* SPDX-License-Identifier: Apache-2.0 */
/* Two configurations, key by key. */
#ifndef MZ_TRAIN_DIFFER_H
#define MZ_TRAIN_DIFFER_H

#include <moezero/status.h>

/**
 * Says "KEY: old -> new" for every key whose value differs between two JSON
 * texts. Not collective.
 * @return MZ_OK, MZ_ERR_DATA (a text is not JSON), MZ_ERR_NOMEM.
 */
mz_status_t mz_differ(const char *old_text, const char *new_text,
                      void (*say)(void *ctx, const char *line), void *ctx);

#endif
