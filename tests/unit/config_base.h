/* SPDX-License-Identifier: Apache-2.0 */
/* A small configuration and its variations, for the tests of src/config. */
#ifndef MZ_TEST_CONFIG_BASE_H
#define MZ_TEST_CONFIG_BASE_H

#include <criterion/criterion.h>
#include <moezero/config.h>

#define BASE                                                                   \
  "{\"model\": {\"vocab_size\": 64, \"hidden_size\": 32, "                     \
  "\"num_hidden_layers\": 4, \"num_attention_heads\": 2, "                     \
  "\"max_position_embeddings\": 16}, \"train_batch_size\": 4}"

/* BASE with the assignments that follow. */
#define LOAD(config, ...)                                                      \
  mz_config_parse(                                                             \
      BASE, "base.json", (const char *const[]){__VA_ARGS__},                   \
      (int)(sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *)),      \
      (config))

/* The call writes its configuration to "none": there must be none. */
#define EXPECT_ERROR(call, status, text)                                       \
  do {                                                                         \
    mz_config_t *config_ = NULL;                                               \
    mz_config_t **none = &config_;                                             \
    cr_expect_eq((call), (status), "%s", mz_error_last());                     \
    cr_expect_str_eq(mz_error_message(), (text));                              \
    cr_expect_null(config_);                                                   \
    mz_error_clear();                                                          \
  } while (0)

/* The error of BASE with one assignment. */
#define REFUSED(assignment, text)                                              \
  EXPECT_ERROR(LOAD(none, assignment), MZ_ERR_CONFIG, text)
#define LATER(assignment, text)                                                \
  EXPECT_ERROR(LOAD(none, assignment), MZ_ERR_UNSUPPORTED, text)
#define PARSE(text) mz_config_parse((text), "x.json", NULL, 0, none)

/* Reads BASE with one assignment; fails the test if that fails. */
static inline mz_config_t *load(const char *assignment)
{
  mz_config_t *config = NULL;

  cr_assert_eq(mz_config_parse(BASE, "base.json", &assignment,
                               assignment ? 1 : 0, &config),
               MZ_OK, "%s: %s", assignment, mz_error_last());
  return config;
}

#endif
