/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moezero/param.h
 * @brief Whole parameters between steps: to read, and to change.
 *
 * Names and shapes of all tensors are always visible (moezero/decl.h). Their
 * values lie in shards; an application that wants to look at some of them, or
 * to change them (tie, prune, average), gathers them, works on the whole, and
 * releases them:
 *
 *     mz_param_gather(engine, &tensor, 1, &params);
 *     scale(mz_param_values(params, tensor));
 *     mz_param_release(&params, 0);
 *
 * The same at every stage and on every layout. Optimizer state stays as it is.
 */
#ifndef MZ_PARAM_H
#define MZ_PARAM_H

#include <moezero/engine.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mz_params mz_params_t;

/** For mz_param_release: the values were only read. */
enum { MZ_NOT_MODIFIED = -1 };

/**
 * Gathers whole tensors, fp32, into host memory of every rank. Collective, the
 * same list on all ranks; not in a step. Until its release a tensor cannot be
 * gathered again: of two copies one would be stale.
 * @param tensors  [num] ids of the declaration, copied.
 * @param[out] params_out  Owned by the caller, who releases it before
 *                         mz_engine_destroy; NULL after any error.
 * @return MZ_OK, MZ_ERR_ARG (no such tensor, named twice, gathered already,
 * lists that differ), MZ_ERR_NOMEM, MZ_ERR_PEER; the same on all ranks.
 */
mz_status_t mz_param_gather(mz_engine_t *engine, const int32_t *tensors,
                            int32_t num, mz_params_t **params_out);

/**
 * The values of a gathered tensor, for reading and writing; not collective.
 * @return [elements] in the order of its shape, borrowed until the release;
 * NULL when it is not among @p params.
 */
float *mz_param_values(mz_params_t *params, int32_t tensor);

/**
 * Makes the values of one rank the weights of all, then frees *params and sets
 * it to NULL. What other ranks wrote is lost, as is everything with
 * MZ_NOT_MODIFIED. Collective.
 * @param modifier  The rank, the same on all ranks, or MZ_NOT_MODIFIED.
 * @return MZ_OK; MZ_ERR_ARG (no such rank, ranks differ, or the weights were
 * updated since the gather): *params stays gathered; MZ_ERR_PEER, MZ_ERR_MPI.
 */
mz_status_t mz_param_release(mz_params_t **params, int modifier);

#ifdef __cplusplus
}
#endif
#endif
