/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/kernels.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/cpu.h"

#include <string.h>

#ifdef MZ_HAVE_CUDA
extern const mz_kernels_ops_t mz_kernels_ops_cuda;
#endif

#ifdef MZ_TEST_HOOKS
static const mz_kernels_ops_t *stand_in;

void mz_kernels_stand_in(const mz_kernels_ops_t *ops) { stand_in = ops; }
#endif

/* The table of a backend for a dtype; NULL: it has none. */
static const mz_kernels_ops_t *table_of(const mz_device_t *device,
                                        mz_dtype_t dtype)
{
  if (dtype != MZ_F32 && dtype != MZ_BF16) return NULL;
#ifdef MZ_TEST_HOOKS
  if (stand_in && strcmp(device->ops->name, MZ_BACKEND_CUDA) == 0)
    return dtype == MZ_F32 ? stand_in : NULL;
#endif
#ifdef MZ_HAVE_CUDA
  if (strcmp(device->ops->name, MZ_BACKEND_CUDA) == 0)
    return &mz_kernels_ops_cuda;
#endif
  return dtype == MZ_F32 ? &mz_kernels_ops_cpu : &mz_kernels_ops_cpu_bf16;
}

mz_status_t mz_kernels_create(const mz_kernels_opts_t *opts,
                              mz_kernels_t **kernels_out)
{
  const mz_kernels_ops_t *ops;
  mz_kernels_t *kernels = NULL;
  mz_status_t st;

  MZ_REQUIRE(kernels_out, MZ_ERR_ARG, "kernels_out is NULL");
  *kernels_out = NULL;
  MZ_REQUIRE(opts && opts->device, MZ_ERR_ARG, "no device is given");
  ops = table_of(opts->device, opts->dtype);
  MZ_REQUIRE(ops, MZ_ERR_UNSUPPORTED, "backend %s does not compute in dtype %d",
             opts->device->ops->name, (int)opts->dtype);
  MZ_TRY_GOTO(st, mz_new(1, "kernels", &kernels), done);
  kernels->ops = opts->spans ? mz_spans_table(opts->spans, ops) : ops;
  kernels->spans = opts->spans;
  kernels->device = opts->device;
  kernels->deterministic = opts->deterministic;
  kernels->dtype = opts->dtype;
  kernels->workspace = opts->workspace;
  kernels->workspace_bytes = opts->workspace_bytes;
  if (ops->create) MZ_TRY_GOTO(st, ops->create(kernels), done);
  *kernels_out = kernels;
  kernels = NULL;
done:
  mz_free(kernels);
  return st;
}

void mz_kernels_destroy(mz_kernels_t **kernels)
{
  if (!kernels || !*kernels) return;
  if ((*kernels)->ops->destroy) (*kernels)->ops->destroy(*kernels);
  mz_free(*kernels);
  *kernels = NULL;
}

mz_status_t mz_kernels_tune(const mz_kernels_t *kernels, bool on)
{
  if (!kernels->ops->tune) return MZ_OK;
  return MZ_TRACE(kernels->ops->tune(kernels, on));
}

mz_status_t mz_kernels_tuning_text(const mz_kernels_t *kernels, char **text_out)
{
  *text_out = NULL;
  if (!kernels->ops->tuning_text) return MZ_TRACE(mz_string_copy("", text_out));
  return MZ_TRACE(kernels->ops->tuning_text(kernels, text_out));
}

mz_status_t mz_kernels_take_tuning(const mz_kernels_t *kernels,
                                   const char *text)
{
  if (!kernels->ops->take_tuning || text[0] == '\0') return MZ_OK;
  return MZ_TRACE(kernels->ops->take_tuning(kernels, text));
}
