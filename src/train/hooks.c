/* SPDX-License-Identifier: Apache-2.0 */
#include "train/hooks.h"

#include "base/alloc.h"
#include "base/check.h"
#include "train/engine_impl.h"

#include <dlfcn.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool mz_hooks_masked(const mz_config_values_t *config, int rank)
{
  for (int32_t i = 0; i < config->debug.num_label_mask; i++)
    if (config->debug.label_mask[i] == rank) return true;
  return false;
}

mz_status_t mz_hooks_fault(const mz_config_values_t *config, int rank,
                           int64_t step, bool late)
{
  char kind[16];
  long long at;
  int who;

  if (!config->debug.fault) return MZ_OK;
  if (sscanf(config->debug.fault, "%15[^:]:rank%d:step%lld", kind, &who, &at) !=
      3)
    return MZ_OK;
  if (who != rank || at != step) return MZ_OK;
  if ((strcmp(kind, "late") == 0) != late) return MZ_OK;
  if (strcmp(kind, "exit") == 0) raise(SIGKILL);
  while (strcmp(kind, "stall") == 0)
    sleep(1);
  MZ_FAIL(MZ_ERR_NOMEM, "no memory (debug.fault %s)", config->debug.fault);
}

void mz_hooks_mark(const char *phase)
{
#ifdef MZ_TEST_HOOKS
  void *symbol = dlsym(RTLD_DEFAULT, "mz_outside_mark");
  void (*mark)(const char *);

  if (!symbol) return;
  memcpy(&mark, &symbol, sizeof mark);
  mark(phase);
#else
  (void)phase;
#endif
}

static mz_status_t inject(mz_engine_t *e, const json_t *norms,
                          const mz_segment_t *s)
{
  const mz_tensor_t *t = &e->decl->tensors[s->tensor];
  double norm = json_number_value(json_object_get(norms, t->name));
  float *values = NULL;
  mz_status_t st;

  MZ_TRY(mz_new(s->length, "given gradients", &values));
  for (int64_t j = 0; j < s->length; j++)
    values[j] = (float)(norm / sqrt((double)t->elements));
  st = mz_zero_store(e->zero, mz_zero_segment(e->zero, s, MZ_PART_GRADS),
                     s->length, values);
  mz_free(values);
  return MZ_TRACE(st);
}

mz_status_t mz_hooks_inject(mz_engine_t *engine)
{
  const mz_plan_t *p = engine->plan;
  json_error_t error;
  json_t *norms = json_load_file(engine->config->debug.inject_grads, 0, &error);
  mz_status_t st;

  MZ_REQUIRE(norms, MZ_ERR_IO, "%s: %s", engine->config->debug.inject_grads,
             error.text);
  MZ_TRY_GOTO(
      st, /* NaN where nothing is written */
      mz_device_fill(engine->device, mz_zero_buffer(engine->zero, p->accum),
                     0xff, p->buffers[p->accum].bytes, engine->device->stream),
      done);
  for (int32_t i = 0; i < p->num_segments[MZ_SHARE_OWNED]; i++)
    MZ_TRY_GOTO(st, inject(engine, norms, &p->segments[MZ_SHARE_OWNED][i]),
                done);
done:
  json_decref(norms);
  return st;
}

static mz_status_t write_file(const char *folder, const char *name,
                              const float *values, int64_t elements)
{
  char path[1024];
  FILE *file;
  bool whole;

  snprintf(path, sizeof path, "%s/%s.f32", folder, name);
  file = fopen(path, "wb");
  MZ_REQUIRE(file, MZ_ERR_IO, "%s: %s", path, strerror(errno));
  whole = fwrite(values, sizeof *values, (size_t)elements, file) ==
          (size_t)elements;
  whole = fclose(file) == 0 && whole;
  MZ_REQUIRE(whole, MZ_ERR_IO, "%s: %s", path, strerror(errno));
  return MZ_OK;
}

static mz_status_t dump_one(mz_engine_t *engine, mz_tensor_part_t part,
                            const char *folder, int32_t tensor, float *values)
{
  mz_status_t st = MZ_OK;

  MZ_TRY(mz_engine_read(engine, tensor, part, values));
  if (engine->plan->opts.rank == 0)
    st = write_file(folder, mz_decl_tensor_name(engine->decl, tensor), values,
                    mz_decl_tensor_elements(engine->decl, tensor));
  return MZ_TRACE(mz_comm_agree(engine->comm, st));
}

mz_status_t mz_hooks_dump(mz_engine_t *engine, mz_tensor_part_t part,
                          const char *folder)
{
  int64_t most = 0;
  float *values = NULL;
  mz_status_t st = MZ_OK;

  for (int32_t t = 0; t < mz_decl_num_tensors(engine->decl); t++)
    most = mz_max_i64(most, mz_decl_tensor_elements(engine->decl, t));
  if (engine->plan->opts.rank == 0 && mkdir(folder, 0777) != 0 &&
      errno != EEXIST)
    st = MZ_ERROR(MZ_ERR_IO, "%s: %s", folder, strerror(errno));
  if (st == MZ_OK) st = mz_new(most, "dumped tensor", &values);
  MZ_TRY_GOTO(st, mz_comm_agree(engine->comm, st), done);
  for (int32_t t = 0; t < mz_decl_num_tensors(engine->decl); t++)
    MZ_TRY_GOTO(st, dump_one(engine, part, folder, t, values), done);
done:
  mz_free(values);
  return st;
}
