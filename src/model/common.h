/* SPDX-License-Identifier: Apache-2.0 */
/* What GPT's layers share in their functions and declarations. */
#ifndef MZ_MODEL_COMMON_H
#define MZ_MODEL_COMMON_H

#include "kernels/norm.h"

#include <moezero/layer.h>

/** Dropout of the call's layer with probability @p p; off in evaluation. */
mz_dropout_t mz_call_dropout(const mz_call_t *call, double p);

/** A buffer of one row of @p width activations a token, in the model's dtype:
 * "<prefix>.<suffix>". */
mz_status_t mz_activation_buffer(mz_decl_t *decl, const char *prefix,
                                 const char *suffix, int64_t width,
                                 int32_t *buffer_out);

/** The same for fp32 statistics, and for what lives in one step only. */
mz_status_t mz_stats_buffer(mz_decl_t *decl, const char *prefix,
                            const char *suffix, int64_t width,
                            int32_t *buffer_out);
mz_status_t mz_workspace_buffer(mz_decl_t *decl, const char *prefix,
                                const char *suffix, int64_t width,
                                mz_dtype_t dtype, int32_t *buffer_out);

/** Starts a layer whose self is one allocation, owned by decl from here on. */
mz_status_t
mz_layer_begin(mz_decl_t *decl, const char *name, void *self,
               void (*describe)(const void *self, int64_t num_tokens,
                                int64_t sequence_length, char *line,
                                size_t line_bytes, double *operations_out));

#endif
