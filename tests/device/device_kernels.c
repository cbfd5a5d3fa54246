/* SPDX-License-Identifier: Apache-2.0 */
/* Every kernel of "/cuda" against "/cpu" on odd, empty, single and large sizes.
 * Usage: device_kernels [quick|tiny] [fp32|bf16] [FAMILY]...; needs a GPU.
 * quick leaves large sizes out: for compute-sanitizer, under which they take
 * hours. tiny, for its racecheck, also leaves out what libraries compute, where
 * it can be told, and all but small products. Last line: "N passed, N failed".
 */
#include "check.h"

#include <stdio.h>
#include <string.h>

static const struct {
  const char *name;
  void (*check)(sides_t *);
} families[] = {
    {"optim", check_optim},
    {"rows", check_rows},
    {"norm", check_norm},
    {"embedding", check_embedding},
    {"linear", check_linear},
    {"xent", check_xent},
    {"attention", check_attention},
    {"gate", check_gate},
    {"gate_golden", check_gate_golden},
    {"dispatch", check_dispatch},
    {"mix", check_mix},
};

enum { NUM_FAMILIES = sizeof families / sizeof *families };

static bool is_word(int argc, char **argv, int at, const char *word)
{
  return at < argc && strcmp(argv[at], word) == 0;
}

static bool wanted(int argc, char **argv, int first, const char *name)
{
  for (int i = first; i < argc; i++)
    if (strcmp(argv[i], name) == 0) return true;
  return first >= argc;
}

int main(int argc, char **argv)
{
  static const struct {
    const char *name;
    mz_dtype_t dtype;
  } types[] = {{"fp32", MZ_F32}, {"bf16", MZ_BF16}};
  bool tiny = is_word(argc, argv, 1, "tiny");
  bool quick = tiny || is_word(argc, argv, 1, "quick");
  int dtype_at = quick ? 2 : 1;
  bool one_dtype = is_word(argc, argv, dtype_at, "fp32") ||
                   is_word(argc, argv, dtype_at, "bf16");
  int first = dtype_at + one_dtype;
  long long passed = 0, failed = 0;

  setvbuf(stdout, NULL, _IOLBF, 0);
  for (int t = 0; t < 2; t++) {
    if (one_dtype && strcmp(argv[dtype_at], types[t].name) != 0) continue;
    for (int f = 0; f < NUM_FAMILIES; f++) {
      sides_t sides;

      if (!wanted(argc, argv, first, families[f].name)) continue;
      sides_open(types[t].dtype, INT64_C(256) << 20, &sides);
      sides.quick = quick;
      sides.tiny = tiny;
      printf("--- %s %s\n", types[t].name, families[f].name);
      families[f].check(&sides);
      passed += sides.passed;
      failed += sides.failed;
      sides_close(&sides);
    }
  }
  printf("%lld passed, %lld failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
