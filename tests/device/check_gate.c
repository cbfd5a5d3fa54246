/* SPDX-License-Identifier: Apache-2.0 */
/* The gate and its gradient.
 *
 * Integers must be equal, and they follow from comparisons of logits, and, when
 * the most probable routes stay, of gates. So x and w are mostly small
 * multiples of a power of two, whose products sum without rounding: both sides
 * have equal logits, ties among them, and make equal choices. Gates differ in
 * their last bits. Where they decide what is dropped, inputs are drawn again
 * until no gate is close to the limit of its expert; likewise the distance of
 * the k-th logit from the next where inputs are any numbers. */
#include "check_gate.h"

#include "base/alloc.h"

#include <math.h>
#include <moezero/layer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* expf, logf and a sum of E terms in another order: some 2^-24 each. */
static const double GATE_BOUND = 1e-5;

/* Logits of any numbers: sums of H products in another order. */
static const double MIN_LOGIT_GAP = 1e-4;

/* With a bias gates are compared, whose errors are some 2^-23. */
static const double MIN_BIAS_GAP = 1e-5;

/* Relative distance of two gates that both sides order alike: their errors are
 * at most some 2^-22 of the value. */
static const double MIN_GATE_GAP = 2e-6;

enum { MAX_DRAWS = 50 };

/* One gate with its buffers. */
typedef struct gate {
  shape_t shape;
  dual_t x, w, fixed, table, tokens, samples, bias, used;
  dual_t probs, lse, expert, weight, row, kept, stats, gap;
  mz_gate_t cpu, cuda;
} gate_t;

/* The part of the statistics from @p first on, as what it is. */
static dual_t part_of(const dual_t *stats, int64_t first, int64_t n,
                      mz_dtype_t dtype)
{
  return (dual_t){(char *)stats->cpu + first * 8,
                  (char *)stats->cuda + first * 8, n, dtype};
}

static void fill(sides_t *s, const dual_t *d, double unit)
{
  for (int64_t i = 0; i < d->n; i++) {
    float value = (float)((double)pick(-8, 7) * unit);
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    if (d->dtype == MZ_F32)
      ((float *)d->cpu)[i] = value;
    else /* four bits of mantissa: exact */
      ((uint16_t *)d->cpu)[i] = (uint16_t)(bits >> 16);
  }
  dual_renew(s, d);
}

/* x and w; logits are about 1.5 to 2 at any width. */
static void draw(sides_t *s, gate_t *g)
{
  const shape_t *h = &g->shape;
  double root = sqrt((double)h->width);

  if (h->rough) {
    dual_t x = dual_random(s, s->dtype, g->x.n, 1.0);
    dual_t w = dual_random(s, s->dtype, g->w.n, 4.5 / root);

    memcpy(g->x.cpu, x.cpu, (size_t)x.n * mz_dtype_bytes(x.dtype));
    memcpy(g->w.cpu, w.cpu, (size_t)w.n * mz_dtype_bytes(w.dtype));
    dual_renew(s, &g->x);
    dual_renew(s, &g->w);
    return;
  }
  fill(s, &g->x, 0.125);
  fill(s, &g->w, exp2(-3 - round(log2(root / 4.5))));
}

static void start(sides_t *s, gate_t *g)
{
  int32_t experts = g->shape.experts;

  for (int64_t i = 0; i < g->stats.n; i++) {
    if (i <= MZ_STATS_TOKENS(experts))
      ((int64_t *)g->stats.cpu)[i] = 1000 + i;
    else
      ((double *)g->stats.cpu)[i] = 0.25 * (double)i;
  }
  *(double *)g->gap.cpu = INFINITY;
  dual_renew(s, &g->stats);
  dual_renew(s, &g->gap);
}

static void make_inputs(sides_t *s, gate_t *g)
{
  const shape_t *h = &g->shape;
  int64_t sequences = h->tokens / 4 + 1;

  g->x = dual_zeros(s, s->dtype, h->tokens * h->width);
  g->w = dual_zeros(s, s->dtype, h->experts * h->width);
  g->fixed = dual_random(s, MZ_F32, h->experts, 2.0);
  g->table = dual_zeros(s, MZ_I32, 64);
  g->tokens = dual_zeros(s, MZ_I32, h->tokens);
  g->samples = dual_zeros(s, MZ_I64, sequences);
  for (int64_t i = 0; i < 64; i++)
    ((int32_t *)g->table.cpu)[i] = (int32_t)pick(0, h->experts - 1);
  for (int64_t i = 0; i < h->tokens; i++)
    ((int32_t *)g->tokens.cpu)[i] = (int32_t)pick(0, 63);
  for (int64_t i = 0; i < sequences; i++)
    ((int64_t *)g->samples.cpu)[i] = 3 * i + (INT64_C(1) << 31);
  g->bias = dual_random(s, MZ_F32, h->experts, 0.1);
  g->used = dual_zeros(s, MZ_I32, h->tokens);
  for (int64_t i = 0; i < h->tokens; i++)
    ((int32_t *)g->used.cpu)[i] = pick(0, 3) > 0;
  dual_renew(s, &g->used);
  dual_renew(s, &g->table);
  dual_renew(s, &g->tokens);
  dual_renew(s, &g->samples);
}

static void make_outputs(sides_t *s, gate_t *g)
{
  const shape_t *h = &g->shape;
  int64_t routes = h->tokens * h->k;

  g->probs = dual_zeros(s, MZ_F32, h->tokens * h->experts);
  g->lse = dual_zeros(s, MZ_F32, h->tokens);
  g->expert = dual_zeros(s, MZ_I32, routes);
  g->weight = dual_zeros(s, MZ_F32, routes);
  g->row = dual_zeros(s, MZ_I32, routes);
  g->kept = dual_zeros(s, MZ_I32, h->experts);
  g->stats = dual_zeros(s, MZ_I64, MZ_STATS_ELEMENTS(h->experts));
  g->gap = dual_zeros(s, MZ_F64, 1);
  /* What is written must be, whatever was there. */
  memset(g->kept.cpu, 0x55, (size_t)h->experts * 4);
  dual_renew(s, &g->kept);
}

#define SIDE(g, side)                                                          \
  (mz_gate_t)                                                                  \
  {                                                                            \
    .num_tokens = (g)->shape.tokens, .num_experts = (g)->shape.experts,        \
    .k = (g)->shape.k, .width = (g)->shape.width, .x = (g)->x.side,            \
    .w = (g)->w.side,                                                          \
    .fixed_logits = (g)->shape.how == FIXED ? (g)->fixed.side : NULL,          \
    .route_table = (g)->shape.how == TABLE ? (g)->table.side : NULL,           \
    .tokens = (g)->tokens.side, .capacity = (g)->shape.capacity,               \
    .policy = (g)->shape.policy,                                               \
    .random = mz_random_make(77, 5, MZ_PURPOSE_TOKEN_SELECTION, 3),            \
    .samples = (g)->samples.side, .sequence = 4, .norm_topk = (g)->shape.norm, \
    .score = (g)->shape.score, .temperature = (g)->shape.temperature,          \
    .jitter = (g)->shape.jitter, .choice_noise = (g)->shape.noise,             \
    .jitter_random = mz_random_make(78, 5, MZ_PURPOSE_GATE_NOISE, 3),          \
    .choice_random = mz_random_make(79, 5, MZ_PURPOSE_SECOND_CHOICE, 3),       \
    .bias = (g)->shape.bias ? (g)->bias.side : NULL,                           \
    .used = (g)->shape.pads ? (g)->used.side : NULL, .probs = (g)->probs.side, \
    .lse = (g)->lse.side, .expert = (g)->expert.side,                          \
    .weight = (g)->weight.side, .row = (g)->row.side, .kept = (g)->kept.side,  \
    .stats = (g)->stats.side, .min_gap = (g)->gap.side                         \
  }

/* Whether no gate that was dropped is close to one that its expert kept. */
static bool gates_are_apart(const gate_t *g)
{
  const shape_t *h = &g->shape;
  const float *probs = g->probs.cpu;
  bool apart = true;
  double *least = NULL, *most = NULL;

  must(mz_new(h->experts, "kept gates", &least));
  must(mz_new(h->experts, "dropped gates", &most));
  for (int32_t e = 0; e < h->experts; e++)
    least[e] = INFINITY;
  for (int64_t r = 0; r < h->tokens * h->k; r++) {
    int32_t e = ((const int32_t *)g->expert.cpu)[r];
    double gate = probs[r / h->k * h->experts + e];

    if (h->pads && !((const int32_t *)g->used.cpu)[r / h->k]) continue;
    if (((const int32_t *)g->row.cpu)[r] >= 0)
      least[e] = fmin(least[e], gate);
    else
      most[e] = fmax(most[e], gate);
  }
  for (int32_t e = 0; e < h->experts; e++)
    if (most[e] > 0 && least[e] - most[e] < MIN_GATE_GAP * least[e])
      apart = false;
  mz_free(least);
  mz_free(most);
  return apart;
}

static bool is_safe(const gate_t *g)
{
  const shape_t *h = &g->shape;

  double gap = h->bias ? MIN_BIAS_GAP : MIN_LOGIT_GAP;

  if (h->rough && *(const double *)g->gap.cpu < gap) return false;
  if (h->capacity == 0 || h->policy != MZ_DROP_PROBS) return true;
  /* All gates of an expert are equal, on each side: ties by route. */
  if (h->experts == 1 || h->how == FIXED) return true;
  return gates_are_apart(g);
}

/* Inputs on which both sides have to agree, after the CPU's run. */
static void prepare(sides_t *s, gate_t *g)
{
  int draws = 0;

  make_inputs(s, g);
  make_outputs(s, g);
  g->cpu = SIDE(g, cpu);
  g->cuda = SIDE(g, cuda);
  do {
    draw(s, g);
    start(s, g);
    must(s->cpu->ops->gate(s->cpu, &g->cpu, NULL));
  } while (!is_safe(g) && ++draws < MAX_DRAWS);
  if (draws == MAX_DRAWS)
    must(MZ_ERROR(MZ_ERR_ARG, "no inputs on which both sides must agree"));
}

/* --- equal bits from run to run --- */

static void run_cuda(sides_t *s, gate_t *g)
{
  must(s->cuda->ops->gate(s->cuda, &g->cuda, s->device->stream));
  must(mz_stream_synchronize(s->device, s->device->stream));
}

static void check_again(sides_t *s, gate_t *g)
{
  const struct {
    const char *what;
    const dual_t *dual;
  } outputs[] = {{"probs", &g->probs},   {"lse", &g->lse},
                 {"expert", &g->expert}, {"weight", &g->weight},
                 {"row", &g->row},       {"kept", &g->kept},
                 {"stats", &g->stats},   {"min_gap", &g->gap}};
  enum { N = sizeof outputs / sizeof *outputs };
  void *bits[N];

  start(s, g);
  run_cuda(s, g);
  for (int i = 0; i < N; i++)
    bits[i] = dual_bits(s, outputs[i].dual);
  start(s, g);
  run_cuda(s, g);
  for (int i = 0; i < N; i++)
    same_bits(s, outputs[i].what, outputs[i].dual, bits[i]);
}

/* --- the gate --- */

static void compare_gate(sides_t *s, gate_t *g)
{
  int32_t experts = g->shape.experts;
  dual_t counts = part_of(&g->stats, 0, MZ_STATS_TOKENS(experts) + 1, MZ_I64);
  dual_t sums = part_of(&g->stats, MZ_STATS_PROBS(experts), experts, MZ_F64);
  dual_t z = part_of(&g->stats, MZ_STATS_Z(experts), 1, MZ_F64);

  compare(s, "gate expert", &g->expert, 0);
  compare(s, "gate row", &g->row, 0);
  compare(s, "gate kept", &g->kept, 0);
  compare(s, "gate probs", &g->probs, GATE_BOUND);
  compare(s, "gate lse", &g->lse, GATE_BOUND);
  compare(s, "gate weight", &g->weight, GATE_BOUND);
  compare(s, "gate counts", &counts, 0);
  compare(s, "gate sums of probs", &sums, GATE_BOUND);
  compare(s, "gate z", &z, GATE_BOUND);
  /* Relative to itself, so that 0 must be 0. Rough: at least MIN_LOGIT_GAP, and
   * tensor cores cut off bits of logits of some 2^2, 2^-22 of them each time.
   */
  compare(s, "gate min_gap", &g->gap, g->shape.rough ? 0.1 : 1e-6);
}

void check_gate_forward(sides_t *s, shape_t shape)
{
  static const char *const policies[] = {"probs", "position", "random"};
  static const char *const hows[] = {"logits", "fixed logits", "a table"};
  gate_t g = {.shape = shape};

  printf("T %lld, E %d, k %d, H %lld, C %d by %s, %s%s%s\n",
         (long long)shape.tokens, shape.experts, shape.k,
         (long long)shape.width, shape.capacity, policies[shape.policy],
         hows[shape.how], shape.norm ? ", norm" : "",
         shape.rough ? ", any numbers" : "");
  prepare(s, &g);
  run_cuda(s, &g);
  compare_gate(s, &g);
  check_again(s, &g);
}

/* --- its gradient --- */

static void run_grad(sides_t *s, const mz_gate_grad_t *a, const dual_t *dx,
                     const dual_t *dw)
{
  dual_renew(s, dx);
  dual_renew(s, dw);
  must(s->cuda->ops->gate_grad(s->cuda, a, s->device->stream));
  must(mz_stream_synchronize(s->device, s->device->stream));
}

/* dx is rounded once more in bf16, and near the middle of two numbers the
 * sides may be one step apart: 2^-7 of the value at most. Sums of E or T terms
 * in another order: some 2^-24 * sqrt(T). */
void check_gate_backward(sides_t *s, shape_t shape, double aux, double z,
                         int accumulate)
{
  gate_t g = {.shape = shape};
  int64_t routes = shape.tokens * shape.k;
  dual_t d_weight = dual_random(s, MZ_F32, routes, 1.0);
  dual_t counts = dual_zeros(s, MZ_I64, shape.experts);
  dual_t sums = dual_zeros(s, MZ_F64, shape.experts);
  dual_t dlogits = dual_zeros(s, MZ_F32, shape.tokens * shape.experts);
  dual_t dx = dual_random(s, s->dtype, shape.tokens * shape.width, 1.0);
  dual_t dw = dual_random(s, MZ_F32, shape.experts * shape.width, 1.0);
  const dual_t *saved[] = {&g.probs, &g.lse, &g.expert, &g.weight, &g.row};
  mz_gate_grad_t a, b;
  void *dx_bits, *dw_bits;

  prepare(s, &g);
  for (size_t i = 0; i < sizeof saved / sizeof *saved; i++)
    dual_renew(s, saved[i]);
  for (int32_t e = 0; e < shape.experts; e++)
    ((int64_t *)counts.cpu)[e] = pick(0, 1 + 2 * routes / shape.experts);
  dual_renew(s, &counts);
  for (int32_t e = 0; e < shape.experts; e++)
    ((double *)sums.cpu)[e] = (1 + 0.01 * (double)pick(-50, 50)) *
                              (double)shape.tokens / shape.experts;
  dual_renew(s, &sums);
  a = (mz_gate_grad_t){.forward = g.cpu,
                       .d_weight = d_weight.cpu,
                       .aux_scale = aux / (double)(routes + 1),
                       .aux_counts = counts.cpu,
                       .sums_scale = aux / (double)(routes + 1),
                       .aux_sums = sums.cpu,
                       .sums_mean = (double)shape.tokens / shape.experts,
                       .z_scale = z,
                       .dlogits = dlogits.cpu,
                       .dx = dx.cpu,
                       .dw = dw.cpu,
                       .accumulate = accumulate};
  b = a;
  b.forward = g.cuda;
  b.d_weight = d_weight.cuda;
  b.aux_counts = counts.cuda;
  b.aux_sums = sums.cuda;
  b.dlogits = dlogits.cuda;
  b.dx = dx.cuda;
  b.dw = dw.cuda;
  printf("gradient: T %lld, E %d, k %d, H %lld, C %d%s%s\n",
         (long long)shape.tokens, shape.experts, shape.k,
         (long long)shape.width, shape.capacity, shape.norm ? ", norm" : "",
         accumulate ? ", added" : "");
  RUN_BOTH(s, gate_grad, &a, &b);
  compare(s, "gate_grad dlogits", &dlogits, GATE_BOUND);
  compare(s, "gate_grad dx", &dx, s->dtype == MZ_BF16 ? 0x1p-7 : 1e-5);
  compare(s, "gate_grad dw", &dw, 2e-5);
  run_grad(s, &b, &dx, &dw);
  dx_bits = dual_bits(s, &dx);
  dw_bits = dual_bits(s, &dw);
  run_grad(s, &b, &dx, &dw);
  same_bits(s, "gate_grad dx", &dx, dx_bits);
  same_bits(s, "gate_grad dw", &dw, dw_bits);
}
