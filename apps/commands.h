/* SPDX-License-Identifier: Apache-2.0 */
/* The commands of gpt_moe; each returns the process's exit code. */
#ifndef APPS_COMMANDS_H
#define APPS_COMMANDS_H

#include "options.h"

/** Exit codes of the program. */
enum {
  EXIT_DONE = 0,
  EXIT_FAILED = 1,
  EXIT_USAGE = 2,
  EXIT_NO_FIT = 3,
  EXIT_STOPPED = 4
};

/** The exit code of an error. */
int exit_code(mz_status_t status);

/** Prints the last error of this thread to stderr; returns its exit code. */
int print_error(mz_status_t status);

/** Trains, or with COMMAND_CHECK stops before the first step. MPI is up; all
 * ranks call it and return the same code. */
int command_train(const options_t *options);

/** Prints the loss of saved weights, or how they go on with a prompt. As
 * command_train. */
int command_eval(const options_t *options);
int command_generate(const options_t *options);

/** Prints the plan of one rank of --ranks. Without MPI. */
int command_plan(const options_t *options);

#endif
