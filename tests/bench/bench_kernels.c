/* SPDX-License-Identifier: Apache-2.0 */
/* Speed of the dense CPU kernels, as ratios to one large sgemm and to a memory
 * copy of the same run. Usage: bench_kernels [T [H [S]]]: tokens, width,
 * sequence. Threads: OMP_NUM_THREADS. */
#include "base/alloc.h"
#include "kernels/cpu/cpu.h"

#include <cblas.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GROUPS = 8, HEAD_WIDTH = 64, VOCAB = 8192, CHUNK = 1024, BIG = 1536 };

static int64_t tokens = 4096, width = 256, sequence = 512;
static double peak_flops, copy_bytes;

static float *make(int64_t n)
{
  float *x = NULL;

  if (mz_alloc_arena(n * (int64_t)sizeof *x, "bench", (void **)&x) != MZ_OK) {
    fprintf(stderr, "%s\n", mz_error_last());
    exit(1);
  }
  for (int64_t i = 0; i < n; i++)
    x[i] = (float)(i * 7919 % 1000 - 500) * 1e-3f;
  return x;
}

typedef mz_status_t (*run_fn)(const void *a);

/* Seconds of the fastest of several runs. */
static double seconds(run_fn run, const void *a)
{
  double best = 1e30, total = 0;

  for (int i = 0; i < 50 && (i < 5 || total < 0.5); i++) {
    double t = omp_get_wtime();

    if (run(a) != MZ_OK) {
      fprintf(stderr, "%s\n", mz_error_last());
      exit(1);
    }
    t = omp_get_wtime() - t;
    total += t;
    if (t < best) best = t;
  }
  return best;
}

static void print_flops(const char *name, double flops, double s)
{
  printf("%-28s %9.3f ms  %7.1f GFLOP/s  %5.2f of sgemm\n", name, s * 1e3,
         flops / s * 1e-9, flops / s / peak_flops);
}

static void print_bytes(const char *name, double bytes, double s)
{
  printf("%-28s %9.3f ms  %7.1f GB/s     %5.2f of copy\n", name, s * 1e3,
         bytes / s * 1e-9, bytes / s / copy_bytes);
}

#define RUN(op, args)                                                          \
  static mz_status_t run_##op(const void *a)                                   \
  {                                                                            \
    return mz_k_##op##_cpu(NULL, (const args *)a, NULL);                       \
  }
MZ_KERNEL_DENSE_LIST(RUN)
#undef RUN

static mz_status_t run_sgemm(const void *a)
{
  float *const *m = a;

  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, BIG, BIG, BIG, 1.0f,
              m[0], BIG, m[1], BIG, 0.0f, m[2], BIG);
  return MZ_OK;
}

static mz_status_t run_copy(const void *a)
{
  float *const *m = a;
  int64_t n = tokens * 4 * width, piece = 16384;

#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; i += piece)
    memcpy(m[1] + i, m[0] + i,
           (size_t)mz_min_i64(piece, n - i) * sizeof(float));
  return MZ_OK;
}

static void bench_ceiling(void)
{
  float *m[3] = {make(BIG * BIG), make(BIG * BIG), make(BIG * BIG)};
  float *c[2] = {make(tokens * 4 * width), make(tokens * 4 * width)};
  double flops = 2.0 * BIG * BIG * BIG;
  double bytes = 8.0 * (double)(tokens * 4 * width);

  peak_flops = flops / seconds(run_sgemm, m);
  copy_bytes = bytes / seconds(run_copy, c);
  printf("T %lld, H %lld, S %lld, %d threads: sgemm %.1f GFLOP/s, copy %.1f "
         "GB/s (read and written)\n",
         (long long)tokens, (long long)width, (long long)sequence,
         omp_get_max_threads(), peak_flops * 1e-9, copy_bytes * 1e-9);
  for (int i = 0; i < 3; i++)
    mz_free(m[i]);
  mz_free(c[0]);
  mz_free(c[1]);
}

/* One plain product C [m, n] of depth k. */
typedef struct product {
  CBLAS_TRANSPOSE ta, tb;
  int64_t m, n, k;
  const float *a, *b;
  float *c;
} product_t;

static mz_status_t run_product(const void *a)
{
  const product_t *p = a;

  cblas_sgemm(CblasRowMajor, p->ta, p->tb, (int)p->m, (int)p->n, (int)p->k,
              1.0f, p->a, (int)(p->ta == CblasTrans ? p->m : p->k), p->b,
              (int)(p->tb == CblasTrans ? p->k : p->n), 0.0f, p->c, (int)p->n);
  return MZ_OK;
}

/* Beside one plain product of the same rows. */
static void print_linear(const char *op, const char *label, double s,
                         const product_t *p)
{
  double flops = 2.0 * (double)(p->m * p->n * p->k);
  double plain = seconds(run_product, p);
  char name[64];

  snprintf(name, sizeof name, "%s %s", op, label);
  printf("%-28s %9.3f ms  %7.1f GFLOP/s  %5.2f of one sgemm of the rows\n",
         name, s * 1e3, flops / s * 1e-9, plain / s);
}

/* Rows of a group: tokens drawn one by one, all groups equally likely. */
static void draw_rows(int32_t groups, int32_t *offsets)
{
  uint64_t state = 1;

  for (int64_t t = 0; t < tokens; t++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    offsets[1 + (int32_t)((state >> 33) % (uint64_t)groups)]++;
  }
  for (int32_t g = 0; g < groups; g++)
    offsets[g + 1] += offsets[g];
}

/* H -> 4 H with GELU, its data gradient into 4 H and its weight gradient, on
 * `groups` groups of multinomial rows. */
static void bench_linear(const char *label, int32_t groups)
{
  int64_t n = 4 * width, k = width;
  float *x = make(tokens * k), *y = make(tokens * n), *pre = make(tokens * n);
  float *weight = make(groups * n * k), *bias = make(n),
        *dw = make(groups * n * k);
  const void *w[GROUPS], *b[GROUPS];
  void *dws[GROUPS], *dbs[GROUPS];
  uint8_t accumulate[GROUPS] = {0};
  int32_t offsets[GROUPS + 1] = {0};
  product_t forward = {CblasNoTrans, CblasTrans, tokens, n, k, x, weight, y};
  product_t dgrad = {CblasNoTrans, CblasNoTrans, tokens, k, n, y, weight, x};
  product_t wgrad = {CblasTrans, CblasNoTrans, n, k, tokens, y, x, dw};

  for (int32_t g = 0; g < groups; g++) {
    w[g] = weight + g * n * k;
    b[g] = bias;
    dws[g] = dw + g * n * k;
    dbs[g] = bias;
  }
  draw_rows(groups, offsets);
  mz_linear_t f = {groups, groups > 1, offsets, offsets, tokens,      n,   k,
                   w,      b,          x,       y,       MZ_EPI_NONE, NULL};
  mz_linear_dgrad_t d = {groups, groups > 1, offsets, offsets,     tokens, n, k,
                         w,      y,          x,       MZ_EPI_NONE, NULL,   0};
  mz_linear_wgrad_t g = {groups, groups > 1, offsets,   offsets, tokens,
                         n,      k,          x,         y,       dws,
                         dbs,    accumulate, accumulate};

  print_linear("linear", label, seconds(run_linear, &f), &forward);
  f.epilogue = MZ_EPI_GELU;
  f.pre = pre;
  print_linear("linear + gelu", label, seconds(run_linear, &f), &forward);
  print_linear("linear_dgrad", label, seconds(run_linear_dgrad, &d), &dgrad);
  print_linear("linear_wgrad", label, seconds(run_linear_wgrad, &g), &wgrad);
  mz_free(x);
  mz_free(y);
  mz_free(pre);
  mz_free(weight);
  mz_free(bias);
  mz_free(dw);
}

static void bench_attention(void)
{
  int32_t heads = (int32_t)(width / HEAD_WIDTH);
  int32_t batch = (int32_t)(tokens / sequence);
  float *qkv = make(tokens * 3 * width), *dqkv = make(tokens * 3 * width);
  float *out = make(tokens * width), *dout = make(tokens * width);
  float *lse = make(heads * tokens), *delta = make(heads * tokens);
  mz_attention_t f = {
      batch, (int32_t)sequence, heads, heads, HEAD_WIDTH, qkv, out, lse};
  mz_attention_grad_t g = {f, dout, dqkv, delta};
  mz_rope_t rope = {batch, (int32_t)sequence, heads, heads, HEAD_WIDTH, 1e4, 0,
                    qkv};
  /* pairs of the triangle only */
  double flops = 2.0 * (double)(tokens * (sequence + 1)) * (double)width;

  print_flops("attention", flops, seconds(run_attention, &f));
  print_flops("attention_grad", 2.5 * flops, seconds(run_attention_grad, &g));
  print_bytes("rope", 4.0 * 4.0 * (double)(tokens * width),
              seconds(run_rope, &rope));
  mz_free(qkv);
  mz_free(dqkv);
  mz_free(out);
  mz_free(dout);
  mz_free(lse);
  mz_free(delta);
}

static void bench_norm(double p, const char *label)
{
  int64_t n = tokens * width;
  float *x = make(n), *y = make(n), *h = make(n), *w = make(width);
  float *b = make(width), *mean = make(tokens), *rstd = make(tokens);
  float *partial = make(MZ_NORM_PARTIALS * 2 * width);
  int64_t *samples = NULL;
  mz_add_norm_t f = {.kind = MZ_NORM_LAYER,
                     .rows = tokens,
                     .width = width,
                     .eps = 1e-5,
                     .x = x,
                     .y = y,
                     .sum = x,
                     .h = h,
                     .w = w,
                     .b = b,
                     .mean = mean,
                     .rstd = rstd};
  mz_add_norm_grad_t g = {.kind = MZ_NORM_LAYER,
                          .rows = tokens,
                          .width = width,
                          .sum = x,
                          .dh = h,
                          .w = w,
                          .mean = mean,
                          .rstd = rstd,
                          .add = 1,
                          .d_sum = y,
                          .dw = w,
                          .db = b,
                          .partial = partial,
                          .dy = h};
  char name[64];

  if (mz_new(tokens / sequence + 1, "samples", &samples) != MZ_OK) exit(1);
  f.dropout.p = g.dropout.p = p;
  f.dropout.samples = g.dropout.samples = samples;
  f.dropout.sequence = g.dropout.sequence = (int32_t)sequence;
  mz_dropout_apply_t drop = {tokens, width, f.dropout, y};
  if (p > 0)
    print_bytes("dropout", 8.0 * (double)n, seconds(run_dropout, &drop));
  snprintf(name, sizeof name, "add_norm%s", label);
  print_bytes(name, 16.0 * (double)n, seconds(run_add_norm, &f));
  snprintf(name, sizeof name, "add_norm_grad%s", label);
  print_bytes(name, (p > 0 ? 20.0 : 16.0) * (double)n,
              seconds(run_add_norm_grad, &g));
  mz_free(x);
  mz_free(y);
  mz_free(h);
  mz_free(w);
  mz_free(b);
  mz_free(mean);
  mz_free(rstd);
  mz_free(partial);
  mz_free(samples);
}

static void bench_ends(void)
{
  int64_t n = tokens * width;
  float *x = make(n), *dx = make(n), *w = make(VOCAB * width);
  float *dw = make(VOCAB * width), *logits = make(CHUNK * VOCAB);
  int32_t *ids = NULL;
  double loss = 0, flops = 2.0 * (double)n * VOCAB;
  mz_xent_t head = {.rows = tokens,
                    .width = width,
                    .vocab = VOCAB,
                    .x = x,
                    .w = w,
                    .scale = 1e-3,
                    .loss = &loss,
                    .dx = dx,
                    .dw = dw,
                    .chunk_rows = CHUNK,
                    .logits = logits};
  mz_embedding_t e = {.num_tokens = tokens,
                      .width = width,
                      .vocab = VOCAB,
                      .positions = sequence,
                      .sequence = (int32_t)sequence,
                      .wte = w,
                      .wpe = logits,
                      .x = x};
  mz_embedding_grad_t g = {
      .dx = dx, .dwte = dw, .dwpe = logits, .accumulate_te = 1};

  if (mz_new(tokens, "ids", &ids) != MZ_OK) exit(1);
  for (int64_t t = 0; t < tokens; t++)
    ids[t] = (int32_t)(t * 7919 % VOCAB);
  head.labels = ids;
  e.tokens = ids;
  g.forward = e;
  print_flops("xent", 3.0 * flops, seconds(run_xent, &head));
  head.dx = NULL;
  print_flops("xent, loss only", flops, seconds(run_xent, &head));
  print_bytes("embedding", 12.0 * (double)n, seconds(run_embedding, &e));
  print_bytes("embedding_grad", 12.0 * (double)n,
              seconds(run_embedding_grad, &g));
  mz_free(x);
  mz_free(dx);
  mz_free(w);
  mz_free(dw);
  mz_free(logits);
  mz_free(ids);
}

static void bench_activation(void)
{
  int64_t n = tokens * 4 * width;
  float *x = make(n), *y = make(n), *z = make(n);
  int32_t rows = (int32_t)tokens;
  mz_gelu_t gelu = {&rows, tokens, 4 * width, x, y};
  mz_swiglu_t swiglu = {.rows = &rows,
                        .max_rows = tokens,
                        .width = 4 * width,
                        .gate = x,
                        .up = y,
                        .a = z};

  print_bytes("gelu", 8.0 * (double)n, seconds(run_gelu, &gelu));
  print_bytes("swiglu", 12.0 * (double)n, seconds(run_swiglu, &swiglu));
  swiglu.da = z;
  swiglu.dgate = x;
  swiglu.dup = y;
  print_bytes("swiglu_grad", 24.0 * (double)n,
              seconds(run_swiglu_grad, &swiglu));
  mz_free(x);
  mz_free(y);
  mz_free(z);
}

int main(int argc, char **argv)
{
  int64_t *sizes[] = {&tokens, &width, &sequence};

  for (int i = 1; i < argc && i <= 3; i++) {
    *sizes[i - 1] = strtoll(argv[i], NULL, 10);
    if (*sizes[i - 1] < 1) {
      fprintf(stderr, "usage: bench_kernels [T [H [S]]]\n");
      return 2;
    }
  }
  if (tokens % sequence != 0 || width % HEAD_WIDTH != 0) {
    fprintf(stderr, "S must divide T, and %d must divide H\n", HEAD_WIDTH);
    return 2;
  }
  bench_ceiling();
  bench_linear("(dense)", 1);
  bench_linear("(8 groups)", GROUPS);
  bench_activation();
  bench_attention();
  bench_norm(0.0, "");
  bench_norm(0.1, ", dropout");
  bench_ends();
  return 0;
}
