/* SPDX-License-Identifier: Apache-2.0 */
/* Of check_gate.c, for the list of shapes in check_gate_shapes.c. */
#ifndef MZ_TESTS_CHECK_GATE_H
#define MZ_TESTS_CHECK_GATE_H

#include "check.h"

#include <moezero/layer.h>

/* Ways to make the choices. */
enum { BY_LOGITS, FIXED, TABLE };

typedef struct shape {
  int64_t tokens, width;
  int32_t experts, k, capacity;
  mz_drop_policy_t policy;
  int norm, how, rough; /* rough: any numbers */
  mz_score_t score;
  float temperature, jitter;
  mz_choice_noise_t noise;
  int bias, pads;
} shape_t;

/* One gate of a shape on both sides. */
void check_gate_forward(sides_t *s, shape_t shape);
/* Its gradient, with factors of the balance loss and of the z-loss. */
void check_gate_backward(sides_t *s, shape_t shape, double aux, double z,
                         int accumulate);

#endif
