/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of a configuration against what the card and an outside observer
 * see over five steps on random tokens: the peak of the bytes in use is
 * baseline + plan within max(64 MiB, 0.5%), moezero holds what the plan says,
 * and after the warm pass it takes nothing more. Needs a GPU that nobody else
 * uses for each rank, and no file of tokens.
 * Usage: device_memory LIBRARY CONFIG [KEY=VALUE]...
 * LIBRARY is liboutside.so; the program starts itself again with it preloaded.
 * Prints a line a check and rank. Exit code 0: all is as planned; 2: no GPU. */
#include "outside/outside.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/device.h"
#include "plan/plan.h"

#include <dlfcn.h>
#include <moezero/engine.h>
#include <moezero/gpt.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { STEPS = 5, POLL_NS = 1000000, MIB = 1 << 20 };

/* A thread that looks at the card every millisecond. */
typedef struct watch {
  mz_device_t *device;
  pthread_t thread;
  bool started;
  atomic_bool stop;
  _Atomic int64_t peak, looks;
} watch_t;

typedef struct run {
  const char *name; /* of the configuration */
  mz_config_t *config;
  mz_decl_t *decl;
  mz_engine_t *engine;
  mz_step_data_t data;
  int32_t *tokens, *labels, *sequences;
  int64_t *samples;
  watch_t watch;
  int64_t before, peak[2]; /* bytes in use; [0] start-up, [1] steps */
  int64_t first, between;  /* after the first step, the most after any */
  int failed;
} run_t;

static int world, me;
static void (*see_memory)(outside_memory_t *memory_out);
static void (*see_device)(outside_device_t *device_out);
static void (*set_mark)(const char *phase);

static double mib(int64_t bytes) { return (double)bytes / MIB; }
static double gib(int64_t bytes) { return (double)bytes / MIB / 1024; }

/* --- the card --- */

static void *look(void *ctx)
{
  watch_t *w = ctx;
  const struct timespec pause = {.tv_nsec = POLL_NS};
  int64_t used;

  if (mz_device_attach(w->device) != MZ_OK) return NULL;
  while (!atomic_load(&w->stop)) {
    if (mz_device_used(w->device, &used) != MZ_OK) return NULL;
    if (used > atomic_load(&w->peak)) atomic_store(&w->peak, used);
    atomic_fetch_add(&w->looks, 1);
    nanosleep(&pause, NULL);
  }
  return NULL;
}

static mz_status_t start_watch(watch_t *w)
{
  MZ_REQUIRE(pthread_create(&w->thread, NULL, look, w) == 0, MZ_ERR_NOMEM,
             "no thread to look at the card");
  w->started = true;
  return MZ_OK;
}

/* The peak so far; the next one begins anew. */
static int64_t take_peak(watch_t *w) { return atomic_exchange(&w->peak, 0); }

/* --- the run --- */

static uint32_t next_random(void)
{
  static uint32_t state = 2463534242u;

  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

static mz_status_t make_batch(run_t *r)
{
  const mz_config_values_t *v = mz_config_values(r->config);
  int64_t micro = v->train_micro_batch_size_per_gpu;
  int64_t accumulation = v->gradient_accumulation_steps;
  int64_t rows = micro * accumulation, length = v->data.sequence_length;

  MZ_TRY(mz_new(rows * length + 1, "tokens", &r->tokens));
  MZ_TRY(mz_new(rows, "samples", &r->samples));
  MZ_TRY(mz_new(accumulation, "sequences", &r->sequences));
  r->labels = r->tokens + 1;
  for (int64_t i = 0; i < rows; i++)
    r->samples[i] = i;
  for (int64_t j = 0; j < accumulation; j++)
    r->sequences[j] = (int32_t)micro;
  r->data = (mz_step_data_t){.num_micro = (int32_t)accumulation,
                             .tokens = r->tokens,
                             .labels = r->labels,
                             .samples = r->samples,
                             .sequences = r->sequences,
                             .max_sequences = r->sequences};
  return MZ_OK;
}

static void fill_batch(run_t *r)
{
  const mz_config_values_t *v = mz_config_values(r->config);
  int64_t num = v->train_micro_batch_size_per_gpu *
                v->gradient_accumulation_steps * v->data.sequence_length;

  for (int64_t i = 0; i <= num; i++)
    r->tokens[i] = (int32_t)(next_random() % (uint32_t)v->model.vocab_size);
}

/* The one that the engine will take: by the rank's place on its machine. */
static mz_status_t open_device(run_t *r)
{
  int place, count;
  MPI_Comm node;

  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, me, MPI_INFO_NULL,
                      &node);
  MPI_Comm_rank(node, &place);
  MPI_Comm_free(&node);
  MZ_TRY(mz_device_count(MZ_BACKEND_CUDA, &count));
  return MZ_TRACE(
      mz_device_open(MZ_BACKEND_CUDA, place % count, &r->watch.device));
}

static mz_status_t create(run_t *r, const char *path, char **given, int num)
{
  MZ_TRY(mz_config_read(path, (const char *const *)given, num, &r->config));
  MZ_TRY(mz_config_resolve(r->config, world));
  MZ_TRY(mz_config_set_device(r->config, "cuda"));
  MZ_TRY(mz_decl_create(&r->decl));
  MZ_TRY(mz_gpt_declare(mz_config_values(r->config), r->decl));
  MZ_TRY(make_batch(r));
  MZ_TRY(open_device(r));
  MZ_TRY(mz_device_used(r->watch.device, &r->before));
  MZ_TRY(start_watch(&r->watch));
  return MZ_TRACE(
      mz_engine_create(r->config, r->decl, MPI_COMM_WORLD, &r->engine));
}

static mz_status_t take_steps(run_t *r)
{
  mz_step_result_t result = {0};
  int64_t used;

  for (int i = 0; i < STEPS; i++) {
    fill_batch(r);
    MZ_TRY(mz_engine_step(r->engine, &r->data, &result));
    MZ_TRY(mz_device_used(r->watch.device, &used));
    if (i == 0) r->first = used;
    if (used > r->between) r->between = used;
  }
  MZ_REQUIRE(!result.skipped && result.grad_norm > 0, MZ_ERR_INTERNAL,
             "the steps did nothing");
  return MZ_OK;
}

static void destroy(run_t *r)
{
  if (r->watch.started) {
    atomic_store(&r->watch.stop, true);
    pthread_join(r->watch.thread, NULL);
  }
  mz_engine_destroy(&r->engine);
  mz_device_close(&r->watch.device);
  mz_decl_destroy(&r->decl);
  mz_config_destroy(&r->config);
  mz_free(r->tokens);
  mz_free(r->samples);
  mz_free(r->sequences);
}

/* --- checks --- */

static void begin_line(run_t *r, bool good)
{
  printf("%s %s, rank %d of %d: ", good ? "ok" : "FAILED", r->name, me, world);
  r->failed += !good;
}

static void check_peak(run_t *r)
{
  int64_t planned = mz_engine_plan(r->engine)->arena_bytes;
  int64_t baseline = mz_engine_baseline_bytes(r->engine);
  int64_t bound = mz_max_i64(64 * (int64_t)MIB, planned / 200);
  int64_t peak = mz_max_i64(r->peak[0], mz_max_i64(r->peak[1], r->between));
  int64_t apart = llabs(peak - baseline - planned);
  long long looks = atomic_load(&r->watch.looks);

  begin_line(r, apart <= bound && looks >= STEPS);
  printf("planned %.3f GiB, baseline %.3f GiB, peak %.3f GiB (start-up %.3f, "
         "steps %.3f, between steps %.3f; %lld looks): |peak - baseline - "
         "planned| %.1f MiB of at most %.1f; %+.1f MiB with the first step, "
         "%+.1f since; before the engine %.3f GiB were in use\n",
         gib(planned), gib(baseline), gib(peak), gib(r->peak[0]),
         gib(r->peak[1]), gib(r->between), looks, mib(apart), mib(bound),
         mib(r->first - baseline - planned), mib(r->between - r->first),
         gib(r->before));
}

static void check_held(run_t *r, const outside_device_t *seen)
{
  const mz_plan_t *plan = mz_engine_plan(r->engine);
  int64_t card = seen->live_bytes[0] - plan->arena_bytes;
  int64_t host = seen->live_bytes[1] - plan->host_bytes;

  begin_line(r, seen->own[0].allocations > 0 && seen->lost_blocks == 0 &&
                    llabs(card) <= OUTSIDE_LARGE &&
                    llabs(host) <= OUTSIDE_LARGE);
  printf("moezero holds %+.3f MiB of the card and %+.3f MiB of pinned memory "
         "over the plan's (%.1f MiB pinned)\n",
         mib(card), mib(host), mib(plan->host_bytes));
}

static void check_late(run_t *r, const outside_device_t *seen)
{
  const outside_calls_t *own = &seen->own[1], *others = &seen->others[1];
  outside_memory_t memory;

  see_memory(&memory);
  begin_line(r, own->allocations + own->frees + own->objects == 0 &&
                    memory.late_calls == 0);
  printf("after the warm pass moezero: %lld allocations, %lld frees, %lld "
         "streams and events, %lld of host memory above %d KiB; libraries: "
         "%lld allocations (%.1f MiB), %lld frees, %lld streams and events\n",
         (long long)own->allocations, (long long)own->frees,
         (long long)own->objects, (long long)memory.late_calls,
         OUTSIDE_LARGE >> 10, (long long)others->allocations,
         mib(others->bytes), (long long)others->frees,
         (long long)others->objects);
}

/* That the observer sees a call of this program. */
static mz_status_t check_observer(run_t *r)
{
  outside_device_t before, with, after;
  void *memory;

  see_device(&before);
  MZ_TRY(mz_device_alloc(r->watch.device, MIB, "a block", &memory));
  see_device(&with);
  mz_device_free(r->watch.device, memory);
  see_device(&after);
  begin_line(r, with.own[1].allocations == before.own[1].allocations + 1 &&
                    with.live_bytes[0] == before.live_bytes[0] + MIB &&
                    after.live_bytes[0] == before.live_bytes[0] &&
                    after.own[1].frees == with.own[1].frees + 1);
  printf("the observer sees an allocation and its free\n");
  return MZ_OK;
}

static mz_status_t check_all(run_t *r, const char *path, char **given, int num)
{
  outside_device_t seen;

  MZ_TRY(create(r, path, given, num));
  set_mark("warm"); /* in a build without test hooks the engine sets none */
  r->peak[0] = take_peak(&r->watch);
  MZ_TRY(take_steps(r));
  r->peak[1] = take_peak(&r->watch);
  see_device(&seen);
  check_peak(r);
  check_held(r, &seen);
  check_late(r, &seen);
  return MZ_TRACE(check_observer(r));
}

static int run(const char *path, char **given, int num)
{
  run_t r = {.name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path};
  mz_status_t st;
  int count;

  if (mz_device_count(MZ_BACKEND_CUDA, &count) != MZ_OK) {
    fprintf(stderr, "device_memory needs a GPU: %s\n", mz_error_message());
    return 2;
  }
  st = check_all(&r, path, given, num);
  if (st != MZ_OK) printf("FAILED %s: %s\n", r.name, mz_error_last());
  destroy(&r);
  return st != MZ_OK || r.failed > 0;
}

/* The observer's functions; the first time they are not there. */
static bool find_observer(char **argv)
{
  void *memory = dlsym(RTLD_DEFAULT, "outside_memory");
  void *device = dlsym(RTLD_DEFAULT, "outside_device");
  void *mark = dlsym(RTLD_DEFAULT, "mz_outside_mark");

  if (!memory && !getenv("LD_PRELOAD")) {
    setenv("LD_PRELOAD", argv[1], 1);
    execv("/proc/self/exe", argv);
  }
  if (!memory || !device || !mark) return false;
  memcpy(&see_memory, &memory, sizeof memory);
  memcpy(&see_device, &device, sizeof device);
  memcpy(&set_mark, &mark, sizeof mark);
  return true;
}

int main(int argc, char **argv)
{
  int provided, code;

  if (argc < 3 || !find_observer(argv)) {
    fprintf(stderr, "usage: device_memory LIBRARY CONFIG [KEY=VALUE]...\n");
    return 2;
  }
  setvbuf(stdout, NULL, _IOLBF, 0);
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  code = run(argv[2], argv + 3, argc - 3);
  MPI_Finalize();
  return code;
}
