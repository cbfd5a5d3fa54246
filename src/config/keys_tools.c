/* SPDX-License-Identifier: Apache-2.0 */
/* DeepSpeed's other keys: general ones, monitoring, tools, other products. */
#include "config/keys.h"

static const mz_choice_t reductions[] = {
    {"mean", 0}, {"sum", MZ_CHOICE_LATER}, {NULL, 0}};

#define NO_PROFILER "no effect: flops_profiler is not enabled"
#define NO_BOARD "no effect: tensorboard is not enabled"
#define NO_CSV "no effect: csv_monitor is not enabled"
#define NO_COMMS "no effect: comms_logger is not enabled"
#define A "activation_checkpointing."

static const mz_key_t rows[] = {
    MZ_LATER("dump_state", BOOL, "false", "The engine's state after start-up"),
    MZ_LATER("prescale_gradients", BOOL, "false",
             "Gradients divided before the exchange"),
    MZ_LATER("gradient_predivide_factor", REAL, "1.0",
             "The divisor of prescale_gradients"),
    MZ_LATER_CHOICE("gradient_allreduce_op", "\"mean\"", reductions,
                    "Mean or sum over the ranks"),
    MZ_NOTED("seq_parallel_communication_data_type", TEXT, "\"fp32\"",
             "no sequence parallelism"),
    MZ_LATER("sparse_gradients", BOOL, "false",
             "Embedding gradients as rows with indices"),
    MZ_NOTED("disable_allgather", BOOL, "false", "DeepSpeed never reads it"),
    MZ_NOTED("zero_allow_untested_optimizer", BOOL, "false",
             "every optimizer here runs under every stage"),
    MZ_NOTED("zero_force_ds_cpu_optimizer", BOOL, "true",
             "one implementation of each optimizer"),
    MZ_FIXED("managed_gradient_accumulation", BOOL, "true",
             "the engine always counts the micro-batches"),
    MZ_NOTED("dataloader_drop_last", BOOL, "false",
             "the sampler deals whole global batches"),
    MZ_LATER("memory_breakdown", BOOL, "false",
             "Memory around forward, backward and step"),
    MZ_NOTED("vocabulary_size", INT, "null", "model.vocab_size counts"),
    MZ_LATER("log_level", TEXT, "\"info\"", "Level of the log"),

    MZ_LATER("flops_profiler.enabled", BOOL, "false", "Report of operations"),
    MZ_IDLE("flops_profiler.recompute_fwd_factor", REAL, "0.0", NO_PROFILER),
    MZ_IDLE("flops_profiler.profile_step", INT, "1", NO_PROFILER),
    MZ_IDLE("flops_profiler.module_depth", INT, "-1", NO_PROFILER),
    MZ_IDLE("flops_profiler.top_modules", INT, "1", NO_PROFILER),
    MZ_IDLE("flops_profiler.detailed", BOOL, "true", NO_PROFILER),
    MZ_IDLE("flops_profiler.output_file", TEXT, "null", NO_PROFILER),
    MZ_LATER("tensorboard.enabled", BOOL, "false", "Metrics for TensorBoard"),
    MZ_IDLE("tensorboard.output_path", HAND, "\"\"", NO_BOARD),
    MZ_IDLE("tensorboard.job_name", TEXT, "\"DeepSpeedJobName\"", NO_BOARD),
    MZ_LATER("csv_monitor.enabled", BOOL, "false", "Metrics as tables"),
    MZ_IDLE("csv_monitor.output_path", HAND, "\"\"", NO_CSV),
    MZ_IDLE("csv_monitor.job_name", TEXT, "\"DeepSpeedJobName\"", NO_CSV),
    MZ_NEVER("wandb", HAND, "null", "an online service; see monitor.jsonl"),
    MZ_NEVER("comet", HAND, "null", "an online service; see monitor.jsonl"),
    MZ_LATER("comms_logger.enabled", BOOL, "false",
             "Counts and times of messages"),
    MZ_IDLE("comms_logger.prof_all", BOOL, "true", NO_COMMS),
    MZ_IDLE("comms_logger.prof_ops", HAND, "[]", NO_COMMS),
    MZ_IDLE("comms_logger.verbose", BOOL, "false", NO_COMMS),
    MZ_IDLE("comms_logger.debug", BOOL, "false", NO_COMMS),
    MZ_NOTED("timers.throughput.enabled", BOOL, "true",
             "the metrics always hold tokens_per_s"),
    MZ_NOTED("timers.throughput.synchronized", BOOL, "true",
             "a step ends when its work is done"),

    MZ_LATER(A "partition_activations", BOOL, "false",
             "Saved activations sharded"),
    MZ_LATER(A "cpu_checkpointing", BOOL, "false",
             "Saved activations on the host"),
    MZ_LATER(A "contiguous_memory_optimization", BOOL, "false",
             "Saved activations in one buffer"),
    MZ_LATER(A "synchronize_checkpoint_boundary", BOOL, "false",
             "The device waits at each boundary"),
    MZ_LATER(A "profile", BOOL, "false", "Times of recomputation"),
    MZ_LATER(A "number_checkpoints", INT, "null", "Boundaries"),
    MZ_LATER("tensor_parallel", HAND, "null", "Tensor parallelism"),

    MZ_NEVER("expert_parallel", HAND, "null", "use the section moe"),
    MZ_NEVER("elasticity", HAND, "null",
             "any checkpoint loads at any number of ranks"),
    MZ_NEVER("autotuning", HAND, "null", "use gpt_moe plan"),
    MZ_NEVER("compression_training", HAND, "null",
             "compression belongs to DeepSpeed"),
    MZ_NEVER("curriculum_learning", HAND, "null",
             "curricula belong to DeepSpeed"),
    MZ_NEVER("data_efficiency", HAND, "null",
             "data efficiency belongs to DeepSpeed"),
    MZ_NEVER("progressive_layer_drop", HAND, "null",
             "layer dropping belongs to DeepSpeed"),
    MZ_NEVER("eigenvalue", HAND, "null", "it serves quantize_training only"),
    MZ_NEVER("quantize_training", HAND, "null",
             "quantised training belongs to DeepSpeed"),
    MZ_NEVER("pipeline", HAND, "null", "there is no pipeline parallelism"),
    MZ_NEVER("sparse_attention", HAND, "null", "attention is dense"),
    MZ_NEVER("hybrid_engine", HAND, "null", "it serves DeepSpeed-Chat only"),
    MZ_NEVER("nebula", HAND, "null", "an online service; see checkpoint"),
    MZ_NEVER("datastates_ckpt", HAND, "null",
             "another checkpoint engine; see checkpoint"),
    MZ_NEVER("compile", HAND, "null", "there is no Python to compile"),
};

const mz_key_list_t mz_keys_tools = MZ_KEY_LIST(rows);
