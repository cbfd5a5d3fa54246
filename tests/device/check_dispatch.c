/* SPDX-License-Identifier: Apache-2.0 */
/* Rows between token order, send order and expert order. Routes are chosen by
 * hand: some are dropped, some tokens have none. */
#include "check.h"

#include "base/alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Sums of k products of numbers below 1: fp32 rounds at each step, in the same
 * order on both sides, up to fused multiply-adds. bf16 outputs are rounded once
 * more, so near the middle of two numbers the sides may be one step apart:
 * 2^-7 of the value at most. */
static double sum_bound(const sides_t *s)
{
  return s->dtype == MZ_BF16 ? 0x1p-7 : 1e-6;
}

/* A dot product of H terms in another order. */
static const double DOT_BOUND = 5e-5;

/* One dispatch: the CPU's and the other side's pointers come from the duals. */
typedef struct routes {
  int64_t tokens, width, rows;
  int32_t k;
  dual_t row, weight;
} routes_t;

/* A random order of [0, n). */
static void shuffle(int32_t *out, int64_t n)
{
  for (int64_t i = 0; i < n; i++) {
    int64_t j = pick(0, i);

    out[i] = out[j];
    out[j] = (int32_t)i;
  }
}

/* About one route in @p one_in is dropped (0: none), and all routes of every
 * fifth token then. */
static routes_t routes_make(sides_t *s, int64_t tokens, int32_t k,
                            int64_t width, int one_in)
{
  routes_t r = {.tokens = tokens, .k = k, .width = width};
  int64_t routes = tokens * k;
  int32_t *row = NULL, *order = NULL;

  must(mz_new(routes + 1, "rows", &row));
  must(mz_new(routes + 1, "order", &order));
  for (int64_t i = 0; i < routes; i++) {
    int dropped = one_in > 0 && (i / k % 5 == 3 || pick(1, one_in) == 1);

    row[i] = dropped ? -1 : 0;
    r.rows += !dropped;
  }
  shuffle(order, r.rows);
  for (int64_t i = 0, at = 0; i < routes; i++)
    if (row[i] == 0) row[i] = order[at++];
  r.row = dual_of(s, MZ_I32, routes, row);
  r.weight = dual_random(s, MZ_F32, routes, 1.0);
  for (int64_t i = 0; i < routes; i++)
    if (row[i] < 0) ((float *)r.weight.cpu)[i] = 0.0f;
  dual_renew(s, &r.weight);
  mz_free(row);
  mz_free(order);
  return r;
}

static void check_permute(sides_t *s, const routes_t *r)
{
  dual_t x = dual_random(s, s->dtype, r->tokens * r->width, 1.0);
  dual_t send = dual_random(s, s->dtype, (r->rows + 1) * r->width, 1.0);
  mz_permute_t a = {r->tokens, r->width, r->k, r->row.cpu, x.cpu, send.cpu};
  mz_permute_t b = a;

  b.row = r->row.cuda;
  b.x = x.cuda;
  b.send = send.cuda;
  RUN_BOTH(s, permute, &a, &b);
  /* A copy: equal bits; the row behind the last one stays as it was. */
  compare(s, "permute", &send, 0.0);
}

static void check_permute_grad(sides_t *s, const routes_t *r)
{
  dual_t d_row = dual_random(s, s->dtype, r->rows * r->width, 1.0);
  dual_t dx = dual_random(s, s->dtype, r->tokens * r->width, 1.0);
  mz_permute_grad_t a = {r->tokens,  r->width,  r->k,
                         r->row.cpu, d_row.cpu, dx.cpu};
  mz_permute_grad_t b = a;

  b.row = r->row.cuda;
  b.d_row = d_row.cuda;
  b.dx = dx.cuda;
  RUN_BOTH(s, permute_grad, &a, &b);
  compare(s, "permute_grad dx", &dx, sum_bound(s));
}

static void check_combine(sides_t *s, const routes_t *r)
{
  dual_t back = dual_random(s, s->dtype, r->rows * r->width, 1.0);
  dual_t y = dual_random(s, s->dtype, r->tokens * r->width, 1.0);
  mz_combine_t a = {r->tokens,     r->width, r->k, r->row.cpu,
                    r->weight.cpu, back.cpu, y.cpu};
  mz_combine_t b = a;

  b.row = r->row.cuda;
  b.weight = r->weight.cuda;
  b.back = back.cuda;
  b.y = y.cuda;
  RUN_BOTH(s, combine, &a, &b);
  compare(s, "combine y", &y, sum_bound(s));
}

/* With d_send in the place of back, or apart from it. */
static void check_combine_grad(sides_t *s, const routes_t *r, int alias)
{
  dual_t back = dual_random(s, s->dtype, r->rows * r->width, 1.0);
  dual_t other = dual_random(s, s->dtype, r->rows * r->width, 1.0);
  dual_t dy = dual_random(s, s->dtype, r->tokens * r->width, 1.0);
  dual_t d_weight = dual_random(s, MZ_F32, r->tokens * r->k, 1.0);
  dual_t d_send = alias ? back : other;
  mz_combine_grad_t a = {.forward = {r->tokens, r->width, r->k, r->row.cpu,
                                     r->weight.cpu, back.cpu, NULL},
                         .dy = dy.cpu,
                         .d_send = d_send.cpu,
                         .d_weight = d_weight.cpu};
  mz_combine_grad_t b = a;

  b.forward.row = r->row.cuda;
  b.forward.weight = r->weight.cuda;
  b.forward.back = back.cuda;
  b.dy = dy.cuda;
  b.d_send = d_send.cuda;
  b.d_weight = d_weight.cuda;
  RUN_BOTH(s, combine_grad, &a, &b);
  /* One product, rounded once on both sides: equal bits. */
  compare(s, "combine_grad d_send", &d_send, 0.0);
  compare(s, "combine_grad d_weight", &d_weight, DOT_BOUND);
}

static void check_routes(sides_t *s, int64_t tokens, int32_t k, int64_t width,
                         int one_in)
{
  routes_t r = routes_make(s, tokens, k, width, one_in);

  printf("T %lld, k %d, H %lld, %lld rows\n", (long long)tokens, k,
         (long long)width, (long long)r.rows);
  check_permute(s, &r);
  check_permute_grad(s, &r);
  check_combine(s, &r);
  check_combine_grad(s, &r, 0);
  check_combine_grad(s, &r, 1);
}

/* Counts are random, every third one is 0; empty: all are. */
static void check_regroup(sides_t *s, int32_t sources, int32_t experts,
                          int64_t width, int32_t most, int to_source_major)
{
  int32_t pairs = sources * experts;
  dual_t counts = dual_zeros(s, MZ_I32, pairs);
  dual_t offsets = dual_zeros(s, MZ_I32, experts + 1);
  int32_t *count = counts.cpu, *offset = offsets.cpu;
  dual_t src, dst;
  mz_regroup_t a, b;

  for (int32_t p = 0; p < pairs; p++)
    count[p] = pick(0, 2) == 0 ? 0 : (int32_t)pick(0, most);
  for (int32_t e = 0; e < experts; e++) {
    offset[e + 1] = offset[e];
    for (int32_t i = 0; i < sources; i++)
      offset[e + 1] += count[i * experts + e];
  }
  dual_renew(s, &counts);
  dual_renew(s, &offsets);
  src = dual_random(s, s->dtype, offset[experts] * width, 1.0);
  dst = dual_random(s, s->dtype, (offset[experts] + 3) * width, 1.0);
  a = (mz_regroup_t){sources, experts, counts.cpu, offsets.cpu,
                     /* A bound, not the count. */
                     offset[experts] + 3, width, src.cpu, dst.cpu,
                     to_source_major};
  b = a;
  b.counts = counts.cuda;
  b.offsets = offsets.cuda;
  b.src = src.cuda;
  b.dst = dst.cuda;
  RUN_BOTH(s, regroup, &a, &b);
  printf("%d sources, %d experts, H %lld, %d rows, to %s\n", sources, experts,
         (long long)width, offset[experts],
         to_source_major ? "sources" : "experts");
  /* A copy: equal bits; rows behind the last one stay as they were. */
  compare(s, "regroup", &dst, 0.0);
}

/* One source, in place: nothing is to be done, and nothing is. */
static void check_in_place(sides_t *s)
{
  int32_t count[2] = {3, 4}, offset[3] = {0, 3, 7};
  dual_t counts = dual_of(s, MZ_I32, 2, count);
  dual_t offsets = dual_of(s, MZ_I32, 3, offset);
  dual_t x = dual_random(s, s->dtype, 7 * 24, 1.0);
  mz_regroup_t a = {1, 2, counts.cuda, offsets.cuda, 7, 24, x.cuda, x.cuda, 0};

  must(s->cuda->ops->regroup(s->cuda, &a, s->device->stream));
  must(mz_stream_synchronize(s->device, s->device->stream));
  compare(s, "regroup in place", &x, 0.0);
}

void check_dispatch(sides_t *s)
{
  static const struct {
    int64_t tokens, width;
    int32_t k;
    int one_in;
  } cases[] = {{0, 64, 2, 0},      {1, 64, 1, 0},      {1, 8, 2, 0},
               {7, 33, 2, 4},      {8, 1, 3, 4},       {9, 24, 1, 2},
               {100, 72, 8, 3},    {100, 1000, 5, 2},  {65, 1028, 2, 0},
               {13, 4096, 4, 1},   {1000, 1600, 2, 6}, {4096, 2048, 8, 9},
               {16384, 1024, 2, 8}};
  static const struct {
    int32_t sources, experts;
    int64_t width;
    int32_t most;
  } groups[] = {{1, 1, 64, 5},  {1, 8, 40, 9},      {2, 4, 64, 0},
                {2, 4, 33, 1},  {3, 5, 1000, 30},   {8, 1, 7, 100},
                {4, 33, 24, 9}, {8, 32, 2048, 100}, {2, 4, 1024, 5000}};

  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (!sides_skip(s, cases[i].tokens * cases[i].k * cases[i].width, 0))
      check_routes(s, cases[i].tokens, cases[i].k, cases[i].width,
                   cases[i].one_in);
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
    for (int to = 0; to < 2; to++) {
      if (sides_skip(s,
                     groups[i].width * groups[i].most * groups[i].sources *
                         groups[i].experts,
                     0))
        continue;
      check_regroup(s, groups[i].sources, groups[i].experts, groups[i].width,
                    groups[i].most, to);
    }
  check_in_place(s);
}
