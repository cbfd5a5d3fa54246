/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The plan: every byte, every message and every step, before the first runs.
 * PURE: no MPI call, no device, no file. mz_plan_create(declaration, options)
 * is a function of its arguments alone, the same on a laptop and in the run.
 *
 * Letters: W ranks, N ranks of a unit's group, T tokens of a rank in a
 * micro-batch, E experts, U elements of a unit (padded).
 *
 * ## Groups
 * Group 0 is the data group (all ranks). For each ep_size in use: an
 * expert-parallel group (the ranks that share one set of experts) and an
 * expert-data-parallel group (the ranks with the same experts). Groups with
 * equal rank lists and more than one rank are one group.
 *
 * ## Units and shards
 * A unit is the atom of sharding: a block's dense tensors, one expert, one
 * borrowed tensor, or the block's small tensors that stay whole. Tensors lie in
 * a unit in order of parameter group, each on a multiple of MZ_PLAN_ALIGN
 * elements. U = N * shard, shard a multiple of MZ_PLAN_ALIGN. Three sizes
 * p <= g <= o (parameters, gradient accumulators, optimizer state), each 1 or
 * N. A rank of place i in the group owns shard i of N; with size s it stores
 * the part i mod s of s: [ (i mod s) * U/s, ... + U/s ).
 *   stage 0: 1,1,1   stage 1: 1,1,N   stage 2: 1,N,N   stage 3: N,N,N
 * Size 1 is an alias: no copy, no bytes, no message.
 * For inference g = o = p.
 *
 * Regions (persistent, elements in order of units): params [sum U/p] model
 * dtype; accum [sum U/g] fp32; exp_avg, exp_avg_sq [sum U/o] fp32; master
 * [sum U/o] fp32, only when the model's dtype is not fp32: with fp32 the master
 * is the owner's part of params. For inference only params and the master, into
 * which a checkpoint is read.
 *
 * ## Segments
 * Which (parameter group, tensor, offset, length) a range of a unit holds.
 * Optimizer, norm, initialisation, dump and checkpoint read this one table.
 *
 * ## Schedule
 * Four walks: BEGIN (what the ranks tell each other before a step or after an
 * evaluation), MICRO (forward and backward of one micro-batch), EVAL (forward)
 * and UPDATE; for inference MICRO and UPDATE are empty. An operation is a
 * struct mz_op; control flow (rounds, branches) by jumps to operation indices.
 * Entries (messages) are numbered; POST hands one to the queue, WAIT waits for
 * it.
 *
 * Gathered weights stay until their next use, forward or backward, when at
 * most max_reuse_distance other elements are used between and the live limit
 * has room; where it has not, those whose next use is the farthest go. They are
 * posted as far ahead as the live limit and prefetch_bucket_size allow; with a
 * bucket one that is larger goes ahead alone.
 *
 * Where runs of experts overlap, the dispatch of one is posted before the
 * experts of the run before it compute, and its return is waited for when
 * somebody needs it: at the head of src/plan/exchanges.c.
 *
 * ## Buffers
 * Every byte the engine holds, with the operations between which it lives in
 * each walk; buffers that never live at once may share bytes. A buffer that an
 * entry reads or writes lives until that entry's WAIT, what is added up behind
 * it until that SUM.
 */
#ifndef MZ_PLAN_PLAN_H
#define MZ_PLAN_PLAN_H

#include <moezero/decl.h>
#include <moezero/layer.h>

enum {
  MZ_PLAN_ALIGN = 128,  /* elements */
  MZ_PLAN_SCALARS = 16, /* fp64 numbers that a rank tells the others at once */
  /* The optimizer's table: a row for at most so many elements of a segment
     (mz_stretch_t of kernels/optim.h). */
  MZ_PLAN_STRETCH = 65536,
  MZ_PLAN_STRETCH_BYTES = 56
};

/* Bytes of a MoE's counts: what this rank sends (kept[E], pool rows used), the
 * same from each source, then kept [ep, E] and used [ep] apart; 8-byte parts.
 */
#define MZ_PLAN_COUNTS_SENT(E) (((int64_t)(E) + 3) / 2 * 8)
#define MZ_PLAN_COUNTS_KEPT(E, ep) (((int64_t)(E) * (ep) + 1) / 2 * 8)
#define MZ_PLAN_COUNTS_BYTES(E, ep)                                            \
  (MZ_PLAN_COUNTS_SENT(E) * ((ep) + 1) + MZ_PLAN_COUNTS_KEPT(E, ep) +          \
   8 * (int64_t)(ep))

typedef struct mz_plan mz_plan_t;

typedef enum mz_group_kind {
  MZ_GROUP_DATA,
  MZ_GROUP_EXPERT,     /* expert-parallel */
  MZ_GROUP_EXPERT_DATA /* expert-data-parallel */
} mz_group_kind_t;

typedef struct mz_group {
  char name[MZ_NAME_MAX]; /* "data", "ep2", "edp2" */
  mz_group_kind_t kind;
  int32_t ep_size; /* 1 for data */
  int32_t size;
  int32_t place; /* of this rank */
  int *ranks;    /* [size] in group order */
} mz_group_t;

typedef struct mz_unit {
  char name[MZ_NAME_MAX]; /* "h.3", "h.3.moe.experts.5", "wte.weight" */
  int32_t group;          /* index of the group that shards it */
  int32_t ranks;          /* N */
  int32_t p, g, o;
  int32_t moe, expert;  /* -1, -1: dense */
  int32_t first_tensor; /* in plan->unit_tensors */
  int32_t num_tensors;
  int64_t elements; /* U, padded: ranks * shard */
  int64_t shard;    /* U / N */
  int64_t param_offset, accum_offset,
      state_offset; /* elements in the regions */
} mz_unit_t;

typedef struct mz_unit_tensor {
  int32_t tensor; /* id in the declaration */
  int32_t unit;
  int64_t offset; /* elements from the unit's start */
  int64_t elements;
} mz_unit_tensor_t;

typedef struct mz_segment {
  int32_t unit, tensor, param_group;
  int64_t tensor_offset; /* first element within the tensor, flat */
  int64_t unit_offset;   /* first element within the unit */
  int64_t length;        /* elements >= 1 */
} mz_segment_t;

/** Which part of every unit: what a rank owns, or what it updates. */
typedef enum mz_share {
  MZ_SHARE_OWNED,  /* shard place of N: sums, norm, checkpoint */
  MZ_SHARE_UPDATED /* part (place mod o) of o: optimizer */
} mz_share_t;

typedef enum mz_walk {
  MZ_WALK_BEGIN,
  MZ_WALK_MICRO,
  MZ_WALK_EVAL,
  MZ_WALK_UPDATE,
  MZ_NUM_WALKS
} mz_walk_t;

typedef enum mz_entry_kind {
  MZ_ENTRY_PARAMS,  /* gather shards of weights (p = N) before use */
  MZ_ENTRY_GRADS,   /* exchange gradient contributions to their owners */
  MZ_ENTRY_SUMS,    /* gather summed gradients (o = 1) */
  MZ_ENTRY_WEIGHTS, /* gather updated weights (p = 1, o = N) */
  MZ_ENTRY_COUNTS,  /* gather kept[E] and pool rows used */
  MZ_ENTRY_TOKENS,  /* exchange rows, late-bound */
  MZ_ENTRY_STATS,   /* gather routing statistics */
  MZ_ENTRY_SCALARS  /* gather the scalars of a step */
} mz_entry_kind_t;

/**
 * A message. Bulk entries move shard elements [piece, piece + length) of one
 * unit straight to their place, or whole shards of num_units consecutive units
 * through rank-major staging.
 */
typedef struct mz_entry {
  mz_entry_kind_t kind;
  int32_t lane; /* 0 exchange, 1 bulk (mz_lane_t) */
  int32_t group;
  mz_dtype_t dtype;
  int32_t first_unit, num_units; /* bulk */
  int64_t piece, length;         /* bulk: elements of a shard; num_units > 1:
                                    length = sum of the shards */
  int32_t staging;               /* plan buffer; -1: in place */
  int32_t packed;                /* plan buffer of the packed send side; -1 */
  int32_t target;                /* plan buffer that holds the gathered unit or
                                    the scratch gradient; -1: a region */
  int64_t target_offset;         /* elements: where first_unit starts there */
  int32_t moe;                   /* counts, tokens */
  mz_direction_t direction;      /* tokens */
  int32_t send, recv;            /* tokens: declaration buffers */
  int64_t send_bytes; /* of this rank, own block included but for gradients:
                         exact for bulk, counts, stats and scalars; for tokens
                         the bound over all rounds and runs, in the entry of
                         the first run */
  int64_t max_calls;  /* wire calls: 1; tokens: the most rounds there can be */
} mz_entry_t;

typedef enum mz_op_kind {
  MZ_OP_COMPUTE,   /* step of a layer; run set when inside one */
  MZ_OP_PREPARE,   /* units: weights [, grads] pointers now stand at target */
  MZ_OP_POST,      /* entry */
  MZ_OP_WAIT,      /* entry: not to go on before it is done */
  MZ_OP_PACK,      /* entry: unit-major -> packed, before its POST */
  MZ_OP_PLACE,     /* entry: staging -> unit-major, after its WAIT */
  MZ_OP_SUM,       /* entry: staging and the own part -> accumulator, in rank
                      order, after WAIT */
  MZ_OP_RELEASE,   /* units: weights no longer there */
  MZ_OP_RUN,       /* moe, run: sets the current run */
  MZ_OP_LOOP,      /* rounds begin; jump: past the END_LOOP */
  MZ_OP_AGAIN,     /* a round after the first: go on; else jump */
  MZ_OP_END_LOOP,  /* next round: jump to the operation after LOOP */
  MZ_OP_BRANCH,    /* saved == flag: go on; else jump */
  MZ_OP_STATS_SUM, /* statistics of all ranks -> totals */
  MZ_OP_NORM,      /* sums of squares of the owned segments */
  MZ_OP_FACTOR,    /* after the scalars: norm, clip factor, verdict */
  MZ_OP_ADAMW      /* update the units [first, first + num) */
} mz_op_kind_t;

typedef struct mz_op {
  mz_op_kind_t kind;
  int32_t layer, step; /* COMPUTE: the step in plan->steps */
  int32_t pass;        /* mz_pass_t, COMPUTE */
  int32_t entry;
  int32_t moe, run;
  int32_t first_unit, num_units; /* PREPARE, RELEASE, ADAMW */
  int32_t weights, grads;        /* PREPARE: plan buffers; -1: not changed,
                                    -2: the region (alias) */
  bool flag;                     /* BRANCH; COMPUTE: in a round; POST of a token
                                    entry: of the round at work, else of its
                                    run's first */
  int32_t jump;
} mz_op_t;

/** A run: consecutive experts of this rank that one step works on. */
typedef struct mz_run {
  int32_t moe;
  int32_t first_expert; /* global id */
  int32_t num_experts;
  int32_t first_unit;
} mz_run_t;

/** The routing of a MoE as planned for this rank. */
typedef struct mz_moe_plan {
  int32_t ep_group, edp_group;
  int32_t experts_per_rank;
  int32_t first_expert; /* of this rank */
  int32_t first_run, num_runs;
  int32_t ahead; /* runs that exchange tokens at once: 1, or 2 with runs that
                    overlap */
  int64_t round_rows;   /* rows a round delivers to a rank at most */
  int64_t max_capacity; /* C of the largest micro-batch; 0: dropless */
  int64_t stats_offset; /* 8-byte elements in the statistics of a rank */
  int32_t counts;       /* declaration buffer of kept[E] */
} mz_moe_plan_t;

typedef struct mz_life {
  int32_t first, last; /* operations of a walk; first > last: not in it */
} mz_life_t;

typedef struct mz_plan_buffer {
  char name[MZ_NAME_MAX];
  mz_category_t category;
  int64_t bytes;  /* of its own */
  int64_t offset; /* in its arena */
  bool persistent;
  bool host; /* with GPUs: in the host's arena, pinned */
  mz_life_t life[MZ_NUM_WALKS];
  int64_t row_bytes; /* pool buffers: bytes of the widest layer's row */
} mz_plan_buffer_t;

/** Messages of one kind in one group: calls, and bytes in this rank's send
 * arguments (own block included). */
typedef struct mz_traffic {
  mz_entry_kind_t kind;
  int32_t group;
  int64_t calls_micro, bytes_micro;   /* a micro-batch */
  int64_t calls_update, bytes_update; /* an optimizer step: BEGIN, UPDATE */
  int64_t calls_eval, bytes_eval;     /* a forward-only micro-batch */
  bool bound; /* tokens: upper bounds; otherwise exact */
} mz_traffic_t;

/**
 * What the predicted step time is made from; it has no effect on the layout.
 * 0 stands for a CPU rank: one core of two, measured with Open MPI 4.1.4
 * between ranks of one machine that had other work too (tests/bench, bench_comm
 * and AdamW on 16 Mi elements); with train.device cuda for an H200 in bf16
 * beside another on NVLink (tests/bench/results).
 */
typedef struct mz_machine {
  double flops_per_s;        /* products of a rank; 0: 5e10, 4.5e14 */
  double memory_bytes_per_s; /* read and written by a rank; 0: 1.5e10, 3.9e12 */
  double link_bytes_per_s;   /* sent by a rank; 0: 5e8, 5e11 */
  double latency_s;          /* of a message; 0: 1e-4, 3e-5 */
} mz_machine_t;

/**
 * Seconds of an optimizer step, without overlap of messages and computation:
 * compute  = accumulation * 3 * operations * 2 / flops (backward is two
 *            products for each of forward)
 * messages = calls * latency + bytes / link, tokens balanced: one round each,
 *            rows in the pool
 * update   = 28 bytes an element this rank updates (four read, three written)
 *            / memory rate
 */
typedef struct mz_plan_times {
  double compute_s, messages_s, update_s;
  double step_s;      /* their sum */
  double flops_per_s; /* that compute_s was made with */
} mz_plan_times_t;

typedef struct mz_plan_opts {
  int world_size, rank;
  int64_t stage;
  int64_t micro_sequences, sequence_length; /* T = their product */
  int64_t accumulation;
  int64_t reduce_bucket_size, allgather_bucket_size; /* elements */
  int64_t prefetch_bucket_size, persistence_threshold,
      model_persistence_threshold, max_live_parameters,
      max_reuse_distance; /* elements, stage 3 */
  int64_t piece_bytes;
  double saved_rows;
  int64_t overlap_chunks;  /* 0: every exchange is waited for where it is */
  bool data_before_expert; /* order of the expert groups */
  mz_dtype_t communication_dtype;
  bool inference; /* forward only: no gradients, no optimizer state */
  bool cuda;      /* for GPUs: budgets of the kernels' workspace */
  mz_machine_t machine;
} mz_plan_opts_t;

struct mz_plan {
  mz_plan_opts_t opts;
  const mz_decl_t *decl; /* borrowed */
  mz_dtype_t dtype;
  int64_t max_tokens; /* T */

  mz_group_t *groups;
  int32_t num_groups;
  mz_unit_t *units; /* of this rank: dense, then its experts by MoE */
  int32_t num_units;
  mz_unit_tensor_t *unit_tensors;
  int32_t num_unit_tensors;
  int32_t *tensor_place; /* by tensor: index in unit_tensors; -1: elsewhere */
  mz_segment_t *segments[2]; /* by mz_share_t, in order of units */
  int32_t num_segments[2];

  mz_moe_plan_t *moes; /* by MoE of the declaration */
  int32_t num_moes;
  mz_run_t *runs;
  int32_t num_runs;
  int64_t pool_rows;
  int64_t stats_elements; /* of a rank, all MoE layers */

  mz_entry_t *entries;
  int32_t num_entries;
  mz_op_t *ops[MZ_NUM_WALKS];
  int32_t num_ops[MZ_NUM_WALKS];

  mz_plan_buffer_t *buffers;
  int64_t cap_buffers;
  int32_t num_buffers;
  int32_t *buffer_of_decl; /* declaration buffer -> plan buffer */
  int32_t *twin_of_decl;   /* -> the second one, of every other run; -1: none */
  int32_t params, accum, master, exp_avg, exp_avg_sq; /* regions; -1: none */
  int32_t workspace; /* of the kernels; -1: they need none */
  /* The engine's buffers. Kernels write statistics, counts and scalars in
     backend memory; what the ranks tell each other lies in host memory. */
  int32_t stats, stats_own, stats_all, stats_total, counts_all, scalars,
      scalars_own, scalars_all, data, data_host, token_rows, round_counts,
      factor;
  int32_t stretches[2], squares; /* of the optimizer; -1: none */
  int64_t num_stretches[2];      /* by mz_share_t */
  int64_t arena_bytes;           /* of backend memory */
  int64_t host_bytes;            /* of pinned host memory; 0 on the CPU */
  int64_t category_bytes[MZ_NUM_CATEGORIES]; /* of the buffers' own bytes */
  int64_t peak_gathered; /* elements of weights gathered at once */

  mz_traffic_t *traffic;
  int32_t num_traffic;
  double operations; /* multiply-adds forward of one micro-batch, this rank */
  mz_plan_times_t times;
};

/**
 * @return MZ_OK, MZ_ERR_CONFIG (does not divide, with the numbers; live limit
 * below what the largest step needs), MZ_ERR_OVERFLOW, MZ_ERR_NOMEM. *plan_out
 * is owned by the caller; decl is borrowed until destroy.
 */
mz_status_t mz_plan_create(const mz_decl_t *decl, const mz_plan_opts_t *opts,
                           mz_plan_t **plan_out);
void mz_plan_destroy(mz_plan_t **plan);

/** Bytes of an element range [begin, end) of a unit as segments; appends. */
mz_status_t mz_plan_segments(const mz_plan_t *plan, int32_t unit, int64_t begin,
                             int64_t end, mz_segment_t **segments, int32_t *num,
                             int64_t *capacity);

/**
 * The table for people, and the same with every unit and buffer as JSON; both
 * end with a line feed. *text_out is owned by the caller (mz_free).
 * @return MZ_OK, MZ_ERR_NOMEM.
 */
mz_status_t mz_plan_to_text(const mz_plan_t *plan, char **text_out);
mz_status_t mz_plan_to_json(const mz_plan_t *plan, char **text_out);

/** @return MZ_OK, or MZ_ERR_FIT when a rank needs more than @p device_bytes
 * (0: unknown, fits); the message has both numbers. */
mz_status_t mz_plan_fits(const mz_plan_t *plan, int64_t device_bytes);

/** The plan buffer of a declared one in operations of @p run; -1: outside. */
int32_t mz_plan_buffer_at(const mz_plan_t *plan, int32_t decl_buffer,
                          int32_t run);

/** "params", "gradients", ...: as in the ledger's print. */
const char *mz_category_name(mz_category_t category);
/** "params", "tokens", ...: likewise. */
const char *mz_entry_kind_name(mz_entry_kind_t kind);

/* --- routing: what every rank derives from the counts (src/plan/route.c) ---
 * kept[s * E + e]: rows that source s of the expert-parallel group sends to
 * global expert e. */

/** C = max(min_capacity, ceil(fl32(fl32(T/E) * fl32(cf * k)))). */
int64_t mz_route_capacity(int64_t num_tokens, int32_t num_experts, int32_t k,
                          double capacity_factor, int64_t min_capacity);

/** Rows that an expert takes from a rank at most, when no rank has more than
 * num_tokens; 0: dropless. */
int64_t mz_route_limit(const mz_moe_opts_t *opts, int64_t num_tokens,
                       bool training);
/** Whether tokens drop in training or in evaluation. */
bool mz_route_drops(const mz_moe_opts_t *opts, bool training);

/** Rows of all experts of ep rank @p d. */
int64_t mz_route_local_rows(const int32_t *kept, int32_t num_experts,
                            int32_t ep_size, int32_t d);

/** Rounds of run [first, first + num) counted from each rank's first expert:
 * at least 1, the most over the ranks of the group. */
int64_t mz_route_rounds(const int32_t *kept, int32_t num_experts,
                        int32_t ep_size, int32_t first, int32_t num,
                        int64_t round_rows);

/**
 * Round @p round of a run at expert rank @p d: those of its rows, in
 * expert-major order, that lie in window f + round of the rank's rows of all
 * runs, where window w is [w * round_rows, ...) and f the run's first.
 * @param[out] counts_out   [ep_size, num] rows of the window; may be NULL.
 * @param[out] offsets_out  [num + 1]; may be NULL.
 * @return rows of the window.
 */
int64_t mz_route_window(const int32_t *kept, int32_t num_experts,
                        int32_t ep_size, int32_t d, int32_t first, int32_t num,
                        int64_t round, int64_t round_rows, int32_t *counts_out,
                        int32_t *offsets_out);

/**
 * What source @p s sends to expert rank @p d in that window: a contiguous part
 * of its send order.
 * @param[out] displ_out  First row in s's send order.
 * @return rows.
 */
int64_t mz_route_part(const int32_t *kept, int32_t num_experts, int32_t ep_size,
                      int32_t s, int32_t d, int32_t first, int32_t num,
                      int64_t round, int64_t round_rows, int64_t *displ_out);

/** Whether the layer's rows fit into the pool on every rank of the group.
 * @param used  [ep_size] pool rows in use. */
bool mz_route_fits(const int32_t *kept, int32_t num_experts, int32_t ep_size,
                   const int64_t *used, int64_t pool_rows);

#endif
