/* SPDX-License-Identifier: Apache-2.0 */
/* The bf16 table against the fp32 one: gate and dispatch. */
#include "bf16_test.h"

/* Outputs of a gate: of the fp32 table first. */
typedef struct routes {
  float probs[T * E], lse[T], weight[T * K], dlogits[T * E];
  double gap;
  int32_t expert[T * K], row[T * K], kept[E];
  int64_t stats[MZ_STATS_ELEMENTS(E)];
} routes_t;

static mz_gate_t gate_of(routes_t *r, const void *x, const void *w)
{
  mz_gate_t a = {.num_tokens = T,
                 .num_experts = E,
                 .k = K,
                 .width = H,
                 .x = x,
                 .w = w,
                 .capacity = 8,
                 .norm_topk = 1,
                 .probs = r->probs,
                 .lse = r->lse,
                 .expert = r->expert,
                 .weight = r->weight,
                 .row = r->row,
                 .kept = r->kept,
                 .stats = r->stats,
                 .min_gap = &r->gap};

  memset(r, 0, sizeof *r);
  r->gap = INFINITY;
  return a;
}

static void check_gate(void)
{
  static routes_t of_fp32, of_bf16;
  pair_t x = pair(T * H, 1, 1), w = pair(E * H, 2, 0.3), dx = pair(T * H, 3, 1);
  float *d_weight = keep(normals(T * K, 4, 1));
  int64_t counts[E] = {3, 1, 4, 1, 5};
  results_t dw = results(E * H, 5);
  mz_gate_t a = gate_of(&of_fp32, x.full, w.full);
  mz_gate_t b = gate_of(&of_bf16, x.half, w.half);
  mz_gate_grad_t da = {.forward = a,
                       .d_weight = d_weight,
                       .aux_scale = 0.01,
                       .aux_counts = counts,
                       .z_scale = 0.02,
                       .dlogits = of_fp32.dlogits,
                       .dx = dx.full,
                       .dw = dw.of_fp32};
  mz_gate_grad_t db = da;

  RUN_BOTH(gate, a, b);
  cr_assert_arr_eq(of_fp32.expert, of_bf16.expert, sizeof of_fp32.expert);
  cr_assert_arr_eq(of_fp32.row, of_bf16.row, sizeof of_fp32.row);
  cr_assert_arr_eq(of_fp32.kept, of_bf16.kept, sizeof of_fp32.kept);
  expect_near("weight", of_bf16.weight, of_fp32.weight, T * K, 1e-5);
  expect_near("probs", of_bf16.probs, of_fp32.probs, T * E, 1e-5);
  db.forward = b;
  db.dlogits = of_bf16.dlogits;
  db.dx = dx.half;
  db.dw = dw.of_bf16;
  RUN_BOTH(gate_grad, da, db);
  expect_rounded("dx", &dx);
  expect_same_sums("dw", &dw);
}

/* Rows of T tokens, K choices; every fifth route is dropped. */
static int64_t make_rows(int32_t *row)
{
  int64_t rows = 0;

  for (int r = 0; r < T * K; r++)
    row[r] = r % 5 == 4 ? -1 : (int32_t)rows++;
  return rows;
}

static void check_dispatch(void)
{
  int32_t row[T * K];
  int64_t rows = make_rows(row);
  pair_t x = pair(T * H, 1, 1), send = pair(rows * H, 2, 1);
  pair_t y = pair(T * H, 3, 1);
  float *weight = keep(normals(T * K, 4, 1));
  results_t d_weight = results(T * K, 5);
  mz_permute_t pa = {T, H, K, row, x.full, send.full};
  mz_permute_t pb = {T, H, K, row, x.half, send.half};
  mz_permute_grad_t ga = {T, H, K, row, send.full, y.full};
  mz_permute_grad_t gb = {T, H, K, row, send.half, y.half};
  mz_combine_t ca = {T, H, K, row, weight, send.full, y.full};
  mz_combine_t cb = {T, H, K, row, weight, send.half, y.half};
  mz_combine_grad_t da = {ca, x.full, send.full, d_weight.of_fp32};
  mz_combine_grad_t db = {cb, x.half, send.half, d_weight.of_bf16};

  RUN_BOTH(combine, ca, cb);
  expect_rounded("y", &y);
  RUN_BOTH(combine_grad, da, db);
  expect_rounded("d_send", &send);
  expect_same_sums("d_weight", &d_weight);
  mz_cpu_widen(MZ_BF16, send.full, send.half, 0, send.n);
  RUN_BOTH(permute_grad, ga, gb);
  expect_rounded("dx", &y);
  RUN_BOTH(permute, pa, pb);
  expect_rounded("send", &send);
}

static void check_regroup(void)
{
  const int32_t counts[] = {4, 5, 0, 3, 1, 3}, offsets_of[] = {0, 7, 13, 16};
  pair_t x = pair(16 * H, 1, 1), y = pair(16 * H, 2, 1);
  mz_regroup_t a = {2, 3, counts, offsets_of, 16, H, x.full, y.full, 0};
  mz_scale_rows_t sa = {3, 2, offsets_of, 16, H, x.full, y.full};
  mz_regroup_t b = a;
  mz_scale_rows_t sb = sa;

  b.src = x.half;
  b.dst = y.half;
  RUN_BOTH(regroup, a, b);
  expect_rounded("expert-major", &y);
  sb.x = x.half;
  sb.y = y.half;
  RUN_BOTH(scale_rows, sa, sb);
  expect_rounded("scaled", &y);
}

BOTH_ROOMS(gate_chooses_as_fp32, check_gate)
BOTH_ROOMS(dispatch_is_fp32_rounded, check_dispatch)
BOTH_ROOMS(regroup_is_a_copy, check_regroup)
