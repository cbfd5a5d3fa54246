/* SPDX-License-Identifier: Apache-2.0 */
/* embedding and embedding_grad. Letters: kernels/embedding.h. */
#include "check.h"

#include "base/alloc.h"
#include "bits.h"

#include <stdio.h>

typedef struct embedding_case {
  int64_t tokens, width, vocab;
  int32_t sequence, positions; /* positions 0: no table of them */
  double p;                    /* dropout */
  double often;                /* share of the tokens that are one id */
  int accumulate;
} embedding_case_t;

typedef struct embedding_arrays {
  dual_t tokens, wte, wpe, samples, x;
  dual_t dx, dwte, dwpe;
} embedding_arrays_t;

enum { MAX_TOKENS = 16384 };

static dual_t tokens_of(sides_t *sides, const embedding_case_t *c)
{
  static int32_t values[MAX_TOKENS];
  int32_t often = (int32_t)(c->vocab - 1);

  for (int64_t t = 0; t < c->tokens; t++)
    values[t] = (double)pick(0, 999) < 1000 * c->often
                    ? often
                    : (int32_t)pick(0, c->vocab - 1);
  return dual_of(sides, MZ_I32, c->tokens, values);
}

static dual_t samples_of(sides_t *sides, const embedding_case_t *c)
{
  static int64_t values[MAX_TOKENS];
  int64_t count = mz_div_up(c->tokens, c->sequence);

  for (int64_t i = 0; i < count; i++)
    values[i] = pick(0, 100000);
  return dual_of(sides, MZ_I64, count, values);
}

static embedding_arrays_t make_arrays(sides_t *sides, const embedding_case_t *c)
{
  mz_dtype_t dtype = sides->dtype;
  int64_t rows = c->tokens * c->width, vocab = c->vocab * c->width;
  int64_t positions = c->positions * c->width;
  embedding_arrays_t v = {
      .tokens = tokens_of(sides, c),
      .samples = samples_of(sides, c),
      .wte = dual_random(sides, dtype, vocab, 1),
      .wpe = dual_random(sides, dtype, positions, 1),
      .x = dual_random(sides, dtype, rows, 1),
      .dx = dual_random(sides, dtype, rows, 1),
      .dwte = dual_random(sides, MZ_F32, vocab, 1),
      .dwpe = dual_random(sides, MZ_F32, positions, 1),
  };

  return v;
}

static mz_embedding_t forward_of(const embedding_case_t *c,
                                 const embedding_arrays_t *v, bool cuda)
{
  mz_embedding_t a = {
      .num_tokens = c->tokens,
      .width = c->width,
      .vocab = c->vocab,
      .positions = c->positions,
      .sequence = c->sequence,
      .tokens = cuda ? v->tokens.cuda : v->tokens.cpu,
      .wte = cuda ? v->wte.cuda : v->wte.cpu,
      .wpe = c->positions == 0 ? NULL
             : cuda            ? v->wpe.cuda
                               : v->wpe.cpu,
      .dropout = {.p = c->p,
                  .random = mz_random_make(31, 2, MZ_PURPOSE_DROPOUT, 0),
                  .samples = cuda ? v->samples.cuda : v->samples.cpu,
                  .sequence = c->sequence},
      .x = cuda ? v->x.cuda : v->x.cpu,
  };

  return a;
}

static mz_embedding_grad_t backward_of(const embedding_case_t *c,
                                       const embedding_arrays_t *v, bool cuda)
{
  mz_embedding_grad_t a = {
      .forward = forward_of(c, v, cuda),
      .dx = cuda ? v->dx.cuda : v->dx.cpu,
      .dwte = cuda ? v->dwte.cuda : v->dwte.cpu,
      .dwpe = c->positions == 0 ? NULL
              : cuda            ? v->dwpe.cuda
                                : v->dwpe.cpu,
      .accumulate_te = c->accumulate,
      .accumulate_pe = c->accumulate,
  };

  return a;
}

static void compare_as(sides_t *sides, const embedding_case_t *c,
                       const char *what, const dual_t *dual, double bound)
{
  char text[160];

  snprintf(text, sizeof text, "%s T %lld H %lld V %lld S %d p %g often %g",
           what, (long long)c->tokens, (long long)c->width, (long long)c->vocab,
           (int)c->sequence, c->p, c->often);
  compare(sides, text, dual, bound);
}

/* Forward: one addition, one multiplication and one rounding on both sides, so
 * equal numbers. Backward: the same additions in the same order; with a mask
 * its product may be rounded on one side and be part of the addition on the
 * other, which over n additions gives about sqrt(n) 2^-24. */
static void check_case(sides_t *sides, const embedding_case_t *c)
{
  embedding_arrays_t v = make_arrays(sides, c);
  mz_embedding_t cpu = forward_of(c, &v, false), cuda = forward_of(c, &v, true);
  mz_embedding_grad_t cpu_grad = backward_of(c, &v, false);
  mz_embedding_grad_t cuda_grad = backward_of(c, &v, true);
  double bound = c->p > 0 ? 1e-5 : 0;
  void *kept_te, *kept_pe;

  RUN_BOTH(sides, embedding, &cpu, &cuda);
  compare_as(sides, c, "embedding", &v.x, 0);
  RUN_BOTH(sides, embedding_grad, &cpu_grad, &cuda_grad);
  compare_as(sides, c, "embedding dwte", &v.dwte, bound);
  compare_as(sides, c, "embedding dwpe", &v.dwpe, bound);
  if (c->accumulate) return;
  kept_te = bits_keep(sides, &v.dwte);
  kept_pe = bits_keep(sides, &v.dwpe);
  must(sides->cuda->ops->embedding_grad(sides->cuda, &cuda_grad,
                                        sides->device->stream));
  bits_same(sides, "embedding dwte", &v.dwte, kept_te);
  bits_same(sides, "embedding dwpe", &v.dwpe, kept_pe);
}

/* Numbers of occurrences around the bounds of a warp, of what counts as often,
 * and of the rows read at once. */
static void check_counts(sides_t *sides)
{
  static const int64_t counts[] = {2,  31, 32, 33,  63,  64,  65,
                                   66, 95, 96, 127, 128, 129, 161};

  for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
    embedding_case_t c = {.tokens = counts[i],
                          .width = 40,
                          .vocab = 3,
                          .sequence = 16,
                          .positions = 16,
                          .often = 1};

    check_case(sides, &c);
  }
}

void check_embedding(sides_t *sides)
{
  static const embedding_case_t cases[] = {
      /* T, H, V, S, positions, p, often, accumulate */
      {0, 64, 11, 8, 16, 0, 0, 0},
      {0, 64, 11, 8, 16, 0.1, 0, 1},
      {1, 1, 11, 1, 1, 0, 0, 0},
      {1, 768, 50257, 1024, 1024, 0.1, 0, 0},
      {3, 7, 11, 2, 5, 0.5, 0, 1},
      {1000, 7, 11, 100, 100, 0, 0, 0},
      {1000, 64, 11, 128, 200, 0.1, 0.5, 0},
      {4096, 64, 11, 512, 512, 0, 0, 1},
      {4096, 1000, 11, 1024, 1024, 0, 0.9, 0},
      {4096, 768, 50257, 1024, 1024, 0, 0.05, 0},
      {4096, 768, 50257, 1024, 2048, 0.1, 0.3, 1},
      {4097, 1021, 300, 100, 0, 0, 0.2, 0},
      {4095, 129, 300, 100, 128, 0.2, 0.2, 1},
      {16384, 1024, 50257, 1024, 1024, 0, 0.25, 1},
      {16384, 2048, 11, 2048, 0, 0, 1, 0},
  };

  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (!sides_skip(
            sides, mz_max_i64(cases[i].tokens, cases[i].vocab) * cases[i].width,
            0))
      check_case(sides, &cases[i]);
  check_counts(sides);
}
