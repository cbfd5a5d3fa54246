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

static double tokens_of(int32_t E, const void *stats, int first, int last,
                        int64_t stride)
{
  double tokens = 0;

  for (int r = first; r < last; r++)
    tokens += (double)int_at(rank_stats(stats, r, stride), MZ_STATS_TOKENS(E));
  return tokens;
}

/* Over the ranks [first, last): E * sum_e f_e P_e, f of all choices or of first
 * ones. */
static double product(const mz_moe_opts_t *opts, const void *stats, int first,
                      int last, int64_t stride)
{
  int32_t E = opts->num_experts;
  bool firsts = opts->aux_loss == MZ_AUX_FIRST_CHOICE;
  int64_t counts = firsts ? MZ_STATS_FIRST(E) : MZ_STATS_ROUTED(E);
  double sum = 0, tokens = tokens_of(E, stats, first, last, stride);

  if (tokens == 0) return 0;
  for (int32_t e = 0; e < E; e++) {
    int64_t count = 0;
    double probs = 0;
    for (int r = first; r < last; r++) {
      const char *s = rank_stats(stats, r, stride);
      count += int_at(s, counts + e);
      probs += real_at(s, MZ_STATS_PROBS(E) + e);
    }
    sum += (double)count / (tokens * (firsts ? 1 : opts->k)) * (probs / tokens);
  }
  return E * sum;
}

/* Over the ranks [first, last): sum_e (P_e - 1/E)^2. */
static double squares(const mz_moe_opts_t *opts, const void *stats, int first,
                      int last, int64_t stride)
{
  int32_t E = opts->num_experts;
  double sum = 0, tokens = tokens_of(E, stats, first, last, stride);

  if (tokens == 0) return 0;
  for (int32_t e = 0; e < E; e++) {
    double probs = 0, apart;
    for (int r = first; r < last; r++)
      probs += real_at(rank_stats(stats, r, stride), MZ_STATS_PROBS(E) + e);
    apart = probs / tokens - 1.0 / E;
    sum += apart * apart;
  }
  return sum;
}

/* Mean of logsumexp^2 over the ranks [first, last). */
static double mean_z(const mz_moe_opts_t *opts, const void *stats, int first,
                     int last, int64_t stride)
{
  int32_t E = opts->num_experts;
  double z = 0, tokens = tokens_of(E, stats, first, last, stride);

  for (int r = first; r < last; r++)
    z += real_at(rank_stats(stats, r, stride), MZ_STATS_Z(E));
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
  return in_scope(opts->aux_loss == MZ_AUX_SQUARED ? squares : product, opts,
                  stats, num_ranks, stride_elements);
}

double mz_moe_z_value(const mz_moe_opts_t *opts, const void *stats,
                      int num_ranks, int64_t stride_elements)
{
  return in_scope(mean_z, opts, stats, num_ranks, stride_elements);
}
