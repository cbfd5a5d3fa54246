/* SPDX-License-Identifier: Apache-2.0 */
/* What every rank derives from the gathered counts. kept[s * E + e]: rows that
 * source s sends to global expert e. Expert-major order of the rows of expert
 * rank d: (expert, source, send order). A window of it is, for each source, a
 * contiguous part of that source's send order: before the window's first
 * expert nothing, of the first and last expert a part, in between all.
 *
 * Windows end at multiples of round_rows in the order of the whole layer,
 * whatever run they belong to: an expert's rows are cut, and its gradient is
 * summed, at the same places however many runs there are. */
#include "plan/plan.h"

#include "base/alloc.h"

int64_t mz_route_capacity(int64_t num_tokens, int32_t num_experts, int32_t k,
                          double capacity_factor, int64_t min_capacity)
{
  float ratio = (float)((double)num_tokens / num_experts);
  float factor = (float)(capacity_factor * k);
  float product = ratio * factor;
  int64_t capacity = (int64_t)product;

  if ((float)capacity < product) capacity++;
  return mz_max_i64(capacity, min_capacity);
}

bool mz_route_drops(const mz_moe_opts_t *opts, bool training)
{
  if (training || opts->eval_drop == MZ_EVAL_AS_TRAINING)
    return opts->drop_tokens;
  return opts->eval_drop == MZ_EVAL_DROPS;
}

int64_t mz_route_limit(const mz_moe_opts_t *opts, int64_t num_tokens,
                       bool training)
{
  if (!mz_route_drops(opts, training)) return 0;
  if (opts->expert_capacity > 0) return opts->expert_capacity;
  return mz_route_capacity(num_tokens, opts->num_experts, opts->k,
                           training ? opts->capacity_factor
                                    : opts->eval_capacity_factor,
                           opts->min_capacity);
}

int64_t mz_route_local_rows(const int32_t *kept, int32_t num_experts,
                            int32_t ep_size, int32_t d)
{
  int32_t local = num_experts / ep_size;
  int64_t rows = 0;

  for (int32_t s = 0; s < ep_size; s++)
    for (int32_t e = 0; e < local; e++)
      rows += kept[(int64_t)s * num_experts + (int64_t)d * local + e];
  return rows;
}

static int64_t run_rows(const int32_t *kept, int32_t num_experts,
                        int32_t ep_size, int32_t d, int32_t first, int32_t num)
{
  int64_t base = (int64_t)d * (num_experts / ep_size) + first;
  int64_t rows = 0;

  for (int32_t s = 0; s < ep_size; s++)
    for (int32_t e = 0; e < num; e++)
      rows += kept[(int64_t)s * num_experts + base + e];
  return rows;
}

/* Where the window of round 0 begins, counted from the first row of a run: at
 * the last multiple of round_rows that is not behind it. */
static int64_t first_window(const int32_t *kept, int32_t num_experts,
                            int32_t ep_size, int32_t d, int32_t first,
                            int64_t round_rows)
{
  return -(run_rows(kept, num_experts, ep_size, d, 0, first) % round_rows);
}

int64_t mz_route_rounds(const int32_t *kept, int32_t num_experts,
                        int32_t ep_size, int32_t first, int32_t num,
                        int64_t round_rows)
{
  int64_t rounds = 1;

  for (int32_t d = 0; d < ep_size; d++) {
    int64_t rows = run_rows(kept, num_experts, ep_size, d, first, num);
    int64_t begin =
        first_window(kept, num_experts, ep_size, d, first, round_rows);

    if (rows > 0)
      rounds = mz_max_i64(rounds, mz_div_up(rows - begin, round_rows));
  }
  return rounds;
}

/* Rows of [at, at + n) that fall into [begin, end). */
static int64_t overlap(int64_t at, int64_t n, int64_t begin, int64_t end)
{
  int64_t a = mz_max_i64(at, begin), b = mz_min_i64(at + n, end);
  return b > a ? b - a : 0;
}

int64_t mz_route_window(const int32_t *kept, int32_t num_experts,
                        int32_t ep_size, int32_t d, int32_t first, int32_t num,
                        int64_t round, int64_t round_rows, int32_t *counts_out,
                        int32_t *offsets_out)
{
  int64_t base = (int64_t)d * (num_experts / ep_size) + first;
  int64_t begin =
      first_window(kept, num_experts, ep_size, d, first, round_rows) +
      round * round_rows;
  int64_t end = begin + round_rows, at = 0, rows = 0;

  for (int32_t e = 0; e < num; e++) {
    if (offsets_out) offsets_out[e] = (int32_t)rows;
    for (int32_t s = 0; s < ep_size; s++) {
      int32_t n = kept[(int64_t)s * num_experts + base + e];
      int64_t in = overlap(at, n, begin, end);

      if (counts_out) counts_out[(int64_t)s * num + e] = (int32_t)in;
      rows += in;
      at += n;
    }
  }
  if (offsets_out) offsets_out[num] = (int32_t)rows;
  return rows;
}

int64_t mz_route_part(const int32_t *kept, int32_t num_experts, int32_t ep_size,
                      int32_t s, int32_t d, int32_t first, int32_t num,
                      int64_t round, int64_t round_rows, int64_t *displ_out)
{
  int64_t base = (int64_t)d * (num_experts / ep_size) + first;
  const int32_t *mine = kept + (int64_t)s * num_experts;
  int64_t begin =
      first_window(kept, num_experts, ep_size, d, first, round_rows) +
      round * round_rows;
  int64_t end = begin + round_rows, at = 0, displ = 0, rows = 0;

  for (int64_t e = 0; e < base; e++)
    displ += mine[e];
  for (int32_t e = 0; e < num; e++)
    for (int32_t r = 0; r < ep_size; r++) {
      int32_t n = kept[(int64_t)r * num_experts + base + e];

      if (r == s) {
        if (at + n <= begin)
          displ += n; /* went in an earlier round */
        else if (at < begin)
          displ += begin - at;
        rows += overlap(at, n, begin, end);
      }
      at += n;
    }
  *displ_out = displ;
  return rows;
}

bool mz_route_fits(const int32_t *kept, int32_t num_experts, int32_t ep_size,
                   const int64_t *used, int64_t pool_rows)
{
  for (int32_t d = 0; d < ep_size; d++)
    if (used[d] + mz_route_local_rows(kept, num_experts, ep_size, d) >
        pool_rows)
      return false;
  return true;
}
