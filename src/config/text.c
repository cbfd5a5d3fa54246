/* SPDX-License-Identifier: Apache-2.0 */
#include "config/text.h"

#include "base/alloc.h"
#include "base/check.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

mz_status_t mz_text_add(mz_text_t *text, const char *format, ...)
{
  va_list args;
  int more;

  va_start(args, format);
  more = vsnprintf(NULL, 0, format, args);
  va_end(args);
  MZ_REQUIRE(more >= 0, MZ_ERR_INTERNAL, "format \"%s\" failed", format);
  MZ_TRY(mz_grow(&text->text, &text->capacity, text->bytes + more + 1, "text"));
  va_start(args, format);
  vsnprintf(text->text + text->bytes, (size_t)more + 1, format, args);
  va_end(args);
  text->bytes += more;
  return MZ_OK;
}

/* The fewest digits that read back to the same bits, with a mark of a real. */
static mz_status_t add_real(mz_text_t *text, double value)
{
  char digits[40];

  if (value == floor(value) && fabs(value) < 1e15)
    return MZ_TRACE(mz_text_add(text, "%.1f", value));
  for (int precision = 1; precision <= 17; precision++) {
    snprintf(digits, sizeof digits, "%.*g", precision, value);
    if (strtod(digits, NULL) == value) break;
  }
  return MZ_TRACE(
      mz_text_add(text, "%s%s", digits, strpbrk(digits, ".e") ? "" : ".0"));
}

static mz_status_t add_break(mz_text_t *text, int depth)
{
  if (depth < 0) return MZ_OK;
  return MZ_TRACE(mz_text_add(text, "\n%*s", 2 * depth, ""));
}

static mz_status_t add_object(mz_text_t *text, const json_t *value, int depth)
{
  int inner = depth < 0 ? -1 : depth + 1;
  const char *name, *between = "";
  json_t *member, *object = (json_t *)(uintptr_t)value;

  MZ_TRY(mz_text_add(text, "{"));
  json_object_foreach(object, name, member)
  {
    json_t *quoted = json_string(name);
    mz_status_t st;

    MZ_REQUIRE(quoted, MZ_ERR_NOMEM, "no memory for a JSON string");
    MZ_TRY_GOTO(st, mz_text_add(text, "%s", between), next);
    MZ_TRY_GOTO(st, add_break(text, inner), next);
    MZ_TRY_GOTO(st, mz_text_add_json(text, quoted, -1), next);
    MZ_TRY_GOTO(st, mz_text_add(text, ": "), next);
    MZ_TRY_GOTO(st, mz_text_add_json(text, member, inner), next);
    between = depth < 0 ? ", " : ",";
  next:
    json_decref(quoted);
    if (st != MZ_OK) return st;
  }
  if (json_object_size(value) > 0) MZ_TRY(add_break(text, depth));
  return MZ_TRACE(mz_text_add(text, "}"));
}

static mz_status_t add_array(mz_text_t *text, const json_t *value, int depth)
{
  bool open = depth >= 0 && json_is_object(json_array_get(value, 0));
  int inner = open ? depth + 1 : -1;

  MZ_TRY(mz_text_add(text, "["));
  for (size_t i = 0; i < json_array_size(value); i++) {
    MZ_TRY(mz_text_add(text, "%s", i == 0 ? "" : open ? "," : ", "));
    MZ_TRY(add_break(text, inner));
    MZ_TRY(mz_text_add_json(text, json_array_get(value, i), inner));
  }
  if (open) MZ_TRY(add_break(text, depth));
  return MZ_TRACE(mz_text_add(text, "]"));
}

mz_status_t mz_text_add_json(mz_text_t *text, const json_t *value, int depth)
{
  char *dump;
  mz_status_t st;

  if (json_is_object(value)) return MZ_TRACE(add_object(text, value, depth));
  if (json_is_array(value)) return MZ_TRACE(add_array(text, value, depth));
  if (json_is_real(value))
    return MZ_TRACE(add_real(text, json_real_value(value)));
  dump = json_dumps(value, JSON_ENCODE_ANY);
  MZ_REQUIRE(dump, MZ_ERR_NOMEM, "no memory to write a JSON value");
  st = mz_text_add(text, "%s", dump);
  free(dump); /* Jansson's own allocation */
  return MZ_TRACE(st);
}

void mz_text_free(mz_text_t *text)
{
  mz_free(text->text);
  *text = (mz_text_t){0};
}
