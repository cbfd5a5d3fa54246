/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/spans.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/kernels.h"

/* More than a stream holds that is launched and not done. */
enum { MARKS = 4096 };

struct mz_spans {
  const mz_device_t *device;
  const mz_kernels_ops_t *untimed;
  mz_kernels_ops_t table;
  bool on; /* between begin and take */
  int32_t first;
  /* a ring: marks are counted from begin on, of which some are read */
  int64_t num_marks, num_read;
  mz_timer_t timers[MARKS];
  int32_t parts[MARKS]; /* that begin there */
  mz_span_sum_t *sums;  /* [num_parts] */
  int32_t num_parts;
};

mz_status_t mz_spans_create(const mz_device_t *device, int32_t num_parts,
                            mz_spans_t **spans_out)
{
  mz_spans_t *spans = NULL;
  mz_status_t st;

  *spans_out = NULL;
  MZ_TRY_GOTO(st, mz_new(1, "spans of time", &spans), done);
  spans->device = device;
  spans->num_parts = num_parts;
  MZ_TRY_GOTO(st, mz_new(num_parts, "sums of spans", &spans->sums), done);
  for (int i = 0; i < MARKS; i++)
    MZ_TRY_GOTO(st, mz_timer_create(device, &spans->timers[i]), done);
  *spans_out = spans;
  spans = NULL;
done:
  mz_spans_destroy(&spans);
  return st;
}

void mz_spans_destroy(mz_spans_t **spans)
{
  mz_spans_t *s = spans ? *spans : NULL;

  if (!s) return;
  for (int i = 0; i < MARKS; i++)
    mz_timer_destroy(s->device, s->timers[i]);
  mz_free(s->sums);
  mz_free(s);
  *spans = NULL;
}

/* The oldest span that has ended. */
static mz_status_t read_oldest(mz_spans_t *s)
{
  int64_t at = s->num_read % MARKS, end = (s->num_read + 1) % MARKS;
  mz_span_sum_t *sum = &s->sums[s->parts[at]];
  double ms;

  MZ_TRY(mz_timer_elapsed(s->device, s->timers[at], s->timers[end], &ms));
  sum->ms += ms;
  sum->num++;
  s->num_read++;
  return MZ_OK;
}

mz_status_t mz_spans_mark(mz_spans_t *spans, int32_t part)
{
  int64_t at = spans->num_marks % MARKS;

  MZ_ASSERT(part >= 0 && part < spans->num_parts);
  if (!spans->on) return MZ_OK;
  if (spans->num_marks - spans->num_read == MARKS) MZ_TRY(read_oldest(spans));
  MZ_TRY(
      mz_timer_mark(spans->device, spans->timers[at], spans->device->stream));
  spans->parts[at] = part;
  spans->num_marks++;
  return MZ_OK;
}

mz_status_t mz_spans_begin(mz_spans_t *spans)
{
  for (int32_t i = 0; i < spans->num_parts; i++)
    spans->sums[i] = (mz_span_sum_t){0};
  spans->num_marks = spans->num_read = 0;
  spans->on = true;
  return MZ_TRACE(mz_spans_mark(spans, MZ_SPAN_GAPS));
}

void mz_spans_operations(mz_spans_t *spans, int32_t first)
{
  spans->first = first;
}

mz_status_t mz_spans_take(mz_spans_t *spans, const mz_span_sum_t **sums_out)
{
  MZ_TRY(mz_spans_mark(spans, MZ_SPAN_GAPS));
  spans->on = false;
  while (spans->num_read + 1 < spans->num_marks)
    MZ_TRY(read_oldest(spans));
  *sums_out = spans->sums;
  return MZ_OK;
}

/* --- the table --- */

#define MZ_KERNEL_TIMED_(op, args)                                             \
  static mz_status_t timed_##op(const mz_kernels_t *kernels, const args *a,    \
                                mz_stream_t stream)                            \
  {                                                                            \
    mz_spans_t *spans = kernels->spans;                                        \
                                                                               \
    MZ_TRY(mz_spans_mark(spans, spans->first + MZ_KERNEL_##op));               \
    MZ_TRY(spans->untimed->op(kernels, a, stream));                            \
    return MZ_TRACE(mz_spans_mark(spans, MZ_SPAN_GAPS));                       \
  }
MZ_KERNEL_LIST(MZ_KERNEL_TIMED_)
#undef MZ_KERNEL_TIMED_

const mz_kernels_ops_t *mz_spans_table(mz_spans_t *spans,
                                       const mz_kernels_ops_t *ops)
{
  spans->untimed = ops;
  spans->table = *ops;
#define MZ_KERNEL_REPLACE_(op, args) spans->table.op = timed_##op;
  MZ_KERNEL_LIST(MZ_KERNEL_REPLACE_)
#undef MZ_KERNEL_REPLACE_
  return &spans->table;
}

const char *mz_kernel_name(int32_t op)
{
  static const char *const names[] = {
#define MZ_KERNEL_NAME_(op, args) #op,
      MZ_KERNEL_LIST(MZ_KERNEL_NAME_)
#undef MZ_KERNEL_NAME_
  };

  return names[op];
}
