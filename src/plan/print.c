/* SPDX-License-Identifier: Apache-2.0 */
/* The plan as a table for people and as JSON for programs. */
#include "plan/plan.h"

#include "base/check.h"

#include <errno.h>
#include <jansson.h>
#include <string.h>

const char *mz_plan_category_name(mz_category_t category)
{
  switch (category) {
  case MZ_CAT_PARAMS:
    return "params";
  case MZ_CAT_GRADS:
    return "grads";
  case MZ_CAT_OPTIMIZER:
    return "optimizer";
  case MZ_CAT_GATHERED:
    return "gathered";
  case MZ_CAT_STAGING:
    return "staging";
  case MZ_CAT_ACTIVATIONS:
    return "activations";
  case MZ_CAT_ROUTING:
    return "routing";
  case MZ_CAT_DISPATCH:
    return "dispatch";
  case MZ_CAT_SAVED_ROWS:
    return "saved_rows";
  case MZ_CAT_WORKSPACE:
    return "workspace";
  case MZ_CAT_DATA:
    return "data";
  case MZ_NUM_CATEGORIES:
    break;
  }
  return "unknown";
}

const char *mz_plan_entry_name(mz_entry_kind_t kind)
{
  switch (kind) {
  case MZ_ENTRY_PARAMS:
    return "params";
  case MZ_ENTRY_GRADS:
    return "grads";
  case MZ_ENTRY_SUMS:
    return "sums";
  case MZ_ENTRY_WEIGHTS:
    return "weights";
  case MZ_ENTRY_COUNTS:
    return "counts";
  case MZ_ENTRY_TOKENS:
    return "tokens";
  case MZ_ENTRY_STATS:
    return "stats";
  case MZ_ENTRY_SCALARS:
    return "scalars";
  }
  return "unknown";
}

/* --- the table --- */

static double gib(int64_t bytes) { return (double)bytes / 0x1p30; }

static void print_groups(const mz_plan_t *plan, FILE *file)
{
  fputs("groups of this rank            ranks  place\n", file);
  for (int32_t i = 0; i < plan->num_groups; i++)
    fprintf(file, "  %-26s %7d %6d\n", plan->groups[i].name,
            plan->groups[i].size, plan->groups[i].place);
}

/* One line for all dense units, or all experts, of one group. */
static void print_units_of(const mz_plan_t *plan, FILE *file, int32_t group,
                           bool experts)
{
  const mz_unit_t *any = NULL;
  int64_t num = 0, elements = 0;

  for (int32_t i = 0; i < plan->num_units; i++) {
    const mz_unit_t *u = &plan->units[i];
    if (u->group != group || (u->moe >= 0) != experts) continue;
    num++;
    elements += u->elements;
    any = u;
  }
  if (!any) return;
  fprintf(file, "  %-7s over %-13s %7" PRId64 " %15" PRId64 " %10d %d,%d,%d\n",
          experts ? "experts" : "dense", plan->groups[group].name, num,
          elements, any->ranks, any->p, any->g, any->o);
}

static void print_units(const mz_plan_t *plan, FILE *file)
{
  fputs("units of this rank             count        elements   replicas p,g,o"
        "\n",
        file);
  for (int32_t i = 0; i < plan->num_groups; i++) {
    print_units_of(plan, file, i, false);
    print_units_of(plan, file, i, true);
  }
}

static void print_memory(const mz_plan_t *plan, FILE *file)
{
  fputs("memory of this rank              GiB\n", file);
  for (int c = 0; c < MZ_NUM_CATEGORIES; c++)
    fprintf(file, "  %-22s %11.4f\n", mz_plan_category_name((mz_category_t)c),
            gib(plan->category_bytes[c]));
  fprintf(file, "  %-22s %11.4f  (what never lives at once shares bytes)\n",
          "in all", gib(plan->arena_bytes));
}

static void print_messages(const mz_plan_t *plan, FILE *file)
{
  int64_t A = plan->opts.accumulation;

  fputs("messages of a step                calls              MB\n", file);
  for (int32_t i = 0; i < plan->num_traffic; i++) {
    const mz_traffic_t *t = &plan->traffic[i];
    fprintf(file, "  %-8s %-18s %10" PRId64 " %15.3f%s\n",
            mz_plan_entry_name(t->kind), plan->groups[t->group].name,
            A * t->calls_micro + t->calls_update,
            1e-6 * (double)(A * t->bytes_micro + t->bytes_update),
            t->bound ? "  at most" : "");
  }
}

mz_status_t mz_plan_print(const mz_plan_t *plan, FILE *file)
{
  const mz_plan_opts_t *o = &plan->opts;

  fprintf(file,
          "plan of rank %d of %d: stage %" PRId64 ", %" PRId64
          " sequences of %" PRId64 " tokens a micro-batch, %" PRId64
          " micro-batches a step\n",
          o->rank, o->world_size, o->stage, o->micro_sequences,
          o->sequence_length, o->accumulation);
  print_groups(plan, file);
  print_units(plan, file);
  print_memory(plan, file);
  print_messages(plan, file);
  fprintf(file, "operations of a step: %.4g multiply-adds forward\n",
          plan->operations * (double)o->accumulation);
  MZ_REQUIRE(fflush(file) == 0 && !ferror(file), MZ_ERR_IO,
             "cannot write the plan: %s", strerror(errno));
  return MZ_OK;
}

/* --- JSON --- */

static json_t *json_groups(const mz_plan_t *plan)
{
  json_t *list = json_array();

  for (int32_t i = 0; i < plan->num_groups; i++) {
    const mz_group_t *g = &plan->groups[i];
    json_t *ranks = json_array();

    for (int32_t r = 0; r < g->size; r++)
      json_array_append_new(ranks, json_integer(g->ranks[r]));
    json_array_append_new(list, json_pack("{s:s, s:i, s:i, s:o}", "name",
                                          g->name, "size", g->size, "place",
                                          g->place, "ranks", ranks));
  }
  return list;
}

static json_t *json_units(const mz_plan_t *plan)
{
  json_t *list = json_array();

  for (int32_t i = 0; i < plan->num_units; i++) {
    const mz_unit_t *u = &plan->units[i];
    json_array_append_new(
        list,
        json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:I, s:I}", "name", u->name,
                  "group", plan->groups[u->group].name, "ranks", u->ranks, "p",
                  u->p, "g", u->g, "o", u->o, "elements",
                  (json_int_t)u->elements, "shard", (json_int_t)u->shard));
  }
  return list;
}

static json_t *json_buffers(const mz_plan_t *plan)
{
  json_t *list = json_array();

  for (int32_t i = 0; i < plan->num_buffers; i++) {
    const mz_plan_buffer_t *b = &plan->buffers[i];
    json_array_append_new(
        list, json_pack("{s:s, s:s, s:I, s:I, s:b}", "name", b->name,
                        "category", mz_plan_category_name(b->category), "bytes",
                        (json_int_t)b->bytes, "offset", (json_int_t)b->offset,
                        "persistent", b->persistent));
  }
  return list;
}

static json_t *json_messages(const mz_plan_t *plan)
{
  json_t *list = json_array();

  for (int32_t i = 0; i < plan->num_traffic; i++) {
    const mz_traffic_t *t = &plan->traffic[i];
    json_array_append_new(
        list, json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:b}", "kind",
                        mz_plan_entry_name(t->kind), "group",
                        plan->groups[t->group].name, "calls_micro",
                        (json_int_t)t->calls_micro, "bytes_micro",
                        (json_int_t)t->bytes_micro, "calls_update",
                        (json_int_t)t->calls_update, "bytes_update",
                        (json_int_t)t->bytes_update, "calls_eval",
                        (json_int_t)t->calls_eval, "bytes_eval",
                        (json_int_t)t->bytes_eval, "bound", t->bound));
  }
  return list;
}

static json_t *json_memory(const mz_plan_t *plan)
{
  json_t *memory = json_object();

  for (int c = 0; c < MZ_NUM_CATEGORIES; c++)
    json_object_set_new(memory, mz_plan_category_name((mz_category_t)c),
                        json_integer((json_int_t)plan->category_bytes[c]));
  return memory;
}

mz_status_t mz_plan_to_json(const mz_plan_t *plan, char **text_out)
{
  const mz_plan_opts_t *o = &plan->opts;
  json_t *json = json_pack(
      "{s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:f, s:o, s:o, s:o, s:o, s:o}",
      "world_size", o->world_size, "rank", o->rank, "stage",
      (json_int_t)o->stage, "micro_sequences", (json_int_t)o->micro_sequences,
      "sequence_length", (json_int_t)o->sequence_length, "accumulation",
      (json_int_t)o->accumulation, "arena_bytes", (json_int_t)plan->arena_bytes,
      "operations", plan->operations, "groups", json_groups(plan), "units",
      json_units(plan), "memory", json_memory(plan), "buffers",
      json_buffers(plan), "messages", json_messages(plan));

  *text_out = json ? json_dumps(json, JSON_INDENT(2)) : NULL;
  json_decref(json);
  MZ_REQUIRE(*text_out, MZ_ERR_NOMEM, "no memory for the plan as JSON");
  return MZ_OK;
}
