/* SPDX-License-Identifier: Apache-2.0 */
/* The bf16 table against the fp32 one on the same numbers: inputs that bf16
 * holds exactly. Only results are rounded then, by half a step of bf16: 2^-9
 * of each number. The bound is 2^-8 of the result's largest number, which
 * leaves room for the order of sums and for a gradient that is rounded before
 * it is masked. fp32 results (statistics, gradients of weights) differ by the
 * order of sums alone: 1e-5 of the largest.
 *
 * Every check runs with room to spare, and with the smallest workspace that the
 * operation takes: one row or one sequence at a time. */
#ifndef MZ_TESTS_BF16_TEST_H
#define MZ_TESTS_BF16_TEST_H

#include "kernel_test.h"

#include "kernels/cpu/convert.h"
#include "kernels/kernels.h"
#include <stdbool.h>

enum { T = 24, S = 6, H = 300, N = 36, V = 50, E = 5, K = 2 };
enum { ROOM = 1 << 22, STEP = 64 /* bytes */ };

static mz_device_t *cpu;
static mz_kernels_t *fp32, *bf16;
static float *workspace;
static bool tight;

static inline void open_tables(void)
{
  mz_kernels_opts_t opts = {.dtype = MZ_F32};

  cr_assert_eq(mz_device_open(MZ_BACKEND_CPU, 0, &opts.device), MZ_OK);
  cpu = opts.device;
  cr_assert_eq(mz_kernels_create(&opts, &fp32), MZ_OK);
  workspace = floats(ROOM / 4);
  opts.dtype = MZ_BF16;
  opts.workspace = workspace;
  opts.workspace_bytes = ROOM;
  cr_assert_eq(mz_kernels_create(&opts, &bf16), MZ_OK);
}

/* What a test allocates is freed when it ends. */
static void *kept[256];
static int num_kept;

static inline void *keep(void *pointer)
{
  cr_assert_lt(num_kept, (int)(sizeof kept / sizeof *kept));
  return kept[num_kept++] = pointer;
}

static inline void close_tables(void)
{
  while (num_kept > 0)
    mz_free(kept[--num_kept]);
  mz_kernels_destroy(&fp32);
  mz_kernels_destroy(&bf16);
  mz_device_close(&cpu);
  mz_free(workspace);
}

/* An array twice: as bf16 and as the fp32 of the same numbers. */
typedef struct pair {
  int64_t n;
  uint16_t *half;
  float *full;
} pair_t;

static inline pair_t pair(int64_t n, uint32_t seed, double sigma)
{
  pair_t p = {.n = n, .full = keep(normals(n, seed, sigma))};

  cr_assert_eq(mz_new(n + 1, "bf16", &p.half), MZ_OK);
  keep(p.half);
  mz_cpu_narrow(MZ_BF16, p.half, 0, p.full, n);
  mz_cpu_widen(MZ_BF16, p.full, p.half, 0, n);
  return p;
}

static inline void expect_near(const char *what, const float *got,
                               const float *want, int64_t n, double relative)
{
  double largest = 1e-30;
  for (int64_t i = 0; i < n; i++)
    largest = fmax(largest, fabs((double)want[i]));
  for (int64_t i = 0; i < n; i++)
    cr_assert(fabs((double)got[i] - (double)want[i]) <= relative * largest,
              "%s[%lld] is %.9g, fp32 gives %.9g, largest %.3g", what,
              (long long)i, (double)got[i], (double)want[i], largest);
}

static inline void expect_rounded(const char *what, const pair_t *p)
{
  float *got = floats(p->n);
  mz_cpu_widen(MZ_BF16, got, p->half, 0, p->n);
  expect_near(what, got, p->full, p->n, 0x1p-8);
  mz_free(got);
}

/* Both tables on the same numbers. An operation that finds too little workspace
 * says so before it writes anything. */
#define RUN_BOTH(op, a, b)                                                     \
  do {                                                                         \
    mz_status_t st_ = MZ_ERR_FIT;                                              \
    cr_assert_eq(fp32->ops->op(fp32, &(a), NULL), MZ_OK, "%s",                 \
                 mz_error_last());                                             \
    if (tight) bf16->workspace_bytes = 0;                                      \
    while (st_ == MZ_ERR_FIT && bf16->workspace_bytes <= ROOM) {               \
      st_ = bf16->ops->op(bf16, &(b), NULL);                                   \
      if (st_ == MZ_ERR_FIT) bf16->workspace_bytes += STEP;                    \
    }                                                                          \
    cr_assert_eq(st_, MZ_OK, "%s", mz_error_last());                           \
  } while (0)

/* Two arrays of fp32 results from the same start. */
typedef struct results {
  int64_t n;
  float *of_fp32, *of_bf16;
} results_t;

static inline results_t results(int64_t n, uint32_t seed)
{
  results_t r = {.n = n, .of_fp32 = keep(normals(n, seed, 1))};
  r.of_bf16 = keep(copy_of(r.of_fp32, n));
  return r;
}

static inline void expect_same_sums(const char *what, const results_t *r)
{
  expect_near(what, r->of_bf16, r->of_fp32, r->n, 1e-5);
}

#define BOTH_ROOMS(name, check)                                                \
  Test(bf16, name, .init = open_tables, .fini = close_tables)                  \
  {                                                                            \
    check();                                                                   \
    tight = true;                                                              \
    check();                                                                   \
  }

#endif
