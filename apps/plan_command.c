/* SPDX-License-Identifier: Apache-2.0 */
/* gpt_moe plan: the ledger of a run of any size, without MPI. */
#include "commands.h"

#include "base/alloc.h"
#include "base/check.h"
#include <moezero/gpt.h>
#include "train/plan_opts.h"

#include <moezero/config.h>
#include <stdio.h>

static mz_status_t print_plan(const mz_plan_t *plan, bool json)
{
  char *text = NULL;

  MZ_TRY(json ? mz_plan_to_json(plan, &text) : mz_plan_to_text(plan, &text));
  fputs(text, stdout);
  mz_free(text);
  return MZ_OK;
}

static mz_status_t make_plan(const options_t *o, mz_config_t **config,
                             mz_decl_t **decl, mz_plan_t **plan)
{
  mz_plan_opts_t opts;

  MZ_TRY(mz_config_read(o->config, (const char *const *)o->assignments,
                        o->num_assignments, config));
  MZ_TRY(mz_config_resolve(*config, o->ranks));
  MZ_TRY(mz_decl_create(decl));
  MZ_TRY(mz_gpt_declare(mz_config_values(*config), *decl));
  mz_plan_opts_from_config(mz_config_values(*config), o->ranks, 0, &opts);
  MZ_TRY(mz_plan_create(*decl, &opts, plan));
  MZ_TRY(print_plan(*plan, o->json));
  return MZ_TRACE(mz_plan_fits(*plan, o->device_bytes));
}

int command_plan(const options_t *options)
{
  mz_config_t *config = NULL;
  mz_decl_t *decl = NULL;
  mz_plan_t *plan = NULL;
  mz_status_t st = make_plan(options, &config, &decl, &plan);

  mz_plan_destroy(&plan);
  mz_decl_destroy(&decl);
  mz_config_destroy(&config);
  /* a file of the command line that is not there is a wrong command line */
  if (st == MZ_ERR_IO) return print_error(st), EXIT_USAGE;
  return st == MZ_OK ? EXIT_DONE : print_error(st);
}
