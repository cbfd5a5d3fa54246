/* SPDX-License-Identifier: Apache-2.0 */
/* One value of one key: type and range, into its field and back. */
#include "config/keys.h"

#include "base/alloc.h"
#include "base/check.h"
#include "config/text.h"

#include <string.h>
#include <strings.h>

enum { FORM_BYTES = 512, FOUND_BYTES = 80 };

mz_status_t mz_key_refuse_at(const char *path, const json_t *value,
                             const char *form)
{
  mz_text_t found = {0};
  mz_status_t st = mz_text_add_json(&found, value, -1);

  if (st == MZ_OK)
    st = MZ_ERROR(MZ_ERR_CONFIG, "%s: found %.*s%s, allowed: %s", path,
                  FOUND_BYTES, found.text,
                  found.bytes > FOUND_BYTES ? "..." : "", form);
  mz_text_free(&found);
  return st;
}

mz_status_t mz_key_refuse(const mz_key_t *key, const json_t *value)
{
  char form[FORM_BYTES];

  mz_key_form(key, form, sizeof form);
  return MZ_TRACE(mz_key_refuse_at(key->path, value, form));
}

/* The integer of an integer or of an integral real such as 5e8. */
static bool integer_value(const json_t *value, int64_t *out)
{
  double real = json_real_value(value);

  if (json_is_integer(value)) {
    *out = json_integer_value(value);
    return true;
  }
  if (!json_is_real(value) || real != floor(real) || fabs(real) >= 0x1p63)
    return false;
  *out = (int64_t)real;
  return true;
}

static bool in_range(const mz_key_t *key, double x)
{
  return (key->above ? x > key->min : x >= key->min) &&
         (key->below ? x < key->max : x <= key->max);
}

static const mz_choice_t *choice_of(const mz_key_t *key, const json_t *value)
{
  const char *text = json_string_value(value);

  if (!text) return NULL;
  for (const mz_choice_t *c = key->choices; c->name; c++) {
    int differs =
        key->case_free ? strcasecmp(c->name, text) : strcmp(c->name, text);
    if (differs == 0) return c;
  }
  return NULL;
}

mz_status_t mz_key_check(const mz_key_t *key, const json_t *value)
{
  const mz_choice_t *choice = NULL;
  bool good = true;
  int64_t integer;

  if (mz_key_nullable(key) && json_is_null(value)) return MZ_OK;
  MZ_REQUIRE(!key->later_list || !json_is_array(value), MZ_ERR_UNSUPPORTED,
             "not supported yet: %s as a list, a value by parameter group",
             key->path);
  if (key->choices) {
    choice = choice_of(key, value);
    good = choice != NULL;
  } else if (key->type == MZ_KEY_BOOL) {
    good = json_is_boolean(value);
  } else if (key->type == MZ_KEY_INT) {
    good = integer_value(value, &integer) && in_range(key, (double)integer);
  } else if (key->type == MZ_KEY_REAL) {
    good = json_is_number(value) && in_range(key, json_number_value(value));
  } else if (key->type == MZ_KEY_TEXT) {
    good = json_is_string(value) && json_string_length(value) > 0;
  } else {
    good = !json_is_null(value);
  }
  if (!good) return MZ_TRACE(mz_key_refuse(key, value));
  MZ_REQUIRE(!choice || choice->value != MZ_CHOICE_LATER, MZ_ERR_UNSUPPORTED,
             "not supported yet: %s (found \"%s\")", key->path,
             json_string_value(value));
  return MZ_OK;
}

mz_status_t mz_key_store(const mz_key_t *key, const json_t *value,
                         mz_config_values_t *values)
{
  void *field;
  const char *text = json_string_value(value);
  int64_t integer = 0;
  bool flag = json_is_true(value);
  double real = json_number_value(value);

  if (json_is_null(value)) return MZ_OK;
  if (key->read) return MZ_TRACE(key->read(key, value, values));
  if (key->offset == MZ_NO_FIELD) return MZ_OK;
  field = (char *)values + key->offset;
  switch (key->type) {
  case MZ_KEY_BOOL:
    memcpy(field, &flag, sizeof flag);
    break;
  case MZ_KEY_INT:
    integer_value(value, &integer);
    memcpy(field, &integer, sizeof integer);
    break;
  case MZ_KEY_REAL:
    memcpy(field, &real, sizeof real);
    break;
  case MZ_KEY_TEXT:
    return MZ_TRACE(mz_string_copy(text, (char **)field));
  case MZ_KEY_WORD:
    memcpy(field, text, strlen(text) + 1);
    break;
  case MZ_KEY_CHOICE:
    memcpy(field, &choice_of(key, value)->value, sizeof(int));
    break;
  case MZ_KEY_HAND:
    break;
  }
  return MZ_OK;
}

static const char *choice_name(const mz_key_t *key, int value)
{
  for (const mz_choice_t *c = key->choices; c->name; c++)
    if (c->value == value) return c->name;
  return NULL;
}

json_t *mz_key_load(const mz_key_t *key, const mz_config_values_t *values)
{
  const void *field;
  const char *name;
  int64_t integer;
  int choice;

  if (key->write) return key->write(key, values);
  if (key->offset == MZ_NO_FIELD) return json_null();
  field = (const char *)values + key->offset;
  switch (key->type) {
  case MZ_KEY_BOOL:
    return json_boolean(*(const bool *)field);
  case MZ_KEY_INT:
    integer = *(const int64_t *)field;
    /* 0 where it is no allowed value stands for "not given". */
    return in_range(key, (double)integer) ? json_integer(integer) : json_null();
  case MZ_KEY_REAL:
    return json_real(*(const double *)field);
  case MZ_KEY_TEXT:
    name = *(char *const *)field;
    return name ? json_string(name) : json_null();
  case MZ_KEY_WORD:
    return json_string((const char *)field);
  case MZ_KEY_CHOICE:
    memcpy(&choice, field, sizeof choice);
    name = choice_name(key, choice);
    return name ? json_string(name) : json_null();
  case MZ_KEY_HAND:
    break;
  }
  return json_null();
}
