/* SPDX-License-Identifier: Apache-2.0 */
/* A linear map y = x W^T + b with its tensors, over the groups of a window: a
 * dense layer is one group of all tokens, the experts of a run are several.
 *
 * R rows of the window, N outputs, K inputs. All arrays are backend memory of
 * the model's dtype; everything runs on call->stream. Errors are those of the
 * kernels. */
#ifndef MZ_MOE_MAP_H
#define MZ_MOE_MAP_H

#include "kernels/kernels.h"

#include <moezero/layer.h>

typedef struct mz_map {
  int64_t n, k;
  bool experts;   /* one of several maps of that shape */
  int32_t weight; /* tensor [N, K]; of experts: the one of global expert 0 */
  int32_t bias;   /* tensor [N]; -1: none */
} mz_map_t;

typedef struct mz_map_opts {
  const char *prefix; /* dense: global; of experts: the expert's suffix */
  int64_t n, k;
  bool bias;
  double init_std;
  int32_t block; /* dense */
  int32_t moe;   /* -1: dense */
} mz_map_opts_t;

/** Declares "<prefix>.weight" and, with bias, "<prefix>.bias" (zeros, no
 * decay). @return as mz_decl_tensor. */
mz_status_t mz_map_declare(mz_decl_t *decl, const mz_map_opts_t *opts,
                           mz_map_t *map_out);

/** x [R, K] -> y [R, N]; with MZ_EPI_GELU pre [R, N] keeps x W^T + b. */
mz_status_t mz_map_forward(const mz_map_t *map, const mz_call_t *call,
                           const mz_window_t *window, const void *x, void *y,
                           mz_epilogue_t epilogue, void *pre);

/** Adds to the gradients of W and b: x [R, K], dy [R, N]. */
mz_status_t mz_map_wgrad(const mz_map_t *map, const mz_call_t *call,
                         const mz_window_t *window, const void *x,
                         const void *dy);

/** dx [R, K] = dy W. */
mz_status_t mz_map_dgrad(const mz_map_t *map, const mz_call_t *call,
                         const mz_window_t *window, const void *dy, void *dx);

/** dx += dy W. */
mz_status_t mz_map_dgrad_add(const mz_map_t *map, const mz_call_t *call,
                             const mz_window_t *window, const void *dy,
                             void *dx);

/** dx [R, K] = (dy W) * gelu'(pre), pre [R, K]. */
mz_status_t mz_map_dgrad_gelu(const mz_map_t *map, const mz_call_t *call,
                              const mz_window_t *window, const void *dy,
                              const void *pre, void *dx);

/** The window of a dense layer: one group of the micro-batch's T tokens. */
mz_window_t mz_token_window(const mz_call_t *call);

/** The element @p index of an array of the model's dtype. */
static inline void *mz_at(const mz_call_t *call, void *base, int64_t index)
{
  return (char *)base + index * (int64_t)mz_dtype_bytes(call->kernels->dtype);
}

/** Runs one kernel of the call's table on the call's stream. */
#define MZ_KERNEL(call, op, args)                                              \
  MZ_TRACE((call)->kernels->ops->op((call)->kernels, (args), (call)->stream))

#endif
