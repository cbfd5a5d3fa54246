/* SPDX-License-Identifier: Apache-2.0 */
/* Keys whose value is a list: data files, betas, the lists of debug hooks. */
#include "config/keys.h"

#include "base/alloc.h"
#include "base/check.h"

#include <string.h>

/* json_array_append_new that makes the list NULL when memory is short. */
static void append(json_t **list, json_t *value)
{
  if (*list && json_array_append_new(*list, value) == 0) return;
  json_decref(*list);
  *list = NULL;
}

/* The fields of data.train or data.valid. */
typedef struct path_list {
  int32_t *num;
  char **paths;
  double *weights;
} path_list_t;

static path_list_t path_list_of(const mz_key_t *key, mz_config_values_t *values)
{
  mz_data_config_t *data = &values->data;

  if (key->offset == offsetof(mz_config_values_t, data.train))
    return (path_list_t){&data->num_train, data->train, data->train_weight};
  return (path_list_t){&data->num_valid, data->valid, data->valid_weight};
}

/* One entry: a path or {"path": P, "weight": W}. */
static mz_status_t read_path(const mz_key_t *key, const json_t *entry,
                             const json_t *whole, path_list_t *list)
{
  const json_t *path = entry, *weight = NULL;

  if (json_is_object(entry)) {
    path = json_object_get(entry, "path");
    weight = json_object_get(entry, "weight");
    if (json_object_size(entry) != (weight ? 2 : 1))
      return MZ_TRACE(mz_key_refuse(key, whole));
  }
  if (json_string_length(path) == 0 ||
      (weight && (!json_is_number(weight) || !(json_number_value(weight) > 0))))
    return MZ_TRACE(mz_key_refuse(key, whole));
  list->weights[*list->num] = weight ? json_number_value(weight) : 1.0;
  MZ_TRY(mz_string_copy(json_string_value(path), &list->paths[*list->num]));
  ++*list->num;
  return MZ_OK;
}

mz_status_t mz_key_read_paths(const mz_key_t *key, const json_t *value,
                              mz_config_values_t *values)
{
  path_list_t list = path_list_of(key, values);

  if (!json_is_array(value))
    return MZ_TRACE(read_path(key, value, value, &list));
  if (json_array_size(value) > MZ_MAX_PATHS)
    return MZ_TRACE(mz_key_refuse(key, value));
  for (size_t i = 0; i < json_array_size(value); i++)
    MZ_TRY(read_path(key, json_array_get(value, i), value, &list));
  return MZ_OK;
}

json_t *mz_key_write_paths(const mz_key_t *key,
                           const mz_config_values_t *values)
{
  const mz_data_config_t *data = &values->data;
  bool train = key->offset == offsetof(mz_config_values_t, data.train);
  int32_t num = train ? data->num_train : data->num_valid;
  char *const *paths = train ? data->train : data->valid;
  const double *weights = train ? data->train_weight : data->valid_weight;
  json_t *list = json_array();

  for (int32_t i = 0; i < num; i++)
    append(&list,
           json_pack("{s:s, s:f}", "path", paths[i], "weight", weights[i]));
  return list;
}

bool mz_key_betas(const json_t *value, double *beta1_out, double *beta2_out)
{
  double beta[2];

  if (json_array_size(value) != 2) return false;
  for (size_t i = 0; i < 2; i++) {
    const json_t *entry = json_array_get(value, i);
    beta[i] = json_number_value(entry);
    if (!json_is_number(entry) || beta[i] < 0 || beta[i] >= 1) return false;
  }
  *beta1_out = beta[0];
  *beta2_out = beta[1];
  return true;
}

mz_status_t mz_key_read_betas(const mz_key_t *key, const json_t *value,
                              mz_config_values_t *values)
{
  if (!mz_key_betas(value, &values->optimizer.beta1, &values->optimizer.beta2))
    return MZ_TRACE(mz_key_refuse(key, value));
  return MZ_OK;
}

json_t *mz_key_write_betas(const mz_key_t *key,
                           const mz_config_values_t *values)
{
  return json_pack("[f, f]", values->optimizer.beta1, values->optimizer.beta2);
}

json_t *mz_key_write_optimizer_type(const mz_key_t *key,
                                    const mz_config_values_t *values)
{
  return json_string(values->optimizer.adam_w_mode ? "AdamW" : "Adam");
}

/* The fields of a list of ids among the debug hooks. */
typedef struct id_list {
  int32_t **ids;
  int32_t *num;
} id_list_t;

static id_list_t id_list_of(const mz_key_t *key, mz_config_values_t *values)
{
  mz_debug_config_t *debug = &values->debug;

  if (key->offset == offsetof(mz_config_values_t, debug.route_table))
    return (id_list_t){&debug->route_table, &debug->num_route_table};
  if (key->offset == offsetof(mz_config_values_t, debug.tokens_per_rank))
    return (id_list_t){&debug->tokens_per_rank, &debug->num_tokens_per_rank};
  return (id_list_t){&debug->label_mask, &debug->num_label_mask};
}

/* The length of a list as int32, or the error of the key. */
static mz_status_t list_length(const mz_key_t *key, const json_t *value,
                               int32_t *length_out)
{
  if (!json_is_array(value) || json_array_size(value) > INT32_MAX)
    return MZ_TRACE(mz_key_refuse(key, value));
  *length_out = (int32_t)json_array_size(value);
  return MZ_OK;
}

mz_status_t mz_key_read_ids(const mz_key_t *key, const json_t *value,
                            mz_config_values_t *values)
{
  id_list_t list = id_list_of(key, values);
  int32_t num = 0;

  MZ_TRY(list_length(key, value, &num));
  MZ_TRY(mz_new(num, key->path, list.ids));
  for (int32_t i = 0; i < num; i++) {
    const json_t *entry = json_array_get(value, (size_t)i);
    json_int_t id = json_integer_value(entry);
    if (!json_is_integer(entry) || id < 0 || id > INT32_MAX)
      return MZ_TRACE(mz_key_refuse(key, value));
    (*list.ids)[i] = (int32_t)id;
  }
  *list.num = num;
  return MZ_OK;
}

json_t *mz_key_write_ids(const mz_key_t *key, const mz_config_values_t *values)
{
  const mz_debug_config_t *debug = &values->debug;
  const int32_t *ids = debug->label_mask;
  int32_t num = debug->num_label_mask;
  json_t *list;

  if (key->offset == offsetof(mz_config_values_t, debug.route_table)) {
    ids = debug->route_table;
    num = debug->num_route_table;
  } else if (key->offset ==
             offsetof(mz_config_values_t, debug.tokens_per_rank)) {
    ids = debug->tokens_per_rank;
    num = debug->num_tokens_per_rank;
  }
  if (num == 0) return json_null();
  list = json_array();
  for (int32_t i = 0; i < num; i++)
    append(&list, json_integer(ids[i]));
  return list;
}

mz_status_t mz_key_read_logits(const mz_key_t *key, const json_t *value,
                               mz_config_values_t *values)
{
  mz_debug_config_t *debug = &values->debug;
  int32_t num = 0;

  MZ_TRY(list_length(key, value, &num));
  MZ_TRY(mz_new(num, key->path, &debug->fixed_logits));
  for (int32_t i = 0; i < num; i++) {
    const json_t *entry = json_array_get(value, (size_t)i);
    if (!json_is_number(entry)) return MZ_TRACE(mz_key_refuse(key, value));
    debug->fixed_logits[i] = (float)json_number_value(entry);
  }
  debug->num_fixed_logits = num;
  return MZ_OK;
}

json_t *mz_key_write_logits(const mz_key_t *key,
                            const mz_config_values_t *values)
{
  const mz_debug_config_t *debug = &values->debug;
  json_t *list;

  if (debug->num_fixed_logits == 0) return json_null();
  list = json_array();
  for (int32_t i = 0; i < debug->num_fixed_logits; i++)
    append(&list, json_real((double)debug->fixed_logits[i]));
  return list;
}

void mz_key_free_lists(mz_config_values_t *values)
{
  for (int i = 0; i < MZ_MAX_PATHS; i++) {
    mz_free(values->data.train[i]);
    mz_free(values->data.valid[i]);
  }
  mz_free(values->debug.fixed_logits);
  mz_free(values->debug.route_table);
  mz_free(values->debug.tokens_per_rank);
  mz_free(values->debug.label_mask);
}
