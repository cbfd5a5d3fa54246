/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes and options of the gate and its gradient. */
#include "check_gate.h"

/* Dropless, and every policy with room for about two thirds of the routes. */
static bool too_large(const sides_t *s, shape_t shape)
{
  int64_t elements = shape.tokens * shape.width;

  return sides_skip(s, elements, elements * shape.experts);
}

static void check_policies(sides_t *s, shape_t shape)
{
  int64_t mean = shape.tokens * shape.k / shape.experts;

  check_gate_forward(s, shape);
  shape.capacity = (int32_t)(2 * mean / 3 + 1);
  for (int policy = MZ_DROP_PROBS; policy <= MZ_DROP_RANDOM; policy++) {
    shape.policy = (mz_drop_policy_t)policy;
    check_gate_forward(s, shape);
  }
}

static void check_forwards(sides_t *s)
{
  static const shape_t shapes[] = {
      {.tokens = 0, .experts = 4, .k = 2, .width = 64},
      {.tokens = 1, .experts = 1, .k = 1, .width = 8},
      {.tokens = 1, .experts = 8, .k = 2, .width = 64, .norm = 1},
      {.tokens = 7, .experts = 2, .k = 2, .width = 33, .norm = 1},
      {.tokens = 7, .experts = 4, .k = 4, .width = 96, .norm = 1},
      {.tokens = 33, .experts = 5, .k = 3, .width = 1000, .norm = 1},
      {.tokens = 1000, .experts = 1, .k = 1, .width = 64},
      {.tokens = 1000, .experts = 2, .k = 1, .width = 257},
      {.tokens = 1000, .experts = 8, .k = 2, .width = 768, .norm = 1},
      {.tokens = 1000, .experts = 8, .k = 8, .width = 72, .norm = 1},
      {.tokens = 1000, .experts = 12, .k = 2, .width = 1024},
      {.tokens = 1000, .experts = 31, .k = 2, .width = 160},
      {.tokens = 1000, .experts = 64, .k = 8, .width = 1024, .norm = 1},
      {.tokens = 300, .experts = 64, .k = 64, .width = 64, .norm = 1},
      {.tokens = 1000, .experts = 128, .k = 1, .width = 100},
      {.tokens = 500, .experts = 256, .k = 8, .width = 2048, .norm = 1},
      {.tokens = 16384, .experts = 8, .k = 2, .width = 1024, .norm = 1},
      {.tokens = 16384, .experts = 128, .k = 1, .width = 512},
      {.tokens = 65536, .experts = 4, .k = 2, .width = 64, .norm = 1}};
  static const shape_t rough[] = {
      {.tokens = 7, .experts = 8, .k = 2, .width = 1024, .rough = 1},
      {.tokens = 50, .experts = 8, .k = 2, .width = 2048, .rough = 1},
      {.tokens = 50, .experts = 4, .k = 1, .width = 333, .rough = 1}};
  static const shape_t made[] = {
      {.tokens = 1000, .experts = 8, .k = 2, .width = 64, .how = FIXED},
      {.tokens = 1000, .experts = 8, .k = 3, .width = 64, .how = TABLE}};

  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
    if (!too_large(s, shapes[i])) check_policies(s, shapes[i]);
  for (size_t i = 0; i < sizeof rough / sizeof *rough; i++)
    check_gate_forward(s, rough[i]);
  for (size_t i = 0; i < sizeof made / sizeof *made; i++)
    check_policies(s, made[i]);
}

/* What is compared that is no product of small numbers is rough; sigmoids of
 * two tokens are often equal, so they are not dropped by probability. */
static void check_options(sides_t *s)
{
  static const shape_t shapes[] = {
      {.tokens = 300, .experts = 8, .k = 2, .width = 64, .temperature = 1.3f},
      {.tokens = 300, .experts = 8, .k = 2, .width = 64, .pads = 1},
      {.tokens = 300,
       .experts = 8,
       .k = 3,
       .width = 64,
       .capacity = 50,
       .pads = 1,
       .norm = 1},
      {.tokens = 300,
       .experts = 5,
       .k = 2,
       .width = 33,
       .capacity = 60,
       .pads = 1,
       .policy = MZ_DROP_POSITION},
      {.tokens = 300,
       .experts = 8,
       .k = 2,
       .width = 96,
       .capacity = 60,
       .policy = MZ_DROP_RANDOM,
       .score = MZ_SCORE_SIGMOID,
       .norm = 1},
      {.tokens = 300,
       .experts = 40,
       .k = 4,
       .width = 96,
       .how = FIXED,
       .score = MZ_SCORE_SIGMOID,
       .temperature = 0.7f},
      {.tokens = 50,
       .experts = 8,
       .k = 1,
       .width = 512,
       .rough = 1,
       .noise = MZ_CHOICE_DRAWN,
       .temperature = 0.9f},
      {.tokens = 50,
       .experts = 20,
       .k = 2,
       .width = 512,
       .rough = 1,
       .noise = MZ_CHOICE_DRAWN_SECOND,
       .norm = 1,
       .pads = 1},
      {.tokens = 50,
       .experts = 8,
       .k = 1,
       .width = 33,
       .rough = 1,
       .noise = MZ_CHOICE_DRAWN_SECOND},
      {.tokens = 50,
       .experts = 8,
       .k = 2,
       .width = 512,
       .rough = 1,
       .bias = 1,
       .norm = 1},
      {.tokens = 50,
       .experts = 12,
       .k = 3,
       .width = 264,
       .rough = 1,
       .bias = 1,
       .score = MZ_SCORE_SIGMOID,
       .norm = 1},
      {.tokens = 50,
       .experts = 8,
       .k = 2,
       .width = 512,
       .rough = 1,
       .jitter = 0.1f,
       .norm = 1},
      {.tokens = 50,
       .experts = 8,
       .k = 2,
       .width = 33,
       .rough = 1,
       .jitter = 0.1f,
       .noise = MZ_CHOICE_DRAWN_SECOND},
      {.tokens = 7,
       .experts = 70,
       .k = 2,
       .width = 1000,
       .rough = 1,
       .jitter = 0.01f,
       .temperature = 2.0f}};

  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    check_gate_forward(s, shapes[i]);
    for (int accumulate = 0; accumulate < 2; accumulate++)
      check_gate_backward(s, shapes[i], 1,
                          shapes[i].score == MZ_SCORE_SOFTMAX ? 0.1 : 0,
                          accumulate);
  }
}

static void check_backwards(sides_t *s)
{
  static const struct {
    shape_t shape;
    double aux, z;
  } cases[] = {
      {{.tokens = 0, .experts = 4, .k = 2, .width = 40}, 1, 1},
      {{.tokens = 1, .experts = 1, .k = 1, .width = 8}, 1, 1},
      {{.tokens = 7, .experts = 4, .k = 2, .width = 33, .norm = 1}, 1, 0.1},
      {{.tokens = 65, .experts = 3, .k = 3, .width = 104, .norm = 1}, 0, 0.1},
      {{.tokens = 1000, .experts = 8, .k = 1, .width = 768}, 1, 0},
      {{.tokens = 1000,
        .experts = 8,
        .k = 2,
        .width = 768,
        .capacity = 170,
        .norm = 1},
       1,
       0.1},
      {{.tokens = 1000,
        .experts = 20,
        .k = 4,
        .width = 1024,
        .capacity = 100,
        .policy = MZ_DROP_RANDOM,
        .norm = 1},
       1,
       0.1},
      {{.tokens = 999, .experts = 64, .k = 8, .width = 257, .norm = 1}, 1, 0.1},
      {{.tokens = 500, .experts = 130, .k = 2, .width = 264}, 1, 0.1},
      {{.tokens = 1000, .experts = 8, .k = 2, .width = 64, .how = FIXED},
       1,
       0.1},
      {{.tokens = 16384, .experts = 8, .k = 2, .width = 1024, .norm = 1},
       1,
       0.1}};

  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
    for (int accumulate = 0; accumulate < 2; accumulate++) {
      if (too_large(s, cases[i].shape)) continue;
      check_gate_backward(s, cases[i].shape, cases[i].aux, cases[i].z,
                          accumulate);
    }
}

void check_gate(sides_t *s)
{
  check_forwards(s);
  check_backwards(s);
  check_options(s);
}
