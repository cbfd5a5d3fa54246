/* SPDX-License-Identifier: Apache-2.0 */
/* Compares one call of a kernel on "/cuda" with the same call on "/cpu": arrays
 * that exist on both sides with equal content, and a comparison of what was
 * written. A failed step ends the program with its error. */
#ifndef MZ_TESTS_DEVICE_CHECK_H
#define MZ_TESTS_DEVICE_CHECK_H

#include "base/check.h"
#include "kernels/kernels.h"

#include <stdbool.h>

/** One array on both sides. */
typedef struct dual {
  void *cpu, *cuda;
  int64_t n;
  mz_dtype_t dtype;
} dual_t;

/** The two tables under test, of one dtype; both have a workspace. */
typedef struct sides {
  mz_device_t *device;
  mz_kernels_t *cpu, *cuda;
  mz_dtype_t dtype;
  bool quick; /* for slow observers: leave out what is large */
  bool tiny;  /* and for the slowest: what libraries compute */
  int64_t failed, passed;
} sides_t;

void sides_open(mz_dtype_t dtype, int64_t workspace_bytes, sides_t *sides);
/** Whether a case is left out. @param elements, products  Of its largest array,
 * and multiplications of its sums; 0: not counted. */
bool sides_skip(const sides_t *sides, int64_t elements, int64_t products);
/** The same for products that may be a library's, and for attention. */
bool sides_skip_products(const sides_t *sides, int64_t products);
/** Frees all arrays, too. */
void sides_close(sides_t *sides);

/** Zeros. n may be 0: pointers are valid all the same. */
dual_t dual_zeros(sides_t *sides, mz_dtype_t dtype, int64_t n);
/** Uniform in [-scale, scale), rounded to dtype (MZ_F32, MZ_BF16 or MZ_F64). */
dual_t dual_random(sides_t *sides, mz_dtype_t dtype, int64_t n, double scale);
/** The content of host memory (n elements of dtype). */
dual_t dual_of(sides_t *sides, mz_dtype_t dtype, int64_t n, const void *values);
/** Both get the bytes of the CPU's side again. */
void dual_renew(sides_t *sides, const dual_t *dual);
/** The CUDA side's content; borrowed until the next call. */
const void *dual_read(sides_t *sides, const dual_t *dual);

/** Runs an operation on both sides. @param cpu_args, cuda_args  Its structs. */
#define RUN_BOTH(s, op, cpu_args, cuda_args)                                   \
  do {                                                                         \
    must((s)->cpu->ops->op((s)->cpu, (cpu_args), NULL));                       \
    must((s)->cuda->ops->op((s)->cuda, (cuda_args), (s)->device->stream));     \
    must(mz_stream_synchronize((s)->device, (s)->device->stream));             \
  } while (0)

/** Prints the error and exits unless MZ_OK. */
void must(mz_status_t status);

/**
 * Largest |cuda - cpu| over the array, relative to the largest |cpu| (or
 * 1e-30), against @p bound; integers must be equal. Prints a line that begins
 * with "ok" or "FAILED"; NaN on one side only fails.
 */
void compare(sides_t *sides, const char *what, const dual_t *dual,
             double bound);

/** A copy of the CUDA side's bytes, for same_bits. */
void *dual_bits(sides_t *sides, const dual_t *dual);
/** Whether the CUDA side has these bytes again, which are freed; prints a line
 * as compare does. */
void same_bits(sides_t *sides, const char *what, const dual_t *dual,
               void *bits);

/** Random integer in [low, high], from the same sequence on every run. */
int64_t pick(int64_t low, int64_t high);

/* The families; each runs its checks for the sides' dtype. */
void check_attention(sides_t *sides);
void check_embedding(sides_t *sides);
void check_gate(sides_t *sides);
void check_gate_golden(sides_t *sides);
void check_dispatch(sides_t *sides);
void check_linear(sides_t *sides);
void check_mix(sides_t *sides);
void check_norm(sides_t *sides);
void check_optim(sides_t *sides);
void check_rows(sides_t *sides);
void check_xent(sides_t *sides);

#endif
