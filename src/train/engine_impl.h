/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's state, shared by engine.c (life, steps), walk.c (operations),
 * routing.c (what depends on counts), access.c (whole tensors) and tuning.c
 * (choices of algorithms). */
#ifndef MZ_TRAIN_ENGINE_IMPL_H
#define MZ_TRAIN_ENGINE_IMPL_H

#include "comm/comm.h"
#include "kernels/kernels.h"
#include "plan/decl_impl.h"
#include "plan/plan.h"
#include "train/parts.h"
#include "zero/zero.h"

#include <moezero/engine.h>

/* Places in the scalars of a rank: those that kernels write, of which the first
 * MZ_NUM_SCALARS are the layers', then those of the host. */
enum {
  MZ_AT_SQUARES = MZ_NUM_SCALARS,
  MZ_AT_CULPRIT, /* tensor + 1; 0: none */
  MZ_NUM_OF_KERNELS,
  MZ_AT_STATUS = MZ_NUM_OF_KERNELS,
  MZ_AT_LABELS,
  MZ_AT_TOKENS,
  MZ_AT_SENT,   /* bytes of token exchanges so far in the step */
  MZ_AT_EXPOSED /* ms that it waited for them with nothing else to do */
};

/* Arrays of a token message, filled by its bind when the counts are there. */
typedef struct mz_token_wire {
  struct mz_engine *engine;
  int32_t entry, run;
  int64_t round;
  int64_t sent_bytes; /* in the step; written where messages are bound */
  int64_t *send_counts, *send_displs, *recv_counts, *recv_displs; /* [ep] */
} mz_token_wire_t;

/* A MoE at run time, from its counts on until the end of the micro-batch. */
typedef struct mz_moe_state {
  mz_moe_call_t call;
  char *sent;               /* what this rank tells: kept[E], pool rows used */
  char *received;           /* [ep] of the same */
  int32_t *kept;            /* [ep, E] */
  int64_t *used;            /* [ep] */
  int64_t *counts, *displs; /* [ep] of the counts message, in bytes */
  int64_t pool_row;         /* first of its rows in the pool */
  int64_t run_row;          /* rows of the runs before the current one */
  int64_t rounds, round;
  mz_ticket_t ticket;
  int32_t front_run; /* of the last dispatch that was posted, */
  mz_ticket_t front; /* its message, and the one of another run before it */
  mz_ticket_t behind;
  int64_t *routed_sum, *kept_sum; /* [E] of the step */
  float *bias;                    /* of bias.h; NULL: none */
} mz_moe_state_t;

struct mz_engine {
  const mz_config_values_t *config; /* borrowed */
  const mz_decl_t *decl;            /* borrowed */
  mz_plan_t *plan;
  mz_comm_t *comm;
  int *comm_groups; /* plan group -> communicator group */
  mz_device_t *device;
  int32_t sharing;              /* ranks on this device */
  bool stream_waits;            /* in a step with comm.wait stream */
  uint8_t *known[MZ_NUM_WALKS]; /* by operation: all that it uses was loaded */
  uint64_t behind; /* the message that the stream waits for; 0: none */
  int64_t ahead;   /* launches that may be behind that wait */
  mz_kernels_t *kernels;
  mz_parts_t *parts; /* NULL: steps are not timed by part */
  char *arena, *host_arena;
  mz_zero_t *zero;
  mz_moe_state_t *moes;
  mz_token_wire_t *token_wires; /* by entry */
  int64_t *token_numbers;
  mz_ticket_t *tickets;                     /* by entry, exchange lane */
  int32_t *layer_moe;                       /* by layer; -1: none */
  void **buffers;                           /* by declaration buffer */
  int64_t *stats_counts, *stats_displs;     /* [W] 8-byte elements */
  int64_t *scalars_counts, *scalars_displs; /* [W] fp64 */
  int64_t *extents;        /* [4 W] of the gathers in access.c */
  int32_t *window_numbers; /* counts and offsets of the current round */
  char *stats_sum;         /* totals of the statistics, host */
  mz_moe_result_t *results;

  mz_call_t call;
  mz_micro_t micro;
  int64_t
      sequence; /* tokens of a sequence, the plan's at most; 0: the plan's */
  mz_window_t window;
  int64_t pool_used;
  int64_t steps;      /* done */
  int64_t updates;    /* done: Adam's t */
  mz_status_t status; /* of this rank in this step: the first error */
  mz_status_t late;   /* an error after the step's last scalars, which the
                         others learn with the next ones */
  char late_text[512];
  bool verdict_skip; /* agreed: no update */
  double total_labels, total_tokens, total_loss, grad_norm, min_gap;
  int32_t culprit;
  float factor;
  double lr;                /* of a group without a rate of its own */
  mz_adamw_group_t *groups; /* by parameter group */
  uint8_t *gathered;        /* by tensor: mz_param_gather has it */
  double *lr_ratio;         /* its rate over optimizer.params.lr */
  double aux_sum, z_sum, weighted_aux; /* of the step, this micro's added */
  mz_event_t at_wait; /* what the device had to do when a wait began */
  double exposed_ms;  /* of the step: it waited for tokens, with nothing else */
  double covered_ms;  /* likewise: the host waited while it had work */
  int64_t baseline_bytes;
  mz_start_times_t start_times;
  bool tuned; /* no step tunes any more: see tuning.c */
};

/* Of a clock that only goes on. */
double mz_engine_now_ms(void);

/* device.c: the device of this rank, among the ranks of its machine.
 * Collective. */
mz_status_t mz_engine_open_device(mz_engine_t *engine);

/* walk.c: before anything that changes what operations use (algorithms). */
void mz_engine_forget_known(mz_engine_t *engine);
/* Operations [first, last) of a walk. Returns MZ_ERR_PEER or MZ_ERR_MPI
 * when the walk cannot go on; a failed computation only sets engine->status. */
mz_status_t mz_engine_walk(mz_engine_t *engine, mz_walk_t walk, int32_t first,
                           int32_t last);
/* Working weights from the fp32 ones: the gathers after the optimizer. */
mz_status_t mz_engine_publish(mz_engine_t *engine);
/* access.c: a whole tensor into what this rank stores of it; not published. */
mz_status_t mz_engine_put(mz_engine_t *engine, int32_t tensor,
                          mz_tensor_part_t part, const float *values);
/* Remembers the first error of the step on this rank. */
void mz_engine_note(mz_engine_t *engine, mz_status_t status);

/* routing.c */
mz_status_t mz_routing_create(mz_engine_t *engine);
void mz_routing_destroy(mz_engine_t *engine);
mz_status_t mz_routing_begin_micro(mz_engine_t *engine);
void mz_routing_begin_step(mz_engine_t *engine);
mz_status_t mz_routing_post_counts(mz_engine_t *engine, const mz_op_t *op);
void mz_routing_take_counts(mz_engine_t *engine, int32_t moe);
void mz_routing_set_run(mz_engine_t *engine, const mz_op_t *op);
mz_status_t mz_routing_set_round(mz_engine_t *engine, const mz_op_t *op,
                                 int64_t round);
mz_status_t mz_routing_post_tokens(mz_engine_t *engine, const mz_op_t *op);
mz_status_t mz_routing_wait_tokens(mz_engine_t *engine, const mz_op_t *op);
/* Bytes of the step's token messages; none may be under way. */
int64_t mz_routing_sent_bytes(const mz_engine_t *engine);
mz_status_t mz_routing_post_stats(mz_engine_t *engine, const mz_op_t *op);
mz_status_t mz_routing_sum_stats(mz_engine_t *engine);
/* Points the pool buffers of a layer to its rows. */
void mz_routing_point_pool(mz_engine_t *engine, int32_t moe);

/* tuning.c: around the first step. The end is collective. */
mz_status_t mz_tuning_begin_step(mz_engine_t *engine);
mz_status_t mz_tuning_end_step(mz_engine_t *engine);

/* update.c: scalars, norm, verdict, optimizer. */
mz_status_t mz_update_post_scalars(mz_engine_t *engine, int32_t entry);
/* The rank's scalars before anything is added to them. */
mz_status_t mz_update_begin(mz_engine_t *engine);
void mz_update_norm(mz_engine_t *engine);
void mz_update_verdict(mz_engine_t *engine);
mz_status_t mz_update_make_groups(mz_engine_t *engine);
void mz_update_adamw(mz_engine_t *engine);
/* Sum over ranks of one scalar, in rank order. */
double mz_update_sum(const mz_engine_t *engine, int32_t at);
/* Of the rank that has the least; NaN: no rank knows. */
double mz_update_least(const mz_engine_t *engine, int32_t at);
mz_status_t mz_update_worst(const mz_engine_t *engine);

#endif
