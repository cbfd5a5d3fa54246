/* SPDX-License-Identifier: Apache-2.0 */
/* The debug.* hooks of a test build; without values each does nothing. */
#ifndef MZ_TRAIN_HOOKS_H
#define MZ_TRAIN_HOOKS_H

#include <moezero/config.h>
#include <moezero/engine.h>

/** Whether a rank has no labels (debug.label_mask). */
bool mz_hooks_masked(const mz_config_values_t *config, int rank);

/** debug.fault "kind:rankR:stepN" when it is due: "oom" returns MZ_ERR_NOMEM,
 * "late" does where @p late (in the optimizer), "stall" never returns, "exit"
 * kills the process. */
mz_status_t mz_hooks_fault(const mz_config_values_t *config, int rank,
                           int64_t step, bool late);

/** Tells an outside tool that was preloaded where the program is. */
void mz_hooks_mark(const char *phase);

/**
 * debug.inject_grads: a JSON file {"tensor": norm, ...}. Each named tensor's
 * summed gradient becomes a constant of that 2-norm, every other one zero, and
 * all padding NaN. Not collective.
 */
mz_status_t mz_hooks_inject(mz_engine_t *engine);

/** Writes every tensor of a part as FOLDER/<name>.f32 (rank 0). Collective. */
mz_status_t mz_hooks_dump(mz_engine_t *engine, mz_tensor_part_t part,
                          const char *folder);

#endif
