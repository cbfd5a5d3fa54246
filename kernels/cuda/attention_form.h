/* SPDX-License-Identifier: Apache-2.0 */
/* Which form of attention serves a shape on "/cuda", for the log and the tests.
 * The table must be one of "/cuda". */
#ifndef MZ_KERNELS_CUDA_ATTENTION_FORM_H
#define MZ_KERNELS_CUDA_ATTENTION_FORM_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/** on: from now on the own forms serve all; 0: cuDNN where it can, as after
 * create. A backward may follow a forward of the other kind. */
void mz_cuda_attention_own_only(mz_kernels_t *kernels, int on);

/** From now on blocks have at most so many bytes of shared memory, as on
 * another card; 0: those of this one, as after create. @return MZ_OK,
 * MZ_ERR_CUDA. */
mz_status_t mz_cuda_attention_shared(mz_kernels_t *kernels, int bytes);

/** "cuDNN 9.14.0", "tensor cores" or "plain": what serves a shape (batch > 0;
 * of the pointers only the alignment counts), "none" for one that no form
 * takes. cuDNN is asked at the first call of a shape; before that the answer is
 * an own form. */
const char *mz_cuda_attention_form(const mz_kernels_t *kernels,
                                   const mz_attention_t *a, int grad);

#ifdef __cplusplus
}
#endif

#endif
