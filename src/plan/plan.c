/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan_impl.h"

#include "base/alloc.h"
#include "base/check.h"

static mz_status_t check_opts(const mz_plan_opts_t *o)
{
  MZ_REQUIRE(o->world_size >= 1 && o->rank >= 0 && o->rank < o->world_size,
             MZ_ERR_ARG, "rank %d of %d", o->rank, o->world_size);
  MZ_REQUIRE(o->stage >= 0 && o->stage <= 3, MZ_ERR_ARG,
             "stage %" PRId64 ", need 0..3", o->stage);
  MZ_REQUIRE(o->micro_sequences >= 1 && o->sequence_length >= 1 &&
                 o->accumulation >= 1,
             MZ_ERR_ARG,
             "%" PRId64 " sequences of %" PRId64 ", accumulation %" PRId64
             ": each is at least 1",
             o->micro_sequences, o->sequence_length, o->accumulation);
  MZ_REQUIRE(o->saved_rows > 0 && o->overlap_chunks >= 0 && o->piece_bytes >= 1,
             MZ_ERR_ARG,
             "saved_rows %g and piece_bytes %" PRId64
             ", need more than 0; overlap_chunks %" PRId64 ", at least 0",
             o->saved_rows, o->piece_bytes, o->overlap_chunks);
  return MZ_OK;
}

mz_status_t mz_plan_create(const mz_decl_t *decl, const mz_plan_opts_t *opts,
                           mz_plan_t **plan_out)
{
  mz_plan_t *p = NULL;
  mz_status_t st;

  *plan_out = NULL;
  MZ_TRY(check_opts(opts));
  MZ_TRY_GOTO(st, mz_new(1, "plan", &p), done);
  p->opts = *opts;
  p->decl = decl;
  p->dtype = decl->dtype;
  MZ_TRY_GOTO(
      st,
      mz_mul_i64(opts->micro_sequences, opts->sequence_length, &p->max_tokens),
      done);
  MZ_TRY_GOTO(st, mz_plan_make_groups(p), done);
  MZ_TRY_GOTO(st, mz_plan_make_units(p), done);
  MZ_TRY_GOTO(st, mz_plan_make_runs(p), done);
  MZ_TRY_GOTO(st, mz_plan_make_buffers(p), done);
  MZ_TRY_GOTO(st, mz_plan_make_schedule(p), done);
  MZ_TRY_GOTO(st, mz_plan_place_buffers(p), done);
  MZ_TRY_GOTO(st, mz_plan_make_ledger(p), done);
  *plan_out = p;
  p = NULL;
done:
  mz_plan_destroy(&p);
  return st;
}

void mz_plan_destroy(mz_plan_t **plan)
{
  mz_plan_t *p = plan ? *plan : NULL;

  if (!p) return;
  for (int32_t i = 0; i < p->num_groups; i++)
    mz_free(p->groups[i].ranks);
  mz_free(p->groups);
  mz_free(p->units);
  mz_free(p->unit_tensors);
  mz_free(p->tensor_place);
  mz_free(p->segments[0]);
  mz_free(p->segments[1]);
  mz_free(p->moes);
  mz_free(p->runs);
  mz_free(p->entries);
  for (int w = 0; w < MZ_NUM_WALKS; w++)
    mz_free(p->ops[w]);
  mz_free(p->buffers);
  mz_free(p->buffer_of_decl);
  mz_free(p->twin_of_decl);
  mz_free(p->traffic);
  mz_free(p);
  *plan = NULL;
}
