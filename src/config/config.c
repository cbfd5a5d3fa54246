/* SPDX-License-Identifier: Apache-2.0 */
/* Reading goes key by key down the table, then looks for names that are not in
 * it, then fills in what depends on other keys. */
#include "config/config_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "config/keys.h"
#include "config/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { PATH_BYTES = 256 };

#ifdef MZ_TEST_HOOKS
enum { HAVE_HOOKS = 1 };
#else
enum { HAVE_HOOKS = 0 };
#endif

static bool is_auto(const json_t *value)
{
  const char *text = json_string_value(value);

  return text && strcmp(text, "auto") == 0;
}

/* 5 and 5.0 are equal here. */
static bool same_value(const json_t *a, const json_t *b)
{
  if (json_is_number(a) && json_is_number(b))
    return json_number_value(a) == json_number_value(b);
  return json_equal(a, b);
}

/* The default of a key: new reference, NULL when it has none. The rule
 * "=other.key" stands for that key's value. */
static mz_status_t default_of(const mz_config_t *config, const mz_key_t *key,
                              json_t **default_out)
{
  *default_out = NULL;
  if (!key->fallback) return MZ_OK;
  if (key->fallback[0] == '=') {
    const mz_key_t *other = mz_key_find(key->fallback + 1);
    json_t *value = other ? mz_config_given(config, other->path) : NULL;

    if (!other) return MZ_OK;
    *default_out = json_incref(value);
    return value ? MZ_OK : MZ_TRACE(default_of(config, other, default_out));
  }
  *default_out = json_loads(key->fallback, JSON_DECODE_ANY, NULL);
  MZ_REQUIRE(*default_out, MZ_ERR_NOMEM, "%s: no memory for its default",
             key->path);
  return MZ_OK;
}

mz_status_t mz_config_add_note(mz_config_t *config, const char *format, ...)
{
  char text[512];
  va_list args;

  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  MZ_TRY(mz_grow(&config->notes, &config->notes_capacity, config->num_notes + 1,
                 "notes"));
  MZ_TRY(mz_string_copy(text, &config->notes[config->num_notes]));
  config->num_notes++;
  return MZ_OK;
}

static mz_status_t add_note(mz_config_t *config, const mz_key_t *key)
{
  return MZ_TRACE(mz_config_add_note(config, "%s: nothing to do: %s", key->path,
                                     key->meaning));
}

/* {}, {"enabled": false} */
static bool switched_off(const json_t *value)
{
  return json_is_object(value) &&
         (json_object_size(value) == 0 ||
          json_is_false(json_object_get(value, "enabled")));
}

/* A key that is given but has no field: noted or refused. */
static mz_status_t take_other(mz_config_t *config, const mz_key_t *key,
                              const json_t *value)
{
  json_t *harmless = NULL;
  mz_text_t found = {0};
  bool same;
  mz_status_t st = default_of(config, key, &harmless);

  MZ_TRY(st);
  same = same_value(value, harmless) ||
         (key->sort == MZ_SORT_LATER && key->choices);
  json_decref(harmless);
  if (key->sort == MZ_SORT_NOTED || (key->sort == MZ_SORT_FIXED && same) ||
      (key->sort == MZ_SORT_IDLE && !same))
    return MZ_TRACE(add_note(config, key));
  if (same || (key->sort == MZ_SORT_NEVER && switched_off(value))) return MZ_OK;
  st = mz_text_add_json(&found, value, -1);
  if (st == MZ_OK && key->sort == MZ_SORT_LATER)
    st = MZ_ERROR(MZ_ERR_UNSUPPORTED, "not supported yet: %s (found %.80s)",
                  key->path, found.text);
  else if (st == MZ_OK)
    st = MZ_ERROR(MZ_ERR_UNSUPPORTED, "%s: found %.80s, refused: %s", key->path,
                  found.text, key->meaning);
  mz_text_free(&found);
  return st;
}

static mz_status_t take_key(mz_config_t *config, const mz_key_t *key)
{
  json_t *value = mz_config_at(config->root, key->path);
  json_t *fallback = NULL;
  mz_status_t st;

  if (value && !is_auto(value)) {
    MZ_REQUIRE(HAVE_HOOKS || !key->hooks, MZ_ERR_UNSUPPORTED,
               "%s: this build lacks -Dtest_hooks=true", key->path);
    MZ_TRY(mz_key_check(key, value));
    if (key->sort == MZ_SORT_USED)
      return MZ_TRACE(mz_key_store(key, value, &config->values));
    return MZ_TRACE(take_other(config, key, value));
  }
  if (key->sort != MZ_SORT_USED || !key->fallback) return MZ_OK;
  MZ_REQUIRE(strcmp(key->fallback, MZ_REQUIRED) != 0 ||
                 (mz_key_needs_model(key) && !mz_config_given(config, "model")),
             MZ_ERR_CONFIG, "%s: required", key->path);
  if (!mz_key_has_default(key)) return MZ_OK;
  MZ_TRY(default_of(config, key, &fallback));
  st = mz_key_store(key, fallback, &config->values);
  json_decref(fallback);
  return MZ_TRACE(st);
}

static mz_status_t fail_unknown(const char *section, const char *path,
                                const char *name)
{
  char nearest[PATH_BYTES];

  mz_key_nearest(section, name, nearest, sizeof nearest);
  MZ_FAIL(MZ_ERR_CONFIG, "%s: unknown key; did you mean \"%s\"?", path,
          nearest);
}

/* Refuses names that no key and no section has. */
static mz_status_t check_names(json_t *object, const char *section)
{
  char path[PATH_BYTES];
  const char *name;
  json_t *member;

  json_object_foreach(object, name, member)
  {
    snprintf(path, sizeof path, "%s%s%s", section, *section ? "." : "", name);
    /* A name with a dot could look like a path, but is never read. */
    if (!strchr(name, '.') && mz_key_find(path)) continue;
    if (strchr(name, '.') || !mz_key_is_section(path))
      return MZ_TRACE(fail_unknown(section, path, name));
    if (json_is_null(member) || is_auto(member)) continue;
    if (!json_is_object(member))
      return MZ_TRACE(
          mz_key_refuse_at(path, member, "an object that holds keys"));
    MZ_TRY(check_names(member, path));
  }
  return MZ_OK;
}

static mz_status_t take_all(mz_config_t *config)
{
  const mz_config_values_t *values = &config->values;
  const mz_key_t *key;

  for (int i = 0; (key = mz_key_at(i)); i++)
    MZ_TRY(take_key(config, key));
  MZ_TRY(check_names(config->root, ""));
  MZ_TRY(mz_config_derive(config));
  config->train = values->train_batch_size;
  config->micro = values->train_micro_batch_size_per_gpu;
  config->accumulation = values->gradient_accumulation_steps;
  return MZ_OK;
}

mz_status_t mz_config_parse(const char *text, const char *name,
                            const char *const *assignments, int num_assignments,
                            mz_config_t **config_out)
{
  mz_config_t *config = NULL;
  mz_status_t st;

  MZ_REQUIRE(config_out, MZ_ERR_ARG, "config_out is NULL");
  *config_out = NULL;
  MZ_REQUIRE(text && name && (assignments || num_assignments == 0), MZ_ERR_ARG,
             "text, name or assignments is NULL");
  MZ_TRY_GOTO(st, mz_new(1, "configuration", &config), done);
  MZ_TRY_GOTO(st, mz_config_load_text(text, name, &config->root), done);
  for (int i = 0; i < num_assignments; i++)
    MZ_TRY_GOTO(st, mz_config_assign(config->root, assignments[i]), done);
  MZ_TRY_GOTO(st, take_all(config), done);
  *config_out = config;
  config = NULL;
done:
  mz_config_destroy(&config);
  return st;
}

mz_status_t mz_config_read(const char *path, const char *const *assignments,
                           int num_assignments, mz_config_t **config_out)
{
  char *text = NULL;
  mz_status_t st;

  MZ_REQUIRE(path && config_out, MZ_ERR_ARG, "path or config_out is NULL");
  *config_out = NULL;
  MZ_TRY(mz_config_load_file(path, &text));
  st = mz_config_parse(text, path, assignments, num_assignments, config_out);
  mz_free(text);
  return MZ_TRACE(st);
}

void mz_config_destroy(mz_config_t **config)
{
  const mz_key_t *key;

  if (!config || !*config) return;
  for (int i = 0; (key = mz_key_at(i)); i++)
    if (key->sort == MZ_SORT_USED && key->type == MZ_KEY_TEXT)
      mz_free(*(char **)(void *)((char *)&(*config)->values + key->offset));
  mz_key_free_lists(&(*config)->values);
  for (int64_t i = 0; i < (*config)->num_notes; i++)
    mz_free((*config)->notes[i]);
  mz_free((*config)->notes);
  json_decref((*config)->root);
  mz_free(*config);
  *config = NULL;
}

mz_status_t mz_config_set_device(mz_config_t *config, const char *device)
{
  mz_train_config_t *train = &config->values.train;

  MZ_REQUIRE(
      device && (strcmp(device, "cpu") == 0 || strcmp(device, "cuda") == 0),
      MZ_ERR_ARG, "device %s, allowed: cpu, cuda", device ? device : "NULL");
  snprintf(train->device, sizeof train->device, "%s", device);
  return MZ_OK;
}

bool mz_config_uses_cuda(const mz_config_values_t *values)
{
  return strcmp(values->train.device, "cuda") == 0;
}

const mz_config_values_t *mz_config_values(const mz_config_t *config)
{
  return &config->values;
}

int mz_config_num_notes(const mz_config_t *config)
{
  return (int)config->num_notes;
}

const char *mz_config_note(const mz_config_t *config, int i)
{
  return config->notes[i];
}
