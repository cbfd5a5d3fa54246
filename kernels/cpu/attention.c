/* SPDX-License-Identifier: Apache-2.0 */
/* Causal attention in tiles of TILE queries x TILE keys, whose scores live on
 * the stack of the thread. Letters: kernels/attention.h.
 *
 * Products with a transposed right side are the slow ones at this size, so the
 * tile that stays for many products is transposed once: the queries forward,
 * keys and values backward.
 *
 * The products of tiles are OpenBLAS calls inside a parallel region. There
 * OpenBLAS works in the calling thread alone; its serial build always does. */
#include "kernels/cpu/cpu.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/simd.h"

#include <cblas.h>
#include <string.h>

/* LINE: bytes of a cache line, so that no vector of a tile lies in two. */
enum { TILE = 64, MAX_WIDTH = 256, PAIRS = 64, LINE = 64 };

/* Where the heads of one sequence lie. ld, ldo: elements from one token to the
 * next in qkv and in out. */
typedef struct view {
  int64_t ld, ldo, first_token, num_tokens;
  int sequence, width; /* S, D */
  float scale;         /* 1 / sqrt(D) */
} view_t;

static view_t view_of(const mz_attention_t *a, int64_t batch)
{
  view_t v = {
      .ld = ((int64_t)a->heads + 2 * (int64_t)a->kv_heads) * a->head_width,
      .ldo = (int64_t)a->heads * a->head_width,
      .first_token = batch * a->sequence,
      .num_tokens = (int64_t)a->batch * a->sequence,
      .sequence = a->sequence,
      .width = a->head_width,
      .scale = (float)(1.0 / sqrt((double)a->head_width)),
  };
  return v;
}

/* Column of the first element of a query, key or value head in a row of qkv. */
static int64_t query_column(const mz_attention_t *a, int32_t head)
{
  return (int64_t)head * a->head_width;
}

static int64_t key_column(const mz_attention_t *a, int32_t kv_head)
{
  return ((int64_t)a->heads + kv_head) * a->head_width;
}

static int64_t value_column(const mz_attention_t *a, int32_t kv_head)
{
  return ((int64_t)a->heads + a->kv_heads + kv_head) * a->head_width;
}

static mz_status_t check_heads(int32_t batch, int32_t sequence, int32_t heads,
                               int32_t kv_heads, int32_t head_width)
{
  int64_t ld;
  int narrow;

  MZ_REQUIRE(batch >= 0 && sequence >= 1 && heads >= 1 && kv_heads >= 1 &&
                 head_width >= 1,
             MZ_ERR_ARG,
             "%" PRId32 " sequences of %" PRId32 ", %" PRId32 " heads, %" PRId32
             " kv heads of width %" PRId32,
             batch, sequence, heads, kv_heads, head_width);
  MZ_REQUIRE(heads % kv_heads == 0, MZ_ERR_SHAPE,
             "%" PRId32 " heads not divisible by %" PRId32 " kv heads", heads,
             kv_heads);
  MZ_REQUIRE(head_width <= MAX_WIDTH, MZ_ERR_UNSUPPORTED,
             "head width %" PRId32 ", at most %d", head_width, MAX_WIDTH);
  MZ_TRY(mz_mul_i64((int64_t)heads + 2 * (int64_t)kv_heads, head_width, &ld));
  return MZ_TRACE(mz_int_from_i64(ld, &narrow)); /* a stride of BLAS */
}

static int tile_extent(int first, int end)
{
  return end - first < TILE ? end - first : TILE;
}

/* c = alpha op(a) op(b) + beta c, row-major. */
static void product(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k,
                    float alpha, const float *a, int64_t lda, const float *b,
                    int64_t ldb, int beta, float *c, int64_t ldc)
{
  cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a, (int)lda, b, (int)ldb,
              (float)beta, c, (int)ldc);
}

/* y [width, TILE] = the transpose of `rows` rows of x. */
static void transpose(const float *restrict x, int64_t ld, int rows, int width,
                      float *restrict y)
{
  for (int r0 = 0; r0 < rows; r0 += 16) /* a cache line of y */
    for (int c = 0; c < width; c++)
      for (int r = r0; r < rows && r < r0 + 16; r++)
        y[c * TILE + r] = x[r * ld + c];
}

/* Scores [keys, TILE] to exp(score - top); top, sum and shrink are of the
 * queries, the last index, so that nothing is summed across a vector. top
 * rises to the maximum, shrink is what the old sums are to be multiplied by. */
MZ_CLONES static void softmax_tile(float *restrict s, int keys, int rows,
                                   float *restrict top, float *restrict sum,
                                   float *restrict shrink)
{
#pragma omp simd
  for (int i = 0; i < rows; i++)
    shrink[i] = top[i];
  for (int j = 0; j < keys; j++) {
#pragma omp simd
    for (int i = 0; i < rows; i++)
      top[i] = s[j * TILE + i] > top[i] ? s[j * TILE + i] : top[i];
  }
#pragma omp simd
  for (int i = 0; i < rows; i++) {
    shrink[i] = mz_simd_exp(shrink[i] - top[i]);
    sum[i] *= shrink[i];
  }
  for (int j = 0; j < keys; j++) {
#pragma omp simd
    for (int i = 0; i < rows; i++) {
      float e = mz_simd_exp(s[j * TILE + i] - top[i]);

      s[j * TILE + i] = e;
      sum[i] += e;
    }
  }
}

MZ_CLONES static float dot_row(const float *restrict x, const float *restrict y,
                               int n)
{
  float sum = 0;

#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < n; i++)
    sum += x[i] * y[i];
  return sum;
}

/* On the diagonal tile: key j is hidden from the queries before it. */
static void hide_later_keys(float *s, int keys)
{
  for (int j = 0; j < keys; j++)
    for (int i = 0; i < j; i++)
      s[j * TILE + i] = -INFINITY;
}

/* The queries [q0, q0 + TILE) of one head. out holds the sum of exp(s - top) v
 * and is scaled when a later tile raises top, and once more at the end. */
static void forward_tile(const mz_attention_t *a, int64_t batch, int32_t head,
                         int q0)
{
  view_t v = view_of(a, batch);
  int32_t kv_head = head / (a->heads / a->kv_heads);
  int d = v.width, rows = tile_extent(q0, v.sequence);
  const float *base = (const float *)a->qkv + v.first_token * v.ld;
  const float *query = base + q0 * v.ld + query_column(a, head);
  float *out = (float *)a->out + (v.first_token + q0) * v.ldo + head * d;
  float *lse = a->lse + head * v.num_tokens + v.first_token + q0;
  _Alignas(LINE) float turned[MAX_WIDTH * TILE], s[TILE * TILE];
  float top[TILE], sum[TILE], shrink[TILE];

  transpose(query, v.ld, rows, d, turned);
  for (int i = 0; i < TILE; i++) {
    top[i] = -INFINITY;
    sum[i] = 0;
  }
  for (int k0 = 0; k0 < q0 + rows; k0 += TILE) {
    int cols = tile_extent(k0, q0 + rows);
    const float *key = base + k0 * v.ld + key_column(a, kv_head);
    const float *value = base + k0 * v.ld + value_column(a, kv_head);

    product(CblasNoTrans, CblasNoTrans, cols, rows, d, v.scale, key, v.ld,
            turned, TILE, 0, s, TILE);
    if (k0 == q0) hide_later_keys(s, cols);
    softmax_tile(s, cols, rows, top, sum, shrink);
    for (int i = 0; i < rows && k0 > 0; i++)
      if (shrink[i] < 1.0f) mz_row_scale(out + i * v.ldo, shrink[i], d);
    product(CblasTrans, CblasNoTrans, rows, d, cols, 1.0f, s, TILE, value, v.ld,
            k0 > 0, out, v.ldo);
  }
  for (int i = 0; i < rows; i++) {
    mz_row_scale(out + i * v.ldo, 1.0f / sum[i], d);
    lse[i] = (float)((double)top[i] + log((double)sum[i]));
  }
}

mz_status_t mz_k_attention_cpu(const mz_kernels_t *kernels,
                               const mz_attention_t *a, mz_stream_t stream)
{
  int64_t heads = (int64_t)a->batch * a->heads;
  int64_t tiles;

  MZ_TRY(
      check_heads(a->batch, a->sequence, a->heads, a->kv_heads, a->head_width));
  tiles = mz_div_up(a->sequence, TILE);
  /* The last queries see the most keys: first they, so that threads end
   * together. */
#pragma omp parallel for schedule(dynamic)
  for (int64_t task = 0; task < tiles * heads; task++) {
    int64_t head = task % heads, tile = tiles - 1 - task / heads;
    forward_tile(a, head / a->heads, (int32_t)(head % a->heads),
                 (int)tile * TILE);
  }
  return MZ_OK;
}

/* p [rows, TILE] := probabilities from scores, dp := gradient of the scores
 * (before the scale) from that of the probabilities: p (dp - delta). */
MZ_CLONES static void grad_tile(float *restrict p, float *restrict dp,
                                const float *restrict lse,
                                const float *restrict delta, int rows, int keys)
{
  for (int i = 0; i < rows; i++) {
    float row_lse = lse[i], row_delta = delta[i];

#pragma omp simd
    for (int j = 0; j < keys; j++) {
      float e = mz_simd_exp(p[i * TILE + j] - row_lse);

      p[i * TILE + j] = e;
      dp[i * TILE + j] = e * (dp[i * TILE + j] - row_delta);
    }
  }
}

/* On the diagonal tile: what query i gave to the keys after it is void. */
static void clear_later_keys(float *x, int keys)
{
  for (int i = 0; i < keys; i++)
    for (int j = i + 1; j < keys; j++)
      x[i * TILE + j] = 0;
}

/* What the tiles of one (sequence, key/value head) share. */
typedef struct grad_view {
  const mz_attention_grad_t *a;
  view_t v;
  int32_t kv_head;
  const float *base;  /* qkv of the sequence */
  float *dbase;       /* dqkv of the sequence */
  float *key, *value; /* [D, TILE] the keys and values at hand, transposed */
} grad_view_t;

/* Adds what queries q0.. of a head give to dq, and to dk, dv of the keys k0...
 * The first contribution of each is written: for dq that of the first keys,
 * for dk and dv that of the first head's diagonal tile. */
static void backward_tile(const grad_view_t *g, int32_t head, int q0, int k0)
{
  const mz_attention_t *f = &g->a->forward;
  const view_t *v = &g->v;
  int d = v->width, rows = tile_extent(q0, v->sequence);
  int cols = tile_extent(k0, v->sequence);
  int32_t first_head = g->kv_head * (f->heads / f->kv_heads);
  int add = !(head == first_head && q0 == k0);
  int64_t at_query = q0 * v->ld + query_column(f, head);
  int64_t at_key = k0 * v->ld + key_column(f, g->kv_head);
  int64_t at_value = k0 * v->ld + value_column(f, g->kv_head);
  int64_t at_stats = head * v->num_tokens + v->first_token + q0;
  const float *dout =
      (const float *)g->a->dout + (v->first_token + q0) * v->ldo + head * d;
  _Alignas(LINE) float p[TILE * TILE], dp[TILE * TILE];

  product(CblasNoTrans, CblasNoTrans, rows, cols, d, v->scale,
          g->base + at_query, v->ld, g->key, TILE, 0, p, TILE);
  product(CblasNoTrans, CblasNoTrans, rows, cols, d, 1.0f, dout, v->ldo,
          g->value, TILE, 0, dp, TILE);
  grad_tile(p, dp, f->lse + at_stats, g->a->delta + at_stats, rows, cols);
  if (q0 == k0) {
    clear_later_keys(p, cols);
    clear_later_keys(dp, cols);
  }
  product(CblasTrans, CblasNoTrans, cols, d, rows, 1.0f, p, TILE, dout, v->ldo,
          add, g->dbase + at_value, v->ld);
  product(CblasTrans, CblasNoTrans, cols, d, rows, v->scale, dp, TILE,
          g->base + at_query, v->ld, add, g->dbase + at_key, v->ld);
  product(CblasNoTrans, CblasNoTrans, rows, d, cols, v->scale, dp, TILE,
          g->base + at_key, v->ld, k0 > 0, g->dbase + at_query, v->ld);
}

/* One thread owns a key/value head of a sequence with all its query heads, so
 * every sum has one order and the scores are computed once. */
static void backward_head(const mz_attention_grad_t *a, int64_t batch,
                          int32_t kv_head)
{
  const mz_attention_t *f = &a->forward;
  view_t v = view_of(f, batch);
  int32_t shared = f->heads / f->kv_heads, head0 = kv_head * shared;
  const float *out = (const float *)f->out + v.first_token * v.ldo;
  const float *dout = (const float *)a->dout + v.first_token * v.ldo;
  _Alignas(LINE) float key[MAX_WIDTH * TILE], value[MAX_WIDTH * TILE];
  grad_view_t g = {a,
                   v,
                   kv_head,
                   (const float *)f->qkv + v.first_token * v.ld,
                   (float *)a->dqkv + v.first_token * v.ld,
                   key,
                   value};

  for (int32_t head = head0; head < head0 + shared; head++)
    for (int i = 0; i < v.sequence; i++) {
      int64_t at = i * v.ldo + head * v.width;
      a->delta[head * v.num_tokens + v.first_token + i] =
          dot_row(out + at, dout + at, v.width);
    }
  for (int k0 = 0; k0 < v.sequence; k0 += TILE) {
    int cols = tile_extent(k0, v.sequence);

    transpose(g.base + k0 * v.ld + key_column(f, kv_head), v.ld, cols, v.width,
              key);
    transpose(g.base + k0 * v.ld + value_column(f, kv_head), v.ld, cols,
              v.width, value);
    for (int32_t head = head0; head < head0 + shared; head++)
      for (int q0 = k0; q0 < v.sequence; q0 += TILE)
        backward_tile(&g, head, q0, k0);
  }
}

mz_status_t mz_k_attention_grad_cpu(const mz_kernels_t *kernels,
                                    const mz_attention_grad_t *a,
                                    mz_stream_t stream)
{
  const mz_attention_t *f = &a->forward;
  int64_t heads = (int64_t)f->batch * f->kv_heads;

  MZ_TRY(
      check_heads(f->batch, f->sequence, f->heads, f->kv_heads, f->head_width));
#pragma omp parallel for schedule(dynamic)
  for (int64_t task = 0; task < heads; task++)
    backward_head(a, task / f->kv_heads, (int32_t)(task % f->kv_heads));
  return MZ_OK;
}

/* Turns the pairs (i, i + D/2), i in [first, first + n), of one head. */
MZ_CLONES static void rotate_pairs(float *restrict low, float *restrict high,
                                   const float *restrict cosine,
                                   const float *restrict sine, int n)
{
#pragma omp simd
  for (int i = 0; i < n; i++) {
    float x = low[i], y = high[i];
    low[i] = x * cosine[i] - y * sine[i];
    high[i] = x * sine[i] + y * cosine[i];
  }
}

/* The pairs [first, first + n) of all heads at one position of a sequence. */
static void rotate_position(const mz_rope_t *a, int position, int first, int n,
                            const double *frequency)
{
  int32_t num_turned = a->heads + a->kv_heads;
  int64_t ld = ((int64_t)num_turned + a->kv_heads) * a->head_width;
  int half = a->head_width / 2;
  float cosine[PAIRS], sine[PAIRS];

  for (int i = 0; i < n; i++) {
    double angle = (double)position * frequency[i];
    cosine[i] = (float)cos(angle);
    sine[i] = (float)(a->inverse ? -sin(angle) : sin(angle));
  }
  for (int64_t b = 0; b < a->batch; b++) {
    float *row = (float *)a->qkv + (b * a->sequence + position) * ld + first;
    for (int32_t head = 0; head < num_turned; head++) {
      float *low = row + (int64_t)head * a->head_width;
      rotate_pairs(low, low + half, cosine, sine, n);
    }
  }
}

mz_status_t mz_k_rope_cpu(const mz_kernels_t *kernels, const mz_rope_t *a,
                          mz_stream_t stream)
{
  int half = a->head_width / 2;
  double frequency[PAIRS];

  MZ_TRY(
      check_heads(a->batch, a->sequence, a->heads, a->kv_heads, a->head_width));
  MZ_REQUIRE(a->head_width % 2 == 0, MZ_ERR_SHAPE,
             "head width %" PRId32 " is odd", a->head_width);
  for (int first = 0; first < half; first += PAIRS) {
    int n = half - first < PAIRS ? half - first : PAIRS;

    for (int i = 0; i < n; i++)
      frequency[i] = pow(a->theta, -2.0 * (first + i) / a->head_width);
#pragma omp parallel for schedule(static)
    for (int position = 0; position < a->sequence; position++)
      rotate_position(a, position, first, n, frequency);
  }
  return MZ_OK;
}
