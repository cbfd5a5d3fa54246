/* SPDX-License-Identifier: Apache-2.0 */
/* The plan for people. */
#include "plan/plan_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "config/text.h"

enum { MAX_RANKS_PRINTED = 16 };

static double gib(int64_t bytes) { return (double)bytes / 0x1p30; }

static mz_status_t add_head(const mz_plan_t *p, mz_text_t *text)
{
  const mz_plan_opts_t *o = &p->opts;

  return MZ_TRACE(mz_text_add(
      text,
      "plan of rank %d of %d: ZeRO stage %" PRId64 ", %s, %" PRId64
      " x %" PRId64 " tokens a micro-batch, accumulation %" PRId64 "\n",
      o->rank, o->world_size, o->stage, mz_dtype_name(p->dtype),
      o->micro_sequences, o->sequence_length, o->accumulation));
}

static mz_status_t add_groups(const mz_plan_t *p, mz_text_t *text)
{
  MZ_TRY(mz_text_add(text, "\n%-22s %6s  %s\n", "groups", "size", "ranks"));
  for (int32_t i = 0; i < p->num_groups; i++) {
    const mz_group_t *g = &p->groups[i];
    int32_t shown = g->size < MAX_RANKS_PRINTED ? g->size : MAX_RANKS_PRINTED;

    MZ_TRY(mz_text_add(text, "  %-20s %6d ", g->name, g->size));
    for (int32_t r = 0; r < shown; r++)
      MZ_TRY(mz_text_add(text, " %d", g->ranks[r]));
    MZ_TRY(mz_text_add(text, "%s\n", shown < g->size ? " ..." : ""));
  }
  return MZ_OK;
}

/* Units of one MoE of this rank, or the dense ones (moe -1). */
static mz_status_t add_units(const mz_plan_t *p, mz_text_t *text, int32_t moe)
{
  int64_t whole = 0, params = 0, grads = 0, state = 0;
  int32_t units = 0;

  for (int64_t t = 0; t < p->decl->num_tensors; t++)
    if (p->decl->tensors[t].moe == moe) whole += p->decl->tensors[t].elements;
  for (int32_t i = 0; i < p->num_units; i++) {
    const mz_unit_t *u = &p->units[i];
    if (u->moe != moe) continue;
    units++;
    params += u->elements / u->p;
    grads += u->elements / u->g;
    state += u->elements / u->o;
  }
  return MZ_TRACE(mz_text_add(text,
                              "  %-20.20s %6d %14" PRId64 " %14" PRId64
                              " %14" PRId64 " %14" PRId64 "\n",
                              moe < 0 ? "dense" : p->decl->moes[moe].name,
                              units, whole, params, grads, state));
}

static mz_status_t add_model(const mz_plan_t *p, mz_text_t *text)
{
  MZ_TRY(mz_text_add(text, "\n%-22s %6s %14s %14s %14s %14s\n",
                     "elements (padded here)", "units", "of the model",
                     "weights here", "gradients here", "optimizer here"));
  for (int32_t moe = -1; moe < p->num_moes; moe++)
    MZ_TRY(add_units(p, text, moe));
  return MZ_OK;
}

static mz_status_t add_memory(const mz_plan_t *p, mz_text_t *text)
{
  MZ_TRY(mz_text_add(text, "\n%-22s %12s\n", "memory (peaks)", "GiB"));
  for (int c = 0; c < MZ_NUM_CATEGORIES; c++)
    MZ_TRY(mz_text_add(text, "  %-20s %12.6f\n",
                       mz_category_name((mz_category_t)c),
                       gib(p->category_bytes[c])));
  MZ_TRY(mz_text_add(text,
                     "  %-20s %12.6f  peaks at different times may "
                     "share bytes\n",
                     "arena, in all", gib(p->arena_bytes)));
  if (p->host_bytes == 0) return MZ_OK;
  return MZ_TRACE(mz_text_add(text, "  %-20s %12.6f\n", "pinned host memory",
                              gib(p->host_bytes)));
}

static mz_status_t add_messages(const mz_plan_t *p, mz_text_t *text)
{
  MZ_TRY(mz_text_add(text, "\n%-22s %-8s %8s %14s %8s %14s %8s %14s\n",
                     "messages (calls, bytes)", "group", "micro", "", "update",
                     "", "step", ""));
  for (int32_t i = 0; i < p->num_traffic; i++) {
    const mz_traffic_t *t = &p->traffic[i];
    int64_t a = p->opts.accumulation;

    MZ_TRY(mz_text_add(text,
                       "  %-20s  %-8s %8" PRId64 " %14" PRId64 " %8" PRId64
                       " %14" PRId64 " %8" PRId64 " %14" PRId64 "%s\n",
                       mz_entry_kind_name(t->kind), p->groups[t->group].name,
                       t->calls_micro, t->bytes_micro, t->calls_update,
                       t->bytes_update, t->calls_micro * a + t->calls_update,
                       t->bytes_micro * a + t->bytes_update,
                       t->bound ? " at most" : ""));
  }
  if (p->num_traffic == 0) MZ_TRY(mz_text_add(text, "  none\n"));
  return MZ_OK;
}

static mz_status_t add_times(const mz_plan_t *p, mz_text_t *text)
{
  const mz_plan_times_t *t = &p->times;
  double tokens =
      (double)p->max_tokens * (double)p->opts.accumulation * p->opts.world_size;

  MZ_TRY(mz_text_add(text,
                     "\noperations             %.4g multiply-adds forward of a "
                     "micro-batch\n",
                     p->operations));
  return MZ_TRACE(mz_text_add(
      text,
      "predicted step         %.4g s: computing %.4g, messages %.4g, update "
      "%.4g; %.4g tokens/s (%s of %.2g operations/s)\n",
      t->step_s, t->compute_s, t->messages_s, t->update_s, tokens / t->step_s,
      p->opts.cuda ? "GPUs" : "cores", t->flops_per_s));
}

mz_status_t mz_plan_to_text(const mz_plan_t *plan, char **text_out)
{
  mz_text_t text = {0};
  mz_status_t st;

  *text_out = NULL;
  MZ_TRY_GOTO(st, add_head(plan, &text), done);
  MZ_TRY_GOTO(st, add_groups(plan, &text), done);
  MZ_TRY_GOTO(st, add_model(plan, &text), done);
  MZ_TRY_GOTO(st, add_memory(plan, &text), done);
  MZ_TRY_GOTO(st, add_messages(plan, &text), done);
  MZ_TRY_GOTO(st, add_times(plan, &text), done);
  *text_out = text.text;
  text = (mz_text_t){0};
done:
  mz_text_free(&text);
  return st;
}
