/* SPDX-License-Identifier: Apache-2.0 */
/* The predicted step time; the model stands at mz_plan_times_t. */
#include "plan/plan_impl.h"

enum { UPDATE_BYTES = 28 /* w, m, v, gradient read; w, m, v written; fp32 */ };

/* Where the options name no rate; see mz_machine_t. */
static const mz_machine_t cpu = {.flops_per_s = 5e10,
                                 .memory_bytes_per_s = 1.5e10,
                                 .link_bytes_per_s = 5e8,
                                 .latency_s = 1e-4};
static const mz_machine_t gpu = {.flops_per_s = 4.5e14,
                                 .memory_bytes_per_s = 3.9e12,
                                 .link_bytes_per_s = 5e11,
                                 .latency_s = 3e-5};

static const mz_machine_t *usual(const mz_plan_t *p)
{
  return p->opts.cuda ? &gpu : &cpu;
}

static double or_default(double given, double fallback)
{
  return given > 0 ? given : fallback;
}

/* Bytes of a message when every expert gets the same number of rows. */
static double balanced_bytes(const mz_plan_t *p, const mz_op_t *op)
{
  const mz_entry_t *e = &p->entries[op->entry];
  const mz_decl_buffer_t *b;

  if (e->kind != MZ_ENTRY_TOKENS) return (double)e->send_bytes;
  b = &p->decl->buffers[e->send];
  return (double)p->max_tokens * p->decl->moes[e->moe].opts.k *
         (double)b->width * (double)mz_dtype_bytes(b->dtype) /
         p->moes[e->moe].num_runs;
}

/* One round a loop, rows in the pool. */
static double messages_s(const mz_plan_t *p, mz_walk_t w)
{
  const mz_machine_t *m = &p->opts.machine;
  double calls = 0, bytes = 0;

  for (int32_t at = 0; at < p->num_ops[w];) {
    const mz_op_t *op = &p->ops[w][at];

    if (op->kind == MZ_OP_POST &&
        p->groups[p->entries[op->entry].group].size > 1) {
      calls++;
      bytes += balanced_bytes(p, op);
    }
    at = op->kind == MZ_OP_AGAIN || (op->kind == MZ_OP_BRANCH && !op->flag)
             ? op->jump
             : at + 1;
  }
  return calls * or_default(m->latency_s, usual(p)->latency_s) +
         bytes / or_default(m->link_bytes_per_s, usual(p)->link_bytes_per_s);
}

void mz_plan_make_times(mz_plan_t *plan)
{
  const mz_machine_t *m = &plan->opts.machine;
  double micros = (double)plan->opts.accumulation, updated = 0;
  mz_plan_times_t *t = &plan->times;

  for (int32_t i = 0; i < plan->num_units; i++)
    updated += (double)(plan->units[i].elements / plan->units[i].o);
  t->flops_per_s = or_default(m->flops_per_s, usual(plan)->flops_per_s);
  t->compute_s = micros * 3 * 2 * plan->operations / t->flops_per_s;
  t->messages_s = micros * messages_s(plan, MZ_WALK_MICRO) +
                  messages_s(plan, MZ_WALK_BEGIN) +
                  messages_s(plan, MZ_WALK_UPDATE);
  t->update_s =
      updated * UPDATE_BYTES /
      or_default(m->memory_bytes_per_s, usual(plan)->memory_bytes_per_s);
  t->step_s = t->compute_s + t->messages_s + t->update_s;
}
