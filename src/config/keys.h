/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The table of keys: what `gpt_moe config` prints is what the reader checks.
 *
 * Rows stand in the order in which they are checked, so a key that decides
 * about others (optimizer.type) stands before them. A row with a field is read
 * into it and written back by mz_config_to_json; keys whose value needs others
 * to be understood have type MZ_KEY_HAND and are read in moe.c or lists.c.
 */
#ifndef MZ_CONFIG_KEYS_H
#define MZ_CONFIG_KEYS_H

#include <jansson.h>
#include <math.h>
#include <moezero/config.h>
#include <stddef.h>

typedef enum mz_key_type {
  MZ_KEY_BOOL,   /* bool */
  MZ_KEY_INT,    /* int64_t */
  MZ_KEY_REAL,   /* double */
  MZ_KEY_TEXT,   /* char *, owned by the values; not empty */
  MZ_KEY_WORD,   /* char[8], one of the choices */
  MZ_KEY_CHOICE, /* an enum or int, one of the choices */
  MZ_KEY_HAND    /* read and written by functions of its own */
} mz_key_type_t;

typedef enum mz_key_sort {
  MZ_SORT_USED,  /* honoured */
  MZ_SORT_NOTED, /* nothing to do here: a note whenever it is given */
  MZ_SORT_FIXED, /* the same, but only for the default; else refused */
  MZ_SORT_IDLE,  /* a switch above it is off: a note unless it is the default */
  MZ_SORT_LATER, /* "not supported yet" unless it is the default */
  MZ_SORT_NEVER  /* of another product: refused unless switched off */
} mz_key_sort_t;

enum { MZ_CHOICE_LATER = -1 }; /* known, refused as "not supported yet" */

/** Several names may have one value; the first one is written back. */
typedef struct mz_choice {
  const char *name; /* NULL ends a list */
  int value;
} mz_choice_t;

#define MZ_NO_FIELD ((size_t)-1)
#define MZ_REQUIRED "=required"

typedef struct mz_key mz_key_t;
struct mz_key {
  const char *path;
  mz_key_type_t type;
  mz_key_sort_t sort;
  /* JSON; "null" also lets null stand for "not given". Or "=" and the rule of a
     default that depends on other keys; NULL: none. */
  const char *fallback;
  double min, max;            /* INT and REAL */
  bool above, below;          /* the bound itself is not allowed */
  bool later_list;            /* a list instead: "not supported yet" */
  bool case_free;             /* choices are compared without case */
  bool hooks;                 /* only in a build with -Dtest_hooks=true */
  const mz_choice_t *choices; /* WORD and CHOICE; may be given for TEXT */
  size_t offset;              /* in mz_config_values_t, or MZ_NO_FIELD */
  const char *meaning;        /* or the reason of NOTED, FIXED, IDLE, NEVER */
  const char *form;           /* HAND: type and range in words */
  /* HAND: reads a value, already known not to be null; NULL: read elsewhere. */
  mz_status_t (*read)(const mz_key_t *key, const json_t *value,
                      mz_config_values_t *values);
  /* Makes the value for mz_config_to_json; NULL: from the field. A missing
     value is written as JSON null and left out. */
  json_t *(*write)(const mz_key_t *key, const mz_config_values_t *values);
};

/* The offset of a field; a type that does not fit is a compiler warning. */
#define MZ_FIELD_(type_, field_)                                               \
  (offsetof(mz_config_values_t, field_) +                                      \
   0 * sizeof((type_ *)0 == &((mz_config_values_t *)0)->field_))

#define MZ_USED_(path_, type_, fallback_, offset_, meaning_)                   \
  .path = (path_), .type = (type_), .sort = MZ_SORT_USED,                      \
  .fallback = (fallback_), .offset = (offset_), .meaning = (meaning_)

#define MZ_BOOL(path_, field_, fallback_, meaning_)                            \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_BOOL, fallback_, MZ_FIELD_(bool, field_), meaning_) \
  }
#define MZ_INT(path_, field_, fallback_, min_, max_, meaning_)                 \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_INT, fallback_, MZ_FIELD_(int64_t, field_),         \
             meaning_),                                                        \
        .min = (min_), .max = (max_)                                           \
  }
#define MZ_REAL(path_, field_, fallback_, min_, max_, meaning_)                \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_REAL, fallback_, MZ_FIELD_(double, field_),         \
             meaning_),                                                        \
        .min = (min_), .max = (max_)                                           \
  }
/* Above min_. */
#define MZ_ABOVE(path_, field_, fallback_, min_, meaning_)                     \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_REAL, fallback_, MZ_FIELD_(double, field_),         \
             meaning_),                                                        \
        .min = (min_), .max = INFINITY, .above = true                          \
  }
/* In [0, 1). */
#define MZ_FRACTION(path_, field_, fallback_, meaning_)                        \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_REAL, fallback_, MZ_FIELD_(double, field_),         \
             meaning_),                                                        \
        .min = 0, .max = 1, .below = true                                      \
  }
#define MZ_TEXT(path_, field_, fallback_, choices_, meaning_)                  \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_TEXT, fallback_, MZ_FIELD_(char *, field_),         \
             meaning_),                                                        \
        .choices = (choices_)                                                  \
  }
#define MZ_CHOICE(path_, field_, fallback_, choices_, meaning_)                \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_CHOICE, fallback_,                                  \
             offsetof(mz_config_values_t, field_), meaning_),                  \
        .choices = (choices_)                                                  \
  }
#define MZ_HAND(path_, offset_, fallback_, form_, read_, write_, meaning_)     \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_HAND, fallback_, offset_, meaning_),                \
        .form = (form_), .read = (read_), .write = (write_)                    \
  }
/* Keys without a field; type_ without the prefix MZ_KEY_. */
#define MZ_OTHER_(sort_, path_, type_, fallback_, meaning_)                    \
  {                                                                            \
    .path = (path_), .type = MZ_KEY_##type_, .sort = (sort_),                  \
    .fallback = (fallback_), .min = -INFINITY, .max = INFINITY,                \
    .offset = MZ_NO_FIELD, .meaning = (meaning_), .form = "a value"            \
  }
#define MZ_NOTED(path_, type_, fallback_, why_)                                \
  MZ_OTHER_(MZ_SORT_NOTED, path_, type_, fallback_, why_)
#define MZ_FIXED(path_, type_, fallback_, why_)                                \
  MZ_OTHER_(MZ_SORT_FIXED, path_, type_, fallback_, why_)
#define MZ_IDLE(path_, type_, fallback_, why_)                                 \
  MZ_OTHER_(MZ_SORT_IDLE, path_, type_, fallback_, why_)
#define MZ_LATER(path_, type_, fallback_, meaning_)                            \
  MZ_OTHER_(MZ_SORT_LATER, path_, type_, fallback_, meaning_)
#define MZ_NEVER(path_, type_, fallback_, why_)                                \
  MZ_OTHER_(MZ_SORT_NEVER, path_, type_, fallback_, why_)
/* A choice of which only names with a value >= 0 are supported. */
#define MZ_LATER_CHOICE(path_, fallback_, choices_, meaning_)                  \
  {                                                                            \
    .path = (path_), .type = MZ_KEY_CHOICE, .sort = MZ_SORT_LATER,             \
    .fallback = (fallback_), .choices = (choices_), .offset = MZ_NO_FIELD,     \
    .meaning = (meaning_)                                                      \
  }

#define MZ_INT_MAX 2147483647.0

/** Rows of one file of the table. */
typedef struct mz_key_list {
  const mz_key_t *keys;
  int num_keys;
} mz_key_list_t;

#define MZ_KEY_LIST(array)                                                     \
  {                                                                            \
    (array), (int)(sizeof(array) / sizeof *(array))                            \
  }

extern const mz_key_list_t mz_keys_model, mz_keys_run, mz_keys_debug,
    mz_keys_zero, mz_keys_optimizer, mz_keys_tools;

/** The i-th key of the whole table, in checking order; NULL past the end. */
const mz_key_t *mz_key_at(int i);

/** The key of this path; NULL: none. */
const mz_key_t *mz_key_find(const char *path);

/** Whether keys with the prefix "path." exist. */
bool mz_key_is_section(const char *path);

/** The known name nearest to @p name in the section @p section ("": the top),
 * written to @p nearest. */
void mz_key_nearest(const char *section, const char *name, char *nearest,
                    size_t nearest_bytes);

/** Whether a key means something with a schedule; true outside of scheduler. */
bool mz_key_fits_schedule(const mz_key_t *key, mz_schedule_type_t type);

/** Whether a key is of the layers of the GPT that the section model describes;
 * without that section it is neither required nor allowed. */
bool mz_key_needs_model(const mz_key_t *key);

/** Whether null stands for "not given". */
bool mz_key_nullable(const mz_key_t *key);

/** The default is JSON text, not a rule. */
bool mz_key_has_default(const mz_key_t *key);

/** Writes the allowed values in words. */
void mz_key_form(const mz_key_t *key, char *form, size_t form_bytes);

/** Checks type and range. @return MZ_OK, MZ_ERR_CONFIG, MZ_ERR_UNSUPPORTED (a
 * choice that comes later), MZ_ERR_NOMEM. */
mz_status_t mz_key_check(const mz_key_t *key, const json_t *value);

/** Reads a checked value into the field of a row that has one. */
mz_status_t mz_key_store(const mz_key_t *key, const json_t *value,
                         mz_config_values_t *values);

/** The JSON of a USED row's field: new reference, NULL when out of memory. */
json_t *mz_key_load(const mz_key_t *key, const mz_config_values_t *values);

/** Records "PATH: found VALUE, allowed: FORM". @return MZ_ERR_CONFIG, or
 * MZ_ERR_NOMEM. */
mz_status_t mz_key_refuse_at(const char *path, const json_t *value,
                             const char *form);
mz_status_t mz_key_refuse(const mz_key_t *key, const json_t *value);

/** Reads a list of two numbers from 0 to below 1. @return whether it is one. */
bool mz_key_betas(const json_t *value, double *beta1_out, double *beta2_out);

/* Functions of HAND rows (lists.c, moe.c, param_groups.c). */
mz_status_t mz_key_read_param_groups(const mz_key_t *key, const json_t *value,
                                     mz_config_values_t *values);
json_t *mz_key_write_param_groups(const mz_key_t *key,
                                  const mz_config_values_t *values);
mz_status_t mz_key_read_paths(const mz_key_t *key, const json_t *value,
                              mz_config_values_t *values);
json_t *mz_key_write_paths(const mz_key_t *key,
                           const mz_config_values_t *values);
mz_status_t mz_key_read_betas(const mz_key_t *key, const json_t *value,
                              mz_config_values_t *values);
json_t *mz_key_write_betas(const mz_key_t *key,
                           const mz_config_values_t *values);
mz_status_t mz_key_read_ids(const mz_key_t *key, const json_t *value,
                            mz_config_values_t *values);
json_t *mz_key_write_ids(const mz_key_t *key, const mz_config_values_t *values);
mz_status_t mz_key_read_logits(const mz_key_t *key, const json_t *value,
                               mz_config_values_t *values);
json_t *mz_key_write_logits(const mz_key_t *key,
                            const mz_config_values_t *values);
json_t *mz_key_write_optimizer_type(const mz_key_t *key,
                                    const mz_config_values_t *values);
json_t *mz_key_write_moe_list(const mz_key_t *key,
                              const mz_config_values_t *values);
mz_status_t mz_key_read_temperature(const mz_key_t *key, const json_t *value,
                                    mz_config_values_t *values);
json_t *mz_key_write_temperature(const mz_key_t *key,
                                 const mz_config_values_t *values);
void mz_key_free_lists(mz_config_values_t *values);

#endif
