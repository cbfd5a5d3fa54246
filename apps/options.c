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
    "       mpirun -n N gpt_moe check CONFIG.json         start-up checks "
    "only\n"
    "       gpt_moe plan CONFIG.json --ranks N            ledger and messages\n"
    "       gpt_moe config [--json]                       every key\n"
    "       gpt_moe --help | --version\n"
    "\n"
    "  --set KEY=VALUE         set a key of the configuration (repeatable)\n"
    "  --data PATH             the same as --set data.train=PATH\n"
    "  --steps N               the same as --set train.steps=N\n"
    "  --out DIR               the run's folder (default runs/<time>)\n"
    "  --resume auto|DIR       go on from a checkpoint; auto: from the newest "
    "of --out,\n"
    "                          or start if there is none\n"
    "  --init-from PATH        weights of a checkpoint or of a file of "
    "h5-gather\n"
    "  --ranks N               plan: ranks of the run\n"
    "  --device-memory 80GiB   plan: exit 3 if a rank needs more\n"
    "  --json                  print JSON instead of lines and tables\n"
    "\n"
    "exit codes: 0 done, 1 failed, 2 usage or configuration, 3 does not fit,\n"
    "            4 stopped by a signal after a checkpoint\n";

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

static mz_status_t read_valued(reader_t *r, const char *name, const char *value)
{
  options_t *o = r->options;

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
  if (strcmp(name, "--data") == 0) return assign(r, "data.train=", value, true);
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
  static const char *const later[] = {"--from", "--prompt", "--fit"};
  const char *value = "";

  for (size_t i = 0; i < sizeof valued / sizeof valued[0]; i++)
    if (is_option(word, valued[i])) {
      MZ_TRY(take_value(r, word, valued[i], &value));
      return MZ_TRACE(read_valued(r, valued[i], value));
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
  static const char *const later[] = {"eval", "generate", "measure", "report",
                                      "supervise"};
  const char *word = r->argc > 1 ? r->argv[1] : "";

  r->next = 2;
  for (size_t i = 0; i < sizeof later / sizeof later[0]; i++)
    if (strcmp(word, later[i]) == 0) REFUSE("not supported yet: %s", word);
  if (strcmp(word, "plan") == 0)
    r->options->command = COMMAND_PLAN;
  else if (strcmp(word, "check") == 0)
    r->options->command = COMMAND_CHECK;
  else if (strcmp(word, "config") == 0)
    r->options->command = COMMAND_CONFIG;
  else
    r->next = 1;
  return MZ_OK;
}

/* What the command needs, and options that another command has. */
static mz_status_t check_options(reader_t *r)
{
  const options_t *o = r->options;
  bool wants_config = o->command == COMMAND_TRAIN ||
                      o->command == COMMAND_CHECK || o->command == COMMAND_PLAN;

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
  return MZ_OK;
}

mz_status_t options_read(int argc, char **argv, options_t *options)
{
  reader_t r = {.argc = argc, .argv = argv, .options = options};

  *options = (options_t){.command = COMMAND_TRAIN};
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
  return MZ_TRACE(check_options(&r));
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
  return options->command == COMMAND_TRAIN || options->command == COMMAND_CHECK;
}
