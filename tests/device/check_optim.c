/* SPDX-License-Identifier: Apache-2.0 */
/* adamw, sum_squares, reduce_ranks, reorder, convert, normals. */
#include "check.h"

#include "base/alloc.h"
#include "bits.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_STRETCHES = 300 };

/* --- stretches --- */

/* Arrays of all stretches; between them are gaps that nobody may touch. */
typedef struct tensors {
  dual_t w, m, v, grad, out, stretches;
  int64_t count;
} tensors_t;

static mz_stretch_t stretch_at(const tensors_t *t, int64_t at, int32_t n,
                               int32_t index, bool cuda)
{
  int64_t bytes = at * (int64_t)mz_dtype_bytes(t->out.dtype);
  mz_stretch_t s = {
      .w = (float *)(cuda ? t->w.cuda : t->w.cpu) + at,
      .m = (float *)(cuda ? t->m.cuda : t->m.cpu) + at,
      .v = (float *)(cuda ? t->v.cuda : t->v.cpu) + at,
      .grad = (const float *)(cuda ? t->grad.cuda : t->grad.cpu) + at,
      .out = (char *)(cuda ? t->out.cuda : t->out.cpu) + bytes,
      .n = n,
      .group = index % 2,
      .tensor = 3 * index,
  };

  if (index % 5 == 4) s.out = NULL;
  return s;
}

/* Stretches of the given lengths, each begun on a multiple of `align`. */
static tensors_t make_tensors(sides_t *sides, int64_t count,
                              const int32_t *lengths, int64_t align)
{
  static mz_stretch_t cuda[MAX_STRETCHES];
  int64_t total = align, at = align;
  tensors_t t = {.count = count};
  mz_stretch_t *cpu;
  float *v;

  for (int64_t i = 0; i < count; i++)
    total += mz_round_up(lengths[i] + 1, align);
  t.w = dual_random(sides, MZ_F32, total, 1);
  t.m = dual_random(sides, MZ_F32, total, 0.1);
  t.v = dual_random(sides, MZ_F32, total, 0.3);
  t.grad = dual_random(sides, MZ_F32, total, 1);
  t.out = dual_random(sides, sides->dtype, total, 1);
  v = t.v.cpu;
  for (int64_t i = 0; i < total; i++)
    v[i] *= v[i]; /* a mean of squares */
  dual_renew(sides, &t.v);

  t.stretches = dual_zeros(sides, MZ_U8, count * (int64_t)sizeof(mz_stretch_t));
  cpu = t.stretches.cpu;
  for (int64_t i = 0; i < count; i++) {
    cpu[i] = stretch_at(&t, at, lengths[i], (int32_t)i, false);
    cuda[i] = stretch_at(&t, at, lengths[i], (int32_t)i, true);
    at += mz_round_up(lengths[i] + 1, align);
  }
  must(mz_device_copy(sides->device, t.stretches.cuda, cuda,
                      count * (int64_t)sizeof *cuda, sides->device->stream));
  must(mz_stream_synchronize(sides->device, sides->device->stream));
  return t;
}

/* --- adamw --- */

/* Each number is the result of a few operations, of which one side may join a
 * product and a sum: some 2^-24. bf16: perhaps the next number, at most 2^-7 of
 * the value, and a little. */
static void check_adamw(sides_t *sides, int64_t count, const int32_t *lengths,
                        int64_t align, int64_t step, int l2, int correction)
{
  static const mz_adamw_group_t groups[2] = {{1e-2, 0.9, 0.95, 1e-8, 0.1},
                                             {3e-3, 0.8, 0.999, 1e-6, 0.0}};
  tensors_t t = make_tensors(sides, count, lengths, align);
  float clip = 0.37f;
  dual_t factor = dual_of(sides, MZ_F32, 1, &clip);
  mz_adamw_t cpu = {
      .stretches = t.stretches.cpu,
      .num_stretches = count,
      .groups = groups,
      .num_groups = 2,
      .factor = factor.cpu,
      .t = step,
      .l2 = l2,
      .bias_correction = correction,
      .out_dtype = sides->dtype,
  };
  mz_adamw_t cuda = cpu;
  char text[96];

  cuda.stretches = t.stretches.cuda;
  cuda.factor = factor.cuda;
  RUN_BOTH(sides, adamw, &cpu, &cuda);
  snprintf(text, sizeof text, "adamw %lld stretches, align %lld, t %lld",
           (long long)count, (long long)align, (long long)step);
  printf("   %s, l2 %d, correction %d: m, v, w, out\n", text, l2, correction);
  compare(sides, text, &t.m, 1e-6);
  compare(sides, text, &t.v, 1e-6);
  compare(sides, text, &t.w, 1e-6);
  compare(sides, text, &t.out, sides->dtype == MZ_BF16 ? 0x1.02p-7 : 1e-6);
}

/* More groups than are sent at once; each stretch has its own. */
static void check_groups(sides_t *sides)
{
  enum { GROUPS = 150 };
  static mz_adamw_group_t groups[GROUPS];
  static mz_stretch_t mine[GROUPS];
  int32_t lengths[GROUPS];
  float one = 1;
  dual_t factor = dual_of(sides, MZ_F32, 1, &one);
  mz_adamw_t cpu, cuda;
  tensors_t t;

  for (int i = 0; i < GROUPS; i++) {
    groups[i] = (mz_adamw_group_t){1e-2 * i, 0.9, 0.99, 1e-8, 0};
    lengths[i] = 8 + i;
  }
  t = make_tensors(sides, GROUPS, lengths, 128);
  memcpy(mine, dual_read(sides, &t.stretches), sizeof mine);
  for (int i = 0; i < GROUPS; i++)
    mine[i].group = ((mz_stretch_t *)t.stretches.cpu)[i].group = i;
  must(mz_device_copy(sides->device, t.stretches.cuda, mine, sizeof mine,
                      sides->device->stream));
  cpu = (mz_adamw_t){.stretches = t.stretches.cpu,
                     .num_stretches = GROUPS,
                     .groups = groups,
                     .num_groups = GROUPS,
                     .factor = factor.cpu,
                     .t = 1,
                     .bias_correction = 1,
                     .out_dtype = sides->dtype};
  cuda = cpu;
  cuda.stretches = t.stretches.cuda;
  cuda.factor = factor.cuda;
  RUN_BOTH(sides, adamw, &cpu, &cuda);
  compare(sides, "adamw of 150 groups", &t.w, 1e-6);
}

/* --- sum_squares --- */

/* fp64 sums in another order; where it is not finite, both say so. */
static void check_squares(sides_t *sides, int64_t count, const int32_t *lengths,
                          int64_t align, int64_t bad, float value)
{
  tensors_t t = make_tensors(sides, count, lengths, align);
  dual_t partial = dual_random(sides, MZ_F64, count, 1);
  dual_t out = dual_random(sides, MZ_F64, 2, 1);
  mz_sum_squares_t cpu = {t.stretches.cpu, count, partial.cpu, out.cpu};
  mz_sum_squares_t cuda = {t.stretches.cuda, count, partial.cuda, out.cuda};
  char text[96];
  void *kept;

  if (bad >= 0) {
    const mz_stretch_t *s = (const mz_stretch_t *)t.stretches.cpu + bad;

    ((float *)t.grad.cpu)[s->grad - (const float *)t.grad.cpu + s->n - 1] =
        value;
    dual_renew(sides, &t.grad);
  }
  RUN_BOTH(sides, sum_squares, &cpu, &cuda);
  snprintf(text, sizeof text,
           "sum_squares %lld stretches, align %lld, bad %lld", (long long)count,
           (long long)align, (long long)bad);
  compare(sides, text, &out, 1e-12);
  kept = bits_keep(sides, &out);
  must(
      sides->cuda->ops->sum_squares(sides->cuda, &cuda, sides->device->stream));
  bits_same(sides, text, &out, kept);
}

static void check_stretches(sides_t *sides)
{
  static const int32_t odd[] = {1, 1000,  65536, 3,   65535, 8193, 8192, 17,
                                2, 40000, 65533, 511, 4,     2051, 0};
  enum { ODD = sizeof odd / sizeof *odd };
  int32_t many[MAX_STRETCHES];

  for (int i = 0; i < MAX_STRETCHES; i++)
    many[i] = i % 3 ? MZ_STRETCH : (int32_t)pick(1, MZ_STRETCH);
  check_adamw(sides, 1, odd, 128, 1, 0, 1);
  check_adamw(sides, 0, odd, 128, 1, 0, 1);
  check_adamw(sides, ODD, odd, 128, 1, 0, 1);
  check_adamw(sides, ODD, odd, 128, 1000, 1, 1);
  check_adamw(sides, ODD, odd, 1, 7, 0, 0);
  if (!sides_skip(sides, MAX_STRETCHES * (int64_t)MZ_STRETCH, 0))
    check_adamw(sides, MAX_STRETCHES, many, 128, 3, 0, 1);
  check_groups(sides);

  check_squares(sides, 0, odd, 128, -1, 0);
  check_squares(sides, 1, odd, 128, -1, 0);
  check_squares(sides, ODD, odd, 128, -1, 0);
  check_squares(sides, ODD, odd, 1, -1, 0);
  check_squares(sides, ODD, odd, 128, 0, INFINITY);
  check_squares(sides, ODD, odd, 1, 4, NAN);
  if (sides_skip(sides, MAX_STRETCHES * (int64_t)MZ_STRETCH, 0)) return;
  check_squares(sides, MAX_STRETCHES, many, 128, -1, 0);
  check_squares(sides, MAX_STRETCHES, many, 128, 299, -INFINITY);
}

/* --- shards --- */

/* The same additions in the same order: equal numbers. */
static void check_reduce(sides_t *sides, int32_t num_ranks, int64_t n,
                         int64_t stride, int accumulate)
{
  dual_t in = dual_random(sides, sides->dtype, num_ranks * stride, 1);
  dual_t out = dual_random(sides, MZ_F32, n + 3, 1);
  dual_t own = dual_random(sides, sides->dtype, n + 8, 1);
  mz_reduce_ranks_t cpu = {.num_ranks = num_ranks,
                           .n = n,
                           .stride = stride,
                           .in = in.cpu,
                           .in_dtype = sides->dtype,
                           .out = out.cpu,
                           .accumulate = accumulate};
  mz_reduce_ranks_t cuda = cpu;
  char text[96];

  cuda.in = in.cuda;
  cuda.out = out.cuda;
  RUN_BOTH(sides, reduce_ranks, &cpu, &cuda);
  snprintf(text, sizeof text, "reduce_ranks %d ranks, n %lld, stride %lld",
           (int)num_ranks, (long long)n, (long long)stride);
  compare(sides, text, &out, 0);
  for (cpu.place = 0; cpu.place < num_ranks; cpu.place++) {
    size_t skip = cpu.place % 2 ? mz_dtype_bytes(sides->dtype) : 0;

    cuda.place = cpu.place;
    cpu.own = (const char *)own.cpu + skip;
    cuda.own = (const char *)own.cuda + skip;
    RUN_BOTH(sides, reduce_ranks, &cpu, &cuda);
    snprintf(text, sizeof text,
             "reduce_ranks %d ranks, own %d apart, n %lld, stride %lld",
             (int)num_ranks, (int)cpu.place, (long long)n, (long long)stride);
    compare(sides, text, &out, 0);
  }
}

static void check_reorder(sides_t *sides, int32_t num_ranks, int32_t num_units,
                          const int64_t *lengths, int to_rank_major)
{
  int64_t total = 0;
  dual_t src, dst;
  mz_reorder_t cpu, cuda;
  char text[96];

  for (int32_t u = 0; u < num_units; u++)
    total += lengths[u] * num_ranks;
  src = dual_random(sides, sides->dtype, total, 1);
  dst = dual_random(sides, sides->dtype, total + 5, 1);
  cpu = (mz_reorder_t){
      num_ranks, num_units, lengths,      mz_dtype_bytes(sides->dtype),
      src.cpu,   dst.cpu,   to_rank_major};
  cuda = cpu;
  cuda.src = src.cuda;
  cuda.dst = dst.cuda;
  RUN_BOTH(sides, reorder, &cpu, &cuda);
  snprintf(text, sizeof text, "reorder %d ranks, %d units, %s", (int)num_ranks,
           (int)num_units, to_rank_major ? "to ranks" : "to units");
  compare(sides, text, &dst, 0);
}

static void check_shards(sides_t *sides)
{
  static const int64_t odd[] = {0, 1, 7, 128, 1000, 2, 100003};
  static const int64_t even[] = {128, 65536, 0, 4096};

  check_reduce(sides, 1, 1, 1, 0);
  check_reduce(sides, 1, 0, 0, 1);
  check_reduce(sides, 2, 7, 9, 1);
  check_reduce(sides, 3, 1000, 1000, 0);
  check_reduce(sides, 5, 1003, 1008, 1);
  check_reduce(sides, 8, 100003, 100016, 0);
  if (!sides_skip(sides, 4 * 3000064, 0))
    check_reduce(sides, 4, 3000000, 3000064, 1);
  for (int way = 0; way < 2; way++) {
    check_reorder(sides, 1, 7, odd, way);
    check_reorder(sides, 3, 7, odd, way);
    check_reorder(sides, 4, 4, even, way);
    check_reorder(sides, 4, 0, even, way);
  }
}

/* --- convert --- */

/* Special numbers go first, then random ones of all sizes. */
static dual_t numbers_of(sides_t *sides, int64_t n)
{
  static const float special[] = {
      0.0f,     -0.0f,    1.0f,      65504.0f, 65519.0f,  65520.0f,
      1e6f,     INFINITY, -INFINITY, NAN,      6e-8f,     2.9e-8f,
      3.05e-5f, 6.1e-5f,  3.38e38f,  1e-40f,   1.001953f, 1.005859f};
  dual_t x = dual_random(sides, MZ_F32, n, 1);
  float *values = x.cpu;

  for (int64_t i = 0; i < n; i++)
    if (i < (int64_t)(sizeof special / sizeof *special))
      values[i] = special[i];
    else
      values[i] = ldexpf(values[i], (int)pick(-26, 17));
  dual_renew(sides, &x);
  return x;
}

/* From fp32 to `dtype`, a copy of that, and back. There is one nearest number,
 * so both sides have the same. */
static void check_convert(sides_t *sides, mz_dtype_t dtype, int64_t n,
                          int64_t shift)
{
  int64_t skip = shift * (int64_t)mz_dtype_bytes(dtype);
  dual_t x = numbers_of(sides, n), back = dual_random(sides, MZ_F32, n + 1, 1);
  dual_t half = dual_zeros(sides, dtype, n + shift);
  dual_t copy = dual_zeros(sides, dtype, n + shift);
  mz_convert_t cpu, cuda;
  char text[96];

  snprintf(text, sizeof text, "convert %lld to dtype %d and back, shift %lld",
           (long long)n, (int)dtype, (long long)shift);
  cpu = cuda = (mz_convert_t){n, x.cpu, MZ_F32, (char *)half.cpu + skip, dtype};
  cuda.src = x.cuda;
  cuda.dst = (char *)half.cuda + skip;
  RUN_BOTH(sides, convert, &cpu, &cuda);
  cpu = cuda = (mz_convert_t){n, (char *)half.cpu + skip, dtype,
                              (char *)copy.cpu + skip, dtype};
  cuda.src = (char *)half.cuda + skip;
  cuda.dst = (char *)copy.cuda + skip;
  RUN_BOTH(sides, convert, &cpu, &cuda);
  cpu = cuda =
      (mz_convert_t){n, (char *)copy.cpu + skip, dtype, back.cpu, MZ_F32};
  cuda.src = (char *)copy.cuda + skip;
  cuda.dst = back.cuda;
  RUN_BOTH(sides, convert, &cpu, &cuda);
  compare(sides, text, &back, 0);
}

/* --- normals --- */

/* What the C library gives where the GPU does not know, as the caller does. */
static int32_t mend_normals(sides_t *sides, const mz_normals_t *a, dual_t *out)
{
  int32_t *doubt, num;

  must(mz_new(1 + a->n, "doubts", &doubt));
  must(mz_device_copy(sides->device, doubt, a->doubt, 4 * (1 + a->n),
                      sides->device->stream));
  must(mz_stream_synchronize(sides->device, sides->device->stream));
  num = doubt[0];
  for (int32_t i = 0; i < num; i++) {
    int32_t at = doubt[1 + i];
    float value = (float)(a->scale * mz_random_normal(&a->random,
                                                      a->first + (uint64_t)at));

    must(mz_device_upload(sides->device, (float *)out->cuda + at, &value, 4,
                          sides->device->stream));
  }
  mz_free(doubt);
  return num;
}

/* The bits of the CPU, which are those of the C library; behind the last
 * element nothing is written. */
static void check_normals(sides_t *sides, uint64_t first, int64_t n,
                          double scale)
{
  dual_t out = dual_random(sides, MZ_F32, n + 3, 1);
  dual_t doubt = dual_zeros(sides, MZ_I32, n + 1);
  mz_normals_t cpu = {.random =
                          mz_random_make(17, 0x89abcdefu, MZ_PURPOSE_INIT, 3),
                      .first = first,
                      .n = n,
                      .scale = scale,
                      .out = out.cpu,
                      .doubt = doubt.cpu};
  mz_normals_t cuda = cpu;
  int32_t num;
  bool good;
  char text[96];

  cuda.out = out.cuda;
  cuda.doubt = doubt.cuda;
  RUN_BOTH(sides, normals, &cpu, &cuda);
  num = mend_normals(sides, &cuda, &out);
  snprintf(text, sizeof text, "normals %lld from %llu, scale %g: %ld in doubt",
           (long long)n, (unsigned long long)first, scale, (long)num);
  good = num <= 10 + n / 10000 &&
         memcmp(dual_read(sides, &out), out.cpu, 4 * (size_t)(n + 3)) == 0;
  compare(sides, text, &out, good ? 0 : -1); /* bits, and few in doubt */
}

static void check_all_normals(sides_t *sides)
{
  for (int64_t n = 0; n < 12; n++)
    check_normals(sides, (uint64_t)(n % 5), n, 1);
  check_normals(sides, 1021, 40003, 0.02);
  check_normals(sides, UINT64_C(0x3ffffffff), 70001, 1e-38);
  if (!sides_skip(sides, 16 << 20, 0)) check_normals(sides, 0, 16 << 20, 0.02);
}

void check_optim(sides_t *sides)
{
  static const mz_dtype_t types[] = {MZ_F32, MZ_BF16, MZ_F16};

  check_stretches(sides);
  check_shards(sides);
  check_all_normals(sides);
  for (int i = 0; i < 3; i++) {
    check_convert(sides, types[i], 0, 0);
    check_convert(sides, types[i], 1, 0);
    check_convert(sides, types[i], 19, 0);
    check_convert(sides, types[i], 1003, 1);
    if (!sides_skip(sides, 3000001, 0))
      check_convert(sides, types[i], 3000001, 0);
  }
}
