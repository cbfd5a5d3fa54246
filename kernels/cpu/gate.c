/* SPDX-License-Identifier: Apache-2.0 */
/* The gate on the CPU. T tokens, E experts, K choices, H
 * width, C capacity; route r = t * K + j. Formulas: kernels/gate.h.
 *
 * No scratch: the outputs hold what is known so far. probs has the logits
 * until they are turned into gates; weight has what a token's sigmoids sum to
 * until the statistics are there, then the key of each route, and row has the
 * routes sorted by expert, while the capacity is applied. */
#include "kernels/cpu/gate.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/clones.h"
#include "kernels/cpu/cpu.h"

#include <cblas.h>
#include <math.h>
#include <string.h>

/* The weight of a route that is dropped; keys are never negative. */
static const float DROPPED = -1.0f;

mz_status_t mz_cpu_gate_check(const mz_gate_t *a)
{
  int64_t routes;
  int narrow;

  MZ_REQUIRE(a->k >= 1 && a->k <= a->num_experts, MZ_ERR_ARG,
             "k is %" PRId32 ", need 1..num_experts=%" PRId32, a->k,
             a->num_experts);
  MZ_REQUIRE(a->temperature >= 0 && a->jitter >= 0 && a->jitter < 1, MZ_ERR_ARG,
             "temperature %g, need at least 0; jitter %g, need 0 <= jitter < 1",
             (double)a->temperature, (double)a->jitter);
  MZ_REQUIRE(!a->bias || a->choice_noise == MZ_CHOICE_GREEDY, MZ_ERR_ARG,
             "a bias and noise of the choice exclude each other");
  MZ_TRY(mz_int_from_i64(a->num_tokens, &narrow));
  MZ_TRY(mz_int_from_i64(a->width, &narrow));
  MZ_TRY(mz_mul_i64(a->num_tokens, a->k, &routes));
  return MZ_TRACE(mz_int_from_i64(routes, &narrow));
}

void mz_cpu_gate_logits(const mz_gate_t *a, int64_t first, int64_t rows,
                        const float *x, const float *w)
{
  int width = (int)a->width;

  if (a->jitter > 0.0f) {
    mz_cpu_jittered_logits(a, first, rows, x, w);
    return;
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows,
              a->num_experts, width, 1.0f, x, width, w, width, 0.0f,
              a->probs + first * a->num_experts, a->num_experts);
}

static void copy_fixed_logits(const mz_gate_t *a)
{
  size_t row_bytes = (size_t)a->num_experts * sizeof(float);

  for (int64_t t = 0; t < a->num_tokens; t++)
    memcpy(a->probs + t * a->num_experts, a->fixed_logits, row_bytes);
}

/* What the experts of a token are chosen by: logits or gates, to which noise or
 * a bias is added. */
typedef struct keys {
  const float *row;  /* [E] */
  const float *bias; /* [E] or NULL */
  const mz_random_t *noise;
  uint64_t first;  /* place of the token's first number */
  int32_t without; /* an expert that is not among them; -1: none */
} keys_t;

/* NaN ranks last, so that a broken model still gives K distinct experts. */
static inline float rank_of(float key) { return isnan(key) ? -INFINITY : key; }

static inline float key_at(const keys_t *keys, int32_t e)
{
  float key = keys->row[e];

  if (keys->bias) key += keys->bias[e];
  if (keys->noise)
    key += mz_random_gumbel(keys->noise, keys->first + (uint64_t)e);
  return rank_of(key);
}

typedef struct best {
  float key;
  int32_t id; /* -1: none is left */
} best_t;

/* The best expert after @p last in falling order of keys, equal ones by rising
 * id; last.id -1: the best of all. plain: keys are the row alone. */
static inline best_t search(const keys_t *keys, int32_t num_experts,
                            best_t last, bool plain)
{
  best_t best = {-INFINITY, -1};

  for (int32_t e = 0; e < num_experts; e++) {
    float key = plain ? rank_of(keys->row[e]) : key_at(keys, e);
    bool left =
        last.id < 0 || key < last.key || (key == last.key && e > last.id);

    if (left && (plain || e != keys->without) &&
        (best.id < 0 || key > best.key))
      best = (best_t){key, e};
  }
  return best;
}

static best_t next_best(const keys_t *keys, int32_t num_experts, best_t last)
{
  bool plain = !keys->bias && !keys->noise;

  return plain ? search(keys, num_experts, last, true)
               : search(keys, num_experts, last, false);
}

static int has_choice(const mz_gate_t *a)
{
  return !a->fixed_logits && !a->route_table && a->k < a->num_experts;
}

uint64_t mz_cpu_gate_number(const mz_gate_t *a, int64_t t, int64_t width)
{
  int64_t place = a->samples[t / a->sequence] * a->sequence + t % a->sequence;

  return (uint64_t)place * (uint64_t)width;
}

static void follow_table(const mz_gate_t *a, int64_t t)
{
  int64_t first = a->route_table[a->tokens[t]];

  for (int32_t j = 0; j < a->k; j++)
    a->expert[t * a->k + j] = (int32_t)((first + j) % a->num_experts);
}

/* Writes the choices of one token; returns the distance from the last one
 * chosen to the best one left, infinity where that is not a choice. */
static float choose(const mz_gate_t *a, int64_t t)
{
  keys_t keys = {
      .row = a->probs + t * a->num_experts, .bias = a->bias, .without = -1};
  best_t last = {INFINITY, -1}, left;
  float gap = INFINITY;

  if (a->route_table) {
    follow_table(a, t);
    return INFINITY;
  }
  if (a->choice_noise != MZ_CHOICE_GREEDY)
    keys.first = mz_cpu_gate_number(a, t, a->num_experts);
  if (a->choice_noise == MZ_CHOICE_DRAWN) keys.noise = &a->choice_random;
  for (int32_t j = 0; j < a->k; j++) {
    last = next_best(&keys, a->num_experts, last);
    a->expert[t * a->k + j] = last.id;
    if (j > 0 || a->k == 1 || a->choice_noise != MZ_CHOICE_DRAWN_SECOND)
      continue;
    left = next_best(&keys, a->num_experts, last);
    if (left.id >= 0) gap = last.key - left.key;
    keys.noise = &a->choice_random;
    keys.without = last.id;
    last = (best_t){INFINITY, -1};
  }
  if (!has_choice(a)) return INFINITY;
  left = next_best(&keys, a->num_experts, last);
  return fminf(gap, last.key - left.key);
}

/* Turns a row of logits into gates; returns their log-sum-exp. */
static float softmax_row(float *row, int32_t num_experts)
{
  float top = row[0], sum = 0.0f, scale;

  for (int32_t e = 1; e < num_experts; e++)
    top = row[e] > top ? row[e] : top;
  for (int32_t e = 0; e < num_experts; e++) {
    row[e] = expf(row[e] - top);
    sum += row[e];
  }
  scale = 1.0f / sum;
  for (int32_t e = 0; e < num_experts; e++)
    row[e] *= scale;
  return top + logf(sum);
}

/* Each gate by itself; returns what they sum to. */
static float sigmoid_row(float *row, int32_t num_experts)
{
  float sum = 0.0f;

  for (int32_t e = 0; e < num_experts; e++) {
    row[e] = 1.0f / (1.0f + expf(-row[e]));
    sum += row[e];
  }
  return sum;
}

static float log_sum_exp(const float *row, int32_t num_experts)
{
  float top = row[0], sum = 0.0f;

  for (int32_t e = 1; e < num_experts; e++)
    top = row[e] > top ? row[e] : top;
  for (int32_t e = 0; e < num_experts; e++)
    sum += expf(row[e] - top);
  return top + logf(sum);
}

static void normalise(const mz_gate_t *a, int64_t t)
{
  float *row = a->probs + t * a->num_experts;

  if (a->score == MZ_SCORE_SOFTMAX) {
    a->lse[t] = softmax_row(row, a->num_experts);
    return;
  }
  a->lse[t] = log_sum_exp(row, a->num_experts);
  a->weight[t * a->k] = sigmoid_row(row, a->num_experts);
}

static void cool(const mz_gate_t *a, int64_t t)
{
  float *row = a->probs + t * a->num_experts;
  float scale = 1.0f / a->temperature;

  for (int32_t e = 0; e < a->num_experts; e++)
    row[e] *= scale;
}

static float choose_and_normalise(const mz_gate_t *a)
{
  int64_t size = a->num_tokens * a->num_experts;
  float gap = INFINITY;

#pragma omp parallel for reduction(min : gap) if (size >= MZ_CPU_GATE_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++) {
    float distance;

    if (a->temperature > 0.0f) cool(a, t);
    if (a->bias) normalise(a, t); /* the bias is added to gates */
    distance = choose(a, t);
    gap = distance < gap ? distance : gap;
    if (!a->bias) normalise(a, t);
  }
  return gap;
}

/* Sum of the shares of expert e, over the tokens in order. */
static double share_sum(const mz_gate_t *a, int32_t e)
{
  const float *gate = a->probs + e;
  double sum = 0.0;

  if (a->score == MZ_SCORE_SOFTMAX) {
    for (int64_t t = 0; t < a->num_tokens; t++)
      sum += (double)gate[t * a->num_experts];
    return sum;
  }
  for (int64_t t = 0; t < a->num_tokens; t++)
    sum += (double)gate[t * a->num_experts] / (double)a->weight[t * a->k];
  return sum;
}

/* The threads share the experts, not the tokens. */
static void add_sums(const mz_gate_t *a)
{
  double *stats = a->stats;
  double *probs = stats + MZ_STATS_PROBS(a->num_experts);
  int64_t size = a->num_tokens * a->num_experts;
  double z = 0.0;

#pragma omp parallel for schedule(static) if (size >= MZ_CPU_GATE_PARALLEL)
  for (int32_t e = 0; e < a->num_experts; e++)
    probs[e] += share_sum(a, e);
  for (int64_t t = 0; t < a->num_tokens; t++)
    z += (double)a->lse[t] * (double)a->lse[t];
  stats[MZ_STATS_Z(a->num_experts)] += z;
}

/* kept[e] becomes the first place of expert e when routes are sorted by
 * expert. Routes with the weight DROPPED have no place. */
static void count_places(const mz_gate_t *a, int64_t routes)
{
  int32_t first = 0;

  memset(a->kept, 0, (size_t)a->num_experts * sizeof *a->kept);
  for (int64_t r = 0; r < routes; r++)
    if (a->weight[r] != DROPPED) a->kept[a->expert[r]]++;
  for (int32_t e = 0; e < a->num_experts; e++) {
    int32_t count = a->kept[e];

    a->kept[e] = first;
    first += count;
  }
}

/* After every place was handed out, kept[e] is the end of expert e, so the
 * start of the next one; differences give the counts back. */
static void places_to_counts(const mz_gate_t *a)
{
  for (int32_t e = a->num_experts - 1; e > 0; e--)
    a->kept[e] -= a->kept[e - 1];
}

/* Sorts the routes by expert into row. With K = 2 and MZ_DROP_POSITION every
 * first choice goes before every second one. */
static void sort_by_expert(const mz_gate_t *a, int64_t routes)
{
  int32_t passes = a->policy == MZ_DROP_POSITION && a->k == 2 ? 2 : 1;

  for (int32_t pass = 0; pass < passes; pass++)
    for (int64_t r = pass; r < routes; r += passes)
      if (a->weight[r] != DROPPED) a->row[a->kept[a->expert[r]]++] = (int32_t)r;
}

static int better(const float *key, int32_t a, int32_t b)
{
  return key[a] > key[b] || (key[a] == key[b] && a < b);
}

static void sift_down(int32_t *heap, int32_t size, int32_t at, const float *key)
{
  for (int32_t child = 2 * at + 1; child < size; child = 2 * at + 1) {
    int32_t route = heap[at];

    if (child + 1 < size && better(key, heap[child], heap[child + 1])) child++;
    if (!better(key, route, heap[child])) return;
    heap[at] = heap[child];
    heap[child] = route;
    at = child;
  }
}

/* Moves the best C of the routes to the front: a heap with the worst of them
 * on top. */
static void select_best(int32_t *routes, int32_t count, int32_t capacity,
                        const float *key)
{
  for (int32_t i = capacity / 2 - 1; i >= 0; i--)
    sift_down(routes, capacity, i, key);
  for (int32_t i = capacity; i < count; i++) {
    int32_t route = routes[i];

    if (!better(key, route, routes[0])) continue;
    routes[i] = routes[0];
    routes[0] = route;
    sift_down(routes, capacity, 0, key);
  }
}

static void drop(const mz_gate_t *a)
{
#pragma omp parallel for schedule(dynamic, 1) if (a->num_tokens >=             \
                                                  MZ_CPU_GATE_PARALLEL)
  for (int32_t e = 0; e < a->num_experts; e++) {
    int32_t start = e > 0 ? a->kept[e - 1] : 0;
    int32_t count = a->kept[e] - start;
    int32_t *routes = a->row + start;

    if (count <= a->capacity) continue;
    if (a->policy != MZ_DROP_POSITION)
      select_best(routes, count, a->capacity, a->weight);
    for (int32_t i = a->capacity; i < count; i++)
      a->weight[routes[i]] = DROPPED;
  }
}

/* The key that a route is kept by. */
static float route_key(const mz_gate_t *a, int64_t t, int32_t j)
{
  if (a->used && !a->used[t]) return DROPPED;
  if (a->capacity > 0 && a->policy == MZ_DROP_RANDOM)
    return mz_random_uniform(&a->random,
                             mz_cpu_gate_number(a, t, a->k) + (uint64_t)j);
  return a->probs[t * a->num_experts + a->expert[t * a->k + j]];
}

static void write_keys(const mz_gate_t *a)
{
#pragma omp parallel for schedule(static) if (a->num_tokens >=                 \
                                              MZ_CPU_GATE_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++)
    for (int32_t j = 0; j < a->k; j++)
      a->weight[t * a->k + j] = route_key(a, t, j);
}

static void hand_out_rows(const mz_gate_t *a, int64_t routes)
{
  for (int64_t r = 0; r < routes; r++)
    a->row[r] = a->weight[r] == DROPPED ? -1 : a->kept[a->expert[r]]++;
}

static void write_weights(const mz_gate_t *a)
{
#pragma omp parallel for schedule(static) if (a->num_tokens >=                 \
                                              MZ_CPU_GATE_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++) {
    const float *gate = a->probs + t * a->num_experts;
    float sum = 1.0f;

    if (mz_cpu_gate_is_divided(a)) {
      sum = mz_cpu_gate_kept_sum(a, t);
      sum = sum < MZ_CPU_GATE_MIN_SUM ? MZ_CPU_GATE_MIN_SUM : sum;
    }
    for (int64_t r = t * a->k; r < (t + 1) * a->k; r++)
      a->weight[r] = a->row[r] < 0 ? 0.0f : gate[a->expert[r]] / sum;
  }
}

static void add_counts(const mz_gate_t *a)
{
  int64_t *stats = a->stats;

  for (int64_t t = 0; t < a->num_tokens; t++) {
    const int32_t *expert = a->expert + t * a->k;

    if (a->used && !a->used[t]) continue;
    stats[MZ_STATS_FIRST(a->num_experts) + expert[0]]++;
    for (int32_t j = 0; j < a->k; j++)
      stats[MZ_STATS_ROUTED(a->num_experts) + expert[j]]++;
  }
  for (int32_t e = 0; e < a->num_experts; e++)
    stats[MZ_STATS_KEPT(a->num_experts) + e] += a->kept[e];
  stats[MZ_STATS_TOKENS(a->num_experts)] += a->num_tokens;
}

void mz_cpu_gate_route(const mz_gate_t *a)
{
  int64_t routes = a->num_tokens * a->k;
  float gap;

  if (a->num_tokens == 0) {
    memset(a->kept, 0, (size_t)a->num_experts * sizeof *a->kept);
    return;
  }
  if (a->fixed_logits) copy_fixed_logits(a);
  gap = choose_and_normalise(a);
  if (has_choice(a) && (double)gap < *a->min_gap) *a->min_gap = gap;
  add_sums(a);
  write_keys(a);
  if (a->capacity > 0) {
    count_places(a, routes);
    sort_by_expert(a, routes);
    drop(a);
  }
  count_places(a, routes);
  hand_out_rows(a, routes);
  places_to_counts(a);
  write_weights(a);
  add_counts(a);
}

mz_status_t mz_k_gate_cpu(const mz_kernels_t *kernels, const mz_gate_t *a,
                          mz_stream_t stream)
{
  (void)kernels;
  (void)stream;
  MZ_TRY(mz_cpu_gate_check(a));
  if (a->num_tokens > 0 && !a->fixed_logits)
    mz_cpu_gate_logits(a, 0, a->num_tokens, a->x, a->w);
  mz_cpu_gate_route(a);
  return MZ_OK;
}
