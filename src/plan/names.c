/* SPDX-License-Identifier: Apache-2.0 */
/* The words of the plan's print and JSON. */
#include "plan/plan_impl.h"

const char *mz_category_name(mz_category_t category)
{
  switch (category) {
  case MZ_CAT_PARAMS:
    return "params";
  case MZ_CAT_GRADS:
    return "gradients";
  case MZ_CAT_OPTIMIZER:
    return "optimizer";
  case MZ_CAT_GATHERED:
    return "gathered";
  case MZ_CAT_STAGING:
    return "staging";
  case MZ_CAT_ACTIVATIONS:
    return "activations";
  case MZ_CAT_ROUTING:
    return "routing";
  case MZ_CAT_DISPATCH:
    return "dispatch";
  case MZ_CAT_SAVED_ROWS:
    return "saved_rows";
  case MZ_CAT_WORKSPACE:
    return "workspace";
  case MZ_CAT_DATA:
    return "data";
  case MZ_NUM_CATEGORIES:
    break;
  }
  return "unknown";
}

const char *mz_group_kind_name(mz_group_kind_t kind)
{
  switch (kind) {
  case MZ_GROUP_DATA:
    return "data";
  case MZ_GROUP_EXPERT:
    return "expert";
  case MZ_GROUP_EXPERT_DATA:
    return "expert_data";
  }
  return "unknown";
}

const char *mz_entry_kind_name(mz_entry_kind_t kind)
{
  switch (kind) {
  case MZ_ENTRY_PARAMS:
    return "params";
  case MZ_ENTRY_GRADS:
    return "grads";
  case MZ_ENTRY_SUMS:
    return "sums";
  case MZ_ENTRY_WEIGHTS:
    return "weights";
  case MZ_ENTRY_COUNTS:
    return "counts";
  case MZ_ENTRY_TOKENS:
    return "tokens";
  case MZ_ENTRY_STATS:
    return "statistics";
  case MZ_ENTRY_SCALARS:
    return "scalars";
  }
  return "unknown";
}

const char *mz_walk_name(mz_walk_t walk)
{
  switch (walk) {
  case MZ_WALK_BEGIN:
    return "begin";
  case MZ_WALK_MICRO:
    return "micro";
  case MZ_WALK_EVAL:
    return "eval";
  case MZ_WALK_UPDATE:
    return "update";
  case MZ_NUM_WALKS:
    break;
  }
  return "unknown";
}

const char *mz_dtype_name(mz_dtype_t dtype)
{
  switch (dtype) {
  case MZ_F32:
    return "fp32";
  case MZ_BF16:
    return "bf16";
  case MZ_F16:
    return "fp16";
  case MZ_F64:
    return "fp64";
  case MZ_I32:
    return "int32";
  case MZ_I64:
    return "int64";
  case MZ_U8:
    return "uint8";
  }
  return "unknown";
}
