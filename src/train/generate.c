/* SPDX-License-Identifier: Apache-2.0 */
#include "train/generate.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/engine_impl.h"

#include <moezero/random.h>
#include <string.h>

typedef struct generator {
  mz_engine_t *engine;
  const mz_generate_opts_t *opts;
  int64_t sequence; /* the most tokens a walk takes */
  int64_t length;   /* of the text */
  int32_t *window;  /* [sequence] its last tokens */
  int32_t *labels;  /* [sequence] none has one */
  mz_choice_t *choices;
} generator_t;

mz_status_t mz_generate_check(const mz_generate_opts_t *opts, int64_t sequence)
{
  MZ_REQUIRE(opts->num_prompt >= 1, MZ_ERR_CONFIG,
             "the prompt is empty: it has at least one token");
  MZ_REQUIRE(opts->num_prompt <= sequence, MZ_ERR_CONFIG,
             "the prompt has %" PRId32 " tokens, the model sees %" PRId64
             " at most",
             opts->num_prompt, sequence);
  for (int32_t i = 0; i < opts->num_prompt; i++)
    MZ_REQUIRE(opts->prompt[i] >= 0 && opts->prompt[i] < opts->vocab_size,
               MZ_ERR_CONFIG,
               "token %" PRId32 " of the prompt is %" PRId32
               ", the vocabulary has the ids 0 to %" PRId32,
               i + 1, opts->prompt[i], opts->vocab_size - 1);
  return MZ_OK;
}

static void append(generator_t *g, int32_t token)
{
  if (g->length >= g->sequence)
    memmove(g->window, g->window + 1,
            (size_t)(g->sequence - 1) * sizeof *g->window);
  g->window[mz_min_i64(g->length, g->sequence - 1)] = token;
  g->length++;
}

/* The logits of the last token, on rank 0. */
static mz_status_t walk(generator_t *g)
{
  int32_t sequences = g->engine->plan->opts.rank == 0, most = 1;
  int64_t sample = 0, labels;
  mz_step_data_t data = {.num_micro = 1,
                         .tokens = g->window,
                         .labels = g->labels,
                         .samples = &sample,
                         .sequences = &sequences,
                         .max_sequences = &most};
  double loss;
  mz_status_t st;

  g->engine->sequence = mz_min_i64(g->length, g->sequence);
  st = mz_engine_eval(g->engine, &data, &loss, &labels);
  g->engine->sequence = 0;
  return MZ_TRACE(st);
}

/* Rank 0 draws; -1 tells the others that it cannot. */
static mz_status_t draw(generator_t *g, int32_t *token_out)
{
  mz_random_t random = mz_random_make(g->opts->seed, 0, MZ_PURPOSE_GENERATE, 0);
  double u = mz_random_u32(&random, (uint64_t)g->length) * 0x1p-32;
  mz_status_t st = MZ_OK;

  *token_out = -1;
  if (g->engine->plan->opts.rank == 0)
    st = mz_sample(&g->opts->sample, g->opts->vocab_size, g->opts->logits, u,
                   g->choices, token_out);
  MZ_TRY(mz_comm_broadcast(g->engine->comm, token_out, sizeof *token_out, 0));
  if (*token_out >= 0) return MZ_OK;
  return MZ_TRACE(mz_comm_agree(g->engine->comm, st));
}

static mz_status_t go_on(generator_t *g)
{
  int32_t token;

  for (int64_t i = 0; i < g->opts->num_tokens; i++) {
    MZ_TRY(walk(g));
    MZ_TRY(draw(g, &token));
    if (token == g->opts->end) break;
    append(g, token);
    g->opts->take(g->opts->ctx, token);
  }
  return MZ_OK;
}

static mz_status_t prepare(generator_t *g)
{
  MZ_TRY(mz_generate_check(g->opts, g->sequence));
  MZ_TRY(mz_sample_check(&g->opts->sample));
  MZ_TRY(mz_new(g->sequence, "the text", &g->window));
  MZ_TRY(mz_new(g->sequence, "labels of the text", &g->labels));
  MZ_TRY(mz_new(g->opts->vocab_size, "choices", &g->choices));
  memset(g->labels, 0xff, (size_t)g->sequence * sizeof *g->labels);
  for (int32_t i = 0; i < g->opts->num_prompt; i++)
    append(g, g->opts->prompt[i]);
  return MZ_OK;
}

mz_status_t mz_generate(mz_engine_t *engine, const mz_generate_opts_t *opts)
{
  generator_t g = {.engine = engine,
                   .opts = opts,
                   .sequence = engine->plan->opts.sequence_length};
  mz_status_t st;

  MZ_TRY_GOTO(st, mz_comm_agree(engine->comm, prepare(&g)), done);
  MZ_ASSERT(g.window); /* all ranks are prepared, so this one is */
  MZ_TRY_GOTO(st, go_on(&g), done);
done:
  mz_free(g.choices);
  mz_free(g.labels);
  mz_free(g.window);
  return st;
}
