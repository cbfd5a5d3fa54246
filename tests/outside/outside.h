/* SPDX-License-Identifier: Apache-2.0 */
/* What an outside observer of a program saw: liboutside.so, to be preloaded.
 * It stands between the program and malloc, mmap, MPI and CUDA, and counts; the
 * program under test finds these functions by name when they are there. */
#ifndef MZ_TESTS_OUTSIDE_H
#define MZ_TESTS_OUTSIDE_H

#include <stdint.h>

enum { OUTSIDE_LARGE = 64 << 10, OUTSIDE_MAX_LINES = 64 };

/* Allocations whose caller is the program itself (its static libraries
 * included) or libmoezero, other shared libraries not. Sizes in bytes. */
typedef struct outside_memory {
  int64_t calls;       /* of any size, since the start */
  int64_t live_bytes;  /* of those of at least OUTSIDE_LARGE */
  int64_t late_calls;  /* above OUTSIDE_LARGE since the mark "warm" */
  int64_t late_bytes;  /* of these */
  int64_t lost_blocks; /* more live blocks than the table holds: must be 0 */
} outside_memory_t;

/* Calls on the communicators of one name since the mark "warm", and bytes in
 * this rank's send arguments, the own block included. */
typedef struct outside_line {
  char name[64];
  int64_t gather_calls, gather_bytes;     /* MPI_Iallgatherv */
  int64_t exchange_calls, exchange_bytes; /* MPI_Ialltoallv */
  int64_t pair_calls, pair_bytes;         /* MPI_Isend */
  int64_t other_calls; /* collectives and blocking sends of any other kind */
} outside_line_t;

/* Calls of the CUDA runtime that gave something, and frees. */
typedef struct outside_calls {
  int64_t allocations, bytes; /* of the card's memory and of pinned memory */
  int64_t frees;
  int64_t objects; /* streams and events made, host memory registered */
} outside_calls_t;

/* By who called: moezero itself, or libraries that share its CUDA runtime; [0]
 * until the mark "warm", [1] since. */
typedef struct outside_device {
  outside_calls_t own[2], others[2];
  int64_t live_bytes[2]; /* of own: [0] on the card, [1] pinned */
  int64_t lost_blocks;   /* more live blocks than the table holds: must be 0 */
  int64_t own_calls;     /* of moezero, those that choose a device included */
  int64_t early_calls;   /* of these before MPI_Init */
} outside_device_t;

/* "warm": start-up is over. Called by the engine of a test build. */
void mz_outside_mark(const char *phase);

void outside_memory(outside_memory_t *memory_out);
void outside_device(outside_device_t *device_out);
/* @return the number of lines, at most OUTSIDE_MAX_LINES. */
int outside_messages(outside_line_t *lines_out);

/* Between the files of this library. */
void outside_mark_device(void);
void outside_mark_memory(void);
void outside_mark_messages(void);

#endif
