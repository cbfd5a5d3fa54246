/* SPDX-License-Identifier: Apache-2.0 */
/* What travels and what is updated: flat arrays of more than 2^31 elements. */
#include "large.h"

#include "base/alloc.h"

/* --- flat arrays --- */

static int64_t flat_first(int window)
{
  const int64_t n = (int64_t)LARGE_WINDOW * LARGE_WIDTH;

  return window == 0   ? 0
         : window == 1 ? (INT64_C(1) << 31) - n / 2
                       : LARGE_FLAT - n;
}

static void convert_way(large_t *l, mz_dtype_t from, mz_dtype_t to)
{
  const int64_t n = (int64_t)LARGE_WINDOW * LARGE_WIDTH;
  int64_t in = (int64_t)mz_dtype_bytes(from), out = (int64_t)mz_dtype_bytes(to);
  mz_convert_t a = {.n = LARGE_FLAT, .src_dtype = from, .dst_dtype = to};
  mz_kernels_t *k = l->kernels;
  char *src, *dst, *window;
  bool good = true;

  l->at = 0;
  a.src = src = large_pattern(l, from, LARGE_FLAT, 0);
  a.dst = dst = large_unwritten(l, LARGE_FLAT * out);
  window = large_take(l, n * out);
  must(k->ops->convert(k, &a, l->device->stream));
  a.n = n;
  a.dst = window;
  for (int i = 0; i < LARGE_NUM_WINDOWS; i++) {
    a.src = src + flat_first(i) * in;
    must(k->ops->convert(k, &a, l->device->stream));
    good = large_same(l, dst + flat_first(i) * out, window, n * out) && good;
  }
  large_report(l, good, from == MZ_F32 ? "convert to bf16" : "convert to fp32");
}

void large_check_convert(large_t *l)
{
  convert_way(l, MZ_BF16, MZ_F32);
  convert_way(l, MZ_F32, MZ_BF16);
}

void large_check_reduce(large_t *l)
{
  const int64_t n = (int64_t)LARGE_WINDOW * LARGE_WIDTH;
  mz_reduce_ranks_t a = {.num_ranks = 2,
                         .n = LARGE_FLAT,
                         .stride = LARGE_FLAT,
                         .in_dtype = MZ_BF16};
  mz_kernels_t *k = l->kernels;
  char *in, *out, *window;
  bool good = true;

  l->at = 0;
  a.in = in = large_pattern(l, MZ_BF16, 2 * LARGE_FLAT, 0);
  out = large_unwritten(l, 4 * LARGE_FLAT);
  window = large_take(l, 4 * n);
  a.out = (float *)out;
  must(k->ops->reduce_ranks(k, &a, l->device->stream));
  a.n = n;
  a.out = (float *)window;
  for (int i = 0; i < LARGE_NUM_WINDOWS; i++) {
    a.in = in + flat_first(i) * 2;
    must(k->ops->reduce_ranks(k, &a, l->device->stream));
    good = large_same(l, out + flat_first(i) * 4, window, 4 * n) && good;
  }
  large_report(l, good, "sum over ranks");
}

/* --- the optimizer --- */

typedef struct state {
  char *w, *m, *v, *grad, *out;
} state_t;

static mz_stretch_t stretch_of(const state_t *s, int64_t at, int64_t n)
{
  return (mz_stretch_t){.w = (float *)s->w + at,
                        .m = (float *)s->m + at,
                        .v = (float *)s->v + at,
                        .grad = (const float *)s->grad + at,
                        .out = s->out + 2 * at,
                        .n = (int32_t)n};
}

static mz_stretch_t *put_stretches(large_t *l, const state_t *s, int64_t n,
                                   int64_t *num_out)
{
  int64_t num = mz_div_up(n, MZ_STRETCH);
  mz_stretch_t *host = NULL, *to = (mz_stretch_t *)(void *)large_take(
                                 l, num * (int64_t)sizeof *host);

  must(mz_new(num, "stretches", &host));
  for (int64_t i = 0; i < num; i++)
    host[i] = stretch_of(s, i * MZ_STRETCH,
                         mz_min_i64(MZ_STRETCH, n - i * MZ_STRETCH));
  large_copy(l, to, host, num * (int64_t)sizeof *host);
  must(mz_stream_synchronize(l->device, l->device->stream));
  mz_free(host);
  *num_out = num;
  return to;
}

static void run_adamw(large_t *l, const state_t *s, int64_t n,
                      const float *factor)
{
  static const mz_adamw_group_t group = {1e-3, 0.9, 0.95, 1e-8, 0.1};
  mz_adamw_t a = {.groups = &group,
                  .num_groups = 1,
                  .factor = factor,
                  .t = 3,
                  .bias_correction = 1,
                  .out_dtype = MZ_BF16};

  a.stretches = put_stretches(l, s, n, &a.num_stretches);
  must(l->kernels->ops->adamw(l->kernels, &a, l->device->stream));
}

/* One tensor of more than 2^31 elements, against its windows as tensors; m and
 * v start at 0. */
void large_check_adamw(large_t *l)
{
  const int64_t n = (int64_t)LARGE_WINDOW * LARGE_WIDTH;
  state_t whole, part[LARGE_NUM_WINDOWS];
  float one = 1;
  float *factor;
  bool good = true;

  l->at = 0;
  factor = (float *)large_take(l, 4);
  large_copy(l, factor, &one, 4);
  for (int i = -1; i < LARGE_NUM_WINDOWS; i++) {
    state_t *s = i < 0 ? &whole : &part[i];
    int64_t num = i < 0 ? LARGE_FLAT : n, first = i < 0 ? 0 : flat_first(i);

    s->w = large_pattern(l, MZ_F32, num, first);
    s->grad = large_pattern(l, MZ_F32, num, first + 77777);
    s->m = large_take(l, 4 * num);
    s->v = large_take(l, 4 * num);
    must(mz_device_fill(l->device, s->m, 0, 4 * num, l->device->stream));
    must(mz_device_fill(l->device, s->v, 0, 4 * num, l->device->stream));
    s->out = large_unwritten(l, 2 * num);
    run_adamw(l, s, num, factor);
  }
  for (int i = 0; i < LARGE_NUM_WINDOWS; i++) {
    int64_t at = flat_first(i);

    good = large_same(l, whole.w + 4 * at, part[i].w, 4 * n) &&
           large_same(l, whole.m + 4 * at, part[i].m, 4 * n) &&
           large_same(l, whole.v + 4 * at, part[i].v, 4 * n) &&
           large_same(l, whole.out + 2 * at, part[i].out, 2 * n) && good;
  }
  large_report(l, good, "adamw");
}
