/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The kernel table: one struct of operations a backend. The contracts stand in
 * <family>.h. An operation works on the caller's buffers in backend memory, on
 * the given stream; it never allocates, never synchronises and keeps no state.
 * Memory is taken in create and prepare only. Pointers in the argument structs
 * are borrowed during the call.
 */
#ifndef MZ_KERNELS_H
#define MZ_KERNELS_H

#include "kernels/attention.h"
#include "kernels/device.h"
#include "kernels/embedding.h"
#include "kernels/gate.h"
#include "kernels/linear.h"
#include "kernels/mix.h"
#include "kernels/norm.h"
#include "kernels/normals.h"
#include "kernels/optim.h"
#include "kernels/spans.h"

#include <moezero/status.h>

/* name, argument struct: the dense part of a model, */
#define MZ_KERNEL_DENSE_LIST(X)                                                \
  X(linear, mz_linear_t)                                                       \
  X(linear_dgrad, mz_linear_dgrad_t)                                           \
  X(linear_wgrad, mz_linear_wgrad_t)                                           \
  X(gelu, mz_gelu_t)                                                           \
  X(swiglu, mz_swiglu_t)                                                       \
  X(swiglu_grad, mz_swiglu_t)                                                  \
  X(attention, mz_attention_t)                                                 \
  X(attention_grad, mz_attention_grad_t)                                       \
  X(rope, mz_rope_t)                                                           \
  X(add_norm, mz_add_norm_t)                                                   \
  X(add_norm_grad, mz_add_norm_grad_t)                                         \
  X(dropout, mz_dropout_apply_t)                                               \
  X(embedding, mz_embedding_t)                                                 \
  X(embedding_grad, mz_embedding_grad_t)                                       \
  X(xent, mz_xent_t)

/* routing, */
#define MZ_KERNEL_MOE_LIST(X)                                                  \
  X(gate, mz_gate_t)                                                           \
  X(gate_grad, mz_gate_grad_t)                                                 \
  X(permute, mz_permute_t)                                                     \
  X(permute_grad, mz_permute_grad_t)                                           \
  X(combine, mz_combine_t)                                                     \
  X(combine_grad, mz_combine_grad_t)                                           \
  X(regroup, mz_regroup_t)                                                     \
  X(scale_rows, mz_scale_rows_t)                                               \
  X(mix, mz_mix_t)                                                             \
  X(mix_grad, mz_mix_grad_t)                                                   \
  X(mix_dgrad, mz_mix_dgrad_t)

/* and the optimizer with what travels: these are told their types. */
#define MZ_KERNEL_OPTIM_LIST(X)                                                \
  X(adamw, mz_adamw_t)                                                         \
  X(reduce_ranks, mz_reduce_ranks_t)                                           \
  X(sum_squares, mz_sum_squares_t)                                             \
  X(reorder, mz_reorder_t)                                                     \
  X(convert, mz_convert_t)                                                     \
  X(normals, mz_normals_t)

#define MZ_KERNEL_LIST(X)                                                      \
  MZ_KERNEL_DENSE_LIST(X)                                                      \
  MZ_KERNEL_MOE_LIST(X)                                                        \
  MZ_KERNEL_OPTIM_LIST(X)

/* Operations by number. */
enum {
#define MZ_KERNEL_NUMBER_(op, args) MZ_KERNEL_##op,
  MZ_KERNEL_LIST(MZ_KERNEL_NUMBER_)
#undef MZ_KERNEL_NUMBER_
      MZ_NUM_KERNELS
};

typedef struct mz_kernels_ops {
  const char *name; /* "/cpu" */
  /* The backend's own state; NULL: it has none. */
  mz_status_t (*create)(mz_kernels_t *kernels);
  void (*destroy)(mz_kernels_t *kernels);
  /* Its choice of algorithms; NULL: it has none to make. */
  mz_status_t (*tune)(const mz_kernels_t *kernels, bool on);
  mz_status_t (*tuning_text)(const mz_kernels_t *kernels, char **text_out);
  mz_status_t (*take_tuning)(const mz_kernels_t *kernels, const char *text);
#define MZ_KERNEL_MEMBER_(op, args)                                            \
  mz_status_t (*(op))(const mz_kernels_t *kernels, const args *a,              \
                      mz_stream_t stream);
  MZ_KERNEL_LIST(MZ_KERNEL_MEMBER_)
#undef MZ_KERNEL_MEMBER_
} mz_kernels_ops_t;

struct mz_kernels {
  const mz_kernels_ops_t *ops;
  mz_device_t *device;
  bool deterministic;
  mz_dtype_t dtype; /* of activations and weights */
  char *workspace;
  int64_t workspace_bytes;
  void *state;       /* the backend's own */
  mz_spans_t *spans; /* NULL: operations are not timed */
};

typedef struct mz_kernels_opts {
  mz_device_t *device; /* whose backend; borrowed until destroy */
  mz_dtype_t dtype;    /* MZ_F32 or MZ_BF16 */
  bool deterministic;  /* equal bits from run to run */
  /* Scratch in backend memory, borrowed until destroy; the plan knows how much
     (mz_plan_workspace_bytes). An operation that finds too little returns
     MZ_ERR_FIT. CPU: MZ_F32 needs none; MZ_BF16 computes in fp32 and holds its
     largest weight there, and rows of its operands, the more the better but at
     least one row, or one sequence where an operation works on sequences. */
  void *workspace;
  int64_t workspace_bytes;
  mz_spans_t *spans; /* times each operation; borrowed until destroy; or NULL */
} mz_kernels_opts_t;

#ifdef MZ_TEST_HOOKS
/** A test's operations, fp32, for the devices of mz_device_stand_in; NULL: no
 * more. */
void mz_kernels_stand_in(const mz_kernels_ops_t *ops);
#endif

/** @return MZ_OK, MZ_ERR_ARG (no device), MZ_ERR_UNSUPPORTED (no such dtype
 * there), MZ_ERR_NOMEM, MZ_ERR_CUDA. Not collective. */
mz_status_t mz_kernels_create(const mz_kernels_opts_t *opts,
                              mz_kernels_t **kernels_out);
void mz_kernels_destroy(mz_kernels_t **kernels);

/**
 * A backend may have several algorithms for an operation, of which the fastest
 * is found by timing. While tuning is on, each shape's first use does that, on
 * the real operands: it waits for the stream, and results stay right. Off (the
 * start): choices not made yet are guesses, the same ones every time. A backend
 * without choices does nothing. Not collective. @return MZ_OK, MZ_ERR_CUDA.
 */
mz_status_t mz_kernels_tune(const mz_kernels_t *kernels, bool on);

/**
 * The choices made so far, lines of text; "" where the backend has none to
 * make. On one model of device, with one version of its libraries, equal
 * choices give equal bits.
 * @param[out] text_out  Owned by the caller (mz_free).
 * @return MZ_OK, MZ_ERR_NOMEM.
 */
mz_status_t mz_kernels_tuning_text(const mz_kernels_t *kernels,
                                   char **text_out);

/**
 * Takes the choices of such a text over those made so far; they stay while
 * tuning is on. "" and a backend without choices: nothing is done.
 * @return MZ_OK, MZ_ERR_UNSUPPORTED (of another device model or library
 * version; nothing is taken), MZ_ERR_ARG (not such a text; with the line),
 * MZ_ERR_FIT (too many choices).
 */
mz_status_t mz_kernels_take_tuning(const mz_kernels_t *kernels,
                                   const char *text);

#endif
