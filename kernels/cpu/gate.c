/* SPDX-License-Identifier: Apache-2.0 */
/* The gate and its gradient on the CPU. T tokens, E experts, K choices, H
 * width, C capacity; route r = t * K + j. Formulas: kernels/gate.h.
 *
 * No scratch: the outputs hold what is known so far. probs has the logits
 * until they are turned into gates; row has the routes sorted by expert, and
 * weight the key of each route, while the capacity is applied. */
#include "kernels/cpu/gate.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/clones.h"
#include "kernels/cpu/cpu.h"

#include <cblas.h>
#include <float.h>
#include <math.h>
#include <string.h>

/* Below this many logits a parallel region costs more than it saves. */
enum { MIN_PARALLEL = 4096 };

/* The weight of a route that the capacity drops; gates are never negative. */
static const float DROPPED = -1.0f;

/* Smallest sum that weights are divided by: fp32's epsilon. */
static const float MIN_SUM = FLT_EPSILON;

mz_status_t mz_cpu_gate_check(const mz_gate_t *a)
{
  int64_t routes;
  int narrow;

  MZ_REQUIRE(a->k >= 1 && a->k <= a->num_experts, MZ_ERR_ARG,
             "k is %" PRId32 ", need 1..num_experts=%" PRId32, a->k,
             a->num_experts);
  MZ_TRY(mz_int_from_i64(a->num_tokens, &narrow));
  MZ_TRY(mz_int_from_i64(a->width, &narrow));
  MZ_TRY(mz_mul_i64(a->num_tokens, a->k, &routes));
  return MZ_TRACE(mz_int_from_i64(routes, &narrow));
}

void mz_cpu_gate_logits(const mz_gate_t *a, int64_t first, int64_t rows,
                        const float *x, const float *w)
{
  int width = (int)a->width;

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

/* NaN ranks last, so that a broken model still gives K distinct experts. */
static float rank_of(float logit) { return isnan(logit) ? -INFINITY : logit; }

/* The best expert after (logit, id) in falling order, equal logits by rising
 * id; id -1: the best of all. Returns -1 when none is left. */
static int32_t next_best(const float *logits, int32_t num_experts, float logit,
                         int32_t id)
{
  int32_t best = -1;
  float top = -INFINITY;

  for (int32_t e = 0; e < num_experts; e++) {
    float value = rank_of(logits[e]);
    int left = id < 0 || value < logit || (value == logit && e > id);

    if (left && (best < 0 || value > top)) {
      best = e;
      top = value;
    }
  }
  return best;
}

static int has_choice(const mz_gate_t *a)
{
  return !a->fixed_logits && !a->route_table && a->k < a->num_experts;
}

/* Writes the choices of one token; returns the distance from the last one
 * chosen to the best one left, infinity where that is not a choice. */
static float choose(const mz_gate_t *a, int64_t t)
{
  const float *logits = a->probs + t * a->num_experts;
  int32_t *expert = a->expert + t * a->k;
  int32_t id = -1;
  float logit = INFINITY;

  if (a->route_table) {
    int64_t first = a->route_table[a->tokens[t]];

    for (int32_t j = 0; j < a->k; j++)
      expert[j] = (int32_t)((first + j) % a->num_experts);
    return INFINITY;
  }
  for (int32_t j = 0; j < a->k; j++) {
    id = next_best(logits, a->num_experts, logit, id);
    logit = rank_of(logits[id]);
    expert[j] = id;
  }
  if (!has_choice(a)) return INFINITY;
  id = next_best(logits, a->num_experts, logit, id);
  return logit - rank_of(logits[id]);
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

static float choose_and_normalise(const mz_gate_t *a)
{
  int64_t size = a->num_tokens * a->num_experts;
  float gap = INFINITY;

#pragma omp parallel for reduction(min : gap) if (size >= MIN_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++) {
    float distance = choose(a, t);

    gap = distance < gap ? distance : gap;
    a->lse[t] = softmax_row(a->probs + t * a->num_experts, a->num_experts);
  }
  return gap;
}

/* Tokens are summed in order; the threads share the experts, not the tokens. */
static void add_sums(const mz_gate_t *a)
{
  double *stats = a->stats;
  double *probs = stats + MZ_STATS_PROBS(a->num_experts);
  int64_t size = a->num_tokens * a->num_experts;
  double z = 0.0;

#pragma omp parallel for schedule(static) if (size >= MIN_PARALLEL)
  for (int32_t e = 0; e < a->num_experts; e++) {
    double sum = 0.0;

    for (int64_t t = 0; t < a->num_tokens; t++)
      sum += (double)a->probs[t * a->num_experts + e];
    probs[e] += sum;
  }
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

/* Sorts all routes by expert into row. With K = 2 and MZ_DROP_POSITION every
 * first choice goes before every second one. */
static void sort_by_expert(const mz_gate_t *a, int64_t routes)
{
  int32_t passes = a->policy == MZ_DROP_POSITION && a->k == 2 ? 2 : 1;

  for (int32_t pass = 0; pass < passes; pass++)
    for (int64_t r = pass; r < routes; r += passes)
      a->row[a->kept[a->expert[r]]++] = (int32_t)r;
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
#pragma omp parallel for schedule(dynamic, 1) if (a->num_tokens >= MIN_PARALLEL)
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
  if (a->capacity > 0 && a->policy == MZ_DROP_RANDOM) {
    int64_t place = a->samples[t / a->sequence] * a->sequence + t % a->sequence;

    return mz_random_uniform(&a->random, (uint64_t)(place * a->k + j));
  }
  return a->probs[t * a->num_experts + a->expert[t * a->k + j]];
}

static void write_keys(const mz_gate_t *a)
{
#pragma omp parallel for schedule(static) if (a->num_tokens >= MIN_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++)
    for (int32_t j = 0; j < a->k; j++)
      a->weight[t * a->k + j] = route_key(a, t, j);
}

static void hand_out_rows(const mz_gate_t *a, int64_t routes)
{
  for (int64_t r = 0; r < routes; r++)
    a->row[r] = a->weight[r] == DROPPED ? -1 : a->kept[a->expert[r]]++;
}

/* Sum of the gates of a token's kept routes, in order of j. */
static float kept_sum(const mz_gate_t *a, int64_t t)
{
  const float *gate = a->probs + t * a->num_experts;
  float sum = 0.0f;

  for (int64_t r = t * a->k; r < (t + 1) * a->k; r++)
    if (a->row[r] >= 0) sum += gate[a->expert[r]];
  return sum;
}

static int is_divided(const mz_gate_t *a) { return a->k > 1 && a->norm_topk; }

static void write_weights(const mz_gate_t *a)
{
#pragma omp parallel for schedule(static) if (a->num_tokens >= MIN_PARALLEL)
  for (int64_t t = 0; t < a->num_tokens; t++) {
    const float *gate = a->probs + t * a->num_experts;
    float sum = 1.0f;

    if (is_divided(a)) {
      sum = kept_sum(a, t);
      sum = sum < MIN_SUM ? MIN_SUM : sum;
    }
    for (int64_t r = t * a->k; r < (t + 1) * a->k; r++)
      a->weight[r] = a->row[r] < 0 ? 0.0f : gate[a->expert[r]] / sum;
  }
}

static void add_counts(const mz_gate_t *a, int64_t routes)
{
  int64_t *stats = a->stats;

  for (int64_t r = 0; r < routes; r++)
    stats[MZ_STATS_ROUTED(a->num_experts) + a->expert[r]]++;
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
  add_counts(a, routes);
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

/* Adds what reaches the gates of token t through the weights of its routes. */
static void add_weight_grad(const mz_gate_grad_t *a, int64_t t, float *dgate)
{
  const mz_gate_t *f = &a->forward;
  int64_t first = t * f->k;
  float sum, dot = 0.0f;

  if (!is_divided(f)) {
    for (int64_t r = first; r < first + f->k; r++)
      if (f->row[r] >= 0) dgate[f->expert[r]] += a->d_weight[r];
    return;
  }
  sum = kept_sum(f, t);
  if (sum <= MIN_SUM) return;
  for (int64_t r = first; r < first + f->k; r++)
    if (f->row[r] >= 0) dot += f->weight[r] * a->d_weight[r];
  for (int64_t r = first; r < first + f->k; r++)
    if (f->row[r] >= 0) dgate[f->expert[r]] += (a->d_weight[r] - dot) / sum;
}

/* d of the logits of token t: dz = g (dg - <g, dg>) + z_scale 2 lse g. */
MZ_CLONES
static void softmax_grad(const mz_gate_grad_t *a, int64_t t, float *dlogit)
{
  const mz_gate_t *f = &a->forward;
  const float *gate = f->probs + t * f->num_experts;
  float z = (float)(a->z_scale * 2.0 * (double)f->lse[t]), shift;
  double dot = 0.0;

  for (int32_t e = 0; e < f->num_experts; e++)
    dot += (double)gate[e] * (double)dlogit[e];
  shift = z - (float)dot;
  for (int32_t e = 0; e < f->num_experts; e++)
    dlogit[e] = gate[e] * (dlogit[e] + shift);
}

void mz_cpu_gate_dlogits(const mz_gate_grad_t *a)
{
  const mz_gate_t *f = &a->forward;
  int64_t size = f->num_tokens * f->num_experts;

#pragma omp parallel for schedule(static) if (size >= MIN_PARALLEL)
  for (int64_t t = 0; t < f->num_tokens; t++) {
    float *dlogit = a->dlogits + t * f->num_experts;

    for (int32_t e = 0; e < f->num_experts; e++)
      dlogit[e] = a->aux_scale == 0.0
                      ? 0.0f
                      : (float)(a->aux_scale * (double)a->aux_counts[e]);
    add_weight_grad(a, t, dlogit);
    softmax_grad(a, t, dlogit);
  }
}

void mz_cpu_gate_products(const mz_gate_grad_t *a, int64_t first, int64_t rows,
                          const float *x, const float *w, float *dx,
                          int accumulate)
{
  int experts = a->forward.num_experts, width = (int)a->forward.width;
  const float *dlogits = a->dlogits + first * experts;

  if (rows == 0 || a->forward.fixed_logits) {
    /* Logits that do not come from x and w send them nothing. */
    if (!accumulate)
      memset(a->dw, 0, (size_t)experts * (size_t)width * sizeof(float));
    return;
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, width,
              experts, 1.0f, dlogits, experts, w, width, 1.0f, dx, width);
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, experts, width,
              (int)rows, 1.0f, dlogits, experts, x, width,
              accumulate ? 1.0f : 0.0f, a->dw, width);
}

mz_status_t mz_k_gate_grad_cpu(const mz_kernels_t *kernels,
                               const mz_gate_grad_t *a, mz_stream_t stream)
{
  const mz_gate_t *f = &a->forward;

  (void)kernels;
  (void)stream;
  MZ_TRY(mz_cpu_gate_check(f));
  mz_cpu_gate_dlogits(a);
  mz_cpu_gate_products(a, 0, f->num_tokens, f->x, f->w, a->dx, a->accumulate);
  return MZ_OK;
}
