/* SPDX-License-Identifier: Apache-2.0 */
/* tuning.json. */
#include "train/tuning.h"

#include "base/alloc.h"
#include "base/check.h"
#include "checkpoint/disk.h"

#include <jansson.h>
#include <limits.h>
#include <string.h>

static json_t *lines_of(const char *text)
{
  json_t *lines = json_array();

  while (*text) {
    size_t bytes = strcspn(text, "\n");

    json_array_append_new(lines, json_stringn(text, bytes));
    text += bytes + (text[bytes] == '\n');
  }
  return lines;
}

mz_status_t mz_tuning_write(const mz_folder_t *folder, const char *text)
{
  json_t *root = json_pack("{s:o}", "table", lines_of(text));
  char *json = json_dumps(root, JSON_INDENT(1));
  mz_status_t st;

  MZ_REQUIRE_GOTO(json, st, done, MZ_ERR_NOMEM,
                  "no memory for " MZ_TUNING_NAME);
  MZ_TRY_GOTO(st, mz_folder_write(folder, MZ_TUNING_NAME, json), done);
done:
  mz_free(json);
  json_decref(root);
  return st;
}

/* @param[out] text_out  Lines, each with its end. */
static mz_status_t join(const char *path, const json_t *lines, char **text_out)
{
  const json_t *line;
  size_t bytes = 1, i;
  char *at;

  MZ_REQUIRE(json_is_array(lines), MZ_ERR_DATA,
             "%s: it has no list \"table\"; without the file it is made anew",
             path);
  json_array_foreach(lines, i, line)
  {
    MZ_REQUIRE(json_is_string(line), MZ_ERR_DATA,
               "%s: line %zu of its table is no text", path, i + 1);
    bytes += json_string_length(line) + 1;
  }
  MZ_TRY(mz_new((int64_t)bytes, "tuning table", text_out));
  at = *text_out;
  json_array_foreach(lines, i, line)
  {
    at = stpcpy(at, json_string_value(line));
    *at++ = '\n';
  }
  return MZ_OK;
}

mz_status_t mz_tuning_read(const mz_folder_t *folder, char **text_out)
{
  char path[PATH_MAX];
  json_error_t error;
  json_t *root;
  mz_status_t st;

  *text_out = NULL;
  MZ_TRY(mz_disk_path(path, "%s/" MZ_TUNING_NAME, folder->path));
  if (!mz_disk_exists(path)) return MZ_TRACE(mz_string_copy("", text_out));
  root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
  MZ_REQUIRE(root, MZ_ERR_DATA, "%s:%d:%d: %s", path, error.line, error.column,
             error.text);
  st = join(path, json_object_get(root, "table"), text_out);
  json_decref(root);
  return MZ_TRACE(st);
}
