/* SPDX-License-Identifier: Apache-2.0 */
/* Generation on 4 ranks and parts of them.
 *   rank_generate overfit FOLDER: TINY learns one sequence and gives it back
 *   rank_generate layouts FOLDER: one text whatever the layout and the source
 * Exit code 0: as claimed. */
#include "tiny.h"

#include "base/alloc.h"
#include "base/check.h"
#include <moezero/gpt.h>
#include "train/generate.h"
#include "train/save.h"

#include <moezero/checkpoint.h>
#include <stdio.h>
#include <string.h>

enum { MOST = 40, MAX_ASSIGNMENTS = 8 };

/* The model has a dense map beside its experts. */
static const char shape[] = "moe.use_residual=true";

/* What a layout generates from, and what comes of it. */
typedef struct text {
  const char *from;
  int32_t prompt[TINY_SEQUENCE];
  int32_t num_prompt;
  mz_sample_opts_t sample;
  int64_t wanted;
  int32_t tokens[MOST];
  int num;
} text_t;

/* 17 different tokens, so that each tells the next. */
static int32_t lesson(int64_t step, int64_t sample, int64_t t)
{
  return (int32_t)((t * 11 + 5) % TINY_VOCAB);
}

static void take(void *ctx, int32_t token)
{
  text_t *text = ctx;

  if (text->num < MOST) text->tokens[text->num] = token;
  text->num++;
}

/* There is nothing to train with. */
static mz_status_t check_refusals(mz_engine_t *engine)
{
  mz_step_data_t data = {.num_micro = 1};
  mz_step_result_t result;
  float values[TINY_VOCAB * TINY_VOCAB];

  MZ_REQUIRE(
      mz_engine_step(engine, &data, &result) == MZ_ERR_ARG &&
          mz_engine_read(engine, 0, MZ_PART_EXP_AVG, values) == MZ_ERR_ARG &&
          mz_engine_write(engine, 0, MZ_PART_GRADS, values) == MZ_ERR_ARG,
      MZ_ERR_DATA, "an engine for inference takes a step");
  return MZ_OK;
}

static mz_status_t generate(const char *const *assignments, int num,
                            MPI_Comm comm, text_t *text)
{
  mz_config_t *config = NULL;
  mz_decl_t *decl = NULL;
  mz_engine_t *engine = NULL;
  float logits[TINY_VOCAB];
  mz_generate_opts_t opts = {.prompt = text->prompt,
                             .num_prompt = text->num_prompt,
                             .logits = logits,
                             .vocab_size = TINY_VOCAB,
                             .num_tokens = text->wanted,
                             .end = -1,
                             .sample = text->sample,
                             .seed = 5,
                             .take = take,
                             .ctx = text};
  mz_status_t st;

  text->num = 0;
  MZ_TRY_GOTO(st, tiny_config(assignments, num, comm, &config), done);
  MZ_TRY_GOTO(st, mz_decl_create(&decl), done);
  MZ_TRY_GOTO(st,
              mz_gpt_declare_generation(mz_config_values(config), logits, decl),
              done);
  MZ_TRY_GOTO(st, mz_engine_create_inference(config, decl, comm, &engine),
              done);
  MZ_TRY_GOTO(st, check_refusals(engine), done);
  MZ_TRY_GOTO(st, mz_save_init_from(engine, text->from), done);
  MZ_TRY_GOTO(st, mz_generate(engine, &opts), done);
done:
  mz_engine_destroy(&engine);
  mz_decl_destroy(&decl);
  mz_config_destroy(&config);
  return st;
}

/* Saves TINY after some steps on all ranks. */
static mz_status_t teach(const char *folder, int steps,
                         int32_t (*token)(int64_t, int64_t, int64_t),
                         double *loss_out)
{
  static const char *const given[] = {"optimizer.params.lr=1e-2",
                                      "zero_optimization.stage=2",
                                      "moe.ep_size=2", shape};
  tiny_t tiny;
  mz_step_result_t result = {0};
  mz_status_t st;

  MZ_TRY_GOTO(st, tiny_create(given, 4, MPI_COMM_WORLD, &tiny), done);
  tiny.token = token;
  for (int i = 0; i < steps; i++)
    MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
  *loss_out = result.loss;
  MZ_TRY_GOTO(st, mz_save_step(tiny.engine, tiny.config, folder), done);
done:
  tiny_destroy(&tiny);
  return st;
}

/* In fp32, then in bf16 from the same checkpoint. */
static mz_status_t check_overfit(const char *folder)
{
  static const char *const all[] = {shape, "bf16.enabled=true"};
  text_t text = {.from = folder,
                 .prompt = {lesson(0, 0, 0)},
                 .num_prompt = 1,
                 .sample = {.temperature = 0, .top_p = 1},
                 .wanted = TINY_SEQUENCE};
  double loss;

  MZ_TRY(teach(folder, 60, lesson, &loss));
  for (int given = 1; given <= 2; given++) {
    MZ_TRY(generate(all, given, MPI_COMM_WORLD, &text));
    MZ_REQUIRE(text.num == TINY_SEQUENCE, MZ_ERR_DATA, "%d tokens", text.num);
    for (int t = 0; t < TINY_SEQUENCE; t++)
      MZ_REQUIRE(text.tokens[t] == lesson(0, 0, t + 1), MZ_ERR_DATA,
                 "token %d is %d, learned was %d (loss %g)", t + 1,
                 text.tokens[t], lesson(0, 0, t + 1), loss);
  }
  return MZ_OK;
}

/* --- layouts --- */

static mz_status_t gather_file(const char *folder, const char *path)
{
  mz_ckpt_gather_opts_t opts = {.path = path, .dtype = MZ_F32};
  mz_ckpt_t *ckpt = NULL;
  mz_status_t st;

  MZ_TRY_GOTO(st, mz_ckpt_open(folder, &ckpt), done);
  MZ_TRY_GOTO(st, mz_ckpt_gather(ckpt, &opts), done);
done:
  mz_ckpt_close(&ckpt);
  return st;
}

/* On the first np ranks: the same text as the reference. */
static mz_status_t check_layout(const text_t *reference, const char *from,
                                int np, int ep, int stage, int *num)
{
  char own[2][64];
  const char *const given[] = {own[0], own[1], "debug.poison=true",
                               "moe.drop_tokens=true", shape};
  text_t text = *reference;
  mz_status_t st = MZ_OK;
  MPI_Comm part;
  int rank;

  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  snprintf(own[0], 64, "moe.ep_size=%d", ep);
  snprintf(own[1], 64, "zero_optimization.stage=%d", stage);
  text.from = from;
  MPI_Comm_split(MPI_COMM_WORLD, rank < np ? 0 : MPI_UNDEFINED, rank, &part);
  ++*num;
  if (part == MPI_COMM_NULL) return MZ_OK;
  st = generate(given, 5, part, &text);
  MPI_Comm_free(&part);
  MZ_TRY(st);
  for (int i = 0; i < MOST; i++)
    MZ_REQUIRE(
        text.num == MOST && text.tokens[i] == reference->tokens[i], MZ_ERR_DATA,
        "np %d ep %d stage %d from %s: token %d of %d is %d, not %d", np, ep,
        stage, from, i + 1, text.num, text.tokens[i], reference->tokens[i]);
  return MZ_OK;
}

static mz_status_t check_layouts(const char *folder)
{
  static const int layouts[][3] = {{1, 1, 3}, {2, 1, 0}, {2, 2, 0}, {2, 1, 3},
                                   {2, 2, 3}, {4, 1, 3}, {4, 2, 0}, {4, 2, 1},
                                   {4, 2, 3}, {4, 4, 0}};
  const char *const plain[] = {shape};
  text_t reference = {.from = folder,
                      .prompt = {3, 1, 4},
                      .num_prompt = 3,
                      .sample = {.temperature = 0.8, .top_p = 0.95},
                      .wanted = MOST};
  char file[512];
  double loss;
  int rank, num = 0;

  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  snprintf(file, sizeof file, "%s/model.h5", folder);
  MZ_TRY(teach(folder, 4, NULL, &loss));
  if (rank == 0) MZ_TRY(gather_file(folder, file));
  MPI_Barrier(MPI_COMM_WORLD);
  MZ_TRY(generate(plain, 1, MPI_COMM_SELF, &reference));
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
    MZ_TRY(check_layout(&reference, i % 2 ? file : folder, layouts[i][0],
                        layouts[i][1], layouts[i][2], &num));
  if (rank == 0)
    printf("%d layouts, the tokens %d %d %d ... %d in all\n", num,
           reference.tokens[0], reference.tokens[1], reference.tokens[2],
           reference.num);
  return MZ_OK;
}

int main(int argc, char **argv)
{
  int provided, good;
  mz_status_t st = MZ_ERR_ARG;

  if (argc != 3) return 2;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  if (strcmp(argv[1], "overfit") == 0) st = check_overfit(argv[2]);
  if (strcmp(argv[1], "layouts") == 0) st = check_layouts(argv[2]);
  good = st == MZ_OK;
  if (!good) {
    fprintf(stderr, "%s\n", mz_error_last());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return 0;
}
