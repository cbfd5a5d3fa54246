/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of the sections model (names of Hugging Face's config.json) and moe. */
#include "config/keys.h"

#include <string.h>

static const mz_choice_t architectures[] = {
    {"gpt2", MZ_ARCH_GPT2}, {"llama", MZ_ARCH_LLAMA}, {NULL, 0}};
static const mz_choice_t activations[] = {{"gelu", MZ_ACT_GELU},
                                          {"gelu_new", MZ_ACT_GELU},
                                          {"gelu_pytorch_tanh", MZ_ACT_GELU},
                                          {"swiglu", MZ_ACT_SWIGLU},
                                          {"silu", MZ_ACT_SWIGLU},
                                          {NULL, 0}};
/* mz_norm_kind_t of kernels/norm.h, which lies above this layer. */
static const mz_choice_t norms[] = {
    {"layernorm", 0}, {"layer", 0}, {"rmsnorm", 1}, {"rms", 1}, {NULL, 0}};
static const mz_choice_t positions[] = {
    {"learned", MZ_POS_LEARNED}, {"rope", MZ_POS_ROPE}, {NULL, 0}};
static const mz_choice_t policies[] = {
    {"probs", MZ_DROP_PROBS}, {"position", MZ_DROP_POSITION}, {NULL, 0}};
static const mz_choice_t noises[] = {{"None", MZ_NOISE_NONE},
                                     {"Jitter", MZ_NOISE_JITTER},
                                     {"RSample", MZ_NOISE_RSAMPLE},
                                     {NULL, 0}};
static const mz_choice_t losses[] = {{"load_balancing", MZ_AUX_LOAD_BALANCING},
                                     {"first_choice", MZ_AUX_FIRST_CHOICE},
                                     {"squared", MZ_AUX_SQUARED},
                                     {"none", MZ_AUX_NONE},
                                     {NULL, 0}};
static const mz_choice_t scopes[] = {
    {"group", MZ_SCOPE_GROUP}, {"rank", MZ_SCOPE_RANK}, {NULL, 0}};
static const mz_choice_t scores[] = {
    {"softmax", MZ_SCORE_SOFTMAX}, {"sigmoid", MZ_SCORE_SIGMOID}, {NULL, 0}};

static const mz_key_t rows[] = {
    MZ_CHOICE("model.architecture", model.architecture, "\"gpt2\"",
              architectures,
              "Preset of norm, activation, positions, biases and tying; single "
              "keys override it"),
    MZ_INT("model.vocab_size", model.vocab_size,
           "=required; 257 (bytes and end of text) when data.format is text", 1,
           MZ_INT_MAX, "Token ids are below this"),
    MZ_INT("model.hidden_size", model.hidden_size, MZ_REQUIRED, 1, MZ_INT_MAX,
           "Width of the residual stream; divisible by the heads"),
    MZ_INT("model.num_hidden_layers", model.num_hidden_layers, MZ_REQUIRED, 1,
           MZ_MAX_LAYERS, "Transformer blocks"),
    MZ_INT("model.num_attention_heads", model.num_attention_heads, MZ_REQUIRED,
           1, MZ_INT_MAX, "Query heads"),
    MZ_INT("model.num_key_value_heads", model.num_key_value_heads,
           "=model.num_attention_heads", 1, MZ_INT_MAX,
           "Key and value heads; divides the query heads"),
    MZ_INT("model.intermediate_size", model.intermediate_size,
           "=gpt2: 4 * hidden_size; llama: 8/3 * hidden_size, up to a multiple "
           "of 64",
           1, 4 * MZ_INT_MAX, "Inner width of the dense feed-forward"),
    MZ_INT("model.max_position_embeddings", model.max_position_embeddings,
           "=data.sequence_length, which is then required", 1, MZ_INT_MAX,
           "Longest sequence of the model"),
    MZ_CHOICE("model.hidden_act", model.hidden_act,
              "=gpt2: gelu; llama: swiglu", activations,
              "Activation; the gelu names all mean the tanh form, silu means "
              "swiglu"),
    MZ_CHOICE("model.norm", model.norm, "=gpt2: layernorm; llama: rmsnorm",
              norms, "Normalisation"),
    MZ_ABOVE("model.norm_eps", model.norm_eps, "1e-5", 0,
             "Added to the variance under the root"),
    MZ_CHOICE("model.position_embedding", model.position_embedding,
              "=gpt2: learned; llama: rope", positions, "Positions"),
    MZ_ABOVE("model.rope_theta", model.rope_theta, "10000", 0,
             "Base of the rotary angles"),
    MZ_BOOL("model.bias", model.bias, "=gpt2: true; llama: false",
            "Biases of all linear maps and of LayerNorm"),
    MZ_BOOL("model.attention_bias", model.attention_bias, "=model.bias",
            "Bias of the query, key and value map"),
    MZ_BOOL("model.tie_word_embeddings", model.tie_word_embeddings,
            "=gpt2: true; llama: false",
            "The head uses the embedding's weights"),
    MZ_REAL("model.initializer_range", model.initializer_range, "0.02", 0,
            INFINITY, "Standard deviation of initial weights"),
    MZ_FRACTION("model.dropout", model.dropout, "0.0",
                "Share of the embedding's and the blocks' outputs set to 0 in "
                "training"),

    MZ_HAND("moe.num_experts", offsetof(mz_config_values_t, moe.num_experts),
            "=no MoE layers without the section moe, else required",
            "an integer or a list of integers, one a MoE layer, each of at "
            "least 0",
            NULL, mz_key_write_moe_list,
            "Experts over all ranks; a layer with 0 is dense"),
    MZ_HAND("moe.layers", offsetof(mz_config_values_t, moe.layer),
            "=every block",
            "an ascending list of block indices or {\"every\": N}", NULL,
            mz_key_write_moe_list,
            "The blocks with experts; every N: blocks N-1, 2N-1, ..."),
    MZ_HAND("moe.ep_size", offsetof(mz_config_values_t, moe.ep_size), "1",
            "an integer or a list of integers, one a MoE layer, each of at "
            "least 1",
            NULL, mz_key_write_moe_list,
            "Ranks that share one set of a layer's experts; divides the ranks "
            "and the experts"),
    MZ_HAND("moe.expert_model_parallel_size", MZ_NO_FIELD, "=moe.ep_size",
            "as moe.ep_size", NULL, NULL, "Another name of moe.ep_size"),
    MZ_INT("moe.k", moe.k, "1", 1, MZ_INT_MAX,
           "Experts a token goes to; at most num_experts"),
    MZ_INT("moe.expert_intermediate_size", moe.expert_intermediate_size,
           "=model.intermediate_size", 1, 4 * MZ_INT_MAX,
           "Inner width of an expert"),
    MZ_BOOL("moe.expert_bias", moe.expert_bias, "=model.bias",
            "Biases of the experts' linear maps"),
    MZ_BOOL("moe.use_residual", moe.use_residual, "false",
            "A dense feed-forward like an expert beside the experts, and a "
            "learned softmax of two that mixes their outputs"),
    MZ_INT("moe.num_shared_experts", moe.num_shared_experts, "0", 0, MZ_INT_MAX,
           "Experts that all tokens take, added to the output"),
    MZ_INT("moe.shared_expert_intermediate_size",
           moe.shared_expert_intermediate_size, "=moe.expert_intermediate_size",
           1, 4 * MZ_INT_MAX, "Inner width of a shared expert"),
    MZ_BOOL("moe.shared_expert_gate", moe.shared_expert_gate, "false",
            "The shared experts' output is multiplied by a learned sigmoid, "
            "one number a token"),
    MZ_ABOVE("moe.capacity_factor", moe.capacity_factor, "1.0", 0,
             "Rows an expert takes, as a multiple of balanced ones, in "
             "training"),
    MZ_ABOVE("moe.eval_capacity_factor", moe.eval_capacity_factor, "1.0", 0,
             "The same in evaluation"),
    MZ_INT("moe.min_capacity", moe.min_capacity, "4", 0, MZ_INT_MAX,
           "Lower bound of the rows an expert takes"),
    MZ_BOOL("moe.drop_tokens", moe.drop_tokens, "true",
            "Rows above the capacity are dropped; false: none ever is"),
    MZ_BOOL("moe.eval_drop_tokens", moe.eval_drop_tokens, "=moe.drop_tokens",
            "Dropping in evaluation, when other than in training"),
    MZ_INT("moe.expert_capacity", moe.expert_capacity, "null", 1, MZ_INT_MAX,
           "Rows an expert takes from a rank at most, instead of factors"),
    MZ_CHOICE("moe.drop_policy", moe.drop_policy, "\"probs\"", policies,
              "Who stays: the most probable or the first tokens"),
    MZ_BOOL("moe.use_rts", moe.use_rts, "=true with moe.k 1, else false",
            "Routes that stay are drawn at random, whatever drop_policy says"),
    MZ_BOOL("moe.norm_topk_prob", moe.norm_topk_prob, "true",
            "With k >= 2: weights are divided by their sum"),
    MZ_CHOICE("moe.score", moe.score, "\"softmax\"", scores,
              "The gates of a token: shares of 1, or each by itself"),
    MZ_HAND("moe.temperature", offsetof(mz_config_values_t, moe.temperature),
            "1.0",
            "a number above 0 or {\"start\": A, \"end\": B, \"steps\": N}",
            mz_key_read_temperature, mz_key_write_temperature,
            "Divides the router's logits: a number, or from A to B in N "
            "optimizer steps"),
    MZ_CHOICE("moe.noisy_gate_policy", moe.noisy_gate_policy, "null", noises,
              "In training: Jitter multiplies the router's input by numbers "
              "around 1; RSample (k = 1) draws the expert by its probability"),
    MZ_FRACTION("moe.gate_noise", moe.gate_noise,
                "=0.01 with moe.noisy_gate_policy Jitter, else 0",
                "Jitter's factors are 1 - this to 1 + this; alone it means "
                "Jitter"),
    MZ_BOOL("moe.top2_2nd_expert_sampling", moe.top2_2nd_expert_sampling,
            "false",
            "With k = 2, in training: the second expert is drawn by its "
            "probability"),
    MZ_CHOICE(
        "moe.aux_loss", moe.aux_loss, "\"load_balancing\"", losses,
        "Balance loss: of all k choices, of first ones, or squared distances "
        "of the mean gates from 1/E"),
    MZ_CHOICE("moe.aux_loss_scope", moe.aux_loss_scope, "\"group\"", scopes,
              "Its statistics: over all data-parallel ranks or of each rank"),
    MZ_REAL("moe.aux_loss_coef", moe.aux_loss_coef, "0.01", 0, INFINITY,
            "Factor of the balance loss"),
    MZ_REAL("moe.z_loss_coef", moe.z_loss_coef, "0.0", 0, INFINITY,
            "Factor of the router z-loss"),
    MZ_REAL("moe.bias_update_rate", moe.bias_update_rate, "0.0", 0, INFINITY,
            "Balance without a loss: a bias on the choice goes down by this "
            "after a step in which the expert had more than the mean, and up "
            "after one in which it had less"),
    MZ_ABOVE("moe.saved_rows", moe.saved_rows, "1.25", 0,
             "Without dropping: rows of the pool, as a multiple of balanced "
             "ones"),
    MZ_INT("moe.overlap_chunks", moe.overlap_chunks, "1", 0, MZ_INT_MAX,
           "Runs of experts that an exchange is cut in: one computes while the "
           "tokens of the next and of the one before travel; from 2 on some "
           "buffers are there twice; 0: nothing computes while tokens travel, "
           "to see what overlap gains; no bit changes"),
    MZ_LATER("moe.expert_cache", INT, "null", "Experts kept on the device"),
};

bool mz_key_needs_model(const mz_key_t *key)
{
  static const char *const of_layers[] = {"moe.num_experts",
                                          "moe.layers",
                                          "moe.ep_size",
                                          "moe.expert_model_parallel_size",
                                          "moe.expert_intermediate_size",
                                          "moe.expert_bias",
                                          "moe.use_residual",
                                          "moe.num_shared_experts",
                                          "moe.shared_expert_intermediate_size",
                                          "moe.shared_expert_gate"};

  for (size_t i = 0; i < sizeof of_layers / sizeof *of_layers; i++)
    if (strcmp(key->path, of_layers[i]) == 0) return true;
  return strncmp(key->path, "model.", 6) == 0;
}

const mz_key_list_t mz_keys_model = MZ_KEY_LIST(rows);
