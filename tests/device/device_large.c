/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels of "/cuda" on arrays of more than 2^31 elements. Each runs on the
 * whole arrays, then on windows of them alone, at their begin, across element
 * 2^31 and at their end: both must give the same, and an offset that wraps
 * reads or writes what belongs to another window.
 * Usage: device_large [CHECK]...; needs a GPU with 49 GiB free.
 * Prints a line a check, then "N passed, N failed"; exit code 2: no GPU. */
#include "large.h"

#include "base/alloc.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GIB (INT64_C(1) << 30)

static const int64_t arena_bytes = 48 * GIB;

void must(mz_status_t status)
{
  if (status == MZ_OK) return;
  printf("FAILED %s: %s\n", mz_status_text(status), mz_error_last());
  exit(1);
}

void large_report(large_t *l, bool good, const char *what)
{
  printf("%s %s\n", good ? "ok" : "FAILED", what);
  if (good)
    l->passed++;
  else
    l->failed++;
}

/* --- memory --- */

char *large_take(large_t *l, int64_t bytes)
{
  char *at = l->arena + l->at;

  l->at += mz_round_up(bytes, MZ_ALIGN_BYTES);
  if (l->at > arena_bytes)
    must(MZ_ERROR(MZ_ERR_FIT, "%" PRId64 " bytes of an arena of %" PRId64,
                  l->at, arena_bytes));
  return at;
}

void large_copy(large_t *l, void *to, const void *from, int64_t bytes)
{
  must(mz_device_copy(l->device, to, from, bytes, l->device->stream));
}

char *large_pattern(large_t *l, mz_dtype_t dtype, int64_t n, int64_t shift)
{
  int64_t width = (int64_t)mz_dtype_bytes(dtype), now;
  const char *pattern = l->pattern[dtype == MZ_F32];
  char *to = large_take(l, n * width);

  for (int64_t i = 0; i < n; i += now) {
    int64_t from = (i + shift) % LARGE_PERIOD;

    now = mz_min_i64(n - i, LARGE_PERIOD - from);
    large_copy(l, to + i * width, pattern + from * width, now * width);
  }
  return to;
}

char *large_unwritten(large_t *l, int64_t bytes)
{
  char *to = large_take(l, bytes);

  must(mz_device_fill(l->device, to, 0xff, bytes, l->device->stream));
  return to;
}

static const char *read_back(large_t *l, int side, const char *from,
                             int64_t bytes)
{
  large_copy(l, l->host[side], from, bytes);
  must(mz_stream_synchronize(l->device, l->device->stream));
  return l->host[side];
}

bool large_same(large_t *l, const char *a, const char *b, int64_t bytes)
{
  return memcmp(read_back(l, 0, a, bytes), read_back(l, 1, b, bytes),
                (size_t)bytes) == 0;
}

bool large_is_zero(large_t *l, const char *from, int64_t bytes)
{
  const char *now = read_back(l, 0, from, bytes);

  for (int64_t i = 0; i < bytes; i++)
    if (now[i] != 0) return false;
  return true;
}

static float value_at(const char *at, mz_dtype_t dtype)
{
  uint32_t bits = 0;
  float value;

  if (dtype == MZ_F32)
    memcpy(&bits, at, 4);
  else /* the upper half of an fp32 number */
    memcpy((char *)&bits + 2, at, 2);
  memcpy(&value, &bits, sizeof value);
  return value;
}

double large_apart(large_t *l, mz_dtype_t dtype, const char *a, const char *b,
                   int64_t n)
{
  int64_t width = (int64_t)mz_dtype_bytes(dtype);
  const char *x = read_back(l, 0, a, n * width);
  const char *y = read_back(l, 1, b, n * width);
  double worst = 0, largest = 1e-30;

  for (int64_t i = 0; i < n * width; i += width) {
    float u = value_at(x + i, dtype), v = value_at(y + i, dtype);

    if (!isfinite(u) || !isfinite(v)) return HUGE_VAL;
    largest = fmax(largest, fabs((double)u));
    worst = fmax(worst, fabs((double)u - (double)v));
  }
  return worst / largest;
}

/* --- all --- */

static void make_patterns(large_t *l)
{
  float *values = NULL;
  uint16_t *halves = NULL;
  uint32_t state = 2463534242u;

  must(mz_new(LARGE_PERIOD, "pattern", &values));
  must(mz_new(LARGE_PERIOD, "pattern", &halves));
  for (int64_t i = 0; i < LARGE_PERIOD; i++) {
    uint32_t bits;

    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    values[i] = (float)(state >> 8) * 0x1p-23f - 1;
    memcpy(&bits, &values[i], sizeof bits);
    halves[i] = (uint16_t)(bits >> 16);
  }
  must(mz_device_alloc(l->device, 2 * LARGE_PERIOD, "pattern",
                       (void **)&l->pattern[0]));
  must(mz_device_alloc(l->device, 4 * LARGE_PERIOD, "pattern",
                       (void **)&l->pattern[1]));
  large_copy(l, l->pattern[0], halves, 2 * LARGE_PERIOD);
  large_copy(l, l->pattern[1], values, 4 * LARGE_PERIOD);
  mz_free(values);
  mz_free(halves);
}

static void open_large(large_t *l)
{
  mz_kernels_opts_t opts = {
      .dtype = MZ_BF16, .deterministic = true, .workspace_bytes = GIB / 4};

  *l = (large_t){.at = 0};
  must(mz_device_open(MZ_BACKEND_CUDA, 0, &l->device));
  opts.device = l->device;
  must(mz_device_alloc(l->device, opts.workspace_bytes, "workspace",
                       (void **)&l->workspace));
  opts.workspace = l->workspace;
  must(mz_kernels_create(&opts, &l->kernels));
  must(mz_device_alloc(l->device, arena_bytes, "arrays", (void **)&l->arena));
  for (int i = 0; i < 2; i++)
    must(mz_device_alloc_host(l->device, LARGE_READ, "comparison",
                              (void **)&l->host[i]));
  make_patterns(l);
}

static void close_large(large_t *l)
{
  mz_kernels_destroy(&l->kernels);
  for (int i = 0; i < 2; i++) {
    mz_device_free(l->device, l->pattern[i]);
    mz_device_free_host(l->device, l->host[i]);
  }
  mz_device_free(l->device, l->arena);
  mz_device_free(l->device, l->workspace);
  mz_device_close(&l->device);
}

int main(int argc, char **argv)
{
  static const struct {
    const char *name;
    void (*check)(large_t *l);
  } checks[] = {
      {"experts", large_check_experts},     {"adamw", large_check_adamw},
      {"convert", large_check_convert},     {"reduce", large_check_reduce},
      {"embedding", large_check_embedding}, {"rows", large_check_rows}};
  large_t l;
  int count;

  setvbuf(stdout, NULL, _IOLBF, 0);
  if (mz_device_count(MZ_BACKEND_CUDA, &count) != MZ_OK) {
    fprintf(stderr, "device_large needs a GPU: %s\n", mz_error_message());
    return 2;
  }
  open_large(&l);
  for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
    bool wanted = argc == 1;

    for (int j = 1; j < argc; j++)
      wanted = wanted || strcmp(argv[j], checks[i].name) == 0;
    if (wanted) checks[i].check(&l);
  }
  printf("%d passed, %d failed\n", l.passed, l.failed);
  close_large(&l);
  return l.failed > 0;
}
