/* SPDX-License-Identifier: Apache-2.0 */
/* The plan as JSON: the same bytes for the same plan. */
#include "plan/plan_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "config/text.h"

typedef long long ll; /* what %lld and json_pack's I take */

/* Rows of a list are made one by one; NULL: no memory. */
typedef json_t *(*row_fn)(const mz_plan_t *p, int64_t i);

static json_t *list(const mz_plan_t *p, int64_t num, row_fn row)
{
  json_t *all = json_array();

  for (int64_t i = 0; all && i < num; i++)
    if (json_array_append_new(all, row(p, i)) != 0) {
      json_decref(all);
      all = NULL;
    }
  return all;
}

static json_t *group_row(const mz_plan_t *p, int64_t i)
{
  const mz_group_t *g = &p->groups[i];
  json_t *ranks = json_array();

  for (int32_t r = 0; ranks && r < g->size; r++)
    if (json_array_append_new(ranks, json_integer(g->ranks[r])) != 0) {
      json_decref(ranks);
      ranks = NULL;
    }
  return json_pack("{s:s, s:s, s:i, s:i, s:i, s:o}", "name", g->name, "kind",
                   mz_group_kind_name(g->kind), "ep_size", g->ep_size, "size",
                   g->size, "place", g->place, "ranks", ranks);
}

static json_t *unit_row(const mz_plan_t *p, int64_t i)
{
  const mz_unit_t *u = &p->units[i];

  return json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:I, s:I}", "name", u->name,
                   "group", p->groups[u->group].name, "ranks", u->ranks, "p",
                   u->p, "g", u->g, "o", u->o, "elements", (ll)u->elements,
                   "shard", (ll)u->shard);
}

static json_t *lives_of(const mz_plan_buffer_t *b)
{
  json_t *lives = json_object();

  for (int w = 0; lives && w < MZ_NUM_WALKS; w++) {
    const mz_life_t *l = &b->life[w];

    if (b->persistent || l->last < 0) continue;
    if (json_object_set_new(lives, mz_walk_name((mz_walk_t)w),
                            json_pack("[i, i]", l->first, l->last)) != 0) {
      json_decref(lives);
      lives = NULL;
    }
  }
  return lives;
}

static json_t *buffer_row(const mz_plan_t *p, int64_t i)
{
  const mz_plan_buffer_t *b = &p->buffers[i];

  return json_pack("{s:s, s:s, s:I, s:I, s:b, s:o}", "name", b->name,
                   "category", mz_category_name(b->category), "bytes",
                   (ll)b->bytes, "offset", (ll)b->offset, "persistent",
                   b->persistent, "lives", lives_of(b));
}

static json_t *traffic_row(const mz_plan_t *p, int64_t i)
{
  const mz_traffic_t *t = &p->traffic[i];

  return json_pack("{s:s, s:s, s:b, s:I, s:I, s:I, s:I, s:I, s:I}", "kind",
                   mz_entry_kind_name(t->kind), "group",
                   p->groups[t->group].name, "bound", t->bound, "calls_micro",
                   (ll)t->calls_micro, "bytes_micro", (ll)t->bytes_micro,
                   "calls_update", (ll)t->calls_update, "bytes_update",
                   (ll)t->bytes_update, "calls_eval", (ll)t->calls_eval,
                   "bytes_eval", (ll)t->bytes_eval);
}

static json_t *moe_row(const mz_plan_t *p, int64_t i)
{
  const mz_moe_plan_t *m = &p->moes[i];

  return json_pack(
      "{s:s, s:i, s:i, s:i, s:i, s:I, s:I}", "name", p->decl->moes[i].name,
      "num_experts", p->decl->moes[i].opts.num_experts, "experts_per_rank",
      m->experts_per_rank, "first_expert", m->first_expert, "runs", m->num_runs,
      "round_rows", (ll)m->round_rows, "capacity", (ll)m->max_capacity);
}

static json_t *head(const mz_plan_t *p)
{
  const mz_plan_opts_t *o = &p->opts;

  return json_pack("{s:i, s:i, s:I, s:s, s:I, s:I, s:I}", "world_size",
                   o->world_size, "rank", o->rank, "stage", (ll)o->stage,
                   "dtype", mz_dtype_name(p->dtype), "micro_sequences",
                   (ll)o->micro_sequences, "sequence_length",
                   (ll)o->sequence_length, "accumulation", (ll)o->accumulation);
}

static json_t *categories(const mz_plan_t *p)
{
  json_t *all = json_object();

  for (int c = 0; all && c < MZ_NUM_CATEGORIES; c++)
    if (json_object_set_new(all, mz_category_name((mz_category_t)c),
                            json_integer(p->category_bytes[c])) != 0) {
      json_decref(all);
      all = NULL;
    }
  return all;
}

static json_t *schedule(const mz_plan_t *p)
{
  return json_pack("{s:i, s:i, s:i, s:i, s:i}", "begin_ops",
                   p->num_ops[MZ_WALK_BEGIN], "micro_ops",
                   p->num_ops[MZ_WALK_MICRO], "eval_ops",
                   p->num_ops[MZ_WALK_EVAL], "update_ops",
                   p->num_ops[MZ_WALK_UPDATE], "entries", p->num_entries);
}

static json_t *times(const mz_plan_t *p)
{
  const mz_plan_times_t *t = &p->times;

  return json_pack("{s:f, s:f, s:f, s:f}", "compute_s", t->compute_s,
                   "messages_s", t->messages_s, "update_s", t->update_s,
                   "step_s", t->step_s);
}

static json_t *whole(const mz_plan_t *p)
{
  return json_pack(
      "{s:o, s:o, s:o, s:o, s:I, s:I, s:o, s:o, s:o, s:o, s:f, s:I, s:I, s:o}",
      "options", head(p), "groups", list(p, p->num_groups, group_row), "units",
      list(p, p->num_units, unit_row), "bytes", categories(p), "arena_bytes",
      (ll)p->arena_bytes, "host_bytes", (ll)p->host_bytes, "moes",
      list(p, p->num_moes, moe_row), "buffers",
      list(p, p->num_buffers, buffer_row), "messages",
      list(p, p->num_traffic, traffic_row), "schedule", schedule(p),
      "operations", p->operations, "peak_gathered", (ll)p->peak_gathered,
      "pool_rows", (ll)p->pool_rows, "times", times(p));
}

mz_status_t mz_plan_to_json(const mz_plan_t *plan, char **text_out)
{
  json_t *root = whole(plan);
  mz_text_t text = {0};
  mz_status_t st;

  *text_out = NULL;
  MZ_REQUIRE_GOTO(root, st, done, MZ_ERR_NOMEM, "no memory for JSON");
  MZ_TRY_GOTO(st, mz_text_add_json(&text, root, 0), done);
  MZ_TRY_GOTO(st, mz_text_add(&text, "\n"), done);
  *text_out = text.text;
  text = (mz_text_t){0};
done:
  mz_text_free(&text);
  json_decref(root);
  return st;
}
