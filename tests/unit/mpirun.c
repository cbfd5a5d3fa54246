/* SPDX-License-Identifier: Apache-2.0 */
#include "mpirun.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

/* Root is allowed for containers; ranks beyond the cores yield while they poll;
 * without the single-copy mechanism, as containers forbid it. */
static const char environment[] =
    "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
    "OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1 "
    "OMPI_MCA_btl_vader_single_copy_mechanism=none OMP_NUM_THREADS=1";

/* Reads to the end, so that the program never blocks on a full pipe. */
static void read_all(FILE *pipe, char *output, size_t output_bytes)
{
  char block[4096];
  size_t used = 0, got;

  while ((got = fread(block, 1, sizeof block, pipe)) > 0) {
    size_t room = output_bytes - 1 - used;

    if (got > room) got = room;
    memcpy(output + used, block, got);
    used += got;
  }
  output[used] = '\0';
}

int mz_test_mpirun(int ranks, const char *program, const char *args,
                   int timeout_s, char *output, size_t output_bytes)
{
  char command[4096];
  FILE *pipe;
  int length, status;

  length = snprintf(command, sizeof command,
                    "%s timeout -k 5 %d mpirun -n %d --oversubscribe --bind-to "
                    "none " MZ_BUILD_ROOT "/%s %s 2>&1 </dev/null",
                    environment, timeout_s, ranks, program, args);
  if (length < 0 || length >= (int)sizeof command) return -1;
  pipe = popen(command, "r");
  if (!pipe) return -1;
  read_all(pipe, output, output_bytes);
  status = pclose(pipe);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
