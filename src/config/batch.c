/* SPDX-License-Identifier: Apache-2.0 */
/* What depends on the number of ranks: the batch arithmetic and ep_size. */
#include "config/config_impl.h"

#include "base/alloc.h"
#include "base/check.h"

/* DeepSpeed's rule: two of train = micro x accumulation x ranks give the third
 * by integer division, one gives accumulation 1; the product is checked after
 * that, which is how a remainder is refused. */
static mz_status_t infer(int64_t ranks, int64_t *train, int64_t *micro,
                         int64_t *accumulation)
{
  MZ_REQUIRE(*train > 0 || *micro > 0, MZ_ERR_CONFIG,
             "batch: either train_batch_size or train_micro_batch_size_per_gpu "
             "needs to be given (gradient_accumulation_steps %" PRId64
             ", %" PRId64 " ranks)",
             *accumulation, ranks);
  if (*train > 0 && *micro > 0) {
    if (*accumulation == 0) *accumulation = *train / *micro / ranks;
    return MZ_OK;
  }
  if (*accumulation == 0) *accumulation = 1;
  if (*train > 0) {
    *micro = *train / ranks / *accumulation;
    MZ_REQUIRE(*train % ranks == 0 && *train / ranks % *accumulation == 0,
               MZ_ERR_CONFIG,
               "batch: train_batch_size %" PRId64
               " is not a multiple of %" PRId64
               " ranks x gradient_accumulation_steps %" PRId64,
               *train, ranks, *accumulation);
    return MZ_OK;
  }
  MZ_TRY(mz_mul_i64(*micro, *accumulation, train));
  return MZ_TRACE(mz_mul_i64(*train, ranks, train));
}

static mz_status_t resolve_batch(mz_config_t *config, int64_t ranks)
{
  int64_t train = config->train, micro = config->micro;
  int64_t accumulation = config->accumulation, product;

  MZ_TRY(infer(ranks, &train, &micro, &accumulation));
  MZ_REQUIRE(train > 0 && micro > 0 && accumulation > 0, MZ_ERR_CONFIG,
             "batch: train_batch_size %" PRId64
             ", train_micro_batch_size_per_gpu %" PRId64
             ", gradient_accumulation_steps %" PRId64 ", %" PRId64
             " ranks: each has to be greater than 0",
             train, micro, accumulation, ranks);
  MZ_TRY(mz_mul_i64(micro, accumulation, &product));
  MZ_TRY(mz_mul_i64(product, ranks, &product));
  MZ_REQUIRE(train == product, MZ_ERR_CONFIG,
             "batch: train_batch_size %" PRId64
             " is not train_micro_batch_size_per_gpu %" PRId64
             " x gradient_accumulation_steps %" PRId64 " x %" PRId64
             " ranks = %" PRId64,
             train, micro, accumulation, ranks, product);
  config->values.train_batch_size = train;
  config->values.train_micro_batch_size_per_gpu = micro;
  config->values.gradient_accumulation_steps = accumulation;
  return MZ_OK;
}

mz_status_t mz_config_resolve(mz_config_t *config, int world_size)
{
  const mz_moe_config_t *moe;

  MZ_REQUIRE(config && world_size >= 1, MZ_ERR_ARG, "config %p, %d ranks",
             (void *)config, world_size);
  moe = &config->values.moe;
  for (int32_t i = 0; i < moe->num_layers; i++) {
    int32_t ep = moe->ep_size[i], experts = moe->num_experts[i];
    MZ_REQUIRE(world_size % ep == 0 && experts % ep == 0, MZ_ERR_CONFIG,
               "moe.ep_size: %" PRId32 " does not divide %s (block %" PRId32
               ": moe.num_experts %" PRId32 ", moe.ep_size %" PRId32
               ", %d ranks); it must divide both the ranks and the experts",
               ep, world_size % ep ? "the ranks" : "the experts", moe->layer[i],
               experts, ep, world_size);
  }
  return MZ_TRACE(resolve_batch(config, world_size));
}
