/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moezero/decl.h
 * @brief The declaration: what a model needs and does, before anything runs.
 *
 * A model is a list of layers. A layer declares tensors (weights), buffers and
 * two short lists of steps, forward and backward. The plan turns the
 * declaration into groups, units, a schedule and an arena layout; the engine
 * walks that schedule. A layer's function starts no communication, waits for
 * nothing and allocates nothing.
 *
 * Letters: T tokens of a rank in a micro-batch, E experts of a layer over all
 * ranks, k choices a token, H hidden width.
 *
 * Names are global and the same on every rank: an expert's tensor is called
 * "<layer>.experts.<global expert>.<suffix>" wherever it lives. Ids are dense
 * int32 in order of declaration. Nothing here is collective; declarations must
 * be the same on all ranks. Names and options are copied unless said otherwise;
 * outputs are set only on success. After an error a declaration is fit for
 * mz_decl_destroy only.
 */
#ifndef MZ_DECL_H
#define MZ_DECL_H

#include <moezero/status.h>
#include <moezero/types.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mz_decl mz_decl_t;
struct mz_call;

struct mz_optimizer_config; /* moezero/config.h */

/** The optimizer's parameter groups that every declaration starts with: one
 * that takes all from optimizer.params, and one without weight decay. */
enum { MZ_GROUP_DECAY = 0, MZ_GROUP_NO_DECAY = 1 };

/** A parameter group of the application's own. */
typedef struct mz_param_group_opts {
  int32_t base;     /* an earlier group: gives what hyper leaves out */
  mz_hyper_t hyper; /* gives 0: everything as in base */
} mz_param_group_opts_t;

typedef enum mz_init { MZ_INIT_ZERO, MZ_INIT_ONE, MZ_INIT_NORMAL } mz_init_t;

typedef struct mz_tensor_opts {
  const char *name; /* global name, or the suffix of an expert's tensor */
  int32_t ndim;     /* 1..4 */
  int64_t shape[4]; /* slowest to fastest, each >= 1 */
  mz_init_t init;
  double init_std;     /* of MZ_INIT_NORMAL, >= 0 */
  int32_t param_group; /* MZ_GROUP_DECAY, MZ_GROUP_NO_DECAY, or one of
                          mz_decl_param_group */
  int32_t block; /* dense tensors of one block form one unit; ignored for an
                    expert's tensor, where each expert is a unit */
} mz_tensor_opts_t;

/** How many rows a buffer has; the plan knows the bound of each kind. */
typedef enum mz_rows {
  MZ_ROWS_FIXED,  /* rows */
  MZ_ROWS_TOKENS, /* rows x T of the largest micro-batch */
  MZ_ROWS_ROUND,  /* what one round of moe delivers to a rank */
  MZ_ROWS_POOL    /* the pool of saved expert rows: buffers of one name are one
                     buffer, shared by the layers that declare it */
} mz_rows_t;

/** Where the bytes count in the ledger. */
typedef enum mz_category {
  MZ_CAT_PARAMS,      /* weights, or this rank's shards of them */
  MZ_CAT_GRADS,       /* gradient accumulators */
  MZ_CAT_OPTIMIZER,   /* fp32 master weights where apart, moments */
  MZ_CAT_GATHERED,    /* gathered weights, scratch gradients */
  MZ_CAT_STAGING,     /* what travels in the bulk lane */
  MZ_CAT_ACTIVATIONS, /* kept or passed on by layers */
  MZ_CAT_ROUTING,     /* routes, counts, statistics */
  MZ_CAT_DISPATCH,    /* tokens under way to and from experts */
  MZ_CAT_SAVED_ROWS,  /* the pool */
  MZ_CAT_WORKSPACE,   /* scratch of kernels */
  MZ_CAT_DATA,        /* tokens and labels of a step */
  MZ_NUM_CATEGORIES
} mz_category_t;

/**
 * A buffer lives from the first step that writes it to the last one that reads
 * it, in both passes of a micro-batch; what lives at other times may lie at the
 * same place. So a step must name every buffer it touches.
 */
typedef struct mz_buffer_opts {
  const char *name;
  mz_category_t category;
  mz_rows_t kind;
  int64_t rows;     /* MZ_ROWS_FIXED: rows; MZ_ROWS_TOKENS: rows a token */
  int32_t moe;      /* MZ_ROWS_ROUND, MZ_ROWS_POOL: which MoE */
  int64_t width;    /* elements a row */
  mz_dtype_t dtype; /* of an element */
} mz_buffer_opts_t;

/** The balance losses; spec and formulas in moezero/moe.h. */
typedef enum mz_aux_loss {
  MZ_AUX_NONE,
  MZ_AUX_LOAD_BALANCING, /* over all k choices */
  MZ_AUX_FIRST_CHOICE,   /* over first choices: DeepSpeed's with k = 2 */
  MZ_AUX_SQUARED         /* squared distances of mean gates from 1/E */
} mz_aux_loss_t;

typedef enum mz_aux_scope { MZ_SCOPE_GROUP, MZ_SCOPE_RANK } mz_aux_scope_t;

/** Whether evaluation drops tokens. */
typedef enum mz_eval_drop {
  MZ_EVAL_AS_TRAINING,
  MZ_EVAL_DROPS,
  MZ_EVAL_DROPLESS
} mz_eval_drop_t;

/** One set of experts: what the plan must know of a MoE layer's routing. */
typedef struct mz_moe_opts {
  const char *name;    /* "h.3.moe": prefix of its experts' tensors */
  int32_t num_experts; /* E >= 1 */
  int32_t ep_size;     /* ranks that share one set, divides E and the ranks */
  int32_t k;           /* in [1, E] */
  bool drop_tokens;    /* bounded by the capacity; else dropless */
  double capacity_factor, eval_capacity_factor; /* > 0 */
  int32_t min_capacity;                         /* >= 0 */
  int32_t expert_capacity; /* rows an expert takes from a rank at most, instead
                              of factors; 0: by the factors */
  mz_eval_drop_t eval_drop;
  mz_aux_loss_t aux_loss;
  mz_aux_scope_t aux_scope;
  double aux_coef, z_coef; /* >= 0 */
  double bias_update_rate; /* >= 0; 0: choices have no bias */
} mz_moe_opts_t;

typedef enum mz_pass { MZ_FORWARD, MZ_BACKWARD } mz_pass_t;

/** In which walks a step is taken; 0 means both. */
enum { MZ_IN_TRAIN = 1, MZ_IN_EVAL = 2 };

/**
 * A layer's function of one compute step. Runs on call->stream; waits for
 * nothing. @return MZ_OK or the error; a failed rank keeps walking the
 * schedule, and all ranks fail together at the end of the step.
 */
typedef mz_status_t (*mz_compute_fn)(const struct mz_call *call, void *self);

enum { MZ_STEP_MAX_REFS = 16 };

typedef struct mz_compute_opts {
  const char *name; /* for messages and times; borrowed until mz_decl_destroy */
  mz_compute_fn fn;
  int32_t modes;                     /* MZ_IN_TRAIN | MZ_IN_EVAL, 0: both */
  int32_t reads[MZ_STEP_MAX_REFS];   /* buffers, num_reads of them */
  int32_t writes[MZ_STEP_MAX_REFS];  /* buffers, num_writes of them */
  int32_t weights[MZ_STEP_MAX_REFS]; /* dense tensors whose values are read */
  int32_t grads[MZ_STEP_MAX_REFS];   /* dense tensors whose gradients this step
                                        contributes to */
  int32_t num_reads, num_writes, num_weights, num_grads;
  bool expert_weights; /* inside a run: reads the weights of its experts */
  bool expert_grads;   /* inside a round: contributes to their gradients */
  bool needs_stats;    /* reads the statistics of all ranks (mz_moe_call_t) */
} mz_compute_opts_t;

typedef enum mz_direction {
  MZ_DISPATCH, /* from the token's rank to the expert's rank */
  MZ_RETURN    /* the way back: rows arrive where they came from */
} mz_direction_t;

typedef struct mz_layer_opts {
  const char *name;
  void *self; /* passed to the functions; owned by the caller until
                 destroy(self) is called by mz_decl_destroy */
  void (*destroy)(void *self); /* may be NULL */
  /** One line for the start-up print, and the multiply-adds of T tokens in
   * sequences of @p sequence_length, forward; may be NULL. */
  void (*describe)(const void *self, int64_t num_tokens,
                   int64_t sequence_length, char *line, size_t line_bytes,
                   double *operations_out);
} mz_layer_opts_t;

/** @return MZ_OK, MZ_ERR_NOMEM. Owned by the caller. */
mz_status_t mz_decl_create(mz_decl_t **decl_out);

/** Frees *decl and its layers; sets NULL; NULL is fine. */
void mz_decl_destroy(mz_decl_t **decl);

/**
 * Makes a parameter group for tensors declared from now on.
 * @param[out] group_out  For mz_tensor_opts_t.param_group.
 * @return MZ_OK, MZ_ERR_ARG (no such base, a number out of range),
 * MZ_ERR_NOMEM.
 */
mz_status_t mz_decl_param_group(mz_decl_t *decl,
                                const mz_param_group_opts_t *opts,
                                int32_t *group_out);

/**
 * Applies optimizer.param_groups to the tensors declared so far: the first
 * entry that matches a tensor wins, and what it leaves out comes from the group
 * that the layer gave the tensor; so biases and norms have no weight decay
 * unless the entry gives it. Called once, after the last tensor
 * (mz_gpt_declare does so) and before the plan, which orders tensors by group.
 * An engine refuses a configuration with entries that were not applied.
 * @return MZ_OK, MZ_ERR_ARG (called twice), MZ_ERR_CONFIG (an entry to which no
 * tensor is left), MZ_ERR_NOMEM.
 */
mz_status_t mz_decl_apply_groups(mz_decl_t *decl,
                                 const struct mz_optimizer_config *optimizer);

/**
 * Declares a dense tensor. @return MZ_OK, MZ_ERR_ARG (shape, name taken or too
 * long, equal hash of another name), MZ_ERR_OVERFLOW, MZ_ERR_NOMEM.
 */
mz_status_t mz_decl_tensor(mz_decl_t *decl, const mz_tensor_opts_t *opts,
                           int32_t *tensor_out);

/**
 * Uses a dense tensor of another layer by its global name. From then on it is
 * a unit of its own, whose gradient is reduced after its last contribution.
 * @return MZ_OK, MZ_ERR_ARG (no such tensor).
 */
mz_status_t mz_decl_borrow(mz_decl_t *decl, const char *name,
                           int32_t *tensor_out);

/** Declares a set of experts. @return MZ_OK, MZ_ERR_ARG, MZ_ERR_NOMEM. */
mz_status_t mz_decl_moe(mz_decl_t *decl, const mz_moe_opts_t *opts,
                        int32_t *moe_out);

/**
 * Declares one tensor of every expert of @p moe: E tensors with consecutive
 * ids, first_out + e for global expert e. opts->name is the suffix.
 * @return as mz_decl_tensor.
 */
mz_status_t mz_decl_expert_tensor(mz_decl_t *decl, int32_t moe,
                                  const mz_tensor_opts_t *opts,
                                  int32_t *first_out);

/** Declares a buffer. @return MZ_OK, MZ_ERR_ARG, MZ_ERR_NOMEM. */
mz_status_t mz_decl_buffer(mz_decl_t *decl, const mz_buffer_opts_t *opts,
                           int32_t *buffer_out);

/**
 * Starts a layer: the steps that follow are its own.
 * @return MZ_OK, MZ_ERR_ARG (no name, or too long), MZ_ERR_NOMEM; after an
 * error self is still the caller's.
 */
mz_status_t mz_decl_layer(mz_decl_t *decl, const mz_layer_opts_t *opts);

/* Steps of the current layer, appended to its forward or backward list. The
 * plan runs layers forward in order of declaration, backward in reverse. All
 * return MZ_OK, MZ_ERR_ARG (before the first layer, an id out of range, too
 * many references, no function, a second MoE in the layer) or MZ_ERR_NOMEM.
 * Every runs, rounds and branch wants its mz_decl_end. */

mz_status_t mz_decl_compute(mz_decl_t *decl, mz_pass_t pass,
                            const mz_compute_opts_t *opts);

/**
 * The counts of @p moe become known on all ranks of its expert-parallel group.
 * @param counts  Buffer of MZ_ROWS_FIXED, int32 [E], written before: kept[e],
 *                the rows this rank will send to global expert e, after
 *                dropping.
 * @return also MZ_ERR_SHAPE: a row that has no room for E int32.
 */
mz_status_t mz_decl_counts(mz_decl_t *decl, mz_pass_t pass, int32_t moe,
                           int32_t counts);

/** For each run of this rank's experts, a static outer loop, until mz_decl_end.
 * Backward takes the runs in reverse. */
mz_status_t mz_decl_runs(mz_decl_t *decl, mz_pass_t pass, int32_t moe);

/** Inside a run: for each round, at least one, until mz_decl_end. */
mz_status_t mz_decl_rounds(mz_decl_t *decl, mz_pass_t pass, int32_t moe);

/** Inside a round: only if the layer's rows are (not) in the pool. */
mz_status_t mz_decl_branch(mz_decl_t *decl, mz_pass_t pass, int32_t moe,
                           bool saved);

/** Closes the innermost runs, rounds or branch. */
mz_status_t mz_decl_end(mz_decl_t *decl, mz_pass_t pass);

/**
 * Inside a round: token rows travel over the expert-parallel group. Dispatches
 * at the beginning of a round and returns at its end travel while other steps
 * compute: the first dispatch leaves right behind the counts, or behind the
 * last step before the runs that writes what it sends; the last return is
 * waited for before the next step that touches what it fills. Steps between
 * them run meanwhile, steps of the round behind its returns, and experts of
 * other runs. A step inside of the rounds that touches the token side, or one
 * behind the returns that touches what they send, makes every exchange wait
 * where it is declared.
 *
 * The token side holds rows in *send order* (ascending global expert; within an
 * expert ascending route), all of the layer's, T * k at most. The expert side
 * holds one window: rows *source-major*, and within a source in send order.
 * @param send, recv  Buffers of equal width and dtype; for MZ_DISPATCH send is
 *                    the token side (MZ_ROWS_TOKENS), for MZ_RETURN recv is;
 *                    the other one is of MZ_ROWS_ROUND and of this MoE.
 * @return also MZ_ERR_SHAPE: widths or dtypes that differ.
 */
mz_status_t mz_decl_exchange(mz_decl_t *decl, mz_pass_t pass, int32_t moe,
                             mz_direction_t direction, int32_t send,
                             int32_t recv);

/** A plain layer: one compute step each way; backward may be NULL. */
mz_status_t mz_decl_simple(mz_decl_t *decl, const mz_compute_opts_t *forward,
                           const mz_compute_opts_t *backward);

/**
 * Element type of activations and of the weights that kernels read. Set once,
 * before any tensor; default MZ_F32. @return MZ_OK, MZ_ERR_ARG (too late).
 */
mz_status_t mz_decl_set_dtype(mz_decl_t *decl, mz_dtype_t dtype);
mz_dtype_t mz_decl_dtype(const mz_decl_t *decl);

/* What was declared. Getters cannot fail for an id in range. */
int32_t mz_decl_num_tensors(const mz_decl_t *decl);
/** Global name, borrowed until mz_decl_destroy. */
const char *mz_decl_tensor_name(const mz_decl_t *decl, int32_t tensor);
/** -1 when there is none of this name. */
int32_t mz_decl_find_tensor(const mz_decl_t *decl, const char *name);
int64_t mz_decl_tensor_elements(const mz_decl_t *decl, int32_t tensor);
/** Copies the shape; @return the number of dimensions. */
int32_t mz_decl_tensor_shape(const mz_decl_t *decl, int32_t tensor,
                             int64_t shape_out[4]);
int32_t mz_decl_tensor_group(const mz_decl_t *decl, int32_t tensor);
int32_t mz_decl_num_param_groups(const mz_decl_t *decl);
/** What a group gives, its bases included; borrowed until the next group. */
const mz_hyper_t *mz_decl_group_hyper(const mz_decl_t *decl, int32_t group);
int32_t mz_decl_num_moes(const mz_decl_t *decl);
const mz_moe_opts_t *mz_decl_moe_opts(const mz_decl_t *decl, int32_t moe);

#ifdef __cplusplus
}
#endif
#endif
