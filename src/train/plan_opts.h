/* SPDX-License-Identifier: Apache-2.0 */
/* From the configuration to the plan's options: one place for the engine, the
 * command `gpt_moe plan` and the tests. */
#ifndef MZ_TRAIN_PLAN_OPTS_H
#define MZ_TRAIN_PLAN_OPTS_H

#include "plan/plan.h"

#include <moezero/config.h>

/** @param values  Of a configuration that mz_config_resolve has seen. */
void mz_plan_opts_from_config(const mz_config_values_t *values, int world_size,
                              int rank, mz_plan_opts_t *opts_out);

#endif
