/* SPDX-License-Identifier: Apache-2.0 */
/* Cases whose numbers are known beforehand, or must be the same bit by bit:
 *   rank_numbers losses   2 ranks: counts, balance and z-loss of fixed logits
 *   rank_numbers masked   2 ranks: one without a label, then both
 *   rank_numbers eval     2 ranks: training does not see evaluations
 *   rank_numbers limit    3 ranks: MPI calls that take 7 elements at most
 * A last word "inline" runs without the communication thread. Exit code 0: all
 * is right. */
#include "tiny.h"

#include "base/check.h"
#include "train/engine_impl.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NUM_STAGES = 4, NUM_EXPERTS = 4 };

static mz_status_t near(const char *what, double found, double wanted,
                        double bound)
{
  MZ_REQUIRE(fabs(found - wanted) <= bound, MZ_ERR_DATA,
             "%s: %.9g, need %.9g within %g", what, found, wanted, bound);
  return MZ_OK;
}

static bool same_values(const tiny_run_t *a, const tiny_run_t *b)
{
  return a->num_values == b->num_values && a->num_values > 0 &&
         memcmp(a->values, b->values, (size_t)a->num_values * sizeof(float)) ==
             0;
}

/* --- losses: every token has the same logits in both MoE layers --- */

typedef struct published {
  const char *logits;
  int k;
  double aux, z; /* of one layer */
} published_t;

static const published_t published[] = {{"[0,0,0,0]", 2, 1.0, 1.921812},
                                        {"[10,0,0,0]", 1, 3.999455, 100.0027},
                                        {"[10,0,0,0]", 2, 1.999818, 100.0027}};

enum { TOKENS = 2 * TINY_SEQUENCE, NUM_MOES = 2 };

static mz_status_t check_losses(const published_t *p, const mz_step_result_t *r)
{
  MZ_REQUIRE(r->num_moes == NUM_MOES && r->tokens == TOKENS, MZ_ERR_DATA,
             "%d MoE layers, %" PRId64 " tokens", r->num_moes, r->tokens);
  for (int m = 0; m < NUM_MOES; m++)
    for (int e = 0; e < NUM_EXPERTS; e++) {
      int64_t wanted = e < p->k ? TOKENS : 0; /* of ties the lowest ids */
      MZ_REQUIRE(r->moes[m].routed[e] == wanted && r->moes[m].kept[e] == wanted,
                 MZ_ERR_DATA,
                 "layer %d expert %d: routed %" PRId64 ", kept %" PRId64
                 ", need %" PRId64,
                 m, e, r->moes[m].routed[e], r->moes[m].kept[e], wanted);
    }
  MZ_TRY(near("balance loss", r->aux_loss, NUM_MOES * p->aux, 2e-6));
  MZ_TRY(near("z-loss", r->z_loss, NUM_MOES * p->z, 2e-6 * p->z));
  return MZ_TRACE(near("loss - LM loss", r->loss - r->lm_loss,
                       0.01 * NUM_MOES * p->aux, 2e-8));
}

static mz_status_t try_losses(const published_t *p, int ep, int stage)
{
  tiny_given_t g = {.num = 0};
  mz_step_result_t result;
  tiny_t tiny;
  mz_status_t st;

  tiny_give(&g, "debug.fixed_logits=%s", p->logits);
  tiny_give(&g, "moe.k=%d", p->k);
  tiny_give(&g, "moe.ep_size=%d", ep);
  tiny_give(&g, "moe.aux_loss=load_balancing");
  tiny_give(&g, "moe.aux_loss_coef=0.01");
  tiny_give(&g, "train_batch_size=2");
  tiny_give(&g, "zero_optimization.stage=%d", stage);
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  for (int i = 0; i < 2; i++) {
    MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
    MZ_TRY_GOTO(st, check_losses(p, &result), done);
  }
done:
  tiny_destroy(&tiny);
  return st;
}

static void case_losses(void)
{
  for (size_t i = 0; i < sizeof published / sizeof published[0]; i++)
    for (int ep = 1; ep <= 2; ep++)
      for (int stage = 0; stage < NUM_STAGES; stage++) {
        char name[64];
        snprintf(name, sizeof name, "logits %s, k %d, ep_size %d, stage",
                 published[i].logits, published[i].k, ep);
        tiny_report(try_losses(&published[i], ep, stage), "%s %d", name, stage);
      }
}

/* --- masked: 16 labels on rank 0 in the first micro-batch, none elsewhere ---
 */

enum { MAX_MICRO = 2 };

typedef struct first_step {
  double loss;
  tiny_run_t grads;
} first_step_t;

/* One sequence a micro-batch; what has labels: the first one, or nothing. */
static mz_status_t masked_step(tiny_t *tiny, bool labels,
                               mz_step_result_t *result)
{
  int32_t ids[MAX_MICRO * TINY_SEQUENCE], next[MAX_MICRO * TINY_SEQUENCE];
  int32_t one[MAX_MICRO] = {1, 1};
  int64_t samples[MAX_MICRO];
  const mz_config_values_t *v = mz_config_values(tiny->config);
  mz_step_data_t data = {.num_micro = (int32_t)v->gradient_accumulation_steps,
                         .tokens = ids,
                         .labels = next,
                         .samples = samples,
                         .sequences = one,
                         .max_sequences = one};
  int rank, size;

  MPI_Comm_rank(tiny->comm, &rank);
  MPI_Comm_size(tiny->comm, &size);
  for (int32_t j = 0; j < data.num_micro; j++) {
    samples[j] = j * size + rank;
    for (int32_t t = 0; t < TINY_SEQUENCE; t++) {
      int32_t at = j * TINY_SEQUENCE + t;
      ids[at] = tiny_token(0, samples[j], t);
      next[at] = labels && j == 0 ? tiny_token(0, samples[j], t + 1) : -1;
    }
  }
  return MZ_TRACE(mz_engine_step(tiny->engine, &data, result));
}

/* An output layer of zeros gives every token the same probability. */
static mz_status_t clear_head(tiny_t *tiny)
{
  static const float zeros[TINY_VOCAB * 32];
  int32_t head = mz_decl_find_tensor(tiny->decl, "lm_head.weight");

  MZ_REQUIRE(head >= 0 &&
                 mz_decl_tensor_elements(tiny->decl, head) == TINY_VOCAB * 32,
             MZ_ERR_DATA, "tensor %d is no output layer", head);
  return MZ_TRACE(mz_engine_write(tiny->engine, head, MZ_PART_WEIGHTS, zeros));
}

static mz_status_t create_masked(MPI_Comm comm, const char *mask, int stage,
                                 int accumulation, tiny_t *tiny)
{
  tiny_given_t g = {.num = 0};
  int size;

  MPI_Comm_size(comm, &size);
  tiny_give(&g, "train_batch_size=%d", size * accumulation);
  tiny_give(&g, "train_micro_batch_size_per_gpu=1");
  tiny_give(&g, "debug.label_mask=%s", mask);
  tiny_give(&g, "optimizer.params.weight_decay=0.1");
  tiny_give(&g, "zero_optimization.stage=%d", stage);
  if (strcmp(mask, "[0,1]") == 0) {
    tiny_give(&g, "moe.aux_loss=load_balancing");
    tiny_give(&g, "moe.aux_loss_coef=0.01");
    tiny_give(&g, "moe.z_loss_coef=0.01");
  }
  return MZ_TRACE(tiny_create(g.all, g.num, comm, tiny));
}

/* The 16 tokens on one rank. */
static mz_status_t reference(bool cleared, first_step_t *first)
{
  mz_step_result_t result;
  tiny_t tiny;
  mz_status_t st;

  MZ_TRY_GOTO(st, create_masked(MPI_COMM_SELF, "[]", 0, 1, &tiny), done);
  if (cleared) MZ_TRY_GOTO(st, clear_head(&tiny), done);
  MZ_TRY_GOTO(st, masked_step(&tiny, true, &result), done);
  first->loss = result.loss;
  MZ_TRY_GOTO(st, tiny_read(&tiny, MZ_PART_GRADS, &first->grads), done);
  if (cleared) MZ_TRY_GOTO(st, near("loss", result.loss, log(64), 1e-6), done);
done:
  tiny_destroy(&tiny);
  return st;
}

static mz_status_t check_valid(tiny_t *tiny, const first_step_t *first)
{
  mz_step_result_t r;
  tiny_run_t grads = {0};
  tiny_apart_t apart;
  mz_status_t st;

  MZ_TRY_GOTO(st, masked_step(tiny, true, &r), done);
  MZ_REQUIRE_GOTO(r.labels == 16 && !r.skipped, st, done, MZ_ERR_DATA,
                  "%" PRId64 " labels, skipped %d", r.labels, r.skipped);
  MZ_TRY_GOTO(st, near("loss", r.loss, first->loss, 1e-5 * first->loss), done);
  MZ_TRY_GOTO(st, tiny_read(tiny, MZ_PART_GRADS, &grads), done);
  apart = tiny_compare(&first->grads, &grads);
  MZ_REQUIRE_GOTO(apart.tensor <= 1e-5, st, done, MZ_ERR_DATA,
                  "gradients are %g apart in %s", apart.tensor, apart.name);
done:
  tiny_run_free(&grads);
  return st;
}

/* What every rank got must be what all got. */
static mz_status_t check_agreed(const mz_step_result_t *r, uint64_t hash)
{
  double own[6] = {r->loss,         r->lm_loss, r->grad_norm,
                   (double)r->step, r->skipped, (double)(hash >> 16)};
  double low[6], high[6];

  MPI_Allreduce(own, low, 6, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
  MPI_Allreduce(own, high, 6, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  for (int i = 0; i < 6; i++)
    MZ_REQUIRE(low[i] == high[i], MZ_ERR_DATA, "number %d: %.17g to %.17g", i,
               low[i], high[i]);
  return MZ_OK;
}

/* Nothing moves but the number of steps. */
static mz_status_t check_none(tiny_t *tiny, int64_t step)
{
  tiny_run_t before[2] = {{0}}, after[2] = {{0}};
  int64_t updates = tiny->engine->updates;
  mz_step_result_t r;
  mz_status_t st;

  MZ_TRY_GOTO(st, tiny_read(tiny, MZ_PART_WEIGHTS, &before[0]), done);
  MZ_TRY_GOTO(st, tiny_read(tiny, MZ_PART_EXP_AVG, &before[1]), done);
  MZ_TRY_GOTO(st, masked_step(tiny, false, &r), done);
  MZ_TRY_GOTO(st, tiny_read(tiny, MZ_PART_WEIGHTS, &after[0]), done);
  MZ_TRY_GOTO(st, tiny_read(tiny, MZ_PART_EXP_AVG, &after[1]), done);
  MZ_TRY_GOTO(st, check_agreed(&r, after[0].hash), done);
  MZ_REQUIRE_GOTO(r.loss == 0 && r.labels == 0 && r.skipped && !r.culprit[0],
                  st, done, MZ_ERR_DATA,
                  "loss %g, %" PRId64 " labels, skipped %d, culprit \"%s\"",
                  r.loss, r.labels, r.skipped, r.culprit);
  MZ_REQUIRE_GOTO(r.step == step && mz_engine_steps(tiny->engine) == step &&
                      tiny->engine->updates == updates,
                  st, done, MZ_ERR_DATA,
                  "step %" PRId64 ", %" PRId64 " updates, need %" PRId64
                  " and %" PRId64,
                  r.step, tiny->engine->updates, step, updates);
  MZ_REQUIRE_GOTO(same_values(&before[0], &after[0]) &&
                      same_values(&before[1], &after[1]) &&
                      before[0].hash == after[0].hash,
                  st, done, MZ_ERR_DATA, "weights or moments changed");
done:
  for (int i = 0; i < 2; i++) {
    tiny_run_free(&before[i]);
    tiny_run_free(&after[i]);
  }
  return st;
}

static mz_status_t try_masked(const first_step_t *first, bool cleared,
                              int stage, int accumulation)
{
  mz_step_result_t result;
  tiny_t tiny;
  mz_status_t st;

  MZ_TRY_GOTO(st,
              create_masked(MPI_COMM_WORLD, "[1]", stage, accumulation, &tiny),
              done);
  if (cleared) MZ_TRY_GOTO(st, clear_head(&tiny), done);
  MZ_TRY_GOTO(st, check_valid(&tiny, first), done);
  MZ_TRY_GOTO(st, check_none(&tiny, 2), done);
  MZ_TRY_GOTO(st, masked_step(&tiny, true, &result), done);
  MZ_REQUIRE_GOTO(!result.skipped && result.loss < first->loss, st, done,
                  MZ_ERR_DATA, "after it: loss %g, skipped %d", result.loss,
                  result.skipped);
done:
  tiny_destroy(&tiny);
  return st;
}

static mz_status_t try_none(int stage)
{
  tiny_t tiny;
  mz_status_t st;

  MZ_TRY_GOTO(st, create_masked(MPI_COMM_WORLD, "[0,1]", stage, 2, &tiny),
              done);
  MZ_TRY_GOTO(st, check_none(&tiny, 1), done);
  MZ_TRY_GOTO(st, check_none(&tiny, 2), done);
done:
  tiny_destroy(&tiny);
  return st;
}

static void case_masked(void)
{
  for (int cleared = 1; cleared >= 0; cleared--) {
    first_step_t first = {0};
    const char *name = cleared ? "output layer 0, one rank masked, stage"
                               : "one rank masked, stage";

    tiny_report(reference(cleared, &first), "16 tokens of one rank %d",
                cleared);
    for (int stage = 0; stage < NUM_STAGES; stage++)
      for (int a = 1; a <= MAX_MICRO; a++)
        tiny_report(try_masked(&first, cleared, stage, a), "%s %d", name,
                    stage);
    tiny_run_free(&first.grads);
  }
  for (int stage = 0; stage < NUM_STAGES; stage++)
    tiny_report(try_none(stage), "all masked, auxiliary losses, stage %d",
                stage);
}

/* --- eval: with dropout and random dropping of tokens --- */

enum { EVAL_STEPS = 20 };

typedef struct trace {
  double loss[EVAL_STEPS], norm[EVAL_STEPS], eval[EVAL_STEPS];
  int64_t routed[EVAL_STEPS][NUM_MOES][NUM_EXPERTS];
  int64_t kept[EVAL_STEPS][NUM_MOES][NUM_EXPERTS];
  int64_t dropped;
  uint64_t hash;
} trace_t;

/* The same at every step, and not what training sees. */
static int32_t held_out(int64_t step, int64_t sample, int64_t t)
{
  (void)step;
  return tiny_token(1000, sample, t);
}

/* Twice the same. */
static mz_status_t evaluate(tiny_t *tiny, double *sum_out)
{
  double again;
  int64_t labels, labels_again;

  tiny->token = held_out;
  MZ_TRY(tiny_eval(tiny, sum_out, &labels));
  MZ_TRY(tiny_eval(tiny, &again, &labels_again));
  tiny->token = NULL;
  MZ_REQUIRE(labels == labels_again && *sum_out == again && again > 0,
             MZ_ERR_DATA, "%.17g over %" PRId64 ", then %.17g over %" PRId64,
             *sum_out, labels, again, labels_again);
  return MZ_OK;
}

static mz_status_t trace_steps(tiny_t *tiny, int interval, trace_t *trace)
{
  mz_step_result_t r;

  for (int i = 0; i < EVAL_STEPS; i++) {
    MZ_TRY(tiny_step(tiny, &r));
    trace->loss[i] = r.loss;
    trace->norm[i] = r.grad_norm;
    for (int m = 0; m < NUM_MOES; m++)
      for (int e = 0; e < NUM_EXPERTS; e++) {
        trace->routed[i][m][e] = r.moes[m].routed[e];
        trace->kept[i][m][e] = r.moes[m].kept[e];
        trace->dropped += r.moes[m].routed[e] - r.moes[m].kept[e];
      }
    if (interval > 0 && (i + 1) % interval == 0)
      MZ_TRY(evaluate(tiny, &trace->eval[i]));
  }
  return MZ_TRACE(mz_engine_param_hash(tiny->engine, &trace->hash));
}

static mz_status_t run_trace(int stage, int interval, trace_t *trace)
{
  tiny_given_t g = {.num = 0};
  tiny_t tiny;
  mz_status_t st;

  tiny_give(&g, "moe.ep_size=2");
  tiny_give(&g, "moe.k=1");
  tiny_give(&g, "moe.use_rts=true");
  tiny_give(&g, "moe.drop_tokens=true");
  tiny_give(&g, "moe.capacity_factor=1.0");
  tiny_give(&g, "model.dropout=0.1");
  tiny_give(&g, "train_batch_size=8");
  tiny_give(&g, "train_micro_batch_size_per_gpu=2");
  tiny_give(&g, "zero_optimization.stage=%d", stage);
  MZ_TRY_GOTO(st, tiny_create(g.all, g.num, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st, trace_steps(&tiny, interval, trace), done);
  MZ_REQUIRE_GOTO(trace->dropped > 0, st, done, MZ_ERR_DATA,
                  "no token was dropped");
done:
  tiny_destroy(&tiny);
  return st;
}

static mz_status_t same_traces(const trace_t *a, const trace_t *b)
{
  for (int i = 0; i < EVAL_STEPS; i++)
    MZ_REQUIRE(a->loss[i] == b->loss[i] && a->norm[i] == b->norm[i],
               MZ_ERR_DATA, "step %d: loss %.17g, norm %.17g, was %.17g, %.17g",
               i + 1, b->loss[i], b->norm[i], a->loss[i], a->norm[i]);
  MZ_REQUIRE(memcmp(a->routed, b->routed, sizeof a->routed) == 0 &&
                 memcmp(a->kept, b->kept, sizeof a->kept) == 0,
             MZ_ERR_DATA, "the counts of experts differ");
  MZ_REQUIRE(a->hash == b->hash, MZ_ERR_DATA,
             "hash %016" PRIx64 ", was %016" PRIx64, b->hash, a->hash);
  for (int i = 4; i < EVAL_STEPS; i += 5)
    MZ_REQUIRE(a->eval[i] == 0 || a->eval[i] == b->eval[i], MZ_ERR_DATA,
               "evaluation after step %d: %.17g, was %.17g", i + 1, b->eval[i],
               a->eval[i]);
  return MZ_OK;
}

static mz_status_t try_eval(int stage)
{
  static trace_t off, fifth, each;

  off = fifth = each = (trace_t){.dropped = 0};
  MZ_TRY(run_trace(stage, 0, &off));
  MZ_TRY(run_trace(stage, 5, &fifth));
  MZ_TRY(run_trace(stage, 1, &each));
  MZ_TRY(same_traces(&off, &fifth));
  return MZ_TRACE(same_traces(&fifth, &each));
}

static void case_eval(void)
{
  for (int stage = 0; stage < NUM_STAGES; stage++)
    tiny_report(try_eval(stage), "evaluations, stage %d", stage);
}

/* --- limit --- */

static mz_status_t run_limited(int ep, int stage, bool bf16, int limit,
                               tiny_run_t *run)
{
  tiny_given_t g = {.num = 0};

  tiny_give(&g, "moe.num_experts=6");
  tiny_give(&g, "moe.ep_size=%d", ep);
  tiny_give(&g, "train_batch_size=6");
  tiny_give(&g, "train_micro_batch_size_per_gpu=1");
  tiny_give(&g, "zero_optimization.stage=%d", stage);
  tiny_give(&g, "bf16.enabled=%s", bf16 ? "true" : "false");
  tiny_give(&g, "debug.count_limit=%d", limit);
  return MZ_TRACE(tiny_run(g.all, g.num, MPI_COMM_WORLD, 2, run));
}

static mz_status_t try_limit(int ep, int stage, bool bf16)
{
  tiny_run_t whole = {0}, pieces = {0};
  mz_status_t st;

  MZ_TRY_GOTO(st, run_limited(ep, stage, bf16, 0, &whole), done);
  MZ_TRY_GOTO(st, run_limited(ep, stage, bf16, 7, &pieces), done);
  for (int i = 0; i < whole.num_steps; i++)
    MZ_REQUIRE_GOTO(
        whole.loss[i] == pieces.loss[i] && whole.norm[i] == pieces.norm[i] &&
            whole.loss[i] > 0,
        st, done, MZ_ERR_DATA, "step %d: loss %.17g, norm %.17g, was %.17g, %g",
        i + 1, pieces.loss[i], pieces.norm[i], whole.loss[i], whole.norm[i]);
  MZ_REQUIRE_GOTO(same_values(&whole, &pieces) && whole.hash == pieces.hash, st,
                  done, MZ_ERR_DATA, "the weights differ");
done:
  tiny_run_free(&whole);
  tiny_run_free(&pieces);
  return st;
}

static void case_limit(void)
{
  for (int stage = 0; stage < NUM_STAGES; stage++) {
    tiny_report(try_limit(1, stage, false), "7 elements a call, stage %d",
                stage);
    tiny_report(try_limit(3, stage, false),
                "7 elements a call, ep_size 3, stage %d", stage);
    tiny_report(try_limit(3, stage, true),
                "7 elements a call, ep_size 3, bf16, stage %d", stage);
  }
}

/* The number of ranks is part of a case. */
static int run_case(const char *name)
{
  int size;

  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (strcmp(name, "losses") == 0 && size == 2)
    case_losses();
  else if (strcmp(name, "masked") == 0 && size == 2)
    case_masked();
  else if (strcmp(name, "eval") == 0 && size == 2)
    case_eval();
  else if (strcmp(name, "limit") == 0 && size == 3)
    case_limit();
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
  code = run_case(argv[1]);
  MPI_Finalize();
  return code;
}
