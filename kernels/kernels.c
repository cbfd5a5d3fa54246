/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/kernels.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/cpu.h"

#include <omp.h>
#include <string.h>

/* name, table or NULL where it is not compiled in, dtypes it computes in (bits
 * of 1 << dtype), threads of the host that one kernel uses. */
#define MZ_BACKEND_LIST(X)                                                     \
  X(MZ_BACKEND_CPU, &mz_kernels_ops_cpu, 1u << MZ_F32, omp_get_max_threads)    \
  X(MZ_BACKEND_CUDA, NULL, 0u, NULL)

typedef struct backend {
  const char *name;
  const mz_kernels_ops_t *ops;
  unsigned dtypes;
  int (*num_threads)(void);
} backend_t;

static const backend_t backends[] = {
#define MZ_BACKEND_ROW_(name, ops, dtypes, num_threads)                        \
  {(name), (ops), (dtypes), (num_threads)},
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
  MZ_REQUIRE(backend->ops, MZ_ERR_UNSUPPORTED, "backend %s is not compiled in",
             backend->name);
  MZ_REQUIRE(mz_dtype_bytes(opts->dtype) > 0 &&
                 (backend->dtypes >> opts->dtype & 1u),
             MZ_ERR_UNSUPPORTED, "backend %s does not compute in dtype %d",
             backend->name, (int)opts->dtype);
  MZ_TRY(mz_new(1, "kernels", &kernels));
  kernels->ops = backend->ops;
  kernels->dtype = opts->dtype;
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
