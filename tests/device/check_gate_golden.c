/* SPDX-License-Identifier: Apache-2.0 */
/* The published cases of the gate on "/cuda", in fp32: weights, gates and
 * gradients by hand, all else as on "/cpu", which tests/unit pins to the same
 * numbers. Logits are logarithms of small integers (x) times the identity (w).
 * Seeds are such that the draws lead to the published order. */
#include "check.h"

#include <math.h>
#include <moezero/layer.h>
#include <string.h>

enum { E = 4, MAX_TOKENS = 8, MAX_ROUTES = 18 };

/* Sums of a handful of fp32 numbers below 1. */
static const double BOUND = 2e-6;

static const int TOP1[] = {6, 2, 1, 1, 1, 7, 1, 1, 5, 3, 1, 1,
                           7, 1, 1, 1, 1, 2, 1, 6, 4, 3, 2, 1};
static const int TOP2[] = {5, 3, 1, 1, 6, 2, 1, 1, 4, 1, 3, 2, 3, 5, 1, 1,
                           1, 1, 2, 6, 1, 5, 3, 1, 4, 3, 2, 1, 1, 2, 1, 6};
static const int TOP3[] = {40, 30, 20, 10, 45, 25, 18, 12, 38, 28, 21, 13,
                           20, 41, 24, 15, 17, 26, 43, 14, 36, 19, 11, 34};
static const int DRAWN2[] = {5, 3, 1, 1, 6, 2, 1, 1, 1, 1, 2, 6, 3, 5, 1, 1};
static const int32_t USED[] = {1, 1, 1, 1, 1, 0};

typedef struct golden {
  const char *name;
  const int *rows;
  int32_t tokens, k, capacity;
  mz_drop_policy_t policy;
  mz_choice_noise_t noise;
  bool pads;
  double weight[MAX_ROUTES]; /* 0: dropped */
} golden_t;

static const golden_t cases[] = {
    {.name = "G1",
     .rows = TOP1,
     .tokens = 6,
     .k = 1,
     .capacity = 2,
     .policy = MZ_DROP_POSITION,
     .weight = {.6, .7, .5, 0, .6, 0}},
    {.name = "G1 of 4",
     .rows = TOP1,
     .tokens = 6,
     .k = 1,
     .capacity = 4,
     .policy = MZ_DROP_POSITION,
     .weight = {.6, .7, .5, .7, .6, .4}},
    {.name = "G2",
     .rows = TOP1,
     .tokens = 6,
     .k = 1,
     .capacity = 2,
     .policy = MZ_DROP_RANDOM,
     .weight = {0, .7, .5, .7, .6, 0}},
    {.name = "G3",
     .rows = TOP1,
     .tokens = 6,
     .k = 1,
     .pads = true,
     .weight = {.6, .7, .5, .7, .6, 0}},
    {.name = "G4",
     .rows = TOP1,
     .tokens = 6,
     .k = 1,
     .capacity = 2,
     .policy = MZ_DROP_POSITION,
     .noise = MZ_CHOICE_DRAWN,
     .weight = {.6, .7, .3, .7, .6, 0}},
    {.name = "G5",
     .rows = TOP2,
     .tokens = 8,
     .k = 2,
     .capacity = 2,
     .policy = MZ_DROP_POSITION,
     .weight = {1, 0, 1, 0, 0, 1, 1, 0, .75, .25, 1, 0, 0, 0, 1, 0}},
    {.name = "G6",
     .rows = DRAWN2,
     .tokens = 4,
     .k = 2,
     .capacity = 4,
     .policy = MZ_DROP_POSITION,
     .noise = MZ_CHOICE_DRAWN_SECOND,
     .weight = {5. / 6, 1. / 6, .75, .25, 6. / 7, 1. / 7, .625, .375}},
    {.name = "G7 by gates",
     .rows = TOP3,
     .tokens = 6,
     .k = 3,
     .capacity = 3,
     .policy = MZ_DROP_PROBS,
     .weight = {4. / 7, 3. / 7, 0, 1, 0, 0, 38. / 87, 28. / 87, 21. / 87,
                41. / 65, 24. / 65, 0, 1, 0, 0, 0, 1, 0}},
    {.name = "G7 by position",
     .rows = TOP3,
     .tokens = 6,
     .k = 3,
     .capacity = 3,
     .policy = MZ_DROP_POSITION,
     .weight = {4. / 9, 3. / 9, 2. / 9, 45. / 88, 25. / 88, 18. / 88, 38. / 87,
                28. / 87, 21. / 87, 0, 0, 0, 0, 0, 0, 0, 1, 0}},
    {.name = "G7 of 2 by gates",
     .rows = TOP2,
     .tokens = 8,
     .k = 2,
     .capacity = 2,
     .policy = MZ_DROP_PROBS,
     .weight = {1, 0, 1, 0, 0, 1, 1, 0, 1, 0, .625, .375, 0, 0, 1, 0}},
    {.name = "G9",
     .rows = TOP2,
     .tokens = 8,
     .k = 2,
     .weight = {.625, .375, .75, .25, 4. / 7, 3. / 7, .625, .375, .75, .25,
                .625, .375, 4. / 7, 3. / 7, .75, .25}},
    {.name = "G9 of 3",
     .rows = TOP3,
     .tokens = 6,
     .k = 3,
     .weight = {4. / 9, 3. / 9, 2. / 9, 45. / 88, 25. / 88, 18. / 88, 38. / 87,
                28. / 87, 21. / 87, 41. / 85, 24. / 85, 20. / 85, 43. / 86,
                26. / 86, 17. / 86, 36. / 89, 34. / 89, 19. / 89}},
};

/* A gate on both sides; what has a name of its own is compared. */
typedef struct bench {
  dual_t x, w, samples, used, probs, lse, expert, weight, row, kept, stats, gap;
  mz_gate_t cpu, cuda;
} bench_t;

#define SIDE(b, c, side)                                                       \
  (mz_gate_t)                                                                  \
  {                                                                            \
    .num_tokens = (c)->tokens, .num_experts = E, .k = (c)->k, .width = E,      \
    .x = (b)->x.side, .w = (b)->w.side, .capacity = (c)->capacity,             \
    .policy = (c)->policy, .samples = (b)->samples.side, .sequence = 1,        \
    .random = mz_random_make(4, 0, MZ_PURPOSE_TOKEN_SELECTION, 1),             \
    .norm_topk = 1, .choice_noise = (c)->noise,                                \
    .choice_random =                                                           \
        mz_random_make((c)->k == 1 ? 78 : 9, 5, MZ_PURPOSE_GATE_NOISE, 2),     \
    .used = (c)->pads ? (b)->used.side : NULL, .probs = (b)->probs.side,       \
    .lse = (b)->lse.side, .expert = (b)->expert.side,                          \
    .weight = (b)->weight.side, .row = (b)->row.side, .kept = (b)->kept.side,  \
    .stats = (b)->stats.side, .min_gap = (b)->gap.side                         \
  }

static bench_t make_bench(sides_t *s, const golden_t *c)
{
  float x[MAX_TOKENS * E], w[E * E] = {0};
  int64_t samples[MAX_TOKENS], T = c->tokens;
  double infinity = INFINITY;
  bench_t b;

  for (int64_t i = 0; i < T * E; i++)
    x[i] = logf((float)c->rows[i]);
  for (int e = 0; e < E; e++)
    w[e * E + e] = 1.0f;
  for (int64_t t = 0; t < T; t++)
    samples[t] = t;
  b = (bench_t){.x = dual_of(s, MZ_F32, T * E, x),
                .w = dual_of(s, MZ_F32, E * E, w),
                .samples = dual_of(s, MZ_I64, T, samples),
                .used = dual_of(s, MZ_I32, 6, USED),
                .probs = dual_zeros(s, MZ_F32, T * E),
                .lse = dual_zeros(s, MZ_F32, T),
                .expert = dual_zeros(s, MZ_I32, T * c->k),
                .weight = dual_zeros(s, MZ_F32, T * c->k),
                .row = dual_zeros(s, MZ_I32, T * c->k),
                .kept = dual_zeros(s, MZ_I32, E),
                .stats = dual_zeros(s, MZ_I64, MZ_STATS_ELEMENTS(E)),
                .gap = dual_of(s, MZ_F64, 1, &infinity)};
  dual_renew(s, &b.stats);
  b.cpu = SIDE(&b, c, cpu);
  b.cuda = SIDE(&b, c, cuda);
  return b;
}

/* By hand, in place of what the CPU wrote. */
static void expect(const dual_t *d, const double *values)
{
  for (int64_t i = 0; i < d->n; i++)
    ((float *)d->cpu)[i] = (float)values[i];
}

static void check_routes(sides_t *s, const golden_t *c)
{
  bench_t b = make_bench(s, c);
  double gates[MAX_TOKENS * E];
  dual_t counts = b.stats;

  counts.n = MZ_STATS_TOKENS(E) + 1;
  RUN_BOTH(s, gate, &b.cpu, &b.cuda);
  for (int64_t t = 0; t < c->tokens; t++) {
    const int *row = c->rows + t * E;

    for (int e = 0; e < E; e++)
      gates[t * E + e] = (double)row[e] / (row[0] + row[1] + row[2] + row[3]);
  }
  expect(&b.probs, gates);
  expect(&b.weight, c->weight);
  compare(s, c->name, &b.weight, BOUND);
  compare(s, "  gates", &b.probs, BOUND);
  compare(s, "  experts", &b.expert, 0);
  compare(s, "  rows", &b.row, 0);
  compare(s, "  kept", &b.kept, 0);
  compare(s, "  counts", &counts, 0);
}

/* --- gradients: G11 a to d and that of the squared shares of G12 --- */

typedef struct golden_grad {
  const char *name;
  golden_t gate;
  double aux_scale, sums_scale;
  int64_t counts[E];
  double sums[E];
  float d_weight[2 * MAX_TOKENS];
  double dlogits[MAX_TOKENS * E];
} golden_grad_t;

static const golden_grad_t gradients[] = {
    {.name = "G11 a",
     .gate = {.rows = TOP1,
              .tokens = 6,
              .k = 1,
              .capacity = 2,
              .policy = MZ_DROP_POSITION},
     .aux_scale = 4. / 36,
     .counts = {4, 1, 0, 1},
     .dlogits = {.086666667, -.037777778, -.03,        -.018888889,
                 .031111111, -.015555556, -.013333333, -.002222222,
                 .088888889, -.046666667, -.026666667, -.015555556,
                 .077777778, -.022222222, -.033333333, -.022222222,
                 .031111111, -.004444444, -.013333333, -.013333333,
                 .088888889, -.033333333, -.044444444, -.011111111}},
    /* rows 0 and 4 are published, the others by the same formula:
       4 / 64 g_e (c_e - sum g c) with the counts c */
    {.name = "G11 b",
     .gate = {.rows = TOP2,
              .tokens = 8,
              .k = 2,
              .capacity = 2,
              .policy = MZ_DROP_POSITION},
     .aux_scale = 4. / 64,
     .counts = {4, 2, 0, 2},
     .dlogits = {.0375,   -.015,  -.0175,  -.005,   .0375,  -.0125, -.01875,
                 -.00625, .045,   -.00125, -.04125, -.0025, .03,    -.0125,
                 -.015,   -.0025, .01375,  .00125,  -.0225, .0075,  .015,
                 .0125,   -.03,   .0025,   .04,     -.0075, -.03,   -.0025,
                 .0125,   0,      -.0125,  0}},
    {.name = "G11 c",
     .gate = {.rows = TOP1,
              .tokens = 6,
              .k = 1,
              .capacity = 2,
              .policy = MZ_DROP_POSITION},
     .d_weight = {1, 2, 3, 4, 5, 6},
     .dlogits = {.24,  -.12, -.06, -.06, -.14, .42, -.14, -.14, .75, -.45,
                 -.15, -.15, 0,    0,    0,    0,   -.3,  -.6,  -.3, 1.2}},
    {.name = "G11 d",
     .gate = {.rows = TOP2,
              .tokens = 8,
              .k = 2,
              .capacity = 4,
              .policy = MZ_DROP_POSITION},
     .d_weight = {1, -1, 2, -.5, 3, 0, 4, .5, 5, 1, 6, 1.5, 7, 2, 8, 2.5},
     .dlogits = {.46875, -.46875, 0,          0,         .46875,      -.46875,
                 0,      0,       .734693878, 0,         -.734693878, 0,
                 0,      0,       0,          0,         0,           0,
                 -.75,   .75,     0,          1.0546875, -1.0546875}},
    {.name = "G12",
     .gate = {.rows = TOP1, .tokens = 6, .k = 1},
     .sums_scale = .08 * 2 / 36,
     .sums = {2.4, 1.8, .7, 1.1},
     .dlogits = {.00112,     -.00016,     -.000568889, -.000391111,
                 .00032,     .000373333,  -.000435556, -.000257778,
                 .001066667, -.00016,     -.000542222, -.000364444,
                 .00112,     -.000106667, -.000595556, -.000417778,
                 .000475556, .000417778,  -.00028,     -.000613333,
                 .001155556, .000066667,  -.000933333, -.000288889}},
};

static void check_gradient(sides_t *s, const golden_grad_t *c)
{
  bench_t b = make_bench(s, &c->gate);
  int64_t T = c->gate.tokens;
  dual_t d_weight = dual_of(s, MZ_F32, T * c->gate.k, c->d_weight);
  dual_t counts = dual_of(s, MZ_I64, E, c->counts);
  dual_t sums = dual_of(s, MZ_F64, E, c->sums);
  dual_t dlogits = dual_zeros(s, MZ_F32, T * E);
  dual_t dx = dual_zeros(s, MZ_F32, T * E), dw = dual_zeros(s, MZ_F32, E * E);
  mz_gate_grad_t grad = {.forward = b.cuda,
                         .d_weight = d_weight.cuda,
                         .aux_scale = c->aux_scale,
                         .aux_counts = counts.cuda,
                         .sums_scale = c->sums_scale,
                         .aux_sums = sums.cuda,
                         .sums_mean = (double)T / E,
                         .dlogits = dlogits.cuda,
                         .dx = dx.cuda,
                         .dw = dw.cuda};

  dual_renew(s, &dx);
  must(s->cuda->ops->gate(s->cuda, &b.cuda, s->device->stream));
  must(s->cuda->ops->gate_grad(s->cuda, &grad, s->device->stream));
  must(mz_stream_synchronize(s->device, s->device->stream));
  expect(&dlogits, c->dlogits);
  expect(&dx, c->dlogits); /* w is the identity */
  compare(s, c->name, &dlogits, 1e-5);
  compare(s, "  dx", &dx, 1e-5);
}

/* G12: gates of (6, 2, 1, 1) and (4, 3, 2, 1) at other temperatures. */
static void check_temperature(sides_t *s, float temperature)
{
  static const int rows[] = {6, 2, 1, 1, 4, 3, 2, 1};
  golden_t c = {.rows = rows, .tokens = 2, .k = 1};
  bench_t b = make_bench(s, &c);
  double gates[2 * E];

  b.cuda.temperature = temperature;
  must(s->cuda->ops->gate(s->cuda, &b.cuda, s->device->stream));
  must(mz_stream_synchronize(s->device, s->device->stream));
  for (int i = 0; i < 2 * E; i++) {
    double sum = 0;

    for (int e = 0; e < E; e++)
      sum += pow(rows[i / E * E + e], 1 / (double)temperature);
    gates[i] = pow(rows[i], 1 / (double)temperature) / sum;
  }
  expect(&b.probs, gates);
  compare(s, "G12 gates", &b.probs, BOUND);
}

void check_gate_golden(sides_t *s)
{
  if (s->dtype != MZ_F32) return;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    check_routes(s, &cases[i]);
  for (size_t i = 0; i < sizeof gradients / sizeof *gradients; i++)
    check_gradient(s, &gradients[i]);
  check_temperature(s, 1.2f);
  check_temperature(s, 0.8f);
}
