/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of algorithms for matrix products, as others see it: switch the
 * search by timing on, take the table of choices out, put one in. No CUDA
 * header is needed here. Not collective. */
#ifndef MZ_KERNELS_CUDA_PRODUCTS_H
#define MZ_KERNELS_CUDA_PRODUCTS_H

#include "kernels/kernels.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mz_cuda_products mz_cuda_products_t;

/** The products of a "/cuda" table; borrowed until its destroy. */
mz_cuda_products_t *mz_cuda_products_of(const mz_kernels_t *kernels);

/**
 * While on, the first product of a kind, shape and rounded row count times up
 * to 8 candidates on its real operands and keeps the fastest; that waits for
 * the stream. So does one whose choice was made while it was off. Results stay
 * right. Off (the start): the library's first choice.
 * @return MZ_OK, MZ_ERR_CUDA.
 */
mz_status_t mz_cuda_products_tune(mz_cuda_products_t *products, bool on);

/**
 * Streams that the groups of one call are spread over, 1 (the start) to 8. Each
 * has its part of the products' workspace. Choices belong to a number of
 * streams.
 * @return MZ_OK, MZ_ERR_ARG.
 */
mz_status_t mz_cuda_products_spread(mz_cuda_products_t *products, int streams);

/**
 * The choices so far as text: one line of library version and compute
 * capability, then one line a choice, which begins with t (timed or imported)
 * or g (the library's guess). Equal choices give equal results bit for bit on
 * one GPU model with one library version.
 * @param[out] text_out  Owned by the caller (mz_free).
 * @return MZ_OK, MZ_ERR_NOMEM.
 */
mz_status_t mz_cuda_products_export(const mz_cuda_products_t *products,
                                    char **text_out);

/**
 * Adds the choices of a text; they replace choices of the same keys, and are
 * not made again by timing, whatever their mark.
 * @return MZ_OK, MZ_ERR_ARG (not such a text, with the line),
 * MZ_ERR_UNSUPPORTED (another library version or compute capability: nothing
 * was taken), MZ_ERR_FIT (too many choices).
 */
mz_status_t mz_cuda_products_import(mz_cuda_products_t *products,
                                    const char *text);

#ifdef __cplusplus
}
#endif

#endif
