/* SPDX-License-Identifier: Apache-2.0 */
/* add_norm and add_norm_grad. Letters: kernels/norm.h. */
#include "check.h"

#include "base/alloc.h"
#include "bits.h"

#include <stdio.h>

/* One call forward and one back. */
typedef struct norm_case {
  int64_t rows, width;
  mz_norm_kind_t kind;
  double p;       /* dropout */
  int y, bias;    /* whether they are there */
  int in_place;   /* the sum takes the place of x */
  int add;        /* backward: to what is in d_sum */
  int accumulate; /* to dw and db */
  int shift;      /* elements by which arrays miss 16 bytes */
} norm_case_t;

/* Arrays of both directions. */
typedef struct norm_arrays {
  dual_t x, y, sum, h, w, b, mean, rstd, samples;
  dual_t dh, d_sum, dy, dw, db, partial;
} norm_arrays_t;

/* A bf16 result is rounded from fp32 numbers that differ in their last bits, so
 * it may be the next number: at most 2^-7 of the value, and a little. An fp32
 * result differs by the order of sums over a row. */
static double output_bound(const sides_t *sides)
{
  return sides->dtype == MZ_BF16 ? 0x1.02p-7 : 1e-5;
}

/* Sums over rows or columns that may nearly cancel: a few 2^-24 of numbers that
 * are some hundred times larger than the sum. */
static const double sum_bound = 1e-4;

static dual_t samples_of(sides_t *sides, int64_t rows, int32_t sequence)
{
  int64_t values[16400], count = mz_div_up(rows, sequence);

  for (int64_t i = 0; i < count; i++)
    values[i] = pick(0, 5000);
  return dual_of(sides, MZ_I64, count, values);
}

static norm_arrays_t make_arrays(sides_t *sides, const norm_case_t *c,
                                 int32_t sequence)
{
  int64_t n = c->rows * c->width + c->shift, width = c->width + c->shift;
  mz_dtype_t dtype = sides->dtype;
  norm_arrays_t v = {
      .x = dual_random(sides, dtype, n, 2),
      .y = dual_random(sides, dtype, n, 2),
      .sum = dual_random(sides, dtype, n, 1),
      .h = dual_random(sides, dtype, n, 1),
      .w = dual_random(sides, dtype, width, 1.5),
      .b = dual_random(sides, dtype, width, 1),
      .mean = dual_random(sides, MZ_F32, c->rows, 1),
      .rstd = dual_random(sides, MZ_F32, c->rows, 1),
      .dh = dual_random(sides, dtype, n, 1),
      .d_sum = dual_random(sides, dtype, n, 1),
      .dy = dual_random(sides, dtype, n, 1),
      .dw = dual_random(sides, MZ_F32, c->width, 1),
      .db = dual_random(sides, MZ_F32, c->width, 1),
      .partial = dual_zeros(sides, MZ_F32, MZ_NORM_PARTIALS * 2 * c->width),
  };

  v.samples = samples_of(sides, c->rows, sequence);
  return v;
}

/* The pointer of one side, shifted. */
static void *at(const sides_t *sides, const norm_case_t *c, const dual_t *dual,
                bool cuda)
{
  char *base = cuda ? dual->cuda : dual->cpu;

  return base + (size_t)c->shift * mz_dtype_bytes(sides->dtype);
}

static mz_dropout_t dropout_of(const norm_case_t *c, const norm_arrays_t *v,
                               int32_t sequence, bool cuda)
{
  mz_dropout_t dropout = {
      .p = c->p,
      .random = mz_random_make(77, 5, MZ_PURPOSE_DROPOUT, 3),
      .samples = cuda ? v->samples.cuda : v->samples.cpu,
      .sequence = sequence,
  };

  return dropout;
}

static mz_add_norm_t forward_of(const sides_t *s, const norm_case_t *c,
                                const norm_arrays_t *v, int32_t sequence,
                                bool cuda)
{
  mz_add_norm_t a = {
      .kind = c->kind,
      .rows = c->rows,
      .width = c->width,
      /* Of one number alone only eps is left. */
      .eps = c->width < 8 ? 0.1 : 1e-5,
      .x = at(s, c, &v->x, cuda),
      .y = c->y ? at(s, c, &v->y, cuda) : NULL,
      .dropout = dropout_of(c, v, sequence, cuda),
      .sum = at(s, c, c->in_place ? &v->x : &v->sum, cuda),
      .h = at(s, c, &v->h, cuda),
      .w = at(s, c, &v->w, cuda),
      .b = c->bias ? at(s, c, &v->b, cuda) : NULL,
      .mean = c->kind == MZ_NORM_RMS ? NULL
              : cuda                 ? v->mean.cuda
                                     : v->mean.cpu,
      .rstd = cuda ? v->rstd.cuda : v->rstd.cpu,
  };

  return a;
}

static mz_add_norm_grad_t backward_of(const sides_t *s, const norm_case_t *c,
                                      const norm_arrays_t *v, int32_t sequence,
                                      bool cuda)
{
  mz_add_norm_grad_t a = {
      .kind = c->kind,
      .rows = c->rows,
      .width = c->width,
      .sum = at(s, c, &v->sum, cuda),
      .dh = at(s, c, &v->dh, cuda),
      .w = at(s, c, &v->w, cuda),
      .mean = cuda ? v->mean.cuda : v->mean.cpu,
      .rstd = cuda ? v->rstd.cuda : v->rstd.cpu,
      .add = c->add,
      .d_sum = at(s, c, &v->d_sum, cuda),
      .dropout = dropout_of(c, v, sequence, cuda),
      .dy = at(s, c, &v->dy, cuda),
      .dw = cuda ? v->dw.cuda : v->dw.cpu,
      .db = !c->bias ? NULL
            : cuda   ? v->db.cuda
                     : v->db.cpu,
      .accumulate_w = c->accumulate,
      .accumulate_b = c->accumulate,
      .partial = cuda ? v->partial.cuda : v->partial.cpu,
  };

  return a;
}

static void compare_as(sides_t *sides, const norm_case_t *c, const char *what,
                       const dual_t *dual, double bound)
{
  char text[160];

  snprintf(text, sizeof text, "%s [%lld, %lld] %s p %g %s", what,
           (long long)c->rows, (long long)c->width,
           c->kind == MZ_NORM_RMS ? "rms" : "layer", c->p,
           c->shift ? "shifted" : "");
  compare(sides, text, dual, bound);
}

/* Sums and statistics of the CPU's side go into both backward passes: these
 * are compared on their own. */
static void check_backward(sides_t *sides, const norm_case_t *c,
                           norm_arrays_t *v, int32_t sequence)
{
  mz_add_norm_grad_t cpu = backward_of(sides, c, v, sequence, false);
  mz_add_norm_grad_t cuda = backward_of(sides, c, v, sequence, true);
  void *kept_dw, *kept_d;

  dual_renew(sides, &v->sum);
  dual_renew(sides, &v->mean);
  dual_renew(sides, &v->rstd);
  RUN_BOTH(sides, add_norm_grad, &cpu, &cuda);
  compare_as(sides, c, "norm d_sum", &v->d_sum, output_bound(sides));
  compare_as(sides, c, "norm dy", &v->dy, output_bound(sides));
  compare_as(sides, c, "norm dw", &v->dw, sum_bound);
  compare_as(sides, c, "norm db", &v->db, sum_bound);
  if (c->add || c->accumulate) return;
  kept_dw = bits_keep(sides, &v->dw);
  kept_d = bits_keep(sides, &v->d_sum);
  must(sides->cuda->ops->add_norm_grad(sides->cuda, &cuda,
                                       sides->device->stream));
  bits_same(sides, "norm dw", &v->dw, kept_dw);
  bits_same(sides, "norm d_sum", &v->d_sum, kept_d);
}

static void check_case(sides_t *sides, const norm_case_t *c)
{
  int32_t sequence = (int32_t)(c->rows > 100 ? 128 : 2);
  norm_arrays_t v = make_arrays(sides, c, sequence);
  mz_add_norm_t cpu = forward_of(sides, c, &v, sequence, false);
  mz_add_norm_t cuda = forward_of(sides, c, &v, sequence, true);

  RUN_BOTH(sides, add_norm, &cpu, &cuda);
  compare_as(sides, c, "norm sum", c->in_place ? &v.x : &v.sum,
             output_bound(sides));
  compare_as(sides, c, "norm h", &v.h, output_bound(sides));
  compare_as(sides, c, "norm mean", &v.mean, sum_bound);
  compare_as(sides, c, "norm rstd", &v.rstd, 1e-5);
  if (!c->in_place) check_backward(sides, c, &v, sequence);
}

/* Only the sum, and only the norm. */
static void check_halves(sides_t *sides)
{
  norm_case_t c = {.rows = 33, .width = 64, .kind = MZ_NORM_LAYER, .bias = 1};
  norm_arrays_t v = make_arrays(sides, &c, 2);
  mz_add_norm_t cpu, cuda;

  c.y = 1;
  cpu = forward_of(sides, &c, &v, 2, false);
  cuda = forward_of(sides, &c, &v, 2, true);
  cpu.h = cuda.h = NULL;
  RUN_BOTH(sides, add_norm, &cpu, &cuda);
  compare_as(sides, &c, "norm sum alone", &v.sum, output_bound(sides));
  c.y = 0;
  cpu = forward_of(sides, &c, &v, 2, false);
  cuda = forward_of(sides, &c, &v, 2, true);
  cpu.sum = cuda.sum = NULL;
  RUN_BOTH(sides, add_norm, &cpu, &cuda);
  compare_as(sides, &c, "norm alone", &v.h, output_bound(sides));
}

void check_norm(sides_t *sides)
{
  static const norm_case_t cases[] = {
      /* rows, width, kind, p, y, bias, in place, add, accumulate, shift */
      {0, 64, MZ_NORM_LAYER, 0.1, 1, 1, 0, 0, 0, 0},
      {0, 768, MZ_NORM_RMS, 0, 1, 1, 0, 1, 1, 0},
      {1, 1, MZ_NORM_LAYER, 0, 1, 1, 0, 1, 0, 0},
      {1000, 1, MZ_NORM_RMS, 0.5, 1, 0, 0, 1, 1, 0},
      {1, 7, MZ_NORM_RMS, 0, 0, 0, 0, 0, 0, 0},
      {16384, 7, MZ_NORM_LAYER, 0.2, 1, 1, 0, 0, 0, 0},
      {3, 64, MZ_NORM_LAYER, 0.1, 1, 1, 0, 1, 1, 0},
      {1000, 64, MZ_NORM_LAYER, 0, 1, 1, 1, 0, 0, 0},
      {1000, 256, MZ_NORM_RMS, 0.3, 1, 1, 0, 0, 1, 0},
      {3, 500, MZ_NORM_LAYER, 0.1, 1, 1, 0, 1, 0, 0},
      {1, 768, MZ_NORM_LAYER, 0, 1, 1, 0, 0, 0, 0},
      {1000, 768, MZ_NORM_LAYER, 0.1, 1, 1, 0, 1, 1, 0},
      {300, 768, MZ_NORM_LAYER, 0.1, 1, 1, 0, 1, 1, 1},
      {16384, 1024, MZ_NORM_LAYER, 0, 1, 1, 0, 1, 0, 0},
      {1000, 1024, MZ_NORM_RMS, 0.1, 1, 0, 0, 0, 0, 0},
      {16384, 2048, MZ_NORM_RMS, 0, 1, 0, 0, 1, 0, 0},
      {1001, 2048, MZ_NORM_LAYER, 0.1, 1, 1, 0, 0, 0, 0},
      {3, 2048, MZ_NORM_LAYER, 0.1, 1, 1, 1, 0, 0, 0},
      {513, 4096, MZ_NORM_LAYER, 0.1, 1, 1, 0, 0, 0, 0},
      {1000, 5000, MZ_NORM_LAYER, 0, 1, 1, 0, 1, 0, 0},
      {3, 5001, MZ_NORM_RMS, 0.1, 1, 1, 1, 0, 0, 0},
      {100, 8192, MZ_NORM_LAYER, 0, 0, 1, 0, 0, 0, 0},
      {5, 10000, MZ_NORM_LAYER, 0.1, 1, 1, 0, 1, 0, 0},
  };

  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    if (!sides_skip(sides, cases[i].rows * cases[i].width, 0))
      check_case(sides, &cases[i]);
  check_halves(sides);
}
