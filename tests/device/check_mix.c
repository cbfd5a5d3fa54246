/* SPDX-License-Identifier: Apache-2.0 */
/* mix, mix_grad, mix_dgrad. */
#include "check.h"

#include <stdio.h>

/* Elementwise results are fp32 sums of a few products, rounded once more in
 * bf16: near the middle of two numbers the sides may be one step apart. The
 * coefficients differ by 2e-7 and what other orders of H products do. */
static double row_bound(const sides_t *s)
{
  return s->dtype == MZ_BF16 ? 0x1.02p-7 : 2e-5;
}

/* Sums of T or H terms in another order. */
static const double SUM_BOUND = 5e-5;

/* One call: arrays of both sides, each behind `shift` elements. */
typedef struct mix_case {
  mz_mix_kind_t kind;
  int64_t tokens, width;
  int shift;
  dual_t x, w, b, moe, side, dy, y, d_moe, d_side, dx; /* table's dtype */
  dual_t coef, d, dw, db;
} mix_case_t;

static void *at(const sides_t *s, const dual_t *dual, int shift, int cuda)
{
  char *base = cuda ? dual->cuda : dual->cpu;

  return base + shift * (int64_t)mz_dtype_bytes(s->dtype);
}

static mix_case_t make_case(sides_t *s, mz_mix_kind_t kind, int64_t tokens,
                            int64_t width, int shift)
{
  mix_case_t c = {
      .kind = kind, .tokens = tokens, .width = width, .shift = shift};
  int64_t n = tokens * width + shift;
  dual_t *rows[] = {&c.x, &c.moe,   &c.side,   &c.dy,
                    &c.y, &c.d_moe, &c.d_side, &c.dx};

  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    *rows[i] = dual_random(s, s->dtype, n, 1);
  c.w = dual_random(s, s->dtype, 2 * width + shift, 0.2);
  c.b = dual_random(s, s->dtype, 2, 1);
  c.coef = dual_random(s, MZ_F32, 2 * tokens, 1);
  c.d = dual_random(s, MZ_F32, tokens, 1);
  c.dw = dual_random(s, MZ_F32, 2 * width, 1);
  c.db = dual_random(s, MZ_F32, 2, 1);
  return c;
}

static mz_mix_t mix_args(const sides_t *s, const mix_case_t *c, int cuda,
                         const dual_t *moe, const dual_t *y)
{
  mz_mix_t a = {.kind = c->kind,
                .num_tokens = c->tokens,
                .width = c->width,
                .x = at(s, &c->x, c->shift, cuda),
                .w = at(s, &c->w, c->shift, cuda),
                .b = c->shift ? NULL : at(s, &c->b, 0, cuda),
                .moe = at(s, moe, c->shift, cuda),
                .side = at(s, &c->side, c->shift, cuda),
                .coef = cuda ? c->coef.cuda : c->coef.cpu,
                .y = at(s, y, c->shift, cuda)};
  return a;
}

static mz_mix_grad_t grad_args(const sides_t *s, const mix_case_t *c, int cuda,
                               int accumulate)
{
  mz_mix_grad_t a = {.forward = mix_args(s, c, cuda, &c->moe, &c->y),
                     .dy = at(s, &c->dy, c->shift, cuda),
                     .d_moe = at(s, &c->d_moe, c->shift, cuda),
                     .d_side = at(s, &c->d_side, c->shift, cuda),
                     .d = cuda ? c->d.cuda : c->d.cpu,
                     .dw = cuda ? c->dw.cuda : c->dw.cpu,
                     .db = cuda ? c->db.cuda : c->db.cpu,
                     .accumulate_w = accumulate,
                     .accumulate_b = !accumulate};
  return a;
}

static void check_grad(sides_t *s, const mix_case_t *c, int accumulate)
{
  mz_mix_grad_t a[2] = {grad_args(s, c, 0, accumulate),
                        grad_args(s, c, 1, accumulate)};
  void *bits;

  RUN_BOTH(s, mix_grad, &a[0], &a[1]);
  compare(s, "mix_grad d_moe", &c->d_moe, row_bound(s));
  compare(s, "mix_grad d_side", &c->d_side, row_bound(s));
  compare(s, "mix_grad d", &c->d, SUM_BOUND);
  compare(s, "mix_grad dw", &c->dw, SUM_BOUND);
  compare(s, "mix_grad db", &c->db, SUM_BOUND);
  if (accumulate) return;
  bits = dual_bits(s, &c->dw);
  RUN_BOTH(s, mix_grad, &a[0], &a[1]);
  same_bits(s, "mix_grad dw again", &c->dw, bits);
}

static void check_case(sides_t *s, mz_mix_kind_t kind, int64_t tokens,
                       int64_t width, int shift)
{
  mix_case_t c = make_case(s, kind, tokens, width, shift);
  mz_mix_t a[2] = {mix_args(s, &c, 0, &c.moe, &c.y),
                   mix_args(s, &c, 1, &c.moe, &c.y)};
  mz_mix_t over[2] = {mix_args(s, &c, 0, &c.dx, &c.dx),
                      mix_args(s, &c, 1, &c.dx, &c.dx)};
  mz_mix_dgrad_t dgrad[2];

  printf("kind %d, T %lld, H %lld, from %d\n", (int)kind, (long long)tokens,
         (long long)width, shift);
  RUN_BOTH(s, mix, &a[0], &a[1]);
  compare(s, "mix y", &c.y, row_bound(s));
  if (kind != MZ_MIX_SUM) compare(s, "mix coef", &c.coef, SUM_BOUND);
  RUN_BOTH(s, mix, &over[0], &over[1]);
  compare(s, "mix over moe", &c.dx, row_bound(s));
  if (kind != MZ_MIX_SUM) {
    dual_renew(s, &c.coef); /* equal ones, so that only this step is seen */
    check_grad(s, &c, 0);
    check_grad(s, &c, 1);
    dual_renew(s, &c.d);
  }
  dual_renew(s, &c.d_side);
  dual_renew(s, &c.dx);
  for (int cuda = 0; cuda < 2; cuda++)
    dgrad[cuda] = (mz_mix_dgrad_t){kind,
                                   tokens,
                                   width,
                                   at(s, &c.w, shift, cuda),
                                   cuda ? c.d.cuda : c.d.cpu,
                                   at(s, &c.d_side, shift, cuda),
                                   at(s, &c.dx, shift, cuda)};
  RUN_BOTH(s, mix_dgrad, &dgrad[0], &dgrad[1]);
  compare(s, "mix_dgrad dx", &c.dx, row_bound(s));
}

void check_mix(sides_t *s)
{
  static const struct {
    int64_t tokens, width;
    int shift;
  } cases[] = {{0, 64, 0},    {1, 1, 0},      {1, 64, 0},      {7, 33, 0},
               {8, 24, 0},    {9, 1000, 1},   {100, 1028, 0},  {33, 255, 0},
               {1000, 72, 3}, {4097, 256, 0}, {16384, 2048, 0}};

  for (int kind = MZ_MIX_SOFTMAX; kind <= MZ_MIX_SUM; kind++)
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
      if (!sides_skip(s, cases[i].tokens * cases[i].width, 0))
        check_case(s, (mz_mix_kind_t)kind, cases[i].tokens, cases[i].width,
                   cases[i].shift);
}
