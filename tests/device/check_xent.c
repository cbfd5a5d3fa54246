/* SPDX-License-Identifier: Apache-2.0 */
/* The head with its loss on "/cuda" against "/cpu". */
#include "check.h"

#include "kernels/cuda/products.h"

#include <stdio.h>

typedef struct shape {
  int64_t rows, width, vocab, chunk_rows;
} shape_t;

/* One shape's arrays. */
typedef struct head {
  shape_t shape;
  dual_t x, w, labels, loss, dx, dw, logits;
} head_t;

static void make(sides_t *s, shape_t shape, head_t *h)
{
  /* Logits of a few units, as in a model: their rounding then tells. */
  double scale = 2;

  h->shape = shape;
  h->x = dual_random(s, s->dtype, shape.rows * shape.width, scale);
  h->w = dual_random(s, s->dtype, shape.vocab * shape.width,
                     1.0 / (double)(1 + shape.width / 64));
  h->labels = dual_zeros(s, MZ_I32, shape.rows);
  for (int64_t r = 0; r < shape.rows; r++)
    ((int32_t *)h->labels.cpu)[r] = (int32_t)pick(-1, shape.vocab - 1);
  if (shape.rows > 2) {
    ((int32_t *)h->labels.cpu)[0] = -1;
    ((int32_t *)h->labels.cpu)[1] = (int32_t)(shape.vocab - 1);
    ((int32_t *)h->labels.cpu)[2] = 0;
  }
  dual_renew(s, &h->labels);
  h->loss = dual_zeros(s, MZ_F64, 1);
  h->dx = dual_random(s, s->dtype, shape.rows * shape.width, 1);
  h->dw = dual_random(s, MZ_F32, shape.vocab * shape.width, 1);
  h->logits = dual_zeros(s, MZ_F32, shape.chunk_rows * shape.vocab);
}

/* The loss is a sum over the rows, compared as a whole. fp32: exponentials to
 * 2^-22 and logits to some 2^-24 sqrt(width). bf16: the device keeps logits
 * rounded to 2^-9 of each, the CPU does not; a logit is at most some 10, and
 * errors of rows mostly cancel. */
static double loss_bound(const sides_t *s)
{
  return s->dtype == MZ_BF16 ? 1e-2 : 1e-5;
}

/* Gradients. fp32: as for the loss, and again sums. bf16: dlogits carry the
 * logits' error, 2^-9 of a logit as a factor of each, and one more rounding;
 * the largest sums of them dominate. */
static double gradient_bound(const sides_t *s)
{
  return s->dtype == MZ_BF16 ? 4e-2 : 2e-5;
}

static mz_xent_t args_of(const head_t *h, bool cuda)
{
  mz_xent_t a = {.rows = h->shape.rows,
                 .width = h->shape.width,
                 .vocab = h->shape.vocab,
                 .x = cuda ? h->x.cuda : h->x.cpu,
                 .w = cuda ? h->w.cuda : h->w.cpu,
                 .labels = cuda ? h->labels.cuda : h->labels.cpu,
                 .scale = 1.0 / 32,
                 .loss = cuda ? h->loss.cuda : h->loss.cpu,
                 .chunk_rows = h->shape.chunk_rows,
                 .logits = cuda ? h->logits.cuda : h->logits.cpu};

  return a;
}

/* What the loss is added to; not 0, so that errors of single rows stand beside
 * a number of their own size. */
static void start_loss(sides_t *s, head_t *h)
{
  *(double *)h->loss.cpu = (double)(1 + h->shape.rows);
  dual_renew(s, &h->loss);
}

static void check_loss(sides_t *s, head_t *h)
{
  mz_xent_t a = args_of(h, false), c = args_of(h, true);

  start_loss(s, h);
  RUN_BOTH(s, xent, &a, &c);
  compare(s, "xent loss alone", &h->loss, loss_bound(s));
}

static void check_gradients(sides_t *s, head_t *h, int accumulate)
{
  mz_xent_t a = args_of(h, false), c = args_of(h, true);

  a.accumulate = c.accumulate = accumulate;
  a.dx = h->dx.cpu;
  c.dx = h->dx.cuda;
  a.dw = h->dw.cpu;
  c.dw = h->dw.cuda;
  start_loss(s, h);
  dual_renew(s, &h->dw);
  RUN_BOTH(s, xent, &a, &c);
  compare(s, "xent loss", &h->loss, loss_bound(s));
  compare(s, "xent dx", &h->dx, gradient_bound(s));
  compare(s, accumulate ? "xent dw added to" : "xent dw", &h->dw,
          gradient_bound(s));
}

/* dx in the memory of x; x has its old content on both sides afterwards. */
static void check_alias(sides_t *s, head_t *h)
{
  mz_xent_t a = args_of(h, false), c = args_of(h, true);

  a.dx = h->x.cpu;
  c.dx = h->x.cuda;
  a.dw = h->dw.cpu;
  c.dw = h->dw.cuda;
  start_loss(s, h);
  RUN_BOTH(s, xent, &a, &c);
  compare(s, "xent dx over x", &h->x, gradient_bound(s));
  compare(s, "xent dw with dx over x", &h->dw, gradient_bound(s));
}

/* fp32 logits of the last chunk, with either dtype: sums of equal operands. */
static void check_logits(sides_t *s, head_t *h)
{
  mz_xent_t a = args_of(h, false), c = args_of(h, true);
  int64_t rows = h->shape.rows, chunk = h->shape.chunk_rows;
  dual_t last = h->logits;

  a.labels = c.labels = NULL;
  a.loss = c.loss = NULL;
  RUN_BOTH(s, xent, &a, &c);
  last.n = rows == 0 ? 0 : (rows - (rows - 1) / chunk * chunk) * h->shape.vocab;
  compare(s, "xent logits", &last, 2e-5);
}

static void check_head(sides_t *s, shape_t shape)
{
  head_t h;

  if (sides_skip_products(s, shape.rows * shape.width * shape.vocab)) return;
  printf("%lld rows of %lld, vocabulary %lld, chunks of %lld\n",
         (long long)shape.rows, (long long)shape.width, (long long)shape.vocab,
         (long long)shape.chunk_rows);
  make(s, shape, &h);
  check_loss(s, &h);
  check_gradients(s, &h, 0);
  check_gradients(s, &h, 1);
  check_logits(s, &h);
  check_alias(s, &h);
}

void check_xent(sides_t *s)
{
  static const shape_t shapes[] = {
      {0, 8, 16, 4},       {1, 1, 1, 1},         {3, 5, 2, 1},
      {7, 33, 101, 2},     {64, 64, 512, 64},    {65, 48, 1000, 16},
      {5, 8, 50257, 3},    {300, 96, 1003, 100}, {40, 64, 50304, 16},
      {40, 64, 50257, 16}, {33, 40, 130001, 8},  {513, 256, 8192, 128}};
  mz_cuda_products_t *products = mz_cuda_products_of(s->cuda);

  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    check_head(s, shapes[i]);
  for (int i = 0; i < 8; i++) {
    shape_t shape = {pick(1, 200), pick(1, 130), pick(1, 3000), pick(1, 90)};

    check_head(s, shape);
  }
  if (s->tiny) return;
  printf("tuned\n");
  must(mz_cuda_products_tune(products, true));
  check_head(s, (shape_t){300, 128, s->quick ? 803 : 5003, 60});
  must(mz_cuda_products_tune(products, false));
}
