/* SPDX-License-Identifier: Apache-2.0 */
/* Starts a program of tests/ranks under mpirun: a Criterion worker cannot call
 * MPI_Init itself, since the second one in a run fails. */
#ifndef MZ_TEST_MPIRUN_H
#define MZ_TEST_MPIRUN_H

#include <stddef.h>

/**
 * Runs `timeout S mpirun -n RANKS PROGRAM ARGS` and waits for it.
 * @param program  Relative to the build folder, "tests/ranks/rank_comm".
 * @param args     Passed to the shell as they are; "" for none.
 * @param output   Receives stdout and stderr, cut to @p output_bytes, with a
 * final zero.
 * @return The exit code; 124 after the time-out, -1 when it cannot be started.
 */
int mz_test_mpirun(int ranks, const char *program, const char *args,
                   int timeout_s, char *output, size_t output_bytes);

#endif
