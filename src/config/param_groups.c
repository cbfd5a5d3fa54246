/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer.param_groups: a list of entries, the first that matches wins. */
#include "config/keys.h"

#include "base/check.h"

#include <stdio.h>
#include <string.h>

enum { WHERE_BYTES = 80 };

static mz_status_t refuse(const char *where, const char *name,
                          const json_t *value, const char *form)
{
  char path[WHERE_BYTES + 32];

  snprintf(path, sizeof path, "%s.%s", where, name);
  return MZ_TRACE(mz_key_refuse_at(path, value, form));
}

static mz_status_t read_pattern(const char *where, const json_t *value,
                                mz_param_group_config_t *group)
{
  size_t length = json_string_length(value);

  if (length == 0 || length >= sizeof group->pattern)
    return MZ_TRACE(
        refuse(where, "pattern", value, "a string of 1 to 95 bytes"));
  memcpy(group->pattern, json_string_value(value), length + 1);
  return MZ_OK;
}

/* A number of the group by its name; NULL: none of this name. */
static double *number_of(mz_hyper_t *hyper, const char *name, int32_t *gives)
{
  if (strcmp(name, "lr") == 0) return *gives = MZ_GIVES_LR, &hyper->lr;
  if (strcmp(name, "eps") == 0) return *gives = MZ_GIVES_EPS, &hyper->eps;
  if (strcmp(name, "weight_decay") != 0) return NULL;
  *gives = MZ_GIVES_WEIGHT_DECAY;
  return &hyper->weight_decay;
}

static mz_status_t read_member(const char *where, const char *name,
                               const json_t *value,
                               mz_param_group_config_t *group)
{
  int32_t gives = 0;
  double *number = number_of(&group->hyper, name, &gives);

  if (strcmp(name, "pattern") == 0)
    return MZ_TRACE(read_pattern(where, value, group));
  if (strcmp(name, "experts") == 0) {
    if (!json_is_boolean(value))
      return MZ_TRACE(refuse(where, name, value, "true or false"));
    group->which = json_is_true(value) ? MZ_EXPERTS_ONLY : MZ_DENSE_ONLY;
  } else if (strcmp(name, "betas") == 0) {
    if (!mz_key_betas(value, &group->hyper.beta1, &group->hyper.beta2))
      return MZ_TRACE(refuse(where, name, value,
                             "a list of two numbers from 0 to below 1"));
    gives = MZ_GIVES_BETAS;
  } else if (number) {
    *number = json_number_value(value);
    if (!json_is_number(value) || !(*number >= 0))
      return MZ_TRACE(refuse(where, name, value, "a number of at least 0"));
  } else {
    MZ_FAIL(MZ_ERR_CONFIG,
            "%s.%s: unknown key; an entry has pattern, experts, lr, betas, "
            "eps, weight_decay",
            where, name);
  }
  group->hyper.gives |= gives;
  return MZ_OK;
}

mz_status_t mz_key_read_param_groups(const mz_key_t *key, const json_t *value,
                                     mz_config_values_t *values)
{
  mz_optimizer_config_t *o = &values->optimizer;
  size_t num = json_array_size(value);

  if (!json_is_array(value) || num > MZ_MAX_PARAM_GROUPS)
    return MZ_TRACE(mz_key_refuse(key, value));
  for (size_t i = 0; i < num; i++) {
    json_t *entry = json_array_get(value, i), *member;
    mz_param_group_config_t *group = &o->groups[i];
    char where[WHERE_BYTES];
    const char *name;

    snprintf(where, sizeof where, "%s[%zu]", key->path, i);
    if (!json_is_object(entry))
      return MZ_TRACE(mz_key_refuse_at(where, entry, "an object"));
    group->pattern[0] = '*';
    json_object_foreach(entry, name, member)
    {
      MZ_TRY(read_member(where, name, member, group));
    }
  }
  o->num_groups = (int32_t)num;
  return MZ_OK;
}

/* Puts @p value where the entry has it. @return 0, or -1 without memory. */
static int put(json_t *entry, bool has, const char *name, json_t *value)
{
  if (has) return json_object_set_new(entry, name, value);
  json_decref(value);
  return 0;
}

static json_t *write_entry(const mz_param_group_config_t *g)
{
  const mz_hyper_t *h = &g->hyper;
  json_t *entry = json_pack("{s:s}", "pattern", g->pattern);

  if (put(entry, g->which != MZ_ALL, "experts",
          json_boolean(g->which == MZ_EXPERTS_ONLY)) == 0 &&
      put(entry, h->gives & MZ_GIVES_LR, "lr", json_real(h->lr)) == 0 &&
      put(entry, h->gives & MZ_GIVES_BETAS, "betas",
          json_pack("[f, f]", h->beta1, h->beta2)) == 0 &&
      put(entry, h->gives & MZ_GIVES_EPS, "eps", json_real(h->eps)) == 0 &&
      put(entry, h->gives & MZ_GIVES_WEIGHT_DECAY, "weight_decay",
          json_real(h->weight_decay)) == 0)
    return entry;
  json_decref(entry);
  return NULL;
}

json_t *mz_key_write_param_groups(const mz_key_t *key,
                                  const mz_config_values_t *values)
{
  const mz_optimizer_config_t *o = &values->optimizer;
  json_t *list = json_array();

  for (int32_t i = 0; list && i < o->num_groups; i++) {
    if (json_array_append_new(list, write_entry(&o->groups[i])) == 0) continue;
    json_decref(list);
    list = NULL;
  }
  return list;
}
