/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays of more than 2^31 elements on the card, in one arena; windows of them
 * that are compared on the host. A failed step ends the program. */
#ifndef MZ_TESTS_DEVICE_LARGE_H
#define MZ_TESTS_DEVICE_LARGE_H

#include "base/check.h"
#include "kernels/kernels.h"

#include <stdbool.h>

enum {
  LARGE_WIDTH = 2048,
  LARGE_WINDOW = 512, /* rows */
  LARGE_NUM_WINDOWS = 3,
  LARGE_PERIOD = (1 << 22) - 1 /* of the content: odd, so that no power of two
                                  moves it onto itself */
};

/* 2^31 elements and 4099 rows more; flat arrays have as many elements. */
#define LARGE_ROWS ((INT64_C(1) << 20) + 4099)
#define LARGE_FLAT (LARGE_ROWS * LARGE_WIDTH)

typedef struct large {
  mz_device_t *device;
  mz_kernels_t *kernels; /* bf16 */
  char *arena, *workspace;
  int64_t at;       /* bytes of the arena in use */
  char *pattern[2]; /* [LARGE_PERIOD] in [-1, 1), of bf16 and of fp32 */
  char *host[2];    /* what a comparison reads */
  int passed, failed;
} large_t;

/** Prints the error and exits unless MZ_OK. */
void must(mz_status_t status);

/** A line that begins with "ok" or "FAILED". */
void large_report(large_t *l, bool good, const char *what);

/* Memory of the arena, until l->at is set back to 0. */
char *large_take(large_t *l, int64_t bytes);
/** MZ_BF16 or MZ_F32; another content than that of another shift. */
char *large_pattern(large_t *l, mz_dtype_t dtype, int64_t n, int64_t shift);
/** NaN in every type. */
char *large_unwritten(large_t *l, int64_t bytes);

void large_copy(large_t *l, void *to, const void *from, int64_t bytes);

/* Of memory on the card, at most LARGE_READ bytes. */
enum { LARGE_READ = 32 << 20 };
bool large_same(large_t *l, const char *a, const char *b, int64_t bytes);
bool large_is_zero(large_t *l, const char *from, int64_t bytes);
/** Largest difference over the largest number; infinite with a NaN. */
double large_apart(large_t *l, mz_dtype_t dtype, const char *a, const char *b,
                   int64_t n);

/* The checks. */
void large_check_rows(large_t *l);
void large_check_embedding(large_t *l);
void large_check_convert(large_t *l);
void large_check_reduce(large_t *l);
void large_check_adamw(large_t *l);
void large_check_experts(large_t *l);

#endif
