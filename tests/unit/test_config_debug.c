/* SPDX-License-Identifier: Apache-2.0 */
/* The hooks of a test build, which other builds refuse. */
#include "config_base.h"

#include <string.h>

#ifdef MZ_TEST_HOOKS
Test(config_debug, hooks_are_read)
{
  mz_config_t *config = NULL;
  const mz_debug_config_t *debug;

  cr_assert_eq(LOAD(&config, "debug.fixed_logits=[2, -1.5]",
                    "debug.route_table=[0, 3, 3]", "debug.poison=true",
                    "debug.identity_experts=true",
                    "debug.fault=oom:rank2:step3", "debug.delay_ms=50",
                    "debug.tokens_per_rank=[16, 8]", "debug.label_mask=[1]",
                    "debug.sample_ids=true", "debug.count_limit=7",
                    "debug.inject_grads=g.json", "debug.dump_full=f",
                    "debug.dump_grads=d"),
               MZ_OK, "%s", mz_error_last());
  debug = &mz_config_values(config)->debug;
  cr_expect_eq(debug->num_fixed_logits, 2);
  cr_expect_arr_eq(debug->fixed_logits, ((float[]){2, -1.5f}), 8);
  cr_expect_eq(debug->num_route_table, 3);
  cr_expect_arr_eq(debug->route_table, ((int32_t[]){0, 3, 3}), 12);
  cr_expect_eq(debug->num_tokens_per_rank, 2);
  cr_expect_arr_eq(debug->tokens_per_rank, ((int32_t[]){16, 8}), 8);
  cr_expect_eq(debug->num_label_mask, 1);
  cr_expect_eq(debug->label_mask[0], 1);
  cr_expect(debug->poison);
  cr_expect(debug->identity_experts);
  cr_expect(debug->sample_ids);
  cr_expect_eq(debug->delay_ms, 50);
  cr_expect_eq(debug->count_limit, 7);
  cr_expect_str_eq(debug->fault, "oom:rank2:step3");
  cr_expect_str_eq(debug->inject_grads, "g.json");
  cr_expect_str_eq(debug->dump_full, "f");
  cr_expect_str_eq(debug->dump_grads, "d");
  mz_config_destroy(&config);
}

#define FAULT_FORM                                                             \
  ", allowed: KIND:rank<R>:step<N>, KIND one of oom, late, stall, exit"

Test(config_debug, bad_hooks_are_refused)
{
  REFUSED("debug.fault=inf:rank1:step2",
          "debug.fault: found \"inf:rank1:step2\"" FAULT_FORM);
  REFUSED("debug.fault=oom:rank1",
          "debug.fault: found \"oom:rank1\"" FAULT_FORM);
  REFUSED("debug.fault=exit:rank1:step2x",
          "debug.fault: found \"exit:rank1:step2x\"" FAULT_FORM);
  REFUSED("debug.fault=stall:1:2",
          "debug.fault: found \"stall:1:2\"" FAULT_FORM);
  REFUSED("debug.route_table=[0, -1]",
          "debug.route_table: found [0, -1], allowed: a list of integers of "
          "at least 0");
  REFUSED("debug.fixed_logits=1",
          "debug.fixed_logits: found 1, allowed: a list of numbers");
  REFUSED("debug.fixed_logits=[\"a\"]",
          "debug.fixed_logits: found [\"a\"], allowed: a list of numbers");
}
#else
Test(config_debug, hooks_need_a_test_build)
{
  LATER("debug.poison=true",
        "debug.poison: this build lacks -Dtest_hooks=true");
  LATER("debug.fault=oom:rank2:step3",
        "debug.fault: this build lacks -Dtest_hooks=true");
}
#endif
