/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of gpt_moe. Prints nothing. */
#ifndef APPS_OPTIONS_H
#define APPS_OPTIONS_H

#include <moezero/status.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum command {
  COMMAND_TRAIN,
  COMMAND_CHECK,
  COMMAND_EVAL,
  COMMAND_GENERATE,
  COMMAND_PLAN,
  COMMAND_CONFIG,
  COMMAND_HELP,
  COMMAND_VERSION
} command_t;

typedef struct options {
  command_t command;
  const char *config; /* path; borrowed from argv */
  char **assignments; /* [num_assignments] "key=value" in the order given */
  int num_assignments;
  const char *out;       /* NULL: runs/<time> */
  const char *resume;    /* "auto", a checkpoint, or NULL */
  const char *init_from; /* NULL: initial weights by the seed */
  const char *from;      /* of eval and generate: a checkpoint or a file */
  const char *prompt;    /* of generate, as its options below */
  int tokens;            /* generated at most */
  double temperature, top_p;
  bool has_seed; /* false: train.seed */
  uint64_t seed;
  bool json;
  int ranks;            /* of plan */
  int64_t device_bytes; /* of plan; 0: not given */
} options_t;

/**
 * Reads argv. @return MZ_OK, MZ_ERR_CONFIG ("not supported yet: NAME" for what
 * comes later), MZ_ERR_NOMEM; options_free either way.
 */
mz_status_t options_read(int argc, char **argv, options_t *options);

void options_free(options_t *options);

/** Whether the command runs under mpirun. */
bool options_need_mpi(const options_t *options);

extern const char options_help[];

#endif
