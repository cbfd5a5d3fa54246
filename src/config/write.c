/* SPDX-License-Identifier: Apache-2.0 */
/* The table and the values written out. */
#include "config/config_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "config/keys.h"
#include "config/text.h"

enum { FORM_BYTES = 512 };

/* Whether a key of the table appears in a resolved configuration. */
static bool is_written(const mz_key_t *key, const mz_config_values_t *values)
{
  if (key->sort != MZ_SORT_USED) return false;
#ifndef MZ_TEST_HOOKS
  if (key->hooks) return false;
#endif
  if (values->model.hidden_size == 0 && mz_key_needs_model(key)) return false;
  return mz_key_fits_schedule(key, values->scheduler.type);
}

/* A hook that is off is left out, so that any build reads the text. */
static bool is_off(const json_t *value)
{
  return json_is_false(value) ||
         (json_is_integer(value) && json_integer_value(value) == 0);
}

mz_status_t mz_config_to_json(const mz_config_t *config, char **text_out)
{
  json_t *root = json_object();
  mz_text_t text = {0};
  const mz_key_t *key;
  mz_status_t st = MZ_OK;

  MZ_REQUIRE_GOTO(root, st, done, MZ_ERR_NOMEM, "no memory for JSON");
  for (int i = 0; (key = mz_key_at(i)); i++) {
    json_t *value;

    if (!is_written(key, &config->values)) continue;
    value = mz_key_load(key, &config->values);
    MZ_REQUIRE_GOTO(value, st, done, MZ_ERR_NOMEM, "%s: no memory for JSON",
                    key->path);
    if (json_is_null(value) || (key->hooks && is_off(value))) {
      json_decref(value);
      continue;
    }
    MZ_TRY_GOTO(st, mz_config_put(root, key->path, value), done);
  }
  MZ_TRY_GOTO(st, mz_text_add_json(&text, root, 0), done);
  MZ_TRY_GOTO(st, mz_text_add(&text, "\n"), done);
  *text_out = text.text;
  text = (mz_text_t){0};
done:
  mz_text_free(&text);
  json_decref(root);
  return st;
}

void mz_config_free_text(char **text)
{
  if (!text) return;
  mz_free(*text);
  *text = NULL;
}

static const char *type_name(const mz_key_t *key)
{
  switch (key->type) {
  case MZ_KEY_BOOL:
    return "boolean";
  case MZ_KEY_INT:
    return "integer";
  case MZ_KEY_REAL:
    return "number";
  case MZ_KEY_TEXT:
  case MZ_KEY_WORD:
  case MZ_KEY_CHOICE:
    return "string";
  case MZ_KEY_HAND:
    break;
  }
  return "value";
}

static const char *sort_name(const mz_key_t *key)
{
  switch (key->sort) {
  case MZ_SORT_USED:
    return key->hooks ? "with -Dtest_hooks=true" : "used";
  case MZ_SORT_NOTED:
  case MZ_SORT_IDLE:
    return "nothing to do";
  case MZ_SORT_FIXED:
    return "nothing to do, other values refused";
  case MZ_SORT_LATER:
    return "not supported yet";
  case MZ_SORT_NEVER:
    break;
  }
  return "refused";
}

static mz_status_t describe_text(const mz_key_t *key, mz_text_t *text)
{
  char form[FORM_BYTES];

  mz_key_form(key, form, sizeof form);
  MZ_TRY(
      mz_text_add(text, "%s\n    %s: %s\n", key->path, type_name(key), form));
  if (key->fallback)
    MZ_TRY(mz_text_add(text, "    default: %s\n",
                       key->fallback + !mz_key_has_default(key)));
  if (key->sort != MZ_SORT_USED || key->hooks)
    MZ_TRY(mz_text_add(text, "    %s\n", sort_name(key)));
  return MZ_TRACE(mz_text_add(text, "    %s\n", key->meaning));
}

static mz_status_t describe_json(const mz_key_t *key, mz_text_t *text)
{
  char form[FORM_BYTES];
  const char *rule =
      mz_key_has_default(key) || !key->fallback ? NULL : key->fallback + 1;
  json_t *row, *fallback = NULL;
  mz_status_t st;

  mz_key_form(key, form, sizeof form);
  if (mz_key_has_default(key))
    fallback = json_loads(key->fallback, JSON_DECODE_ANY, NULL);
  row = json_pack("{s:s, s:s, s:s, s:o*, s:s*, s:s, s:s}", "name", key->path,
                  "type", type_name(key), "allowed", form, "default", fallback,
                  "default_rule", rule, "status", sort_name(key), "meaning",
                  key->meaning);
  MZ_REQUIRE(row, MZ_ERR_NOMEM, "%s: no memory for JSON", key->path);
  st = mz_text_add_json(text, row, 1);
  json_decref(row);
  return MZ_TRACE(st);
}

mz_status_t mz_config_describe(bool json, char **text_out)
{
  mz_text_t text = {0};
  const mz_key_t *key;
  mz_status_t st;

  if (json) MZ_TRY_GOTO(st, mz_text_add(&text, "[\n  "), done);
  for (int i = 0; (key = mz_key_at(i)); i++) {
    if (json && i > 0) MZ_TRY_GOTO(st, mz_text_add(&text, ",\n  "), done);
    st = json ? describe_json(key, &text) : describe_text(key, &text);
    MZ_TRY_GOTO(st, st, done);
  }
  if (json) MZ_TRY_GOTO(st, mz_text_add(&text, "\n]\n"), done);
  *text_out = text.text;
  text = (mz_text_t){0};
  st = MZ_OK;
done:
  mz_text_free(&text);
  return st;
}
