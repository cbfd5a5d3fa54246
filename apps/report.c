/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"
#include "commit.h"

#include "base/alloc.h"
#include "base/check.h"
#include "plan/decl_impl.h"
#include "plan/plan.h"

#include <jansson.h>
#include <limits.h>
#include <omp.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static double gib(int64_t bytes) { return (double)bytes / 0x1p30; }

static void print_model(const mz_config_values_t *c, const mz_decl_t *decl)
{
  int64_t all = 0, active = 0;

  for (int32_t t = 0; t < decl->num_tensors; t++) {
    const mz_tensor_t *x = &decl->tensors[t];
    const mz_moe_opts_t *moe = x->moe >= 0 ? &decl->moes[x->moe].opts : NULL;

    all += x->elements;
    /* a token passes k of a layer's experts, which all have one size */
    if (!moe || x->expert < moe->k) active += x->elements;
  }
  printf("model: %" PRId64 " layers (%" PRId32 " with experts), hidden %" PRId64
         ", vocabulary %" PRId64 ", %.3f M parameters, %.3f M a token\n",
         c->model.num_hidden_layers, c->moe.num_layers, c->model.hidden_size,
         c->model.vocab_size, 1e-6 * (double)all, 1e-6 * (double)active);
}

static void print_device(mz_engine_t *engine)
{
  int32_t sharing;
  const char *name = mz_engine_device_name(engine, &sharing);

  printf("device of rank 0: %s\n", name);
  if (sharing > 1)
    fprintf(stderr,
            "warning: %d ranks share one %s: good for tests, slow for training "
            "(nvidia-cuda-mps-control helps)\n",
            sharing, name);
  if (mz_comm_is_staged(mz_engine_comm(engine)))
    fputs("warning: this MPI does not take the GPU's memory: messages go "
          "through host memory, at the speed of two copies more; load an MPI "
          "that was built with CUDA, or see ci/gpu-stack\n",
          stderr);
}

static void print_plan(const mz_plan_t *plan, int64_t baseline)
{
  const mz_plan_opts_t *o = &plan->opts;
  int64_t elements = 0;

  for (int32_t i = 0; i < plan->num_units; i++)
    elements += plan->units[i].elements;
  printf("step: %" PRId64 " tokens on %d ranks, stage %" PRId64 ", %" PRId64
         " micro-batches\n",
         plan->max_tokens * o->accumulation * o->world_size, o->world_size,
         o->stage, o->accumulation);
  printf("units: %" PRId32 " of rank 0, %" PRId64 " elements\n",
         plan->num_units, elements);
  printf("memory of rank 0: %.3f GiB planned (", gib(plan->arena_bytes));
  for (int i = 0; i < MZ_NUM_CATEGORIES; i++)
    printf("%s%s %.3f", i > 0 ? ", " : "", mz_category_name((mz_category_t)i),
           gib(plan->category_bytes[i]));
  printf("), baseline %.3f GiB\n", gib(baseline));
}

/* mpirun binds each rank of one or two to one processor: its threads then take
 * turns there. Ranks that are not bound have a thread for each processor,
 * unless OMP_NUM_THREADS is set. */
static mz_status_t check_processors(const mz_config_values_t *c,
                                    mz_comm_t *comm, bool speak)
{
  int threads = omp_get_max_threads();
  int wanted = threads + (c->comm.thread && mz_comm_size(comm) > 1);
  int64_t missing, fewest, most;
  cpu_set_t set;

  if (sched_getaffinity(0, sizeof set, &set) != 0) return MZ_OK;
  missing = wanted - CPU_COUNT(&set);
  MZ_TRY(mz_comm_min_max(comm, missing, &fewest, &most));
  if (most <= 0 || !speak) return MZ_OK;
  if (wanted - most >= sysconf(_SC_NPROCESSORS_ONLN))
    fprintf(stderr,
            "warning: a rank has %d threads, the machine %" PRId64
            " processors; OMP_NUM_THREADS (%d now) is best the processors "
            "divided by the ranks of a machine\n",
            wanted, wanted - most, threads);
  else
    fprintf(stderr,
            "warning: a rank has %d threads and may use %" PRId64
            " processors; mpirun --bind-to none, or --map-by slot:PE=%d, "
            "gives it more\n",
            wanted, wanted - most, wanted);
  return MZ_OK;
}

mz_status_t report_start(const mz_config_t *config, const mz_decl_t *decl,
                         mz_engine_t *engine, mz_comm_t *comm, bool speak)
{
  const mz_config_values_t *c = mz_config_values(config);

  speak = speak && mz_comm_rank(comm) == 0;
  if (speak) {
    for (int i = 0; i < mz_config_num_notes(config); i++)
      printf("note: %s\n", mz_config_note(config, i));
    print_model(c, decl);
    print_device(engine);
    print_plan(mz_engine_plan(engine), mz_engine_baseline_bytes(engine));
    fflush(stdout);
  }
  return MZ_TRACE(check_processors(c, comm, speak));
}

void report_layers(const mz_decl_t *decl, int64_t num_tokens,
                   int64_t sequence_length)
{
  for (int64_t l = 0; l < decl->num_layers; l++) {
    const mz_layer_opts_t *layer = &decl->layers[l].opts;
    char line[256];
    double operations;

    if (!layer->describe) continue;
    layer->describe(layer->self, num_tokens, sequence_length, line, sizeof line,
                    &operations);
    printf("%s\n", line);
  }
}

/* --- config.json --- */

/* Appends to the list. */
static mz_status_t gather_hosts(mz_comm_t *comm, json_t *hosts)
{
  char name[HOST_NAME_MAX + 1] = "";

  gethostname(name, sizeof name - 1);
  for (int r = 0; r < mz_comm_size(comm); r++) {
    char host[sizeof name];

    memcpy(host, name, sizeof host);
    MZ_TRY(mz_comm_broadcast(comm, host, sizeof host, r));
    json_array_append_new(hosts, json_string(host));
  }
  return MZ_OK;
}

static json_t *versions(void)
{
  char mpi[MPI_MAX_LIBRARY_VERSION_STRING];
  int bytes;

  MPI_Get_library_version(mpi, &bytes);
  return json_pack("{s:s, s:s, s:s, s:s, s:s}", "moezero", MZ_VERSION, "commit",
                   MZ_COMMIT, "mpi", mpi, "jansson", JANSSON_VERSION,
                   "compiler", __VERSION__);
}

mz_status_t report_record(const mz_config_t *config, mz_comm_t *comm,
                          char **text_out)
{
  const char *job = getenv("SLURM_JOB_ID");
  json_t *hosts = json_array(), *json = NULL, *run;
  char *text = NULL;
  mz_status_t st;

  *text_out = NULL;
  MZ_TRY_GOTO(st, gather_hosts(comm, hosts), done);
  MZ_TRY_GOTO(st, mz_config_to_json(config, &text), done);
  if (mz_comm_rank(comm) > 0) goto done;
  json = json_loads(text, 0, NULL);
  run = json_pack("{s:O, s:s, s:o}", "hosts", hosts, "job", job ? job : "",
                  "versions", versions());
  if (json_object_set_new(json, "run", run) == 0)
    *text_out = json_dumps(json, JSON_INDENT(2));
  MZ_REQUIRE_GOTO(*text_out, st, done, MZ_ERR_NOMEM,
                  "no memory for config.json");
done:
  mz_config_free_text(&text);
  json_decref(json);
  json_decref(hosts);
  return st;
}
