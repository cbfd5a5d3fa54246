/* SPDX-License-Identifier: Apache-2.0 */
/* The ledger: bytes by category, messages by kind and group, operations. */
#include "plan/plan_impl.h"

#include "base/alloc.h"
#include "base/check.h"

static mz_traffic_t *line_of(mz_plan_t *p, const mz_entry_t *e)
{
  for (int32_t i = 0; i < p->num_traffic; i++)
    if (p->traffic[i].kind == e->kind && p->traffic[i].group == e->group)
      return &p->traffic[i];
  p->traffic[p->num_traffic] = (mz_traffic_t){
      .kind = e->kind, .group = e->group, .bound = e->kind == MZ_ENTRY_TOKENS};
  return &p->traffic[p->num_traffic++];
}

static mz_status_t count_messages(mz_plan_t *p)
{
  MZ_TRY(mz_new((int64_t)p->num_groups * (MZ_ENTRY_SCALARS + 1), "traffic",
                &p->traffic));
  for (int w = 0; w < MZ_NUM_WALKS; w++)
    for (int32_t i = 0; i < p->num_ops[w]; i++) {
      const mz_op_t *op = &p->ops[w][i];
      const mz_entry_t *e = &p->entries[op->entry];
      mz_traffic_t *t;

      if (op->kind != MZ_OP_POST || p->groups[e->group].size == 1) continue;
      t = line_of(p, e);
      *(w == MZ_WALK_MICRO  ? &t->calls_micro
        : w == MZ_WALK_EVAL ? &t->calls_eval
                            : &t->calls_update) += e->max_calls;
      *(w == MZ_WALK_MICRO  ? &t->bytes_micro
        : w == MZ_WALK_EVAL ? &t->bytes_eval
                            : &t->bytes_update) += e->send_bytes;
    }
  return MZ_OK;
}

/* The most bytes of a category alive at one operation. */
static int64_t peak_of(const mz_plan_t *p, int category)
{
  int64_t fixed = 0, peak = 0;

  for (int32_t b = 0; b < p->num_buffers; b++)
    if (p->buffers[b].persistent && (int)p->buffers[b].category == category)
      fixed += mz_round_up(p->buffers[b].bytes, MZ_ALIGN_BYTES);
  for (int w = 0; w < MZ_NUM_WALKS; w++)
    for (int32_t b = 0; b < p->num_buffers; b++) {
      const mz_plan_buffer_t *x = &p->buffers[b];
      int32_t at = x->life[w].first;
      int64_t live = 0;

      if (x->persistent || (int)x->category != category || x->life[w].last < 0)
        continue;
      for (int32_t c = 0; c < p->num_buffers; c++) {
        const mz_plan_buffer_t *y = &p->buffers[c];
        if (!y->persistent && (int)y->category == category &&
            y->life[w].first <= at && y->life[w].last >= at)
          live += mz_round_up(y->bytes, MZ_ALIGN_BYTES);
      }
      peak = mz_max_i64(peak, live);
    }
  return fixed + peak;
}

mz_status_t mz_plan_make_ledger(mz_plan_t *plan)
{
  MZ_TRY(count_messages(plan));
  for (int c = 0; c < MZ_NUM_CATEGORIES; c++)
    plan->category_bytes[c] = peak_of(plan, c);
  for (int64_t l = 0; l < plan->decl->num_layers; l++) {
    const mz_layer_t *layer = &plan->decl->layers[l];
    char line[256];
    double operations = 0;

    if (!layer->opts.describe) continue;
    layer->opts.describe(layer->opts.self, plan->max_tokens,
                         plan->opts.sequence_length, line, sizeof line,
                         &operations);
    plan->operations += operations;
  }
  return MZ_OK;
}
