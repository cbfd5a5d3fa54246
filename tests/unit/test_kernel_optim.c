/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW, the sums over ranks and elements, the orders and the conversions on
 * the CPU. */
#include "base/alloc.h"
#include "kernels/cpu/cpu.h"

#include <criterion/criterion.h>
#include <math.h>
#include <moezero/random.h>
#include <omp.h>
#include <string.h>

/* Element i of the numbers that new_floats(n, seed) gives. */
static float value_at(uint32_t seed, int64_t i)
{
  mz_random_t r = {seed, 0, 0};

  return 2.0f * mz_random_uniform(&r, (uint64_t)i) - 1.0f;
}

static float *new_floats(int64_t n, uint32_t seed)
{
  float *x = NULL;

  cr_assert_eq(mz_new(n, "floats", &x), MZ_OK);
  for (int64_t i = 0; i < n; i++)
    x[i] = value_at(seed, i);
  return x;
}

static const float ONE = 1.0f;

/* One call on one stretch of one group. */
typedef struct one {
  mz_adamw_t a;
  mz_stretch_t stretch;
  mz_adamw_group_t group;
} one_t;

static one_t options(int64_t n, float *w, float *m, float *v, const float *grad)
{
  one_t o = {.a = {.num_stretches = 1,
                   .num_groups = 1,
                   .factor = &ONE,
                   .t = 1,
                   .bias_correction = 1},
             .stretch = {.n = (int32_t)n, .w = w, .m = m, .v = v, .grad = grad},
             .group = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}};
  return o;
}

static mz_status_t step(one_t *o)
{
  o->a.stretches = &o->stretch;
  o->a.groups = &o->group;
  return mz_k_adamw_cpu(NULL, &o->a, NULL);
}

/* One parameter of 1, gradients 1 and 2. */
static void check_trace(double decay, int l2, double first, double second)
{
  float w = 1, m = 0, v = 0, grad = 1;
  one_t o = options(1, &w, &m, &v, &grad);

  o.group.decay = decay;
  o.a.l2 = l2;
  cr_assert_eq(step(&o), MZ_OK);
  cr_assert_float_eq(w, first, 1e-6);
  grad = 2;
  o.a.t = 2;
  cr_assert_eq(step(&o), MZ_OK);
  cr_assert_float_eq(w, second, 1e-6);
}

Test(adamw, published_traces_of_one_parameter)
{
  check_trace(0.0, 0, 0.900000001, 0.803481799);
  check_trace(0.1, 0, 0.890000001, 0.784581799);
  check_trace(0.1, 1, 0.900000001, 0.802947335);
}

/* A step counter kept by tile, or shared by tiles, shows as 0.6491 or 0.7488
 * after three steps. */
Test(adamw, tiles_of_one_step_share_its_number)
{
  enum { N = 3 * 5000 };
  float *w = new_floats(N, 1), *m = new_floats(N, 1), *v = new_floats(N, 1);
  float *grad = new_floats(N, 1);

  for (int threads = 1; threads <= 8; threads += 7) {
    omp_set_num_threads(threads);
    for (int i = 0; i < N; i++) {
      w[i] = grad[i] = 1.0f;
      m[i] = v[i] = 0.0f;
    }
    for (int t = 1; t <= 4; t++) {
      for (int tile = 0; tile < N; tile += 5000) {
        one_t o = options(5000, w + tile, m + tile, v + tile, grad + tile);

        o.a.t = t;
        cr_assert_eq(step(&o), MZ_OK);
      }
      for (int i = 0; t >= 3 && i < N; i++)
        cr_assert_float_eq(w[i], t == 3 ? 0.7 : 0.6, 1e-6);
    }
  }
  mz_free(w);
  mz_free(m);
  mz_free(v);
  mz_free(grad);
}

/* The same step in double. */
static void reference_step(const one_t *o, double *w, double *m, double *v,
                           double grad)
{
  const mz_adamw_t *a = &o->a;
  const mz_adamw_group_t *p = &o->group;
  double g = (double)*a->factor * grad + (a->l2 ? p->decay * *w : 0.0);
  double c1 = a->bias_correction ? 1.0 - pow(p->beta1, (double)a->t) : 1.0;
  double c2 = a->bias_correction ? 1.0 - pow(p->beta2, (double)a->t) : 1.0;

  *m = p->beta1 * *m + (1.0 - p->beta1) * g;
  *v = p->beta2 * *v + (1.0 - p->beta2) * g * g;
  *w -= p->lr *
        (*m / c1 / (sqrt(*v / c2) + p->eps) + (a->l2 ? 0.0 : p->decay * *w));
}

static void check_steps(int64_t n, int l2, int bias_correction)
{
  float *w = new_floats(n, 1), *m = new_floats(n, 2), *v = new_floats(n, 3);
  float *grad = new_floats(n, 4), factor = 0.37f;
  uint16_t *out = NULL;
  one_t o = options(n, w, m, v, grad);

  cr_assert_eq(mz_new(n, "out", &out), MZ_OK);
  o.a.factor = &factor;
  o.group.decay = 0.05;
  o.group.lr = 0.02;
  o.group.eps = 1e-3;
  o.a.t = 7;
  o.a.l2 = l2;
  o.a.bias_correction = bias_correction;
  o.stretch.out = out;
  o.a.out_dtype = MZ_BF16;
  for (int64_t i = 0; i < n; i++)
    v[i] = fabsf(v[i]);
  cr_assert_eq(step(&o), MZ_OK);
  for (int64_t i = 0; i < n; i++) {
    double wr = (double)value_at(1, i), mr = (double)value_at(2, i);
    double vr = fabs((double)value_at(3, i));
    uint32_t bits = (uint32_t)out[i] << 16;
    float copy;

    reference_step(&o, &wr, &mr, &vr, (double)grad[i]);
    cr_assert_float_eq(w[i], wr, 1e-6);
    cr_assert_float_eq(m[i], mr, 1e-6);
    cr_assert_float_eq(v[i], vr, 1e-6);
    memcpy(&copy, &bits, sizeof copy);
    cr_assert_float_eq(copy, w[i], fabs((double)w[i]) / 256 + 1e-9);
  }
  mz_free(w);
  mz_free(m);
  mz_free(v);
  mz_free(grad);
  mz_free(out);
}

Test(adamw, equals_the_formula_in_double)
{
  static const int64_t sizes[] = {0, 1, 17, 2048, 5003};

  for (int i = 0; i < 5; i++)
    for (int l2 = 0; l2 <= 1; l2++)
      for (int correction = 0; correction <= 1; correction++)
        check_steps(sizes[i], l2, correction);
}

Test(adamw, refuses_a_step_zero_and_a_strange_output)
{
  float x = 1;
  one_t o = options(1, &x, &x, &x, &x);

  o.a.t = 0;
  cr_assert_eq(step(&o), MZ_ERR_ARG);
  o.a.t = 1;
  o.stretch.out = &x;
  o.a.out_dtype = MZ_I64;
  cr_assert_eq(step(&o), MZ_ERR_UNSUPPORTED);
}

static void check_reduce(int64_t n, int32_t ranks, int accumulate)
{
  int64_t stride = n + 3;
  float *in = new_floats(ranks * stride, 1), *out = new_floats(n, 2);
  float *before = new_floats(n, 2);
  mz_reduce_ranks_t a = {ranks, n,          stride, in, MZ_F32,
                         out,   accumulate, NULL,   0};

  cr_assert_eq(mz_k_reduce_ranks_cpu(NULL, &a, NULL), MZ_OK);
  for (int64_t i = 0; i < n; i++) {
    float sum = in[i];

    for (int32_t r = 1; r < ranks; r++)
      sum += in[r * stride + i];
    cr_assert_eq(out[i], accumulate ? before[i] + sum : sum);
  }
  mz_free(in);
  mz_free(out);
  mz_free(before);
}

Test(reduce_ranks, adds_in_rank_order)
{
  static const int64_t sizes[] = {0, 1, 100, 2048, 9001};

  for (int i = 0; i < 5; i++)
    for (int32_t ranks = 1; ranks <= 5; ranks++)
      for (int accumulate = 0; accumulate <= 1; accumulate++)
        check_reduce(sizes[i], ranks, accumulate);
}

Test(reduce_ranks, rank_order_shows_in_the_bits)
{
  static const float in[3] = {0x1p24f, 1.0f, -0x1p24f};
  float out = 9;
  mz_reduce_ranks_t a = {3, 1, 1, in, MZ_F32, &out, 0, NULL, 0};

  cr_assert_eq(mz_k_reduce_ranks_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_eq(out, 0.0f); /* 1 is lost in 2^24 + 1; other orders give 1 */
}

Test(reduce_ranks, bf16_is_added_in_fp32)
{
  /* 1, 2^-8: their sum needs nine bits, one more than bf16 has. */
  static const uint16_t in[4] = {0x3f80, 0x4000, 0x3b80, 0xbf80};
  float out[2];
  mz_reduce_ranks_t a = {2, 2, 2, in, MZ_BF16, out, 0, NULL, 0};

  cr_assert_eq(mz_k_reduce_ranks_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_eq(out[0], 1.00390625f);
  cr_assert_eq(out[1], 1.0f);
  a.in_dtype = MZ_I32;
  cr_assert_eq(mz_k_reduce_ranks_cpu(NULL, &a, NULL), MZ_ERR_UNSUPPORTED);
  a.in_dtype = MZ_F32;
  a.num_ranks = 0;
  cr_assert_eq(mz_k_reduce_ranks_cpu(NULL, &a, NULL), MZ_ERR_ARG);
  a.num_ranks = a.place = 2;
  a.own = in;
  cr_assert_eq(mz_k_reduce_ranks_cpu(NULL, &a, NULL), MZ_ERR_ARG);
}

/* The own numbers apart from the others', in the output itself or elsewhere. */
static void check_own(int32_t ranks, int32_t place, bool over)
{
  const int64_t n = 2500, stride = 2503;
  float *in = new_floats(ranks * stride, 1), *out = new_floats(n, 2);
  float *own = new_floats(n, 3), *all = NULL, *wanted = new_floats(n, 2);
  mz_reduce_ranks_t a = {ranks, n, stride, in, MZ_F32, out, !over, own, place};
  mz_reduce_ranks_t b = {ranks,  n,     stride, NULL, MZ_F32,
                         wanted, !over, NULL,   0};

  if (over) {
    memcpy(out, own, (size_t)n * sizeof *out);
    a.own = out;
  }
  cr_assert_eq(mz_new(ranks * stride, "numbers of all", &all), MZ_OK);
  for (int32_t r = 0; r < ranks; r++)
    memcpy(all + r * stride, r == place ? own : in + (r - (r > place)) * stride,
           (size_t)n * sizeof *all);
  b.in = all;
  cr_assert_eq(mz_k_reduce_ranks_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_eq(mz_k_reduce_ranks_cpu(NULL, &b, NULL), MZ_OK);
  cr_assert_arr_eq(out, wanted, (size_t)n * sizeof *out);
  mz_free(in);
  mz_free(out);
  mz_free(own);
  mz_free(all);
  mz_free(wanted);
}

Test(reduce_ranks, own_numbers_take_their_place_among_the_others)
{
  for (int32_t ranks = 1; ranks <= 4; ranks++)
    for (int32_t place = 0; place < ranks; place++) {
      check_own(ranks, place, false);
      check_own(ranks, place, true);
    }
}

Test(adamw, stretches_take_the_numbers_of_their_groups)
{
  float w[2] = {1, 1}, m[2] = {0}, v[2] = {0}, grad[2] = {1, 1};
  mz_stretch_t stretches[2] = {
      {.w = w, .m = m, .v = v, .grad = grad, .n = 1, .group = 1},
      {.w = w + 1, .m = m + 1, .v = v + 1, .grad = grad + 1, .n = 1}};
  mz_adamw_group_t groups[2] = {
      {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8},
      {.lr = 0.3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}};
  mz_adamw_t a = {.stretches = stretches,
                  .num_stretches = 2,
                  .groups = groups,
                  .num_groups = 2,
                  .factor = &ONE,
                  .t = 1,
                  .bias_correction = 1};

  cr_assert_eq(mz_k_adamw_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_float_eq(w[0], 0.7, 1e-6);
  cr_assert_float_eq(w[1], 0.9, 1e-6);
}

Test(sum_squares, adds_the_exact_sum_whatever_the_threads)
{
  static const int64_t sizes[] = {0, 1, 15, 64, 1000, 2049, MZ_STRETCH};

  for (int i = 0; i < 7; i++) {
    float *x = new_floats(sizes[i], 1);
    mz_stretch_t stretches[2] = {{.grad = x, .n = (int32_t)sizes[i]},
                                 {.grad = x, .n = (int32_t)(sizes[i] / 2)}};
    double expected = 0, sum[2][2] = {{5, 5}, {5, 5}}, partial[2];
    mz_sum_squares_t a = {stretches, 2, partial, NULL};

    for (int64_t j = 0; j < sizes[i]; j++)
      expected += (double)x[j] * (double)x[j] * (j < sizes[i] / 2 ? 2 : 1);
    for (int t = 0; t < 2; t++) {
      omp_set_num_threads(t + 1);
      a.out = sum[t];
      cr_assert_eq(mz_k_sum_squares_cpu(NULL, &a, NULL), MZ_OK);
      cr_assert_eq(sum[t][1], 0);
    }
    cr_assert_float_eq(sum[0][0], expected, 1e-12 * expected);
    cr_assert_eq(sum[0][0], sum[1][0]);
    mz_free(x);
  }
}

Test(sum_squares, fp32_overflow_is_not_one_and_nan_names_its_tensor)
{
  float x[3] = {1e30f, 1e30f, 1.0f};
  mz_stretch_t stretches[3] = {{.grad = x + 2, .n = 1, .tensor = 4},
                               {.grad = x, .n = 2, .tensor = 7},
                               {.grad = x, .n = 3, .tensor = 9}};
  double sum[2], partial[3];
  mz_sum_squares_t a = {stretches, 2, partial, sum};

  cr_assert_eq(mz_k_sum_squares_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_float_eq(sum[0] / 2e60, 1.0, 1e-6);
  cr_assert_eq(sum[1], 0);
  x[1] = NAN;
  a.num_stretches = 3;
  cr_assert_eq(mz_k_sum_squares_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert(isnan(sum[0]));
  cr_assert_eq(sum[1], 8);
}

Test(reorder, both_ways_by_hand)
{
  /* 2 ranks, units of 1, 0 and 2 elements a shard: rank, unit, place. */
  static const int64_t lengths[3] = {1, 0, 2};
  static const uint16_t by_unit[6] = {0, 100, 20, 21, 120, 121};
  static const uint16_t by_rank[6] = {0, 20, 21, 100, 120, 121};
  uint16_t out[6] = {0};
  mz_reorder_t a = {2, 3, lengths, 2, by_unit, out, 1};

  cr_assert_eq(mz_k_reorder_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_arr_eq(out, by_rank, sizeof out);
  a.src = by_rank;
  a.to_rank_major = 0;
  cr_assert_eq(mz_k_reorder_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_arr_eq(out, by_unit, sizeof out);
}

Test(reorder, there_and_back_is_the_same_on_two_threads)
{
  static const int64_t lengths[4] = {1000, 7, 3000, 12};
  int64_t size = 3 * 4019;
  float *x = new_floats(size, 1), *y = new_floats(size, 2);
  float *z = new_floats(size, 3);
  mz_reorder_t a = {3, 4, lengths, sizeof(float), x, y, 1};

  omp_set_num_threads(2);
  cr_assert_eq(mz_k_reorder_cpu(NULL, &a, NULL), MZ_OK);
  /* Rank 1's shard of unit 2 starts after 3 x 1007 + 3000 elements. */
  cr_assert_eq(y[4019 + 1007], x[3 * 1007 + 3000]);
  a.src = y;
  a.dst = z;
  a.to_rank_major = 0;
  cr_assert_eq(mz_k_reorder_cpu(NULL, &a, NULL), MZ_OK);
  cr_assert_arr_eq(x, z, (size_t)size * sizeof(float));
  mz_free(x);
  mz_free(y);
  mz_free(z);
}

static void convert(int64_t n, const void *src, mz_dtype_t from, void *dst,
                    mz_dtype_t to)
{
  mz_convert_t a = {n, src, from, dst, to};

  cr_assert_eq(mz_k_convert_cpu(NULL, &a, NULL), MZ_OK);
}

/* Every 16-bit pattern comes back from fp32 as it was; a NaN stays one. */
static void check_all_patterns(mz_dtype_t half, uint16_t infinity,
                               uint16_t quiet)
{
  enum { N = 1 << 16 };
  uint16_t *x = NULL, *y = NULL;
  float *wide = new_floats(N, 1);

  cr_assert_eq(mz_new(N, "x", &x), MZ_OK);
  cr_assert_eq(mz_new(N, "y", &y), MZ_OK);
  for (int i = 0; i < N; i++)
    x[i] = (uint16_t)i;
  convert(N, x, half, wide, MZ_F32);
  convert(N, wide, MZ_F32, y, half);
  for (int i = 0; i < N; i++) {
    int nan = (i & 0x7fff) > infinity;

    cr_assert_eq(!!isnan(wide[i]), nan);
    if (nan) cr_assert_eq(y[i] & 0x8000u, x[i] & 0x8000u);
    cr_assert(nan ? (y[i] & quiet) == quiet : y[i] == x[i]);
  }
  mz_free(x);
  mz_free(y);
  mz_free(wide);
}

Test(convert, every_bf16_comes_back)
{
  check_all_patterns(MZ_BF16, 0x7f80, 0x7fc0);
}

Test(convert, every_f16_comes_back)
{
  check_all_patterns(MZ_F16, 0x7c00, 0x7e00);
}

Test(convert, values_of_f16)
{
  static const uint16_t x[8] = {0x3c00, 0xc000, 0x7bff, 0x0400,
                                0x0001, 0x03ff, 0x7c00, 0x8000};
  static const float expected[8] = {1.0f,     -2.0f,    65504.0f,
                                    0x1p-14f, 0x1p-24f, 1023 * 0x1p-24f,
                                    INFINITY, 0.0f};
  float y[8];

  convert(8, x, MZ_F16, y, MZ_F32);
  for (int i = 0; i < 8; i++)
    cr_assert_eq(y[i], expected[i]);
  cr_assert(signbit(y[7]));
}

/* Halfway between two neighbours of a 16-bit type goes to the even one, and
 * one fp32 step to either side goes to that side. */
static void check_halfway(mz_dtype_t half, uint16_t last)
{
  for (uint16_t h = 0; h < last; h++) {
    uint16_t pair[2] = {h, (uint16_t)(h + 1)}, out[3];
    float wide[2], x[3];

    convert(2, pair, half, wide, MZ_F32);
    x[1] = wide[0] + (wide[1] - wide[0]) * 0.5f;
    x[0] = nextafterf(x[1], -INFINITY);
    x[2] = nextafterf(x[1], INFINITY);
    convert(3, x, MZ_F32, out, half);
    cr_assert_eq(out[0], h);
    cr_assert_eq(out[1], h % 2 ? h + 1 : h);
    cr_assert_eq(out[2], h + 1);
  }
}

Test(convert, f16_rounds_to_nearest_even) { check_halfway(MZ_F16, 0x7bff); }

Test(convert, bf16_rounds_to_nearest_even) { check_halfway(MZ_BF16, 0x7f7f); }

Test(convert, overflow_is_infinity)
{
  static const float x[4] = {65519.99f, 65520.0f, 1e30f, -INFINITY};
  static const float big = 3.4e38f;
  uint16_t y[4];

  convert(4, x, MZ_F32, y, MZ_F16);
  cr_assert_eq(y[0], 0x7bff);
  cr_assert_eq(y[1], 0x7c00);
  cr_assert_eq(y[2], 0x7c00);
  cr_assert_eq(y[3], 0xfc00);
  convert(1, &big, MZ_F32, y, MZ_BF16);
  cr_assert_eq(y[0], 0x7f80);
}

Test(convert, copies_fp32_and_refuses_other_pairs)
{
  static const float x[3] = {1, NAN, -0.0f};
  float y[3];
  mz_convert_t a = {3, x, MZ_BF16, y, MZ_F16};

  convert(3, x, MZ_F32, y, MZ_F32);
  cr_assert_arr_eq(x, y, sizeof y);
  convert(0, NULL, MZ_F32, NULL, MZ_BF16);
  cr_assert_eq(mz_k_convert_cpu(NULL, &a, NULL), MZ_ERR_UNSUPPORTED);
  a.src_dtype = MZ_F32;
  a.dst_dtype = MZ_I32;
  cr_assert_eq(mz_k_convert_cpu(NULL, &a, NULL), MZ_ERR_UNSUPPORTED);
}
