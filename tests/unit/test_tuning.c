/* SPDX-License-Identifier: Apache-2.0 */
/* tuning.json of a run's folder. */
#include "train/tuning.h"

#include "base/alloc.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char base[64];
static mz_folder_t folder;

static void open_folder(void)
{
  strcpy(base, "/tmp/mz-test-tuning-XXXXXX");
  cr_assert_not_null(mkdtemp(base));
  cr_assert_eq(mz_folder_open(base, 0, "metrics.jsonl", false, &folder), MZ_OK);
}

static void remove_folder(void)
{
  char command[128];

  mz_folder_close(&folder);
  snprintf(command, sizeof command, "rm -rf %s", base);
  cr_assert_eq(system(command), 0);
}

TestSuite(tuning, .init = open_folder, .fini = remove_folder);

static void expect_text(const char *expected)
{
  char *text = NULL;

  cr_assert_eq(mz_tuning_read(&folder, &text), MZ_OK, "%s", mz_error_last());
  cr_assert_str_eq(text, expected);
  mz_free(text);
}

Test(tuning, a_table_goes_into_the_folder_and_back)
{
  const char *text = "cublaslt 130000 sm 90\nt 0 768 768\ng \"\\ \n";

  expect_text("");
  cr_assert_eq(mz_tuning_write(&folder, text), MZ_OK);
  expect_text(text);
  cr_assert_eq(mz_tuning_write(&folder, "another\n"), MZ_OK);
  expect_text("another\n");
}

static void refused(const char *json, const char *reason)
{
  char *text = (char *)&text;

  cr_assert_eq(mz_folder_write(&folder, MZ_TUNING_NAME, json), MZ_OK);
  cr_assert_eq(mz_tuning_read(&folder, &text), MZ_ERR_DATA);
  cr_assert_null(text);
  cr_assert(strstr(mz_error_message(), MZ_TUNING_NAME), "%s",
            mz_error_message());
  cr_assert(strstr(mz_error_message(), reason), "%s", mz_error_message());
}

Test(tuning, another_file_is_refused_with_its_name)
{
  refused("{\"table\": [\"a\", ", "tuning.json:1:");
  refused("[]", "it has no list \"table\"");
  refused("{\"table\": \"a\"}", "it has no list \"table\"");
  refused("{\"table\": [\"a\", 2]}", "line 2 of its table is no text");
}

Test(tuning, no_memory_is_said)
{
  char *text = NULL;

  cr_assert_eq(mz_tuning_write(&folder, "a\nb\n"), MZ_OK);
  mz_alloc_fail_at(1);
  cr_assert_eq(mz_tuning_read(&folder, &text), MZ_ERR_NOMEM);
  cr_assert_null(text);
  mz_alloc_fail_at(0);
}
