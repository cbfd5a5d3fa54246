/* SPDX-License-Identifier: Apache-2.0 */
/* The declaration: lists of tensors, buffers, sets of experts and steps. */
#include "plan/decl_impl.h"

#include "base/alloc.h"
#include "base/check.h"

#include <moezero/random.h>
#include <stdio.h>
#include <string.h>

mz_status_t mz_decl_create(mz_decl_t **decl_out)
{
  mz_status_t st;

  MZ_REQUIRE(decl_out, MZ_ERR_ARG, "decl_out is NULL");
  MZ_TRY(mz_new(1, "declaration", decl_out));
  (*decl_out)->num_grouped = -1;
  st = mz_decl_first_groups(*decl_out);
  if (st != MZ_OK) mz_decl_destroy(decl_out);
  return MZ_TRACE(st);
}

void mz_decl_destroy(mz_decl_t **decl)
{
  mz_decl_t *d = decl ? *decl : NULL;

  if (!d) return;
  for (int64_t i = 0; i < d->num_layers; i++)
    if (d->layers[i].opts.destroy)
      d->layers[i].opts.destroy(d->layers[i].opts.self);
  for (int64_t i = 0; i < d->num_moes; i++)
    mz_free(d->moes[i].owned_name);
  mz_free(d->groups);
  mz_free(d->tensors);
  mz_free(d->table);
  mz_free(d->buffers);
  mz_free(d->moes);
  mz_free(d->layers);
  mz_free(d->steps[0]);
  mz_free(d->steps[1]);
  mz_free(d);
  *decl = NULL;
}

/* --- the table of names --- */

static int64_t find_slot(const mz_decl_t *d, uint32_t hash)
{
  int64_t slot = (int64_t)hash & (d->table_size - 1);

  while (d->table[slot] && d->tensors[d->table[slot] - 1].hash != hash)
    slot = (slot + 1) & (d->table_size - 1);
  return slot;
}

static mz_status_t grow_table(mz_decl_t *d)
{
  int64_t size = d->table_size ? d->table_size * 2 : 64;
  int32_t *table;

  if (d->num_tensors * 2 < d->table_size) return MZ_OK;
  MZ_TRY(mz_new(size, "table of tensor names", &table));
  mz_free(d->table);
  d->table = table;
  d->table_size = size;
  for (int64_t i = 0; i < d->num_tensors; i++)
    d->table[find_slot(d, d->tensors[i].hash)] = (int32_t)i + 1;
  return MZ_OK;
}

static mz_status_t copy_name(const char *name, char out[MZ_NAME_MAX])
{
  MZ_REQUIRE(name && name[0], MZ_ERR_ARG, "a name is missing");
  MZ_REQUIRE(strlen(name) < MZ_NAME_MAX, MZ_ERR_ARG,
             "name \"%.40s...\" has %zu bytes, at most %d are allowed", name,
             strlen(name), MZ_NAME_MAX - 1);
  memcpy(out, name, strlen(name) + 1);
  return MZ_OK;
}

static mz_status_t check_tensor(const mz_decl_t *d,
                                const mz_tensor_opts_t *opts)
{
  MZ_REQUIRE(opts->ndim >= 1 && opts->ndim <= 4, MZ_ERR_ARG,
             "%s: %d dimensions, need 1..4", opts->name, opts->ndim);
  for (int i = 0; i < opts->ndim; i++)
    MZ_REQUIRE(opts->shape[i] >= 1, MZ_ERR_ARG,
               "%s: extent %d is %" PRId64 ", need at least 1", opts->name, i,
               opts->shape[i]);
  MZ_REQUIRE(opts->init_std >= 0, MZ_ERR_ARG,
             "%s: standard deviation %g, need at least 0", opts->name,
             opts->init_std);
  MZ_REQUIRE(opts->param_group >= 0 && opts->param_group < d->num_groups,
             MZ_ERR_ARG, "%s: parameter group %d, need 0..%" PRId64, opts->name,
             opts->param_group, d->num_groups - 1);
  return MZ_OK;
}

static mz_status_t add_tensor(mz_decl_t *d, const char *name,
                              const mz_tensor_opts_t *opts, int32_t moe,
                              int32_t expert, int32_t *tensor_out)
{
  mz_tensor_t t = {.ndim = opts->ndim, .elements = 1};
  int64_t slot;

  MZ_TRY(copy_name(name, t.name));
  t.hash = mz_fnv1a(t.name);
  for (int i = 0; i < opts->ndim; i++) {
    t.shape[i] = opts->shape[i];
    MZ_TRY(mz_mul_i64(t.elements, opts->shape[i], &t.elements));
  }
  t.init = opts->init;
  t.init_std = opts->init_std;
  t.param_group = opts->param_group;
  t.block = moe < 0 ? opts->block : -1;
  t.moe = moe;
  t.expert = expert;
  MZ_TRY(grow_table(d));
  slot = find_slot(d, t.hash);
  MZ_REQUIRE(!d->table[slot], MZ_ERR_ARG,
             "tensor \"%s\" has the hash of \"%s\": names must differ, and "
             "their hashes too",
             t.name, d->tensors[d->table[slot] - 1].name);
  MZ_TRY(mz_grow(&d->tensors, &d->cap_tensors, d->num_tensors + 1, "tensors"));
  d->tensors[d->num_tensors] = t;
  *tensor_out = (int32_t)d->num_tensors++;
  d->table[slot] = *tensor_out + 1;
  return MZ_OK;
}

mz_status_t mz_decl_tensor(mz_decl_t *decl, const mz_tensor_opts_t *opts,
                           int32_t *tensor_out)
{
  MZ_TRY(check_tensor(decl, opts));
  return MZ_TRACE(add_tensor(decl, opts->name, opts, -1, -1, tensor_out));
}

mz_status_t mz_decl_borrow(mz_decl_t *decl, const char *name,
                           int32_t *tensor_out)
{
  int32_t t = mz_decl_find_tensor(decl, name);

  MZ_REQUIRE(t >= 0, MZ_ERR_ARG, "no tensor \"%s\" to borrow", name);
  MZ_REQUIRE(decl->tensors[t].moe < 0, MZ_ERR_ARG,
             "\"%s\" is an expert's tensor and cannot be borrowed", name);
  decl->tensors[t].shared = true;
  *tensor_out = t;
  return MZ_OK;
}

mz_status_t mz_decl_moe(mz_decl_t *decl, const mz_moe_opts_t *opts,
                        int32_t *moe_out)
{
  mz_moe_t m = {.opts = *opts};

  MZ_TRY(copy_name(opts->name, m.name));
  MZ_REQUIRE(opts->num_experts >= 1, MZ_ERR_ARG,
             "%s: num_experts is %d, need at least 1", opts->name,
             opts->num_experts);
  MZ_REQUIRE(opts->k >= 1 && opts->k <= opts->num_experts, MZ_ERR_ARG,
             "%s: k is %d, need 1..num_experts=%d", opts->name, opts->k,
             opts->num_experts);
  MZ_REQUIRE(opts->ep_size >= 1 && opts->num_experts % opts->ep_size == 0,
             MZ_ERR_ARG, "%s: num_experts %d is not divisible by ep_size %d",
             opts->name, opts->num_experts, opts->ep_size);
  MZ_REQUIRE((!opts->drop_tokens && opts->eval_drop != MZ_EVAL_DROPS) ||
                 opts->expert_capacity > 0 ||
                 (opts->capacity_factor > 0 && opts->eval_capacity_factor > 0),
             MZ_ERR_ARG, "%s: capacity factors %g and %g, need above 0",
             opts->name, opts->capacity_factor, opts->eval_capacity_factor);
  MZ_REQUIRE(opts->expert_capacity >= 0 && opts->bias_update_rate >= 0,
             MZ_ERR_ARG,
             "%s: expert_capacity %d, bias_update_rate %g, need at least 0",
             opts->name, opts->expert_capacity, opts->bias_update_rate);
  MZ_TRY(mz_grow(&decl->moes, &decl->cap_moes, decl->num_moes + 1, "experts"));
  MZ_TRY(mz_string_copy(opts->name, &m.owned_name));
  m.opts.name = m.owned_name;
  decl->moes[decl->num_moes] = m;
  *moe_out = (int32_t)decl->num_moes++;
  return MZ_OK;
}

mz_status_t mz_decl_expert_tensor(mz_decl_t *decl, int32_t moe,
                                  const mz_tensor_opts_t *opts,
                                  int32_t *first_out)
{
  mz_moe_t *m = &decl->moes[moe];
  int32_t id = -1;

  MZ_TRY(check_tensor(decl, opts));
  MZ_REQUIRE(m->num_tensors < MZ_STEP_MAX_REFS, MZ_ERR_ARG,
             "%s: an expert has at most %d tensors", m->name, MZ_STEP_MAX_REFS);
  for (int32_t e = 0; e < m->opts.num_experts; e++) {
    char name[2 * MZ_NAME_MAX + 32];
    snprintf(name, sizeof name, "%s.experts.%d.%s", m->name, e, opts->name);
    MZ_TRY(add_tensor(decl, name, opts, moe, e, &id));
    if (e == 0) *first_out = id;
  }
  m->tensors[m->num_tensors++] = *first_out;
  return MZ_OK;
}

mz_status_t mz_decl_buffer(mz_decl_t *decl, const mz_buffer_opts_t *opts,
                           int32_t *buffer_out)
{
  mz_decl_buffer_t b = {.category = opts->category,
                        .kind = opts->kind,
                        .rows = opts->rows,
                        .width = opts->width,
                        .moe = opts->moe,
                        .dtype = opts->dtype};
  bool counted = opts->kind == MZ_ROWS_FIXED || opts->kind == MZ_ROWS_TOKENS;

  MZ_TRY(copy_name(opts->name, b.name));
  MZ_REQUIRE(opts->width >= 0 && (!counted || opts->rows >= 0), MZ_ERR_ARG,
             "%s: %" PRId64 " rows of %" PRId64 " elements", opts->name,
             opts->rows, opts->width);
  MZ_REQUIRE(counted || (opts->moe >= 0 && opts->moe < decl->num_moes),
             MZ_ERR_ARG, "%s: no MoE %d", opts->name, opts->moe);
  if (counted) b.moe = -1;
  MZ_TRY(mz_grow(&decl->buffers, &decl->cap_buffers, decl->num_buffers + 1,
                 "buffers"));
  decl->buffers[decl->num_buffers] = b;
  *buffer_out = (int32_t)decl->num_buffers++;
  return MZ_OK;
}

mz_status_t mz_decl_layer(mz_decl_t *decl, const mz_layer_opts_t *opts)
{
  mz_layer_t l = {.opts = *opts};

  MZ_TRY(copy_name(opts->name, l.name));
  for (int pass = 0; pass < 2; pass++)
    l.first[pass] = (int32_t)decl->num_steps[pass];
  MZ_TRY(mz_grow(&decl->layers, &decl->cap_layers, decl->num_layers + 1,
                 "layers"));
  decl->layers[decl->num_layers++] = l;
  return MZ_OK;
}

static mz_status_t add_step(mz_decl_t *d, mz_pass_t pass, mz_step_t step)
{
  MZ_REQUIRE(d->num_layers > 0, MZ_ERR_ARG, "a step before the first layer");
  step.layer = (int32_t)d->num_layers - 1;
  MZ_TRY(mz_grow(&d->steps[pass], &d->cap_steps[pass], d->num_steps[pass] + 1,
                 "steps"));
  d->steps[pass][d->num_steps[pass]++] = step;
  d->layers[step.layer].num[pass]++;
  return MZ_OK;
}

static mz_status_t check_refs(const mz_decl_t *d, const mz_compute_opts_t *o)
{
  const int32_t *lists[4] = {o->reads, o->writes, o->weights, o->grads};
  int32_t nums[4] = {o->num_reads, o->num_writes, o->num_weights, o->num_grads};

  MZ_REQUIRE(o->fn, MZ_ERR_ARG, "step %s has no function", o->name);
  for (int l = 0; l < 4; l++) {
    int64_t limit = l < 2 ? d->num_buffers : d->num_tensors;
    MZ_REQUIRE(nums[l] >= 0 && nums[l] <= MZ_STEP_MAX_REFS, MZ_ERR_ARG,
               "step %s: %d references, at most %d", o->name, nums[l],
               MZ_STEP_MAX_REFS);
    for (int32_t i = 0; i < nums[l]; i++)
      MZ_REQUIRE(lists[l][i] >= 0 && lists[l][i] < limit, MZ_ERR_ARG,
                 "step %s: no %s %d", o->name, l < 2 ? "buffer" : "tensor",
                 lists[l][i]);
  }
  return MZ_OK;
}

mz_status_t mz_decl_compute(mz_decl_t *decl, mz_pass_t pass,
                            const mz_compute_opts_t *opts)
{
  mz_step_t step = {.kind = MZ_STEP_COMPUTE, .compute = *opts, .moe = -1};

  MZ_TRY(check_refs(decl, opts));
  if (!step.compute.modes) step.compute.modes = MZ_IN_TRAIN | MZ_IN_EVAL;
  return MZ_TRACE(add_step(decl, pass, step));
}

/* A layer has one MoE: what its steps see depends on it. */
static mz_status_t check_moe(const mz_decl_t *d, int32_t moe)
{
  MZ_REQUIRE(moe >= 0 && moe < d->num_moes, MZ_ERR_ARG, "no MoE %d", moe);
  for (int p = 0; d->num_layers > 0 && p < 2; p++) {
    const mz_layer_t *layer = &d->layers[d->num_layers - 1];

    for (int32_t i = 0; i < layer->num[p]; i++) {
      int32_t other = d->steps[p][layer->first[p] + i].moe;

      MZ_REQUIRE(other < 0 || other == moe, MZ_ERR_ARG,
                 "layer %s has the MoEs %s and %s, one is possible",
                 layer->opts.name, d->moes[other].name, d->moes[moe].name);
    }
  }
  return MZ_OK;
}

static mz_status_t add_moe_step(mz_decl_t *d, mz_pass_t pass, mz_step_t step)
{
  MZ_TRY(check_moe(d, step.moe));
  return MZ_TRACE(add_step(d, pass, step));
}

static mz_status_t check_buffer(const mz_decl_t *d, const char *what,
                                int32_t buffer, mz_rows_t kind, int32_t moe)
{
  static const char *const kinds[] = {"FIXED", "TOKENS", "ROUND", "POOL"};
  const mz_decl_buffer_t *b;

  MZ_REQUIRE(buffer >= 0 && buffer < d->num_buffers, MZ_ERR_ARG,
             "%s: no buffer %d", what, buffer);
  b = &d->buffers[buffer];
  MZ_REQUIRE(b->kind == kind && (kind != MZ_ROWS_ROUND || b->moe == moe),
             MZ_ERR_ARG, "%s: buffer %s is MZ_ROWS_%s, needed is MZ_ROWS_%s%s",
             what, b->name, kinds[b->kind], kinds[kind],
             kind == MZ_ROWS_ROUND ? " of the same MoE" : "");
  return MZ_OK;
}

mz_status_t mz_decl_counts(mz_decl_t *decl, mz_pass_t pass, int32_t moe,
                           int32_t counts)
{
  mz_step_t step = {.kind = MZ_STEP_COUNTS, .moe = moe, .counts = counts};
  const mz_decl_buffer_t *b;

  MZ_TRY(check_moe(decl, moe));
  MZ_TRY(check_buffer(decl, "counts", counts, MZ_ROWS_FIXED, moe));
  b = &decl->buffers[counts];
  MZ_REQUIRE(b->dtype == MZ_I32 && b->width >= decl->moes[moe].opts.num_experts,
             MZ_ERR_SHAPE,
             "counts: buffer %s has %" PRId64 " %s a row, needed are %d int32",
             b->name, b->width, b->dtype == MZ_I32 ? "int32" : "other numbers",
             decl->moes[moe].opts.num_experts);
  return MZ_TRACE(add_step(decl, pass, step));
}

mz_status_t mz_decl_runs(mz_decl_t *decl, mz_pass_t pass, int32_t moe)
{
  mz_step_t step = {.kind = MZ_STEP_RUNS, .moe = moe};
  return MZ_TRACE(add_moe_step(decl, pass, step));
}

mz_status_t mz_decl_rounds(mz_decl_t *decl, mz_pass_t pass, int32_t moe)
{
  mz_step_t step = {.kind = MZ_STEP_ROUNDS, .moe = moe};
  return MZ_TRACE(add_moe_step(decl, pass, step));
}

mz_status_t mz_decl_branch(mz_decl_t *decl, mz_pass_t pass, int32_t moe,
                           bool saved)
{
  mz_step_t step = {.kind = MZ_STEP_BRANCH, .moe = moe, .saved = saved};
  return MZ_TRACE(add_moe_step(decl, pass, step));
}

mz_status_t mz_decl_end(mz_decl_t *decl, mz_pass_t pass)
{
  mz_step_t step = {.kind = MZ_STEP_END, .moe = -1};
  return MZ_TRACE(add_step(decl, pass, step));
}

mz_status_t mz_decl_exchange(mz_decl_t *decl, mz_pass_t pass, int32_t moe,
                             mz_direction_t direction, int32_t send,
                             int32_t recv)
{
  mz_step_t step = {.kind = MZ_STEP_EXCHANGE,
                    .moe = moe,
                    .direction = direction,
                    .send = send,
                    .recv = recv};
  const mz_decl_buffer_t *a, *b;
  bool out = direction == MZ_DISPATCH;

  MZ_REQUIRE(send != recv, MZ_ERR_ARG, "exchange between buffers %d and %d",
             send, recv);
  MZ_TRY(
      check_buffer(decl, "exchange", out ? send : recv, MZ_ROWS_TOKENS, moe));
  MZ_TRY(check_buffer(decl, "exchange", out ? recv : send, MZ_ROWS_ROUND, moe));
  a = &decl->buffers[send];
  b = &decl->buffers[recv];
  MZ_REQUIRE(a->width == b->width && a->dtype == b->dtype, MZ_ERR_SHAPE,
             "exchange of rows of %" PRId64 " into rows of %" PRId64
             " elements (%s, %s)",
             a->width, b->width, a->name, b->name);
  return MZ_TRACE(add_moe_step(decl, pass, step));
}

mz_status_t mz_decl_simple(mz_decl_t *decl, const mz_compute_opts_t *forward,
                           const mz_compute_opts_t *backward)
{
  MZ_TRY(mz_decl_compute(decl, MZ_FORWARD, forward));
  if (backward) MZ_TRY(mz_decl_compute(decl, MZ_BACKWARD, backward));
  return MZ_OK;
}

mz_status_t mz_decl_set_dtype(mz_decl_t *decl, mz_dtype_t dtype)
{
  MZ_REQUIRE(decl->num_tensors == 0, MZ_ERR_ARG,
             "the element type is set before the first tensor");
  decl->dtype = dtype;
  return MZ_OK;
}

mz_dtype_t mz_decl_dtype(const mz_decl_t *decl) { return decl->dtype; }

int32_t mz_decl_num_tensors(const mz_decl_t *decl)
{
  return (int32_t)decl->num_tensors;
}

const char *mz_decl_tensor_name(const mz_decl_t *decl, int32_t tensor)
{
  return decl->tensors[tensor].name;
}

int32_t mz_decl_find_tensor(const mz_decl_t *decl, const char *name)
{
  int64_t slot;

  if (!decl->table_size) return -1;
  slot = find_slot(decl, mz_fnv1a(name));
  if (!decl->table[slot]) return -1;
  return strcmp(decl->tensors[decl->table[slot] - 1].name, name) == 0
             ? decl->table[slot] - 1
             : -1;
}

int64_t mz_decl_tensor_elements(const mz_decl_t *decl, int32_t tensor)
{
  return decl->tensors[tensor].elements;
}

int32_t mz_decl_tensor_shape(const mz_decl_t *decl, int32_t tensor,
                             int64_t shape_out[4])
{
  memcpy(shape_out, decl->tensors[tensor].shape,
         sizeof decl->tensors[tensor].shape);
  return decl->tensors[tensor].ndim;
}

int32_t mz_decl_num_moes(const mz_decl_t *decl)
{
  return (int32_t)decl->num_moes;
}

const mz_moe_opts_t *mz_decl_moe_opts(const mz_decl_t *decl, int32_t moe)
{
  return &decl->moes[moe].opts;
}

bool mz_step_writes(const mz_step_t *step, int32_t buffer)
{
  const mz_compute_opts_t *c = &step->compute;

  for (int32_t i = 0; step->kind == MZ_STEP_COMPUTE && i < c->num_writes; i++)
    if (c->writes[i] == buffer) return true;
  return false;
}

bool mz_step_touches(const mz_step_t *step, int32_t buffer)
{
  const mz_compute_opts_t *c = &step->compute;

  for (int32_t i = 0; step->kind == MZ_STEP_COMPUTE && i < c->num_reads; i++)
    if (c->reads[i] == buffer) return true;
  return mz_step_writes(step, buffer);
}
