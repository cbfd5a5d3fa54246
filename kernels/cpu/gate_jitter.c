/* SPDX-License-Identifier: Apache-2.0 */
/* Products of the gate with an input whose every element is times a random
 * factor near 1 (jitter, kernels/gate.h). A tile of it at a time: ROWS tokens,
 * COLUMNS of their channels, so that no copy of x is needed. */
#include "kernels/cpu/gate.h"

#include "base/alloc.h"
#include "kernels/cpu/random.h"

#include <cblas.h>

enum { ROWS = 64, COLUMNS = 256, BLOCKS = COLUMNS / 4 + 1 };

/* The tokens [first, first + rows) of a call's, the channels from column on. */
typedef struct tile {
  int64_t first, rows, column, columns;
} tile_t;

static void make_factors(const mz_random_t *random, float jitter,
                         uint64_t number, int n, float *factors)
{
  uint32_t words[4 * BLOCKS];
  int skip = (int)(number % 4);

  mz_cpu_draw(random, number / 4, (skip + n + 3) / 4, words);
  for (int i = 0; i < n; i++)
    factors[i] = 1.0f + jitter * (2.0f * mz_uniform_of(words[skip + i]) - 1.0f);
}

/* out = x times its factors, or out += that; in and out are rows of in_width
 * and out_width. */
static void apply(const mz_gate_t *a, const tile_t *tile, const float *in,
                  int64_t in_width, float *out, int64_t out_width, int add)
{
#pragma omp parallel for schedule(static) if (tile->rows * tile->columns >=    \
                                              4096)
  for (int64_t r = 0; r < tile->rows; r++) {
    uint64_t number = mz_cpu_gate_number(a, tile->first + r, a->width);
    float factors[COLUMNS];

    make_factors(&a->jitter_random, a->jitter, number + (uint64_t)tile->column,
                 (int)tile->columns, factors);
    for (int64_t c = 0; c < tile->columns; c++)
      out[r * out_width + c] = in[r * in_width + c] * factors[c] +
                               (add ? out[r * out_width + c] : 0.0f);
  }
}

void mz_cpu_jittered_logits(const mz_gate_t *a, int64_t first, int64_t rows,
                            const float *x, const float *w)
{
  int experts = a->num_experts, width = (int)a->width;
  float values[ROWS * COLUMNS];

  for (int64_t r = 0; r < rows; r += ROWS)
    for (int64_t c = 0; c < width; c += COLUMNS) {
      tile_t tile = {first + r, mz_min_i64(ROWS, rows - r), c,
                     mz_min_i64(COLUMNS, width - c)};

      apply(a, &tile, x + r * width + c, width, values, COLUMNS, 0);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)tile.rows,
                  experts, (int)tile.columns, 1.0f, values, COLUMNS, w + c,
                  width, c > 0 ? 1.0f : 0.0f, a->probs + tile.first * experts,
                  experts);
    }
}

void mz_cpu_jittered_products(const mz_gate_grad_t *a, int64_t first,
                              int64_t rows, const float *x, const float *w,
                              float *dx, int accumulate)
{
  const mz_gate_t *f = &a->forward;
  int experts = f->num_experts, width = (int)f->width;
  float values[ROWS * COLUMNS];

  for (int64_t r = 0; r < rows; r += ROWS)
    for (int64_t c = 0; c < width; c += COLUMNS) {
      tile_t tile = {first + r, mz_min_i64(ROWS, rows - r), c,
                     mz_min_i64(COLUMNS, width - c)};
      const float *dlogits = a->dlogits + tile.first * experts;

      apply(f, &tile, x + r * width + c, width, values, COLUMNS, 0);
      cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, experts,
                  (int)tile.columns, (int)tile.rows, 1.0f, dlogits, experts,
                  values, COLUMNS, accumulate || r > 0 ? 1.0f : 0.0f, a->dw + c,
                  width);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)tile.rows,
                  (int)tile.columns, experts, 1.0f, dlogits, experts, w + c,
                  width, 0.0f, values, COLUMNS);
      apply(f, &tile, values, COLUMNS, dx + r * width + c, width, 1);
    }
}
