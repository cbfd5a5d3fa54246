/* SPDX-License-Identifier: Apache-2.0 */
/* The feed-forward expert: mz_ffn as an expert of mz_moe_layer. */
#include "moe/ffn.h"

#include "base/alloc.h"
#include "base/check.h"

static mz_status_t expert_declare(void *self, mz_decl_t *decl, int32_t moe)
{
  return MZ_TRACE(mz_ffn_declare(self, decl, NULL, 0, moe));
}

static int64_t expert_saved_width(const void *self)
{
  return mz_ffn_saved_width(self);
}

static int64_t expert_scratch_width(const void *self)
{
  return mz_ffn_scratch_width(self);
}

static mz_status_t expert_forward(void *self, const mz_call_t *call,
                                  const mz_expert_rows_t *rows)
{
  return MZ_TRACE(mz_ffn_forward(self, call, rows));
}

static mz_status_t expert_backward(void *self, const mz_call_t *call,
                                   const mz_expert_rows_t *rows)
{
  return MZ_TRACE(mz_ffn_backward_input(self, call, rows));
}

static mz_status_t expert_backward_weights(void *self, const mz_call_t *call,
                                           const mz_expert_rows_t *rows)
{
  return MZ_TRACE(mz_ffn_backward_weights(self, call, rows));
}

static double expert_operations(const void *self)
{
  return mz_ffn_operations(self);
}

mz_status_t mz_ffn_expert(const mz_ffn_opts_t *opts, mz_expert_ops_t *ops_out,
                          void **self_out)
{
  mz_ffn_t *ffn = NULL;

  MZ_REQUIRE(opts && ops_out && self_out, MZ_ERR_ARG,
             "opts, ops_out or self_out is NULL");
  MZ_TRY(mz_ffn_check(opts));
  MZ_TRY(mz_new(1, "expert", &ffn));
  ffn->opts = *opts;
  *ops_out = (mz_expert_ops_t){.name = "ffn",
                               .declare = expert_declare,
                               .saved_width = expert_saved_width,
                               .scratch_width = expert_scratch_width,
                               .forward = expert_forward,
                               .backward = expert_backward,
                               .operations = expert_operations,
                               .destroy = mz_free};
  if (opts->activation != MZ_ACT_IDENTITY_TIMES)
    ops_out->backward_weights = expert_backward_weights;
  *self_out = ffn;
  return MZ_OK;
}
