/* SPDX-License-Identifier: Apache-2.0 */
/* Units at run time, shared by zero.c (entries, optimizer, life) and values.c
 * (fp32 values between host and backend). */
#ifndef MZ_ZERO_ZERO_IMPL_H
#define MZ_ZERO_ZERO_IMPL_H

#include "zero/zero.h"

struct mz_zero {
  mz_zero_opts_t opts;
  const mz_plan_t *plan;
  const void **weights;
  void **grads;
  uint8_t *accumulate;
  struct mz_wire *wires; /* by entry */
  int64_t *wire_numbers; /* what they point into */
  int64_t *lengths;      /* scratch of reorder: shards of an entry's units */
  mz_ticket_t *tickets;  /* by entry */
};

#endif
