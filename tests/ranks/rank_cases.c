/* SPDX-License-Identifier: Apache-2.0 */
/* Cases that need data, routes or gradients of their own:
 *   rank_cases routes     2 ranks: each rank uses one expert of four only
 *   rank_cases ragged     2 ranks: one has half the tokens, tokens drop
 *   rank_cases empty      2 ranks of one expert-parallel group: one has no
 * token rank_cases norm FILE  4 ranks: injected gradients of a known norm; FILE
 * is written rank_cases divide     8 ranks: (ranks, experts, ep_size) that
 * divide, and those that do not A last word "inline" runs without the
 * communication thread. Exit code 0: all is right. */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/engine_impl.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NUM_STAGES = 4, TOP = TINY_VOCAB / 2 };

static int world_rank;

/* --- routes: ids below TOP go to expert 0, the others to expert 3 --- */

static void give_routes(tiny_given_t *g)
{
  char table[TINY_VALUE] = "";
  size_t at = 0;

  for (int i = 0; i < TINY_VOCAB; i++)
    at += (size_t)snprintf(table + at, sizeof table - at, "%s%d", i ? "," : "",
                           i < TOP ? 0 : 3);
  tiny_give(g, "debug.route_table=[%s]", table);
  tiny_give(g, "moe.k=1");
  tiny_give(g, "optimizer.params.weight_decay=0");
}

/* Sample 0, of rank 0, has ids below TOP only, sample 1 the others only. */
static int32_t sided_token(int64_t step, int64_t sample, int64_t t)
{
  return tiny_token(step, sample, t) % TOP + (int32_t)(sample % 2) * TOP;
}

static mz_status_t check_counts(const mz_step_result_t *r)
{
  MZ_REQUIRE(r->num_moes == 2, MZ_ERR_DATA, "%d MoE layers", r->num_moes);
  for (int m = 0; m < r->num_moes; m++)
    for (int e = 0; e < 4; e++) {
      int64_t wanted = e == 0 || e == 3 ? 16 : 0;
      MZ_REQUIRE(r->moes[m].routed[e] == wanted && r->moes[m].kept[e] == wanted,
                 MZ_ERR_DATA,
                 "layer %d expert %d: routed %" PRId64 ", kept %" PRId64
                 ", need %" PRId64,
                 m, e, r->moes[m].routed[e], r->moes[m].kept[e], wanted);
    }
  return MZ_OK;
}

/* The local mean gradient of rank 0's sequence, on one rank. */
static mz_status_t local_grads(tiny_run_t *grads)
{
  tiny_given_t g = {.num = 0};
  mz_step_result_t result;
  tiny_t tiny;
  mz_status_t st;

  give_routes(&g);
  tiny_give(&g, "train_batch_size=1");
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_SELF, &tiny), done);
  tiny.token = sided_token;
  MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
  MZ_TRY_GOTO(st, tiny_read(&tiny, MZ_PART_GRADS, grads), done);
done:
  tiny_destroy(&tiny);
  return st;
}

/* Expert 0 hears of rank 0 only: half of that rank's mean. */
static mz_status_t check_expert_0(const tiny_run_t *local,
                                  const tiny_run_t *grads)
{
  int checked = 0;

  for (int t = 0; t < grads->num_tensors; t++) {
    double sum = 0, square = 0;

    if (!strstr(grads->names[t], ".experts.0.")) continue;
    for (int64_t i = grads->offsets[t]; i < grads->offsets[t + 1]; i++) {
      double half = local->values[i] / 2.0, d = grads->values[i] - half;
      square += half * half;
      sum += d * d;
    }
    MZ_REQUIRE(square > 0 && sqrt(sum) <= 1e-5 * sqrt(square), MZ_ERR_DATA,
               "%s: %g apart from half of the local gradient, norm %g",
               grads->names[t], sqrt(sum), sqrt(square));
    checked++;
  }
  MZ_REQUIRE(checked == 8, MZ_ERR_DATA, "%d tensors of expert 0", checked);
  return MZ_OK;
}

static mz_status_t check_idle(const tiny_run_t *before, const tiny_run_t *after)
{
  for (int t = 0; t < before->num_tensors; t++) {
    const char *name = before->names[t];
    bool idle = strstr(name, ".experts.1.") || strstr(name, ".experts.2.");
    int64_t at = before->offsets[t], n = before->offsets[t + 1] - at;
    bool same = memcmp(before->values + at, after->values + at,
                       (size_t)n * sizeof(float)) == 0;

    MZ_REQUIRE(same == idle, MZ_ERR_DATA, "%s is %s", name,
               same ? "unchanged" : "changed");
  }
  return MZ_OK;
}

static mz_status_t walk_routes(tiny_t *tiny, const tiny_run_t *local,
                               double *losses)
{
  tiny_run_t before = {0}, grads = {0}, after = {0};
  mz_step_result_t result;
  mz_status_t st;

  MZ_TRY_GOTO(st, tiny_read(tiny, MZ_PART_WEIGHTS, &before), done);
  for (int i = 0; i < 10; i++) {
    MZ_TRY_GOTO(st, tiny_step(tiny, &result), done);
    MZ_TRY_GOTO(st, check_counts(&result), done);
    losses[i] = result.loss;
    if (i > 0) continue;
    MZ_TRY_GOTO(st, tiny_read(tiny, MZ_PART_GRADS, &grads), done);
    MZ_TRY_GOTO(st, check_expert_0(local, &grads), done);
  }
  MZ_TRY_GOTO(st, tiny_read(tiny, MZ_PART_WEIGHTS, &after), done);
  MZ_TRY_GOTO(st, check_idle(&before, &after), done);
done:
  tiny_run_free(&before);
  tiny_run_free(&grads);
  tiny_run_free(&after);
  return st;
}

static mz_status_t try_routes(int stage, const tiny_run_t *local,
                              const double *plain, double *losses)
{
  tiny_given_t g = {.num = 0};
  tiny_t tiny;
  mz_status_t st;

  give_routes(&g);
  tiny_give(&g, "train_batch_size=2");
  tiny_give(&g, "zero_optimization.stage=%d", stage);
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  tiny.token = sided_token;
  MZ_TRY_GOTO(st, walk_routes(&tiny, local, losses), done);
  for (int i = 0; i < 10; i++)
    MZ_REQUIRE_GOTO(fabs(losses[i] - plain[i]) <= 1e-5 * plain[i], st, done,
                    MZ_ERR_DATA, "step %d: loss %.9g, stage 0: %.9g", i + 1,
                    losses[i], plain[i]);
done:
  tiny_destroy(&tiny);
  return st;
}

static void case_routes(void)
{
  double losses[NUM_STAGES][10];
  tiny_run_t local = {0};

  tiny_report(local_grads(&local), "local gradient %d", 0);
  for (int stage = 0; stage < NUM_STAGES && tiny_num_failed == 0; stage++)
    tiny_report(try_routes(stage, &local, losses[0], losses[stage]),
                "routes, stage %d", stage);
  tiny_run_free(&local);
}

/* --- ragged: 16 tokens on rank 0, 8 on rank 1; 4 places an expert --- */

static void give_ragged(tiny_given_t *g, const char *lengths, int batch, int ep)
{
  tiny_give(g, "debug.tokens_per_rank=%s", lengths);
  tiny_give(g, "train_batch_size=%d", batch);
  tiny_give(g, "moe.ep_size=%d", ep);
  tiny_give(g, "moe.k=1");
  tiny_give(g, "moe.drop_tokens=true");
  tiny_give(g, "moe.capacity_factor=1.0");
  tiny_give(g, "moe.eval_capacity_factor=1.0");
  tiny_give(g, "optimizer.params.lr=0"); /* evaluation has the same weights */
}

/* What one rank computes of a sample with the capacity that both have: 4 by
 * min_capacity where its own tokens would give less. Adds to the sums of
 * training and of evaluation. */
static mz_status_t lone_loss(int64_t sample, int tokens, double sums[2])
{
  tiny_given_t g = {.num = 0};
  char lengths[16];
  mz_step_result_t result;
  double sum;
  int64_t labels;
  tiny_t tiny;
  mz_status_t st;

  snprintf(lengths, sizeof lengths, "[%d]", tokens);
  give_ragged(&g, lengths, 1, 1);
  tiny_give(&g, "moe.min_capacity=4");
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_SELF, &tiny), done);
  tiny.first_sample = sample;
  MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
  MZ_TRY_GOTO(st, tiny_eval(&tiny, &sum, &labels), done);
  sums[0] += result.lm_loss * tokens;
  sums[1] += sum;
done:
  tiny_destroy(&tiny);
  return st;
}

static mz_status_t check_capacity(const tiny_t *tiny)
{
  for (int m = 0; m < tiny->engine->plan->num_moes; m++)
    MZ_REQUIRE(tiny->engine->moes[m].call.capacity == 4, MZ_ERR_DATA,
               "layer %d: capacity %d, need 4", m,
               tiny->engine->moes[m].call.capacity);
  return MZ_OK;
}

static mz_status_t check_ragged(const mz_step_result_t *r, double expected)
{
  int64_t routed = 0, kept = 0;

  MZ_REQUIRE(r->labels == 24 && r->tokens == 24, MZ_ERR_DATA,
             "%" PRId64 " labels, %" PRId64 " tokens, need 24", r->labels,
             r->tokens);
  MZ_REQUIRE(fabs(r->loss - expected) <= 1e-5 * expected, MZ_ERR_DATA,
             "loss %.9g, sum / 24 is %.9g", r->loss, expected);
  for (int e = 0; e < 4; e++) {
    routed += r->moes[0].routed[e];
    kept += r->moes[0].kept[e];
    MZ_REQUIRE(r->moes[0].kept[e] <= 8, MZ_ERR_DATA,
               "expert %d keeps %" PRId64 " of two times 4", e,
               r->moes[0].kept[e]);
  }
  MZ_REQUIRE(routed == 24 && kept < routed, MZ_ERR_DATA,
             "routed %" PRId64 ", kept %" PRId64 ": nothing was dropped",
             routed, kept);
  return MZ_OK;
}

static mz_status_t try_ragged(int stage, const double sums[2])
{
  tiny_given_t g = {.num = 0};
  mz_step_result_t result;
  tiny_t tiny;
  double sum;
  int64_t labels;
  mz_status_t st;

  give_ragged(&g, "[16,8]", 2, 2);
  tiny_give(&g, "moe.min_capacity=0");
  tiny_give(&g, "zero_optimization.stage=%d", stage);
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
  MZ_TRY_GOTO(st, check_capacity(&tiny), done);
  MZ_TRY_GOTO(st, check_ragged(&result, sums[0] / 24), done);
  MZ_TRY_GOTO(st, tiny_eval(&tiny, &sum, &labels), done);
  MZ_TRY_GOTO(st, check_capacity(&tiny), done);
  MZ_REQUIRE_GOTO(labels == 24 && fabs(sum - sums[1]) <= 1e-5 * sums[1], st,
                  done, MZ_ERR_DATA,
                  "evaluation: %" PRId64 " labels, sum %.9g, need %.9g", labels,
                  sum, sums[1]);
done:
  tiny_destroy(&tiny);
  return st;
}

static void case_ragged(void)
{
  double sums[2] = {0};
  mz_status_t st = lone_loss(0, 16, sums);

  if (st == MZ_OK) st = lone_loss(1, 8, sums);
  tiny_report(st, "one rank %d", 0);
  for (int stage = 0; stage < NUM_STAGES; stage++)
    tiny_report(try_ragged(stage, sums), "ragged, stage %d", stage);
}

/* --- empty: rank 0 has all sequences, rank 1 none --- */

enum { ALL = 2 };

static mz_status_t step_of_first_rank(tiny_t *tiny, int32_t sequences,
                                      mz_step_result_t *result)
{
  int32_t ids[ALL * TINY_SEQUENCE], next[ALL * TINY_SEQUENCE];
  int64_t samples[ALL] = {0, 1};
  int32_t own, most = ALL;
  mz_step_data_t data = {.num_micro = 1,
                         .tokens = ids,
                         .labels = next,
                         .samples = samples,
                         .sequences = &own,
                         .max_sequences = &most};
  int rank;

  MPI_Comm_rank(tiny->comm, &rank);
  own = rank == 0 ? sequences : 0;
  for (int s = 0; s < ALL; s++)
    for (int t = 0; t < TINY_SEQUENCE; t++) {
      ids[s * TINY_SEQUENCE + t] = tiny_token(0, s, t);
      next[s * TINY_SEQUENCE + t] = tiny_token(0, s, t + 1);
    }
  return MZ_TRACE(mz_engine_step(tiny->engine, &data, result));
}

/* One rank that has more than it says ends the step of all. */
static mz_status_t check_refused(tiny_t *tiny)
{
  mz_step_result_t result;
  mz_status_t st = step_of_first_rank(tiny, ALL + 1, &result);

  MZ_REQUIRE(st != MZ_OK && strstr(mz_error_message(),
                                   "micro-batch 0: 3 sequences, 2 on the rank "
                                   "with the most, planned are 2"),
             MZ_ERR_DATA, "3 sequences give status %d, \"%s\"", (int)st,
             mz_error_message());
  return MZ_OK;
}

/* The first step on a communicator: its loss and gradients. */
static mz_status_t take_empty(MPI_Comm comm, int ep, int stage, double *loss,
                              tiny_run_t *grads)
{
  tiny_given_t g = {.num = 0};
  mz_step_result_t result;
  tiny_t tiny;
  mz_status_t st;
  int size;

  MPI_Comm_size(comm, &size);
  tiny_give(&g, "train_batch_size=%d", ALL * size);
  tiny_give(&g, "train_micro_batch_size_per_gpu=%d", ALL);
  tiny_give(&g, "moe.ep_size=%d", ep);
  tiny_give(&g, "moe.aux_loss=load_balancing");
  tiny_give(&g, "zero_optimization.stage=%d", stage);
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, comm, &tiny), done);
  MZ_TRY_GOTO(st, check_refused(&tiny), done);
  MZ_TRY_GOTO(st, step_of_first_rank(&tiny, ALL, &result), done);
  MZ_REQUIRE_GOTO(result.tokens == ALL * TINY_SEQUENCE, st, done, MZ_ERR_DATA,
                  "%" PRId64 " tokens", result.tokens);
  *loss = result.loss;
  MZ_TRY_GOTO(st, tiny_read(&tiny, MZ_PART_GRADS, grads), done);
done:
  tiny_destroy(&tiny);
  return st;
}

static mz_status_t try_empty(int stage, double expected, const tiny_run_t *one)
{
  tiny_run_t grads = {0};
  tiny_apart_t apart;
  double loss;
  mz_status_t st;

  MZ_TRY_GOTO(st, take_empty(MPI_COMM_WORLD, 2, stage, &loss, &grads), done);
  apart = tiny_compare(one, &grads);
  MZ_REQUIRE_GOTO(fabs(loss - expected) <= 1e-5 * expected &&
                      apart.tensor <= 1e-5,
                  st, done, MZ_ERR_DATA,
                  "loss %.9g, of one rank %.9g; gradients %g apart in %s", loss,
                  expected, apart.tensor, apart.name);
done:
  tiny_run_free(&grads);
  return st;
}

static void case_empty(void)
{
  tiny_run_t one = {0};
  double loss = 0;

  tiny_report(take_empty(MPI_COMM_SELF, 1, 0, &loss, &one), "all tokens %d", 1);
  for (int stage = 0; stage < NUM_STAGES && tiny_num_failed == 0; stage++)
    tiny_report(try_empty(stage, loss, &one), "a rank without tokens, stage %d",
                stage);
  tiny_run_free(&one);
}

/* --- norm: 4 in a dense tensor, 3 in expert 0, NaN in all padding --- */

static mz_status_t write_norms(const char *path)
{
  FILE *file = fopen(path, "w");
  bool whole;

  MZ_REQUIRE(file, MZ_ERR_IO, "%s: cannot write", path);
  whole = fputs("{\"h.0.attn.qkv.weight\": 4, "
                "\"h.1.moe.experts.0.up.weight\": 3}\n",
                file) >= 0;
  whole = fclose(file) == 0 && whole;
  MZ_REQUIRE(whole, MZ_ERR_IO, "%s: cannot write", path);
  return MZ_OK;
}

static mz_status_t try_norm(int stage, const char *path)
{
  tiny_given_t g = {.num = 0};
  mz_step_result_t result;
  tiny_run_t after = {0};
  tiny_t tiny;
  mz_status_t st;

  tiny_give(&g, "debug.inject_grads=\"%s\"", path);
  tiny_give(&g, "zero_optimization.stage=%d", stage);
  tiny_give(&g, "moe.ep_size=2");
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
  MZ_REQUIRE_GOTO(fabs(result.grad_norm - 5) <= 1e-5 && !result.skipped, st,
                  done, MZ_ERR_DATA, "norm %.9g, need 5; culprit \"%s\"",
                  result.grad_norm, result.culprit);
  MZ_TRY_GOTO(st, tiny_read(&tiny, MZ_PART_WEIGHTS, &after), done);
  for (int64_t i = 0; i < after.num_values; i++)
    MZ_REQUIRE_GOTO(isfinite(after.values[i]), st, done, MZ_ERR_DATA,
                    "element %" PRId64 " is not finite", i);
done:
  tiny_run_free(&after);
  tiny_destroy(&tiny);
  return st;
}

static void case_norm(const char *path)
{
  tiny_report(world_rank == 0 ? write_norms(path) : MZ_OK, "norms %d", 0);
  for (int stage = 0; stage < NUM_STAGES; stage++)
    tiny_report(try_norm(stage, path), "norm, stage %d", stage);
}

/* --- divide --- */

typedef struct division {
  int ranks, ep;
  const char *experts, *more;
} division_t;

static const division_t valid[] = {
    {1, 1, "8", NULL}, {3, 1, "8", NULL},
    {4, 2, "8", NULL}, {4, 4, "8", NULL},
    {8, 4, "4", NULL}, {4, 4, "[0,4,8]", "model.num_hidden_layers=3"}};

static const division_t invalid[] = {
    {3, 2, "8", "num_experts 8, moe.ep_size 2, 3 ranks"},
    {3, 2, "9", "num_experts 9, moe.ep_size 2, 3 ranks"},
    {3, 3, "8", "num_experts 8, moe.ep_size 3, 3 ranks"},
    {4, 4, "6", "num_experts 6, moe.ep_size 4, 4 ranks"},
    {2, 4, "8", "num_experts 8, moe.ep_size 4, 2 ranks"},
    {4, 3, "8", "num_experts 8, moe.ep_size 3, 4 ranks"},
    {4, 0, "8", "moe.ep_size"},
    {4, -1, "8", "moe.ep_size"},
    {8, 8, "4", "num_experts 4, moe.ep_size 8, 8 ranks"}};

static mz_status_t check_statistics(const tiny_t *tiny,
                                    const mz_step_result_t *r)
{
  bool dense = false;

  for (int t = 0; t < mz_decl_num_tensors(tiny->decl); t++) {
    const char *name = mz_decl_tensor_name(tiny->decl, t);
    dense = dense || strncmp(name, "h.0.mlp.", 8) == 0;
    MZ_REQUIRE(strncmp(name, "h.0.moe.", 8) != 0, MZ_ERR_DATA, "%s in block 0",
               name);
  }
  MZ_REQUIRE(dense && r->num_moes == 2 && r->moes[0].num_experts == 4 &&
                 r->moes[1].num_experts == 8,
             MZ_ERR_DATA, "%d MoE layers of %d and %d experts", r->num_moes,
             r->moes[0].num_experts, r->moes[1].num_experts);
  return MZ_OK;
}

static mz_status_t step_once(const division_t *d, MPI_Comm comm, int ep,
                             mz_step_result_t *result)
{
  tiny_given_t g = {.num = 0};
  tiny_t tiny;
  mz_status_t st;

  tiny_give(&g, "moe.num_experts=%s", d->experts);
  tiny_give(&g, "moe.ep_size=%d", ep);
  tiny_give(&g, "train_batch_size=%d", d->ranks);
  if (d->more) tiny_give(&g, "%s", d->more);
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, comm, &tiny), done);
  MZ_TRY_GOTO(st, tiny_step(&tiny, result), done);
  if (d->more) MZ_TRY_GOTO(st, check_statistics(&tiny, result), done);
done:
  tiny_destroy(&tiny);
  return st;
}

static mz_status_t try_valid(const division_t *d, MPI_Comm comm)
{
  mz_step_result_t one, many;

  MZ_TRY(step_once(d, MPI_COMM_SELF, 1, &one));
  MZ_TRY(step_once(d, comm, d->ep, &many));
  MZ_REQUIRE(fabs(many.loss - one.loss) <= 1e-5 * one.loss && one.loss > 0,
             MZ_ERR_DATA, "loss %.9g, of one rank %.9g", many.loss, one.loss);
  return MZ_OK;
}

static mz_status_t try_invalid(const division_t *d, MPI_Comm comm)
{
  tiny_given_t g = {.num = 0};
  tiny_t tiny;
  mz_status_t st;

  tiny_give(&g, "moe.num_experts=%s", d->experts);
  tiny_give(&g, "moe.ep_size=%d", d->ep);
  tiny_give(&g, "train_batch_size=%d", d->ranks);
  st = tiny_create(g.all, g.num, comm, &tiny);
  tiny_destroy(&tiny);
  MZ_REQUIRE(st == MZ_ERR_CONFIG && strstr(mz_error_message(), d->more),
             MZ_ERR_DATA, "status \"%s\", no \"%s\" in \"%s\"",
             mz_status_text(st), d->more, mz_error_message());
  return MZ_OK;
}

static void try_division(const division_t *d,
                         mz_status_t (*try_it)(const division_t *, MPI_Comm))
{
  mz_status_t st = MZ_OK;
  MPI_Comm part;
  char name[64];

  MPI_Comm_split(MPI_COMM_WORLD, world_rank < d->ranks ? 0 : MPI_UNDEFINED,
                 world_rank, &part);
  if (part != MPI_COMM_NULL) {
    st = try_it(d, part);
    MPI_Comm_free(&part);
  }
  snprintf(name, sizeof name, "%s: %s experts, ep_size %d, ranks",
           try_it == try_valid ? "valid" : "invalid", d->experts, d->ep);
  tiny_report(st, "%s %d", name, d->ranks);
}

static void case_divide(void)
{
  for (size_t i = 0; i < sizeof valid / sizeof valid[0]; i++)
    try_division(&valid[i], try_valid);
  for (size_t i = 0; i < sizeof invalid / sizeof invalid[0]; i++)
    try_division(&invalid[i], try_invalid);
}

/* The number of ranks is part of a case. */
static int run_case(int argc, char **argv)
{
  int size;

  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (strcmp(argv[1], "routes") == 0 && size == 2)
    case_routes();
  else if (strcmp(argv[1], "ragged") == 0 && size == 2)
    case_ragged();
  else if (strcmp(argv[1], "empty") == 0 && size == 2)
    case_empty();
  else if (strcmp(argv[1], "norm") == 0 && size == 4 && argc >= 3)
    case_norm(argv[2]);
  else if (strcmp(argv[1], "divide") == 0 && size == 8)
    case_divide();
  else
    return 2;
  return tiny_num_failed > 0;
}

int main(int argc, char **argv)
{
  int provided, code;

  if (argc < 2) return 2;
  tiny_inline = strcmp(argv[argc - 1], "inline") == 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  code = run_case(argc, argv);
  MPI_Finalize();
  return code;
}
