/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moezero/engine.h
 * @brief The engine: allocates what the plan says once, then walks it.
 *
 * MPI_Init_thread has been called by the application, with at least
 * MPI_THREAD_SERIALIZED when comm.thread is on. While an engine exists its
 * communication thread may call MPI at any time: an application that makes MPI
 * calls of its own meanwhile needs MPI_THREAD_MULTIPLE. All functions are
 * collective on the communicator unless said otherwise, with the same arguments
 * on all ranks.
 */
#ifndef MZ_ENGINE_H
#define MZ_ENGINE_H

#include <moezero/config.h>
#include <moezero/decl.h>
#include <moezero/layer.h>
#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mz_engine mz_engine_t;
struct mz_plan;
struct mz_comm;

/**
 * The data of one step on this rank. Arrays are host memory, borrowed during
 * the call. sequences[j] may differ between ranks and micro-batches; the
 * largest over the ranks is max_sequences (the sampler knows it).
 */
typedef struct mz_step_data {
  int32_t num_micro;        /* micro-batches: the accumulation */
  const int32_t *tokens;    /* [num_micro, micro_size, S] */
  const int32_t *labels;    /* the same; -1: no label */
  const int64_t *samples;   /* [num_micro, micro_size] place in the step's
                               global batch */
  const int32_t *sequences; /* [num_micro] of this rank, at most micro_size */
  const int32_t *max_sequences; /* [num_micro] largest over the ranks */
} mz_step_data_t;

typedef struct mz_moe_result {
  int32_t num_experts;
  const int64_t *routed; /* [E] over all ranks and micro-batches of the step */
  const int64_t *kept;   /* [E] */
  const float *bias;     /* [E] on the choice, after the step; NULL: none */
} mz_moe_result_t;

typedef struct mz_step_result {
  int64_t step;   /* number of this step, from 1 */
  double loss;    /* lm_loss + coefficients * (aux, z) */
  double lm_loss; /* mean over the valid labels of the step; 0 without any */
  double aux_loss, z_loss; /* sums over MoE layers, means over micro-batches,
                              coefficient not applied */
  double lr;
  double grad_norm; /* global, before clipping; distinct elements once */
  bool skipped;     /* no update: not finite, or no valid label */
  char culprit[MZ_NAME_MAX]; /* tensor whose gradient was not finite */
  int64_t labels;            /* valid labels */
  int64_t tokens;            /* over all ranks */
  double min_gap;     /* smallest gate gap: k-th against (k+1)-th logit */
  double ms, wait_ms; /* of this rank: whole step, waiting for messages */
  /* wall_clock_breakdown: milliseconds of this rank's device by part; else
     none. "<compute step>.<operation>", "bulk" and "update" for what is no
     layer's, "message.<kind>" while only a message is waited for, "gaps" for
     the rest; they add up to the step. */
  int32_t num_parts;
  const mz_named_number_t *parts_ms; /* borrowed until the next call */
  int32_t num_moes;
  const mz_moe_result_t *moes; /* borrowed until the next call */
  /* handed to token exchanges by all ranks: rows that travel and those that
     stay with their rank, there and back, forward and backward; nothing in a
     group of one rank */
  int64_t exchange_bytes;
  /* of this rank, over the step: tokens were under way; it waited for them with
     nothing else to do, also for a rank that was late (NaN where a stream
     waits)
     */
  double exchange_ms, exposed_ms;
  /* exposed_ms of the rank that waited least: a faster one also waits for the
     slower ones, which is no matter of the exchange */
  double least_exposed_ms;
} mz_step_result_t;

/**
 * Builds plan, communicators, arenas and initial weights, then makes a warm
 * pass: every layer's functions run once in training and once in evaluation, on
 * token ids and labels that are all 0, without an update. Copies nothing of
 * config and decl: both are borrowed until destroy.
 * @param config  Resolved for the ranks of @p comm.
 * @param comm    Duplicated.
 * @return MZ_OK or the worst status of all ranks (the same on all): MZ_ERR_ARG
 * and MZ_ERR_CONFIG from the plan, MZ_ERR_CONFIG when bf16.enabled is not the
 * declaration's element type (mz_decl_set_dtype), MZ_ERR_NOMEM, MZ_ERR_MPI,
 * what a layer returned; *engine_out is NULL then.
 */
mz_status_t mz_engine_create(const mz_config_t *config, const mz_decl_t *decl,
                             MPI_Comm comm, mz_engine_t **engine_out);

/**
 * The same for evaluation and generation: weights only, no gradients and no
 * optimizer state. mz_engine_step and the parts other than weights are then
 * MZ_ERR_ARG.
 */
mz_status_t mz_engine_create_inference(const mz_config_t *config,
                                       const mz_decl_t *decl, MPI_Comm comm,
                                       mz_engine_t **engine_out);

/** Frees all. Collective, but local after MZ_ERR_PEER. */
void mz_engine_destroy(mz_engine_t **engine);

/**
 * One optimizer step. A step whose gradient is not finite, or without a label,
 * is done without an update (result skipped).
 * @return MZ_OK, MZ_ERR_ARG (more micro-batches than planned), the agreed error
 * of a failed rank (its message names rank and step; nothing was updated), or
 * MZ_ERR_PEER when a rank is dead or late (then call MPI_Abort).
 */
mz_status_t mz_engine_step(mz_engine_t *engine, const mz_step_data_t *data,
                           mz_step_result_t *result_out);

/**
 * Forward only over one global batch (num_micro micro-batches); ranks without
 * a sample pass sequences 0.
 * @param[out] loss_sum_out, labels_out  Over all ranks; the loss not divided.
 * @return as mz_engine_step.
 */
mz_status_t mz_engine_eval(mz_engine_t *engine, const mz_step_data_t *data,
                           double *loss_sum_out, int64_t *labels_out);

/** A hash of the bits of all parameters that does not depend on the layout.
 * Collective. @return MZ_OK, MZ_ERR_PEER, MZ_ERR_MPI. */
mz_status_t mz_engine_param_hash(mz_engine_t *engine, uint64_t *hash_out);

/**
 * Gathers one whole tensor, fp32, on every rank. Collective; not in a step.
 * @param[out] values_out  [elements] host memory of the caller.
 * @return MZ_OK, MZ_ERR_ARG (no such tensor), MZ_ERR_PEER, MZ_ERR_MPI.
 */
mz_status_t mz_engine_read(mz_engine_t *engine, int32_t tensor,
                           mz_tensor_part_t part, float *values_out);

/**
 * Sets one whole tensor from the same values on every rank. Collective.
 * @return as mz_engine_read.
 */
mz_status_t mz_engine_write(mz_engine_t *engine, int32_t tensor,
                            mz_tensor_part_t part, const float *values);

/** Optimizer steps done; not collective. Setting them, to the same number on
 * all ranks, is for whoever continues a run: random numbers depend on it. */
int64_t mz_engine_steps(const mz_engine_t *engine);
void mz_engine_set_steps(mz_engine_t *engine, int64_t steps);

/**
 * On a GPU the first step of an engine finds the fastest algorithms by timing,
 * and the ranks agree on them. With the same choices, on the same model of GPU
 * and versions of libraries, a run repeats its bits; so a run that goes on
 * takes the table of the one before. The CPU has no choices: nothing is done.
 *
 * Takes a table before the first step, which then times nothing. Collective.
 * @param text  Of mz_engine_tuning_text; "": there is none.
 * @return MZ_OK, MZ_ERR_UNSUPPORTED (of another GPU or library version: the
 * first step makes a new one), MZ_ERR_ARG (not such a text).
 */
mz_status_t mz_engine_take_tuning(mz_engine_t *engine, const char *text);

/** The table so far, the same choices on all ranks once the first step is done;
 * "" on the CPU. Not collective.
 * @param[out] text_out  Owned by the caller: mz_config_free_text. */
mz_status_t mz_engine_tuning_text(const mz_engine_t *engine, char **text_out);

/* Not collective, borrowed until destroy. */
const struct mz_plan *mz_engine_plan(const mz_engine_t *engine);
struct mz_comm *mz_engine_comm(mz_engine_t *engine);
/** Milliseconds of this rank in the parts of mz_engine_create. */
typedef struct mz_start_times {
  double plan_ms;   /* plan and communicators */
  double device_ms; /* the device is opened, its memory allocated */
  double values_ms; /* initial weights are made and gathered */
  double warm_ms;   /* the warm pass */
} mz_start_times_t;
const mz_start_times_t *mz_engine_start_times(const mz_engine_t *engine);
/** What this rank computes on, for a log: "CPU" or the GPU's name, borrowed.
 * @param[out] sharing  Ranks on the same device, this one included. */
const char *mz_engine_device_name(const mz_engine_t *engine, int32_t *sharing);
/** Bytes besides the arena, measured after the warm pass: of the process, or of
 * the GPU whoever uses them. */
int64_t mz_engine_baseline_bytes(const mz_engine_t *engine);

#ifdef __cplusplus
}
#endif
#endif
