/* SPDX-License-Identifier: Apache-2.0 */
/* Whole models: losses and gradients against PyTorch's float64 on several
 * layouts, and against central differences of the loss. */
#include "mpirun.h"

#include <criterion/criterion.h>
#include <criterion/parameterized.h>
#include <stdio.h>

#define FOLDER MZ_SOURCE_ROOT "/tests/golden/"

struct layout {
  int ranks;
  char args[128];
};

ParameterizedTestParameters(golden, gradients_equal_pytorch_on_every_layout)
{
  static struct layout layouts[] = {
      {1, "gpt2_moe.h5 tied"},
      {1, "gpt2_moe.h5 untied comm.thread=false"},
      {1, "llama_moe.h5 k2"},
      {1, "llama_moe.h5 k1"},
      {1, "gpt2_moe.h5 tied moe.saved_rows=0.25 debug.poison=true"},
      {1, "llama_moe.h5 k2 moe.saved_rows=0.25 moe.overlap_chunks=3"},
      {1, "llama_moe.h5 k2 moe.saved_rows=8 debug.poison=true"},
      {2, "gpt2_moe.h5 tied zero_optimization.stage=3"},
      {2, "gpt2_moe.h5 untied zero_optimization.stage=1 moe.ep_size=2"},
      {2, "llama_moe.h5 k2 zero_optimization.stage=3 moe.ep_size=2"},
      {2, "llama_moe.h5 k1 zero_optimization.stage=2 moe.ep_size=2 "
          "moe.saved_rows=0.25"},
      {1, "beside_moe.h5 residual debug.poison=true"},
      {2, "beside_moe.h5 residual_swiglu zero_optimization.stage=3 "
          "moe.ep_size=2 debug.poison=true"},
      {2, "beside_moe.h5 shared zero_optimization.stage=1 moe.ep_size=2 "
          "moe.saved_rows=0.25"},
      {1, "beside_moe.h5 shared_gated moe.overlap_chunks=2 "
          "debug.poison=true"},
  };

  return cr_make_param_array(struct layout, layouts,
                             sizeof layouts / sizeof *layouts);
}

ParameterizedTest(struct layout *l, golden,
                  gradients_equal_pytorch_on_every_layout)
{
  char args[512], output[16384];
  int code;

  snprintf(args, sizeof args, FOLDER "%s", l->args);
  code = mz_test_mpirun(l->ranks, "tests/ranks/rank_golden", args, 60, output,
                        sizeof output);
  cr_assert_eq(code, 0, "%d ranks, %s: exit code %d\n%s", l->ranks, l->args,
               code, output);
}

/* bf16 numbers are off by up to 2^-9, and with 24 tokens, weights of deviation
 * 0.3 and a sharp gate that is no small change: rounding the weights alone, in
 * fp32, moves gradients by up to 4.6e-2 (gpt2) and 7.5e-2 (llama). Measured in
 * bf16: 1.4e-2 in the median, 6.3e-2 and 8.2e-2 at most. llama's k1 has a
 * near-tie of the gate that rounding flips. */
ParameterizedTestParameters(golden, bf16_gradients_are_within_a_tenth)
{
  static struct layout layouts[] = {
      {1, "gpt2_moe.h5 tied bound=0.1 bf16.enabled=true"},
      {1, "llama_moe.h5 k2 bound=0.1 bf16.enabled=true"},
      {2, "gpt2_moe.h5 untied bound=0.1 bf16.enabled=true "
          "zero_optimization.stage=3 moe.ep_size=2"},
      {2, "llama_moe.h5 k2 bound=0.1 bf16.enabled=true "
          "zero_optimization.stage=1 moe.saved_rows=0.25 debug.poison=true"},
      {1, "beside_moe.h5 residual bound=0.1 bf16.enabled=true"},
      {1, "beside_moe.h5 shared_gated bound=0.1 bf16.enabled=true"},
  };

  return cr_make_param_array(struct layout, layouts,
                             sizeof layouts / sizeof *layouts);
}

ParameterizedTest(struct layout *l, golden, bf16_gradients_are_within_a_tenth)
{
  char args[512], output[16384];
  int code;

  snprintf(args, sizeof args, FOLDER "%s", l->args);
  code = mz_test_mpirun(l->ranks, "tests/ranks/rank_golden", args, 60, output,
                        sizeof output);
  cr_assert_eq(code, 0, "%d ranks, %s: exit code %d\n%s", l->ranks, l->args,
               code, output);
}

/* A reference that cannot be missed would prove nothing. */
Test(golden, another_coefficient_is_noticed)
{
  char output[16384];
  int code = mz_test_mpirun(1, "tests/ranks/rank_golden",
                            FOLDER "gpt2_moe.h5 tied moe.aux_loss_coef=0.011",
                            60, output, sizeof output);

  cr_assert_eq(code, 1, "exit code %d\n%s", code, output);
}

struct model {
  char name[32];
};

ParameterizedTestParameters(gradient, slopes_of_the_loss_equal_the_gradients)
{
  static struct model models[] = {
      {"gpt2_dropout"},
      {"llama_dropout"},
      {"gpt2_capacity"},
      {"llama_random_selection"},
      {"mixed_keys"},
      {"every_block_sends_again"},
      {"jitter_and_first_choices"},
      {"rsample_at_a_temperature"},
      {"sigmoids_and_squares"},
      {"sigmoids_and_random_selection"},
      {"residual_with_random_selection"},
      {"gated_shared_experts"},
      {"pyramid_with_shared_experts"},
  };

  return cr_make_param_array(struct model, models,
                             sizeof models / sizeof *models);
}

ParameterizedTest(struct model *m, gradient,
                  slopes_of_the_loss_equal_the_gradients)
{
  char output[16384];
  int code = mz_test_mpirun(1, "tests/ranks/rank_gradient", m->name, 60, output,
                            sizeof output);

  cr_assert_eq(code, 0, "%s: exit code %d\n%s", m->name, code, output);
}
