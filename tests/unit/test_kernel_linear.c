/* SPDX-License-Identifier: Apache-2.0 */
#include "kernel_test.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

enum { MAX_GROUPS = 6 };

typedef struct shape {
  int32_t groups;
  int32_t rows[MAX_GROUPS];
  int64_t n, k;
} shape_t;

/* No row at all, one row, one group of many, empty groups at all places, and
 * more rows and outputs than one task takes. */
static const shape_t shapes[] = {
    {1, {0}, 5, 3},
    {1, {1}, 3, 7},
    {1, {67}, 131, 33},
    {3, {0, 0, 0}, 4, 4},
    {6, {0, 1, 37, 0, 600, 0}, 17, 9},
    {3, {5, 300, 2}, 270, 12},
};
enum { NUM_SHAPES = sizeof shapes / sizeof *shapes };

/* One random problem: y = gelu?(x W^T + b) and its cotangent dy. */
typedef struct problem {
  const shape_t *shape;
  int32_t offsets[MAX_GROUPS + 1];
  int64_t rows, n, k;
  float *x, *dy, *weight, *bias;
  const void *w[MAX_GROUPS], *b[MAX_GROUPS];
  double *x64, *w64, *b64;
} problem_t;

static problem_t setup(const shape_t *shape)
{
  problem_t p = {.shape = shape, .n = shape->n, .k = shape->k};
  int32_t g_count = shape->groups;

  for (int32_t g = 0; g < g_count; g++)
    p.offsets[g + 1] = p.offsets[g] + shape->rows[g];
  p.rows = p.offsets[g_count];
  p.x = normals(p.rows * p.k, 1, 1.0);
  p.dy = normals(p.rows * p.n, 2, 1.0);
  p.weight = normals(g_count * p.n * p.k, 3, 1.0 / sqrt((double)p.k));
  p.bias = normals(g_count * p.n, 4, 0.5);
  for (int32_t g = 0; g < g_count; g++) {
    p.w[g] = p.weight + g * p.n * p.k;
    p.b[g] = p.bias + g * p.n;
  }
  p.x64 = widen(p.x, p.rows * p.k);
  p.w64 = widen(p.weight, g_count * p.n * p.k);
  p.b64 = widen(p.bias, g_count * p.n);
  return p;
}

static void teardown(problem_t *p)
{
  mz_free(p->x);
  mz_free(p->dy);
  mz_free(p->weight);
  mz_free(p->bias);
  mz_free(p->x64);
  mz_free(p->w64);
  mz_free(p->b64);
}

static double gelu(double u)
{
  return 0.5 * u *
         (1 +
          tanh(sqrt(2 / 3.14159265358979323846) * (u + 0.044715 * u * u * u)));
}

static int32_t group_of(const problem_t *p, int64_t row)
{
  int32_t g = 0;
  while (row >= p->offsets[g + 1])
    g++;
  return g;
}

/* u = x W^T + b in double precision. */
static double *reference(const problem_t *p)
{
  double *u = doubles(p->rows * p->n);

  for (int64_t r = 0; r < p->rows; r++) {
    int32_t g = group_of(p, r);
    for (int64_t j = 0; j < p->n; j++) {
      double sum = p->b64[g * p->n + j];
      for (int64_t i = 0; i < p->k; i++)
        sum += p->x64[r * p->k + i] * p->w64[(g * p->n + j) * p->k + i];
      u[r * p->n + j] = sum;
    }
  }
  return u;
}

static double loss_of(const void *context)
{
  const problem_t *p = context;
  double *u = reference(p);
  double sum = dot(p->dy, u, p->rows * p->n);

  mz_free(u);
  return sum;
}

/* The loss of y = gelu(x) W^T as a function of x. */
static double gelu_loss_of(const void *context)
{
  problem_t p = *(const problem_t *)context;
  int64_t n = p.rows * p.k;
  double sum;

  p.x64 = doubles(n);
  for (int64_t i = 0; i < n; i++)
    p.x64[i] = gelu(((const problem_t *)context)->x64[i]);
  sum = loss_of(&p);
  mz_free(p.x64);
  return sum;
}

/* Sums of m products of normal numbers in fp32: each of m additions errs by at
 * most 2^-24 of a partial sum, which stays below 4 sqrt(m) but for one in
 * 10^4; errors mostly cancel, so half of the worst case is ample. */
static double sum_bound(int64_t m, double sigma)
{
  return 0x1p-24 * (double)(m + 4) * 2 * sqrt((double)m + 1) * sigma;
}

static void check_forward(const shape_t *shape)
{
  problem_t p = setup(shape);
  int64_t size = p.rows * p.n;
  float *y = floats(size), *pre = floats(size), *again = floats(size);
  double *u = reference(&p);
  double bound = sum_bound(p.k, 1 / sqrt((double)p.k)) + 1e-6;
  mz_linear_t a = {.num_groups = shape->groups,
                   .offsets = p.offsets,
                   .max_rows = p.rows,
                   .n = p.n,
                   .k = p.k,
                   .w = p.w,
                   .b = p.b,
                   .x = p.x,
                   .y = y,
                   .pre = pre};

  cr_assert_eq(mz_k_linear_cpu(NULL, &a, NULL), MZ_OK);
  expect_close("y", y, u, size, bound);
  a.epilogue = MZ_EPI_GELU;
  cr_assert_eq(mz_k_linear_cpu(NULL, &a, NULL), MZ_OK);
  expect_close("pre", pre, u, size, bound);
  a.y = again;
  cr_assert_eq(mz_k_linear_cpu(NULL, &a, NULL), MZ_OK);
  expect_same_bits("y", y, again, size);
  for (int64_t i = 0; i < size; i++)
    u[i] = gelu(u[i]);
  expect_close("gelu", y, u, size, 1.13 * bound); /* slope of gelu <= 1.13 */

  memset(p.b64, 0, (size_t)(shape->groups * p.n) * sizeof *p.b64);
  mz_free(u);
  u = reference(&p);
  a.b = NULL;
  a.epilogue = MZ_EPI_NONE;
  cr_assert_eq(mz_k_linear_cpu(NULL, &a, NULL), MZ_OK);
  expect_close("y without bias", again, u, size, bound);
  mz_free(y);
  mz_free(pre);
  mz_free(again);
  mz_free(u);
  teardown(&p);
}

Test(linear, equals_double_precision_on_ragged_groups)
{
  for (int threads = 1; threads <= 2; threads++) {
    omp_set_num_threads(threads);
    for (int s = 0; s < NUM_SHAPES; s++)
      check_forward(&shapes[s]);
  }
}

static void check_dgrad(const shape_t *shape)
{
  problem_t p = setup(shape);
  int64_t size = p.rows * p.k;
  float *dx = floats(size), *again = normals(size, 9, 1.0);
  float *old = copy_of(again, size);
  double bound = sum_bound(p.n, 1 / sqrt((double)p.k)) + 1e-6;
  mz_linear_dgrad_t a = {.num_groups = shape->groups,
                         .offsets = p.offsets,
                         .max_rows = p.rows,
                         .n = p.n,
                         .k = p.k,
                         .w = p.w,
                         .dy = p.dy,
                         .dx = dx};

  cr_assert_eq(mz_k_linear_dgrad_cpu(NULL, &a, NULL), MZ_OK);
  expect_gradient("dx", loss_of, &p, p.x64, size, dx, bound);
  a.add = 1;
  a.dx = again;
  cr_assert_eq(mz_k_linear_dgrad_cpu(NULL, &a, NULL), MZ_OK);
  for (int64_t i = 0; i < size; i++)
    cr_assert(fabsf(again[i] - (old[i] + dx[i])) <= (float)bound);
  a.add = 0;
  a.epilogue = MZ_EPI_DGELU;
  a.pre = p.x;
  cr_assert_eq(mz_k_linear_dgrad_cpu(NULL, &a, NULL), MZ_OK);
  expect_gradient("dx through gelu", gelu_loss_of, &p, p.x64, size, again,
                  1.13 * bound + 1e-6);
  a.dx = old;
  cr_assert_eq(mz_k_linear_dgrad_cpu(NULL, &a, NULL), MZ_OK);
  expect_same_bits("dx", again, old, size);
  mz_free(dx);
  mz_free(again);
  mz_free(old);
  teardown(&p);
}

Test(linear_dgrad, equals_central_differences_with_and_without_gelu)
{
  for (int threads = 1; threads <= 2; threads++) {
    omp_set_num_threads(threads);
    for (int s = 0; s < NUM_SHAPES; s++)
      check_dgrad(&shapes[s]);
  }
}

/* Every second group accumulates, on dw and, the other way round, on db. */
static void check_wgrad(const shape_t *shape)
{
  problem_t p = setup(shape);
  int64_t size = p.n * p.k;
  int32_t groups = shape->groups;
  uint8_t accumulate[MAX_GROUPS], accumulate_bias[MAX_GROUPS];
  float *dw = normals(groups * size, 5, 1.0);
  float *db = normals(groups * p.n, 6, 1.0);
  float *old_w = copy_of(dw, groups * size), *old_b = copy_of(db, groups * p.n);
  float *new_w = copy_of(dw, groups * size), *new_b = copy_of(db, groups * p.n);
  void *dws[2][MAX_GROUPS], *dbs[2][MAX_GROUPS];
  double bound = sum_bound(p.rows, 1.0) + 1e-6;
  mz_linear_wgrad_t a = {.num_groups = groups,
                         .offsets = p.offsets,
                         .max_rows = p.rows,
                         .n = p.n,
                         .k = p.k,
                         .x = p.x,
                         .dy = p.dy,
                         .dw = dws[0],
                         .db = dbs[0],
                         .accumulate = accumulate,
                         .accumulate_bias = accumulate_bias};

  for (int32_t g = 0; g < groups; g++) {
    accumulate[g] = (uint8_t)(g & 1);
    accumulate_bias[g] = !accumulate[g];
    dws[0][g] = dw + g * size;
    dbs[0][g] = db + g * p.n;
    dws[1][g] = new_w + g * size;
    dbs[1][g] = new_b + g * p.n;
  }
  cr_assert_eq(mz_k_linear_wgrad_cpu(NULL, &a, NULL), MZ_OK);
  a.dw = dws[1];
  a.db = dbs[1];
  cr_assert_eq(mz_k_linear_wgrad_cpu(NULL, &a, NULL), MZ_OK);
  expect_same_bits("dw", dw, new_w, groups * size);
  expect_same_bits("db", db, new_b, groups * p.n);
  for (int32_t g = 0; g < groups; g++) {
    for (int64_t i = 0; i < size && accumulate[g]; i++)
      dw[g * size + i] -= old_w[g * size + i];
    for (int64_t i = 0; i < p.n && accumulate_bias[g]; i++)
      db[g * p.n + i] -= old_b[g * p.n + i];
  }
  expect_gradient("dw", loss_of, &p, p.w64, groups * size, dw, bound);
  expect_gradient("db", loss_of, &p, p.b64, groups * p.n, db, bound);
  memcpy(new_w, old_w, (size_t)(groups * size) * sizeof *new_w);
  memcpy(new_b, old_b, (size_t)(groups * p.n) * sizeof *new_b);
  a.db = NULL;
  cr_assert_eq(mz_k_linear_wgrad_cpu(NULL, &a, NULL), MZ_OK);
  expect_same_bits("db without bias", new_b, old_b, groups * p.n);
  mz_free(dw);
  mz_free(db);
  mz_free(old_w);
  mz_free(old_b);
  mz_free(new_w);
  mz_free(new_b);
  teardown(&p);
}

Test(linear_wgrad, equals_central_differences_and_accumulates_as_told)
{
  for (int threads = 1; threads <= 2; threads++) {
    omp_set_num_threads(threads);
    for (int s = 0; s < NUM_SHAPES; s++)
      check_wgrad(&shapes[s]);
  }
}

/* All three products of groups first.. of p; results lie where they lie when
 * all groups are computed together. */
static void run_experts(const problem_t *p, int32_t first, int32_t num,
                        float *y, float *dx, float *dw)
{
  int64_t row = p->offsets[first];
  int32_t offsets[MAX_GROUPS + 1];
  const uint8_t fresh[MAX_GROUPS] = {0};
  void *dws[MAX_GROUPS];
  mz_linear_t forward = {.num_groups = num,
                         .experts = true,
                         .offsets = offsets,
                         .max_rows = p->rows,
                         .n = p->n,
                         .k = p->k,
                         .w = p->w + first,
                         .b = p->b + first,
                         .x = p->x + row * p->k,
                         .y = y + row * p->n};
  mz_linear_dgrad_t dgrad = {.num_groups = num,
                             .experts = true,
                             .offsets = offsets,
                             .max_rows = p->rows,
                             .n = p->n,
                             .k = p->k,
                             .w = p->w + first,
                             .dy = p->dy + row * p->n,
                             .dx = dx + row * p->k};
  mz_linear_wgrad_t wgrad = {.num_groups = num,
                             .experts = true,
                             .offsets = offsets,
                             .max_rows = p->rows,
                             .n = p->n,
                             .k = p->k,
                             .x = forward.x,
                             .dy = dgrad.dy,
                             .dw = dws,
                             .accumulate = fresh};

  for (int32_t g = 0; g <= num; g++)
    offsets[g] = p->offsets[first + g] - p->offsets[first];
  for (int32_t g = 0; g < num; g++)
    dws[g] = dw + (first + g) * p->n * p->k;
  cr_assert_eq(mz_k_linear_cpu(NULL, &forward, NULL), MZ_OK);
  cr_assert_eq(mz_k_linear_dgrad_cpu(NULL, &dgrad, NULL), MZ_OK);
  cr_assert_eq(mz_k_linear_wgrad_cpu(NULL, &wgrad, NULL), MZ_OK);
}

/* Runs of experts are cut for the exchange's sake. */
Test(linear, an_expert_has_the_same_bits_alone_and_among_others)
{
  static const shape_t shape = {3, {300, 290, 600}, 270, 96};
  problem_t p = setup(&shape);
  int64_t y_size = p.rows * p.n, x_size = p.rows * p.k;
  int64_t w_size = shape.groups * p.n * p.k;
  float *y[2], *dx[2], *dw[2];

  for (int i = 0; i < 2; i++) {
    y[i] = floats(y_size);
    dx[i] = floats(x_size);
    dw[i] = floats(w_size);
  }
  run_experts(&p, 0, shape.groups, y[0], dx[0], dw[0]);
  for (int32_t g = 0; g < shape.groups; g++)
    run_experts(&p, g, 1, y[1], dx[1], dw[1]);
  expect_same_bits("y", y[0], y[1], y_size);
  expect_same_bits("dx", dx[0], dx[1], x_size);
  expect_same_bits("dw", dw[0], dw[1], w_size);
  for (int i = 0; i < 2; i++) {
    mz_free(y[i]);
    mz_free(dx[i]);
    mz_free(dw[i]);
  }
  teardown(&p);
}

Test(linear_wgrad, writes_zeros_for_groups_without_rows)
{
  problem_t p = setup(&shapes[3]);
  float dw[48], db[12];
  void *dws[] = {dw, dw + 16, dw + 32}, *dbs[] = {db, db + 4, db + 8};
  uint8_t accumulate[] = {0, 0, 1};
  mz_linear_wgrad_t a = {3,   false, p.offsets,  p.offsets, 0, 4, 4, p.x, p.dy,
                         dws, dbs,   accumulate, accumulate};

  for (int i = 0; i < 48; i++)
    dw[i] = db[i / 4] = 1;
  cr_assert_eq(mz_k_linear_wgrad_cpu(NULL, &a, NULL), MZ_OK);
  for (int i = 0; i < 48; i++) {
    cr_assert_eq(dw[i], i < 32 ? 0.0f : 1.0f);
    cr_assert_eq(db[i / 4], i < 32 ? 0.0f : 1.0f);
  }
  teardown(&p);
}

Test(linear, refuses_offsets_beyond_the_bound_and_wrong_epilogues)
{
  problem_t p = setup(&shapes[4]);
  mz_linear_t a = {.num_groups = 6,
                   .offsets = p.offsets,
                   .max_rows = p.rows - 1,
                   .n = p.n,
                   .k = p.k};
  mz_linear_dgrad_t d = {.num_groups = 6,
                         .offsets = p.offsets,
                         .max_rows = p.rows,
                         .n = p.n,
                         .k = p.k,
                         .epilogue = MZ_EPI_DGELU,
                         .add = 1};

  cr_assert_eq(mz_k_linear_cpu(NULL, &a, NULL), MZ_ERR_ARG);
  cr_assert_str_eq(mz_error_message(), "638 rows, bound 637");
  a.max_rows = p.rows;
  a.epilogue = MZ_EPI_DGELU;
  cr_assert_eq(mz_k_linear_cpu(NULL, &a, NULL), MZ_ERR_ARG);
  cr_assert_eq(mz_k_linear_dgrad_cpu(NULL, &d, NULL), MZ_ERR_ARG);
  d.epilogue = MZ_EPI_GELU;
  cr_assert_eq(mz_k_linear_dgrad_cpu(NULL, &d, NULL), MZ_ERR_ARG);
  p.offsets[2] = -1;
  cr_assert_eq(mz_k_linear_dgrad_cpu(NULL, &d, NULL), MZ_ERR_ARG);
  d.n = INT64_C(1) << 31;
  p.offsets[2] = 1;
  cr_assert_eq(mz_k_linear_dgrad_cpu(NULL, &d, NULL), MZ_ERR_OVERFLOW);
  teardown(&p);
}

/* fp32: a handful of roundings, each 6e-8 of a factor of the result. */
static const double few_roundings = 8e-7;

Test(gelu, equals_double_precision_on_as_many_rows_as_told)
{
  int64_t width = 77, max_rows = 131;
  int32_t rows = 130;
  float *pre = normals(max_rows * width, 11, 3.0),
        *a = floats(max_rows * width);
  mz_gelu_t args = {&rows, max_rows, width, pre, a};

  pre[0] = 100;
  pre[1] = -100;
  pre[2] = 1e4f;
  pre[3] = -1e4f;
  pre[4] = 0;
  cr_assert_eq(mz_k_gelu_cpu(NULL, &args, NULL), MZ_OK);
  for (int64_t i = 0; i < rows * width; i++) {
    double want = gelu((double)pre[i]);
    double size = 1 + fabs((double)pre[i]);
    cr_assert(fabs((double)a[i] - want) <= few_roundings * size, "gelu(%g)",
              (double)pre[i]);
  }
  for (int64_t i = rows * width; i < max_rows * width; i++)
    cr_assert_eq(a[i], 0.0f);
  rows = 132;
  cr_assert_eq(mz_k_gelu_cpu(NULL, &args, NULL), MZ_ERR_ARG);
  mz_free(pre);
  mz_free(a);
}

typedef struct glu {
  int64_t n;
  double *gate, *up;
  float *da;
} glu_t;

static double glu_loss(const void *context)
{
  const glu_t *g = context;
  double sum = 0;

  for (int64_t i = 0; i < g->n; i++)
    sum += (double)g->da[i] * g->up[i] * g->gate[i] / (1 + exp(-g->gate[i]));
  return sum;
}

Test(swiglu, forward_and_backward_also_in_place)
{
  int64_t width = 67, n = 130 * width;
  int32_t rows = 130;
  float *gate = normals(n, 12, 2.0), *up = normals(n, 13, 1.0);
  float *a = floats(n), *dgate = floats(n), *dup = floats(n);
  float *again = normals(n, 14, 1.0);
  glu_t g = {n, widen(gate, n), widen(up, n), normals(n, 14, 1.0)};
  mz_swiglu_t args = {&rows, rows, width, gate, up, a, g.da, dgate, dup};

  cr_assert_eq(mz_k_swiglu_cpu(NULL, &args, NULL), MZ_OK);
  for (int64_t i = 0; i < n; i++) {
    double want = g.up[i] * g.gate[i] / (1 + exp(-g.gate[i]));
    cr_assert(fabs((double)a[i] - want) <= few_roundings * (1 + fabs(want)));
  }
  args.a = again; /* begins as da */
  args.da = again;
  cr_assert_eq(mz_k_swiglu_grad_cpu(NULL, &args, NULL), MZ_OK);
  expect_same_bits("a again", a, again, n);
  args.da = g.da;
  /* factors up to 4 and 8 in n numbers */
  expect_gradient("dgate", glu_loss, &g, g.gate, n, dgate, 1e-5);
  expect_gradient("dup", glu_loss, &g, g.up, n, dup, 1e-5);
  args.dgate = gate;
  args.dup = up;
  cr_assert_eq(mz_k_swiglu_grad_cpu(NULL, &args, NULL), MZ_OK);
  expect_same_bits("dgate", dgate, gate, n);
  expect_same_bits("dup", dup, up, n);
  rows = -1;
  cr_assert_eq(mz_k_swiglu_cpu(NULL, &args, NULL), MZ_ERR_ARG);
  cr_assert_eq(mz_k_swiglu_grad_cpu(NULL, &args, NULL), MZ_ERR_ARG);
  mz_free(gate);
  mz_free(up);
  mz_free(a);
  mz_free(dgate);
  mz_free(dup);
  mz_free(again);
  mz_free(g.gate);
  mz_free(g.up);
  mz_free(g.da);
}

Test(simd_exp, relative_error_below_2e_7_and_ends_are_exact)
{
  double worst = 0;

  for (int32_t i = -870000; i <= 870000; i++) {
    float x = (float)i * 1e-4f;
    double want = exp((double)x);
    worst = fmax(worst, fabs((double)mz_simd_exp(x) - want) / want);
  }
  cr_assert(worst < 2e-7, "worst relative error %g", worst);
  cr_assert_eq(mz_simd_exp(0.0f), 1.0f);
  cr_assert_eq(mz_simd_exp(-INFINITY), 0.0f);
  cr_assert_eq(mz_simd_exp(-87.1f), 0.0f);
  cr_assert_eq(mz_simd_exp(INFINITY), mz_simd_exp(87.0f));
  cr_assert(isnan(mz_simd_exp(NAN)));
}
