/* SPDX-License-Identifier: Apache-2.0 */
/* What a declaration holds, for the plan. Public face: moezero/decl.h. */
#ifndef MZ_PLAN_DECL_IMPL_H
#define MZ_PLAN_DECL_IMPL_H

#include <moezero/decl.h>

typedef struct mz_tensor {
  char name[MZ_NAME_MAX];
  uint32_t hash; /* FNV-1a of the name: random stream of initial values */
  int32_t ndim;
  int64_t shape[4];
  int64_t elements;
  mz_init_t init;
  double init_std;
  int32_t param_group;
  int32_t block;
  int32_t moe, expert; /* -1, -1: dense */
  bool shared;         /* borrowed by another layer: a unit of its own */
} mz_tensor_t;

typedef struct mz_decl_buffer_entry {
  char name[MZ_NAME_MAX];
  mz_category_t category;
  mz_rows_t kind;
  int64_t rows, width;
  int32_t moe;
  mz_dtype_t dtype;
} mz_decl_buffer_t;

typedef enum mz_step_kind {
  MZ_STEP_COMPUTE,
  MZ_STEP_COUNTS,
  MZ_STEP_RUNS,
  MZ_STEP_ROUNDS,
  MZ_STEP_BRANCH,
  MZ_STEP_END,
  MZ_STEP_EXCHANGE
} mz_step_kind_t;

typedef struct mz_step {
  mz_step_kind_t kind;
  int32_t layer;
  mz_compute_opts_t compute; /* its name is borrowed from the layer's code */
  int32_t moe;
  int32_t counts;
  bool saved;
  mz_direction_t direction;
  int32_t send, recv;
} mz_step_t;

typedef struct mz_layer {
  char name[MZ_NAME_MAX];
  mz_layer_opts_t opts;
  int32_t first[2], num[2]; /* steps by mz_pass_t */
} mz_layer_t;

typedef struct mz_moe {
  mz_moe_opts_t opts;
  char name[MZ_NAME_MAX];
  char *owned_name;                  /* what opts.name points to */
  int32_t first_tensor, num_tensors; /* tensors an expert has, by suffix */
  int32_t tensors[MZ_STEP_MAX_REFS]; /* id of expert 0 */
} mz_moe_t;

struct mz_decl {
  mz_dtype_t dtype;
  mz_hyper_t *groups; /* by parameter group */
  int64_t num_groups, cap_groups;
  int64_t
      num_grouped; /* tensors that mz_decl_apply_groups saw; -1: not called */
  mz_tensor_t *tensors;
  int64_t num_tensors, cap_tensors;
  int32_t *table; /* open addressing on the hash: tensor id + 1 */
  int64_t table_size;
  mz_decl_buffer_t *buffers;
  int64_t num_buffers, cap_buffers;
  mz_moe_t *moes;
  int64_t num_moes, cap_moes;
  mz_layer_t *layers;
  int64_t num_layers, cap_layers;
  mz_step_t *steps[2];
  int64_t num_steps[2], cap_steps[2];
};

/* Whether a step that computes writes a buffer; reads or writes it. */
bool mz_step_writes(const mz_step_t *step, int32_t buffer);
bool mz_step_touches(const mz_step_t *step, int32_t buffer);

/* param_groups.c: the groups that every declaration starts with. */
mz_status_t mz_decl_first_groups(mz_decl_t *decl);

#endif
