/* SPDX-License-Identifier: Apache-2.0 */
/* gpt_moe eval and gpt_moe generate, from what a training run saved. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char folder[64], output[1 << 16];

static const char base_config[] =
    "{\"model\": {\"architecture\": \"llama\", \"vocab_size\": 257,"
    " \"hidden_size\": 32, \"num_hidden_layers\": 2,"
    " \"num_attention_heads\": 2, \"intermediate_size\": 64,"
    " \"max_position_embeddings\": 16},"
    " \"moe\": {\"num_experts\": 4, \"ep_size\": 2, \"k\": 2},"
    " \"data\": {\"train\": \"%s/train.txt\", \"valid\": \"%s/valid.txt\"},"
    " \"train\": {\"steps\": 4, \"eval_steps\": 3},"
    " \"checkpoint\": {\"save_interval\": 4, \"gather_on_save\": true},"
    " \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-2}},"
    " \"zero_optimization\": {\"stage\": 1},"
    " \"train_batch_size\": 8, \"train_micro_batch_size_per_gpu\": 1}\n";

static FILE *create(const char *name)
{
  char path[256];
  FILE *file;

  snprintf(path, sizeof path, "%s/%s", folder, name);
  file = fopen(path, "w");
  cr_assert_not_null(file);
  return file;
}

static void write_text(const char *name, int lines)
{
  FILE *file = create(name);

  for (int i = 0; i < lines; i++)
    fprintf(file, "line %d of a text to learn from\n", i * 7 % 100);
  fclose(file);
}

static int run(int ranks, const char *words, const char *arguments)
{
  char all[2048];

  snprintf(all, sizeof all, "%s %s/c.json %s", words, folder, arguments);
  return mz_test_mpirun(ranks, "apps/gpt_moe", all, 60, output, sizeof output);
}

/* The same with --from DIR/out/checkpoint[from]. */
static int run_from(int ranks, const char *words, const char *from,
                    const char *arguments)
{
  char all[1024];

  snprintf(all, sizeof all, "--from %s/out/checkpoint%s %s", folder, from,
           arguments);
  return run(ranks, words, all);
}

static void make_folder(void)
{
  char arguments[128];
  FILE *file;

  strcpy(folder, "/tmp/mz-test-generate-XXXXXX");
  cr_assert_not_null(mkdtemp(folder));
  file = create("c.json");
  fprintf(file, base_config, folder, folder);
  fclose(file);
  write_text("train.txt", 100);
  write_text("valid.txt", 20);
  snprintf(arguments, sizeof arguments, "--out %s/out", folder);
  cr_assert_eq(run(2, "", arguments), 0, "%s", output);
}

static void remove_folder(void)
{
  char command[128];

  snprintf(command, sizeof command, "rm -rf %s", folder);
  cr_assert_eq(system(command), 0);
}

TestSuite(generate, .init = make_folder, .fini = remove_folder, .timeout = 300);

static double number_after(const char *text, const char *name)
{
  const char *at = strstr(text, name);

  cr_assert(at, "no %s in: %s", name, text);
  return strtod(at + strlen(name), NULL);
}

/* of the run's own metrics */
static double eval_loss_of_run(void)
{
  static char text[1 << 14];
  char path[256];
  FILE *file;

  snprintf(path, sizeof path, "%s/out/metrics.jsonl", folder);
  file = fopen(path, "r");
  cr_assert_not_null(file);
  text[fread(text, 1, sizeof text - 1, file)] = '\0';
  fclose(file);
  return number_after(text, "\"eval_loss\": ");
}

static void same_loss(int ranks, const char *from, const char *arguments,
                      double expected)
{
  double loss;

  cr_assert_eq(run_from(ranks, "eval", from, arguments), 0, "%s", output);
  loss = number_after(output, "\"eval_loss\": ");
  cr_expect_leq(fabs(loss - expected), 1e-6 * expected,
                "%d ranks, %s: %.9f, the run had %.9f", ranks, arguments, loss,
                expected);
}

Test(generate, eval_equals_the_runs_evaluation)
{
  double expected = eval_loss_of_run();

  same_loss(2, "", "--json", expected);
  same_loss(2, "/global_step4/model.h5",
            "--json --set zero_optimization.stage=3", expected);
  same_loss(1, "/global_step4", "--json", expected);
}

Test(generate, eval_of_a_text_prints_bytes_and_perplexity)
{
  double loss, expected = eval_loss_of_run();

  cr_assert_eq(run_from(1, "eval", "", "--set moe.ep_size=1"), 0, "%s", output);
  loss = number_after(output, "loss ");
  cr_expect_leq(fabs(loss - expected), 1e-5, "%s", output);
  cr_expect_leq(fabs(number_after(output, "token, ") - expected), 1e-5);
  cr_expect_leq(fabs(number_after(output, "perplexity ") - exp(loss)), 1e-2);
  cr_expect(strstr(output, "nat a byte"), "%s", output);
}

/* The text behind what mpirun and the ranks may warn of. */
static void generated(int ranks, const char *from, const char *arguments,
                      char text[256])
{
  const char *at;

  cr_assert_eq(run_from(ranks, "generate --prompt 'line 4'", from, arguments),
               0, "%s", output);
  at = strstr(output, "line 4");
  cr_assert(at, "%s", output);
  snprintf(text, 256, "%s", at);
}

Test(generate, is_the_same_on_1_2_and_4_ranks_and_from_a_gathered_file)
{
  static const char options[] =
      "--tokens 40 --temperature 0.8 --top-p 0.9 --seed 3";
  char first[256], other[256];

  generated(2, "", options, first);
  cr_assert_gt(strlen(first), 20, "%s", first);
  generated(1, "/global_step4", options, other);
  cr_expect_str_eq(first, other);
  generated(4, "/global_step4/model.h5", options, other);
  cr_expect_str_eq(first, other);
  generated(2, "", "--tokens 40 --temperature 0.8 --top-p 0.9 --seed 4", other);
  cr_expect_str_neq(first, other);
}

static void refused(int code, const char *words, const char *from,
                    const char *arguments, const char *message)
{
  int found = run_from(2, words, from, arguments);

  cr_expect_eq(found, code, "%s %s: exit %d: %s", words, arguments, found,
               output);
  cr_expect(strstr(output, message), "%s: no '%s' in: %s", words, message,
            output);
}

Test(generate, bad_input_is_named)
{
  static const char ids[] = "--set data.format=tokens";

  cr_expect_eq(run(2, "eval", ""), 2);
  cr_expect(strstr(output, "no --from given"), "%s", output);
  refused(2, "generate", "", "", "needs --prompt");
  refused(2, "eval", "", "--prompt x", "--prompt");
  refused(2, "generate --prompt ''", "", "", "the prompt is empty");
  refused(2, "generate --prompt '3 257'", "", ids, "257");
  refused(2, "generate --prompt '3 x'", "", ids, "\"x\" is not a token id");
  refused(2, "generate --prompt 'more than sixteen'", "", "",
          "has 17 tokens, the model sees 16");
  refused(2, "generate --prompt a", "", "--top-p 1.5", "--top-p 1.5");
  refused(2, "eval", "", "--set data.valid=[]", "data.valid");
  refused(1, "generate --prompt a", "/none", "", "No such file");
  refused(1, "generate --prompt a", "", "--set model.hidden_size=64",
          "has the shape");
}

Test(generate, json_has_the_tokens_and_the_text)
{
  cr_assert_eq(run_from(1, "generate --prompt ab", "", "--tokens 3 --json"), 0);
  cr_expect(strstr(output, "\"prompt\": [97, 98]"), "%s", output);
  cr_expect(strstr(output, "\"tokens\": ["), "%s", output);
  cr_expect(strstr(output, "\"text\": "), "%s", output);
}

static void on_ranks(const char *claim, char *place)
{
  char arguments[128];

  snprintf(arguments, sizeof arguments, "%s %s/ckpt", claim, place);
  cr_assert_eq(mz_test_mpirun(4, "tests/ranks/rank_generate", arguments, 120,
                              output, sizeof output),
               0, "%s", output);
}

Test(generation, gives_back_the_sequence_that_the_model_learned, .timeout = 200)
{
  strcpy(folder, "/tmp/mz-test-generate-XXXXXX");
  cr_assert_not_null(mkdtemp(folder));
  on_ranks("overfit", folder);
  remove_folder();
}

Test(generation, does_not_depend_on_ranks_ep_size_and_stage, .timeout = 200)
{
  strcpy(folder, "/tmp/mz-test-generate-XXXXXX");
  cr_assert_not_null(mkdtemp(folder));
  on_ranks("layouts", folder);
  cr_assert(strstr(output, "10 layouts"), "%s", output);
  remove_folder();
}
