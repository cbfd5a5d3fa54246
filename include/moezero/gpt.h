/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file moezero/gpt.h
 * @brief GPT as one composition of the layers: embedding; a block [norm,
 * attention, norm, MLP or MoE] at a time; norm; head. The keys of the
 * configuration mix freely, so gpt2 and llama are two sets of values, not two
 * models.
 */
#ifndef MZ_GPT_H
#define MZ_GPT_H

#include <moezero/config.h>
#include <moezero/decl.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Declares the model. Block 0 is the embedding, block l + 1 the transformer
 * block l, block L + 1 the last norm and the head; then applies
 * optimizer.param_groups to its tensors. Sets the element type, so a
 * declaration that has tensors already must have it. Not collective.
 * @return MZ_OK, MZ_ERR_CONFIG (sizes that do not divide, lists of the debug
 * section that do not fit, an entry of param_groups without a tensor), and the
 * errors of mz_decl_tensor.
 */
mz_status_t mz_gpt_declare(const mz_config_values_t *config, mz_decl_t *decl);

/**
 * The same model, forward only: it has no loss, and no expert drops a token.
 * @param[out] logits_out  [V] host memory, borrowed until decl is destroyed:
 *                         after a walk those of this rank's last token.
 */
mz_status_t mz_gpt_declare_generation(const mz_config_values_t *config,
                                      float *logits_out, mz_decl_t *decl);

#ifdef __cplusplus
}
#endif
#endif
