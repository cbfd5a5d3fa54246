/* SPDX-License-Identifier: Apache-2.0 */
/* Attention in all its forms, and rope. Letters: kernels/attention.h. */
#include "check.h"

#include "base/alloc.h"
#include "kernels/cuda/attention_form.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Largest error of each output, relative to its largest value.
 *
 * fp32: sums of up to 2048 products in another order: a few 2^-24 times
 * sqrt(2048).
 * bf16: out is rounded once on each side (2^-9 of the value), and here the
 * probabilities are rounded before their product with v; a gradient is a sum of
 * products of two factors that were rounded so, of both signs, and may be much
 * smaller than its terms. The statistics are fp32 sums of exact products, but
 * the exponentials are the device's short ones. */
typedef struct bounds {
  double out, lse, grad;
} bounds_t;

static bounds_t bounds_of(const sides_t *s)
{
  return s->dtype == MZ_F32 ? (bounds_t){1e-5, 1e-5, 1e-5}
                            : (bounds_t){1e-2, 1e-3, 2e-2};
}

/* How a shape is run: what the table chooses; the same, but equal bits are
 * asked for; own forms; and own backward after the table's choice. */
typedef struct way {
  const char *name;
  int deterministic, own_forward, own_backward;
  bool repeats;
  int shared; /* bytes of a block, of another card; 0: this one's */
} way_t;

static const way_t ways[] = {
    {"chosen", 0, 0, 0, false, 0},
    {"deterministic", 1, 0, 0, true, 0},
    {"own", 0, 1, 1, true, 0},
    {"own backward", 0, 0, 1, true, 0},
    {"own, little shared memory", 0, 1, 1, true, 101376}, /* 8.6, 8.9, 12.0 */
};

enum { NUM_WAYS = sizeof ways / sizeof *ways };

typedef struct shape {
  int32_t b, s, a, g, d;
} shape_t;

static int64_t tokens(const shape_t *n) { return (int64_t)n->b * n->s; }

static int64_t wide(const shape_t *n)
{
  return ((int64_t)n->a + 2 * (int64_t)n->g) * n->d;
}

/* --- parts of arrays --- */

/* The columns [first, first + count) of rows of ld elements, as an array. */
static void compare_columns(sides_t *s, const char *what, const dual_t *dual,
                            int64_t ld, int64_t first, int64_t count,
                            double bound)
{
  int64_t rows = dual->n / ld;
  dual_t part = dual_zeros(s, dual->dtype, rows * count), mirror;
  size_t size = mz_dtype_bytes(dual->dtype);
  const char *cuda = dual_read(s, dual), *cpu = dual->cpu;

  mirror = dual_zeros(s, dual->dtype, rows * count);
  for (int64_t row = 0; row < rows; row++) {
    size_t to = (size_t)(row * count) * size;
    size_t from = (size_t)(row * ld + first) * size;

    memcpy((char *)part.cpu + to, cpu + from, (size_t)count * size);
    memcpy((char *)mirror.cpu + to, cuda + from, (size_t)count * size);
  }
  must(mz_device_copy(s->device, part.cuda, mirror.cpu,
                      rows * count * (int64_t)size, s->device->stream));
  compare(s, what, &part, bound);
}

/* lse is [A, B, S] on the CPU and [B, A, S] on the device. */
static void compare_stats(sides_t *s, const char *what, const shape_t *n,
                          const dual_t *dual, double bound)
{
  dual_t part = dual_zeros(s, MZ_F32, dual->n);
  dual_t mirror = dual_zeros(s, MZ_F32, dual->n);
  const float *cuda = dual_read(s, dual);

  memcpy(part.cpu, dual->cpu, (size_t)dual->n * sizeof(float));
  for (int64_t b = 0; b < n->b; b++)
    for (int64_t a = 0; a < n->a; a++)
      memcpy((float *)mirror.cpu + (a * n->b + b) * n->s,
             cuda + (b * n->a + a) * n->s, (size_t)n->s * sizeof(float));
  must(mz_device_copy(s->device, part.cuda, mirror.cpu,
                      dual->n * (int64_t)sizeof(float), s->device->stream));
  compare(s, what, &part, bound);
}

static void count(sides_t *s, const char *what, bool ok)
{
  printf("%s %s %s\n", ok ? "ok" : "FAILED",
         s->dtype == MZ_BF16 ? "bf16" : "fp32", what);
  if (ok)
    s->passed++;
  else
    s->failed++;
}

/* --- attention --- */

/* One call's arrays on both sides; the forward's outputs are of one way. */
typedef struct arrays {
  dual_t qkv, dout, out, lse, delta, dqkv;
} arrays_t;

static void structs_of(const shape_t *n, const arrays_t *x,
                       mz_attention_grad_t *cpu, mz_attention_grad_t *cuda)
{
  *cpu = (mz_attention_grad_t){.forward = {n->b, n->s, n->a, n->g, n->d,
                                           x->qkv.cpu, x->out.cpu, x->lse.cpu},
                               .dout = x->dout.cpu,
                               .dqkv = x->dqkv.cpu,
                               .delta = x->delta.cpu};
  *cuda =
      (mz_attention_grad_t){.forward = {n->b, n->s, n->a, n->g, n->d,
                                        x->qkv.cuda, x->out.cuda, x->lse.cuda},
                            .dout = x->dout.cuda,
                            .dqkv = x->dqkv.cuda,
                            .delta = x->delta.cuda};
}

/* Whether the backward gives the same bits again, into other memory. */
static void check_repeat(sides_t *s, const char *what, const arrays_t *x,
                         mz_attention_grad_t cuda)
{
  dual_t again = dual_zeros(s, s->dtype, x->dqkv.n);
  size_t bytes = (size_t)x->dqkv.n * mz_dtype_bytes(s->dtype);
  char *first;

  must(mz_alloc_zeroed((int64_t)bytes, 1, "first gradients", (void **)&first));
  memcpy(first, dual_read(s, &x->dqkv), bytes);
  cuda.dqkv = again.cuda;
  must(s->cuda->ops->attention_grad(s->cuda, &cuda, s->device->stream));
  count(s, what, memcmp(first, dual_read(s, &again), bytes) == 0);
  mz_free(first);
}

/* Each of dq, dk, dv by its own largest. Of one token dq and dk are zero but
 * for rounding, and only small beside dv. */
static void compare_grad(sides_t *s, const char *what, const shape_t *n,
                         const dual_t *dqkv, double bound)
{
  const int64_t q = (int64_t)n->a * n->d, kv = (int64_t)n->g * n->d;
  const struct {
    const char *name;
    int64_t first, count;
  } parts[] = {{"dq", 0, q}, {"dk", q, kv}, {"dv", q + kv, kv}};
  char name[200];

  if (n->s == 1) {
    snprintf(name, sizeof name, "%s: dqkv", what);
    compare(s, name, dqkv, bound);
    return;
  }
  for (int i = 0; i < 3; i++) {
    snprintf(name, sizeof name, "%s: %s", what, parts[i].name);
    compare_columns(s, name, dqkv, wide(n), parts[i].first, parts[i].count,
                    bound);
  }
}

static void check_way(sides_t *s, const shape_t *n, const way_t *way,
                      arrays_t *x)
{
  bounds_t bound = bounds_of(s);
  mz_attention_grad_t cpu, cuda;
  const char *forms[2];
  char what[160], name[200];

  x->out = dual_zeros(s, s->dtype, tokens(n) * n->a * n->d);
  x->lse = dual_zeros(s, MZ_F32, tokens(n) * n->a);
  x->delta = dual_zeros(s, MZ_F32, tokens(n) * n->a);
  x->dqkv = dual_zeros(s, s->dtype, tokens(n) * wide(n));
  structs_of(n, x, &cpu, &cuda);
  s->cuda->deterministic = way->deterministic;
  must(mz_cuda_attention_shared(s->cuda, way->shared));
  mz_cuda_attention_own_only(s->cuda, way->own_forward);
  RUN_BOTH(s, attention, &cpu.forward, &cuda.forward);
  forms[0] = mz_cuda_attention_form(s->cuda, &cuda.forward, 0);
  mz_cuda_attention_own_only(s->cuda, way->own_backward);
  RUN_BOTH(s, attention_grad, &cpu, &cuda);
  forms[1] = mz_cuda_attention_form(s->cuda, &cuda.forward, 1);
  snprintf(what, sizeof what, "attention B %d S %d A %d G %d D %d, %s (%s, %s)",
           (int)n->b, (int)n->s, (int)n->a, (int)n->g, (int)n->d, way->name,
           forms[0], forms[1]);
  snprintf(name, sizeof name, "%s: out", what);
  compare(s, name, &x->out, bound.out);
  snprintf(name, sizeof name, "%s: lse", what);
  compare_stats(s, name, n, &x->lse, bound.lse);
  compare_grad(s, what, n, &x->dqkv, bound.grad);
  snprintf(name, sizeof name, "%s: equal bits", what);
  if (way->repeats) check_repeat(s, name, x, cuda);
  mz_cuda_attention_own_only(s->cuda, 0);
  must(mz_cuda_attention_shared(s->cuda, 0));
  s->cuda->deterministic = 0;
}

static void check_shape(sides_t *s, const shape_t *n)
{
  arrays_t x = {.qkv = dual_random(s, s->dtype, tokens(n) * wide(n), 2.0),
                .dout = dual_random(s, s->dtype, tokens(n) * n->a * n->d, 1.0)};

  for (int w = 0; w < NUM_WAYS; w++) {
    /* cuDNN is asked for bf16 alone: in fp32 all ways are the same. */
    if ((s->dtype == MZ_F32 || s->tiny) && !ways[w].own_forward) continue;
    check_way(s, n, &ways[w], &x);
  }
}

static void check_refusals(sides_t *s)
{
  dual_t x = dual_zeros(s, s->dtype, 4096);
  mz_attention_t a = {1, 1, 3, 2, 8, x.cuda, x.cuda, x.cuda};
  mz_rope_t r = {1, 1, 1, 1, 7, 10000.0, 0, x.cuda};
  mz_stream_t stream = s->device->stream;

  count(s, "attention: 3 heads over 2 kv heads are refused",
        s->cuda->ops->attention(s->cuda, &a, stream) == MZ_ERR_SHAPE);
  a = (mz_attention_t){1, 1, 1, 1, 264, x.cuda, x.cuda, x.cuda};
  count(s, "attention: width 264 is refused",
        s->cuda->ops->attention(s->cuda, &a, stream) == MZ_ERR_UNSUPPORTED);
  a = (mz_attention_t){1, 0, 1, 1, 8, x.cuda, x.cuda, x.cuda};
  count(s, "attention: a sequence of 0 is refused",
        s->cuda->ops->attention(s->cuda, &a, stream) == MZ_ERR_ARG);
  count(s, "rope: width 7 is refused",
        s->cuda->ops->rope(s->cuda, &r, stream) == MZ_ERR_SHAPE);
}

/* --- rope --- */

/* Angles are fp64 on both sides; fp32: two products and a sum, fused or not;
 * bf16: a rounding that falls the other way, 2^-7 of the value at most. */
static void check_rope(sides_t *s, const shape_t *n, int inverse)
{
  dual_t qkv = dual_random(s, s->dtype, tokens(n) * wide(n), 2.0);
  mz_rope_t cpu = {n->b, n->s, n->a, n->g, n->d, 10000.0, inverse, qkv.cpu};
  mz_rope_t cuda = cpu;
  char what[120];

  cuda.qkv = qkv.cuda;
  RUN_BOTH(s, rope, &cpu, &cuda);
  snprintf(what, sizeof what, "rope%s B %d S %d A %d G %d D %d",
           inverse ? " back" : "", (int)n->b, (int)n->s, (int)n->a, (int)n->g,
           (int)n->d);
  compare(s, what, &qkv, s->dtype == MZ_F32 ? 1e-6 : 0x1p-7);
}

void check_attention(sides_t *sides)
{
  static const shape_t shapes[] = {
      {1, 1, 1, 1, 8},     {2, 17, 3, 1, 24},     {2, 64, 4, 2, 64},
      {2, 256, 4, 2, 64},  {1, 1024, 4, 4, 64},   {1, 257, 2, 2, 128},
      {3, 384, 6, 2, 128}, {1, 2048, 2, 1, 128},  {0, 64, 2, 1, 64},
      {1, 70, 2, 1, 256},  {2, 128, 2, 1, 256},   {2, 65, 2, 2, 33},
      {1, 129, 3, 1, 104}, {16, 128, 12, 12, 64}, {3, 1, 2, 1, 16},
      {1, 200, 1, 1, 64},  {1, 129, 1, 1, 128},
  };
  static const shape_t turned[] = {
      {1, 1, 1, 1, 2},    {3, 17, 3, 1, 10},    {2, 64, 4, 2, 64},
      {0, 8, 2, 1, 8},    {1, 2048, 2, 1, 128}, {70, 1, 2, 2, 256},
      {5, 300, 4, 1, 48},
  };

  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    if (!sides_skip_products(sides, (int64_t)shapes[i].b * shapes[i].a *
                                        shapes[i].s * shapes[i].s *
                                        shapes[i].d))
      check_shape(sides, &shapes[i]);
  check_refusals(sides);
  for (size_t i = 0; i < sizeof turned / sizeof *turned; i++)
    for (int inverse = 0; inverse < 2; inverse++)
      check_rope(sides, &turned[i], inverse);
}
