/* SPDX-License-Identifier: Apache-2.0 */
/* Random cases of every gate against tests/golden/gating_ref.py, which knows
 * nothing of the C code. Logits are multiples of 1/64, exact on both sides,
 * ties among them; where a last bit could decide otherwise a case is drawn
 * again. */
#include "gate_case.h"

#include "plan/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { CASES = 1000, MAX_TOKENS = 24, MAX_EXPERTS = 8 };

typedef struct kind {
  const char *name, *gate; /* of the reference */
  mz_drop_policy_t policy;
  mz_choice_noise_t noise;
  bool pads, drops;
} kind_t;

typedef struct random_case {
  gate_case_t c;
  mz_gate_grad_t grad;
  const kind_t *kind;
  int32_t used[MAX_TOKENS];
  double factor;
  int32_t min_capacity;
  float d_weight[MAX_TOKENS * MAX_EXPERTS], dlogits[MAX_TOKENS * MAX_EXPERTS];
  float dx[MAX_TOKENS * MAX_EXPERTS], dw[MAX_EXPERTS * MAX_EXPERTS];
} random_case_t;

/* From low to high, both included. */
static int32_t pick(const mz_random_t *r, uint64_t *at, int32_t low,
                    int32_t high)
{
  return low +
         (int32_t)(mz_random_u32(r, (*at)++) % (uint32_t)(high - low + 1));
}

static int32_t choices(const kind_t *kind, const mz_random_t *r, uint64_t *at,
                       int32_t experts)
{
  if (strcmp(kind->gate, "top1") == 0) return 1;
  if (strcmp(kind->gate, "top2") == 0) return 2;
  return pick(r, at, 3, experts);
}

static void fill_case(random_case_t *n, const mz_random_t *r, uint64_t *at)
{
  static const double factors[] = {0.5, 0.75, 1, 1.05, 1.25, 2};
  mz_gate_t *g = &n->c.gate;
  int32_t E = g->num_experts;

  n->factor = factors[pick(r, at, 0, 5)];
  n->min_capacity = pick(r, at, 0, (int32_t)mz_min_i64(4, g->num_tokens));
  g->policy = n->kind->policy;
  g->choice_noise = n->kind->noise;
  g->random = mz_random_make(*at, 1, MZ_PURPOSE_TOKEN_SELECTION, 0);
  g->choice_random = mz_random_make(*at, 1, MZ_PURPOSE_GATE_NOISE, 0);
  if (n->kind->drops)
    g->capacity = (int32_t)mz_route_capacity(g->num_tokens, E, g->k, n->factor,
                                             n->min_capacity);
  if (n->kind->pads) g->used = n->used;
  for (int32_t e = 0; e < E; e++)
    n->c.w[e * E + e] = 1;
  for (int64_t t = 0; t < g->num_tokens; t++) {
    n->c.samples[t] = t;
    n->used[t] = pick(r, at, 0, 3) > 0;
    for (int32_t e = 0; e < E; e++)
      n->c.x[t * E + e] = (float)pick(r, at, -192, 192) / 64;
  }
  for (int64_t i = 0; i < g->num_tokens * g->k; i++)
    n->d_weight[i] = (float)pick(r, at, -64, 64) / 32;
}

/* Whether gates that decide who stays are so close that rounding may. */
static bool is_close(const mz_gate_t *g, double min_gap)
{
  int64_t routes = g->num_tokens * g->k;

  if (g->choice_noise != MZ_CHOICE_GREEDY && min_gap < 1e-5) return true;
  if (g->policy != MZ_DROP_PROBS || g->num_experts <= 2) return false;
  for (int64_t a = 0; a < routes; a++)
    for (int64_t b = 0; b < a; b++) {
      float x = g->probs[a / g->k * g->num_experts + g->expert[a]];
      float y = g->probs[b / g->k * g->num_experts + g->expert[b]];

      if (g->expert[a] == g->expert[b] && fabsf(x - y) < 2e-6f * x) return true;
    }
  return false;
}

static void run_backward(random_case_t *n)
{
  mz_gate_t *g = &n->c.gate;
  int32_t E = g->num_experts;
  double tokens = (double)g->num_tokens;
  bool firsts = g->k == 2;

  n->grad =
      (mz_gate_grad_t){.forward = *g,
                       .d_weight = n->d_weight,
                       .aux_counts = n->c.stats + (firsts ? MZ_STATS_FIRST(E)
                                                          : MZ_STATS_ROUTED(E)),
                       .aux_scale = E / (tokens * tokens) / (firsts ? 1 : g->k),
                       .dlogits = n->dlogits,
                       .dx = n->dx,
                       .dw = n->dw};
  cr_assert_eq(mz_k_gate_grad_cpu(NULL, &n->grad, NULL), MZ_OK);
}

static void make_case(random_case_t *n, const kind_t *kind, int number)
{
  mz_random_t r = mz_random_make(2024, (uint32_t)number, MZ_PURPOSE_OWN, 0);
  uint64_t at = 0;
  bool close;

  do {
    int32_t tokens = pick(&r, &at, 1, MAX_TOKENS);
    int32_t least = strcmp(kind->gate, "topk") == 0 ? 3 : 2;
    int32_t experts = pick(&r, &at, least, MAX_EXPERTS);

    memset(n, 0, sizeof *n);
    n->kind = kind;
    setup(&n->c, tokens, experts, choices(kind, &r, &at, experts), experts);
    fill_case(n, &r, &at);
    run(&n->c);
    close = is_close(&n->c.gate, n->c.min_gap);
    if (close) teardown(&n->c);
  } while (close);
  run_backward(n);
}

static void print_rows(FILE *file, const char *name, const float *values,
                       int64_t rows, int64_t columns)
{
  fprintf(file, ", \"%s\": [", name);
  for (int64_t i = 0; i < rows * columns; i++)
    fprintf(file, "%s%.9g%s", i % columns == 0 ? (i ? ", [" : "[") : ", ",
            (double)values[i], i % columns == columns - 1 ? "]" : "");
  fputs("]", file);
}

/* The draws of the case, by the contract of kernels/gate.h. */
static void print_draws(FILE *file, const random_case_t *n)
{
  const mz_gate_t *g = &n->c.gate;
  int64_t T = g->num_tokens, E = g->num_experts;
  float values[MAX_TOKENS * MAX_EXPERTS];

  for (int64_t i = 0; i < T * E; i++)
    values[i] = mz_random_gumbel(&g->choice_random, (uint64_t)i);
  if (g->choice_noise != MZ_CHOICE_GREEDY)
    print_rows(file, "gumbel", values, T, E);
  for (int64_t i = 0; i < T * E; i++)
    values[i] = mz_random_uniform(&g->random, (uint64_t)(i / E));
  if (g->policy == MZ_DROP_RANDOM) print_rows(file, "U", values, T, E);
}

static void print_case(FILE *file, const random_case_t *n)
{
  const mz_gate_t *g = &n->c.gate;

  fprintf(file,
          "{\"gate\": \"%s\", \"k\": %d, \"cf\": %g, \"min_capacity\": %d, "
          "\"drop\": %s, \"policy\": \"%s\"",
          n->kind->gate, g->k, n->factor, n->min_capacity,
          n->kind->drops ? "true" : "false",
          g->policy == MZ_DROP_PROBS ? "probs" : "position");
  if (n->kind->pads) {
    fputs(", \"used\": [", file);
    for (int64_t t = 0; t < g->num_tokens; t++)
      fprintf(file, "%s%d", t ? ", " : "", n->used[t]);
    fputs("]", file);
  }
  print_rows(file, "logits", n->c.x, g->num_tokens, g->num_experts);
  print_rows(file, "d_weight", n->d_weight, g->num_tokens, g->k);
  print_draws(file, n);
  fputs("}\n", file);
}

static double next_number(FILE *file)
{
  double x = NAN;

  cr_assert_eq(fscanf(file, "%lf", &x), 1, "the reference has stopped");
  return x;
}

static void check_number(FILE *file, double mine, double bound,
                         const char *what, int number)
{
  double theirs = next_number(file);

  cr_assert_float_eq(mine, theirs, bound, "case %d: %s %.9g, reference %.9g",
                     number, what, mine, theirs);
}

static void check_case(FILE *file, const random_case_t *n, int number)
{
  const mz_gate_t *g = &n->c.gate;
  mz_moe_opts_t opts = {.num_experts = g->num_experts,
                        .k = g->k,
                        .aux_loss = g->k == 2 ? MZ_AUX_FIRST_CHOICE
                                              : MZ_AUX_LOAD_BALANCING};
  double capacity = next_number(file);

  if (n->kind->drops) cr_assert_eq(capacity, g->capacity, "case %d", number);
  check_number(file, mz_moe_aux_value(&opts, n->c.stats, 1, 0), 2e-6, "loss",
               number);
  for (int32_t e = 0; e < g->num_experts; e++)
    check_number(file, (double)n->c.stats[e], 0, "count", number);
  for (int64_t r = 0; r < g->num_tokens * g->k; r++) {
    check_number(file, g->row[r] < 0 ? -1 : g->expert[r], 0, "expert", number);
    check_number(file, (double)g->weight[r], 1e-6, "weight", number);
  }
  for (int64_t i = 0; i < g->num_tokens * g->num_experts; i++)
    check_number(file, (double)n->dlogits[i], 1e-5, "gradient", number);
}

static bool has_python(void)
{
  return system("python3 -c 'import json' >/dev/null 2>&1") == 0;
}

/* Writes the cases, lets the reference answer, reads and compares. */
static void compare_all(const kind_t *kind, const char *in, const char *out)
{
  random_case_t *n = malloc(sizeof *n);
  char command[512];
  FILE *file = fopen(in, "w");

  cr_assert(n && file);
  for (int i = 0; i < CASES; i++) {
    make_case(n, kind, i);
    print_case(file, n);
    teardown(&n->c);
  }
  fclose(file);
  snprintf(command, sizeof command,
           "python3 " MZ_SOURCE_ROOT "/tests/golden/gating_ref.py <%s >%s", in,
           out);
  cr_assert_eq(system(command), 0, "%s", command);
  file = fopen(out, "r");
  cr_assert(file);
  for (int i = 0; i < CASES; i++) {
    make_case(n, kind, i);
    check_case(file, n, i);
    teardown(&n->c);
  }
  fclose(file);
  free(n);
}

static void try_kind(kind_t kind)
{
  char in[] = "/tmp/gate_in_XXXXXX", out[] = "/tmp/gate_out_XXXXXX";
  int fds[2] = {mkstemp(in), mkstemp(out)};

  cr_assert(fds[0] >= 0 && fds[1] >= 0);
  close(fds[0]);
  close(fds[1]);
  if (has_python())
    compare_all(&kind, in, out);
  else
    cr_log_warn("python3 is missing: %s is not compared", kind.name);
  remove(in);
  remove(out);
}

#define KIND(test, ...)                                                        \
  Test(gate_cases, test) { try_kind((kind_t){.name = #test, __VA_ARGS__}); }

KIND(top1_by_position_with_pads, .gate = "top1", .drops = true, .pads = true,
     .policy = MZ_DROP_POSITION)
KIND(top1_by_random_selection, .gate = "top1", .drops = true,
     .policy = MZ_DROP_RANDOM)
KIND(top1_drawn, .gate = "top1", .drops = true, .policy = MZ_DROP_POSITION,
     .noise = MZ_CHOICE_DRAWN)
KIND(top1_dropless_with_pads, .gate = "top1", .pads = true)
KIND(top2, .gate = "top2", .drops = true, .policy = MZ_DROP_POSITION)
KIND(top2_with_a_drawn_second, .gate = "top2", .drops = true,
     .policy = MZ_DROP_POSITION, .noise = MZ_CHOICE_DRAWN_SECOND)
KIND(top2_dropless, .gate = "top2")
KIND(topk_by_probability, .gate = "topk", .drops = true,
     .policy = MZ_DROP_PROBS)
KIND(topk_by_position, .gate = "topk", .drops = true,
     .policy = MZ_DROP_POSITION)
KIND(topk_dropless, .gate = "topk")
