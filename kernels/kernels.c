/* SPDX-License-Identifier: Apache-2.0 */
/* The registry of backends: one not built in still has its name. */
#include "kernels/kernels.h"

#include "base/alloc.h"
#include "base/check.h"
#include "kernels/cpu/cpu.h"

#include <omp.h>
#include <string.h>

/* name, operations or NULL when not compiled in */
#define MZ_BACKEND_LIST(X)                                                     \
  X(MZ_BACKEND_CPU, &mz_kernels_ops_cpu)                                       \
  X(MZ_BACKEND_CUDA, NULL)

static const struct {
  const char *name;
  const mz_kernels_ops_t *ops;
} backends[] = {
#define MZ_BACKEND_ROW_(name, ops) {name, ops},
    MZ_BACKEND_LIST(MZ_BACKEND_ROW_)
#undef MZ_BACKEND_ROW_
};

static mz_status_t find(const char *name, const mz_kernels_ops_t **ops_out)
{
  for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) {
    if (strcmp(name, backends[i].name) != 0) continue;
    MZ_REQUIRE(backends[i].ops, MZ_ERR_UNSUPPORTED,
               "backend \"%s\" is not compiled in", name);
    *ops_out = backends[i].ops;
    return MZ_OK;
  }
  MZ_FAIL(MZ_ERR_ARG, "no backend \"%s\"", name);
}

mz_status_t mz_kernels_create(const mz_kernels_opts_t *opts,
                              mz_kernels_t **kernels_out)
{
  const mz_kernels_ops_t *ops = NULL;

  *kernels_out = NULL;
  MZ_TRY(find(opts->backend, &ops));
  MZ_REQUIRE(opts->dtype == MZ_F32, MZ_ERR_UNSUPPORTED,
             "backend \"%s\" has fp32 kernels only", opts->backend);
  MZ_TRY(mz_new(1, "kernels", kernels_out));
  (*kernels_out)->ops = ops;
  (*kernels_out)->dtype = opts->dtype;
  return MZ_OK;
}

void mz_kernels_destroy(mz_kernels_t **kernels)
{
  if (!kernels) return;
  mz_free(*kernels);
  *kernels = NULL;
}

int mz_kernels_num_threads(const mz_kernels_t *kernels)
{
  (void)kernels;
  return omp_get_max_threads();
}
