/* SPDX-License-Identifier: Apache-2.0 */
#include "train/folder.h"

#include "base/alloc.h"
#include "base/check.h"
#include "checkpoint/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void mz_folder_name(char *text, size_t text_bytes)
{
  time_t now = time(NULL);
  struct tm parts;

  localtime_r(&now, &parts);
  strftime(text, text_bytes, "runs/%Y-%m-%d-%H-%M-%S", &parts);
}

static mz_status_t path_in(const mz_folder_t *folder, const char *name,
                           char out[PATH_MAX])
{
  return MZ_TRACE(mz_disk_path(out, "%s/%s", folder->path, name));
}

/* The folders above a file. */
static mz_status_t make_room(const char *path)
{
  char above[PATH_MAX];

  MZ_TRY(mz_disk_path(above, "%s", path));
  *strrchr(above, '/') = '\0';
  return MZ_TRACE(mz_disk_make_folders(above));
}

static mz_status_t open_file(const mz_folder_t *folder, const char *name,
                             bool keep, FILE **out)
{
  char path[PATH_MAX];

  MZ_TRY(path_in(folder, name, path));
  MZ_TRY(make_room(path));
  *out = fopen(path, keep ? "a+" : "w");
  MZ_REQUIRE(*out, MZ_ERR_IO, "%s: %s", path, strerror(errno));
  return MZ_OK;
}

static mz_status_t take_lock(mz_folder_t *folder)
{
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  struct flock holder = lock;
  char path[PATH_MAX];

  MZ_TRY(path_in(folder, "lock", path));
  folder->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  MZ_REQUIRE(folder->lock >= 0, MZ_ERR_IO, "%s: %s", path, strerror(errno));
  if (fcntl(folder->lock, F_SETLK, &lock) == 0) return MZ_OK;
  MZ_REQUIRE(errno == EACCES || errno == EAGAIN, MZ_ERR_IO, "%s: %s", path,
             strerror(errno));
  fcntl(folder->lock, F_GETLK, &holder);
  MZ_FAIL(MZ_ERR_IO, "%s: another run writes into this folder (process %ld)",
          folder->path, (long)holder.l_pid);
}

mz_status_t mz_folder_open(const char *path, int rank, const char *metrics_name,
                           bool keep, mz_folder_t *folder_out)
{
  mz_folder_t folder = {.lock = -1};
  char log[32];
  mz_status_t st;

  *folder_out = folder;
  snprintf(log, sizeof log, "log.%d", rank);
  MZ_TRY_GOTO(st, mz_string_copy(path, &folder.path), done);
  MZ_TRY_GOTO(st, mz_disk_make_folders(path), done);
  if (rank == 0) {
    MZ_TRY_GOTO(st, take_lock(&folder), done);
    MZ_TRY_GOTO(st, open_file(&folder, metrics_name, keep, &folder.metrics),
                done);
  }
  MZ_TRY_GOTO(st, open_file(&folder, log, keep, &folder.log), done);
  *folder_out = folder;
  folder = (mz_folder_t){.lock = -1};
done:
  mz_folder_close(&folder);
  return st;
}

mz_status_t mz_folder_write(const mz_folder_t *folder, const char *name,
                            const char *text)
{
  char path[PATH_MAX], part[PATH_MAX], part_name[NAME_MAX];
  FILE *file = NULL;
  bool good;

  snprintf(part_name, sizeof part_name, "%s.part", name);
  MZ_TRY(path_in(folder, name, path));
  MZ_TRY(path_in(folder, part_name, part));
  MZ_TRY(open_file(folder, part_name, false, &file));
  fputs(text, file);
  good = fflush(file) == 0;
  good = fclose(file) == 0 && good;
  MZ_REQUIRE(good, MZ_ERR_IO, "%s: %s", part, strerror(errno));
  return MZ_TRACE(mz_disk_rename(part, path));
}

void mz_folder_close(mz_folder_t *folder)
{
  if (folder->metrics) fclose(folder->metrics);
  if (folder->log) fclose(folder->log);
  if (folder->lock >= 0) close(folder->lock);
  mz_free(folder->path);
  *folder = (mz_folder_t){.lock = -1};
}
