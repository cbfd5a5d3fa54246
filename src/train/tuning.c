/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's choices of algorithms. The warm pass guesses them; the first
 * step makes them again by timing, unless a table was taken; then the ranks
 * make their tables one. */
#include "train/tuning.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/engine_impl.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

mz_status_t mz_tuning_share(struct mz_comm *comm, int root, mz_status_t status,
                            const char *text, char **text_out)
{
  bool mine = mz_comm_rank(comm) == root && status == MZ_OK;
  int64_t bytes = 0;
  char *copy = NULL;
  mz_status_t st;

  *text_out = NULL;
  MZ_ASSERT(!mine || text);
  if (mine) bytes = (int64_t)strlen(text) + 1;
  MZ_TRY(mz_comm_broadcast(comm, &bytes, sizeof bytes, root));
  if (status == MZ_OK) status = mz_new(bytes, "tuning table", &copy);
  MZ_TRY_GOTO(st, mz_comm_agree(comm, status), done);
  MZ_ASSERT(copy); /* all ranks succeed, so this one did */
  if (mine) memcpy(copy, text, (size_t)bytes);
  MZ_TRY_GOTO(st, mz_comm_broadcast(comm, copy, bytes, root), done);
  *text_out = copy;
  copy = NULL;
done:
  mz_free(copy);
  return st;
}

/* --- the first step --- */

mz_status_t mz_tuning_begin_step(mz_engine_t *engine)
{
  if (engine->tuned) return MZ_OK;
  return MZ_TRACE(mz_kernels_tune(engine->kernels, true));
}

/* Another model of GPU keeps its own choices. A full table leaves some out,
 * which are guessed then: that depends on nothing but what is computed. */
static mz_status_t take_shared(const mz_engine_t *e, const char *text)
{
  mz_status_t st = mz_kernels_take_tuning(e->kernels, text);

  return st == MZ_ERR_UNSUPPORTED || st == MZ_ERR_FIT ? MZ_OK : MZ_TRACE(st);
}

/* The own choices of all ranks, those of rank 0 last, so that they win. What
 * each chose by itself is written down before any table is taken. */
static mz_status_t share_choices(mz_engine_t *e, mz_status_t st)
{
  char *own = NULL, *text = NULL;

  if (st == MZ_OK) st = mz_kernels_tuning_text(e->kernels, &own);
  for (int root = mz_comm_size(e->comm) - 1; root >= 0; root--) {
    MZ_TRY_GOTO(st, mz_tuning_share(e->comm, root, st, own, &text), done);
    st = take_shared(e, text);
    mz_free(text);
  }
  MZ_TRY_GOTO(st, mz_comm_agree(e->comm, st), done);
done:
  mz_free(own);
  return st;
}

mz_status_t mz_tuning_end_step(mz_engine_t *engine)
{
  mz_status_t st;

  if (engine->tuned) return MZ_OK;
  engine->tuned = true;
  mz_engine_forget_known(engine);
  st = mz_kernels_tune(engine->kernels, false);
  if (mz_comm_size(engine->comm) == 1) return MZ_TRACE(st);
  return MZ_TRACE(share_choices(engine, st));
}

/* --- tables from outside, and out --- */

mz_status_t mz_engine_take_tuning(mz_engine_t *engine, const char *text)
{
  mz_status_t st = mz_kernels_take_tuning(engine->kernels, text);

  mz_engine_forget_known(engine);
  MZ_TRY(mz_comm_agree(engine->comm, st));
  if (text[0]) engine->tuned = true;
  return MZ_OK;
}

mz_status_t mz_engine_tuning_text(const mz_engine_t *engine, char **text_out)
{
  return MZ_TRACE(mz_kernels_tuning_text(engine->kernels, text_out));
}

mz_status_t mz_tuning_take(mz_engine_t *engine, const char *from,
                           const char *text, mz_say_t say, void *ctx)
{
  mz_status_t st = mz_engine_take_tuning(engine, text);
  char message[512], line[PATH_MAX + 600];

  if (st == MZ_OK || st == MZ_ERR_PEER || st == MZ_ERR_MPI) return st;
  snprintf(message, sizeof message, "%s", mz_error_message());
  MZ_REQUIRE(st == MZ_ERR_UNSUPPORTED, MZ_ERR_DATA, "%s: %s", from, message);
  snprintf(line, sizeof line, "the tuning table of %s is not used: %s", from,
           message);
  if (say) say(ctx, line);
  return MZ_OK;
}

mz_status_t mz_tuning_load(mz_engine_t *engine, const mz_folder_t *folder,
                           mz_say_t say, void *ctx)
{
  char *text = NULL, *shared = NULL, from[PATH_MAX];
  mz_status_t st = MZ_OK;

  if (engine->tuned) return MZ_OK;
  snprintf(from, sizeof from, "%s/" MZ_TUNING_NAME, folder->path);
  if (engine->plan->opts.rank == 0) st = mz_tuning_read(folder, &text);
  MZ_TRY_GOTO(st, mz_tuning_share(engine->comm, 0, st, text, &shared), done);
  MZ_TRY_GOTO(st, mz_tuning_take(engine, from, shared, say, ctx), done);
done:
  mz_free(shared);
  mz_free(text);
  return st;
}

mz_status_t mz_tuning_save(const mz_engine_t *engine, const mz_folder_t *folder)
{
  char *text = NULL;
  mz_status_t st = mz_engine_tuning_text(engine, &text);

  if (st == MZ_OK && text[0]) st = mz_tuning_write(folder, text);
  mz_free(text);
  return MZ_TRACE(st);
}
