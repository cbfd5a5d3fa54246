/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernel tests share: random inputs, comparison with a reference in
 * double precision, central differences. */
#ifndef MZ_TESTS_KERNEL_TEST_H
#define MZ_TESTS_KERNEL_TEST_H

#include "base/alloc.h"

#include <criterion/criterion.h>
#include <math.h>
#include <moezero/random.h>
#include <omp.h>
#include <string.h>

/* Zeroed; a length of 0 still gives a pointer. */
static inline float *floats(int64_t n)
{
  float *x = NULL;
  cr_assert_eq(mz_new(n + 1, "floats", &x), MZ_OK);
  return x;
}

static inline double *doubles(int64_t n)
{
  double *x = NULL;
  cr_assert_eq(mz_new(n + 1, "doubles", &x), MZ_OK);
  return x;
}

/* Normal numbers of deviation sigma; another seed, other numbers. */
static inline float *normals(int64_t n, uint32_t seed, double sigma)
{
  mz_random_t random = mz_random_make(seed, 7, MZ_PURPOSE_INIT, 0);
  float *x = floats(n);

  for (int64_t i = 0; i < n; i++)
    x[i] = (float)(sigma * mz_random_normal(&random, (uint64_t)i));
  return x;
}

static inline double *widen(const float *x, int64_t n)
{
  double *y = doubles(n);
  for (int64_t i = 0; i < n; i++)
    y[i] = (double)x[i];
  return y;
}

static inline float *copy_of(const float *x, int64_t n)
{
  float *y = floats(n);
  memcpy(y, x, (size_t)n * sizeof *x);
  return y;
}

/* |got - want| <= bound everywhere; bound is absolute. */
static inline void expect_close(const char *what, const float *got,
                                const double *want, int64_t n, double bound)
{
  for (int64_t i = 0; i < n; i++) {
    double error = fabs((double)got[i] - want[i]);
    cr_assert(error <= bound, "%s[%lld] is %.9g, want %.9g, bound %.2g", what,
              (long long)i, (double)got[i], want[i], bound);
  }
}

static inline void expect_same_bits(const char *what, const float *x,
                                    const float *y, int64_t n)
{
  cr_assert_eq(memcmp(x, y, (size_t)n * sizeof *x), 0, "%s: other bits", what);
}

typedef double (*loss_fn)(const void *context);

/* grad against (L(x + h) - L(x - h)) / 2h of a loss in double precision that
 * reads x. With h = 1e-4 and losses of order 100 the difference itself errs by
 * about h^2 = 1e-8 and 1e-10; the bound is for grad's fp32. About 100 of the n
 * elements are tried. */
static inline void expect_gradient(const char *what, loss_fn loss,
                                   const void *context, double *x, int64_t n,
                                   const float *grad, double bound)
{
  const double h = 1e-4;
  int64_t stride = n / 100 + 1;

  for (int64_t i = 0; i < n; i += stride) {
    double kept = x[i], above, below, slope;

    x[i] = kept + h;
    above = loss(context);
    x[i] = kept - h;
    below = loss(context);
    x[i] = kept;
    slope = (above - below) / (2 * h);
    cr_assert(fabs(slope - (double)grad[i]) <= bound,
              "%s[%lld] is %.9g, difference gives %.9g, bound %.2g", what,
              (long long)i, (double)grad[i], slope, bound);
  }
}

static inline double dot(const float *x, const double *y, int64_t n)
{
  double sum = 0;
  for (int64_t i = 0; i < n; i++)
    sum += (double)x[i] * y[i];
  return sum;
}

#endif
