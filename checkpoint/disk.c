/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/disk.h"

#include "base/alloc.h"
#include "base/check.h"
#include "checkpoint/format.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

mz_status_t mz_disk_path(char path_out[PATH_MAX], const char *format, ...)
{
  va_list args;
  int bytes;

  va_start(args, format);
  bytes = vsnprintf(path_out, PATH_MAX, format, args);
  va_end(args);
  MZ_REQUIRE(bytes > 0 && bytes < PATH_MAX, MZ_ERR_IO,
             "%.64s...: a path of %d bytes", path_out, bytes);
  return MZ_OK;
}

mz_status_t mz_disk_make_folders(const char *path)
{
  char part[PATH_MAX];
  size_t bytes = strlen(path);

  MZ_TRY(mz_disk_path(part, "%s", path));
  for (size_t i = 1; i <= bytes; i++) {
    if (part[i] != '/' && part[i] != '\0') continue;
    part[i] = '\0';
    MZ_REQUIRE(mkdir(part, 0777) == 0 || errno == EEXIST, MZ_ERR_IO, "%s: %s",
               part, strerror(errno));
    part[i] = path[i];
  }
  return MZ_OK;
}

mz_status_t mz_disk_sync_folder(const char *path)
{
  int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int result = folder < 0 ? -1 : fsync(folder), reason = errno;

  if (folder >= 0) close(folder);
  /* Some file systems cannot sync a folder: their renames need none. */
  MZ_REQUIRE(result == 0 || (folder >= 0 && reason == EINVAL), MZ_ERR_IO,
             "%s: %s", path, strerror(reason));
  return MZ_OK;
}

mz_status_t mz_disk_pwrite(int file, const char *path, const void *bytes,
                           size_t num, int64_t at)
{
  const char *from = bytes;

  while (num > 0) {
    ssize_t done = pwrite(file, from, num, at);

    if (done < 0 && errno == EINTR) continue;
    MZ_REQUIRE(done > 0, MZ_ERR_IO, "%s: %s", path,
               done < 0 ? strerror(errno) : "nothing could be written");
    from += done;
    num -= (size_t)done;
    at += done;
  }
  return MZ_OK;
}

mz_status_t mz_disk_pread(int file, const char *path, void *bytes, size_t num,
                          int64_t at)
{
  char *to = bytes;

  while (num > 0) {
    ssize_t done = pread(file, to, num, at);

    if (done < 0 && errno == EINTR) continue;
    MZ_REQUIRE(done >= 0, MZ_ERR_IO, "%s: %s", path, strerror(errno));
    MZ_REQUIRE(done > 0, MZ_ERR_DATA,
               "%s: truncated: it ends at byte %" PRId64
               ", %zu bytes are missing",
               path, at, num);
    to += done;
    num -= (size_t)done;
    at += done;
  }
  return MZ_OK;
}

mz_status_t mz_disk_write(const char *path, const void *bytes, size_t num)
{
  int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  mz_status_t st;

  MZ_REQUIRE(file >= 0, MZ_ERR_IO, "%s: %s", path, strerror(errno));
  st = mz_disk_pwrite(file, path, bytes, num, 0);
  if (st == MZ_OK && fsync(file) != 0)
    st = MZ_ERROR(MZ_ERR_IO, "%s: %s", path, strerror(errno));
  if (close(file) != 0 && st == MZ_OK)
    st = MZ_ERROR(MZ_ERR_IO, "%s: %s", path, strerror(errno));
  return st;
}

mz_status_t mz_disk_rename(const char *from, const char *to)
{
  MZ_REQUIRE(rename(from, to) == 0, MZ_ERR_IO, "%s: cannot become %s: %s", from,
             to, strerror(errno));
  return MZ_OK;
}

bool mz_disk_exists(const char *path)
{
  struct stat info;

  return lstat(path, &info) == 0;
}

mz_status_t mz_disk_remove_folder(const char *path)
{
  DIR *folder = opendir(path);
  struct dirent *entry;
  char file[PATH_MAX];

  if (!folder && errno == ENOENT) return MZ_OK;
  MZ_REQUIRE(folder, MZ_ERR_IO, "%s: %s", path, strerror(errno));
  while ((entry = readdir(folder)))
    if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
        mz_disk_path(file, "%s/%s", path, entry->d_name) == MZ_OK)
      unlink(file); /* what stays makes rmdir fail */
  closedir(folder);
  MZ_REQUIRE(rmdir(path) == 0, MZ_ERR_IO, "%s: %s", path, strerror(errno));
  return MZ_OK;
}

/* "global_step12" -> 12; -1: another name. */
static int64_t step_of(const char *name)
{
  static const char prefix[] = "global_step";
  const char *digits = name + sizeof prefix - 1;
  char *end;
  long long step;

  if (strncmp(name, prefix, sizeof prefix - 1) != 0) return -1;
  if (*digits < '0' || *digits > '9') return -1;
  errno = 0;
  step = strtoll(digits, &end, 10);
  return *end || errno ? -1 : step;
}

static int ascending(const void *a, const void *b)
{
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

mz_status_t mz_disk_steps(const char *dir, int64_t **steps_out,
                          int64_t *num_out)
{
  DIR *folder = opendir(dir);
  struct dirent *entry;
  char path[PATH_MAX];
  int64_t *steps = NULL, num = 0, capacity = 0, step;
  mz_status_t st = MZ_OK;

  *steps_out = NULL;
  *num_out = 0;
  if (!folder && errno == ENOENT) return MZ_OK;
  MZ_REQUIRE(folder, MZ_ERR_IO, "%s: %s", dir, strerror(errno));
  while ((entry = readdir(folder))) {
    if ((step = step_of(entry->d_name)) < 0) continue;
    MZ_TRY_GOTO(st,
                mz_disk_path(path, "%s/%s/" MZ_MASTER_NAME, dir, entry->d_name),
                done);
    if (!mz_disk_exists(path)) continue;
    MZ_TRY_GOTO(st, mz_grow(&steps, &capacity, num + 1, "steps"), done);
    steps[num++] = step;
  }
  if (num > 1) qsort(steps, (size_t)num, sizeof *steps, ascending);
  *steps_out = steps;
  *num_out = num;
  steps = NULL;
done:
  closedir(folder);
  mz_free(steps);
  return st;
}

int64_t mz_ckpt_newest(const char *dir)
{
  int64_t *steps, num, newest = -1;

  if (mz_disk_steps(dir, &steps, &num) == MZ_OK && num > 0)
    newest = steps[num - 1];
  mz_free(steps);
  return newest;
}
