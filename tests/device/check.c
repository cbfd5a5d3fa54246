/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include "base/alloc.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  MAX_ARRAYS = 4096,
  QUICK_ELEMENTS = 1 << 21,
  QUICK_PRODUCTS = 1 << 25,
  TINY_PRODUCTS = 1 << 22
};

static dual_t arrays[MAX_ARRAYS];
static int num_arrays;
static uint64_t state = 88172645463325252u;
static void *copy_back;
static int64_t copy_bytes;

void must(mz_status_t status)
{
  if (status == MZ_OK) return;
  printf("FAILED %s: %s\n", mz_status_text(status), mz_error_last());
  exit(1);
}

static uint64_t next(void)
{
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

int64_t pick(int64_t low, int64_t high)
{
  return low + (int64_t)(next() % (uint64_t)(high - low + 1));
}

void sides_open(mz_dtype_t dtype, int64_t workspace_bytes, sides_t *sides)
{
  mz_kernels_opts_t opts = {.dtype = dtype, .workspace_bytes = workspace_bytes};

  *sides = (sides_t){.dtype = dtype};
  must(mz_device_open(MZ_BACKEND_CPU, 0, &opts.device));
  must(mz_alloc_zeroed(workspace_bytes, 1, "workspace", &opts.workspace));
  must(mz_kernels_create(&opts, &sides->cpu));
  must(mz_device_open(MZ_BACKEND_CUDA, 0, &sides->device));
  opts.device = sides->device;
  must(mz_device_alloc(sides->device, workspace_bytes, "workspace",
                       &opts.workspace));
  must(mz_kernels_create(&opts, &sides->cuda));
}

bool sides_skip(const sides_t *sides, int64_t elements, int64_t products)
{
  return sides->quick &&
         (elements > QUICK_ELEMENTS || products > QUICK_PRODUCTS);
}

bool sides_skip_products(const sides_t *sides, int64_t products)
{
  return sides_skip(sides, 0, products) ||
         (sides->tiny && products > TINY_PRODUCTS);
}

void sides_close(sides_t *sides)
{
  void *cpu = sides->cpu->workspace, *cuda = sides->cuda->workspace;

  for (int i = 0; i < num_arrays; i++) {
    mz_free(arrays[i].cpu);
    mz_device_free(sides->device, arrays[i].cuda);
  }
  num_arrays = 0;
  mz_kernels_destroy(&sides->cpu);
  mz_kernels_destroy(&sides->cuda);
  mz_free(cpu);
  mz_device_free(sides->device, cuda);
  mz_device_close(&sides->device);
  mz_free(copy_back);
  copy_back = NULL;
  copy_bytes = 0;
}

static int64_t bytes_of(const dual_t *d)
{
  return d->n * (int64_t)mz_dtype_bytes(d->dtype);
}

dual_t dual_zeros(sides_t *sides, mz_dtype_t dtype, int64_t n)
{
  dual_t d = {.n = n, .dtype = dtype};
  int64_t bytes = bytes_of(&d) > 0 ? bytes_of(&d) : 16;

  if (num_arrays == MAX_ARRAYS) must(MZ_ERROR(MZ_ERR_ARG, "too many arrays"));
  must(mz_alloc_zeroed(bytes, 1, "array", &d.cpu));
  must(mz_device_alloc(sides->device, bytes, "array", &d.cuda));
  arrays[num_arrays++] = d;
  return d;
}

void dual_renew(sides_t *sides, const dual_t *dual)
{
  must(mz_device_copy(sides->device, dual->cuda, dual->cpu, bytes_of(dual),
                      sides->device->stream));
  must(mz_stream_synchronize(sides->device, sides->device->stream));
}

static uint16_t to_bf16(float x)
{
  uint32_t bits;

  memcpy(&bits, &x, sizeof bits);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static float from_bf16(uint16_t x)
{
  uint32_t bits = (uint32_t)x << 16;
  float value;

  memcpy(&value, &bits, sizeof value);
  return value;
}

dual_t dual_random(sides_t *sides, mz_dtype_t dtype, int64_t n, double scale)
{
  dual_t d = dual_zeros(sides, dtype, n);

  for (int64_t i = 0; i < n; i++) {
    double x = scale * ((double)(next() >> 40) * 0x1p-23 - 1);

    if (dtype == MZ_F64)
      ((double *)d.cpu)[i] = x;
    else if (dtype == MZ_F32)
      ((float *)d.cpu)[i] = (float)x;
    else
      ((uint16_t *)d.cpu)[i] = to_bf16((float)x);
  }
  dual_renew(sides, &d);
  return d;
}

dual_t dual_of(sides_t *sides, mz_dtype_t dtype, int64_t n, const void *values)
{
  dual_t d = dual_zeros(sides, dtype, n);

  memcpy(d.cpu, values, (size_t)bytes_of(&d));
  dual_renew(sides, &d);
  return d;
}

const void *dual_read(sides_t *sides, const dual_t *dual)
{
  if (bytes_of(dual) > copy_bytes) {
    mz_free(copy_back);
    copy_bytes = bytes_of(dual);
    must(mz_alloc_zeroed(copy_bytes, 1, "copy", &copy_back));
  }
  must(mz_device_copy(sides->device, copy_back, dual->cuda, bytes_of(dual),
                      sides->device->stream));
  must(mz_stream_synchronize(sides->device, sides->device->stream));
  return copy_back;
}

static double value_at(const void *base, mz_dtype_t dtype, int64_t i)
{
  switch (dtype) {
  case MZ_F64:
    return ((const double *)base)[i];
  case MZ_F32:
    return ((const float *)base)[i];
  case MZ_BF16:
    return from_bf16(((const uint16_t *)base)[i]);
  case MZ_I64:
    return (double)((const int64_t *)base)[i];
  case MZ_I32:
    return ((const int32_t *)base)[i];
  default:
    return ((const uint8_t *)base)[i];
  }
}

void compare(sides_t *sides, const char *what, const dual_t *dual, double bound)
{
  const void *got = dual_read(sides, dual);
  double worst = 0, largest = 1e-30, error;
  bool integer =
      dual->dtype == MZ_I32 || dual->dtype == MZ_I64 || dual->dtype == MZ_U8;
  int64_t at = -1, odd = -1;
  bool ok;

  for (int64_t i = 0; i < dual->n; i++) {
    double a = value_at(dual->cpu, dual->dtype, i);
    double b = value_at(got, dual->dtype, i);

    if (isnan(a) != isnan(b) || (isinf(a) && a != b)) odd = i;
    if (isnan(a) || isinf(a)) continue;
    largest = fmax(largest, fabs(a));
    if (fabs(a - b) > worst) worst = fabs(a - b), at = i;
  }
  error = integer ? worst : worst / largest;
  ok = odd < 0 && error <= (integer ? 0 : bound);
  printf("%s %s %s: %.2e of %.2e at %lld of %lld%s\n", ok ? "ok" : "FAILED",
         sides->dtype == MZ_BF16 ? "bf16" : "fp32", what, error,
         integer ? 0 : bound, (long long)at, (long long)dual->n,
         odd >= 0 ? ", and a NaN or infinity on one side" : "");
  if (ok)
    sides->passed++;
  else
    sides->failed++;
}

void *dual_bits(sides_t *s, const dual_t *d)
{
  size_t bytes = (size_t)d->n * mz_dtype_bytes(d->dtype);
  void *copy = NULL;

  must(mz_alloc_zeroed((int64_t)bytes + 1, 1, "copy", &copy));
  memcpy(copy, dual_read(s, d), bytes);
  return copy;
}

void same_bits(sides_t *s, const char *what, const dual_t *d, void *bits)
{
  bool same = memcmp(bits, dual_read(s, d),
                     (size_t)d->n * mz_dtype_bytes(d->dtype)) == 0;

  printf("%s %s again\n", same ? "ok" : "FAILED", what);
  if (same)
    s->passed++;
  else
    s->failed++;
  mz_free(bits);
}
