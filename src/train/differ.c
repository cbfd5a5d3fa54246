/* SPDX-License-Identifier: Apache-2.0 */
#include "train/differ.h"

#include "base/check.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct differ {
  void (*say)(void *ctx, const char *line);
  void *ctx;
} differ_t;

static void value_text(const json_t *value, char *text, size_t text_bytes)
{
  size_t bytes;

  if (!value) {
    snprintf(text, text_bytes, "not set");
    return;
  }
  bytes = json_dumpb(value, text, text_bytes - 1,
                     JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
  text[bytes < text_bytes ? bytes : text_bytes - 1] = '\0';
  if (bytes >= text_bytes) memcpy(text + text_bytes - 4, "...", 3);
}

static void compare(const differ_t *d, const char *key, const json_t *before,
                    const json_t *after)
{
  char old_text[128], new_text[128], inside[256], line[640];
  const char *name;
  json_t *value;

  if (json_is_object(before) && json_is_object(after)) {
    json_object_foreach((json_t *)before, name, value)
    {
      snprintf(inside, sizeof inside, "%s%s%s", key, *key ? "." : "", name);
      compare(d, inside, value, json_object_get(after, name));
    }
    json_object_foreach((json_t *)after, name, value)
    {
      if (json_object_get(before, name)) continue;
      snprintf(inside, sizeof inside, "%s%s%s", key, *key ? "." : "", name);
      compare(d, inside, NULL, value);
    }
    return;
  }
  if (before && after && json_equal(before, after)) return;
  value_text(before, old_text, sizeof old_text);
  value_text(after, new_text, sizeof new_text);
  snprintf(line, sizeof line, "%s: %s -> %s", key, old_text, new_text);
  d->say(d->ctx, line);
}

mz_status_t mz_differ(const char *old_text, const char *new_text,
                      void (*say)(void *ctx, const char *line), void *ctx)
{
  const differ_t d = {say, ctx};
  json_error_t error;
  json_t *before = json_loads(old_text, 0, &error), *after = NULL;
  mz_status_t st = MZ_OK;

  if (before) after = json_loads(new_text, 0, &error);
  if (before && after)
    compare(&d, "", before, after);
  else
    st = MZ_ERROR(MZ_ERR_DATA, "a configuration is not JSON: %s", error.text);
  json_decref(before);
  json_decref(after);
  return st;
}
