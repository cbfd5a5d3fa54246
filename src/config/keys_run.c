/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of a run: batch, data, train, comm, checkpoint, monitor, debug. */
#include "config/keys.h"

static const mz_choice_t formats[] = {
    {"text", MZ_DATA_TEXT},        {"tokens", MZ_DATA_TOKENS},
    {"megatron", MZ_CHOICE_LATER}, {"hdf5", MZ_CHOICE_LATER},
    {"auto", MZ_DATA_AUTO},        {NULL, 0}};
static const mz_choice_t devices[] = {
    {"auto", 0}, {"cpu", 1}, {"cuda", 2}, {NULL, 0}};
static const mz_choice_t recomputes[] = {{"none", 0},
                                         {"selective", MZ_CHOICE_LATER},
                                         {"full", MZ_CHOICE_LATER},
                                         {NULL, 0}};
static const mz_choice_t waits[] = {
    {"host", MZ_WAIT_HOST}, {"stream", MZ_WAIT_STREAM}, {NULL, 0}};
static const mz_choice_t forms[] = {{"auto", MZ_FORM_AUTO},
                                    {"collective", MZ_FORM_COLLECTIVE},
                                    {"pairwise", MZ_FORM_PAIRWISE},
                                    {NULL, 0}};
static const mz_choice_t dtypes[] = {
    {"fp32", 0}, {"bf16", 1}, {"fp16", 2}, {NULL, 0}};
static const mz_choice_t tags[] = {
    {"Ignore", 0}, {"Warn", 1}, {"Fail", 2}, {NULL, 0}};

#define FORM_PATHS                                                             \
  "a path or a list of at most 64 paths or {\"path\": P, \"weight\": W}, W "   \
  "above 0"

static const mz_key_t rows[] = {
    MZ_INT("train_batch_size", train_batch_size,
           "=from the two others and the ranks", 1, MZ_INT_MAX,
           "Sequences a step over all ranks: micro-batch x accumulation x "
           "ranks"),
    MZ_INT("train_micro_batch_size_per_gpu", train_micro_batch_size_per_gpu,
           "=from the two others and the ranks", 1, MZ_INT_MAX,
           "Sequences a rank and micro-batch"),
    MZ_INT("gradient_accumulation_steps", gradient_accumulation_steps,
           "=from the two others and the ranks", 1, MZ_INT_MAX,
           "Micro-batches a step"),
    MZ_REAL("gradient_clipping", gradient_clipping, "1.0", 0, INFINITY,
            "Bound of the gradient's global norm; 0: off"),
    MZ_INT("steps_per_print", steps_per_print, "null", 1, MZ_INT_MAX,
           "Steps from one progress line to the next; null: chosen by the "
           "program"),
    MZ_BOOL("use_data_before_expert_parallelism",
            use_data_before_expert_parallelism, "false",
            "Order of the expert groups: data-parallel neighbours first"),
    MZ_BOOL("wall_clock_breakdown", wall_clock_breakdown, "false",
            "Times by part in the metrics: each operation of each layer step, "
            "messages that are not hidden, gaps"),

    MZ_HAND("data.train", offsetof(mz_config_values_t, data.train),
            "=none; gpt_moe --data sets it", FORM_PATHS, mz_key_read_paths,
            mz_key_write_paths, "Training data"),
    MZ_HAND("data.valid", offsetof(mz_config_values_t, data.valid), "=none",
            FORM_PATHS, mz_key_read_paths, mz_key_write_paths,
            "Validation data"),
    MZ_CHOICE("data.format", data.format, "\"auto\"", formats,
              "Bytes of a text or llm.c token files; auto: found from the "
              "file"),
    MZ_INT("data.sequence_length", data.sequence_length,
           "=model.max_position_embeddings", 1, MZ_INT_MAX,
           "Tokens a sequence; at most model.max_position_embeddings, required "
           "without the section model"),
    MZ_INT("data.seed", data.seed, "=train.seed", 0, INFINITY,
           "Seed of the order of the samples"),

    MZ_INT("train.steps", train.steps, "100", 0, INFINITY, "Optimizer steps"),
    MZ_INT("train.seed", train.seed, "1234", 0, INFINITY,
           "Seed of initial values, dropout and token selection"),
    MZ_INT("train.eval_interval", train.eval_interval, "0", 0, INFINITY,
           "Steps between evaluations; 0: only at the end"),
    MZ_INT("train.eval_steps", train.eval_steps, "0", 0, INFINITY,
           "Global batches an evaluation; 0: all"),
    {MZ_USED_("train.device", MZ_KEY_WORD, "\"auto\"",
              offsetof(mz_config_values_t, train.device),
              "Backend; auto: CUDA where a GPU is found"),
     .choices = devices},
    MZ_BOOL("train.deterministic", train.deterministic, "true",
            "The same bits from run to run of one layout"),
    MZ_LATER_CHOICE("train.recompute", "\"none\"", recomputes,
                    "Activations computed again in backward"),
    MZ_ABOVE("train.watchdog_s", train.watchdog_s, "600", 0,
             "Seconds without progress until the run fails"),
    MZ_REAL("train.max_minutes", train.max_minutes, "0", 0, INFINITY,
            "The run stops after the step that passes it; 0: no limit"),

    MZ_BOOL("comm.thread", comm.thread, "true",
            "A communication thread; false: progress inside the step"),
    MZ_CHOICE("comm.wait", comm.wait, "\"host\"", waits,
              "Who waits for tokens, weights and gradients: the host, or (with "
              "comm.thread, on GPUs) the GPU's stream"),
    MZ_INT("comm.piece_bytes", comm.piece_bytes, "33554432", 4, INFINITY,
           "Bytes of a piece of bulk data"),
    MZ_LATER("comm.flat_limit", INT, "null",
             "Ranks above which a reduction has two levels"),
    MZ_CHOICE("comm.messages", comm.messages, "\"auto\"", forms,
              "MPI's collectives or pairs of sends and receives, with the same "
              "bits; auto: pairs between GPUs of one machine"),

    MZ_TEXT("checkpoint.dir", checkpoint.dir, "\"checkpoint\"", NULL,
            "Folder under the run's folder, or an absolute path"),
    MZ_INT("checkpoint.save_interval", checkpoint.save_interval, "0", 0,
           INFINITY, "Steps between saves; 0: none"),
    MZ_INT("checkpoint.keep", checkpoint.keep, "0", 0, INFINITY,
           "Newest saves that are kept; 0: all"),
    MZ_LATER("checkpoint.async", BOOL, "false", "Saves beside the training"),
    MZ_BOOL("checkpoint.gather_on_save", checkpoint.gather_on_save, "false",
            "Rank 0 also writes the whole model into one file"),
    MZ_TEXT("checkpoint.gather_dtype", checkpoint.gather_dtype, "\"fp32\"",
            dtypes, "Type of the weights in that file"),
    {.path = "checkpoint.tag_validation",
     .type = MZ_KEY_CHOICE,
     .sort = MZ_SORT_NOTED,
     .fallback = "\"Warn\"",
     .choices = tags,
     .case_free = true,
     .offset = MZ_NO_FIELD,
     .meaning = "one tag is chosen by rank 0 for all"},
    MZ_NOTED("checkpoint.load_universal", BOOL, "false",
             "every checkpoint loads at any layout"),
    MZ_LATER("checkpoint.use_node_local_storage", BOOL, "false",
             "Each node writes its own folder"),
    MZ_NOTED("checkpoint.parallel_write.pipeline_stage", BOOL, "false",
             "every rank writes its own file"),
    MZ_NOTED("checkpoint.checkpoint_serialization", BOOL, "true",
             "checkpoints are HDF5"),
    MZ_LATER("checkpoint.writer", HAND, "null", "Settings of a fast writer"),

    MZ_TEXT("monitor.jsonl", monitor_jsonl, "\"metrics.jsonl\"", NULL,
            "Metrics, one JSON object a line, under the run's folder"),
    MZ_BOOL("monitor.param_hash", monitor_param_hash, "false",
            "A hash of all parameters in every line"),
    MZ_LATER("monitor.csv", TEXT, "null", "Metrics as a table"),
    MZ_LATER("monitor.tensorboard", TEXT, "null", "Metrics for TensorBoard"),
};

const mz_key_list_t mz_keys_run = MZ_KEY_LIST(rows);

#define HOOK_HAND(path_, field_, form_, read_, write_, meaning_)               \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_HAND, "=none",                                      \
             offsetof(mz_config_values_t, field_), meaning_),                  \
        .form = (form_), .read = (read_), .write = (write_), .hooks = true     \
  }
#define HOOK_BOOL(path_, field_, meaning_)                                     \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_BOOL, "false", MZ_FIELD_(bool, field_), meaning_),  \
        .hooks = true                                                          \
  }
#define HOOK_TEXT(path_, field_, meaning_)                                     \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_TEXT, "=none", MZ_FIELD_(char *, field_),           \
             meaning_),                                                        \
        .hooks = true                                                          \
  }
#define HOOK_INT(path_, field_, meaning_)                                      \
  {                                                                            \
    MZ_USED_(path_, MZ_KEY_INT, "0", MZ_FIELD_(int64_t, field_), meaning_),    \
        .min = 0, .max = INFINITY, .hooks = true                               \
  }

#define FORM_IDS "a list of integers of at least 0"

static const mz_key_t hooks[] = {
    HOOK_HAND("debug.fixed_logits", debug.fixed_logits, "a list of numbers",
              mz_key_read_logits, mz_key_write_logits,
              "Router logits of every token, one an expert"),
    HOOK_HAND("debug.route_table", debug.route_table, FORM_IDS, mz_key_read_ids,
              mz_key_write_ids, "First choice by token id"),
    HOOK_BOOL("debug.identity_experts", debug.identity_experts,
              "Expert e returns (e + 1) x"),
    HOOK_TEXT("debug.inject_grads", debug.inject_grads,
              "File whose values replace the reduced gradients"),
    HOOK_TEXT("debug.dump_full", debug.dump_full,
              "Folder for all parameters after the last step"),
    HOOK_TEXT("debug.dump_grads", debug.dump_grads,
              "Folder for the reduced gradients of the first step"),
    HOOK_TEXT("debug.fault", debug.fault,
              "A failure: \"oom|late|stall|exit:rank<R>:step<N>\""),
    HOOK_BOOL("debug.poison", debug.poison, "Freed buffers hold NaN"),
    HOOK_INT("debug.delay_ms", debug.delay_ms,
             "Milliseconds before each message"),
    HOOK_HAND("debug.tokens_per_rank", debug.tokens_per_rank, FORM_IDS,
              mz_key_read_ids, mz_key_write_ids,
              "Tokens of each rank's micro-batch"),
    HOOK_HAND("debug.label_mask", debug.label_mask, FORM_IDS, mz_key_read_ids,
              mz_key_write_ids, "Ranks without labels"),
    HOOK_BOOL("debug.sample_ids", debug.sample_ids,
              "The samples of each step in the metrics"),
    HOOK_INT("debug.count_limit", debug.count_limit,
             "Elements an MPI call takes; 0: no limit of ours"),
    HOOK_BOOL("debug.staged", debug.staged,
              "Messages go through host memory, whatever MPI takes"),
    MZ_LATER("debug.pretend_node", INT, "null", "Ranks taken for one node"),
    MZ_LATER("debug.writer_sleep", REAL, "0", "Seconds a save is held up"),
};

const mz_key_list_t mz_keys_debug = MZ_KEY_LIST(hooks);
