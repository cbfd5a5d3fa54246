/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_test.h"
#include "kernels/cpu/cpu.h"

enum { VOCAB = 11, SEQUENCE = 5, POSITIONS = 7 };

static const int64_t samples[] = {4, 1, 6};

/* tokens, width: none, one, one sequence, three of more than a stripe and more
 * than a piece of a mask. */
static const int64_t shapes[][2] = {
    {0, 3}, {1, 1}, {5, 6}, {15, 70}, {15, 301}};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

static const int32_t some_tokens[15] = {3, 0, 10, 3, 3,  7, 1, 3,
                                        0, 2, 9,  9, 10, 4, 3};

static mz_embedding_t embedding_of(const int64_t shape[2], double p)
{
  mz_embedding_t e = {.num_tokens = shape[0],
                      .width = shape[1],
                      .vocab = VOCAB,
                      .positions = POSITIONS,
                      .sequence = SEQUENCE,
                      .tokens = some_tokens};

  e.dropout.p = p;
  e.dropout.random = mz_random_make(3, 8, MZ_PURPOSE_DROPOUT, 0);
  e.dropout.samples = samples;
  e.dropout.sequence = SEQUENCE;
  return e;
}

static double mask_of(const mz_embedding_t *e, int64_t t, int64_t c)
{
  int64_t i = (samples[t / SEQUENCE] * SEQUENCE + t % SEQUENCE) * e->width + c;

  if (e->dropout.p == 0) return 1;
  return (double)mz_random_uniform(&e->dropout.random, (uint64_t)i) >=
                 e->dropout.p
             ? 1 / (1 - e->dropout.p)
             : 0;
}

static void check_lookup(const int64_t shape[2], double p, int positions)
{
  mz_embedding_t e = embedding_of(shape, p);
  int64_t h = e.width, n = e.num_tokens * h;
  float *wte = normals(VOCAB * h, 51, 1.0),
        *wpe = normals(POSITIONS * h, 52, 1.0);
  float *x = floats(n);

  e.wte = wte;
  e.wpe = positions ? wpe : NULL;
  e.x = x;
  cr_assert_eq(mz_k_embedding_cpu(NULL, &e, NULL), MZ_OK);
  for (int64_t i = 0; i < n; i++) {
    int64_t t = i / h, c = i % h;
    float sum =
        wte[e.tokens[t] * h + c] + (positions ? wpe[t % SEQUENCE * h + c] : 0);

    cr_assert_eq(x[i], sum * (float)mask_of(&e, t, c)); /* one rounding each */
  }
  mz_free(wte);
  mz_free(wpe);
  mz_free(x);
}

Test(embedding, adds_token_and_position_and_drops)
{
  for (int threads = 1; threads <= 2; threads++) {
    omp_set_num_threads(threads);
    for (int s = 0; s < NUM_SHAPES; s++)
      for (int v = 0; v < 4; v++)
        check_lookup(shapes[s], v & 1 ? 0.4 : 0.0, v & 2);
  }
}

/* fp32 sums in token order are what the contract promises, so the reference
 * adds in fp32 and the bits must be equal. */
static void check_scatter(const int64_t shape[2], double p, int accumulate)
{
  mz_embedding_t e = embedding_of(shape, p);
  int64_t h = e.width, n = e.num_tokens * h;
  float *dx = normals(n, 53, 1.0);
  float *te = normals(VOCAB * h, 54, 1.0),
        *pe = normals(POSITIONS * h, 55, 1.0);
  float *want_te = accumulate ? copy_of(te, VOCAB * h) : floats(VOCAB * h);
  float *want_pe =
      accumulate ? copy_of(pe, POSITIONS * h) : floats(POSITIONS * h);
  mz_embedding_grad_t g = {e, dx, te, pe, accumulate, accumulate};

  for (int64_t i = 0; i < n; i++) {
    int64_t t = i / h, c = i % h;
    float d = dx[i] * (float)mask_of(&e, t, c);

    want_te[e.tokens[t] * h + c] += d;
    want_pe[t % SEQUENCE * h + c] += d;
  }
  cr_assert_eq(mz_k_embedding_grad_cpu(NULL, &g, NULL), MZ_OK);
  for (int64_t i = 0; i < VOCAB * h; i++)
    cr_assert_eq(te[i], want_te[i]); /* 0 and -0 are equal here */
  for (int64_t i = 0; i < POSITIONS * h; i++)
    cr_assert_eq(pe[i], want_pe[i]);
  g.dwpe = NULL;
  cr_assert_eq(mz_k_embedding_grad_cpu(NULL, &g, NULL), MZ_OK);
  mz_free(dx);
  mz_free(te);
  mz_free(pe);
  mz_free(want_te);
  mz_free(want_pe);
}

Test(embedding_grad, adds_in_token_order_on_any_threads)
{
  for (int threads = 1; threads <= 3; threads++) {
    omp_set_num_threads(threads);
    for (int s = 0; s < NUM_SHAPES; s++)
      for (int v = 0; v < 4; v++)
        check_scatter(shapes[s], v & 1 ? 0.4 : 0.0, v & 2);
  }
}

Test(embedding, refuses_tokens_and_sequences_out_of_range)
{
  int32_t tokens[] = {0, VOCAB};
  float wpe[POSITIONS], x[2];
  mz_embedding_t e = embedding_of(shapes[1], 0);
  mz_embedding_grad_t g = {.forward = e};

  e.num_tokens = 2;
  e.tokens = tokens;
  cr_assert_eq(mz_k_embedding_cpu(NULL, &e, NULL), MZ_ERR_ARG);
  cr_assert_str_eq(mz_error_message(), "token 1 is 11, vocabulary 11");
  tokens[1] = -1;
  g.forward = e;
  cr_assert_eq(mz_k_embedding_grad_cpu(NULL, &g, NULL), MZ_ERR_ARG);
  tokens[1] = 0;
  e.wpe = wpe;
  e.x = x;
  e.sequence = POSITIONS + 1;
  cr_assert_eq(mz_k_embedding_cpu(NULL, &e, NULL), MZ_ERR_SHAPE);
}

/* scale * sum of the losses as a function of x or w, in double precision. */
typedef struct head {
  int64_t rows, width, vocab;
  double *x, *w;
  int32_t *labels;
  double scale;
} head_t;

static double loss_of(const void *context)
{
  const head_t *p = context;
  double *z = doubles(p->vocab), loss = 0;

  for (int64_t t = 0; t < p->rows; t++) {
    double sum = 0;

    if (p->labels[t] < 0) continue;
    for (int64_t v = 0; v < p->vocab; v++) {
      z[v] = 0;
      for (int64_t c = 0; c < p->width; c++)
        z[v] += p->x[t * p->width + c] * p->w[v * p->width + c];
      sum += exp(z[v]);
    }
    loss += log(sum) - z[p->labels[t]];
  }
  mz_free(z);
  return loss * p->scale;
}

typedef struct xent_case {
  int64_t rows, width, vocab, chunk_rows;
} xent_case_t;

/* One row; no label at all comes from label_every 0; a chunk of one row, of a
 * part and of more than all; more rows than losses wait for; more columns than
 * one fp32 sum takes. */
static const xent_case_t cases[] = {{0, 3, 4, 2},     {1, 1, 1, 1},
                                    {7, 5, 13, 1},    {23, 17, 301, 10},
                                    {300, 3, 5, 512}, {4, 9, 2500, 3}};
enum { NUM_CASES = sizeof cases / sizeof *cases };

/* fp32 logits of size 3 with errors of 1e-6; the loss is a sum of rows. */
static void check_xent(const xent_case_t *c, int label_every)
{
  int64_t nx = c->rows * c->width, nw = c->vocab * c->width;
  float *x = normals(nx, 61, 1.0);
  float *w = normals(nw, 62, 1.0 / sqrt((double)c->width));
  float *dx = floats(nx), *dw = floats(nw), *again = normals(nw, 63, 1.0);
  float *old = copy_of(again, nw), *logits = floats(c->chunk_rows * c->vocab);
  double loss = 0.25, alone = 0.25, aliased = 0.25;
  head_t p = {c->rows, c->width, c->vocab, widen(x, nx), widen(w, nw), NULL, 2};
  mz_xent_t a = {c->rows, c->width,      c->vocab, x,  w,
                 NULL,    p.scale,       &loss,    dx, dw,
                 0,       c->chunk_rows, logits};
  double bound = 4e-6 * sqrt((double)c->rows + 1);

  cr_assert_eq(mz_new(c->rows + 1, "labels", &p.labels), MZ_OK);
  for (int64_t t = 0; t < c->rows; t++)
    p.labels[t] = label_every && t % label_every == 0
                      ? (int32_t)(t * 7919 % c->vocab)
                      : -1;
  a.labels = p.labels;
  memset(dw, 0xff, (size_t)nw * sizeof *dw);
  cr_assert_eq(mz_k_xent_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_float_eq(loss, 0.25 + loss_of(&p) / p.scale,
                     1e-6 * (double)(c->rows + 1));
  expect_gradient("dx", loss_of, &p, p.x, nx, dx, bound);
  expect_gradient("dw", loss_of, &p, p.w, nw, dw, bound);

  a.dx = NULL;
  a.loss = &alone;
  cr_assert_eq(mz_k_xent_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_eq(alone, loss);
  a.dx = x; /* in place, and onto what is there */
  a.dw = again;
  a.accumulate = 1;
  a.loss = &aliased;
  cr_assert_eq(mz_k_xent_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_eq(aliased, loss);
  expect_same_bits("dx", dx, x, nx);
  for (int64_t i = 0; i < nw; i++)
    cr_assert_float_eq(again[i], old[i] + dw[i], bound);
  mz_free(x);
  mz_free(w);
  mz_free(dx);
  mz_free(dw);
  mz_free(again);
  mz_free(old);
  mz_free(logits);
  mz_free(p.x);
  mz_free(p.w);
  mz_free(p.labels);
}

Test(xent, loss_and_gradients_in_any_chunks)
{
  for (int threads = 1; threads <= 2; threads++) {
    omp_set_num_threads(threads);
    for (int s = 0; s < NUM_CASES; s++)
      for (int every = 0; every <= 2; every++)
        check_xent(&cases[s], every);
  }
}

/* Three rows in chunks of two: the third alone is in the last chunk. */
Test(xent, without_labels_leaves_the_logits_of_the_last_chunk)
{
  float x[] = {9, 9, 9, 9, 2, -1}, w[] = {1, 0, 0, 1, 3, 2, -1, 1};
  float logits[8], dx[6], dw[8];
  mz_xent_t a = {.rows = 3,
                 .width = 2,
                 .vocab = 4,
                 .x = x,
                 .w = w,
                 .chunk_rows = 2,
                 .logits = logits};
  const float expected[] = {2, -1, 4, -3};

  cr_assert_eq(mz_k_xent_cpu(NULL, &a, NULL), MZ_OK);
  for (int i = 0; i < 4; i++)
    cr_expect_eq(logits[i], expected[i], "%d: %g", i, (double)logits[i]);
  a.dx = dx;
  a.dw = dw;
  cr_expect_eq(mz_k_xent_cpu(NULL, &a, NULL), MZ_ERR_ARG);
}

/* Two classes with logits 1000 and 0: the loss is 1000 and 0, the gradient
 * finite. */
Test(xent, large_logits_by_hand)
{
  float x[] = {1000, 1000}, w[] = {1, 0}, dx[2], dw[2], logits[4];
  int32_t labels[] = {1, 0};
  double loss = 0;
  mz_xent_t a = {2, 1, 2, x, w, labels, 0.5, &loss, dx, dw, 0, 2, logits};

  cr_assert_eq(mz_k_xent_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_eq(loss, 1000.0);
  cr_assert_eq(dx[0], 0.5f);
  cr_assert_eq(dx[1], 0.0f);
  cr_assert_eq(dw[0], 500.0f);
  cr_assert_eq(dw[1], -500.0f);
}

Test(xent, refuses_labels_out_of_range)
{
  int32_t labels[] = {-1, 4};
  double loss = 0;
  mz_xent_t a = {.rows = 2,
                 .width = 1,
                 .vocab = 4,
                 .labels = labels,
                 .loss = &loss,
                 .chunk_rows = 1};

  cr_assert_eq(mz_k_xent_cpu(NULL, &a, NULL), MZ_ERR_ARG);
  cr_assert_str_eq(mz_error_message(), "label 1 is 4, vocabulary 4");
  labels[1] = -2;
  cr_assert_eq(mz_k_xent_cpu(NULL, &a, NULL), MZ_ERR_ARG);
  a.chunk_rows = 0;
  cr_assert_eq(mz_k_xent_cpu(NULL, &a, NULL), MZ_ERR_ARG);
}
