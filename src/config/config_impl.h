/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration while it is read: the JSON, the values, the notes. */
#ifndef MZ_CONFIG_IMPL_H
#define MZ_CONFIG_IMPL_H

#include <jansson.h>
#include <moezero/config.h>

struct mz_config {
  mz_config_values_t values;
  json_t *root;
  /* train_batch_size, micro-batch and accumulation as given; 0: not given */
  int64_t train, micro, accumulation;
  char **notes;
  int64_t num_notes, notes_capacity;
};

/** Parses @p text; @p name stands for the file in messages. */
mz_status_t mz_config_load_text(const char *text, const char *name,
                                json_t **root_out);

/** Reads a whole file as zero-terminated text. */
mz_status_t mz_config_load_file(const char *path, char **text_out);

/** Does one "key.path=value". */
mz_status_t mz_config_assign(json_t *root, const char *assignment);

/** Puts @p value (a reference that is taken) at @p path, making the objects on
 * the way. */
mz_status_t mz_config_put(json_t *root, const char *path, json_t *value);

/** What stands at @p path; NULL: nothing. Borrowed from @p root. */
json_t *mz_config_at(json_t *root, const char *path);

/** The same, but NULL also for null and for "auto", which is not given. */
json_t *mz_config_given(const mz_config_t *config, const char *path);

/** Adds a note for the user (printf form). */
mz_status_t mz_config_add_note(mz_config_t *config, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/** Fills what depends on other keys and checks keys against each other. */
mz_status_t mz_config_derive(mz_config_t *config);

/** The MoE layers, after the model is known. */
mz_status_t mz_config_derive_moe(mz_config_t *config);

#endif
