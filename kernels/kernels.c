/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/kernels.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/cpu.h"

#include <omp.h>
#include <string.h>

/* name, tables of fp32 and of bf16 (NULL: not compiled in), threads of the host
 * that one kernel uses. */
#define MZ_BACKEND_LIST(X)                                                     \
  X(MZ_BACKEND_CPU, &mz_kernels_ops_cpu, &mz_kernels_ops_cpu_bf16,             \
    omp_get_max_threads)                                                       \
  X(MZ_BACKEND_CUDA, NULL, NULL, NULL)

typedef struct backend {
  const char *name;
  const mz_kernels_ops_t *fp32, *bf16;
  int (*num_threads)(void);
} backend_t;

static const backend_t backends[] = {
#define MZ_BACKEND_ROW_(name, fp32, bf16, num_threads)                         \
  {(name), (fp32), (bf16), (num_threads)},
    MZ_BACKEND_LIST(MZ_BACKEND_ROW_)
#undef MZ_BACKEND_ROW_
};

enum { NUM_BACKENDS = sizeof backends / sizeof *backends };

static const backend_t *find(const char *name)
{
  for (int i = 0; i < NUM_BACKENDS; i++)
    if (strcmp(backends[i].name, name) == 0) return &backends[i];
  return NULL;
}

static const mz_kernels_ops_t *table_of(const backend_t *backend,
                                        mz_dtype_t dtype)
{
  if (dtype == MZ_F32) return backend->fp32;
  return dtype == MZ_BF16 ? backend->bf16 : NULL;
}

mz_status_t mz_kernels_create(const mz_kernels_opts_t *opts,
                              mz_kernels_t **kernels_out)
{
  const backend_t *backend;
  mz_kernels_t *kernels;

  MZ_REQUIRE(kernels_out, MZ_ERR_ARG, "kernels_out is NULL");
  *kernels_out = NULL;
  MZ_REQUIRE(opts && opts->backend, MZ_ERR_ARG, "no backend is named");
  backend = find(opts->backend);
  MZ_REQUIRE(backend, MZ_ERR_ARG, "no backend %s", opts->backend);
  MZ_REQUIRE(backend->fp32, MZ_ERR_UNSUPPORTED, "backend %s is not compiled in",
             backend->name);
  MZ_REQUIRE(table_of(backend, opts->dtype), MZ_ERR_UNSUPPORTED,
             "backend %s does not compute in dtype %d", backend->name,
             (int)opts->dtype);
  MZ_TRY(mz_new(1, "kernels", &kernels));
  kernels->ops = table_of(backend, opts->dtype);
  kernels->dtype = opts->dtype;
  kernels->workspace = opts->workspace;
  kernels->workspace_bytes = opts->workspace_bytes;
  kernels->deterministic = opts->deterministic;
  *kernels_out = kernels;
  return MZ_OK;
}

void mz_kernels_destroy(mz_kernels_t **kernels)
{
  if (!kernels || !*kernels) return;
  mz_free(*kernels);
  *kernels = NULL;
}

int mz_kernels_num_threads(const mz_kernels_t *kernels)
{
  const backend_t *backend = find(kernels->ops->name);
  return backend->num_threads ? backend->num_threads() : 1;
}
