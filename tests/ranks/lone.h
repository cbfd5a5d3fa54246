/* SPDX-License-Identifier: Apache-2.0 */
/* A MoE layer by itself, between a layer that gives its input and one that
 * gives the gradient of its output: what its tests declare alike. */
#ifndef MZ_TESTS_LONE_H
#define MZ_TESTS_LONE_H

#include "base/check.h"

#include <moezero/decl.h>

/* Rows of tokens [T, width] and their gradients. */
static inline mz_status_t lone_rows(mz_decl_t *decl, int64_t width, int32_t *x,
                                    int32_t *y, int32_t *d_x, int32_t *d_y)
{
  struct {
    const char *name;
    int32_t *id;
  } all[] = {{"x", x}, {"y", y}, {"d_x", d_x}, {"d_y", d_y}};

  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
    mz_buffer_opts_t opts = {.name = all[i].name,
                             .category = MZ_CAT_ACTIVATIONS,
                             .kind = MZ_ROWS_TOKENS,
                             .rows = 1,
                             .width = width};
    MZ_TRY(mz_decl_buffer(decl, &opts, all[i].id));
  }
  return MZ_OK;
}

/* A layer of one step each way. */
static inline mz_status_t lone_end(mz_decl_t *decl, const char *name,
                                   void *self, const mz_compute_opts_t *forward,
                                   const mz_compute_opts_t *backward)
{
  mz_layer_opts_t layer = {.name = name, .self = self};

  MZ_TRY(mz_decl_layer(decl, &layer));
  return MZ_TRACE(mz_decl_simple(decl, forward, backward));
}

#endif
