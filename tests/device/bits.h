/* SPDX-License-Identifier: Apache-2.0 */
/* For operations that must give equal bits from run to run. */
#ifndef MZ_TESTS_DEVICE_BITS_H
#define MZ_TESTS_DEVICE_BITS_H

#include "check.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

/** A copy of what the CUDA side of an array holds; freed by bits_same. */
static inline void *bits_keep(sides_t *sides, const dual_t *dual)
{
  int64_t bytes = dual->n * (int64_t)mz_dtype_bytes(dual->dtype);
  const void *now = dual_read(sides, dual);
  void *copy = NULL;

  must(mz_alloc_zeroed(bytes + 1, 1, "bits", &copy));
  memcpy(copy, now, (size_t)bytes);
  return copy;
}

/** Compares them with what it holds now. */
static inline void bits_same(sides_t *sides, const char *what,
                             const dual_t *dual, void *kept)
{
  int64_t bytes = dual->n * (int64_t)mz_dtype_bytes(dual->dtype);
  bool same = memcmp(kept, dual_read(sides, dual), (size_t)bytes) == 0;

  printf("%s %s %s: bits of a second run\n", same ? "ok" : "FAILED",
         sides->dtype == MZ_BF16 ? "bf16" : "fp32", what);
  if (same)
    sides->passed++;
  else
    sides->failed++;
  mz_free(kept);
}

#endif
