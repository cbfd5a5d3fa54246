/* SPDX-License-Identifier: Apache-2.0 */
/* The plan against what an outside observer counts: memory, allocations after
 * the warm pass, and messages by communicator.
 * Usage: rank_outside LIBRARY STEPS [KEY=VALUE]... [-- KEY=VALUE...]...
 * LIBRARY is liboutside.so; the program starts itself again with it preloaded.
 * Prints a line a variant. Exit code 0: everything is as planned. With
 * train.device=cuda only the messages and the allocations are looked at: the
 * arena is not in the process's memory. */
#include "tiny.h"

#include "outside/outside.h"

#include "base/check.h"
#include "comm/comm.h"
#include "plan/plan.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ASSIGNMENTS = 24, MIB = 1 << 20 };

typedef struct variant {
  const char *given[MAX_ASSIGNMENTS];
  int num_given, steps;
  tiny_t tiny;
  const mz_plan_t *plan;
  bool pairs, device_pairs; /* what goes pairwise: all, or what lies on GPUs */
  int64_t reported; /* bytes of token exchanges of all ranks, by the steps */
} variant_t;

static void (*see_memory)(outside_memory_t *memory_out);
static int (*see_messages)(outside_line_t *lines_out);
static void (*forget_messages)(void);
static int world, me;
static int64_t base_bytes; /* of the process, with its libraries in use */

/* "VmHWM" or "VmRSS" of this process, in bytes. */
static int64_t own_bytes(const char *what)
{
  FILE *file = fopen("/proc/self/status", "r");
  char line[256];
  long long kib = 0;

  if (!file) return 0;
  while (fgets(line, sizeof line, file))
    if (strncmp(line, what, strlen(what)) == 0)
      sscanf(line + strlen(what) + 1, "%lld", &kib);
  fclose(file);
  return (int64_t)kib * 1024;
}

static int64_t tolerance(int64_t planned)
{
  return planned / 200 > 64 * MIB ? planned / 200 : 64 * MIB;
}

/* --- memory --- */

static mz_status_t check_allocations(void)
{
  outside_memory_t seen;

  see_memory(&seen);
  MZ_REQUIRE(seen.calls > 0 && seen.lost_blocks == 0, MZ_ERR_INTERNAL,
             "the observer saw %" PRId64 " allocations and lost %" PRId64,
             seen.calls, seen.lost_blocks);
  MZ_REQUIRE(seen.late_calls == 0, MZ_ERR_INTERNAL,
             "%" PRId64 " allocations of %" PRId64
             " bytes together after the warm pass",
             seen.late_calls, seen.late_bytes);
  return MZ_OK;
}

static mz_status_t check_memory(const variant_t *v)
{
  int64_t planned = v->plan->arena_bytes, high = own_bytes("VmHWM");
  int64_t stated = mz_engine_baseline_bytes(v->tiny.engine);
  outside_memory_t seen;

  see_memory(&seen);
  MZ_REQUIRE(llabs(seen.live_bytes - planned) < 2 * OUTSIDE_LARGE,
             MZ_ERR_INTERNAL, "%" PRId64 " bytes live, the arena has %" PRId64,
             seen.live_bytes, planned);
  MZ_REQUIRE(llabs(high - stated - planned) <= tolerance(planned),
             MZ_ERR_INTERNAL,
             "peak %" PRId64 ", baseline %" PRId64 ", planned %" PRId64, high,
             stated, planned);
  /* the same with a baseline that does not come from this plan */
  MZ_REQUIRE(llabs(high - base_bytes - planned) <= tolerance(planned),
             MZ_ERR_INTERNAL,
             "peak %" PRId64 ", before %" PRId64 ", planned %" PRId64, high,
             base_bytes, planned);
  if (me == 0)
    printf("planned %.1f MiB, live %+.3f MiB, peak %+.1f MiB, of the base "
           "%+.1f MiB; ",
           (double)planned / MIB, (double)(seen.live_bytes - planned) / MIB,
           (double)(high - stated - planned) / MIB,
           (double)(high - base_bytes - planned) / MIB);
  return MZ_OK;
}

/* That it sees one allocation, and one only, of the size it has to report. */
static mz_status_t check_observer(void)
{
  outside_memory_t before, after;
  void *volatile small = malloc(OUTSIDE_LARGE);
  void *volatile large = NULL;

  see_memory(&before);
  large = malloc(OUTSIDE_LARGE + 1);
  see_memory(&after);
  free(large);
  free(small);
  MZ_REQUIRE(after.late_calls == before.late_calls + 1 &&
                 after.live_bytes == before.live_bytes + OUTSIDE_LARGE + 1,
             MZ_ERR_INTERNAL, "the observer does not see an allocation");
  see_memory(&after);
  MZ_REQUIRE(after.live_bytes == before.live_bytes - OUTSIDE_LARGE &&
                 before.late_calls == 0,
             MZ_ERR_INTERNAL, "the observer does not see a free");
  return MZ_OK;
}

/* --- messages --- */

static bool is_bulk(mz_entry_kind_t kind)
{
  return kind == MZ_ENTRY_PARAMS || kind == MZ_ENTRY_GRADS ||
         kind == MZ_ENTRY_SUMS || kind == MZ_ENTRY_WEIGHTS;
}

static bool is_exchange(mz_entry_kind_t kind)
{
  return kind == MZ_ENTRY_GRADS || kind == MZ_ENTRY_TOKENS;
}

/* Ranks of a test share a machine. */
static bool is_pairwise(const variant_t *v, mz_entry_kind_t kind)
{
  bool on_device = is_bulk(kind) || kind == MZ_ENTRY_TOKENS;

  return v->pairs || (v->device_pairs && on_device);
}

static void name_of(const variant_t *v, const mz_traffic_t *t, char *name,
                    size_t bytes)
{
  snprintf(name, bytes, "mz.%s.%s", is_bulk(t->kind) ? "bulk" : "exchange",
           v->plan->groups[t->group].name);
}

/* Calls and bytes of all steps. Pairwise the own block stays, that of gradients
 * always does, and a gather's goes to every other rank. */
static void expect(const variant_t *v, const mz_traffic_t *t, int64_t *calls,
                   int64_t *bytes)
{
  int64_t micros = v->steps * v->plan->opts.accumulation;
  int64_t others = v->plan->groups[t->group].size - 1;

  *calls = micros * t->calls_micro + v->steps * t->calls_update;
  *bytes = micros * t->bytes_micro + v->steps * t->bytes_update;
  if (!is_pairwise(v, t->kind)) return;
  if (t->kind == MZ_ENTRY_TOKENS) *bytes = *bytes / (others + 1) * others;
  if (!is_exchange(t->kind)) *bytes *= others;
}

/* What the plan says about one communicator; [0] gathers, [1] exchanges. */
typedef struct planned {
  int64_t calls[2], bytes[2];
  int64_t token_bytes; /* of the exchanges: a bound; 0: all is exact */
  int64_t pair_bytes, pair_token_bytes; /* likewise of what goes pairwise */
} planned_t;

static planned_t plan_of(const variant_t *v, const char *line_name)
{
  planned_t p = {0};
  char name[MZ_NAME_MAX + 16];

  for (int32_t i = 0; i < v->plan->num_traffic; i++) {
    const mz_traffic_t *t = &v->plan->traffic[i];
    int64_t calls, bytes;

    name_of(v, t, name, sizeof name);
    if (strcmp(name, line_name) != 0) continue;
    expect(v, t, &calls, &bytes);
    if (is_pairwise(v, t->kind)) {
      p.pair_bytes += bytes;
      if (t->bound) p.pair_token_bytes += bytes;
      continue;
    }
    p.calls[is_exchange(t->kind)] += calls;
    p.bytes[is_exchange(t->kind)] += bytes;
    if (t->bound) p.token_bytes += bytes;
  }
  return p;
}

static mz_status_t check_pairs(const outside_line_t *line, const planned_t *p)
{
  MZ_REQUIRE(line->pair_bytes <= p->pair_bytes &&
                 line->pair_bytes >= p->pair_bytes - p->pair_token_bytes,
             MZ_ERR_INTERNAL,
             "%s: %" PRId64 " bytes pairwise, planned %" PRId64
             ", of which at most %" PRId64 " of tokens",
             line->name, line->pair_bytes, p->pair_bytes, p->pair_token_bytes);
  return MZ_OK;
}

static mz_status_t check_collectives(const outside_line_t *line,
                                     const planned_t *p)
{
  bool right = line->exchange_calls == p->calls[1] &&
               line->exchange_bytes == p->bytes[1];

  if (p->token_bytes > 0)
    right = line->exchange_calls <= p->calls[1] &&
            line->exchange_bytes <= p->bytes[1] && line->exchange_bytes > 0;
  MZ_REQUIRE(right, MZ_ERR_INTERNAL,
             "%s: %" PRId64 " exchanges of %" PRId64
             " bytes, planned%s %" PRId64 " of %" PRId64,
             line->name, line->exchange_calls, line->exchange_bytes,
             p->token_bytes ? " at most" : "", p->calls[1], p->bytes[1]);
  MZ_REQUIRE(line->gather_calls == p->calls[0] &&
                 line->gather_bytes == p->bytes[0],
             MZ_ERR_INTERNAL,
             "%s: %" PRId64 " gathers of %" PRId64 " bytes, planned %" PRId64
             " of %" PRId64,
             line->name, line->gather_calls, line->gather_bytes, p->calls[0],
             p->bytes[0]);
  return MZ_OK;
}

/* A communicator that the plan uses and nobody saw has no line. */
static mz_status_t check_all_seen(const variant_t *v,
                                  const outside_line_t *lines, int num)
{
  char name[MZ_NAME_MAX + 16];

  for (int32_t i = 0; i < v->plan->num_traffic; i++) {
    int64_t calls, bytes;
    int at = 0;

    name_of(v, &v->plan->traffic[i], name, sizeof name);
    expect(v, &v->plan->traffic[i], &calls, &bytes);
    while (at < num && strcmp(lines[at].name, name) != 0)
      at++;
    MZ_REQUIRE(at < num || calls == 0, MZ_ERR_INTERNAL,
               "%s: nothing seen, planned %" PRId64 " calls", name, calls);
  }
  return MZ_OK;
}

static mz_status_t check_messages(const variant_t *v)
{
  outside_line_t lines[OUTSIDE_MAX_LINES];
  int num = see_messages(lines), checked = 0;
  int64_t bytes = 0;

  MZ_TRY(check_all_seen(v, lines, num));
  for (int i = 0; i < num; i++) {
    planned_t p = plan_of(v, lines[i].name);

    if (strncmp(lines[i].name, "mz.", 3) != 0) continue;
    MZ_REQUIRE(lines[i].other_calls == 0, MZ_ERR_INTERNAL,
               "%s: %" PRId64 " calls of another kind", lines[i].name,
               lines[i].other_calls);
    MZ_TRY(check_pairs(&lines[i], &p));
    MZ_TRY(check_collectives(&lines[i], &p));
    checked++;
    bytes +=
        lines[i].gather_bytes + lines[i].exchange_bytes + lines[i].pair_bytes;
  }
  MZ_REQUIRE(checked > 0 || world == 1, MZ_ERR_INTERNAL, "no message seen");
  if (me == 0)
    printf("%d communicators, %.2f MiB sent: ", checked, (double)bytes / MIB);
  return MZ_OK;
}

/* Of the exchange lane only tokens are exchanged. What goes pairwise leaves the
 * own block out. */
static mz_status_t check_reported(const variant_t *v)
{
  outside_line_t lines[OUTSIDE_MAX_LINES];
  int num = see_messages(lines);
  int64_t own = 0, seen;

  for (int i = 0; i < num; i++)
    if (strncmp(lines[i].name, "mz.exchange.", 12) == 0)
      own += lines[i].exchange_bytes;
  MPI_Allreduce(&own, &seen, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
  MZ_REQUIRE(v->pairs || v->device_pairs || v->reported == seen,
             MZ_ERR_INTERNAL,
             "%" PRId64 " bytes of tokens reported, %" PRId64 " seen",
             v->reported, seen);
  return MZ_OK;
}

/* --- variants --- */

static mz_status_t take_steps(variant_t *v)
{
  const mz_config_values_t *c = mz_config_values(v->tiny.config);
  mz_step_result_t result;
  mz_form_t form;

  v->plan = mz_engine_plan(v->tiny.engine);
  form = c->comm.messages;
  v->pairs = c->debug.count_limit > 0 || form == MZ_FORM_PAIRWISE;
  v->device_pairs = form == MZ_FORM_AUTO && v->plan->opts.cuda &&
                    !mz_comm_is_staged(mz_engine_comm(v->tiny.engine));
  if (v->plan->opts.cuda) { /* the first step's choices of products are told */
    MZ_TRY(tiny_step(&v->tiny, &result));
    forget_messages();
  }
  for (int i = 0; i < v->steps; i++) {
    MZ_TRY(tiny_step(&v->tiny, &result));
    v->reported += result.exchange_bytes;
  }
  MZ_REQUIRE(!result.skipped && result.grad_norm > 0, MZ_ERR_INTERNAL,
             "the steps did nothing");
  return MZ_OK;
}

static bool run_variant(variant_t *v)
{
  int ok, all_ok;
  mz_status_t st;

  MZ_TRY_GOTO(st, tiny_create(v->given, v->num_given, MPI_COMM_WORLD, &v->tiny),
              done);
  MZ_TRY_GOTO(st, take_steps(v), done);
  MZ_TRY_GOTO(st, check_reported(v), done);
  MZ_TRY_GOTO(st, check_allocations(), done);
  if (!v->plan->opts.cuda) MZ_TRY_GOTO(st, check_memory(v), done);
  MZ_TRY_GOTO(st, check_messages(v), done);
  MZ_TRY_GOTO(st, check_observer(), done);
done:
  if (st) fprintf(stderr, "rank %d: %s\n", me, mz_error_last());
  tiny_destroy(&v->tiny);
  ok = st == MZ_OK;
  MPI_Allreduce(&ok, &all_ok, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (me == 0) {
    printf("%s:", all_ok ? "as planned" : "NOT AS PLANNED");
    for (int i = 0; i < v->num_given; i++)
      printf(" %s", v->given[i]);
    printf("\n");
  }
  return all_ok;
}

/* Brings the libraries into use, so that the next engine's bytes are its own.
 */
static bool measure_base(void)
{
  char batch[64];
  const char *given[] = {batch};
  tiny_t tiny;
  mz_step_result_t result;
  mz_status_t st;

  snprintf(batch, sizeof batch, "train_batch_size=%d", world);
  MZ_TRY_GOTO(st, tiny_create(given, 1, MPI_COMM_WORLD, &tiny), done);
  MZ_TRY_GOTO(st, tiny_step(&tiny, &result), done);
done:
  tiny_destroy(&tiny);
  base_bytes = own_bytes("VmRSS");
  return st == MZ_OK && base_bytes > 0;
}

static bool run_variants(int argc, char **argv)
{
  bool good = measure_base();
  int at = 3;

  while (at < argc) {
    variant_t v = {.steps = atoi(argv[2])};

    for (; at < argc && strcmp(argv[at], "--") != 0; at++)
      if (v.num_given < MAX_ASSIGNMENTS) v.given[v.num_given++] = argv[at];
    at++;
    good = run_variant(&v) && good;
  }
  return good;
}

/* Finds the observer; the first time it is not there. */
static bool find_observer(char **argv)
{
  void *memory = dlsym(RTLD_DEFAULT, "outside_memory");
  void *messages = dlsym(RTLD_DEFAULT, "outside_messages");
  void *mark = dlsym(RTLD_DEFAULT, "outside_mark_messages");

  if (!memory && !getenv("LD_PRELOAD")) {
    setenv("LD_PRELOAD", argv[1], 1);
    execv("/proc/self/exe", argv);
  }
  if (!memory || !messages || !mark) return false;
  memcpy(&see_memory, &memory, sizeof memory);
  memcpy(&see_messages, &messages, sizeof messages);
  memcpy(&forget_messages, &mark, sizeof mark);
  return true;
}

int main(int argc, char **argv)
{
  int provided;
  bool good;

  if (argc < 4 || !find_observer(argv)) return 2;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  good = run_variants(argc, argv);
  MPI_Finalize();
  return good ? 0 : 1;
}
