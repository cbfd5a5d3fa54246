/* SPDX-License-Identifier: Apache-2.0 */
/* Where the time to the first step goes. */
#ifndef APPS_START_TIMES_H
#define APPS_START_TIMES_H

#include "train/run.h"

typedef struct start_times {
  double last_ms; /* where the next part begins */
  mz_named_number_t parts[MZ_RUN_STARTS];
  int32_t num;
} start_times_t;

/** Begins with the start of the process (as the system says, to 10 ms). */
void start_times_begin(start_times_t *times);

/** The part that ends now. */
void start_times_end(start_times_t *times, const char *name);

/** The part that ends now was mz_engine_create, which knows its own parts. */
void start_times_engine(start_times_t *times, const mz_engine_t *engine);

#endif
