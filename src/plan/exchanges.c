/* SPDX-License-Identifier: Apache-2.0 */
/* Exchanges of runs, which travel while something else is computed.
 *
 * The rounds of a run begin with dispatches and end with returns, behind which
 * there may be steps (gradients of weights) that touch nothing of what the
 * returns send, nor of the token side.
 * `ahead` runs of a MoE have their own exchanged buffers, so with runs 0, 1,
 * ... in the order of the walk:
 *
 *   behind the counts, or the last step that writes what they send:
 *             dispatches of the first `ahead` runs
 *   run i     wait for the returns of run i - ahead, whose buffers it writes
 *             rounds { after the first one: its dispatches, wait for the
 *                      returns of the round before;
 *                      wait for the dispatches; compute; post the returns;
 *                      compute the rest }
 *             dispatches of run i + ahead
 *   before a step that touches what they fill, or at the end of the layer:
 *             wait for the other returns
 *
 * Why this overlaps: a message starts when the work that the stream had at its
 * post is done. With two runs ahead, the dispatch of run i + 2 and the return
 * of run i are posted behind the experts of run i and before those of run i + 1
 * are launched, so they travel under run i + 1. The host waits for both before
 * it launches run i + 2; by then run i + 1 is in the stream, so the device
 * computes while the host waits. On the CPU a step is done when it returns, and
 * the communication thread moves what was posted before it.
 *
 * Of two dispatches under way the later starts when the other has arrived
 * (train/routing.c): the experts that compute first need one of them only.
 *
 * In rounds after the first a return travels under a dispatch, and under the
 * steps behind it, but no dispatch ahead: how many rounds there are is known
 * from the counts alone, and they are for skewed layers. */
#include "plan/sketch.h"

#include "base/alloc.h"
#include "base/check.h"

/* --- what may travel early and late --- */

/* An exchange in this direction whose expert side is of a round. */
static bool goes(const mz_decl_t *d, const mz_step_t *step,
                 mz_direction_t direction)
{
  return step->kind == MZ_STEP_EXCHANGE && step->direction == direction &&
         d->buffers[direction == MZ_DISPATCH ? step->recv : step->send].kind ==
             MZ_ROWS_ROUND;
}

/* Past the dispatch at a step, or the branch with nothing but dispatches. */
static int32_t past_dispatch(const mz_decl_t *d, const mz_step_t *steps,
                             int32_t at, int32_t end)
{
  int32_t close;

  if (goes(d, &steps[at], MZ_DISPATCH)) return at + 1;
  if (steps[at].kind != MZ_STEP_BRANCH) return at;
  close = mz_step_end(steps, at, end);
  for (int32_t i = at + 1; i < close; i++)
    if (!goes(d, &steps[i], MZ_DISPATCH)) return at;
  return close + 1;
}

/* Whether a step inside of the runs touches what travels on the token side, one
 * behind the returns what they send, or a dispatch arrives where a return
 * leaves from. */
static bool collides(const mz_flow_t *f, const mz_step_t *steps, int32_t end)
{
  for (int32_t i = f->head; i < f->tail_end; i++) {
    const mz_step_t *x = &steps[i];
    bool out = x->direction == MZ_DISPATCH;

    if (x->kind != MZ_STEP_EXCHANGE) continue;
    for (int32_t j = f->head_end; j < end; j++)
      if (mz_step_touches(&steps[j], out ? x->send : x->recv)) return true;
    for (int32_t j = f->tail_end; !out && j < end; j++)
      if (mz_step_touches(&steps[j], x->send)) return true;
    for (int32_t j = f->tail; out && j < f->tail_end; j++)
      if (x->recv == steps[j].send) return true;
  }
  return false;
}

static void find_ends(const mz_plan_t *p, mz_flow_t *f, const mz_step_t *steps)
{
  const mz_decl_t *d = p->decl;
  int32_t end = f->close - 1;

  f->head = f->head_end = f->tail = f->tail_end = f->close;
  if (steps[f->first].kind != MZ_STEP_ROUNDS ||
      mz_step_end(steps, f->first, f->close) != end)
    return;
  f->head = f->head_end = f->first + 1;
  f->tail = f->tail_end = end;
  while (f->head_end < end &&
         past_dispatch(d, steps, f->head_end, end) > f->head_end)
    f->head_end = past_dispatch(d, steps, f->head_end, end);
  while (f->tail_end > f->head_end &&
         steps[f->tail_end - 1].kind == MZ_STEP_COMPUTE)
    f->tail_end--;
  f->tail = f->tail_end;
  while (f->tail > f->head_end && goes(d, &steps[f->tail - 1], MZ_RETURN))
    f->tail--;
  if (p->opts.overlap_chunks > 0 && !collides(f, steps, end)) return;
  f->head_end = f->head;
  f->tail = f->tail_end;
}

/* The step behind which the first dispatches can be posted; -1: none. */
static int32_t find_after(const mz_flow_t *f, const mz_step_t *steps,
                          int32_t begin)
{
  for (int32_t i = f->first - 2; i >= begin; i--) {
    if (steps[i].kind == MZ_STEP_END) return -1; /* of other runs */
    if (steps[i].kind == MZ_STEP_COUNTS && steps[i].moe == f->moe) return i;
    for (int32_t j = f->head; j < f->head_end; j++)
      if (steps[j].kind == MZ_STEP_EXCHANGE &&
          (mz_step_writes(&steps[i], steps[j].send) ||
           mz_step_touches(&steps[i], steps[j].recv)))
        return i;
  }
  return -1;
}

/* --- entries and buffers --- */

static mz_status_t add_entry(mz_sketch_t *s, const mz_step_t *step, int32_t run)
{
  mz_plan_t *p = s->plan;
  const mz_moe_plan_t *m = &p->moes[step->moe];
  const mz_moe_opts_t *o = &p->decl->moes[step->moe].opts;
  const mz_decl_buffer_t *b = &p->decl->buffers[step->send];
  mz_entry_t e = {.kind = MZ_ENTRY_TOKENS,
                  .lane = 0,
                  .group = m->ep_group,
                  .dtype = b->dtype,
                  .moe = step->moe,
                  .staging = -1,
                  .packed = -1,
                  .target = -1,
                  .direction = step->direction,
                  .send = step->send,
                  .recv = step->recv};
  int64_t row_bytes = b->width * (int64_t)mz_dtype_bytes(b->dtype);
  int64_t sent = p->max_tokens * o->k, got = sent * o->ep_size;
  int32_t entry;

  if (mz_route_drops(o, s->train)) got = m->round_rows;
  if (run == m->first_run)
    e.send_bytes = (step->direction == MZ_DISPATCH ? sent : got) * row_bytes;
  e.max_calls = mz_max_i64(1, mz_div_up(got, m->round_rows));
  return MZ_TRACE(mz_emit_entry(s->emit, e, &entry));
}

static int32_t run_of(const mz_sketch_t *s, const mz_flow_t *f, int32_t i)
{
  const mz_moe_plan_t *m = &s->plan->moes[f->moe];

  return m->first_run + (f->pass == MZ_FORWARD ? i : m->num_runs - 1 - i);
}

/* What runs under way at once exchange lies apart. */
static mz_status_t add_twins(mz_sketch_t *s, const mz_flow_t *f,
                             const mz_step_t *steps)
{
  if (s->plan->moes[f->moe].ahead < 2) return MZ_OK;
  for (int32_t i = f->head; i < f->head_end; i++)
    if (steps[i].kind == MZ_STEP_EXCHANGE)
      MZ_TRY(mz_plan_add_twin(s->plan, steps[i].recv));
  for (int32_t i = f->tail; i < f->tail_end; i++)
    MZ_TRY(mz_plan_add_twin(s->plan, steps[i].send));
  return MZ_OK;
}

mz_status_t mz_flow_create(mz_sketch_t *s, mz_pass_t pass, int32_t begin,
                           int32_t runs, int32_t close)
{
  const mz_step_t *steps = s->plan->decl->steps[pass];
  mz_flow_t f = {.pass = pass,
                 .moe = steps[runs].moe,
                 .first = runs + 1,
                 .close = close,
                 .first_entry = s->plan->num_entries};

  find_ends(s->plan, &f, steps);
  f.after = find_after(&f, steps, begin);
  MZ_TRY(add_twins(s, &f, steps));
  for (int32_t i = 0; i < s->plan->moes[f.moe].num_runs; i++)
    for (int32_t j = f.first; j < close; j++)
      if (steps[j].kind == MZ_STEP_EXCHANGE)
        MZ_TRY(add_entry(s, &steps[j], run_of(s, &f, i)));
  MZ_TRY(
      mz_grow(&s->flows, &s->cap_flows, s->num_flows + 1, "runs of a layer"));
  s->flows[s->num_flows++] = f;
  return MZ_OK;
}

/* --- operations --- */

/* The entry of an exchange of run i. */
static int32_t entry_of(const mz_flow_t *f, const mz_step_t *steps, int32_t i,
                        int32_t at)
{
  int32_t num = 0, before = 0;

  for (int32_t j = f->first; j < f->close; j++)
    if (steps[j].kind == MZ_STEP_EXCHANGE) {
      before += j < at;
      num++;
    }
  return f->first_entry + i * num + before;
}

static mz_status_t put(mz_sketch_t *s, const mz_flow_t *f, int32_t i,
                       int32_t at, mz_op_kind_t kind, bool this_round)
{
  const mz_step_t *steps = s->plan->decl->steps[f->pass];
  mz_op_t op = {.kind = kind,
                .entry = entry_of(f, steps, i, at),
                .moe = f->moe,
                .run = run_of(s, f, i),
                .flag = this_round};

  return MZ_TRACE(mz_sketch_op(s, op));
}

/* The exchanges of steps [first, end), with the branches around them. */
static mz_status_t put_all(mz_sketch_t *s, const mz_flow_t *f, int32_t i,
                           int32_t first, int32_t end, mz_op_kind_t kind,
                           bool this_round)
{
  const mz_step_t *steps = s->plan->decl->steps[f->pass];
  int64_t branch = -1;

  for (int32_t at = first; at < end; at++) {
    mz_op_t op = {.kind = MZ_OP_BRANCH,
                  .moe = f->moe,
                  .run = run_of(s, f, i),
                  .flag = steps[at].saved};

    if (steps[at].kind == MZ_STEP_EXCHANGE) {
      MZ_TRY(put(s, f, i, at, kind, this_round));
    } else if (steps[at].kind == MZ_STEP_BRANCH) {
      branch = s->num_ops;
      MZ_TRY(mz_sketch_op(s, op));
    } else {
      mz_sketch_close(s, branch);
    }
  }
  return MZ_OK;
}

static mz_status_t post_dispatches(mz_sketch_t *s, const mz_flow_t *f,
                                   int32_t i)
{
  if (i >= s->plan->moes[f->moe].num_runs) return MZ_OK;
  return MZ_TRACE(put_all(s, f, i, f->head, f->head_end, MZ_OP_POST, false));
}

static mz_status_t post_first(mz_sketch_t *s, const mz_flow_t *f)
{
  for (int32_t i = 0; i < s->plan->moes[f->moe].ahead; i++)
    MZ_TRY(post_dispatches(s, f, i));
  return MZ_OK;
}

/* Waits for the returns of runs before run @p end. */
static mz_status_t await(mz_sketch_t *s, mz_flow_t *f, int32_t end)
{
  for (; f->num_awaited < end; f->num_awaited++)
    MZ_TRY(
        put_all(s, f, f->num_awaited, f->tail, f->tail_end, MZ_OP_WAIT, false));
  return MZ_OK;
}

static bool must_await(const mz_flow_t *f, const mz_step_t *steps,
                       const mz_step_t *step)
{
  for (int32_t i = f->tail; step && i < f->tail_end; i++)
    if (mz_step_touches(step, steps[i].send) ||
        mz_step_touches(step, steps[i].recv))
      return true;
  return !step || step->kind != MZ_STEP_COMPUTE;
}

mz_status_t mz_flows_before(mz_sketch_t *s, const mz_step_t *step)
{
  for (int64_t i = 0; i < s->num_flows; i++) {
    mz_flow_t *f = &s->flows[i];

    if (f->begun && must_await(f, s->plan->decl->steps[f->pass], step))
      MZ_TRY(await(s, f, s->plan->moes[f->moe].num_runs));
  }
  return MZ_OK;
}

mz_status_t mz_flows_behind(mz_sketch_t *s, int32_t step)
{
  for (int64_t i = 0; i < s->num_flows; i++)
    if (s->flows[i].after == step) MZ_TRY(post_first(s, &s->flows[i]));
  return MZ_OK;
}

mz_status_t mz_flow_begin_run(mz_sketch_t *s, mz_flow_t *f, int32_t i)
{
  f->begun = true;
  if (i == 0 && f->after < 0) MZ_TRY(post_first(s, f));
  return MZ_TRACE(await(s, f, i + 1 - s->plan->moes[f->moe].ahead));
}

mz_status_t mz_flow_begin_round(mz_sketch_t *s, mz_flow_t *f, int32_t i,
                                int32_t step)
{
  int64_t again = s->num_ops;
  mz_op_t op = {.kind = MZ_OP_AGAIN, .moe = f->moe, .run = run_of(s, f, i)};

  if (step + 1 != f->head) return MZ_OK; /* rounds inside of those */
  if (f->head == f->head_end && f->tail == f->tail_end) return MZ_OK;
  MZ_TRY(mz_sketch_op(s, op));
  MZ_TRY(put_all(s, f, i, f->head, f->head_end, MZ_OP_POST, true));
  MZ_TRY(put_all(s, f, i, f->tail, f->tail_end, MZ_OP_WAIT, true));
  mz_sketch_close(s, again);
  return MZ_OK;
}

mz_status_t mz_flow_exchange(mz_sketch_t *s, mz_flow_t *f, int32_t i,
                             int32_t step)
{
  if (step < f->head || step >= f->head_end)
    MZ_TRY(put(s, f, i, step, MZ_OP_POST, true));
  if (step >= f->tail && step < f->tail_end) return MZ_OK;
  return MZ_TRACE(put(s, f, i, step, MZ_OP_WAIT, true));
}

mz_status_t mz_flow_end_run(mz_sketch_t *s, mz_flow_t *f, int32_t i)
{
  return MZ_TRACE(post_dispatches(s, f, i + s->plan->moes[f->moe].ahead));
}
