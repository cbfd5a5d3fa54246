/* SPDX-License-Identifier: Apache-2.0 */
/* Published cases of what a gate's routes send: every route of a dropless gate,
 * and the rows of two ranks that share four experts. */
#include "gate_case.h"

#include "plan/plan.h"

#include <moezero/moe.h>

static void check_row(const float *row, float first, float second)
{
  cr_assert_float_eq(row[0], first, 1e-5, "%g is not %g", row[0], first);
  cr_assert_float_eq(row[1], second, 1e-5, "%g is not %g", row[1], second);
}

/* --- dropless --- */

Test(gate_golden, top3_dropless_keeps_every_route)
{
  static const route_t routes[18] = {
      {0, 0, 4. / 9},   {1, 0, 3. / 9},   {2, 0, 2. / 9},   {0, 1, 45. / 88},
      {1, 1, 25. / 88}, {2, 1, 18. / 88}, {0, 2, 38. / 87}, {1, 2, 28. / 87},
      {2, 2, 21. / 87}, {1, 3, 41. / 85}, {2, 3, 24. / 85}, {0, 3, 20. / 85},
      {2, 4, 43. / 86}, {1, 4, 26. / 86}, {0, 4, 17. / 86}, {0, 5, 36. / 89},
      {3, 0, 34. / 89}, {1, 5, 19. / 89}};
  static const int counts[4] = {6, 6, 5, 1};
  static const double mean[4] = {1.96 / 6, 1.69 / 6, 1.37 / 6, .98 / 6};
  gate_case_t c;

  setup_rows(&c, TOP3, 6, 3);
  run(&c);
  check_routes(&c, routes);
  check_counts(&c, counts, counts, mean);
  teardown(&c);
}

/* The published C of a dropless layer is the largest count of its group. Here
 * no message is padded to C rows, and none is cut to the number of tokens of
 * this rank: the largest part that a rank sends to one expert has C rows, all
 * others have their own counts. Rows of the tables with a tensor-parallel size,
 * which only round C up, have no counterpart: there is no such size. */
Test(gate_golden, dropless_parts_are_as_large_as_the_counts)
{
  static const struct {
    int32_t k, kept[8], capacity;
  } table[] = {
      {1, {3, 1, 0, 1, 1, 1, 1, 2}, 3}, /* G3 */
      {1, {3, 1, 0, 1, 5, 1, 0, 0}, 5}, {1, {3, 1, 0, 1, 0, 0, 9, 0}, 9},
      {2, {5, 6, 3, 2, 4, 4, 4, 4}, 6}, /* G9, rows of G5 */
      {2, {5, 6, 3, 2, 5, 5, 3, 3}, 6}, {2, {5, 6, 3, 2, 2, 3, 4, 7}, 7},
      {3, {6, 6, 5, 1, 5, 4, 5, 4}, 6}, /* G9, rows of G7 */
      {3, {6, 6, 5, 1, 4, 3, 7, 7}, 7},
  };
  mz_moe_opts_t opts = {.num_experts = 4, .ep_size = 2};

  for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
    const int32_t *kept = table[i].kept;
    int64_t most = 0, all[2] = {0}, displ;

    opts.k = table[i].k;
    cr_expect_eq(mz_route_limit(&opts, 8, true), 0);
    for (int32_t s = 0; s < 2; s++)
      for (int32_t e = 0; e < 4; e++) {
        int64_t rows =
            mz_route_part(kept, 4, 2, s, e / 2, e % 2, 1, 0, INT32_MAX, &displ);

        cr_expect_eq(rows, kept[4 * s + e], "row %zu", i);
        most = mz_max_i64(most, rows);
        all[e / 2] += rows;
      }
    cr_expect_eq(most, table[i].capacity, "row %zu", i);
    for (int32_t d = 0; d < 2; d++)
      cr_expect_eq(mz_route_local_rows(kept, 4, 2, d), all[d], "row %zu", i);
  }
}

/* --- G10: what each of two ranks sends --- */

enum { TOKENS = 3, WIDTH = 2 };

typedef struct side {
  int rows[TOKENS * 4];
  float x[TOKENS * WIDTH];
  route_t routes[TOKENS];
  float send[2 * WIDTH], back[2 * WIDTH]; /* without the padding rows */
  float y[TOKENS * WIDTH];
  int routed[4], kept[4];
} side_t;

static void check_side(const side_t *side)
{
  static const float zero[WIDTH] = {0};
  mz_moe_opts_t opts = {
      .num_experts = 4, .k = 1, .aux_loss = MZ_AUX_LOAD_BALANCING};
  float send[2 * WIDTH], y[TOKENS * WIDTH];
  mz_permute_t permute = {.num_tokens = TOKENS, .width = WIDTH, .k = 1};
  mz_combine_t combine = {.num_tokens = TOKENS, .width = WIDTH, .k = 1};
  gate_case_t c;

  setup_rows(&c, side->rows, TOKENS, 1);
  c.gate.policy = MZ_DROP_POSITION;
  c.gate.capacity = (int32_t)mz_route_capacity(TOKENS, 4, 1, 1.0, 1);
  cr_assert_eq(c.gate.capacity, 1);
  run(&c);
  check_routes(&c, side->routes);
  for (int e = 0; e < 4; e++) {
    cr_assert_eq(c.stats[MZ_STATS_ROUTED(4) + e], side->routed[e]);
    cr_assert_eq(c.gate.kept[e], side->kept[e]);
  }
  cr_assert_float_eq(mz_moe_aux_value(&opts, c.stats, 1, 0), 1.466666667, 1e-6);
  permute.row = combine.row = c.gate.row;
  permute.x = side->x;
  permute.send = send;
  cr_assert_eq(mz_k_permute_cpu(NULL, &permute, NULL), MZ_OK);
  for (int i = 0; i < 2; i++)
    check_row(send + i * WIDTH, side->send[i * WIDTH],
              side->send[i * WIDTH + 1]);
  combine.weight = c.gate.weight;
  combine.back = side->back;
  combine.y = y;
  cr_assert_eq(mz_k_combine_cpu(NULL, &combine, NULL), MZ_OK);
  for (int t = 0; t < TOKENS; t++)
    check_row(y + t * WIDTH, side->y[t * WIDTH], side->y[t * WIDTH + 1]);
  cr_assert_arr_eq(y + 2 * WIDTH, zero, sizeof zero);
  teardown(&c);
}

/* The published buffers have C = 1 row for every expert, zeros where no token
 * went; ours have the rows of tokens alone, in the same order. Their way over
 * the wire: tests/ranks/rank_dispatch.c. */
Test(gate_golden, two_ranks_send_and_combine_the_rows_of_their_tokens)
{
  static const side_t first = {.rows = {6, 2, 1, 1, 1, 1, 7, 1, 5, 3, 1, 1},
                               .x = {1, 2, 3, 4, 5, 6},
                               .routes = {{0, 0, .6}, {2, 0, .7}, DROP},
                               .send = {1, 2, 3, 4},
                               .back = {1, 2, 9, 12},
                               .y = {.6f, 1.2f, 6.3f, 8.4f, 0, 0},
                               .routed = {2, 0, 1, 0},
                               .kept = {1, 0, 1, 0}};
  static const side_t second = {.rows = {1, 1, 1, 7, 2, 5, 2, 1, 1, 6, 2, 1},
                                .x = {10, 20, 30, 40, 50, 60},
                                .routes = {{3, 0, .7}, {1, 0, .5}, DROP},
                                .send = {30, 40, 10, 20},
                                .back = {60, 80, 40, 80},
                                .y = {28, 56, 30, 40, 0, 0},
                                .routed = {0, 2, 0, 1},
                                .kept = {0, 1, 0, 1}};

  check_side(&first);
  check_side(&second);
}
