/* SPDX-License-Identifier: Apache-2.0 */
/* gpt_moe: trains a Mixture-of-Experts GPT as plain MPI ranks. */
#include "commands.h"
#include "commit.h"

#include "base/check.h"

#include <moezero/config.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>

int exit_code(mz_status_t status)
{
  switch (status) {
  case MZ_OK:
    return EXIT_DONE;
  case MZ_ERR_CONFIG:
  case MZ_ERR_UNSUPPORTED:
    return EXIT_USAGE;
  case MZ_ERR_FIT:
    return EXIT_NO_FIT;
  case MZ_ERR_STOPPED:
    return EXIT_STOPPED;
  default:
    return EXIT_FAILED;
  }
}

/* Frames help with what is not the user's doing. */
int print_error(mz_status_t status)
{
  bool of_user = status == MZ_ERR_CONFIG || status == MZ_ERR_UNSUPPORTED ||
                 status == MZ_ERR_DATA || status == MZ_ERR_IO ||
                 status == MZ_ERR_FIT || status == MZ_ERR_SHAPE;

  fprintf(stderr, "gpt_moe: %s\n",
          of_user ? mz_error_message() : mz_error_last());
  return exit_code(status);
}

static int command_config(const options_t *options)
{
  char *text = NULL;
  mz_status_t st = mz_config_describe(options->json, &text);

  if (st != MZ_OK) return print_error(st);
  fputs(text, stdout);
  mz_config_free_text(&text);
  return EXIT_DONE;
}

static int run_alone(const options_t *options)
{
  switch (options->command) {
  case COMMAND_PLAN:
    return command_plan(options);
  case COMMAND_CONFIG:
    return command_config(options);
  case COMMAND_VERSION:
    printf("gpt_moe %s, commit %s\n", MZ_VERSION, MZ_COMMIT);
    return EXIT_DONE;
  default:
    fputs(options_help, stdout);
    return EXIT_DONE;
  }
}

/* A wrong command line is wrong on all ranks: one of them says so. */
static int run_ranks(mz_status_t st, const options_t *options)
{
  int rank, code;

  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (st != MZ_OK)
    code = rank == 0 ? print_error(st) : exit_code(st);
  else if (options->command == COMMAND_EVAL)
    code = command_eval(options);
  else if (options->command == COMMAND_GENERATE)
    code = command_generate(options);
  else
    code = command_train(options);
  if (code == EXIT_USAGE && st != MZ_OK && rank == 0)
    fputs("try gpt_moe --help\n", stderr);
  return code;
}

int main(int argc, char **argv)
{
  options_t options;
  mz_status_t st = options_read(argc, argv, &options);
  int code, provided;
  sigset_t positions;

  if (!options_need_mpi(&options)) {
    code = st == MZ_OK ? run_alone(&options) : print_error(st);
    options_free(&options);
    return code;
  }
  /* Blocked before MPI makes its threads: one thread of ours waits for it. */
  sigemptyset(&positions);
  sigaddset(&positions, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &positions, NULL);
  if (MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided) !=
      MPI_SUCCESS) {
    fputs("gpt_moe: MPI_Init_thread failed\n", stderr);
    options_free(&options);
    return EXIT_FAILED;
  }
  code = run_ranks(st, &options);
  options_free(&options);
  MPI_Finalize();
  return code;
}
