/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of DeepSpeed's optimizer, scheduler and precision. */
#include "config/keys.h"

#include <string.h>

static const mz_choice_t optimizers[] = {{"AdamW", 0},
                                         {"Adam", 0},
                                         {"Lamb", MZ_CHOICE_LATER},
                                         {"Lion", MZ_CHOICE_LATER},
                                         {"Adagrad", MZ_CHOICE_LATER},
                                         {"Muon", MZ_CHOICE_LATER},
                                         {"SGD", MZ_CHOICE_LATER},
                                         {"OneBitAdam", MZ_CHOICE_LATER},
                                         {"ZeroOneAdam", MZ_CHOICE_LATER},
                                         {"OneBitLamb", MZ_CHOICE_LATER},
                                         {"MuAdam", MZ_CHOICE_LATER},
                                         {"MuAdamW", MZ_CHOICE_LATER},
                                         {"MuSGD", MZ_CHOICE_LATER},
                                         {NULL, 0}};
static const mz_choice_t schedules[] = {
    {"WarmupLR", MZ_SCHED_WARMUP},
    {"WarmupDecayLR", MZ_SCHED_WARMUP_DECAY},
    {"WarmupCosineLR", MZ_SCHED_WARMUP_COSINE},
    {"LRRangeTest", MZ_CHOICE_LATER},
    {"OneCycle", MZ_CHOICE_LATER},
    {NULL, 0}};
static const mz_choice_t warmups[] = {
    {"log", MZ_WARMUP_LOG}, {"linear", MZ_WARMUP_LINEAR}, {NULL, 0}};
static const mz_choice_t wire_types[] = {{"fp32", MZ_F32},
                                         {"bf16", MZ_BF16},
                                         {"bfp16", MZ_BF16},
                                         {"fp16", MZ_CHOICE_LATER},
                                         {NULL, 0}};
static const mz_choice_t held_types[] = {{"fp32", 0},
                                         {"fp16", MZ_CHOICE_LATER},
                                         {"bf16", MZ_CHOICE_LATER},
                                         {"bfp16", MZ_CHOICE_LATER},
                                         {NULL, 0}};

#define O "optimizer.params."
#define S "scheduler.params."
/* DeepSpeed also takes a list, a value by parameter group. */
#define MZ_RATE(path_, field_, fallback_, meaning_)                            \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_REAL, fallback_, MZ_FIELD_(double, field_),         \
             meaning_),                                                        \
        .min = 0, .max = INFINITY, .later_list = true                          \
  }
#define NO_FP16 "no effect: fp16 is not enabled"
#define ADDED_FP32 "gradients are added up in fp32"
#define ALWAYS_SKIPPED "a step with a gradient that is not finite is skipped"

/* bfloat16.enabled sets what bf16.enabled sets, and is written as that. */
static mz_status_t read_old_name(const mz_key_t *key, const json_t *value,
                                 mz_config_values_t *values)
{
  if (json_is_true(value)) values->bf16 = true;
  return MZ_OK;
}

static json_t *leave_out(const mz_key_t *key, const mz_config_values_t *values)
{
  return json_null();
}

static const mz_key_t rows[] = {
    {.path = "optimizer.type",
     .type = MZ_KEY_CHOICE,
     .sort = MZ_SORT_USED,
     .fallback = "\"AdamW\"",
     .case_free = true,
     .choices = optimizers,
     .offset = MZ_NO_FIELD,
     .write = mz_key_write_optimizer_type,
     .meaning = "Optimizer; Adam is AdamW unless adam_w_mode is false"},
    MZ_REAL(O "lr", optimizer.lr, "1e-3", 0, INFINITY, "Learning rate"),
    MZ_HAND(O "betas", offsetof(mz_config_values_t, optimizer.beta1),
            "[0.9, 0.999]", "a list of two numbers from 0 to below 1",
            mz_key_read_betas, mz_key_write_betas,
            "Decay of the two running means"),
    MZ_REAL(O "eps", optimizer.eps, "1e-8", 0, INFINITY,
            "Added to the root of the second mean"),
    MZ_REAL(O "weight_decay", optimizer.weight_decay, "0.0", 0, INFINITY,
            "Decay of matrices; biases and norms have none (see "
            "optimizer.param_groups)"),
    MZ_BOOL(O "bias_correction", optimizer.bias_correction, "true",
            "The means are corrected for their start at 0"),
    MZ_BOOL(O "adam_w_mode", optimizer.adam_w_mode, "true",
            "Decoupled decay; false (type Adam only): added to the gradient"),
    MZ_HAND("optimizer.param_groups", MZ_NO_FIELD, "[]",
            "a list of at most 64 entries {\"pattern\": glob, \"experts\": "
            "true or false, \"lr\": r, \"betas\": [b1, b2], \"eps\": e, "
            "\"weight_decay\": w}",
            mz_key_read_param_groups, mz_key_write_param_groups,
            "Numbers of their own for tensors whose name the pattern (as of a "
            "shell; default *) matches, with experts only those inside (true) "
            "or outside (false) of experts. The first entry that matches wins; "
            "what it leaves out comes from optimizer.params, for biases and "
            "norms the decay 0. A schedule scales lr like that of "
            "optimizer.params: the rate of a step is the schedule's value * lr "
            "/ optimizer.params.lr"),
    MZ_NOTED(O "torch_adam", BOOL, "false", "one implementation of Adam"),
    MZ_FIXED(O "fp32_optimizer_states", BOOL, "true",
             "the optimizer's state is fp32"),
    MZ_LATER(O "max_coeff", REAL, "10.0", "Lamb: largest trust ratio"),
    MZ_LATER(O "min_coeff", REAL, "0.01", "Lamb: smallest trust ratio"),
    MZ_LATER(O "momentum", REAL, "0.95", "Muon, SGD: momentum"),
    MZ_LATER(O "muon_lr", REAL, "null", "Muon: its learning rate"),
    MZ_LATER(O "adam_lr", REAL, "null", "Muon: learning rate of the rest"),
    MZ_LATER(O "ns_method", TEXT, "null", "Muon: orthogonalisation"),
    MZ_LATER(O "freeze_step", INT, "100000", "Compressed optimizers: warm-up"),

    MZ_CHOICE("scheduler.type", scheduler.type, "null", schedules,
              "Learning-rate schedule; null: constant"),
    MZ_RATE(S "warmup_min_lr", scheduler.warmup_min_lr, "0.0",
            "WarmupLR, WarmupDecayLR: rate at the start"),
    MZ_RATE(S "warmup_max_lr", scheduler.warmup_max_lr, "null",
            "WarmupLR, WarmupDecayLR: rate after the warm-up; null: the "
            "optimizer's; left out: that too, with WarmupDecayLR 1e-3"),
    MZ_INT(S "warmup_num_steps", scheduler.warmup_num_steps, "1000", 1,
           INFINITY, "Steps of the warm-up"),
    MZ_CHOICE(S "warmup_type", scheduler.warmup_type, "\"log\"", warmups,
              "Shape of the warm-up"),
    MZ_INT(S "total_num_steps", scheduler.total_num_steps,
           "=required by WarmupDecayLR and WarmupCosineLR", 1, INFINITY,
           "WarmupDecayLR, WarmupCosineLR: step at which the rate is lowest"),
    MZ_REAL(S "warmup_min_ratio", scheduler.warmup_min_ratio, "0.0", 0,
            INFINITY,
            "WarmupCosineLR: rate at the start, over the optimizer's"),
    MZ_REAL(S "cos_min_ratio", scheduler.cos_min_ratio, "1e-4", 0, INFINITY,
            "WarmupCosineLR: rate at the end, over the optimizer's"),
    MZ_LATER(S "lr_range_test_min_lr", REAL, "1e-3", "Range test: first rate"),
    MZ_LATER(S "lr_range_test_step_size", INT, "2000",
             "Range test: steps a stair"),
    MZ_LATER(S "lr_range_test_step_rate", REAL, "1.0", "Range test: growth"),
    MZ_LATER(S "lr_range_test_staircase", BOOL, "false", "Range test: stairs"),
    MZ_LATER(S "cycle_min_lr", REAL, "null", "OneCycle: lowest rate"),
    MZ_LATER(S "cycle_max_lr", REAL, "null", "OneCycle: highest rate"),
    MZ_LATER(S "decay_lr_rate", REAL, "0.0", "OneCycle: decay of the rate"),
    MZ_LATER(S "cycle_first_step_size", INT, "2000", "OneCycle: steps up"),
    MZ_LATER(S "cycle_second_step_size", INT, "null", "OneCycle: steps down"),
    MZ_LATER(S "cycle_first_stair_count", INT, "0", "OneCycle: stairs up"),
    MZ_LATER(S "cycle_second_stair_count", INT, "null",
             "OneCycle: stairs down"),
    MZ_LATER(S "decay_step_size", INT, "0", "OneCycle: steps of the decay"),
    MZ_LATER(S "cycle_momentum", BOOL, "true", "OneCycle: beta1 cycles too"),
    MZ_LATER(S "cycle_min_mom", REAL, "0.8", "OneCycle: lowest beta1"),
    MZ_LATER(S "cycle_max_mom", REAL, "0.9", "OneCycle: highest beta1"),
    MZ_LATER(S "decay_mom_rate", REAL, "0.0", "OneCycle: decay of beta1"),

    MZ_LATER("fp16.enabled", BOOL, "false", "Training in fp16"),
    MZ_IDLE("fp16.auto_cast", BOOL, "false", NO_FP16),
    MZ_IDLE("fp16.loss_scale", REAL, "0.0", NO_FP16),
    MZ_IDLE("fp16.initial_scale_power", INT, "16", NO_FP16),
    MZ_IDLE("fp16.loss_scale_window", INT, "1000", NO_FP16),
    MZ_IDLE("fp16.hysteresis", INT, "2", NO_FP16),
    MZ_IDLE("fp16.consecutive_hysteresis", BOOL, "false", NO_FP16),
    MZ_IDLE("fp16.min_loss_scale", REAL, "1", NO_FP16),
    MZ_IDLE("fp16.fp16_master_weights_and_grads", BOOL, "false", NO_FP16),
    MZ_BOOL("bf16.enabled", bf16, "false",
            "Weights and activations are bf16; arithmetic, gradients and "
            "master weights fp32"),
    MZ_NOTED("bf16.immediate_grad_update", BOOL, "false", ADDED_FP32),
    MZ_NOTED("bf16.check_grad_overflow", BOOL, "true", ALWAYS_SKIPPED),
    MZ_LATER("bf16.bf16_master_weights_and_grads", BOOL, "false",
             "Master weights and gradients in bf16"),
    MZ_LATER("bf16.bf16_optimizer_states", BOOL, "false", "Moments in bf16"),
    {.path = "bfloat16.enabled",
     .type = MZ_KEY_BOOL,
     .sort = MZ_SORT_USED,
     .fallback = "false",
     .offset = MZ_NO_FIELD,
     .read = read_old_name,
     .write = leave_out,
     .meaning = "Old name of bf16.enabled"},
    MZ_NOTED("bfloat16.immediate_grad_update", BOOL, "false", ADDED_FP32),
    MZ_NOTED("bfloat16.check_grad_overflow", BOOL, "true", ALWAYS_SKIPPED),
    MZ_LATER("bfloat16.bf16_master_weights_and_grads", BOOL, "false",
             "Master weights and gradients in bf16"),
    MZ_LATER("bfloat16.bf16_optimizer_states", BOOL, "false",
             "Moments in bf16"),
    MZ_NEVER("amp", HAND, "null", "apex is a library of PyTorch"),
    MZ_NEVER("torch_autocast", HAND, "null", "autocast belongs to PyTorch"),
    MZ_CHOICE("communication_data_type", communication_data_type, "null",
              wire_types,
              "Type in which gradients travel, to be added in fp32; null: the "
              "model's"),
    MZ_LATER_CHOICE("data_types.grad_accum_dtype", "null", held_types,
                    "Type of the gradient accumulators"),
    MZ_LATER_CHOICE("data_types.param_dtype", "null", held_types,
                    "Type of the parameters"),
    MZ_LATER_CHOICE("data_types.buffer_dtype", "null", held_types,
                    "Type of the buffers"),
};

/* Types that a key of the section is for; a key without a row is for all. */
static const struct {
  const char *path;
  unsigned types; /* bits by mz_schedule_type_t */
} schedule_keys[] = {
    {S "warmup_min_lr", 1u << MZ_SCHED_WARMUP | 1u << MZ_SCHED_WARMUP_DECAY},
    {S "warmup_max_lr", 1u << MZ_SCHED_WARMUP | 1u << MZ_SCHED_WARMUP_DECAY},
    {S "total_num_steps",
     1u << MZ_SCHED_WARMUP_DECAY | 1u << MZ_SCHED_WARMUP_COSINE},
    {S "warmup_min_ratio", 1u << MZ_SCHED_WARMUP_COSINE},
    {S "cos_min_ratio", 1u << MZ_SCHED_WARMUP_COSINE},
};

bool mz_key_fits_schedule(const mz_key_t *key, mz_schedule_type_t type)
{
  if (strncmp(key->path, "scheduler.", 10) != 0) return true;
  for (size_t i = 0; i < sizeof schedule_keys / sizeof *schedule_keys; i++)
    if (strcmp(key->path, schedule_keys[i].path) == 0)
      return schedule_keys[i].types >> type & 1;
  return type != MZ_SCHED_CONSTANT;
}

const mz_key_list_t mz_keys_optimizer = MZ_KEY_LIST(rows);
