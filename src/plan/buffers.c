/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers: what there is, between which operations it lives, and where in the
 * arena it lies. Buffers whose lives meet in no walk may share bytes. */
#include "plan/plan_impl.h"

#include "base/alloc.h"
#include "base/check.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

mz_status_t mz_plan_add_buffer(mz_plan_t *plan, const char *name,
                               mz_category_t category, int64_t bytes,
                               bool persistent, int32_t *buffer_out)
{
  mz_plan_buffer_t b = {
      .category = category, .bytes = bytes, .persistent = persistent};

  snprintf(b.name, sizeof b.name, "%.*s", MZ_NAME_MAX - 1, name);
  for (int w = 0; w < MZ_NUM_WALKS; w++)
    b.life[w] = (mz_life_t){INT_MAX, -1};
  MZ_TRY(mz_grow(&plan->buffers, &plan->cap_buffers, plan->num_buffers + 1,
                 "planned buffers"));
  *buffer_out = plan->num_buffers;
  plan->buffers[plan->num_buffers++] = b;
  return MZ_OK;
}

/* --- what there is --- */

static mz_status_t decl_bytes(const mz_plan_t *p, const mz_decl_buffer_t *b,
                              int64_t *row_bytes, int64_t *bytes)
{
  int64_t rows = b->rows;

  if (b->kind == MZ_ROWS_TOKENS)
    MZ_TRY(mz_mul_i64(b->rows, p->max_tokens, &rows));
  if (b->kind == MZ_ROWS_ROUND) rows = p->moes[b->moe].round_rows;
  if (b->kind == MZ_ROWS_POOL) rows = p->pool_rows;
  MZ_TRY(mz_mul_i64(b->width, (int64_t)mz_dtype_bytes(b->dtype), row_bytes));
  return MZ_TRACE(mz_mul_i64(rows, *row_bytes, bytes));
}

/* Pool buffers of one name are one buffer, as wide as the widest. */
static int32_t find_pool(const mz_plan_t *p, int64_t until, const char *name)
{
  for (int64_t i = 0; i < until; i++)
    if (p->decl->buffers[i].kind == MZ_ROWS_POOL &&
        strcmp(p->decl->buffers[i].name, name) == 0)
      return p->buffer_of_decl[i];
  return -1;
}

static mz_status_t add_declared(mz_plan_t *p)
{
  for (int64_t i = 0; i < p->decl->num_buffers; i++) {
    const mz_decl_buffer_t *b = &p->decl->buffers[i];
    int64_t row_bytes, bytes;
    int32_t *id = &p->buffer_of_decl[i];

    MZ_TRY(decl_bytes(p, b, &row_bytes, &bytes));
    *id = b->kind == MZ_ROWS_POOL ? find_pool(p, i, b->name) : -1;
    if (*id < 0)
      MZ_TRY(mz_plan_add_buffer(p, b->name, b->category, bytes, false, id));
    p->buffers[*id].bytes = mz_max_i64(p->buffers[*id].bytes, bytes);
    p->buffers[*id].row_bytes =
        mz_max_i64(p->buffers[*id].row_bytes, row_bytes);
  }
  return MZ_OK;
}

static mz_status_t add_regions(mz_plan_t *p)
{
  int64_t params = 0, accum = 0, state = 0, bytes;

  for (int32_t i = 0; i < p->num_units; i++) {
    const mz_unit_t *u = &p->units[i];
    params += u->elements / u->p;
    accum += u->elements / u->g;
    state += u->elements / u->o;
  }
  MZ_TRY(mz_mul_i64(params, (int64_t)mz_dtype_bytes(p->dtype), &bytes));
  MZ_TRY(
      mz_plan_add_buffer(p, "params", MZ_CAT_PARAMS, bytes, true, &p->params));
  p->accum = p->master = p->exp_avg = p->exp_avg_sq = -1;
  if (p->dtype != MZ_F32)
    MZ_TRY(mz_plan_add_buffer(p, "master", MZ_CAT_OPTIMIZER, state * 4, true,
                              &p->master));
  if (p->opts.inference) return MZ_OK;
  MZ_TRY(mz_plan_add_buffer(p, "accumulators", MZ_CAT_GRADS, accum * 4, true,
                            &p->accum));
  MZ_TRY(mz_plan_add_buffer(p, "exp_avg", MZ_CAT_OPTIMIZER, state * 4, true,
                            &p->exp_avg));
  return MZ_TRACE(mz_plan_add_buffer(p, "exp_avg_sq", MZ_CAT_OPTIMIZER,
                                     state * 4, true, &p->exp_avg_sq));
}

static mz_status_t add_workspace(mz_plan_t *p)
{
  int64_t bytes;

  p->workspace = -1;
  MZ_TRY(mz_plan_workspace_bytes(p, &bytes));
  if (bytes == 0) return MZ_OK;
  return MZ_TRACE(mz_plan_add_buffer(p, "kernels", MZ_CAT_WORKSPACE, bytes,
                                     true, &p->workspace));
}

/* With GPUs an arena of its own, small: everything in it stays. On the CPU
 * backend memory is the host's. */
static mz_status_t add_host(mz_plan_t *p, const char *name,
                            mz_category_t category, int64_t bytes,
                            int32_t *buffer_out)
{
  MZ_TRY(mz_plan_add_buffer(p, name, category, bytes, true, buffer_out));
  p->buffers[*buffer_out].host = p->opts.cuda;
  return MZ_OK;
}

/* The table that the optimizer's kernels read, and a partial sum for each of
 * its rows. */
static mz_status_t add_stretches(mz_plan_t *p)
{
  static const char *const names[] = {"stretches of sums",
                                      "stretches of the update"};

  p->stretches[0] = p->stretches[1] = p->squares = -1;
  if (p->opts.inference) return MZ_OK;
  for (int share = 0; share < 2; share++) {
    for (int32_t i = 0; i < p->num_segments[share]; i++)
      p->num_stretches[share] +=
          mz_div_up(p->segments[share][i].length, MZ_PLAN_STRETCH);
    MZ_TRY(mz_plan_add_buffer(p, names[share], MZ_CAT_WORKSPACE,
                              p->num_stretches[share] * MZ_PLAN_STRETCH_BYTES,
                              true, &p->stretches[share]));
  }
  return MZ_TRACE(mz_plan_add_buffer(p, "sums of squares", MZ_CAT_WORKSPACE,
                                     p->num_stretches[MZ_SHARE_OWNED] *
                                         (int64_t)sizeof(double),
                                     true, &p->squares));
}

static int64_t counts_bytes(const mz_plan_t *p)
{
  int64_t bytes = 0;

  for (int32_t m = 0; m < p->num_moes; m++) {
    const mz_moe_opts_t *o = &p->decl->moes[m].opts;
    bytes += MZ_PLAN_COUNTS_BYTES(o->num_experts, o->ep_size);
  }
  return bytes;
}

static int64_t window_bytes(const mz_plan_t *p)
{
  int64_t most = 0;

  for (int32_t r = 0; r < p->num_runs; r++) {
    const mz_run_t *run = &p->runs[r];
    int64_t ep = p->decl->moes[run->moe].opts.ep_size;
    most = mz_max_i64(most, run->num_experts * ep + run->num_experts + 1);
  }
  return most * 4;
}

static mz_status_t add_engine(mz_plan_t *p)
{
  int64_t world = p->opts.world_size, stats = p->stats_elements * 8;
  int64_t sequences = p->opts.micro_sequences * p->opts.accumulation;
  int64_t data = sequences * p->opts.sequence_length * 8 + sequences * 8;
  int64_t scalars = 8 * MZ_PLAN_SCALARS;
  const struct {
    const char *name;
    mz_category_t category;
    bool host;
    int64_t bytes;
    int32_t *id;
  } all[] = {
      {"statistics", MZ_CAT_ROUTING, false, stats, &p->stats},
      {"statistics told", MZ_CAT_ROUTING, true, stats, &p->stats_own},
      {"statistics of all", MZ_CAT_ROUTING, true, stats * world, &p->stats_all},
      {"statistics, sum", MZ_CAT_ROUTING, false, stats, &p->stats_total},
      {"counts", MZ_CAT_ROUTING, true, counts_bytes(p), &p->counts_all},
      {"window", MZ_CAT_ROUTING, false, window_bytes(p), &p->round_counts},
      {"token rows", MZ_CAT_ROUTING, false, 8, &p->token_rows},
      {"scalars", MZ_CAT_ROUTING, false, scalars, &p->scalars},
      {"scalars told", MZ_CAT_ROUTING, true, scalars, &p->scalars_own},
      {"scalars of all", MZ_CAT_ROUTING, true, scalars * world,
       &p->scalars_all},
      {"clip factor", MZ_CAT_WORKSPACE, false, 8, &p->factor},
      {"data", MZ_CAT_DATA, false, data, &p->data},
      {"data to copy", MZ_CAT_DATA, true, data, &p->data_host},
  };

  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    if (all[i].host)
      MZ_TRY(
          add_host(p, all[i].name, all[i].category, all[i].bytes, all[i].id));
    else
      MZ_TRY(mz_plan_add_buffer(p, all[i].name, all[i].category, all[i].bytes,
                                true, all[i].id));
  }
  return MZ_TRACE(add_stretches(p));
}

mz_status_t mz_plan_make_buffers(mz_plan_t *plan)
{
  MZ_TRY(mz_new(plan->decl->num_buffers, "buffer ids", &plan->buffer_of_decl));
  MZ_TRY(mz_new(plan->decl->num_buffers, "twin ids", &plan->twin_of_decl));
  for (int64_t i = 0; i < plan->decl->num_buffers; i++)
    plan->twin_of_decl[i] = -1;
  MZ_TRY(add_regions(plan));
  MZ_TRY(add_workspace(plan));
  MZ_TRY(add_engine(plan));
  return MZ_TRACE(add_declared(plan));
}

mz_status_t mz_plan_add_twin(mz_plan_t *plan, int32_t decl_buffer)
{
  const mz_plan_buffer_t *b = &plan->buffers[plan->buffer_of_decl[decl_buffer]];
  char name[MZ_NAME_MAX + 8];

  if (plan->twin_of_decl[decl_buffer] >= 0) return MZ_OK;
  snprintf(name, sizeof name, "%s.twin", b->name);
  return MZ_TRACE(mz_plan_add_buffer(plan, name, b->category, b->bytes, false,
                                     &plan->twin_of_decl[decl_buffer]));
}

int32_t mz_plan_buffer_at(const mz_plan_t *plan, int32_t decl_buffer,
                          int32_t run)
{
  int32_t twin = plan->twin_of_decl[decl_buffer];

  if (twin < 0 || run < 0 ||
      (run - plan->moes[plan->runs[run].moe].first_run) % 2 == 0)
    return plan->buffer_of_decl[decl_buffer];
  return twin;
}

/* --- lives --- */

static void touch(mz_plan_t *p, mz_walk_t w, int32_t buffer, int32_t op)
{
  mz_life_t *life;

  if (buffer < 0) return;
  life = &p->buffers[buffer].life[w];
  if (op < life->first) life->first = op;
  if (op > life->last) life->last = op;
}

static mz_status_t touch_step(mz_plan_t *p, mz_walk_t w, int32_t at)
{
  const mz_op_t *op = &p->ops[w][at];
  const mz_compute_opts_t *c = &p->decl->steps[op->pass][op->step].compute;

  for (int32_t i = 0; i < c->num_reads; i++) {
    int32_t b = mz_plan_buffer_at(p, c->reads[i], op->run);
    MZ_REQUIRE(p->buffers[b].life[w].last >= 0, MZ_ERR_ARG,
               "step %s of %s reads buffer %s before it is written", c->name,
               p->decl->layers[op->layer].name, p->buffers[b].name);
    touch(p, w, b, at);
  }
  for (int32_t i = 0; i < c->num_writes; i++)
    touch(p, w, mz_plan_buffer_at(p, c->writes[i], op->run), at);
  return MZ_OK;
}

static mz_status_t touch_op(mz_plan_t *p, mz_walk_t w, int32_t at)
{
  const mz_op_t *op = &p->ops[w][at];
  const mz_entry_t *e;

  if (op->kind == MZ_OP_COMPUTE) return touch_step(p, w, at);
  if (op->kind == MZ_OP_PREPARE || op->kind == MZ_OP_RELEASE) {
    touch(p, w, op->weights, at);
    touch(p, w, op->grads, at);
  }
  if (op->kind != MZ_OP_POST && op->kind != MZ_OP_WAIT &&
      op->kind != MZ_OP_PACK && op->kind != MZ_OP_PLACE &&
      op->kind != MZ_OP_SUM)
    return MZ_OK;
  e = &p->entries[op->entry];
  touch(p, w, e->staging, at);
  touch(p, w, e->target, at);
  touch(p, w, e->packed, at); /* a sum reads the own part there */
  if (e->kind == MZ_ENTRY_COUNTS)
    touch(p, w, p->buffer_of_decl[p->moes[e->moe].counts], at);
  if (e->kind == MZ_ENTRY_TOKENS) {
    touch(p, w, mz_plan_buffer_at(p, e->send, op->run), at);
    touch(p, w, mz_plan_buffer_at(p, e->recv, op->run), at);
  }
  return MZ_OK;
}

/* The loops around an operation: the innermost, and the one around a loop;
 * both by operation, -1: none. */
typedef struct loops {
  int32_t *inner, *around;
  const mz_op_t *ops;
} loops_t;

static void find_loops(const mz_plan_t *p, mz_walk_t w, loops_t *loops)
{
  int32_t loop = -1;

  for (int32_t at = 0; at < p->num_ops[w]; at++) {
    if (loops->ops[at].kind == MZ_OP_LOOP) {
      loops->around[at] = loop;
      loop = at;
    }
    loops->inner[at] = loop;
    if (loops->ops[at].kind == MZ_OP_END_LOOP) loop = loops->around[loop];
  }
}

/* The outermost loop around @p at that is not around @p other; -1: none. */
static int32_t crossed(const loops_t *l, int32_t at, int32_t other)
{
  int32_t found = -1;

  for (int32_t i = l->inner[at]; i >= 0; i = l->around[i])
    if (other < i || other >= l->ops[i].jump) found = i;
  return found;
}

/* What crosses the bounds of a loop lives in all of its rounds. */
static mz_status_t widen(mz_plan_t *p, mz_walk_t w)
{
  loops_t loops = {.ops = p->ops[w]};
  mz_status_t st;

  MZ_TRY_GOTO(st, mz_new(p->num_ops[w], "loops", &loops.inner), done);
  MZ_TRY_GOTO(st, mz_new(p->num_ops[w], "outer loops", &loops.around), done);
  find_loops(p, w, &loops);
  for (int32_t b = 0; b < p->num_buffers; b++) {
    mz_life_t *l = &p->buffers[b].life[w];
    int32_t out, in;

    if (l->last < 0) continue;
    out = crossed(&loops, l->last, l->first);
    in = crossed(&loops, l->first, l->last);
    if (out >= 0) l->last = p->ops[w][out].jump - 1;
    if (in >= 0) l->first = in;
  }
done:
  mz_free(loops.inner);
  mz_free(loops.around);
  return st;
}

/* --- places --- */

enum { STRETCHES = 64 };

/* A bit for each of 64 equal stretches of all walks: buffers without a common
 * bit do not meet, which spares most comparisons. */
static uint64_t stretches_of(const mz_plan_t *p, const mz_plan_buffer_t *b)
{
  int64_t all = 0, before = 0;
  uint64_t bits = 0;

  if (b->persistent) return UINT64_MAX;
  for (int w = 0; w < MZ_NUM_WALKS; w++)
    all += p->num_ops[w];
  for (int w = 0; w < MZ_NUM_WALKS; w++) {
    const mz_life_t *l = &b->life[w];
    int64_t from = (before + l->first) * STRETCHES / all;
    int64_t to = (before + l->last) * STRETCHES / all;

    for (int64_t i = from; l->last >= 0 && i <= to; i++)
      bits |= UINT64_C(1) << i;
    before += p->num_ops[w];
  }
  return bits;
}

static bool lives(const mz_plan_buffer_t *b)
{
  bool lives = b->persistent;

  for (int w = 0; w < MZ_NUM_WALKS; w++)
    lives = lives || b->life[w].last >= 0;
  return lives && b->bytes > 0;
}

static bool meet(const mz_plan_buffer_t *a, const mz_plan_buffer_t *b)
{
  if (a->persistent || b->persistent) return true;
  for (int w = 0; w < MZ_NUM_WALKS; w++)
    if (a->life[w].first <= b->life[w].last &&
        b->life[w].first <= a->life[w].last)
      return true;
  return false;
}

static int by_size(const void *a, const void *b, void *plan)
{
  const mz_plan_buffer_t *all = ((const mz_plan_t *)plan)->buffers;
  const mz_plan_buffer_t *x = &all[*(const int32_t *)a];
  const mz_plan_buffer_t *y = &all[*(const int32_t *)b];

  if (x->persistent != y->persistent) return x->persistent ? -1 : 1;
  if (x->bytes != y->bytes) return x->bytes > y->bytes ? -1 : 1;
  return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1;
}

typedef struct placed {
  uint64_t stretches;
  int32_t buffer;
} placed_t;

/* Lowest offset where a buffer meets none that is placed. Placed ones are kept
 * in order of offset. */
static void place(mz_plan_t *p, int32_t id, placed_t *placed, int32_t *num)
{
  mz_plan_buffer_t *b = &p->buffers[id];
  placed_t own = {stretches_of(p, b), id};
  int64_t size = mz_round_up(b->bytes, MZ_ALIGN_BYTES), at = 0;
  int32_t i = *num;

  for (int32_t j = 0; j < *num; j++) {
    const mz_plan_buffer_t *o;

    if (!(placed[j].stretches & own.stretches)) continue;
    o = &p->buffers[placed[j].buffer];
    if (!meet(b, o)) continue;
    if (o->offset >= at + size) break;
    at = mz_max_i64(at, o->offset + mz_round_up(o->bytes, MZ_ALIGN_BYTES));
  }
  b->offset = at;
  p->arena_bytes = mz_max_i64(p->arena_bytes, at + size);
  for (; i > 0 && p->buffers[placed[i - 1].buffer].offset > at; i--)
    placed[i] = placed[i - 1];
  placed[i] = own;
  ++*num;
}

mz_status_t mz_plan_place_buffers(mz_plan_t *plan)
{
  int32_t *order = NULL, num = 0;
  placed_t *placed = NULL;
  mz_status_t st;

  for (int w = 0; w < MZ_NUM_WALKS; w++) {
    for (int32_t i = 0; i < plan->num_ops[w]; i++)
      MZ_TRY(touch_op(plan, (mz_walk_t)w, i));
    MZ_TRY(widen(plan, (mz_walk_t)w));
  }
  MZ_TRY_GOTO(st, mz_new(plan->num_buffers, "order of buffers", &order), done);
  MZ_TRY_GOTO(st, mz_new(plan->num_buffers, "placed buffers", &placed), done);
  for (int32_t i = 0; i < plan->num_buffers; i++)
    order[i] = i;
  qsort_r(order, (size_t)plan->num_buffers, sizeof *order, by_size, plan);
  for (int32_t i = 0; i < plan->num_buffers; i++)
    if (lives(&plan->buffers[order[i]]) && !plan->buffers[order[i]].host)
      place(plan, order[i], placed, &num);
  for (int32_t i = 0; i < plan->num_buffers; i++) {
    mz_plan_buffer_t *b = &plan->buffers[i];

    if (!b->host) continue;
    b->offset = plan->host_bytes;
    plan->host_bytes += mz_round_up(b->bytes, MZ_ALIGN_BYTES);
  }
done:
  mz_free(order);
  mz_free(placed);
  return st;
}
