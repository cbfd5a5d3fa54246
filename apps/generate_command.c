/* SPDX-License-Identifier: Apache-2.0 */
/* gpt_moe generate: saved weights go on with a prompt. A text is printed as the
 * bytes that it is, other tokens as their ids. */
#include "commands.h"
#include "job.h"

#include "base/alloc.h"
#include "base/check.h"
#include <moezero/gpt.h>
#include "train/generate.h"
#include "train/save.h"

#include <errno.h>
#include <jansson.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct generation {
  job_t job;
  bool text;       /* a token is a byte */
  int32_t *prompt; /* [num_prompt] */
  int32_t num_prompt;
  int32_t *tokens; /* [num_tokens] generated so far */
  int32_t num_tokens;
  float *logits; /* [V] */
} generation_t;

/* --- the prompt --- */

/* What a token is: data.format says so, or else the data. */
static mz_status_t find_format(generation_t *g)
{
  const mz_data_config_t *data = &mz_config_values(g->job.config)->data;
  mz_data_format_t format = data->format;
  const char *path = data->num_train > 0   ? data->train[0]
                     : data->num_valid > 0 ? data->valid[0]
                                           : NULL;

  if (format == MZ_DATA_AUTO) {
    MZ_REQUIRE(path, MZ_ERR_CONFIG,
               "data.format: text or tokens? There is no data to tell; set it");
    MZ_TRY(mz_data_find_format(path, format, &format));
  }
  g->text = format == MZ_DATA_TEXT;
  return MZ_OK;
}

static void read_bytes(generation_t *g, const char *prompt)
{
  for (; *prompt; prompt++)
    g->prompt[g->num_prompt++] = (unsigned char)*prompt;
}

/* Ids with spaces or commas between. */
static mz_status_t read_ids(generation_t *g, const char *prompt)
{
  static const char between[] = " ,\t\n";

  for (prompt += strspn(prompt, between); *prompt;
       prompt += strspn(prompt, between)) {
    char *end;
    long id;

    errno = 0;
    id = strtol(prompt, &end, 10);
    MZ_REQUIRE(end > prompt && (*end == '\0' || strchr(between, *end)) &&
                   errno == 0 && id >= 0 && id <= INT32_MAX,
               MZ_ERR_CONFIG, "--prompt: \"%.*s\" is not a token id",
               (int)strcspn(prompt, between), prompt);
    g->prompt[g->num_prompt++] = (int32_t)id;
    prompt = end;
  }
  return MZ_OK;
}

static mz_status_t read_prompt(generation_t *g)
{
  const char *prompt = g->job.options->prompt;

  MZ_TRY(find_format(g));
  /* a token takes a byte at least */
  MZ_TRY(mz_new((int64_t)strlen(prompt), "prompt", &g->prompt));
  if (!g->text) return MZ_TRACE(read_ids(g, prompt));
  read_bytes(g, prompt);
  return MZ_OK;
}

/* --- what is printed, on rank 0 --- */

static void print_token(const generation_t *g, int32_t token, bool first)
{
  if (!g->text) printf("%s%" PRId32, first ? "" : " ", token);
  if (g->text && token < MZ_END_OF_TEXT) putchar(token);
}

static void take(void *ctx, int32_t token)
{
  generation_t *g = ctx;

  g->tokens[g->num_tokens++] = token;
  if (g->job.rank > 0 || g->job.options->json) return;
  print_token(g, token, false);
  fflush(stdout);
}

static json_t *list_of(const int32_t *tokens, int32_t num)
{
  json_t *list = json_array();

  for (int32_t i = 0; i < num; i++)
    json_array_append_new(list, json_integer(tokens[i]));
  return list;
}

/* null where the bytes are not UTF-8 */
static mz_status_t text_of(const generation_t *g, json_t **text_out)
{
  char *bytes = NULL;
  size_t num = 0;

  MZ_TRY(mz_new(g->num_tokens, "text", &bytes));
  for (int32_t i = 0; i < g->num_tokens; i++)
    if (g->tokens[i] < MZ_END_OF_TEXT) bytes[num++] = (char)g->tokens[i];
  *text_out = json_stringn(num > 0 ? bytes : "", num);
  if (!*text_out) *text_out = json_null();
  mz_free(bytes);
  return MZ_OK;
}

static mz_status_t print_json(const generation_t *g)
{
  json_t *object = json_object(), *text = NULL;
  mz_status_t st = MZ_OK;

  json_object_set_new(object, "prompt", list_of(g->prompt, g->num_prompt));
  json_object_set_new(object, "tokens", list_of(g->tokens, g->num_tokens));
  if (g->text) st = text_of(g, &text);
  if (text) json_object_set_new(object, "text", text);
  if (st == MZ_OK && json_dumpf(object, stdout, 0) != 0)
    st = MZ_ERROR(MZ_ERR_NOMEM, "no memory for the JSON text");
  json_decref(object);
  return st;
}

/* --- the command --- */

static mz_generate_opts_t opts_of(generation_t *g)
{
  const options_t *o = g->job.options;
  const mz_config_values_t *c = mz_config_values(g->job.config);
  mz_generate_opts_t opts = {.prompt = g->prompt,
                             .num_prompt = g->num_prompt,
                             .logits = g->logits,
                             .vocab_size = (int32_t)c->model.vocab_size,
                             .num_tokens = o->tokens,
                             .end = g->text ? MZ_END_OF_TEXT : -1,
                             .sample = {o->temperature, o->top_p},
                             .seed = o->has_seed ? o->seed
                                                 : (uint64_t)c->train.seed,
                             .take = take,
                             .ctx = g};
  return opts;
}

/* Batches are of training. */
static mz_status_t read_config(job_t *job)
{
  char batch[40];
  const char *const extra[] = {batch, "train_micro_batch_size_per_gpu=1",
                               "gradient_accumulation_steps=1"};

  snprintf(batch, sizeof batch, "train_batch_size=%d", job->size);
  return MZ_TRACE(job_read_config_anywhere(job, extra, 3));
}

static mz_status_t declare(generation_t *g)
{
  const mz_config_values_t *c = mz_config_values(g->job.config);

  MZ_TRY(mz_new(c->model.vocab_size, "logits", &g->logits));
  MZ_TRY(mz_new(g->job.options->tokens, "generated tokens", &g->tokens));
  MZ_TRY(mz_decl_create(&g->job.decl));
  return MZ_TRACE(mz_gpt_declare_generation(c, g->logits, g->job.decl));
}

static mz_status_t run(generation_t *g)
{
  job_t *job = &g->job;
  mz_generate_opts_t opts;
  bool speak = job->rank == 0 && !job->options->json;

  MZ_TRY(read_config(job));
  MZ_TRY(job_settle(job, read_prompt(g)));
  opts = opts_of(g);
  MZ_TRY(job_settle(
      job, mz_generate_check(
               &opts, mz_config_values(job->config)->data.sequence_length)));
  MZ_TRY(job_settle(job, declare(g)));
  opts.logits = g->logits;
  MZ_TRY(mz_engine_create_inference(job->config, job->decl, MPI_COMM_WORLD,
                                    &job->engine));
  MZ_TRY(mz_save_init_from(job->engine, job->options->from));
  for (int32_t i = 0; speak && i < g->num_prompt; i++)
    print_token(g, g->prompt[i], i == 0);
  MZ_TRY(mz_generate(job->engine, &opts));
  if (job->rank == 0 && job->options->json) MZ_TRY(print_json(g));
  if (job->rank == 0) putchar('\n');
  return MZ_OK;
}

int command_generate(const options_t *options)
{
  generation_t g = {.num_prompt = 0};
  mz_status_t st = job_create(options, &g.job);
  int code;

  if (st == MZ_OK) st = run(&g);
  code = job_end(&g.job, st);
  mz_free(g.prompt);
  mz_free(g.tokens);
  mz_free(g.logits);
  return code;
}
