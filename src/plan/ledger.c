/* SPDX-License-Identifier: Apache-2.0 */
/* The ledger: bytes by category, messages by kind and group, operations,
 * whether it fits. */
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
    for (int32_t i = 0, next; i < p->num_ops[w]; i = next) {
      const mz_op_t *op = &p->ops[w][i];
      const mz_entry_t *e = &p->entries[op->entry];
      mz_traffic_t *t;

      /* later rounds are in the calls of an entry's first post */
      next = op->kind == MZ_OP_AGAIN ? op->jump : i + 1;
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

/* Adds to delta [num_ops + 1, MZ_NUM_CATEGORIES] where lives begin and end. */
static void note_lives(const mz_plan_t *p, mz_walk_t w, int64_t *delta)
{
  for (int32_t i = 0; i < p->num_buffers; i++) {
    const mz_plan_buffer_t *b = &p->buffers[i];
    int64_t bytes = mz_round_up(b->bytes, MZ_ALIGN_BYTES);

    if (b->persistent || b->life[w].last < 0) continue;
    delta[(int64_t)b->life[w].first * MZ_NUM_CATEGORIES + b->category] += bytes;
    delta[((int64_t)b->life[w].last + 1) * MZ_NUM_CATEGORIES + b->category] -=
        bytes;
  }
}

/* The most bytes of each category alive at one operation. */
static mz_status_t add_peaks(mz_plan_t *p)
{
  int64_t peak[MZ_NUM_CATEGORIES] = {0}, *delta = NULL;

  for (int w = 0; w < MZ_NUM_WALKS; w++) {
    int64_t live[MZ_NUM_CATEGORIES] = {0};
    int64_t cells = ((int64_t)p->num_ops[w] + 1) * MZ_NUM_CATEGORIES;

    MZ_TRY(mz_new(cells, "bytes by operation", &delta));
    note_lives(p, (mz_walk_t)w, delta);
    for (int64_t i = 0; i < cells; i++) {
      int c = (int)(i % MZ_NUM_CATEGORIES);
      live[c] += delta[i];
      peak[c] = mz_max_i64(peak[c], live[c]);
    }
    mz_free(delta);
  }
  for (int32_t b = 0; b < p->num_buffers; b++)
    if (p->buffers[b].persistent && !p->buffers[b].host)
      peak[p->buffers[b].category] +=
          mz_round_up(p->buffers[b].bytes, MZ_ALIGN_BYTES);
  for (int c = 0; c < MZ_NUM_CATEGORIES; c++)
    p->category_bytes[c] = peak[c];
  return MZ_OK;
}

mz_status_t mz_plan_make_ledger(mz_plan_t *plan)
{
  MZ_TRY(count_messages(plan));
  MZ_TRY(add_peaks(plan));
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
  mz_plan_make_times(plan);
  return MZ_OK;
}

mz_status_t mz_plan_fits(const mz_plan_t *plan, int64_t device_bytes)
{
  MZ_REQUIRE(device_bytes == 0 || plan->arena_bytes <= device_bytes, MZ_ERR_FIT,
             "a rank needs %.3f GiB, the device has %.3f GiB",
             (double)plan->arena_bytes / 0x1p30, (double)device_bytes / 0x1p30);
  return MZ_OK;
}
