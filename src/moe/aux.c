/* SPDX-License-Identifier: Apache-2.0 */
/* Values of the balance loss and the router z-loss from the statistics of all
 * ranks (moezero/layer.h), always summed in rank order: equal bits on every
 * rank. E experts, k choices, T tokens. */
#include <moezero/moe.h>

static const char *rank_stats(const void *stats, int rank, int64_t stride)
{
  return (const char *)stats + (int64_t)rank * stride * 8;
}

static int64_t int_at(const char *stats, int64_t element)
{
  return ((const int64_t *)(const void *)stats)[element];
}

static double real_at(const char *stats, int64_t element)
{
  return ((const double *)(const void *)stats)[element];
}

/* E * sum_e f_e P_e over the ranks [first, last). */
static double balance(const mz_moe_opts_t *opts, const void *stats, int first,
                      int last, int64_t stride)
{
  int32_t E = opts->num_experts;
  double sum = 0, tokens = 0;

  for (int r = first; r < last; r++)
    tokens += (double)int_at(rank_stats(stats, r, stride), MZ_STATS_TOKENS(E));
  if (tokens == 0) return 0;
  for (int32_t e = 0; e < E; e++) {
    int64_t routed = 0;
    double probs = 0;
    for (int r = first; r < last; r++) {
      const char *s = rank_stats(stats, r, stride);
      routed += int_at(s, MZ_STATS_ROUTED(E) + e);
      probs += real_at(s, MZ_STATS_PROBS(E) + e);
    }
    sum += (double)routed / (tokens * opts->k) * (probs / tokens);
  }
  return E * sum;
}

/* Mean of logsumexp^2 over the ranks [first, last). */
static double mean_z(const mz_moe_opts_t *opts, const void *stats, int first,
                     int last, int64_t stride)
{
  int32_t E = opts->num_experts;
  double z = 0, tokens = 0;

  for (int r = first; r < last; r++) {
    const char *s = rank_stats(stats, r, stride);
    tokens += (double)int_at(s, MZ_STATS_TOKENS(E));
    z += real_at(s, MZ_STATS_Z(E));
  }
  return tokens == 0 ? 0 : z / tokens;
}

typedef double (*value_fn)(const mz_moe_opts_t *, const void *, int, int,
                           int64_t);

static double in_scope(value_fn value, const mz_moe_opts_t *opts,
                       const void *stats, int num_ranks, int64_t stride)
{
  double sum = 0;

  if (opts->aux_scope == MZ_SCOPE_GROUP)
    return value(opts, stats, 0, num_ranks, stride);
  for (int r = 0; r < num_ranks; r++)
    sum += value(opts, stats, r, r + 1, stride);
  return sum / num_ranks;
}

double mz_moe_aux_value(const mz_moe_opts_t *opts, const void *stats,
                        int num_ranks, int64_t stride_elements)
{
  if (opts->aux_loss == MZ_AUX_NONE) return 0;
  return in_scope(balance, opts, stats, num_ranks, stride_elements);
}

double mz_moe_z_value(const mz_moe_opts_t *opts, const void *stats,
                      int num_ranks, int64_t stride_elements)
{
  return in_scope(mean_z, opts, stats, num_ranks, stride_elements);
}
