/* SPDX-License-Identifier: Apache-2.0 */
/* Routing against an explicit list of rows. E experts, D ranks of the group. */
#include "plan/plan.h"

#include "base/alloc.h"

#include <criterion/criterion.h>
#include <moezero/random.h>
#include <string.h>

enum { MAX_E = 12, MAX_D = 4, MAX_ROWS = 4096 };

/* --- capacity --- */

/* Two rows show that double precision gives another number. */
Test(route_capacity, follows_the_formula_in_single_precision)
{
  static const struct {
    int64_t tokens;
    int32_t experts;
    double factor;
    int32_t k;
    int64_t least, capacity;
  } table[] = {
      {6, 4, 1.0, 1, 1, 2},       {6, 4, 1.0, 1, 4, 4},
      {8, 4, 1.25, 1, 4, 4},      {64, 8, 1.2, 1, 4, 10},
      {64, 8, 1.0, 2, 4, 16},     {4096, 128, 1.0, 1, 4, 32},
      {4096, 64, 2.0, 1, 4, 128}, {10, 4, 1.0, 3, 4, 8},
      {16, 8, 0.5, 1, 0, 1},      {3, 8, 1.0, 1, 0, 1},
      {3, 8, 1.0, 2, 4, 4},       {20, 3, 1.05, 1, 1, 7}, /* not 8 */
      {10, 3, 1.3, 3, 1, 13},                             /* not 14 */
      {100, 7, 1.1, 2, 4, 32},    {2048, 8, 1.25, 2, 4, 640},
      {1, 4, 1.0, 1, 4, 4},       {7, 7, 1.0, 1, 1, 1},
  };

  for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
    cr_expect_eq(mz_route_capacity(table[i].tokens, table[i].experts,
                                   table[i].k, table[i].factor, table[i].least),
                 table[i].capacity, "row %zu", i);
}

Test(route_capacity, without_tokens_is_the_smallest_value)
{
  cr_expect_eq(mz_route_capacity(0, 8, 2, 1.0, 0), 0);
  cr_expect_eq(mz_route_capacity(0, 8, 2, 1.0, 4), 4);
}

/* --- an explicit list of rows --- */

typedef struct row {
  int32_t source, expert;
  int64_t at; /* place in the source's send order */
} row_t;

typedef struct matrix {
  int32_t kept[MAX_D * MAX_E];
  int32_t experts, ranks;
} matrix_t;

/* Rows of a run at expert rank d in expert-major order: (expert, source, send
 * order). */
static int64_t list_rows(const matrix_t *m, int32_t d, int32_t first,
                         int32_t num, row_t *rows)
{
  int32_t local = m->experts / m->ranks;
  int64_t n = 0;

  for (int32_t e = d * local + first; e < d * local + first + num; e++)
    for (int32_t s = 0; s < m->ranks; s++) {
      int64_t at = 0;

      for (int32_t before = 0; before < e; before++)
        at += m->kept[s * m->experts + before];
      for (int32_t i = 0; i < m->kept[s * m->experts + e]; i++) {
        cr_assert_lt(n, MAX_ROWS);
        rows[n++] = (row_t){s, e, at + i};
      }
    }
  return n;
}

/* Where round 0 begins in the list of a run: windows end at multiples of
 * round_rows in the rows of all runs. */
static int64_t first_begin(const matrix_t *m, int32_t d, int32_t first,
                           int64_t round_rows)
{
  static row_t before[MAX_ROWS];

  return -(list_rows(m, d, 0, first, before) % round_rows);
}

/* A round at d: rows [begin, end) of the list. */
static void check_window(const matrix_t *m, int32_t d, int32_t first,
                         int32_t num, int64_t round, int64_t round_rows,
                         const row_t *rows, int64_t n)
{
  int64_t begin = first_begin(m, d, first, round_rows) + round * round_rows;
  int64_t end = begin + round_rows;
  int32_t counts[MAX_D * MAX_E] = {0}, offsets[MAX_E + 1] = {0};
  int32_t got[MAX_D * MAX_E], got_offsets[MAX_E + 1];
  int32_t base = d * (m->experts / m->ranks) + first;
  int64_t total = 0;

  for (int64_t i = mz_max_i64(begin, 0); i < end && i < n; i++) {
    counts[rows[i].source * num + rows[i].expert - base]++;
    for (int32_t e = rows[i].expert - base; e < num; e++)
      offsets[e + 1]++;
    total++;
  }
  cr_assert_eq(mz_route_window(m->kept, m->experts, m->ranks, d, first, num,
                               round, round_rows, got, got_offsets),
               total);
  cr_assert_eq(memcmp(got, counts, sizeof *got * (size_t)(m->ranks * num)), 0);
  cr_assert_eq(memcmp(got_offsets, offsets, sizeof *got * (size_t)(num + 1)),
               0);
  cr_assert_eq(mz_route_window(m->kept, m->experts, m->ranks, d, first, num,
                               round, round_rows, NULL, NULL),
               total);
}

/* What s sends in that round: the listed rows of s, which are consecutive. */
static void check_part(const matrix_t *m, int32_t s, int32_t d, int32_t first,
                       int32_t num, int64_t round, int64_t round_rows,
                       const row_t *rows, int64_t n)
{
  int64_t begin = first_begin(m, d, first, round_rows) + round * round_rows;
  int64_t end = begin + round_rows;
  int64_t displ = -1, next = -1, want = 0;
  int64_t part = mz_route_part(m->kept, m->experts, m->ranks, s, d, first, num,
                               round, round_rows, &displ);

  for (int64_t i = mz_max_i64(begin, 0); i < end && i < n; i++) {
    if (rows[i].source != s) continue;
    if (want == 0) {
      cr_assert_eq(displ, rows[i].at);
      next = displ;
    }
    cr_assert_eq(rows[i].at, next++, "a part is not contiguous");
    want++;
  }
  cr_assert_eq(part, want);
}

static void check_run(const matrix_t *m, int32_t first, int32_t num,
                      int64_t round_rows)
{
  int64_t rounds =
      mz_route_rounds(m->kept, m->experts, m->ranks, first, num, round_rows);
  int64_t needed = 1;

  for (int32_t d = 0; d < m->ranks; d++) {
    static row_t rows[MAX_ROWS];
    int64_t n = list_rows(m, d, first, num, rows), seen = 0;
    int64_t end = n - first_begin(m, d, first, round_rows);

    if (n > 0 && (end + round_rows - 1) / round_rows > needed)
      needed = (end + round_rows - 1) / round_rows;
    for (int64_t r = 0; r < rounds; r++) {
      check_window(m, d, first, num, r, round_rows, rows, n);
      seen += mz_route_window(m->kept, m->experts, m->ranks, d, first, num, r,
                              round_rows, NULL, NULL);
      for (int32_t s = 0; s < m->ranks; s++)
        check_part(m, s, d, first, num, r, round_rows, rows, n);
    }
    cr_assert_eq(seen, n, "windows do not cover the rows");
  }
  cr_assert_eq(rounds, needed);
}

static matrix_t random_matrix(uint32_t seed)
{
  static const int32_t shapes[][2] = {{1, 1}, {4, 1},  {4, 2},
                                      {6, 3}, {12, 4}, {8, 4}};
  mz_random_t random = mz_random_make(seed, 0, MZ_PURPOSE_SAMPLER, 0);
  const int32_t *shape = shapes[seed % 6];
  matrix_t m = {.experts = shape[0], .ranks = shape[1]};

  for (int32_t i = 0; i < m.experts * m.ranks; i++) {
    uint32_t bits = mz_random_u32(&random, (uint64_t)i);
    m.kept[i] = bits % 3 == 0 ? 0 : (int32_t)(bits / 3 % 23);
  }
  return m;
}

Test(route, windows_partition_the_rows_and_parts_agree_with_the_list)
{
  static const int64_t sizes[] = {1, 2, 7, 16, 50, 1000};

  for (uint32_t seed = 0; seed < 60; seed++) {
    matrix_t m = random_matrix(seed);
    int32_t local = m.experts / m.ranks;

    for (int32_t first = 0; first < local; first++)
      for (int32_t num = 1; first + num <= local; num++)
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
          check_run(&m, first, num, sizes[i]);
  }
}

/* kept [2, 4], rank 1 holds experts 2, 3: rows e2: 3 of s0, 2 of s1; e3: 4 of
 * s1. Rounds of 4: [e2 s0 x3, e2 s1], [e2 s1, e3 s1 x3], [e3 s1]. A run of e3
 * alone has its rows in the last two. */
Test(route, a_case_by_hand)
{
  const int32_t kept[] = {1, 0, 3, 0, /**/ 0, 5, 2, 4};
  int32_t counts[4], offsets[3];
  int64_t displ;

  cr_expect_eq(mz_route_local_rows(kept, 4, 2, 0), 6);
  cr_expect_eq(mz_route_local_rows(kept, 4, 2, 1), 9);
  cr_expect_eq(mz_route_rounds(kept, 4, 2, 0, 2, 4), 3);
  cr_expect_eq(mz_route_rounds(kept, 4, 2, 1, 1, 4), 2);
  cr_expect_eq(mz_route_window(kept, 4, 2, 1, 1, 1, 0, 4, NULL, NULL), 3);
  cr_expect_eq(mz_route_window(kept, 4, 2, 1, 1, 1, 1, 4, NULL, NULL), 1);
  cr_expect_eq(mz_route_window(kept, 4, 2, 1, 0, 2, 1, 4, counts, offsets), 4);
  cr_expect_eq(counts[0] + counts[1], 0);
  cr_expect_eq(counts[2], 1);
  cr_expect_eq(counts[3], 3);
  cr_expect_eq(offsets[1], 1);
  cr_expect_eq(offsets[2], 4);
  cr_expect_eq(mz_route_part(kept, 4, 2, 1, 1, 0, 2, 1, 4, &displ), 4);
  cr_expect_eq(displ, 6); /* after 5 rows to expert 1 and one to expert 2 */
  cr_expect_eq(mz_route_part(kept, 4, 2, 0, 1, 0, 2, 1, 4, &displ), 0);
}

Test(route, nobody_sends_anything_is_one_empty_round)
{
  const int32_t kept[8] = {0};
  int64_t displ;

  cr_expect_eq(mz_route_rounds(kept, 4, 2, 0, 2, 16), 1);
  cr_expect_eq(mz_route_window(kept, 4, 2, 1, 0, 2, 0, 16, NULL, NULL), 0);
  cr_expect_eq(mz_route_part(kept, 4, 2, 1, 0, 0, 2, 0, 16, &displ), 0);
  cr_expect_eq(displ, 0);
}

Test(route, rows_fit_only_if_they_fit_on_every_rank)
{
  const int32_t kept[] = {1, 0, 3, 0, /**/ 0, 5, 2, 4}; /* 6 and 9 rows */
  const int64_t none[] = {0, 0}, some[] = {4, 0}, more[] = {5, 0};

  cr_expect(mz_route_fits(kept, 4, 2, none, 9));
  cr_expect_not(mz_route_fits(kept, 4, 2, none, 8));
  cr_expect(mz_route_fits(kept, 4, 2, some, 10));
  cr_expect_not(mz_route_fits(kept, 4, 2, more, 10));
  cr_expect_not(mz_route_fits(kept, 4, 2, none, 0));
}
