/* SPDX-License-Identifier: Apache-2.0 */
#include "train/folder.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char base[64], path[128];

static void make_base(void)
{
  strcpy(base, "/tmp/mz-test-folder-XXXXXX");
  cr_assert_not_null(mkdtemp(base));
  snprintf(path, sizeof path, "%s/a/b", base);
}

static void remove_base(void)
{
  char command[128];

  snprintf(command, sizeof command, "rm -rf %s", base);
  cr_assert_eq(system(command), 0);
}

TestSuite(folder, .init = make_base, .fini = remove_base);

static bool exists(const char *name)
{
  char whole[256];
  struct stat info;

  snprintf(whole, sizeof whole, "%s/%s", path, name);
  return stat(whole, &info) == 0;
}

Test(folder, rank_0_has_lock_metrics_and_log)
{
  mz_folder_t f;

  cr_assert_eq(mz_folder_open(path, 0, "sub/metrics.jsonl", false, &f), MZ_OK);
  cr_assert(f.metrics && f.log && f.lock >= 0);
  cr_assert(exists("lock") && exists("sub/metrics.jsonl") && exists("log.0"));
  mz_folder_close(&f);
  cr_assert_null(f.path);
}

Test(folder, other_ranks_have_a_log_only)
{
  mz_folder_t f;

  cr_assert_eq(mz_folder_open(path, 3, "metrics.jsonl", false, &f), MZ_OK);
  cr_assert_null(f.metrics);
  cr_assert(exists("log.3"));
  cr_assert_not(exists("lock") || exists("metrics.jsonl"));
  mz_folder_close(&f);
}

Test(folder, a_second_process_is_kept_out_until_the_first_ends)
{
  mz_folder_t f;
  pid_t child;
  int state;

  cr_assert_eq(mz_folder_open(path, 0, "metrics.jsonl", false, &f), MZ_OK);
  child = fork();
  if (child == 0) {
    mz_folder_t second;
    mz_status_t st = mz_folder_open(path, 0, "metrics.jsonl", false, &second);
    _exit(st == MZ_ERR_IO && strstr(mz_error_message(), "another run") ? 0 : 1);
  }
  cr_assert_eq(waitpid(child, &state, 0), child);
  cr_assert_eq(state, 0);
  mz_folder_close(&f);
  cr_assert_eq(mz_folder_open(path, 0, "metrics.jsonl", false, &f), MZ_OK);
  mz_folder_close(&f);
}

Test(folder, a_file_in_the_way_is_named)
{
  char file[128];
  mz_folder_t f;
  FILE *out;

  snprintf(file, sizeof file, "%s/a", base);
  out = fopen(file, "w");
  cr_assert_not_null(out);
  fclose(out);
  cr_assert_eq(mz_folder_open(path, 0, "metrics.jsonl", false, &f), MZ_ERR_IO);
  cr_assert(strstr(mz_error_message(), "/a/b: Not a directory"), "%s",
            mz_error_message());
  cr_assert_null(f.path);
}

Test(folder, texts_are_written_whole)
{
  char whole[256], read[16] = {0};
  mz_folder_t f;
  FILE *in;

  cr_assert_eq(mz_folder_open(path, 0, "metrics.jsonl", false, &f), MZ_OK);
  cr_assert_eq(mz_folder_write(&f, "config.json", "{}\n"), MZ_OK);
  snprintf(whole, sizeof whole, "%s/config.json", path);
  in = fopen(whole, "r");
  cr_assert_not_null(in);
  cr_assert_not_null(fgets(read, sizeof read, in));
  fclose(in);
  cr_assert_str_eq(read, "{}\n");
  cr_assert_not(exists("config.json.part"));
  mz_folder_close(&f);
}

Test(folder, names_of_runs_are_times)
{
  char name[64];

  mz_folder_name(name, sizeof name);
  cr_assert_eq(strncmp(name, "runs/20", 7), 0);
  cr_assert_eq(strlen(name), strlen("runs/2031-05-01-13-45-00"));
}
