/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include "base/alloc.h"
#include "base/check.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char options_help[] =
    "usage: mpirun -n N gpt_moe CONFIG.json [OPTION]...   train\n"
    "       mpirun -n N gpt_moe eval CONFIG.json --from PATH\n"
    "       mpirun -n N gpt_moe generate CONFIG.json --from PATH --prompt "
    "TEXT\n"
    "       mpirun -n N gpt_moe check CONFIG.json         start-up checks "
    "only\n"
    "       gpt_moe plan CONFIG.json --ranks N            ledger and messages\n"
    "       gpt_moe config [--json]                       every key\n"
    "       gpt_moe --help | --version\n"
    "\n"
    "  --set KEY=VALUE         set a key of the configuration (repeatable)\n"
    "  --data PATH             the same as --set data.train=PATH; eval: "
    "data.valid\n"
    "  --steps N               the same as --set train.steps=N\n"
    "  --out DIR               the run's folder (default runs/<time>)\n"
    "  --resume auto|DIR       go on from a checkpoint; auto: from the newest "
    "of --out,\n"
    "                          or start if there is none\n"
    "  --init-from PATH        weights of a checkpoint or of a file of "
    "h5-gather\n"
    "  --from PATH             eval, generate: weights as of --init-from\n"
    "  --prompt TEXT           generate: what goes on; token ids where data "
    "are "
    "tokens\n"
    "  --tokens N              generate: tokens at most (default 100)\n"
    "  --temperature T         generate: 0 (default) takes the likeliest "
    "token\n"
    "  --top-p P               generate: of the likeliest tokens that make up "
    "P "
    "(default 1)\n"
    "  --seed S                generate: of the choices (default train.seed)\n"
    "  --ranks N               plan: ranks of the run\n"
    "  --device-memory 80GiB   plan: exit 3 if a rank needs more\n"
    "  --json                  print JSON instead of lines and tables\n"
    "\n"
    "exit codes: 0 done, 1 failed, 2 usage or configuration, 3 does not "
    "fit\n";

enum { DEFAULT_TOKENS = 100, NOT_GIVEN = -1 };

typedef struct reader {
  int argc, next;
  char **argv;
  options_t *options;
} reader_t;

#define REFUSE(...) MZ_FAIL(MZ_ERR_CONFIG, __VA_ARGS__)

/* Keeps "key" + "value"; the value goes in as it is, or as a JSON string. */
static mz_status_t assign(reader_t *r, const char *key, const char *value,
                          bool quote)
{
  /* each byte may need a backslash; two quotes and a final zero */
  size_t most = strlen(key) + 2 * strlen(value) + 3;
  char *text, *end;

  MZ_TRY(mz_new((int64_t)most, "option", &text));
  end = text + sprintf(text, "%s%s", key, quote ? "\"" : "");
  for (; *value; value++) {
    if (quote && (*value == '"' || *value == '\\')) *end++ = '\\';
    *end++ = *value;
  }
  if (quote) *end++ = '"';
  *end = '\0';
  r->options->assignments[r->options->num_assignments++] = text;
  return MZ_OK;
}

static mz_status_t read_count(const char *name, const char *text, int *out)
{
  char *end;
  long value;

  errno = 0;
  value = strtol(text, &end, 10);
  if (errno || end == text || *end || value < 1 || value > INT_MAX)
    REFUSE("%s %s: need a whole number of at least 1", name, text);
  *out = (int)value;
  return MZ_OK;
}

/* A number in [0, most]. */
static mz_status_t read_real(const char *name, const char *text, double most,
                             double *out)
{
  char *end;

  errno = 0;
  *out = strtod(text, &end);
  if (errno || end == text || *end || !(*out >= 0 && *out <= most))
    REFUSE("%s %s: need a number from 0 to %g", name, text, most);
  return MZ_OK;
}

static mz_status_t read_seed(const char *text, options_t *o)
{
  char *end;

  errno = 0;
  o->seed = strtoull(text, &end, 10);
  if (errno || end == text || *end || *text == '-')
    REFUSE("--seed %s: need a whole number of at least 0", text);
  o->has_seed = true;
  return MZ_OK;
}

/* "80GiB", "512MiB", "4096" (bytes) */
static mz_status_t read_bytes(const char *name, const char *text, int64_t *out)
{
  static const struct {
    const char *name;
    double bytes;
  } units[] = {{"", 1},         {"B", 1},        {"KiB", 0x1p10},
               {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  char *end;
  double value;

  errno = 0;
  value = strtod(text, &end);
  for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
    if (strcmp(end, units[i].name) != 0) continue;
    if (errno || end == text || !(value > 0) || value * units[i].bytes > 0x1p62)
      break;
    *out = (int64_t)(value * units[i].bytes);
    return MZ_OK;
  }
  REFUSE("%s %s: need a size such as 80GiB, 512MiB or 4096 (bytes)", name,
         text);
}

/* The value of an option: what follows '=', or the next word. */
static mz_status_t take_value(reader_t *r, const char *word, const char *name,
                              const char **value)
{
  size_t bytes = strlen(name);

  if (word[bytes] == '=') {
    *value = word + bytes + 1;
    return MZ_OK;
  }
  if (r->next == r->argc) REFUSE("%s needs a value", name);
  *value = r->argv[r->next++];
  return MZ_OK;
}

static bool is_option(const char *word, const char *name)
{
  size_t bytes = strlen(name);

  return strncmp(word, name, bytes) == 0 &&
         (word[bytes] == '\0' || word[bytes] == '=');
}

/* Options of eval and generate. */
static mz_status_t read_of_model(options_t *o, const char *name,
                                 const char *value)
{
  if (strcmp(name, "--prompt") == 0) {
    o->prompt = value;
    return MZ_OK;
  }
  if (strcmp(name, "--tokens") == 0) return read_count(name, value, &o->tokens);
  if (strcmp(name, "--temperature") == 0)
    return read_real(name, value, 1e6, &o->temperature);
  if (strcmp(name, "--top-p") == 0) return read_real(name, value, 1, &o->top_p);
  if (strcmp(name, "--seed") == 0) return read_seed(value, o);
  o->from = value;
  MZ_REQUIRE(*value, MZ_ERR_CONFIG, "--from needs a path");
  return MZ_OK;
}

static mz_status_t read_valued(reader_t *r, const char *name, const char *value)
{
  options_t *o = r->options;
  bool eval = o->command == COMMAND_EVAL;

  if (strcmp(name, "--out") == 0) {
    o->out = value;
    MZ_REQUIRE(*value, MZ_ERR_CONFIG, "--out needs a folder");
    return MZ_OK;
  }
  if (strcmp(name, "--resume") == 0 || strcmp(name, "--init-from") == 0) {
    *(name[2] == 'r' ? &o->resume : &o->init_from) = value;
    MZ_REQUIRE(*value, MZ_ERR_CONFIG, "%s needs a path", name);
    return MZ_OK;
  }
  if (strcmp(name, "--data") == 0)
    return assign(r, eval ? "data.valid=" : "data.train=", value, true);
  if (strcmp(name, "--steps") == 0)
    return assign(r, "train.steps=", value, false);
  if (strcmp(name, "--ranks") == 0) return read_count(name, value, &o->ranks);
  if (strcmp(name, "--device-memory") == 0)
    return read_bytes(name, value, &o->device_bytes);
  if (!strchr(value, '=')) REFUSE("--set %s: need KEY=VALUE", value);
  return assign(r, "", value, false);
}

static mz_status_t read_option(reader_t *r, const char *word)
{
  static const char *const valued[] = {
      "--set",   "--data",          "--steps",  "--out",
      "--ranks", "--device-memory", "--resume", "--init-from"};
  static const char *const of_model[] = {
      "--from", "--prompt", "--tokens", "--temperature", "--top-p", "--seed"};
  static const char *const later[] = {"--fit"};
  const char *value = "";

  for (size_t i = 0; i < sizeof valued / sizeof valued[0]; i++)
    if (is_option(word, valued[i])) {
      MZ_TRY(take_value(r, word, valued[i], &value));
      return MZ_TRACE(read_valued(r, valued[i], value));
    }
  for (size_t i = 0; i < sizeof of_model / sizeof of_model[0]; i++)
    if (is_option(word, of_model[i])) {
      MZ_TRY(take_value(r, word, of_model[i], &value));
      return MZ_TRACE(read_of_model(r->options, of_model[i], value));
    }
  for (size_t i = 0; i < sizeof later / sizeof later[0]; i++)
    if (is_option(word, later[i])) REFUSE("not supported yet: %s", later[i]);
  if (strcmp(word, "--json") == 0)
    r->options->json = true;
  else if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)
    r->options->command = COMMAND_HELP;
  else if (strcmp(word, "--version") == 0)
    r->options->command = COMMAND_VERSION;
  else
    REFUSE("unknown option %s (gpt_moe --help lists them)", word);
  return MZ_OK;
}

/* The first word without a dash: a command, or else the configuration. */
static mz_status_t read_command(reader_t *r)
{
  static const char *const later[] = {"measure", "report", "supervise"};
  const char *word = r->argc > 1 ? r->argv[1] : "";

  r->next = 2;
  for (size_t i = 0; i < sizeof later / sizeof later[0]; i++)
    if (strcmp(word, later[i]) == 0) REFUSE("not supported yet: %s", word);
  if (strcmp(word, "plan") == 0)
    r->options->command = COMMAND_PLAN;
  else if (strcmp(word, "check") == 0)
    r->options->command = COMMAND_CHECK;
  else if (strcmp(word, "eval") == 0)
    r->options->command = COMMAND_EVAL;
  else if (strcmp(word, "generate") == 0)
    r->options->command = COMMAND_GENERATE;
  else if (strcmp(word, "config") == 0)
    r->options->command = COMMAND_CONFIG;
  else
    r->next = 1;
  return MZ_OK;
}

static mz_status_t check_of_model(const options_t *o)
{
  bool generates = o->command == COMMAND_GENERATE;
  bool loads = generates || o->command == COMMAND_EVAL;

  if (loads && !o->from)
    REFUSE("no --from given: a checkpoint, or a file of h5-gather");
  if (generates && !o->prompt) REFUSE("gpt_moe generate needs --prompt");
  if (!loads && o->from) REFUSE("--from belongs to eval and generate");
  if (loads && o->out) REFUSE("--out belongs to training");
  if (!generates && (o->prompt || o->tokens || o->has_seed ||
                     o->temperature >= 0 || o->top_p >= 0))
    REFUSE("--prompt, --tokens, --temperature, --top-p and --seed belong to "
           "generate");
  return MZ_OK;
}

/* What the command needs, and options that another command has. */
static mz_status_t check_options(reader_t *r)
{
  const options_t *o = r->options;
  bool wants_config = o->command != COMMAND_CONFIG &&
                      o->command != COMMAND_HELP &&
                      o->command != COMMAND_VERSION;

  if (wants_config && !o->config)
    REFUSE("no configuration given (gpt_moe --help)");
  if (o->command == COMMAND_CONFIG && (o->config || o->num_assignments))
    REFUSE("gpt_moe config takes --json only");
  if (o->command == COMMAND_PLAN && o->ranks == 0)
    REFUSE("gpt_moe plan needs --ranks N");
  if (o->command != COMMAND_PLAN && (o->ranks || o->device_bytes))
    REFUSE("--ranks and --device-memory belong to gpt_moe plan");
  if (o->command != COMMAND_TRAIN && (o->resume || o->init_from))
    REFUSE("--resume and --init-from belong to training");
  if (o->resume && o->init_from)
    REFUSE("--resume and --init-from exclude each other");
  if (o->resume && strcmp(o->resume, "auto") == 0 && !o->out)
    REFUSE("--resume auto needs --out: the folder of the run to go on with");
  return MZ_TRACE(check_of_model(o));
}

/* What generate takes where its options are not given. */
static void set_defaults(options_t *o)
{
  if (o->tokens == 0) o->tokens = DEFAULT_TOKENS;
  if (o->temperature < 0) o->temperature = 0;
  if (o->top_p < 0) o->top_p = 1;
}

mz_status_t options_read(int argc, char **argv, options_t *options)
{
  reader_t r = {.argc = argc, .argv = argv, .options = options};

  *options = (options_t){
      .command = COMMAND_TRAIN, .temperature = NOT_GIVEN, .top_p = NOT_GIVEN};
  MZ_TRY(mz_new(argc, "options", &options->assignments));
  MZ_TRY(read_command(&r));
  while (r.next < argc) {
    const char *word = argv[r.next++];

    if (word[0] == '-') {
      MZ_TRY(read_option(&r, word));
    } else if (options->config) {
      REFUSE("one configuration expected, found %s and %s", options->config,
             word);
    } else {
      options->config = word;
    }
  }
  MZ_TRY(check_options(&r));
  set_defaults(options);
  return MZ_OK;
}

void options_free(options_t *options)
{
  for (int i = 0; i < options->num_assignments; i++)
    mz_free(options->assignments[i]);
  mz_free(options->assignments);
  *options = (options_t){.command = COMMAND_TRAIN};
}

bool options_need_mpi(const options_t *options)
{
  return options->command == COMMAND_TRAIN ||
         options->command == COMMAND_CHECK ||
         options->command == COMMAND_EVAL ||
         options->command == COMMAND_GENERATE;
}
