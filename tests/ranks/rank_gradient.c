/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Gradients of whole models against central differences of the loss.
 * rank_gradient NAME [SEED]: one of the cases below, on one rank; SEED in place
 * of its own helps to find one without near ties. Each tensor is moved
 * along its own gradient g: the slope of the loss there must be |g|. The
 * learning rate is 0 and every step has the same number, so that dropout and
 * token selection repeat. Exit code 0: all slopes agree.
 *
 * The loss is a sum of fp32 losses, with an error of about 1e-6; over steps of
 * 1e-3 that makes 1e-3 of a slope of 1. The bound leaves a factor of 10, and
 * gradients below 1e-2 are left to the reference of tests/golden.
 */
#include <moezero/config.h>
#include <moezero/engine.h>

#include "base/alloc.h"
#include "base/check.h"
#include <moezero/gpt.h>

#include <math.h>
#include <moezero/random.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 2, LENGTH = 12, VOCAB = 48, TOKENS = SEQUENCES * LENGTH };
static const double BOUND = 1e-2, SMALL = 1e-2, STEP = 2e-3, GAP = 0.05;

static const char base[] =
    "{\"train_batch_size\": 2, \"gradient_accumulation_steps\": 1,"
    " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 0.0}},"
    " \"model\": {\"vocab_size\": 48, \"hidden_size\": 16,"
    "  \"num_hidden_layers\": 2, \"num_attention_heads\": 4,"
    "  \"intermediate_size\": 24, \"max_position_embeddings\": 16},"
    " \"moe\": {\"layers\": [1], \"num_experts\": 4, \"drop_tokens\": false,"
    "  \"expert_intermediate_size\": 20, \"aux_loss_coef\": 0.5,"
    "  \"z_loss_coef\": 0.1},"
    " \"data\": {\"sequence_length\": 12}, \"train\": {\"device\": \"cpu\"}}";

enum { MAX_ASSIGNMENTS = 8 };

static const struct test_case {
  const char *name;
  uint64_t seed; /* of the weights: no choice of an expert is close to a tie */
  const char *assignments[MAX_ASSIGNMENTS];
} cases[] = {
    {"gpt2_dropout",
     5,
     {"model.architecture=gpt2", "model.dropout=0.3", "moe.k=4"}},
    {"llama_dropout",
     180,
     {"model.architecture=llama", "model.dropout=0.3",
      "model.num_key_value_heads=2", "moe.k=2"}},
    {"gpt2_capacity",
     124,
     {"model.architecture=gpt2", "moe.k=2", "moe.drop_tokens=true",
      "moe.capacity_factor=0.5", "moe.drop_policy=position"}},
    {"llama_random_selection",
     126,
     {"model.architecture=llama", "moe.k=1", "moe.drop_tokens=true",
      "moe.capacity_factor=0.5", "moe.use_rts=true"}},
    {"mixed_keys",
     5,
     {"model.architecture=llama", "model.bias=true", "model.norm=layernorm",
      "model.position_embedding=learned", "model.attention_bias=false",
      "moe.k=4", "moe.norm_topk_prob=false"}},
    {"every_block_sends_again",
     5,
     {"model.architecture=gpt2", "moe.layers=[0, 1]", "moe.k=4",
      "moe.saved_rows=0.25", "moe.overlap_chunks=2",
      "moe.aux_loss_scope=rank"}},
    {"jitter_and_first_choices",
     1,
     {"model.architecture=gpt2", "moe.k=2", "moe.gate_noise=0.2",
      "moe.aux_loss=first_choice", "moe.top2_2nd_expert_sampling=true"}},
    {"rsample_at_a_temperature",
     2,
     {"model.architecture=llama", "moe.k=1", "moe.noisy_gate_policy=RSample",
      "moe.temperature={\"start\": 2, \"end\": 0.5, \"steps\": 4}",
      "moe.aux_loss=squared", "moe.aux_loss_coef=20"}},
    {"sigmoids_and_squares",
     3,
     {"model.architecture=gpt2", "moe.k=2", "moe.score=sigmoid",
      "moe.aux_loss=squared", "moe.aux_loss_coef=20", "moe.z_loss_coef=0",
      "moe.aux_loss_scope=rank"}},
    {"sigmoids_and_random_selection",
     1,
     {"model.architecture=llama", "moe.k=3", "moe.score=sigmoid",
      "moe.z_loss_coef=0", "moe.use_rts=true", "moe.drop_tokens=true",
      "moe.expert_capacity=14", "moe.norm_topk_prob=false"}},
    {"residual_with_random_selection",
     3,
     {"model.architecture=gpt2", "moe.k=1", "moe.use_residual=true",
      "moe.use_rts=true", "moe.drop_tokens=true", "moe.capacity_factor=0.5",
      "model.dropout=0.3", "moe.gate_noise=0.1"}},
    {"gated_shared_experts",
     6,
     {"model.architecture=llama", "moe.k=2", "moe.num_shared_experts=2",
      "moe.shared_expert_gate=true", "moe.shared_expert_intermediate_size=12",
      "model.dropout=0.3"}},
    {"pyramid_with_shared_experts",
     12,
     {"model.architecture=gpt2", "moe.k=2", "moe.layers=[0, 1]",
      "moe.num_experts=[2, 4]", "moe.num_shared_experts=1",
      "moe.saved_rows=0.25", "moe.overlap_chunks=2"}},
};

#define MUST(call)                                                             \
  do {                                                                         \
    if ((call) != MZ_OK) {                                                     \
      fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, mz_error_last());     \
      MPI_Abort(MPI_COMM_WORLD, 1);                                            \
    }                                                                          \
  } while (0)

static void run_step(mz_engine_t *engine, mz_step_result_t *result)
{
  static int32_t tokens[TOKENS], labels[TOKENS];
  static const int64_t samples[SEQUENCES] = {0, 1};
  static const int32_t sequences = SEQUENCES;
  mz_step_data_t data = {.num_micro = 1,
                         .tokens = tokens,
                         .labels = labels,
                         .samples = samples,
                         .sequences = &sequences,
                         .max_sequences = &sequences};

  for (int32_t i = 0; i < TOKENS; i++) {
    tokens[i] = i * 7 % VOCAB;
    labels[i] = i % 5 == 4 ? -1 : (i * 11 + 3) % VOCAB;
  }
  mz_engine_set_steps(engine, 3);
  MUST(mz_engine_step(engine, &data, result));
}

/* Weights of the size that makes every part matter, norms around 1. */
static void random_weights(mz_engine_t *engine, const mz_decl_t *decl,
                           uint64_t seed)
{
  for (int32_t t = 0; t < mz_decl_num_tensors(decl); t++) {
    const char *name = mz_decl_tensor_name(decl, t);
    bool norm = strstr(name, "ln_") && strstr(name, ".weight");
    mz_random_t random =
        mz_random_make(seed, mz_fnv1a(name), MZ_PURPOSE_INIT, 0);
    int64_t elements = mz_decl_tensor_elements(decl, t);
    float *values = NULL;

    MUST(mz_new(elements, "weights", &values));
    for (int64_t i = 0; i < elements; i++)
      values[i] = (float)(0.3 * mz_random_normal(&random, (uint64_t)i) + norm);
    MUST(mz_engine_write(engine, t, MZ_PART_WEIGHTS, values));
    mz_free(values);
  }
}

typedef struct line {
  int32_t tensor;
  int64_t elements;
  float *start, *direction, *moved; /* [elements]; |direction| is 1 */
} line_t;

static double loss_at(mz_engine_t *engine, const line_t *l, double distance)
{
  mz_step_result_t result;

  for (int64_t i = 0; i < l->elements; i++)
    l->moved[i] =
        (float)((double)l->start[i] + distance * (double)l->direction[i]);
  MUST(mz_engine_write(engine, l->tensor, MZ_PART_WEIGHTS, l->moved));
  run_step(engine, &result);
  return result.loss;
}

/* The fourth-order central difference. */
static double slope(mz_engine_t *engine, const line_t *l)
{
  double near = loss_at(engine, l, STEP) - loss_at(engine, l, -STEP);
  double far = loss_at(engine, l, 2 * STEP) - loss_at(engine, l, -2 * STEP);

  MUST(mz_engine_write(engine, l->tensor, MZ_PART_WEIGHTS, l->start));
  return (8 * near - far) / (12 * STEP);
}

/* @return 1 for a wrong slope; counts the tensors that were checked. */
static int check_tensor(mz_engine_t *engine, const mz_decl_t *decl,
                        int32_t tensor, int *num_checked)
{
  line_t l = {.tensor = tensor,
              .elements = mz_decl_tensor_elements(decl, tensor)};
  double norm = 0, found;
  mz_step_result_t result;
  int bad = 0;

  MUST(mz_new(l.elements, "start", &l.start));
  MUST(mz_new(l.elements, "direction", &l.direction));
  MUST(mz_new(l.elements, "moved", &l.moved));
  run_step(engine, &result);
  MUST(mz_engine_read(engine, tensor, MZ_PART_WEIGHTS, l.start));
  MUST(mz_engine_read(engine, tensor, MZ_PART_GRADS, l.direction));
  for (int64_t i = 0; i < l.elements; i++)
    norm += (double)l.direction[i] * (double)l.direction[i];
  norm = sqrt(norm);
  if (norm >= SMALL) {
    for (int64_t i = 0; i < l.elements; i++)
      l.direction[i] = (float)((double)l.direction[i] / norm);
    found = slope(engine, &l);
    bad = !(fabs(found - norm) <= BOUND * norm);
    if (bad)
      fprintf(stderr, "%s: slope %.6g, gradient %.6g\n",
              mz_decl_tensor_name(decl, tensor), found, norm);
    ++*num_checked;
  }
  mz_free(l.start);
  mz_free(l.direction);
  mz_free(l.moved);
  return bad;
}

static int run_case(const struct test_case *c, uint64_t seed)
{
  mz_config_t *config = NULL;
  mz_decl_t *decl = NULL;
  mz_engine_t *engine = NULL;
  mz_step_result_t result;
  int num = 0, bad = 0, num_checked = 0;

  while (num < MAX_ASSIGNMENTS && c->assignments[num])
    num++;
  MUST(mz_config_parse(base, c->name, c->assignments, num, &config));
  MUST(mz_config_resolve(config, 1));
  MUST(mz_decl_create(&decl));
  MUST(mz_gpt_declare(mz_config_values(config), decl));
  MUST(mz_engine_create(config, decl, MPI_COMM_WORLD, &engine));
  random_weights(engine, decl, seed);
  run_step(engine, &result);
  if (result.min_gap < GAP) {
    fprintf(stderr, "a gate gap of %.4f may flip a choice\n", result.min_gap);
    bad++;
  }
  for (int32_t t = 0; t < mz_decl_num_tensors(decl); t++)
    bad += check_tensor(engine, decl, t, &num_checked);
  if (2 * num_checked < mz_decl_num_tensors(decl)) {
    fprintf(stderr, "only %d of %d tensors have a gradient above %g\n",
            num_checked, mz_decl_num_tensors(decl), SMALL);
    bad++;
  }
  mz_engine_destroy(&engine);
  mz_decl_destroy(&decl);
  mz_config_destroy(&config);
  return bad;
}

int main(int argc, char **argv)
{
  int provided, bad = 1;

  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  for (size_t i = 0; argc >= 2 && i < sizeof cases / sizeof *cases; i++) {
    if (strcmp(argv[1], cases[i].name) != 0) continue;
    bad = run_case(&cases[i],
                   argc > 2 ? strtoull(argv[2], NULL, 10) : cases[i].seed);
  }
  MPI_Finalize();
  return bad != 0;
}
