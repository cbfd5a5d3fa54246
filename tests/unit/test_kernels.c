/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/kernels.h"

#include "base/alloc.h"

#include <criterion/criterion.h>
#include <omp.h>

Test(kernels, cpu_table_is_complete_and_works)
{
  mz_kernels_opts_t opts = {.backend = MZ_BACKEND_CPU};
  mz_kernels_t *kernels = NULL;
  float x[] = {2, 3}, w[] = {5, 7}, b[] = {1}, y[1];
  const void *ws[] = {w}, *bs[] = {b};
  int32_t offsets[] = {0, 1};
  mz_linear_t a = {1, offsets, 1, 1, 2, ws, bs, x, y, MZ_EPI_NONE, NULL};

  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_OK);
  cr_assert_str_eq(kernels->ops->name, "/cpu");
#define CHECK(op, args) cr_assert_not_null(kernels->ops->op);
  MZ_KERNEL_LIST(CHECK)
#undef CHECK
  cr_assert_eq(kernels->ops->linear(kernels, &a, NULL), MZ_OK);
  cr_assert_eq(y[0], 32.0f);
  omp_set_num_threads(2);
  cr_assert_eq(mz_kernels_num_threads(kernels), 2);
  mz_kernels_destroy(&kernels);
  cr_assert_null(kernels);
  mz_kernels_destroy(&kernels);
  mz_kernels_destroy(NULL);
}

Test(kernels, bf16_table_is_complete)
{
  mz_kernels_opts_t opts = {.backend = MZ_BACKEND_CPU, .dtype = MZ_BF16};
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
  mz_kernels_opts_t opts = {.backend = MZ_BACKEND_CUDA};
  mz_kernels_t *kernels = (mz_kernels_t *)&opts;

  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_ERR_UNSUPPORTED);
  cr_assert_str_eq(mz_error_message(), "backend /cuda is not compiled in");
  cr_assert_null(kernels);
  opts.backend = "/gpu";
  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_ERR_ARG);
  cr_assert_str_eq(mz_error_message(), "no backend /gpu");
  opts.backend = NULL;
  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_ERR_ARG);
  cr_assert_eq(mz_kernels_create(NULL, &kernels), MZ_ERR_ARG);
  cr_assert_eq(mz_kernels_create(&opts, NULL), MZ_ERR_ARG);
  opts.backend = MZ_BACKEND_CPU;
  opts.dtype = MZ_F16;
  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_ERR_UNSUPPORTED);
  opts.dtype = (mz_dtype_t)99;
  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_ERR_UNSUPPORTED);
  opts.dtype = MZ_F32;
  mz_alloc_fail_at(1);
  cr_assert_eq(mz_kernels_create(&opts, &kernels), MZ_ERR_NOMEM);
  cr_assert_null(kernels);
}
