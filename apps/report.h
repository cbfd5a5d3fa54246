/* SPDX-License-Identifier: Apache-2.0 */
/* What a run says about itself before the first step. */
#ifndef APPS_REPORT_H
#define APPS_REPORT_H

#include "comm/comm.h"

#include <moezero/config.h>
#include <moezero/decl.h>
#include <moezero/engine.h>

/**
 * Prints model, plan and memory, on rank 0 if @p speak, and warnings about the
 * processors that ranks may use. Collective.
 */
mz_status_t report_start(const mz_config_t *config, const mz_decl_t *decl,
                         mz_engine_t *engine, mz_comm_t *comm, bool speak);

/** One line a layer. Not collective. */
void report_layers(const mz_decl_t *decl, int64_t num_tokens,
                   int64_t sequence_length);

/**
 * The text of config.json: everything resolved, and under "run" the hosts, the
 * job's id and the versions. Collective.
 * @param[out] text_out  On rank 0, NULL elsewhere; free with mz_free.
 */
mz_status_t report_record(const mz_config_t *config, mz_comm_t *comm,
                          char **text_out);

#endif
