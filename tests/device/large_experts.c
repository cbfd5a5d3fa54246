/* SPDX-License-Identifier: Apache-2.0 */
/* Experts whose weights together are more than 2^31 elements. */
#include "large.h"

#include "base/alloc.h"

#include <math.h>
#include <stdio.h>

enum { EXPERTS = 80, ROWS = 64, INNER = 16384 };

/* G experts of which the last one gets all rows. */
typedef struct experts {
  large_t *l;
  int32_t num;
  char *w[2], *dw[2]; /* [G, INNER, LARGE_WIDTH], [G, LARGE_WIDTH, INNER] */
  char *x, *pre, *a, *y, *dy, *da, *dx;
  int32_t *offsets, host_offsets[EXPERTS + 1];
  void *at_w[2][EXPERTS], *at_dw[2][EXPERTS];
} experts_t;

static const int64_t matrix = (int64_t)LARGE_WIDTH * INNER;

/* Weights of the others are NaN: a wrong pointer is seen. */
static void make_experts(large_t *l, int32_t num, experts_t *e)
{
  *e = (experts_t){.l = l, .num = num};
  e->host_offsets[num] = ROWS;
  for (int i = 0; i < 2; i++) {
    e->w[i] = large_unwritten(l, 2 * matrix * num);
    e->dw[i] = large_unwritten(l, 4 * matrix * num);
    for (int64_t at = 0; at < matrix; at += LARGE_PERIOD)
      large_copy(l, e->w[i] + 2 * (matrix * (num - 1) + at), l->pattern[0],
                 2 * mz_min_i64(LARGE_PERIOD, matrix - at));
    for (int32_t g = 0; g < num; g++) {
      e->at_w[i][g] = e->w[i] + 2 * matrix * g;
      e->at_dw[i][g] = e->dw[i] + 4 * matrix * g;
    }
  }
  e->x = large_pattern(l, MZ_BF16, (int64_t)ROWS * LARGE_WIDTH, 5);
  e->dy = large_pattern(l, MZ_BF16, (int64_t)ROWS * LARGE_WIDTH, 99999);
  e->y = large_unwritten(l, (int64_t)ROWS * LARGE_WIDTH * 2);
  e->dx = large_unwritten(l, (int64_t)ROWS * LARGE_WIDTH * 2);
  e->pre = large_unwritten(l, (int64_t)ROWS * INNER * 2);
  e->a = large_unwritten(l, (int64_t)ROWS * INNER * 2);
  e->da = large_unwritten(l, (int64_t)ROWS * INNER * 2);
  e->offsets = (int32_t *)large_take(l, 4 * (num + 1));
  large_copy(l, e->offsets, e->host_offsets, 4 * (num + 1));
}

static void run_forward(experts_t *e)
{
  mz_kernels_t *k = e->l->kernels;
  mz_linear_t up = {.num_groups = e->num,
                    .offsets = e->offsets,
                    .host_offsets = e->host_offsets,
                    .max_rows = ROWS,
                    .n = INNER,
                    .k = LARGE_WIDTH,
                    .w = (const void *const *)e->at_w[0],
                    .x = e->x,
                    .y = e->a,
                    .epilogue = MZ_EPI_GELU,
                    .pre = e->pre};
  mz_linear_t down = up;

  must(k->ops->linear(k, &up, e->l->device->stream));
  down.n = LARGE_WIDTH;
  down.k = INNER;
  down.w = (const void *const *)e->at_w[1];
  down.x = e->a;
  down.y = e->y;
  down.epilogue = MZ_EPI_NONE;
  down.pre = NULL;
  must(k->ops->linear(k, &down, e->l->device->stream));
}

static void run_weights(experts_t *e, int i, const char *x, const char *dy)
{
  static const uint8_t write[EXPERTS];
  mz_kernels_t *k = e->l->kernels;
  mz_linear_wgrad_t a = {.num_groups = e->num,
                         .offsets = e->offsets,
                         .host_offsets = e->host_offsets,
                         .max_rows = ROWS,
                         .n = i == 0 ? INNER : LARGE_WIDTH,
                         .k = i == 0 ? LARGE_WIDTH : INNER,
                         .x = x,
                         .dy = dy,
                         .dw = e->at_dw[i],
                         .accumulate = write,
                         .accumulate_bias = write};

  must(k->ops->linear_wgrad(k, &a, e->l->device->stream));
}

static void run_backward(experts_t *e)
{
  mz_kernels_t *k = e->l->kernels;
  mz_linear_dgrad_t down = {.num_groups = e->num,
                            .offsets = e->offsets,
                            .host_offsets = e->host_offsets,
                            .max_rows = ROWS,
                            .n = LARGE_WIDTH,
                            .k = INNER,
                            .w = (const void *const *)e->at_w[1],
                            .dy = e->dy,
                            .dx = e->da,
                            .epilogue = MZ_EPI_DGELU,
                            .pre = e->pre};
  mz_linear_dgrad_t up = down;

  must(k->ops->linear_dgrad(k, &down, e->l->device->stream));
  run_weights(e, 1, e->a, e->dy);
  up.n = INNER;
  up.k = LARGE_WIDTH;
  up.w = (const void *const *)e->at_w[0];
  up.dy = e->da;
  up.dx = e->dx;
  up.epilogue = MZ_EPI_NONE;
  up.pre = NULL;
  must(k->ops->linear_dgrad(k, &up, e->l->device->stream));
  run_weights(e, 0, e->x, e->da);
}

/* The last of 80 experts, whose first matrix begins behind element 2^31, equals
 * the same expert alone; gradients of the others are 0. */
void large_check_experts(large_t *l)
{
  const int64_t rows = (int64_t)ROWS * LARGE_WIDTH, part = matrix / 8;
  experts_t many, alone;
  double y, dx, dw = 0;
  bool zeros = true;
  char what[160];

  l->at = 0;
  make_experts(l, EXPERTS, &many);
  make_experts(l, 1, &alone);
  run_forward(&many);
  run_forward(&alone);
  run_backward(&many);
  run_backward(&alone);
  y = large_apart(l, MZ_BF16, many.y, alone.y, rows);
  dx = large_apart(l, MZ_BF16, many.dx, alone.dx, rows);
  for (int i = 0; i < 2; i++) {
    for (int64_t at = 0; at < matrix; at += part)
      dw = fmax(dw, large_apart(l, MZ_F32,
                                (char *)many.at_dw[i][EXPERTS - 1] + 4 * at,
                                (char *)alone.at_dw[i][0] + 4 * at, part));
    for (int g = 0; g < EXPERTS - 1; g += 13) /* 0, 13 ... 65, 78 */
      zeros = large_is_zero(l, many.at_dw[i][g], 4 * part) && zeros;
  }
  snprintf(what, sizeof what,
           "expert %d of %d against itself alone: y %.1e, dx %.1e, dw %.1e "
           "apart; the others' gradients are %s",
           EXPERTS - 1, EXPERTS, y, dx, dw, zeros ? "0" : "NOT 0");
  /* roundings of 2^-9 of outputs; other splits of fp32 sums */
  large_report(l, y <= 1e-2 && dx <= 1e-2 && dw <= 1e-2 && zeros, what);
}
