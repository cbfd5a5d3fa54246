/* SPDX-License-Identifier: Apache-2.0 */
/* Units at run time. Letters: N ranks of a unit's group, U its elements. */
#include "zero/zero_impl.h"

#include "base/alloc.h"
#include "base/check.h"
#include "plan/decl_impl.h"

/* Counts and displacements of a bulk entry, [N] each, in elements. A rank's own
 * contribution to a sum does not travel: the sum reads it where it is. */
typedef struct mz_wire {
  int64_t *counts, *send_displs, *recv_displs;
} wire_t;

char *mz_zero_buffer(const mz_zero_t *zero, int32_t buffer)
{
  const mz_plan_buffer_t *b = &zero->plan->buffers[buffer];

  return (b->host ? zero->opts.host_arena : zero->opts.arena) + b->offset;
}

static int32_t place_of(const mz_zero_t *z, const mz_unit_t *u)
{
  return z->plan->groups[u->group].place;
}

/* First element of the part that a rank stores with a group size. */
static int64_t part_start(const mz_zero_t *z, const mz_unit_t *u, int32_t size)
{
  return place_of(z, u) % size * (u->elements / size);
}

static char *param_region(const mz_zero_t *z, const mz_unit_t *u)
{
  return mz_zero_buffer(z, z->plan->params) +
         u->param_offset * (int64_t)mz_dtype_bytes(z->plan->dtype);
}

static float *accum_region(const mz_zero_t *z, const mz_unit_t *u)
{
  return (float *)mz_zero_buffer(z, z->plan->accum) + u->accum_offset;
}

/* fp32 weights of the part that the rank updates. With fp32 they are the
 * owner's part of params: p <= o, so it lies inside. */
static float *master_region(const mz_zero_t *z, const mz_unit_t *u)
{
  if (z->plan->master >= 0)
    return (float *)mz_zero_buffer(z, z->plan->master) + u->state_offset;
  return (float *)param_region(z, u) + part_start(z, u, u->o) -
         part_start(z, u, u->p);
}

float *mz_zero_segment(const mz_zero_t *zero, const mz_segment_t *segment,
                       mz_tensor_part_t part)
{
  const mz_unit_t *u = &zero->plan->units[segment->unit];
  int64_t in_state = segment->unit_offset - part_start(zero, u, u->o);

  switch (part) {
  case MZ_PART_WEIGHTS:
    return master_region(zero, u) + in_state;
  case MZ_PART_GRADS:
    return accum_region(zero, u) + segment->unit_offset -
           part_start(zero, u, u->g);
  case MZ_PART_EXP_AVG:
    return (float *)mz_zero_buffer(zero, zero->plan->exp_avg) +
           u->state_offset + in_state;
  case MZ_PART_EXP_AVG_SQ:
    return (float *)mz_zero_buffer(zero, zero->plan->exp_avg_sq) +
           u->state_offset + in_state;
  }
  return NULL;
}

/* --- pointers --- */

static void point(mz_zero_t *z, int32_t first_unit, int32_t num, char *weights,
                  float *grads)
{
  size_t size = mz_dtype_bytes(z->plan->dtype);

  for (int32_t i = first_unit; i < first_unit + num; i++) {
    const mz_unit_t *u = &z->plan->units[i];

    for (int32_t t = 0; t < u->num_tensors; t++) {
      const mz_unit_tensor_t *ut = &z->plan->unit_tensors[u->first_tensor + t];
      if (weights)
        z->weights[ut->tensor] = weights + ut->offset * (int64_t)size;
      if (grads) z->grads[ut->tensor] = grads + ut->offset;
      if (grads) z->accumulate[ut->tensor] = 0;
    }
    if (weights) weights += u->elements * (int64_t)size;
    if (grads) grads += u->elements;
  }
}

void mz_zero_begin_step(mz_zero_t *zero)
{
  for (int32_t i = 0; i < zero->plan->num_units; i++) {
    const mz_unit_t *u = &zero->plan->units[i];
    point(zero, i, 1, u->p == 1 ? param_region(zero, u) : NULL,
          u->g == 1 && zero->plan->accum >= 0 ? accum_region(zero, u) : NULL);
  }
}

void mz_zero_prepare(mz_zero_t *zero, const mz_op_t *op)
{
  point(zero, op->first_unit, op->num_units,
        op->weights >= 0 ? mz_zero_buffer(zero, op->weights) : NULL,
        op->grads >= 0 ? (float *)mz_zero_buffer(zero, op->grads) : NULL);
}

void mz_zero_release(mz_zero_t *zero, const mz_op_t *op)
{
  for (int32_t i = op->first_unit; i < op->first_unit + op->num_units; i++) {
    const mz_unit_t *u = &zero->plan->units[i];
    for (int32_t t = 0; t < u->num_tensors; t++)
      zero->weights[zero->plan->unit_tensors[u->first_tensor + t].tensor] =
          NULL;
  }
}

const void *const *mz_zero_weights(const mz_zero_t *zero)
{
  return zero->weights;
}

void *const *mz_zero_grads(const mz_zero_t *zero) { return zero->grads; }

uint8_t *mz_zero_accumulate(mz_zero_t *zero) { return zero->accumulate; }

/* --- messages --- */

static void fill_wire(mz_zero_t *z, int32_t entry, int64_t **free_numbers)
{
  const mz_entry_t *e = &z->plan->entries[entry];
  const mz_unit_t *u = &z->plan->units[e->first_unit];
  wire_t *w = &z->wires[entry];
  bool reduce = e->kind == MZ_ENTRY_GRADS;
  int32_t own = place_of(z, u);

  w->counts = *free_numbers;
  w->send_displs = w->counts + u->ranks;
  w->recv_displs = w->send_displs + u->ranks;
  *free_numbers = w->recv_displs + u->ranks;
  for (int32_t r = 0; r < u->ranks; r++) {
    w->counts[r] = reduce && r == own ? 0 : e->length;
    w->send_displs[r] =
        e->packed >= 0 ? r * e->length : r * u->shard + e->piece;
    w->recv_displs[r] = reduce             ? (r - (r > own)) * e->length
                        : e->num_units > 1 ? r * e->length
                                           : r * u->shard + e->piece;
  }
}

static mz_status_t make_wires(mz_zero_t *z)
{
  int64_t numbers = 0, units = 1, *at;

  for (int32_t i = 0; i < z->plan->num_entries; i++) {
    const mz_entry_t *e = &z->plan->entries[i];
    if (e->lane != MZ_LANE_BULK) continue;
    numbers += 3 * (int64_t)z->plan->units[e->first_unit].ranks;
    units = mz_max_i64(units, e->num_units);
  }
  MZ_TRY(mz_new(z->plan->num_entries, "wires", &z->wires));
  MZ_TRY(mz_new(numbers, "counts of messages", &z->wire_numbers));
  MZ_TRY(mz_new(units, "lengths of shards", &z->lengths));
  at = z->wire_numbers;
  for (int32_t i = 0; i < z->plan->num_entries; i++)
    if (z->plan->entries[i].lane == MZ_LANE_BULK) fill_wire(z, i, &at);
  return MZ_OK;
}

/* The unit-major side of an entry: its target, or the region. */
static char *unit_side(const mz_zero_t *z, const mz_entry_t *e)
{
  const mz_unit_t *u = &z->plan->units[e->first_unit];
  int64_t size = e->kind == MZ_ENTRY_GRADS || e->kind == MZ_ENTRY_SUMS
                     ? 4
                     : (int64_t)mz_dtype_bytes(z->plan->dtype);

  if (e->target >= 0)
    return mz_zero_buffer(z, e->target) + e->target_offset * size;
  if (e->kind == MZ_ENTRY_GRADS || e->kind == MZ_ENTRY_SUMS)
    return (char *)accum_region(z, u);
  return param_region(z, u);
}

static void fill_msg(const mz_zero_t *z, int32_t entry, mz_msg_t *m)
{
  const mz_entry_t *e = &z->plan->entries[entry];
  const mz_unit_t *u = &z->plan->units[e->first_unit];
  const wire_t *w = &z->wires[entry];
  size_t size = mz_dtype_bytes(e->dtype);

  *m = (mz_msg_t){.kind = e->kind == MZ_ENTRY_GRADS ? MZ_MSG_EXCHANGE
                                                    : MZ_MSG_GATHER,
                  .group = z->opts.comm_groups[e->group],
                  .element_bytes = size,
                  .send_count = e->length,
                  .send_counts = w->counts,
                  .send_displs = w->send_displs,
                  .recv_counts = w->counts,
                  .recv_displs = w->recv_displs,
                  .bound = u->ranks * mz_max_i64(u->shard, e->length),
                  .backend = true};
  m->recv = e->staging >= 0 ? mz_zero_buffer(z, e->staging) : unit_side(z, e);
  if (e->kind == MZ_ENTRY_PARAMS)
    m->send = param_region(z, &z->plan->units[e->first_unit]) +
              e->piece * (int64_t)size;
  if (e->kind == MZ_ENTRY_GRADS)
    m->send = e->packed >= 0 ? mz_zero_buffer(z, e->packed) : unit_side(z, e);
}

mz_status_t mz_zero_post(mz_zero_t *zero, int32_t entry)
{
  mz_msg_t msg;

  fill_msg(zero, entry, &msg);
  return MZ_TRACE(
      mz_comm_post(zero->opts.comm, MZ_LANE_BULK, &msg, &zero->tickets[entry]));
}

mz_status_t mz_zero_wait(mz_zero_t *zero, int32_t entry, bool on_stream)
{
  if (on_stream)
    return MZ_TRACE(
        mz_comm_wait_on_stream(zero->opts.comm, zero->tickets[entry]));
  return MZ_TRACE(mz_comm_wait(zero->opts.comm, zero->tickets[entry]));
}

/* A gather from a region: own shards of the units into the own block. */
static mz_status_t pack_own(mz_zero_t *z, const mz_entry_t *e)
{
  int64_t size = (int64_t)mz_dtype_bytes(e->dtype), at = 0;
  int32_t place = place_of(z, &z->plan->units[e->first_unit]);
  char *src = unit_side(z, e), *dst = mz_zero_buffer(z, e->staging);

  dst += place * e->length * size;
  for (int32_t i = 0; i < e->num_units; i++) {
    const mz_unit_t *u = &z->plan->units[e->first_unit + i];
    mz_convert_t a = {.n = u->shard,
                      .src = src + place * u->shard * size,
                      .src_dtype = e->dtype,
                      .dst = dst + at * size,
                      .dst_dtype = e->dtype};
    MZ_TRY(z->opts.kernels->ops->convert(z->opts.kernels, &a, z->opts.stream));
    src += u->elements * size;
    at += u->shard;
  }
  return MZ_OK;
}

/* Contributions to each owner, in the type that travels: the own part is
 * rounded like the others, so that the sum does not depend on who owns it. */
static mz_status_t pack_grads(mz_zero_t *z, const mz_entry_t *e)
{
  const float *src = (const float *)(const void *)unit_side(z, e);
  const mz_unit_t *only = &z->plan->units[e->first_unit];
  char *dst = mz_zero_buffer(z, e->packed);
  int64_t size = (int64_t)mz_dtype_bytes(e->dtype), at = 0;
  mz_convert_t all = {.n = only->ranks * only->shard,
                      .src = src,
                      .dst = dst,
                      .src_dtype = MZ_F32,
                      .dst_dtype = e->dtype};

  if (e->num_units == 1 && e->length == only->shard) /* in the same order */
    return MZ_TRACE(
        z->opts.kernels->ops->convert(z->opts.kernels, &all, z->opts.stream));

  for (int32_t i = 0; i < e->num_units; i++) {
    const mz_unit_t *u = &z->plan->units[e->first_unit + i];
    mz_convert_t a = {.n = e->num_units > 1 ? u->shard : e->length,
                      .src_dtype = MZ_F32,
                      .dst_dtype = e->dtype};

    for (int64_t r = 0; r < u->ranks; r++) {
      a.src = src + r * u->shard + e->piece;
      a.dst = dst + (r * e->length + at) * size;
      MZ_TRY(
          z->opts.kernels->ops->convert(z->opts.kernels, &a, z->opts.stream));
    }
    src += u->elements;
    at += u->shard;
  }
  return MZ_OK;
}

mz_status_t mz_zero_pack(mz_zero_t *zero, int32_t entry)
{
  const mz_entry_t *e = &zero->plan->entries[entry];

  if (e->kind == MZ_ENTRY_GRADS) return MZ_TRACE(pack_grads(zero, e));
  return MZ_TRACE(pack_own(zero, e));
}

mz_status_t mz_zero_place(mz_zero_t *zero, int32_t entry)
{
  const mz_entry_t *e = &zero->plan->entries[entry];
  mz_reorder_t a = {.num_ranks = zero->plan->units[e->first_unit].ranks,
                    .num_units = e->num_units,
                    .lengths = zero->lengths,
                    .element_bytes = mz_dtype_bytes(e->dtype),
                    .src = mz_zero_buffer(zero, e->staging),
                    .dst = unit_side(zero, e)};

  for (int32_t i = 0; i < e->num_units; i++)
    zero->lengths[i] = zero->plan->units[e->first_unit + i].shard;
  return MZ_TRACE(zero->opts.kernels->ops->reorder(zero->opts.kernels, &a,
                                                   zero->opts.stream));
}

/* The own contribution to a sum: in its block of what was packed, or where it
 * was computed. */
static const char *own_part(const mz_zero_t *z, const mz_entry_t *e)
{
  const mz_unit_t *u = &z->plan->units[e->first_unit];
  int64_t size = (int64_t)mz_dtype_bytes(e->dtype), place = place_of(z, u);

  if (e->packed >= 0)
    return mz_zero_buffer(z, e->packed) + place * e->length * size;
  return unit_side(z, e) + (place * u->shard + e->piece) * size;
}

mz_status_t mz_zero_sum(mz_zero_t *zero, int32_t entry, bool first)
{
  const mz_entry_t *e = &zero->plan->entries[entry];
  const char *in = mz_zero_buffer(zero, e->staging);
  const char *own = own_part(zero, e);
  int64_t size = (int64_t)mz_dtype_bytes(e->dtype), at = 0;

  for (int32_t i = 0; i < e->num_units; i++) {
    const mz_unit_t *u = &zero->plan->units[e->first_unit + i];
    bool whole = u->g == 1; /* the sum replaces the own contribution */
    mz_reduce_ranks_t a = {.num_ranks = u->ranks,
                           .n = e->num_units > 1 ? u->shard : e->length,
                           .stride = e->length,
                           .in = in + at * size,
                           .in_dtype = e->dtype,
                           .out = accum_region(zero, u) + e->piece +
                                  (whole ? place_of(zero, u) * u->shard : 0),
                           .accumulate = !whole && !first,
                           .own = own + at * size,
                           .place = place_of(zero, u)};
    MZ_TRY(zero->opts.kernels->ops->reduce_ranks(zero->opts.kernels, &a,
                                                 zero->opts.stream));
    at += u->shard;
  }
  return MZ_OK;
}

/* --- numbers --- */

/* Where the model's dtype holds a segment that this rank updates. */
static char *working_copy(const mz_zero_t *z, const mz_segment_t *s)
{
  const mz_unit_t *u = &z->plan->units[s->unit];
  int64_t at = s->unit_offset - part_start(z, u, u->p);

  return param_region(z, u) + at * (int64_t)mz_dtype_bytes(z->plan->dtype);
}

mz_status_t mz_zero_publish(mz_zero_t *zero)
{
  const mz_plan_t *p = zero->plan;

  if (p->master < 0) return MZ_OK;
  for (int32_t i = 0; i < p->num_segments[MZ_SHARE_UPDATED]; i++) {
    const mz_segment_t *s = &p->segments[MZ_SHARE_UPDATED][i];
    mz_convert_t a = {.n = s->length,
                      .src = mz_zero_segment(zero, s, MZ_PART_WEIGHTS),
                      .src_dtype = MZ_F32,
                      .dst = working_copy(zero, s),
                      .dst_dtype = p->dtype};
    MZ_TRY(zero->opts.kernels->ops->convert(zero->opts.kernels, &a,
                                            zero->opts.stream));
  }
  return MZ_OK;
}

mz_status_t mz_zero_norm(mz_zero_t *zero, double *out)
{
  const mz_plan_t *p = zero->plan;
  mz_sum_squares_t a = {.stretches = (const mz_stretch_t *)mz_zero_buffer(
                            zero, p->stretches[MZ_SHARE_OWNED]),
                        .num_stretches = p->num_stretches[MZ_SHARE_OWNED],
                        .partial = (double *)mz_zero_buffer(zero, p->squares),
                        .out = out};

  return MZ_TRACE(zero->opts.kernels->ops->sum_squares(zero->opts.kernels, &a,
                                                       zero->opts.stream));
}

mz_status_t mz_zero_adamw(mz_zero_t *zero, const mz_zero_update_t *update)
{
  const mz_plan_t *p = zero->plan;
  float *factor = (float *)mz_zero_buffer(zero, p->factor);
  mz_adamw_t a = {.stretches = (const mz_stretch_t *)mz_zero_buffer(
                      zero, p->stretches[MZ_SHARE_UPDATED]),
                  .num_stretches = p->num_stretches[MZ_SHARE_UPDATED],
                  .groups = update->groups,
                  .num_groups = update->num_groups,
                  .factor = factor,
                  .t = update->t,
                  .l2 = update->l2,
                  .bias_correction = update->bias_correction,
                  .out_dtype = p->dtype};

  MZ_TRY(mz_device_upload(zero->opts.kernels->device, factor, &update->factor,
                          sizeof update->factor, zero->opts.stream));
  return MZ_TRACE(zero->opts.kernels->ops->adamw(zero->opts.kernels, &a,
                                                 zero->opts.stream));
}

/* --- the optimizer's table --- */

_Static_assert((int)MZ_PLAN_STRETCH == (int)MZ_STRETCH &&
                   sizeof(mz_stretch_t) == MZ_PLAN_STRETCH_BYTES,
               "the plan counts the bytes of the table");

static int64_t add_stretches(const mz_zero_t *z, const mz_segment_t *s,
                             mz_share_t share, mz_stretch_t *out)
{
  bool updated = share == MZ_SHARE_UPDATED;
  char *copy = updated && z->plan->master >= 0 ? working_copy(z, s) : NULL;
  int64_t size = (int64_t)mz_dtype_bytes(z->plan->dtype), num = 0;

  for (int64_t at = 0; at < s->length; at += MZ_STRETCH, num++) {
    out[num] =
        (mz_stretch_t){.grad = mz_zero_segment(z, s, MZ_PART_GRADS) + at,
                       .n = (int32_t)mz_min_i64(MZ_STRETCH, s->length - at),
                       .group = s->param_group,
                       .tensor = s->tensor};
    if (!updated) continue;
    out[num].w = mz_zero_segment(z, s, MZ_PART_WEIGHTS) + at;
    out[num].m = mz_zero_segment(z, s, MZ_PART_EXP_AVG) + at;
    out[num].v = mz_zero_segment(z, s, MZ_PART_EXP_AVG_SQ) + at;
    if (copy) out[num].out = copy + at * size;
  }
  return num;
}

static mz_status_t make_stretches(mz_zero_t *z, mz_share_t share)
{
  const mz_plan_t *p = z->plan;
  mz_device_t *device = z->opts.kernels->device;
  mz_stretch_t *table = NULL;
  int64_t num = 0;
  mz_status_t st;

  if (p->stretches[share] < 0) return MZ_OK;
  MZ_TRY(mz_new(p->num_stretches[share], "stretches", &table));
  for (int32_t i = 0; i < p->num_segments[share]; i++)
    num += add_stretches(z, &p->segments[share][i], share, table + num);
  MZ_TRY_GOTO(st,
              mz_device_copy(device, mz_zero_buffer(z, p->stretches[share]),
                             table, num * MZ_PLAN_STRETCH_BYTES,
                             z->opts.stream),
              done);
  MZ_TRY_GOTO(st, mz_stream_synchronize(device, z->opts.stream), done);
done:
  mz_free(table);
  return st;
}

/* --- life --- */

mz_status_t mz_zero_create(const mz_zero_opts_t *opts, mz_zero_t **zero_out)
{
  mz_zero_t *z = NULL;
  mz_status_t st;
  int64_t tensors = opts->plan->decl->num_tensors;

  *zero_out = NULL;
  MZ_TRY_GOTO(st, mz_new(1, "units at run time", &z), done);
  z->opts = *opts;
  z->plan = opts->plan;
  MZ_TRY_GOTO(st, mz_new(tensors, "weight pointers", &z->weights), done);
  MZ_TRY_GOTO(st, mz_new(tensors, "gradient pointers", &z->grads), done);
  MZ_TRY_GOTO(st, mz_new(tensors, "accumulate flags", &z->accumulate), done);
  MZ_TRY_GOTO(st, mz_new(z->plan->num_entries, "tickets", &z->tickets), done);
  MZ_TRY_GOTO(st, make_wires(z), done);
  MZ_TRY_GOTO(st, make_stretches(z, MZ_SHARE_OWNED), done);
  MZ_TRY_GOTO(st, make_stretches(z, MZ_SHARE_UPDATED), done);
  mz_zero_begin_step(z);
  *zero_out = z;
  z = NULL;
done:
  mz_zero_destroy(&z);
  return st;
}

void mz_zero_destroy(mz_zero_t **zero)
{
  mz_zero_t *z = zero ? *zero : NULL;

  if (!z) return;
  mz_free(z->weights);
  mz_free(z->grads);
  mz_free(z->accumulate);
  mz_free(z->wires);
  mz_free(z->wire_numbers);
  mz_free(z->lengths);
  mz_free(z->tickets);
  mz_free(z);
  *zero = NULL;
}
