/* SPDX-License-Identifier: Apache-2.0 */
/* The bf16 table against the fp32 one: products, norms, attention, head. */
#include "bf16_test.h"

/* --- linear maps: groups of 10, 0 and 14 rows --- */

static const int32_t offsets[] = {0, 10, 10, 24};

typedef struct weights {
  pair_t w[3], b[3];
  const void *half_w[3], *full_w[3], *half_b[3], *full_b[3];
} weights_t;

static void make_weights(weights_t *x)
{
  for (uint32_t g = 0; g < 3; g++) {
    x->w[g] = pair(N * H, 10 + g, 0.3);
    x->b[g] = pair(N, 20 + g, 1);
    x->half_w[g] = x->w[g].half;
    x->full_w[g] = x->w[g].full;
    x->half_b[g] = x->b[g].half;
    x->full_b[g] = x->b[g].full;
  }
}

static void check_linear(void)
{
  weights_t w;
  pair_t x = pair(T * H, 1, 1), y = pair(T * N, 2, 1), pre = pair(T * N, 3, 1);
  mz_linear_t a = {3,    false, offsets, offsets, T,           N,   H,
                   NULL, NULL,  NULL,    NULL,    MZ_EPI_GELU, NULL};
  mz_linear_t b = a;

  make_weights(&w);
  a.w = w.full_w, a.b = w.full_b, a.x = x.full, a.y = y.full;
  b.w = w.half_w, b.b = w.half_b, b.x = x.half, b.y = y.half;
  a.pre = pre.full;
  b.pre = pre.half;
  RUN_BOTH(linear, a, b);
  expect_rounded("y", &y);
  expect_rounded("pre", &pre);
  a.b = b.b = NULL;
  a.epilogue = b.epilogue = MZ_EPI_NONE;
  RUN_BOTH(linear, a, b);
  expect_rounded("y without bias", &y);
}

static void check_dgrad(void)
{
  weights_t w;
  pair_t dy = pair(T * N, 1, 1), dx = pair(T * H, 2, 1),
         pre = pair(T * H, 3, 1);
  mz_linear_dgrad_t a = {.num_groups = 3,
                         .offsets = offsets,
                         .max_rows = T,
                         .n = N,
                         .k = H,
                         .add = 1};
  mz_linear_dgrad_t b = a;

  make_weights(&w);
  a.w = w.full_w, a.dy = dy.full, a.dx = dx.full, a.pre = pre.full;
  b.w = w.half_w, b.dy = dy.half, b.dx = dx.half, b.pre = pre.half;
  RUN_BOTH(linear_dgrad, a, b);
  expect_rounded("dx added to", &dx);
  a.add = b.add = 0;
  a.epilogue = b.epilogue = MZ_EPI_DGELU;
  RUN_BOTH(linear_dgrad, a, b);
  expect_rounded("dx", &dx);
}

static void check_wgrad(void)
{
  pair_t x = pair(T * H, 1, 1), dy = pair(T * N, 2, 1);
  results_t dw[3], db[3];
  void *full_w[3], *half_w[3], *full_b[3], *half_b[3];
  const uint8_t add[] = {1, 0, 0}, add_bias[] = {0, 0, 1};
  mz_linear_wgrad_t a = {.num_groups = 3,
                         .offsets = offsets,
                         .max_rows = T,
                         .n = N,
                         .k = H,
                         .accumulate = add,
                         .accumulate_bias = add_bias};
  mz_linear_wgrad_t b;

  for (uint32_t g = 0; g < 3; g++) {
    dw[g] = results(N * H, 30 + g);
    db[g] = results(N, 40 + g);
    full_w[g] = dw[g].of_fp32;
    half_w[g] = dw[g].of_bf16;
    full_b[g] = db[g].of_fp32;
    half_b[g] = db[g].of_bf16;
  }
  b = a;
  a.x = x.full, a.dy = dy.full, a.dw = full_w, a.db = full_b;
  b.x = x.half, b.dy = dy.half, b.dw = half_w, b.db = half_b;
  RUN_BOTH(linear_wgrad, a, b);
  for (int g = 0; g < 3; g++) {
    expect_same_sums("dw", &dw[g]);
    expect_same_sums("db", &db[g]);
  }
  cr_assert_eq(dw[1].of_bf16[7], 0, "a group without rows");
}

static void check_activations(void)
{
  const int32_t rows = T;
  pair_t gate = pair(T * H, 1, 2), up = pair(T * H, 2, 1);
  pair_t out = pair(T * H, 3, 1), da = pair(T * H, 4, 1);
  mz_gelu_t g = {&rows, T, H, gate.full, out.full}, h = g;
  mz_swiglu_t a = {.rows = &rows, .max_rows = T, .width = H}, b = a;

  h.pre = gate.half;
  h.a = out.half;
  RUN_BOTH(gelu, g, h);
  expect_rounded("gelu", &out);
  a.gate = a.dgate = gate.full, a.up = a.dup = up.full, a.a = out.full;
  b.gate = b.dgate = gate.half, b.up = b.dup = up.half, b.a = out.half;
  a.da = da.full;
  b.da = da.half;
  RUN_BOTH(swiglu, a, b);
  expect_rounded("swiglu", &out);
  a.a = da.full; /* the gradient's place */
  b.a = da.half;
  RUN_BOTH(swiglu_grad, a, b);
  expect_rounded("dgate", &gate);
  expect_rounded("dup", &up);
  expect_rounded("a again", &da);
}

/* --- attention: 4 sequences, 6 heads of 12, 2 key/value heads --- */

static void check_attention(void)
{
  enum { A = 6, G = 2, D = 12, WIDE = (A + 2 * G) * D, OUT = A * D };
  pair_t qkv = pair(T * WIDE, 1, 1), out = pair(T * OUT, 2, 1);
  pair_t dout = pair(T * OUT, 3, 1), dqkv = pair(T * WIDE, 4, 1);
  results_t lse = results(A * T, 5), delta = results(A * T, 6);
  mz_attention_t a = {T / S, S, A, G, D, qkv.full, out.full, lse.of_fp32};
  mz_attention_t b = {T / S, S, A, G, D, qkv.half, out.half, lse.of_bf16};
  mz_attention_grad_t da = {a, dout.full, dqkv.full, delta.of_fp32};
  mz_attention_grad_t db = {b, dout.half, dqkv.half, delta.of_bf16};
  mz_rope_t ra = {T / S, S, A, G, D, 1e4, 0, qkv.full}, rb = ra;

  RUN_BOTH(attention, a, b);
  expect_rounded("out", &out);
  expect_same_sums("lse", &lse);
  mz_cpu_widen(MZ_BF16, out.full, out.half, 0, out.n);
  RUN_BOTH(attention_grad, da, db);
  expect_rounded("dqkv", &dqkv);
  rb.qkv = qkv.half;
  RUN_BOTH(rope, ra, rb);
  expect_rounded("rope", &qkv);
}

/* --- norm and dropout --- */

static const int64_t samples[T / S] = {3, 0, 7, 2};

static void check_norm(mz_norm_kind_t kind, double p)
{
  mz_dropout_t dropout = {p, mz_random_make(1, 2, 3, 4), samples, S};
  pair_t x = pair(T * H, 1, 1), y = pair(T * H, 2, 1), sum = pair(T * H, 3, 1);
  pair_t h = pair(T * H, 4, 1), w = pair(H, 5, 1), bias = pair(H, 6, 1);
  results_t mean = results(T, 7), rstd = results(T, 8);
  mz_add_norm_t a = {
      kind,     T,      H,      1e-5,      x.full,       y.full,      dropout,
      sum.full, h.full, w.full, bias.full, mean.of_fp32, rstd.of_fp32};
  mz_add_norm_t b = {
      kind,     T,      H,      1e-5,      x.half,       y.half,      dropout,
      sum.half, h.half, w.half, bias.half, mean.of_bf16, rstd.of_bf16};

  RUN_BOTH(add_norm, a, b);
  expect_rounded("sum", &sum);
  expect_rounded("h", &h);
  expect_same_sums("mean", &mean);
  expect_same_sums("rstd", &rstd);
  a.y = b.y = NULL;
  a.sum = b.sum = NULL;
  a.b = b.b = NULL;
  RUN_BOTH(add_norm, a, b);
  expect_rounded("h of x alone", &h);
}

static void check_norm_grad(mz_norm_kind_t kind, double p)
{
  mz_dropout_t dropout = {p, mz_random_make(1, 2, 3, 4), samples, S};
  pair_t sum = pair(T * H, 1, 1), dh = pair(T * H, 2, 1), w = pair(H, 3, 1);
  pair_t d = pair(T * H, 4, 1), dy = pair(T * H, 5, 1);
  results_t mean = results(T, 6), rstd = results(T, 6), dw = results(H, 7);
  results_t db = results(H, 8);
  float *partial = keep(floats(2 * MZ_NORM_PARTIALS * H));
  mz_add_norm_grad_t a = {.kind = kind,
                          .rows = T,
                          .width = H,
                          .mean = mean.of_fp32,
                          .rstd = rstd.of_fp32,
                          .add = kind == MZ_NORM_LAYER,
                          .dropout = dropout,
                          .accumulate_w = kind == MZ_NORM_LAYER,
                          .partial = partial};
  mz_add_norm_grad_t b = a;

  a.sum = sum.full, a.dh = dh.full, a.w = w.full, a.d_sum = d.full;
  b.sum = sum.half, b.dh = dh.half, b.w = w.half, b.d_sum = d.half;
  a.dy = dy.full, a.dw = dw.of_fp32, a.db = db.of_fp32;
  b.dy = dy.half, b.dw = dw.of_bf16, b.db = db.of_bf16;
  RUN_BOTH(add_norm_grad, a, b);
  expect_rounded("d_sum", &d);
  if (p > 0) expect_rounded("dy", &dy);
  expect_same_sums("dw", &dw);
  expect_same_sums("db", &db);
}

static void check_norms(void)
{
  check_norm(MZ_NORM_LAYER, 0.3);
  check_norm(MZ_NORM_RMS, 0);
  check_norm_grad(MZ_NORM_LAYER, 0.3);
  check_norm_grad(MZ_NORM_RMS, 0);
}

static void check_dropout(void)
{
  mz_dropout_t dropout = {0.4, mz_random_make(1, 2, 3, 4), samples, S};
  pair_t x = pair(T * H, 1, 1);
  mz_dropout_apply_t a = {T, H, dropout, x.full}, b = {T, H, dropout, x.half};

  RUN_BOTH(dropout, a, b);
  expect_rounded("x", &x);
}

/* --- embedding and head --- */

static void check_embedding(double p)
{
  mz_dropout_t dropout = {p, mz_random_make(1, 2, 3, 4), samples, S};
  pair_t wte = pair(V * H, 1, 1), wpe = pair(S * H, 2, 1),
         x = pair(T * H, 3, 1);
  results_t dwte = results(V * H, 4), dwpe = results(S * H, 5);
  int32_t tokens[T];
  mz_embedding_t a = {T,      H,        V,        S,       S,
                      tokens, wte.full, wpe.full, dropout, x.full};
  mz_embedding_t b = {T,      H,        V,        S,       S,
                      tokens, wte.half, wpe.half, dropout, x.half};
  mz_embedding_grad_t da = {a, x.full, dwte.of_fp32, dwpe.of_fp32, 1, 0};
  mz_embedding_grad_t db = {b, x.half, dwte.of_bf16, dwpe.of_bf16, 1, 0};

  for (int t = 0; t < T; t++)
    tokens[t] = t * 7 % V;
  RUN_BOTH(embedding, a, b);
  expect_rounded("x", &x);
  mz_cpu_widen(MZ_BF16, x.full, x.half, 0, x.n);
  RUN_BOTH(embedding_grad, da, db);
  expect_same_sums("dwte", &dwte);
  expect_same_sums("dwpe", &dwpe);
}

static void check_xent(void)
{
  pair_t x = pair(T * H, 1, 1), w = pair(V * H, 2, 0.3);
  results_t dw = results(V * H, 3);
  float *logits = keep(floats(7 * V));
  double loss[2] = {1, 1};
  int32_t labels[T];
  mz_xent_t a = {.rows = T,
                 .width = H,
                 .vocab = V,
                 .labels = labels,
                 .scale = 0.1,
                 .accumulate = 1,
                 .chunk_rows = 7,
                 .logits = logits};
  mz_xent_t b = a;

  for (int t = 0; t < T; t++)
    labels[t] = t % 5 ? t * 3 % V : -1;
  a.x = x.full, a.w = w.full, a.loss = &loss[0], a.dw = dw.of_fp32;
  b.x = x.half, b.w = w.half, b.loss = &loss[1], b.dw = dw.of_bf16;
  RUN_BOTH(xent, a, b);
  cr_assert_float_eq(loss[0], loss[1], 1e-5 * loss[0]);
  a.dx = x.full;
  b.dx = x.half;
  RUN_BOTH(xent, a, b);
  cr_assert_float_eq(loss[0], loss[1], 1e-5 * loss[0]);
  expect_rounded("dx", &x);
  expect_same_sums("dw", &dw);
}

static void check_tokens_and_head(void)
{
  check_embedding(0.3);
  check_embedding(0);
  check_xent();
}

BOTH_ROOMS(linear_is_fp32_rounded, check_linear)
BOTH_ROOMS(dgrad_is_fp32_rounded, check_dgrad)
BOTH_ROOMS(wgrad_equals_fp32, check_wgrad)
BOTH_ROOMS(activations_are_fp32_rounded, check_activations)
BOTH_ROOMS(attention_is_fp32_rounded, check_attention)
BOTH_ROOMS(norms_are_fp32_rounded, check_norms)
BOTH_ROOMS(dropout_is_fp32_rounded, check_dropout)
BOTH_ROOMS(embedding_and_head_are_fp32_rounded, check_tokens_and_head)

Test(bf16, nothing_to_do_needs_no_rows, .init = open_tables,
     .fini = close_tables)
{
  const int32_t none[] = {0, 0};
  const uint8_t add[] = {0};
  results_t dw = results(N * H, 1);
  void *dws[] = {dw.of_bf16};
  mz_linear_wgrad_t a = {.num_groups = 1,
                         .offsets = none,
                         .n = N,
                         .k = H,
                         .dw = dws,
                         .accumulate = add};

  cr_assert_eq(bf16->ops->linear_wgrad(bf16, &a, NULL), MZ_OK);
  for (int i = 0; i < N * H; i++)
    cr_assert_eq(dw.of_bf16[i], 0);
}

Test(bf16, too_small_a_workspace_is_named, .init = open_tables,
     .fini = close_tables)
{
  pair_t x = pair(T * H, 1, 1), dx = pair(T * H, 2, 1);
  mz_xent_t a = {.rows = T,
                 .width = H,
                 .vocab = V,
                 .x = x.half,
                 .w = dx.half,
                 .chunk_rows = 1};

  bf16->workspace_bytes = 400;
  cr_assert_eq(bf16->ops->xent(bf16, &a, NULL), MZ_ERR_FIT);
  cr_assert_str_eq(mz_error_message(),
                   "100 floats of workspace are left, 15000 are needed");
  bf16->workspace_bytes = 60400;
  cr_assert_eq(bf16->ops->xent(bf16, &a, NULL), MZ_ERR_FIT);
  cr_assert_str_eq(
      mz_error_message(),
      "100 floats of workspace are left, 1 rows of 300 are needed");
}
