/* SPDX-License-Identifier: Apache-2.0 */
#include "config/keys.h"

#include <stdio.h>
#include <string.h>

enum { NAME_LIMIT = 64 }; /* longest name that edit distances look at */

static const mz_key_list_t *const lists[] = {
    &mz_keys_model, &mz_keys_run,   &mz_keys_optimizer,
    &mz_keys_zero,  &mz_keys_tools, &mz_keys_debug};

const mz_key_t *mz_key_at(int i)
{
  for (size_t l = 0; l < sizeof lists / sizeof lists[0]; l++) {
    if (i < lists[l]->num_keys) return &lists[l]->keys[i];
    i -= lists[l]->num_keys;
  }
  return NULL;
}

const mz_key_t *mz_key_find(const char *path)
{
  const mz_key_t *key;

  for (int i = 0; (key = mz_key_at(i)); i++)
    if (strcmp(key->path, path) == 0) return key;
  return NULL;
}

/* What follows "section." in path; NULL: path is not in the section. */
static const char *path_below(const char *path, const char *section)
{
  size_t length = strlen(section);

  if (length == 0) return path;
  if (strncmp(path, section, length) != 0 || path[length] != '.') return NULL;
  return path + length + 1;
}

bool mz_key_is_section(const char *path)
{
  const mz_key_t *key;

  for (int i = 0; (key = mz_key_at(i)); i++)
    if (path_below(key->path, path)) return true;
  return false;
}

/* Levenshtein 1966: insertions, deletions and changes of one letter. */
static int edit_distance(const char *a, size_t length_a, const char *b,
                         size_t length_b)
{
  int row[NAME_LIMIT + 1];

  for (size_t j = 0; j <= length_b; j++)
    row[j] = (int)j;
  for (size_t i = 1; i <= length_a; i++) {
    int diagonal = row[0];
    row[0] = (int)i;
    for (size_t j = 1; j <= length_b; j++) {
      int change = diagonal + (a[i - 1] != b[j - 1]);
      int single = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
      diagonal = row[j];
      row[j] = change < single ? change : single;
    }
  }
  return row[length_b];
}

void mz_key_nearest(const char *section, const char *name, char *nearest,
                    size_t nearest_bytes)
{
  size_t length = strnlen(name, NAME_LIMIT);
  int best = 2 * NAME_LIMIT;
  const mz_key_t *key;

  nearest[0] = '\0';
  for (int i = 0; (key = mz_key_at(i)); i++) {
    const char *below = path_below(key->path, section);
    size_t known = below ? strcspn(below, ".") : 0;
    int distance;

    if (known == 0 || known > NAME_LIMIT) continue;
    distance = edit_distance(name, length, below, known);
    if (distance >= best) continue;
    best = distance;
    snprintf(nearest, nearest_bytes, "%.*s", (int)known, below);
  }
}

bool mz_key_nullable(const mz_key_t *key)
{
  return key->fallback && strcmp(key->fallback, "null") == 0;
}

bool mz_key_has_default(const mz_key_t *key)
{
  return key->fallback && key->fallback[0] != '=';
}

static void number_form(const mz_key_t *key, const char *noun, char *form,
                        size_t bytes)
{
  const char *from = key->above ? "above" : "of at least";

  if (isinf(key->min))
    snprintf(form, bytes, "%s", noun);
  else if (isinf(key->max) || key->max > MZ_INT_MAX)
    snprintf(form, bytes, "%s %s %.17g", noun, from, key->min);
  else
    snprintf(form, bytes, "%s from %.17g to %s%.17g", noun, key->min,
             key->below ? "below " : "", key->max);
}

static void choice_form(const mz_key_t *key, char *form, size_t bytes)
{
  size_t used = (size_t)snprintf(form, bytes, "one of ");

  for (const mz_choice_t *c = key->choices; c->name && used < bytes; c++)
    used += (size_t)snprintf(form + used, bytes - used, "%s\"%s\"",
                             c == key->choices ? "" : ", ", c->name);
}

void mz_key_form(const mz_key_t *key, char *form, size_t form_bytes)
{
  size_t used;

  if (key->choices) {
    choice_form(key, form, form_bytes);
  } else {
    switch (key->type) {
    case MZ_KEY_BOOL:
      snprintf(form, form_bytes, "true or false");
      break;
    case MZ_KEY_INT:
      number_form(key, "an integer", form, form_bytes);
      break;
    case MZ_KEY_REAL:
      number_form(key, "a number", form, form_bytes);
      break;
    case MZ_KEY_TEXT:
      snprintf(form, form_bytes, "a string that is not empty");
      break;
    case MZ_KEY_WORD:
    case MZ_KEY_CHOICE:
    case MZ_KEY_HAND:
      snprintf(form, form_bytes, "%s", key->form);
      break;
    }
  }
  used = strlen(form);
  if (mz_key_nullable(key) && used < form_bytes)
    snprintf(form + used, form_bytes - used, " or null");
}
