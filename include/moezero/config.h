/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moezero/config.h
 * @brief The configuration: DeepSpeed's JSON plus moezero's own sections.
 *
 * One table of keys (src/config/keys.c) drives parsing, types, ranges,
 * defaults, --set, `gpt_moe config` and the reference documentation. A key that
 * cannot be honoured is an error that names it; an unknown key is an error with
 * the nearest known name; nothing is ignored silently. Not collective.
 *
 * The section model describes the GPT. A program that declares a network of its
 * own leaves it out, with moe.num_experts, moe.layers and moe.ep_size, and
 * gives data.sequence_length; model is then all zero.
 */
#ifndef MZ_CONFIG_H
#define MZ_CONFIG_H

#include <moezero/moe.h>
#include <moezero/status.h>
#include <moezero/types.h>
#include <stdbool.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mz_config mz_config_t;

enum {
  MZ_MAX_LAYERS = 1024,
  MZ_MAX_PATHS = 64,
  MZ_MAX_PARAM_GROUPS = 64 /* entries of optimizer.param_groups */
};

typedef enum mz_architecture { MZ_ARCH_GPT2, MZ_ARCH_LLAMA } mz_architecture_t;
typedef enum mz_position { MZ_POS_LEARNED, MZ_POS_ROPE } mz_position_t;
typedef enum mz_schedule_type {
  MZ_SCHED_CONSTANT,
  MZ_SCHED_WARMUP,
  MZ_SCHED_WARMUP_DECAY,
  MZ_SCHED_WARMUP_COSINE,
} mz_schedule_type_t;
typedef enum mz_warmup { MZ_WARMUP_LOG, MZ_WARMUP_LINEAR } mz_warmup_t;
typedef enum mz_data_format {
  MZ_DATA_AUTO, /* found from the file */
  MZ_DATA_TEXT,
  MZ_DATA_TOKENS
} mz_data_format_t;

typedef struct mz_model_config {
  mz_architecture_t architecture;
  int64_t vocab_size, hidden_size, num_hidden_layers, num_attention_heads;
  int64_t num_key_value_heads; /* resolved: = heads when not given */
  int64_t intermediate_size;   /* resolved: 4 * hidden (gpt2), 8/3 * hidden up
                                  to a multiple of 64 (llama) when not given */
  int64_t max_position_embeddings;
  mz_activation_t hidden_act;
  int norm; /* mz_norm_kind_t: 0 layer, 1 rms */
  double norm_eps;
  mz_position_t position_embedding;
  double rope_theta;
  bool bias;           /* of all linear maps and of LayerNorm */
  bool attention_bias; /* of the qkv map; resolved: = bias when not given */
  bool tie_word_embeddings;
  double initializer_range;
  double dropout;
} mz_model_config_t;

typedef enum mz_noise_policy {
  MZ_NOISE_NONE,
  MZ_NOISE_JITTER, /* of the gate's input */
  MZ_NOISE_RSAMPLE /* the choice is drawn; k = 1 */
} mz_noise_policy_t;

typedef struct mz_moe_config {
  /* one entry a MoE block; num_layers of them */
  int32_t num_layers;
  int32_t layer[MZ_MAX_LAYERS]; /* block index, ascending */
  int32_t num_experts[MZ_MAX_LAYERS];
  int32_t ep_size[MZ_MAX_LAYERS];
  int64_t k;
  int64_t expert_intermediate_size; /* resolved */
  bool expert_bias;           /* of the experts' maps; resolved: = model.bias */
  bool use_residual;          /* not with shared experts */
  int64_t num_shared_experts; /* 0: none */
  int64_t shared_expert_intermediate_size; /* of one; resolved: = that of an
                                              expert */
  bool shared_expert_gate;
  double capacity_factor, eval_capacity_factor;
  int64_t min_capacity;
  int64_t expert_capacity; /* 0: by the factors */
  bool drop_tokens;
  bool eval_drop_tokens;        /* resolved: = drop_tokens */
  mz_drop_policy_t drop_policy; /* resolved, use_rts included */
  bool use_rts;                 /* resolved: with k = 1 */
  bool norm_topk_prob;
  mz_score_t score;
  double temperature, temperature_end; /* resolved: the same with 0 steps */
  int64_t temperature_steps;
  mz_noise_policy_t noisy_gate_policy; /* resolved with gate_noise */
  double gate_noise;                   /* of Jitter; 0 otherwise */
  bool top2_2nd_expert_sampling;
  double bias_update_rate;
  mz_aux_loss_t aux_loss;
  mz_aux_scope_t aux_loss_scope;
  double aux_loss_coef, z_loss_coef;
  double saved_rows;
  int64_t overlap_chunks; /* >= 1 */
} mz_moe_config_t;

typedef struct mz_zero_config {
  int64_t stage;
  int64_t reduce_bucket_size, allgather_bucket_size;             /* elements */
  int64_t stage3_prefetch_bucket_size;                           /* elements */
  int64_t stage3_param_persistence_threshold;                    /* elements */
  int64_t stage3_model_persistence_threshold;                    /* elements */
  int64_t stage3_max_live_parameters, stage3_max_reuse_distance; /* elements */
} mz_zero_config_t;

typedef enum mz_which { MZ_ALL, MZ_EXPERTS_ONLY, MZ_DENSE_ONLY } mz_which_t;

/** An entry of optimizer.param_groups; see mz_decl_apply_groups. */
typedef struct mz_param_group_config {
  char pattern[MZ_NAME_MAX]; /* glob (fnmatch) on global tensor names */
  mz_which_t which;
  mz_hyper_t hyper;
} mz_param_group_config_t;

typedef struct mz_optimizer_config {
  double lr, beta1, beta2, eps, weight_decay;
  bool bias_correction;
  bool adam_w_mode; /* false: L2 */
  int32_t num_groups;
  mz_param_group_config_t groups[MZ_MAX_PARAM_GROUPS];
} mz_optimizer_config_t;

typedef struct mz_scheduler_config {
  mz_schedule_type_t type;
  double warmup_min_lr, warmup_max_lr; /* resolved: the optimizer's lr */
  int64_t warmup_num_steps;
  mz_warmup_t warmup_type;
  int64_t total_num_steps;                /* decay, cosine */
  double warmup_min_ratio, cos_min_ratio; /* cosine: of the optimizer's lr */
} mz_scheduler_config_t;

typedef struct mz_data_config {
  int32_t num_train, num_valid;
  char *train[MZ_MAX_PATHS], *valid[MZ_MAX_PATHS];
  double train_weight[MZ_MAX_PATHS], valid_weight[MZ_MAX_PATHS];
  mz_data_format_t format;
  int64_t sequence_length;
  int64_t seed;
} mz_data_config_t;

typedef struct mz_train_config {
  int64_t steps;
  int64_t seed;
  int64_t eval_interval; /* 0: only at the end, if there is validation data */
  int64_t eval_steps;    /* global batches an evaluation; 0: all */
  char device[8];        /* auto, cpu, cuda */
  bool deterministic;
  double watchdog_s;
  double max_minutes; /* 0: no limit; stops after the step that passes it */
} mz_train_config_t;

/** Who waits for a message that kernels read. */
typedef enum mz_wait {
  MZ_WAIT_HOST,
  MZ_WAIT_STREAM /* the GPU's stream: the host goes on */
} mz_wait_t;

typedef struct mz_comm_config {
  bool thread;
  mz_wait_t wait;
  int64_t piece_bytes;
  mz_form_t messages;
} mz_comm_config_t;

typedef struct mz_checkpoint_config {
  char *dir;             /* under the run's folder, or absolute */
  int64_t save_interval; /* steps; 0: no saves */
  int64_t keep;          /* newest saves kept; 0: all */
  bool gather_on_save;
  char *gather_dtype; /* fp32, bf16, fp16 */
} mz_checkpoint_config_t;

/* Only in a build with -Dtest_hooks=true; all zero otherwise. */
typedef struct mz_debug_config {
  float *fixed_logits; /* [num_fixed_logits] */
  int32_t num_fixed_logits;
  int32_t *route_table; /* [num_route_table] */
  int32_t num_route_table;
  bool identity_experts;
  char *inject_grads; /* HDF5 or JSON file: see docs of the key */
  char *dump_full;    /* folder for parameters after the last step */
  char *dump_grads;   /* folder for reduced gradients of the first step */
  char *fault;        /* "oom|late|stall|exit:rank<R>:step<N>" */
  bool poison;
  int64_t delay_ms;
  int32_t *tokens_per_rank; /* [num_tokens_per_rank] */
  int32_t num_tokens_per_rank;
  int32_t *label_mask; /* ranks without labels */
  int32_t num_label_mask;
  bool sample_ids;
  int64_t count_limit; /* elements an MPI call takes; 0: no limit of ours */
  bool staged;         /* messages go through host memory */
} mz_debug_config_t;

/** Everything resolved but the batch arithmetic, which needs the ranks. */
typedef struct mz_config_values {
  mz_model_config_t model;
  mz_moe_config_t moe;
  mz_zero_config_t zero;
  mz_optimizer_config_t optimizer;
  mz_scheduler_config_t scheduler;
  mz_data_config_t data;
  mz_train_config_t train;
  mz_comm_config_t comm;
  mz_checkpoint_config_t checkpoint;
  mz_debug_config_t debug;
  int64_t train_batch_size, train_micro_batch_size_per_gpu,
      gradient_accumulation_steps; /* 0: not given; see mz_config_resolve */
  double gradient_clipping;        /* 0: off */
  int64_t steps_per_print;         /* 0: not given, the application chooses */
  bool bf16;                       /* weights and activations are bf16 */
  mz_dtype_t communication_data_type; /* MZ_F32, MZ_BF16; resolved */
  bool use_data_before_expert_parallelism;
  bool wall_clock_breakdown;
  char *monitor_jsonl;     /* path under the run's folder */
  bool monitor_param_hash; /* a hash of all parameters in every metrics line */
} mz_config_values_t;

/**
 * Reads @p path, then the assignments "key.path=value" (value: JSON, or a bare
 * word as a string), and checks every key.
 * @return MZ_OK, MZ_ERR_IO, MZ_ERR_CONFIG (message: file, line and column, or
 * the key's path, the value found and the allowed ones), MZ_ERR_UNSUPPORTED
 * ("not supported yet: KEY"), MZ_ERR_NOMEM.
 */
mz_status_t mz_config_read(const char *path, const char *const *assignments,
                           int num_assignments, mz_config_t **config_out);

/** The same from text, without MZ_ERR_IO; @p name stands for the file in
 * messages. */
mz_status_t mz_config_parse(const char *text, const char *name,
                            const char *const *assignments, int num_assignments,
                            mz_config_t **config_out);

/**
 * Does the batch arithmetic for @p world_size ranks (two of three give the
 * third) and checks what depends on it: every ep_size divides the ranks and its
 * layer's experts. May be called again for another number of ranks: it always
 * starts from what the file gave.
 * @return MZ_OK, MZ_ERR_ARG (world_size < 1), MZ_ERR_CONFIG with the numbers
 * and the rule.
 */
mz_status_t mz_config_resolve(mz_config_t *config, int world_size);

void mz_config_destroy(mz_config_t **config);

/**
 * Settles train.device, which "auto" leaves open, before anything is declared.
 * @param device  "cpu" or "cuda". @return MZ_OK, MZ_ERR_ARG.
 */
mz_status_t mz_config_set_device(mz_config_t *config, const char *device);

/** Whether train.device says cuda. "auto" that nobody settled means the CPU:
 * an application's own layers may be for it alone. */
bool mz_config_uses_cuda(const mz_config_values_t *values);

/** Borrowed until mz_config_destroy. */
const mz_config_values_t *mz_config_values(const mz_config_t *config);

/** Notes for the user: keys accepted that have nothing to do here. i counts
 * from 0; texts are borrowed until mz_config_destroy. */
int mz_config_num_notes(const mz_config_t *config);
const char *mz_config_note(const mz_config_t *config, int i);

/** Writes everything resolved as JSON that parses back to the same values;
 * *text_out is owned by the caller (free with mz_config_free_text).
 * @return MZ_OK, MZ_ERR_NOMEM. */
mz_status_t mz_config_to_json(const mz_config_t *config, char **text_out);
void mz_config_free_text(char **text);

/** Every key: name, type, default, range, meaning; as text or JSON. Owned by
 * the caller, likewise. @return MZ_OK, MZ_ERR_NOMEM. */
mz_status_t mz_config_describe(bool json, char **text_out);

#ifdef __cplusplus
}
#endif
#endif
