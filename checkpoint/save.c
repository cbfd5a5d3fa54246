/* SPDX-License-Identifier: Apache-2.0 */
/* The save: all ranks write, rank 0 publishes. What one rank fails at is agreed
 * before anybody goes on. */
#include "checkpoint/rank_file.h"

#include "base/alloc.h"
#include "base/check.h"
#include "checkpoint/disk.h"
#include "comm/comm.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct save {
  struct mz_comm *comm;
  const mz_ckpt_save_opts_t *opts;
  mz_save_head_t head;
  char folder[PATH_MAX], final[PATH_MAX], path[PATH_MAX]; /* of this rank */
  mz_source_row_t *rows;    /* [num_slices] of this rank */
  mz_file_row_t *files;     /* [ranks] */
  mz_source_row_t *sources; /* of all ranks */
  int64_t num_sources;
} save_t;

static mz_status_t list_rows(save_t *s)
{
  const mz_ckpt_save_opts_t *o = s->opts;
  int64_t position = 0;

  MZ_TRY(mz_new(o->num_slices, "segments", &s->rows));
  for (int32_t i = 0; i < o->num_slices; i++) {
    const mz_ckpt_slice_t *slice = &o->slices[i];

    MZ_REQUIRE(slice->tensor >= 0 && slice->tensor < o->num_tensors &&
                   slice->offset >= 0 && slice->length >= 1 &&
                   slice->length <=
                       mz_ckpt_elements(&o->tensors[slice->tensor]) -
                           slice->offset,
               MZ_ERR_ARG,
               "slice %" PRId32 ": elements %" PRId64 " + %" PRId64
               " of tensor %" PRId32,
               i, slice->offset, slice->length, slice->tensor);
    s->rows[i] = (mz_source_row_t){s->head.rank, slice->tensor, slice->offset,
                                   slice->length, position};
    position += slice->length;
  }
  return MZ_OK;
}

/* Rank 0 alone: a place for the new step, which nobody has. What an
 * interrupted save left under the temporary name goes away. */
static mz_status_t make_folder(const save_t *s)
{
  MZ_TRY(mz_disk_make_folders(s->opts->dir));
  MZ_REQUIRE(!mz_disk_exists(s->final), MZ_ERR_IO,
             "%s exists already and is not overwritten", s->final);
  MZ_TRY(mz_disk_remove_folder(s->folder));
  MZ_REQUIRE(mkdir(s->folder, 0777) == 0, MZ_ERR_IO, "%s: %s", s->folder,
             strerror(errno));
  return MZ_OK;
}

static mz_status_t draw_id(save_t *s)
{
  uint64_t id;

  MZ_REQUIRE(getrandom(&id, sizeof id, 0) == sizeof id, MZ_ERR_IO,
             "no random number: %s", strerror(errno));
  snprintf(s->head.save_id, sizeof s->head.save_id, "%016" PRIx64, id);
  return MZ_OK;
}

static mz_status_t begin(save_t *s)
{
  const mz_ckpt_save_opts_t *o = s->opts;

  s->head.rank = mz_comm_rank(s->comm);
  s->head.ranks = mz_comm_size(s->comm);
  s->head.step = o->state.step;
  s->head.tensors = o->tensors;
  s->head.num_tensors = o->num_tensors;
  MZ_TRY(
      mz_disk_path(s->final, "%s/global_step%" PRId64, o->dir, o->state.step));
  MZ_TRY(mz_disk_path(s->folder, "%s.tmp", s->final));
  MZ_TRY(mz_disk_path(s->path, "%s/rank_%d.h5", s->folder, s->head.rank));
  MZ_TRY(list_rows(s));
  MZ_TRY(mz_new(s->head.ranks, "files", &s->files));
  if (s->head.rank == 0) MZ_TRY(draw_id(s));
  return MZ_OK;
}

static mz_status_t gather_rows(save_t *s, size_t bytes, const void *send,
                               int64_t num, void *recv, const int64_t *counts,
                               const int64_t *displs)
{
  mz_msg_t msg = {.kind = MZ_MSG_GATHER,
                  .element_bytes = bytes,
                  .send = send,
                  .send_count = num,
                  .recv = recv,
                  .recv_counts = counts,
                  .recv_displs = displs};
  mz_ticket_t ticket;

  MZ_TRY(mz_comm_post(s->comm, MZ_LANE_EXCHANGE, &msg, &ticket));
  return MZ_TRACE(mz_comm_wait(s->comm, ticket));
}

/* What each rank has written, to all ranks. Collective. */
static mz_status_t exchange_lists(save_t *s, const mz_file_row_t *mine)
{
  int ranks = s->head.ranks;
  int64_t num = s->opts->num_slices, *counts = NULL, *displs, *sizes;
  mz_status_t st;

  st = mz_new(3 * (int64_t)ranks, "list sizes", &counts);
  MZ_TRY_GOTO(st, mz_comm_agree(s->comm, st), done);
  displs = counts + ranks;
  sizes = displs + ranks;
  for (int r = 0; r < ranks; r++) {
    counts[r] = 1;
    displs[r] = r;
  }
  MZ_TRY_GOTO(st,
              gather_rows(s, sizeof *mine, mine, 1, s->files, counts, displs),
              done);
  MZ_TRY_GOTO(st, gather_rows(s, sizeof num, &num, 1, sizes, counts, displs),
              done);
  for (int r = 0; r < ranks; r++) {
    displs[r] = s->num_sources;
    s->num_sources += sizes[r];
  }
  st = mz_new(s->num_sources, "sources", &s->sources);
  MZ_TRY_GOTO(st, mz_comm_agree(s->comm, st), done);
  MZ_TRY_GOTO(
      st,
      gather_rows(s, sizeof *s->rows, s->rows, num, s->sources, sizes, displs),
      done);
done:
  mz_free(counts);
  return st;
}

static int by_place(const void *a, const void *b)
{
  const mz_source_row_t *x = a, *y = b;

  if (x->tensor != y->tensor) return x->tensor < y->tensor ? -1 : 1;
  return (x->offset > y->offset) - (x->offset < y->offset);
}

/* Every file where rank 0 sees it: the folder may not be shared by all. */
static mz_status_t check_files(const save_t *s)
{
  char path[PATH_MAX];
  struct stat info;

  for (int r = 0; r < s->head.ranks; r++) {
    MZ_TRY(mz_disk_path(path, "%s/%s", s->folder, s->files[r].name));
    MZ_REQUIRE(stat(path, &info) == 0, MZ_ERR_IO,
               "%s: rank 0 does not see what rank %d wrote (%s): is the folder "
               "on a file system that all ranks share?",
               path, r, strerror(errno));
    MZ_REQUIRE(info.st_size == s->files[r].bytes, MZ_ERR_IO,
               "%s: rank 0 sees %" PRId64 " bytes, rank %d wrote %" PRId64,
               path, (int64_t)info.st_size, r, s->files[r].bytes);
  }
  return MZ_OK;
}

/* Rank 0 alone. The new `latest` is written before the step appears under its
 * name, so that a disk that is full by then leaves nothing behind. */
static mz_status_t publish(const save_t *s)
{
  char latest[PATH_MAX], part[PATH_MAX], name[64];
  int bytes;

  MZ_TRY(check_files(s));
  qsort(s->sources, (size_t)s->num_sources, sizeof *s->sources, by_place);
  MZ_TRY(mz_master_write(s->folder, &s->head, &s->opts->state, s->files,
                         s->sources, s->num_sources));
  MZ_TRY(mz_disk_path(latest, "%s/" MZ_LATEST_NAME, s->opts->dir));
  MZ_TRY(mz_disk_path(part, "%s/" MZ_LATEST_NAME ".part", s->folder));
  bytes = snprintf(name, sizeof name, "global_step%" PRId64 "\n",
                   s->opts->state.step);
  MZ_TRY(mz_disk_write(part, name, (size_t)bytes));
  MZ_TRY(mz_disk_rename(s->folder, s->final));
  MZ_TRY(mz_disk_sync_folder(s->opts->dir));
  MZ_TRY(mz_disk_path(part, "%s/" MZ_LATEST_NAME ".part", s->final));
  MZ_TRY(mz_disk_rename(part, latest));
  return MZ_TRACE(mz_disk_sync_folder(s->opts->dir));
}

static mz_status_t write_all(save_t *s)
{
  const mz_ckpt_save_opts_t *o = s->opts;
  mz_file_row_t mine = {.bytes = 0};
  mz_status_t st = MZ_OK;

  if (s->head.rank == 0) st = make_folder(s);
  MZ_TRY(mz_comm_agree(s->comm, st));
  MZ_TRY(
      mz_comm_broadcast(s->comm, s->head.save_id, sizeof s->head.save_id, 0));
  /* All reservations stand before the first one is used. */
  st = mz_rank_file_write(s->path, &s->head, o, s->rows, true, NULL);
  MZ_TRY(mz_comm_agree(s->comm, st));
  st = mz_rank_file_write(s->path, &s->head, o, s->rows, false, &mine);
  MZ_TRY(mz_comm_agree(s->comm, st));
  MZ_TRY(exchange_lists(s, &mine));
  if (s->head.rank == 0) st = publish(s);
  return MZ_TRACE(mz_comm_agree(s->comm, st));
}

/* Rank 0 removes the folder when no rank writes into it any more: all came
 * through the same failed agreement. The error of the save stays the last. */
static mz_status_t clean_up(const save_t *s, mz_status_t st)
{
  char text[1024];

  snprintf(text, sizeof text, "%s", mz_error_message());
  if (s->head.rank == 0) mz_disk_remove_folder(s->folder);
  MZ_FAIL(st, "%s", text);
}

/* Rank 0 alone: the new step is durable, older ones may go. checkpoint.h5 goes
 * first, so that what is left of an interrupted deletion is no checkpoint. */
static mz_status_t drop_old(const save_t *s)
{
  char path[PATH_MAX];
  int64_t *steps = NULL, num = 0, kept = 1;
  mz_status_t st;

  if (s->opts->keep <= 0) return MZ_OK;
  MZ_TRY(mz_disk_steps(s->opts->dir, &steps, &num));
  for (int64_t i = num - 1; i >= 0; i--) {
    if (steps[i] >= s->opts->state.step || kept++ < s->opts->keep) continue;
    MZ_TRY_GOTO(st,
                mz_disk_path(path, "%s/global_step%" PRId64 "/" MZ_MASTER_NAME,
                             s->opts->dir, steps[i]),
                done);
    MZ_REQUIRE_GOTO(unlink(path) == 0, st, done, MZ_ERR_IO, "%s: %s", path,
                    strerror(errno));
    *strrchr(path, '/') = '\0';
    MZ_TRY_GOTO(st, mz_disk_remove_folder(path), done);
  }
  st = MZ_OK;
done:
  mz_free(steps);
  return st;
}

mz_status_t mz_ckpt_save(struct mz_comm *comm, const mz_ckpt_save_opts_t *opts)
{
  save_t s = {.comm = comm, .opts = opts};
  mz_status_t st;

  MZ_TRY_GOTO(st, mz_comm_agree(comm, begin(&s)), done);
  st = write_all(&s);
  if (st != MZ_OK) {
    st = clean_up(&s, st);
    goto done;
  }
  if (s.head.rank == 0) st = drop_old(&s);
  MZ_TRY_GOTO(st, mz_comm_agree(comm, st), done);
done:
  mz_free(s.sources);
  mz_free(s.files);
  mz_free(s.rows);
  return st;
}
