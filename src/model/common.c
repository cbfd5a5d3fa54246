/* SPDX-License-Identifier: Apache-2.0 */
#include "model/common.h"

#include "base/alloc.h"
#include "base/check.h"
#include "moe/declare.h"

mz_dropout_t mz_call_dropout(const mz_call_t *call, double p)
{
  mz_dropout_t dropout = {.p = call->mode == MZ_MODE_TRAIN ? p : 0,
                          .random = MZ_CALL_RANDOM(call, MZ_PURPOSE_DROPOUT),
                          .samples = call->micro->samples,
                          .sequence = call->micro->sequence_length};
  return dropout;
}

static mz_status_t token_buffer(mz_decl_t *decl, const char *prefix,
                                const char *suffix, mz_category_t category,
                                int64_t width, mz_dtype_t dtype,
                                int32_t *buffer_out)
{
  mz_buffer_opts_t opts = {.category = category,
                           .kind = MZ_ROWS_TOKENS,
                           .rows = 1,
                           .width = width,
                           .dtype = dtype};

  return MZ_TRACE(mz_declare_buffer(decl, prefix, suffix, opts, buffer_out));
}

mz_status_t mz_activation_buffer(mz_decl_t *decl, const char *prefix,
                                 const char *suffix, int64_t width,
                                 int32_t *buffer_out)
{
  return MZ_TRACE(token_buffer(decl, prefix, suffix, MZ_CAT_ACTIVATIONS, width,
                               mz_decl_dtype(decl), buffer_out));
}

mz_status_t mz_stats_buffer(mz_decl_t *decl, const char *prefix,
                            const char *suffix, int64_t width,
                            int32_t *buffer_out)
{
  return MZ_TRACE(token_buffer(decl, prefix, suffix, MZ_CAT_ACTIVATIONS, width,
                               MZ_F32, buffer_out));
}

mz_status_t mz_workspace_buffer(mz_decl_t *decl, const char *prefix,
                                const char *suffix, int64_t width,
                                mz_dtype_t dtype, int32_t *buffer_out)
{
  return MZ_TRACE(token_buffer(decl, prefix, suffix, MZ_CAT_WORKSPACE, width,
                               dtype, buffer_out));
}

mz_status_t
mz_layer_begin(mz_decl_t *decl, const char *name, void *self,
               void (*describe)(const void *self, int64_t num_tokens,
                                int64_t sequence_length, char *line,
                                size_t line_bytes, double *operations_out))
{
  mz_layer_opts_t opts = {
      .name = name, .self = self, .destroy = mz_free, .describe = describe};

  return MZ_TRACE(mz_decl_layer(decl, &opts));
}
