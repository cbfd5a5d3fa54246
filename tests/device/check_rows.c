/* SPDX-License-Identifier: Apache-2.0 */
/* gelu, swiglu, swiglu_grad, dropout, scale_rows. Behind the last row the
 * outputs hold equal numbers on both sides, which must stay. */
#include "check.h"

#include "base/alloc.h"

#include <stdio.h>

/* bf16: rounded from fp32 numbers that differ in their last bits, so perhaps
 * the next one: at most 2^-7 of the value, and a little. fp32: two exponentials
 * of 2e-7 each and a division of two units. */
static double map_bound(const sides_t *sides)
{
  return sides->dtype == MZ_BF16 ? 0x1.02p-7 : 2e-6;
}

/* An array of which an operation sees the part behind `shift` elements. */
typedef struct part {
  dual_t all;
  void *cpu, *cuda;
} part_t;

static part_t part_random(sides_t *sides, int64_t n, int shift, double scale)
{
  size_t skip = (size_t)shift * mz_dtype_bytes(sides->dtype);
  part_t part = {.all = dual_random(sides, sides->dtype, n + shift, scale)};

  part.cpu = (char *)part.all.cpu + skip;
  part.cuda = (char *)part.all.cuda + skip;
  return part;
}

static void compare_as(sides_t *sides, const char *what, int64_t rows,
                       int64_t width, const dual_t *dual, double bound)
{
  char text[128];

  snprintf(text, sizeof text, "%s [%lld, %lld]", what, (long long)rows,
           (long long)width);
  compare(sides, text, dual, bound);
}

static void check_maps(sides_t *sides, int32_t rows, int64_t max_rows,
                       int64_t width, int shift, double scale)
{
  int64_t n = max_rows * width;
  dual_t count = dual_of(sides, MZ_I32, 1, &rows);
  part_t pre = part_random(sides, n, shift, scale);
  part_t up = part_random(sides, n, shift, scale);
  part_t da = part_random(sides, n, shift, 1);
  part_t a = part_random(sides, n, shift, 1), b = part_random(sides, n, 0, 1);
  part_t dgate = part_random(sides, n, shift, 1);
  part_t c = part_random(sides, n, shift, 1);
  mz_gelu_t gelu[2] = {{count.cpu, max_rows, width, pre.cpu, a.cpu},
                       {count.cuda, max_rows, width, pre.cuda, a.cuda}};
  mz_swiglu_t swiglu[2] = {
      {count.cpu, max_rows, width, pre.cpu, up.cpu, b.cpu, NULL, NULL, NULL},
      {count.cuda, max_rows, width, pre.cuda, up.cuda, b.cuda, NULL, NULL,
       NULL}};
  mz_swiglu_t apart[2] = {{count.cpu, max_rows, width, pre.cpu, up.cpu, c.cpu,
                           da.cpu, dgate.cpu, a.cpu},
                          {count.cuda, max_rows, width, pre.cuda, up.cuda,
                           c.cuda, da.cuda, dgate.cuda, a.cuda}};
  mz_swiglu_t over[2] = {{count.cpu, max_rows, width, pre.cpu, up.cpu, da.cpu,
                          da.cpu, pre.cpu, up.cpu},
                         {count.cuda, max_rows, width, pre.cuda, up.cuda,
                          da.cuda, da.cuda, pre.cuda, up.cuda}};
  double bound = map_bound(sides);

  RUN_BOTH(sides, gelu, &gelu[0], &gelu[1]);
  compare_as(sides, "gelu", rows, width, &a.all, bound);
  RUN_BOTH(sides, swiglu, &swiglu[0], &swiglu[1]);
  compare_as(sides, "swiglu", rows, width, &b.all, bound);
  RUN_BOTH(sides, swiglu_grad, &apart[0], &apart[1]);
  compare_as(sides, "swiglu_grad dgate", rows, width, &dgate.all, bound);
  compare_as(sides, "swiglu_grad dup", rows, width, &a.all, bound);
  compare_as(sides, "swiglu_grad a", rows, width, &c.all, bound);
  RUN_BOTH(sides, swiglu_grad, &over[0], &over[1]);
  compare_as(sides, "swiglu_grad dgate in place", rows, width, &pre.all, bound);
  compare_as(sides, "swiglu_grad dup in place", rows, width, &up.all, bound);
  compare_as(sides, "swiglu_grad a in place", rows, width, &da.all, bound);
}

/* One multiplication and one rounding on both sides: equal numbers. */
static void check_dropout(sides_t *sides, int64_t rows, int64_t width,
                          int shift, double p)
{
  int32_t sequence = (int32_t)pick(1, 130);
  int64_t count = mz_div_up(rows, sequence), samples[20000];
  part_t x = part_random(sides, rows * width, shift, 1);
  dual_t s;
  mz_dropout_apply_t a[2];

  for (int64_t i = 0; i < count; i++)
    samples[i] = pick(0, INT64_C(1) << 33); /* needs the counter's upper half */
  s = dual_of(sides, MZ_I64, count, samples);
  for (int i = 0; i < 2; i++)
    a[i] = (mz_dropout_apply_t){
        .rows = rows,
        .width = width,
        .dropout = {.p = p,
                    .random = mz_random_make(9, 4, MZ_PURPOSE_DROPOUT, 1),
                    .samples = i ? s.cuda : s.cpu,
                    .sequence = sequence},
        .x = i ? x.cuda : x.cpu,
    };
  RUN_BOTH(sides, dropout, &a[0], &a[1]);
  compare_as(sides, "dropout", rows, width, &x.all, 0);
}

/* Likewise. */
static void check_scale(sides_t *sides, int32_t num_experts, int64_t width,
                        int32_t most)
{
  int32_t offsets[65] = {0};
  int64_t max_rows;
  dual_t x, y, o;
  mz_scale_rows_t a[2];

  for (int32_t e = 0; e < num_experts; e++) /* every third one has no rows */
    offsets[e + 1] = offsets[e] + (e % 3 == 1 ? 0 : (int32_t)pick(0, most));
  max_rows = offsets[num_experts] + 5;
  x = dual_random(sides, sides->dtype, max_rows * width, 1);
  y = dual_random(sides, sides->dtype, max_rows * width, 1);
  o = dual_of(sides, MZ_I32, num_experts + 1, offsets);
  a[0] =
      (mz_scale_rows_t){num_experts, 3, o.cpu, max_rows, width, x.cpu, y.cpu};
  a[1] = (mz_scale_rows_t){num_experts, 3,      o.cuda, max_rows,
                           width,       x.cuda, y.cuda};
  RUN_BOTH(sides, scale_rows, &a[0], &a[1]);
  compare_as(sides, "scale_rows", offsets[num_experts], width, &y, 0);
}

void check_rows(sides_t *sides)
{
  check_maps(sides, 0, 10, 64, 0, 4);
  check_maps(sides, 0, 0, 64, 0, 4);
  check_maps(sides, 1, 1, 1, 0, 4);
  check_maps(sides, 3, 5, 7, 0, 4);
  check_maps(sides, 1000, 1500, 77, 0, 4);
  check_maps(sides, 1000, 1000, 1024, 0, 4);
  check_maps(sides, 1000, 1003, 129, 1, 4);
  check_maps(sides, 100, 120, 64, 0, 100); /* exponentials overflow */
  if (!sides_skip(sides, 20000 * 2048, 0))
    check_maps(sides, 16384, 20000, 2048, 0, 4);

  check_dropout(sides, 0, 64, 0, 0.1);
  check_dropout(sides, 1, 1, 0, 0.5);
  check_dropout(sides, 3, 7, 0, 0.5);
  check_dropout(sides, 1000, 768, 0, 0.1);
  check_dropout(sides, 1000, 1021, 0, 0.9);
  check_dropout(sides, 50, 64, 1, 0.1);
  if (!sides_skip(sides, 16384 * 1024, 0))
    check_dropout(sides, 16384, 1024, 0, 0.1);
  check_dropout(sides, 100, 64, 0, 0);

  check_scale(sides, 1, 64, 0);
  check_scale(sides, 1, 7, 20);
  check_scale(sides, 5, 33, 100);
  check_scale(sides, 64, 256, 300);
}
