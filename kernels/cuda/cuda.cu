/* SPDX-License-Identifier: Apache-2.0 */
/* The table of the "/cuda" backend and its state. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/products.h"

static void state_destroy(mz_kernels_t *kernels)
{
  mz_cuda_state_t *state = mz_cuda_state(kernels);

  if (!state) return;
  mz_cuda_attention_destroy(state->attention);
  mz_cuda_products_destroy(state->products);
  mz_free(state);
  kernels->state = NULL;
}

extern "C" void mz_cuda_kernels_destroy(mz_kernels_t *kernels)
{
  state_destroy(kernels);
}

mz_status_t mz_cuda_shared_bytes(int *bytes_out)
{
  int device;

  MZ_CUDA(cudaGetDevice(&device));
  MZ_CUDA(cudaDeviceGetAttribute(
      bytes_out, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return MZ_OK;
}

static mz_status_t state_create(mz_kernels_t *kernels, mz_cuda_state_t *state)
{
  MZ_TRY(mz_cuda_products_create(kernels, &state->products));
  MZ_TRY(mz_cuda_attention_create(kernels, &state->attention));
  return MZ_OK;
}

extern "C" mz_status_t mz_cuda_kernels_create(mz_kernels_t *kernels)
{
  mz_cuda_state_t *state = NULL;
  mz_status_t st;

  MZ_TRY(mz_new(1, "state of the CUDA kernels", &state));
  kernels->state = state;
  st = state_create(kernels, state);
  if (st != MZ_OK) state_destroy(kernels);
  return st;
}

/* --- choices: only products have some --- */

static mz_status_t tune(const mz_kernels_t *kernels, bool on)
{
  return MZ_TRACE(mz_cuda_products_tune(mz_cuda_products_of(kernels), on));
}

static mz_status_t tuning_text(const mz_kernels_t *kernels, char **text_out)
{
  return MZ_TRACE(
      mz_cuda_products_export(mz_cuda_products_of(kernels), text_out));
}

static mz_status_t take_tuning(const mz_kernels_t *kernels, const char *text)
{
  return MZ_TRACE(mz_cuda_products_import(mz_cuda_products_of(kernels), text));
}

extern "C" const mz_kernels_ops_t mz_kernels_ops_cuda = {
    MZ_BACKEND_CUDA,
    mz_cuda_kernels_create,
    mz_cuda_kernels_destroy,
    tune,
    tuning_text,
    take_tuning,
#define MZ_KERNEL_ROW_(op, args) mz_k_##op##_cuda,
    MZ_KERNEL_LIST(MZ_KERNEL_ROW_)
#undef MZ_KERNEL_ROW_
};
