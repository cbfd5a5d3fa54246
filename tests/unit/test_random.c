/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/random.h"

#include "base/alloc.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <string.h>

enum { MANY = 1 << 22 };

static const mz_random_t place = {.seed = 77, .x = 0x89abcdefu, .where = 3};

static void expect_same_bits(uint64_t first, int64_t n, double scale,
                             const float *values)
{
  for (int64_t i = 0; i < n; i++) {
    float one = (float)(scale * mz_random_normal(&place, first + (uint64_t)i));

    cr_assert_eq(memcmp(&one, &values[i], sizeof one), 0,
                 "element %" PRIu64 ": %a is not %a", first + (uint64_t)i,
                 (double)values[i], (double)one);
  }
}

static void check_range(uint64_t first, int64_t n, double scale, float *values)
{
  values[n] = 7;
  mz_cpu_normals(&place, first, n, scale, values);
  expect_same_bits(first, n, scale, values);
  cr_assert_eq(values[n], 7, "written behind the end of %ld", (long)n);
}

Test(random, normals_at_once_have_the_bits_of_one_at_a_time)
{
  float *values;

  cr_assert_eq(mz_new(MANY + 1, "values", &values), MZ_OK);
  check_range(0, MANY, 0.02, values);
  check_range((UINT64_C(1) << 34) + 1, MANY / 2, 1.0, values);
  mz_free(values);
}

/* Around the blocks of four, and around what is made at once (256). */
Test(random, ranges_begin_and_end_inside_a_block)
{
  static const int64_t lengths[] = {0,   1,   2,   3,   4,   5,   251, 252, 253,
                                    255, 256, 257, 259, 511, 512, 513, 1023};
  float values[1025];

  for (uint64_t first = 0; first < 9; first++)
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
      check_range(1000 + first, lengths[i], 0.5, values);
}

/* Signs of zero, subnormal numbers, infinity. */
Test(random, scales_at_the_ends_of_floats_give_the_same_bits)
{
  static const double scales[] = {0, -1, 1e-300, 1e-45, 1e-40, 1e38, 1e300};
  float values[4097];

  for (size_t i = 0; i < sizeof scales / sizeof *scales; i++)
    check_range(5, 4096, scales[i], values);
}

Test(random, drawn_blocks_are_philox)
{
  uint32_t words[4 * 67], block[4];

  mz_cpu_draw(&place, UINT32_MAX - 3u, 67, words);
  for (uint64_t b = 0; b < 67; b++) {
    mz_philox_block(&place, UINT32_MAX - 3u + b, block);
    cr_assert_eq(memcmp(block, words + 4 * b, sizeof block), 0, "block %d",
                 (int)b);
  }
}
