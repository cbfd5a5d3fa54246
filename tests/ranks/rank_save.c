/* SPDX-License-Identifier: Apache-2.0 */
/* The slice writer on tensors of its own, and what a save leaves behind when it
 * fails. Value i of a tensor is i, plus half the part's number.
 * Usage: rank_save write FOLDER [STEP] | again FOLDER | path FOLDER |
 * limit FOLDER | full FOLDER | large FOLDER MIB
 * (a model of 8 MiB for full) */
#include "base/alloc.h"
#include "base/check.h"
#include "comm/comm.h"

#include <moezero/checkpoint.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { MAX_TENSORS = 64, LARGE_TENSORS = 32 };

typedef struct world {
  mz_comm_t *comm;
  int rank, size;
  mz_ckpt_tensor_t tensors[MAX_TENSORS];
  mz_ckpt_slice_t slices[MAX_TENSORS];
  int32_t num_tensors, num_slices;
  float *values[MZ_CKPT_NUM_PARTS];
  void *zeros; /* of a large model, in place of its moments */
  size_t zero_bytes;
} world_t;

static void add_tensor(world_t *w, const char *name, int32_t ndim, int64_t a,
                       int64_t b, int64_t c)
{
  mz_ckpt_tensor_t *t = &w->tensors[w->num_tensors++];

  *t = (mz_ckpt_tensor_t){.ndim = ndim, .shape = {a, b, c}};
  snprintf(t->name, sizeof t->name, "%s", name);
}

static void add_slice(world_t *w, int32_t tensor, int64_t begin, int64_t end)
{
  mz_ckpt_slice_t *s = &w->slices[w->num_slices];

  if (begin == end) return;
  *s = (mz_ckpt_slice_t){
      .tensor = tensor, .offset = begin, .length = end - begin};
  for (int p = 0; p < MZ_CKPT_NUM_PARTS; p++)
    s->values[p] = w->values[p] + begin;
  w->num_slices++;
}

/* A tensor whose ranges are rarely boxes, one of 61 elements, one with fewer
 * elements than ranks, and an expert a rank. The last rank begins. */
static mz_status_t build(world_t *w)
{
  char name[32];

  for (int p = 0; p < MZ_CKPT_NUM_PARTS; p++) {
    MZ_TRY(mz_new(1000, "values", &w->values[p]));
    for (int64_t i = 0; i < 1000; i++)
      w->values[p][i] = (float)i + 0.5f * (float)p;
  }
  add_tensor(w, "small", 1, 61, 1, 1);
  add_tensor(w, "box", 3, 5, 7, 11);
  add_tensor(w, "pair", 2, 1, 2, 1);
  for (int32_t i = 0; i < 3; i++) {
    int64_t n = mz_ckpt_elements(&w->tensors[i]);
    int place = w->size - 1 - w->rank;
    add_slice(w, i, n * place / w->size, n * (place + 1) / w->size);
  }
  for (int r = 0; r < w->size; r++) {
    snprintf(name, sizeof name, "experts.%d.weight", r);
    add_tensor(w, name, 2, 2, r + 1, 1);
    if (r == w->rank) add_slice(w, w->num_tensors - 1, 0, 2 * (r + 1));
  }
  return MZ_OK;
}

static mz_status_t save(const world_t *w, const char *dir, int64_t step,
                        int64_t keep)
{
  const mz_ckpt_save_opts_t opts = {.dir = dir,
                                    .state = {.step = step,
                                              .updates = step - 1,
                                              .sampler_position = 8 * step,
                                              .seed = 77,
                                              .config = "{\"a\": 1}",
                                              .client_state = "of a client",
                                              .tuning = "one\ntwo\n"},
                                    .tensors = w->tensors,
                                    .num_tensors = w->num_tensors,
                                    .slices = w->slices,
                                    .num_slices = w->num_slices,
                                    .keep = keep};

  return MZ_TRACE(mz_ckpt_save(w->comm, &opts));
}

static bool exists(const char *dir, const char *name)
{
  char path[600];
  struct stat info;

  snprintf(path, sizeof path, "%s/%s", dir, name);
  return lstat(path, &info) == 0;
}

/* `latest` means @p step, whole and verified, and no temporary is left. Waits
 * for rank 0, which cleans up, and for all to have looked. */
static mz_status_t expect_step(const world_t *w, const char *dir, int64_t step)
{
  mz_ckpt_t *ckpt = NULL;
  int64_t low, high;
  char name[64];
  mz_status_t st = mz_comm_min_max(w->comm, 0, &low, &high);

  MZ_TRY_GOTO(st, mz_ckpt_open(dir, &ckpt), done);
  MZ_REQUIRE_GOTO(mz_ckpt_state(ckpt)->step == step, st, done, MZ_ERR_DATA,
                  "latest is step %" PRId64, mz_ckpt_state(ckpt)->step);
  MZ_TRY_GOTO(st, mz_ckpt_verify(ckpt, 0, 1), done);
  for (int64_t i = 1; i < 9; i++) {
    snprintf(name, sizeof name, "global_step%" PRId64 ".tmp", i);
    MZ_REQUIRE_GOTO(!exists(dir, name), st, done, MZ_ERR_DATA, "%s is left",
                    name);
  }
done:
  mz_ckpt_close(&ckpt);
  return MZ_TRACE(mz_comm_agree(w->comm, st));
}

/* Every rank gets the error, and its text. */
static mz_status_t expect_failure(mz_status_t found, mz_status_t status,
                                  const char *text)
{
  char message[1024];

  snprintf(message, sizeof message, "%s", mz_error_message());
  MZ_REQUIRE(found == status && strstr(message, text), MZ_ERR_DATA,
             "status %s, message \"%s\"; expected \"%s\"",
             mz_status_text(found), message, text);
  return MZ_OK;
}

/* A step is never overwritten; what an interrupted save left is replaced; old
 * steps go only after the new one. */
static mz_status_t save_again(const world_t *w, const char *dir)
{
  char stale[600];

  MZ_TRY(save(w, dir, 1, 0));
  MZ_TRY(expect_failure(save(w, dir, 1, 0), MZ_ERR_IO,
                        "global_step1 exists already and is not overwritten"));
  MZ_TRY(expect_step(w, dir, 1));
  snprintf(stale, sizeof stale, "%s/global_step2.tmp", dir);
  if (w->rank == 0) mkdir(stale, 0777);
  MZ_TRY(save(w, dir, 2, 0));
  MZ_TRY(save(w, dir, 3, 0));
  MZ_TRY(expect_step(w, dir, 3));
  MZ_REQUIRE(exists(dir, "global_step1") && exists(dir, "global_step2"),
             MZ_ERR_DATA, "keep 0 has deleted a step");
  MZ_TRY(save(w, dir, 4, 2));
  MZ_TRY(expect_step(w, dir, 4));
  MZ_REQUIRE(exists(dir, "global_step3") && !exists(dir, "global_step2") &&
                 !exists(dir, "global_step1"),
             MZ_ERR_DATA, "keep 2 has kept others than steps 3 and 4");
  return MZ_OK;
}

/* On rank 1 alone the folder cannot be: a part of its path is a file. */
static mz_status_t save_on_bad_path(const world_t *w, const char *dir)
{
  char bad[600];

  MZ_TRY(save(w, dir, 1, 1));
  snprintf(bad, sizeof bad, "%s/latest/x", dir);
  MZ_TRY(expect_failure(save(w, w->rank == 1 ? bad : dir, 2, 1), MZ_ERR_IO,
                        "rank_1.h5: Not a directory"));
  MZ_TRY(expect_step(w, dir, 1));
  MZ_TRY(save(w, dir, 2, 1));
  return MZ_TRACE(expect_step(w, dir, 2));
}

/* A quota that only rank 1 meets. */
static mz_status_t save_on_limit(const world_t *w, const char *dir)
{
  struct rlimit before, low = {.rlim_cur = 4096};

  signal(SIGXFSZ, SIG_IGN);
  getrlimit(RLIMIT_FSIZE, &before);
  low.rlim_max = before.rlim_max;
  MZ_TRY(save(w, dir, 1, 1));
  if (w->rank == 1) setrlimit(RLIMIT_FSIZE, &low);
  MZ_TRY(expect_failure(save(w, dir, 2, 1), MZ_ERR_IO, "File too large"));
  MZ_TRY(expect_step(w, dir, 1));
  if (w->rank == 1) setrlimit(RLIMIT_FSIZE, &before);
  MZ_TRY(save(w, dir, 2, 1));
  return MZ_TRACE(expect_step(w, dir, 2));
}

/* The folder lies on a file system with room for one step and a half. */
static mz_status_t save_on_full_disk(const world_t *w, const char *dir)
{
  MZ_TRY(save(w, dir, 1, 2));
  for (int64_t step = 2; step < 4; step++) {
    MZ_TRY(expect_failure(save(w, dir, step, 2), MZ_ERR_IO,
                          "No space left on device"));
    MZ_TRY(expect_step(w, dir, 1));
  }
  return MZ_OK;
}

/* Tensors of a model of @p mib MiB; all share one buffer, moments are zero
 * pages that are never there. */
static mz_status_t build_large(world_t *w, int64_t mib)
{
  int64_t elements = mib * (1 << 20) / 4 / LARGE_TENSORS;
  char name[32];

  w->zero_bytes = (size_t)elements * 4;
  w->zeros = mmap(NULL, w->zero_bytes, PROT_READ,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  MZ_REQUIRE(w->zeros != MAP_FAILED, MZ_ERR_NOMEM, "no address space");
  MZ_TRY(mz_new(elements, "values", &w->values[0]));
  for (int64_t i = 0; i < elements; i += 1000)
    w->values[0][i] = (float)i;
  w->values[1] = w->values[2] = w->zeros;
  for (int32_t i = 0; i < LARGE_TENSORS; i++) {
    snprintf(name, sizeof name, "large.%d", i);
    add_tensor(w, name, 1, elements, 1, 1);
    add_slice(w, i, elements * w->rank / w->size,
              elements * (w->rank + 1) / w->size);
  }
  return MZ_OK;
}

static void release(world_t *w)
{
  for (int p = 0; p < MZ_CKPT_NUM_PARTS; p++)
    if (w->values[p] != w->zeros) mz_free(w->values[p]);
  if (w->zeros) munmap(w->zeros, w->zero_bytes);
  mz_comm_destroy(&w->comm);
}

static mz_status_t run(world_t *w, int argc, char **argv)
{
  const char *what = argc > 2 ? argv[1] : "", *dir = argc > 2 ? argv[2] : "";

  if (strcmp(what, "large") == 0 || strcmp(what, "full") == 0) {
    MZ_TRY(build_large(w, argc > 3 ? atoll(argv[3]) : 8));
    return MZ_TRACE(*what == 'l' ? save(w, dir, 1, 0)
                                 : save_on_full_disk(w, dir));
  }
  MZ_TRY(build(w));
  if (strcmp(what, "write") == 0)
    return MZ_TRACE(save(w, dir, argc > 3 ? atoll(argv[3]) : 1, 0));
  if (strcmp(what, "again") == 0) return MZ_TRACE(save_again(w, dir));
  if (strcmp(what, "path") == 0) return MZ_TRACE(save_on_bad_path(w, dir));
  if (strcmp(what, "limit") == 0) return MZ_TRACE(save_on_limit(w, dir));
  MZ_FAIL(MZ_ERR_ARG, "usage: rank_save write|again|path|limit|full|large "
                      "FOLDER [NUMBER]");
}

int main(int argc, char **argv)
{
  const mz_comm_opts_t opts = {.watchdog_s = 30};
  world_t w = {0};
  int provided;
  mz_status_t st;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  st = mz_comm_create(MPI_COMM_WORLD, &opts, &w.comm);
  if (st == MZ_OK) {
    w.rank = mz_comm_rank(w.comm);
    w.size = mz_comm_size(w.comm);
    st = run(&w, argc, argv);
  }
  if (st != MZ_OK) fprintf(stderr, "rank %d: %s\n", w.rank, mz_error_last());
  release(&w);
  MPI_Finalize();
  return st != MZ_OK;
}
