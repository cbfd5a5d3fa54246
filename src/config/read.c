/* SPDX-License-Identifier: Apache-2.0 */
/* From a file or a text to JSON, with the assignments of the command line. */
#include "config/config_impl.h"

#include "base/alloc.h"
#include "base/check.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

mz_status_t mz_config_load_file(const char *path, char **text_out)
{
  enum { CHUNK = 65536 };
  int64_t bytes = 0, capacity = 0;
  char *text = NULL;
  mz_status_t st = MZ_OK;
  FILE *file = fopen(path, "rb");

  MZ_REQUIRE(file, MZ_ERR_IO, "%s: %s", path, strerror(errno));
  for (size_t got = CHUNK; got == CHUNK; bytes += (int64_t)got) {
    MZ_TRY_GOTO(st, mz_grow(&text, &capacity, bytes + CHUNK + 1, "file"), done);
    got = fread(text + bytes, 1, CHUNK, file);
  }
  MZ_REQUIRE_GOTO(!ferror(file), st, done, MZ_ERR_IO, "%s: %s", path,
                  strerror(errno));
  text[bytes] = '\0';
  MZ_REQUIRE_GOTO((int64_t)strlen(text) == bytes, st, done, MZ_ERR_CONFIG,
                  "%s: a zero byte after %zu bytes: not a configuration", path,
                  strlen(text));
  *text_out = text;
  text = NULL;
done:
  mz_free(text);
  fclose(file);
  return st;
}

mz_status_t mz_config_load_text(const char *text, const char *name,
                                json_t **root_out)
{
  json_error_t error;
  json_t *root;

  MZ_REQUIRE(text[strspn(text, " \t\r\n")], MZ_ERR_CONFIG,
             "%s: the configuration is empty", name);
  root = json_loads(text, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
  MZ_REQUIRE(root, MZ_ERR_CONFIG, "%s:%d:%d: %s", name, error.line,
             error.column, error.text);
  if (!json_is_object(root)) {
    json_decref(root);
    MZ_FAIL(MZ_ERR_CONFIG, "%s:1:1: the configuration is not an object", name);
  }
  *root_out = root;
  return MZ_OK;
}

json_t *mz_config_at(json_t *root, const char *path)
{
  json_t *at = root;

  while (at) {
    size_t length = strcspn(path, ".");
    at = json_object_getn(at, path, length);
    if (path[length] == '\0') return at;
    path += length + 1;
  }
  return NULL;
}

json_t *mz_config_given(const mz_config_t *config, const char *path)
{
  json_t *value = mz_config_at(config->root, path);
  const char *text = json_string_value(value);

  if (json_is_null(value) || (text && strcmp(text, "auto") == 0)) return NULL;
  return value;
}

mz_status_t mz_config_put(json_t *root, const char *path, json_t *value)
{
  const char *name = path;
  json_t *at = root;

  for (;;) {
    size_t length = strcspn(name, ".");
    json_t *next;

    if (name[length] == '\0') break;
    next = json_object_getn(at, name, length);
    if (!next) {
      next = json_object();
      if (json_object_setn_new(at, name, length, next) != 0) next = NULL;
    }
    if (!json_is_object(next)) json_decref(value);
    MZ_REQUIRE(next, MZ_ERR_NOMEM, "%s: no memory for JSON", path);
    MZ_REQUIRE(json_is_object(next), MZ_ERR_CONFIG,
               "%s: %.*s holds a value, not keys", path,
               (int)(name + length - path), path);
    at = next;
    name += length + 1;
  }
  MZ_REQUIRE(json_object_set_new(at, name, value) == 0, MZ_ERR_NOMEM,
             "%s: no memory for JSON", path);
  return MZ_OK;
}

mz_status_t mz_config_assign(json_t *root, const char *assignment)
{
  const char *equals = strchr(assignment, '=');
  char *path = NULL;
  json_t *value;
  mz_status_t st;

  MZ_REQUIRE(equals && equals != assignment, MZ_ERR_CONFIG,
             "--set \"%s\": expected KEY=VALUE", assignment);
  MZ_TRY(mz_string_copy(assignment, &path));
  path[equals - assignment] = '\0';
  value =
      json_loads(equals + 1, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, NULL);
  if (!value) value = json_string(equals + 1); /* a bare word */
  MZ_REQUIRE_GOTO(value, st, done, MZ_ERR_CONFIG,
                  "--set \"%s\": the value is not UTF-8", assignment);
  st = MZ_TRACE(mz_config_put(root, path, value));
done:
  mz_free(path);
  return st;
}
