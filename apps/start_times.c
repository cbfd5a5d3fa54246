/* SPDX-License-Identifier: Apache-2.0 */
#include "start_times.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { FIELDS = 20 /* from the program's name to its start: proc(5) */ };

static double clock_ms(clockid_t clock)
{
  struct timespec t;

  clock_gettime(clock, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* Milliseconds since the process was started, before its libraries were loaded;
 * 0 where the system does not tell. */
static double age_ms(void)
{
  char text[1024];
  const char *at;
  unsigned long long ticks;
  FILE *file = fopen("/proc/self/stat", "r");

  if (!file) return 0;
  text[fread(text, 1, sizeof text - 1, file)] = '\0';
  fclose(file);
  at = strrchr(text, ')');
  for (int i = 0; at && i < FIELDS; i++)
    at = strchr(at + 1, ' ');
  if (!at || sscanf(at, " %llu", &ticks) != 1) return 0;
  return clock_ms(CLOCK_BOOTTIME) -
         1e3 * (double)ticks / (double)sysconf(_SC_CLK_TCK);
}

static void add(start_times_t *times, const char *name, double ms)
{
  times->parts[times->num++] = (mz_named_number_t){name, ms};
}

void start_times_begin(start_times_t *times)
{
  times->last_ms = clock_ms(CLOCK_MONOTONIC) - age_ms();
}

void start_times_end(start_times_t *times, const char *name)
{
  double now = clock_ms(CLOCK_MONOTONIC);

  add(times, name, now - times->last_ms);
  times->last_ms = now;
}

void start_times_engine(start_times_t *times, const mz_engine_t *engine)
{
  const mz_start_times_t *parts = mz_engine_start_times(engine);

  add(times, "start.plan", parts->plan_ms);
  add(times, "start.device", parts->device_ms);
  add(times, "start.values", parts->values_ms);
  add(times, "start.warm", parts->warm_ms);
  times->last_ms = clock_ms(CLOCK_MONOTONIC);
}
