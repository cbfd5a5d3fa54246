/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of the gate and of its gradient share: a gate with all its
 * buffers, inputs by hand and by chance, a reference in double.
 *
 * In the cases by hand logits are logarithms of small integers (x) times the
 * identity (w), so gates are short decimals; fp32 rounds them by at most a few
 * 1e-7. */
#ifndef MZ_TESTS_GATE_CASE_H
#define MZ_TESTS_GATE_CASE_H

#include "base/alloc.h"
#include "kernels/cpu/cpu.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

typedef struct gate_case {
  mz_gate_t gate;
  float *x, *w; /* [T, H], [E, H] */
  int64_t *stats;
  int64_t *samples;
  double min_gap;
} gate_case_t;

static inline void setup(gate_case_t *c, int64_t tokens, int32_t experts,
                         int32_t k, int64_t width)
{
  mz_gate_t *g = &c->gate;

  memset(c, 0, sizeof *c);
  cr_assert_eq(mz_new(tokens * width, "x", &c->x), MZ_OK);
  cr_assert_eq(mz_new(experts * width, "w", &c->w), MZ_OK);
  cr_assert_eq(mz_new(MZ_STATS_ELEMENTS(experts), "stats", &c->stats), MZ_OK);
  cr_assert_eq(mz_new(tokens, "samples", &c->samples), MZ_OK);
  cr_assert_eq(mz_new(tokens * experts, "probs", &g->probs), MZ_OK);
  cr_assert_eq(mz_new(tokens, "lse", &g->lse), MZ_OK);
  cr_assert_eq(mz_new(tokens * k, "expert", &g->expert), MZ_OK);
  cr_assert_eq(mz_new(tokens * k, "weight", &g->weight), MZ_OK);
  cr_assert_eq(mz_new(tokens * k, "row", &g->row), MZ_OK);
  cr_assert_eq(mz_new(experts, "kept", &g->kept), MZ_OK);
  c->min_gap = INFINITY;
  g->num_tokens = tokens;
  g->num_experts = experts;
  g->k = k;
  g->width = width;
  g->x = c->x;
  g->w = c->w;
  g->samples = c->samples;
  g->sequence = 1;
  g->norm_topk = 1;
  g->stats = c->stats;
  g->min_gap = &c->min_gap;
}

static inline void teardown(gate_case_t *c)
{
  mz_free(c->x);
  mz_free(c->w);
  mz_free(c->stats);
  mz_free(c->samples);
  mz_free(c->gate.probs);
  mz_free(c->gate.lse);
  mz_free(c->gate.expert);
  mz_free(c->gate.weight);
  mz_free(c->gate.row);
  mz_free(c->gate.kept);
}

static inline void run(gate_case_t *c)
{
  cr_assert_eq(mz_k_gate_cpu(NULL, &c->gate, NULL), MZ_OK);
}

/* Multiples of 1/8 in [-1, 1): their products sum without rounding, so logits
 * are exact whatever BLAS does, and equal logits are frequent. */
static inline void fill(float *x, int64_t n, uint32_t seed)
{
  mz_random_t r = {seed, 0, 0};

  for (int64_t i = 0; i < n; i++)
    x[i] = floorf(mz_random_uniform(&r, (uint64_t)i) * 16.0f) / 8.0f - 1.0f;
}

static inline void setup_random(gate_case_t *c, int64_t tokens, int32_t experts,
                                int32_t k, int64_t width)
{
  setup(c, tokens, experts, k, width);
  fill(c->x, tokens * width, 1);
  fill(c->w, experts * width, 2);
  for (int64_t t = 0; t < tokens; t++)
    c->samples[t] = 3 * t + 1;
}

/* Logits ln(rows[t][e]). */
static inline void setup_rows(gate_case_t *c, const int *rows, int64_t tokens,
                              int32_t k)
{
  setup(c, tokens, 4, k, 4);
  for (int64_t i = 0; i < tokens * 4; i++)
    c->x[i] = logf((float)rows[i]);
  for (int e = 0; e < 4; e++)
    c->w[5 * e] = 1.0f;
}

/* Rows of the golden cases: top-1, top-2 and top-3. */
__attribute__((unused)) static const int TOP1[6 * 4] = {
    6, 2, 1, 1, 1, 7, 1, 1, 5, 3, 1, 1, 7, 1, 1, 1, 1, 2, 1, 6, 4, 3, 2, 1};
__attribute__((unused)) static const int TOP2[8 * 4] = {
    5, 3, 1, 1, 6, 2, 1, 1, 4, 1, 3, 2, 3, 5, 1, 1,
    1, 1, 2, 6, 1, 5, 3, 1, 4, 3, 2, 1, 1, 2, 1, 6};
__attribute__((unused)) static const int TOP3[6 * 4] = {
    40, 30, 20, 10, 45, 25, 18, 12, 38, 28, 21, 13,
    20, 41, 24, 15, 17, 26, 43, 14, 36, 19, 11, 34};

/* Number of token t among those of the global batch. */
static inline int64_t place_of(const mz_gate_t *g, int64_t t)
{
  return g->samples[t / g->sequence] * g->sequence + t % g->sequence;
}

static inline double reference_jitter(const mz_gate_t *g, int64_t t, int64_t h)
{
  uint64_t i = (uint64_t)(place_of(g, t) * g->width + h);

  return 1.0 + (double)g->jitter *
                   (2.0 * (double)mz_random_uniform(&g->jitter_random, i) - 1);
}

static inline double reference_logit(const gate_case_t *c, const double *x,
                                     const double *w, int64_t t, int32_t e)
{
  const mz_gate_t *g = &c->gate;
  double sum = 0.0;

  for (int64_t h = 0; h < g->width; h++)
    sum += x[t * g->width + h] * w[e * g->width + h] *
           (g->jitter > 0 ? reference_jitter(g, t, h) : 1.0);
  return g->temperature > 0 ? sum / (double)g->temperature : sum;
}

/* Gates in double; returns the logits' log-sum-exp. */
static inline double reference_gates(const gate_case_t *c, const double *x,
                                     const double *w, int64_t t, double *gate)
{
  double sum = 0.0;

  for (int32_t e = 0; e < c->gate.num_experts; e++)
    sum += gate[e] = exp(reference_logit(c, x, w, t, e));
  for (int32_t e = 0; e < c->gate.num_experts; e++)
    gate[e] /= c->gate.score == MZ_SCORE_SIGMOID ? 1 + gate[e] : sum;
  return log(sum);
}

static inline double *doubles_of(const float *x, int64_t n)
{
  double *copy = NULL;

  cr_assert_eq(mz_new(n, "doubles", &copy), MZ_OK);
  for (int64_t i = 0; i < n; i++)
    copy[i] = x[i];
  return copy;
}

static inline double prob_sum(const gate_case_t *c, int32_t e)
{
  return ((double *)c->stats)[MZ_STATS_PROBS(c->gate.num_experts) + e];
}

typedef struct route {
  int32_t expert, slot; /* slot -1: dropped, expert not looked at */
  double weight;
} route_t;

#define DROP                                                                   \
  {                                                                            \
    0, -1, 0.0                                                                 \
  }

static inline void check_routes(const gate_case_t *c, const route_t *routes)
{
  const mz_gate_t *g = &c->gate;
  int32_t first[4] = {0};

  for (int32_t e = 1; e < 4; e++)
    first[e] = first[e - 1] + g->kept[e - 1];
  for (int64_t r = 0; r < g->num_tokens * g->k; r++) {
    cr_assert_float_eq(g->weight[r], routes[r].weight, 1e-6, "route %d",
                       (int)r);
    if (routes[r].slot < 0) {
      cr_assert_eq(g->row[r], -1, "route %d", (int)r);
      continue;
    }
    cr_assert_eq(g->expert[r], routes[r].expert, "route %d", (int)r);
    cr_assert_eq(g->row[r], first[g->expert[r]] + routes[r].slot, "route %d",
                 (int)r);
  }
}

static inline void check_counts(const gate_case_t *c, const int *routed,
                                const int *kept, const double *mean)
{
  for (int32_t e = 0; e < 4; e++) {
    cr_assert_eq(c->stats[MZ_STATS_ROUTED(4) + e], routed[e]);
    cr_assert_eq(c->stats[MZ_STATS_KEPT(4) + e], kept[e]);
    cr_assert_eq(c->gate.kept[e], kept[e]);
    cr_assert_float_eq(prob_sum(c, e) / (double)c->gate.num_tokens, mean[e],
                       1e-6);
  }
  cr_assert_eq(c->stats[MZ_STATS_TOKENS(4)], c->gate.num_tokens);
}

#endif
