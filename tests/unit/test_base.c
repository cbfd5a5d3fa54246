/* SPDX-License-Identifier: Apache-2.0 */
#include "base/alloc.h"
#include "base/check.h"

#include <criterion/criterion.h>
#include <moezero/random.h>
#include <string.h>

static mz_status_t detect(int value)
{
  MZ_REQUIRE(value < 3, MZ_ERR_ARG, "value is %d, need less than 3", value);
  return MZ_OK;
}

static mz_status_t pass_on(int value) { return MZ_TRACE(detect(value)); }

Test(status, message_is_written_once_and_frames_are_added)
{
  mz_error_clear();
  cr_assert_eq(pass_on(1), MZ_OK);
  cr_assert_str_empty(mz_error_last());
  cr_assert_eq(pass_on(3), MZ_ERR_ARG);
  cr_assert_str_eq(mz_error_message(), "value is 3, need less than 3");
  cr_assert(strstr(mz_error_last(), "at detect (test_base.c:"));
  cr_assert(strstr(mz_error_last(), "at pass_on (test_base.c:"));
}

Test(status, every_code_has_a_text)
{
  for (int s = 0; s < MZ_STATUS_COUNT; s++)
    cr_assert_str_neq(mz_status_text((mz_status_t)s), "unknown status");
  cr_assert_str_eq(mz_status_text(MZ_STATUS_COUNT), "unknown status");
}

Test(alloc, zeroed_and_checked)
{
  int64_t *a = NULL;

  cr_assert_eq(mz_new(4, "four", &a), MZ_OK);
  for (int i = 0; i < 4; i++)
    cr_assert_eq(a[i], 0);
  mz_free(a);
  cr_assert_eq(mz_new(0, "none", &a), MZ_OK);
  cr_assert_null(a);
  cr_assert_eq(mz_new(-1, "less", &a), MZ_ERR_ARG);
  cr_assert_eq(mz_new(INT64_MAX, "huge", &a), MZ_ERR_OVERFLOW);
}

Test(alloc, fails_when_told_to)
{
  int64_t *a = NULL;

  mz_alloc_fail_at(2);
  cr_assert_eq(mz_new(1, "first", &a), MZ_OK);
  mz_free(a);
  cr_assert_eq(mz_new(1, "second", &a), MZ_ERR_NOMEM);
  cr_assert_str_eq(mz_error_message(), "second: no memory for 8 bytes");
  cr_assert_eq(mz_new(1, "third", &a), MZ_OK);
  mz_free(a);
}

Test(integers, narrowing_and_products_are_checked)
{
  int64_t x;
  int i;

  cr_assert_eq(mz_mul_i64(1 << 30, 1 << 30, &x), MZ_OK);
  cr_assert_eq(x, INT64_C(1) << 60);
  cr_assert_eq(mz_mul_i64(INT64_MAX, 2, &x), MZ_ERR_OVERFLOW);
  cr_assert_eq(mz_add_i64(INT64_MAX, 1, &x), MZ_ERR_OVERFLOW);
  cr_assert_eq(mz_int_from_i64(INT64_C(1) << 31, &i), MZ_ERR_OVERFLOW);
  cr_assert_eq(mz_int_from_i64(-7, &i), MZ_OK);
  cr_assert_eq(i, -7);
}

/* The known answers of Random123 for philox4x32-10. */
Test(philox, known_answers)
{
  mz_random_t zero = {0, 0, 0};
  mz_random_t ones = {UINT64_MAX, UINT32_MAX, UINT32_MAX};
  uint32_t out[4];

  mz_philox_block(&zero, 0, out);
  cr_assert_eq(out[0], 0x6627e8d5u);
  cr_assert_eq(out[1], 0xe169c58du);
  cr_assert_eq(out[2], 0xbc57ac4cu);
  cr_assert_eq(out[3], 0x9b00dbd8u);
  mz_philox_block(&ones, UINT64_MAX, out);
  cr_assert_eq(out[0], 0x408f276du);
  cr_assert_eq(out[1], 0x41c83b0eu);
  cr_assert_eq(out[2], 0xa20bc7c6u);
  cr_assert_eq(out[3], 0x6d5451fdu);
}

Test(philox, uniform_and_normal_have_the_right_moments)
{
  mz_random_t r = mz_random_make(1234, 5, MZ_PURPOSE_INIT, 0);
  double u = 0, n = 0, n2 = 0;
  int count = 100000;

  for (int i = 0; i < count; i++) {
    double x = mz_random_normal(&r, (uint64_t)i);
    float y = mz_random_uniform(&r, (uint64_t)i);
    cr_assert(y >= 0 && y < 1);
    u += y;
    n += x;
    n2 += x * x;
  }
  cr_assert_float_eq(u / count, 0.5, 0.005); /* 5 standard errors */
  cr_assert_float_eq(n / count, 0.0, 0.016);
  cr_assert_float_eq(n2 / count, 1.0, 0.023);
}
