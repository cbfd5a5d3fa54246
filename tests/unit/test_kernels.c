/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/kernels.h"

#include "base/alloc.h"

#include <criterion/criterion.h>

static mz_device_t *cpu;

static void open_cpu(void)
{
  cr_assert_eq(mz_device_open(MZ_BACKEND_CPU, 0, &cpu), MZ_OK);
}

static void close_cpu(void) { mz_device_close(&cpu); }

TestSuite(kernels, .init = open_cpu, .fini = close_cpu);
TestSuite(device, .init = open_cpu, .fini = close_cpu);

Test(kernels, cpu_table_is_complete_and_works)
{
  mz_kernels_opts_t opts = {.device = cpu};
  mz_kernels_t *kernels = NULL;
  float x[] = {2, 3}, w[] = {5, 7}, b[] = {1}, y[1];
  const void *ws[] = {w}, *bs[] = {b};
  int32_t offsets[] = {0, 1};
  mz_linear_t a = {.num_groups = 1,
                   .offsets = offsets,
                   .max_rows = 1,
                   .n = 1,
                   .k = 2,
                   .w = ws,
                   .b = bs,
                   .x = x,
                   .y = y};

  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_OK);
  cr_assert_str_eq(kernels->ops->name, "/cpu");
#define CHECK(op, args) cr_assert_not_null(kernels->ops->op);
  MZ_KERNEL_LIST(CHECK)
#undef CHECK
  cr_assert_eq(kernels->ops->linear(kernels, &a, NULL), MZ_OK);
  cr_assert_eq(y[0], 32.0f);
  mz_kernels_destroy(&kernels);
  cr_assert_null(kernels);
  mz_kernels_destroy(&kernels);
  mz_kernels_destroy(NULL);
}

Test(kernels, cpu_has_no_choices_and_takes_none)
{
  mz_kernels_opts_t opts = {.device = cpu};
  mz_kernels_t *kernels = NULL;
  char *text = NULL;

  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_OK);
  cr_assert_eq(mz_kernels_tune(kernels, true), MZ_OK);
  cr_assert_eq(mz_kernels_tune(kernels, false), MZ_OK);
  cr_assert_eq(mz_kernels_take_tuning(kernels, ""), MZ_OK);
  cr_assert_eq(mz_kernels_take_tuning(kernels, "cublaslt 1 sm 90\n"), MZ_OK);
  cr_assert_eq(mz_kernels_tuning_text(kernels, &text), MZ_OK);
  cr_assert_str_eq(text, "");
  mz_free(text);
  mz_alloc_fail_at(1);
  cr_assert_eq(mz_kernels_tuning_text(kernels, &text), MZ_ERR_NOMEM);
  cr_assert_null(text);
  mz_alloc_fail_at(0);
  mz_kernels_destroy(&kernels);
}

Test(kernels, bf16_table_is_complete)
{
  mz_kernels_opts_t opts = {.device = cpu, .dtype = MZ_BF16};
  mz_kernels_t *kernels = NULL;

  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_OK);
  cr_assert_str_eq(kernels->ops->name, "/cpu");
#define CHECK(op, args) cr_assert_not_null(kernels->ops->op);
  MZ_KERNEL_LIST(CHECK)
#undef CHECK
  mz_kernels_destroy(&kernels);
}

Test(kernels, refuses_what_it_has_not)
{
  mz_kernels_opts_t opts = {.device = NULL};
  mz_kernels_t *kernels = (mz_kernels_t *)&opts;

  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_ERR_ARG);
  cr_assert_null(kernels);
  cr_assert_eq(mz_kernels_create(NULL, &kernels), MZ_ERR_ARG);
  cr_assert_eq(mz_kernels_create(&opts, NULL), MZ_ERR_ARG);
  opts.device = cpu;
  opts.dtype = MZ_F16;
  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_ERR_UNSUPPORTED);
  opts.dtype = (mz_dtype_t)99;
  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_ERR_UNSUPPORTED);
  opts.dtype = MZ_F32;
  mz_alloc_fail_at(1);
  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_ERR_NOMEM);
  cr_assert_null(kernels);
}

Test(device, cpu_memory_is_zeroed_and_copied_at_once)
{
  static const char text[8] = "moezero";
  mz_event_t event;
  char *bytes;
  bool done = false;

  cr_assert(cpu->ops->is_host);
  cr_assert_eq(mz_device_alloc(cpu, 8, "memory", (void **)&bytes), MZ_OK);
  for (int i = 0; i < 8; i++)
    cr_assert_eq(bytes[i], 0);
  cr_assert_eq(mz_device_copy(cpu, bytes, text, 8, cpu->stream), MZ_OK);
  cr_assert_str_eq(bytes, text);
  cr_assert_eq(mz_device_fill(cpu, bytes, 'x', 3, cpu->stream), MZ_OK);
  cr_assert_str_eq(bytes, "xxxzero");
  cr_assert_eq(mz_device_upload(cpu, bytes, "abc", 3, cpu->stream), MZ_OK);
  cr_assert_str_eq(bytes, "abczero");
  cr_assert_eq(mz_event_create(cpu, &event), MZ_OK);
  cr_assert_eq(mz_event_record(cpu, event, cpu->stream), MZ_OK);
  cr_assert_eq(mz_event_done(cpu, event, &done), MZ_OK);
  cr_assert(done);
  mz_event_destroy(cpu, event);
  mz_device_free(cpu, bytes);
}

Test(device, refuses_what_there_is_not)
{
  mz_device_t *device = cpu;
  int count = 0;

  cr_assert_eq(mz_device_count(MZ_BACKEND_CPU, &count), MZ_OK);
  cr_assert_eq(count, 1);
  cr_assert_eq(mz_device_open("/gpu", 0, &device), MZ_ERR_ARG);
  cr_assert_str_eq(mz_error_message(), "no backend /gpu");
  cr_assert_null(device);
  cr_assert_eq(mz_device_open(MZ_BACKEND_CPU, 1, &device), MZ_ERR_ARG);
  cr_assert_str_eq(mz_error_message(), "device 1 of backend /cpu, there are 1");
  cr_assert_eq(mz_device_open(NULL, 0, &device), MZ_ERR_ARG);
}

/* A machine of the tests has no GPU, or the build has no CUDA: either way the
 * reason is said. */
Test(device, without_a_gpu_the_reason_is_said)
{
  mz_device_t *device = NULL;
  int count = 0;

  if (mz_device_count(MZ_BACKEND_CUDA, &count) == MZ_OK) {
    cr_assert_geq(count, 1);
    return;
  }
  cr_assert_eq(mz_device_open(MZ_BACKEND_CUDA, 0, &device), MZ_ERR_UNSUPPORTED);
  cr_assert(strstr(mz_error_message(), "no GPU") ||
                strstr(mz_error_message(), "no NVIDIA driver") ||
                strstr(mz_error_message(), "this build has no CUDA"),
            "%s", mz_error_message());
}
