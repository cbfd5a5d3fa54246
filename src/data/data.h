/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Token sources: files of tokens, cut into samples of one sequence each.
 *
 * S tokens a sequence. Formats:
 *  - text: every byte is a token (ids 0..255); MZ_END_OF_TEXT (256) follows the
 *    last byte of each file, so the vocabulary has at least 257 entries;
 *  - tokens: the files of llm.c: int32 header[256] with magic 20240520, version
 *    1 and the number of tokens, then the tokens as uint16, little-endian.
 *
 * Samples of a file do not overlap: window w holds the tokens [w S, w S + S)
 * and their labels [w S + 1, w S + S + 1); a rest shorter than that is unused.
 * Several files are laid end to end in the order of the list. A weight says how
 * often a file is passed in one epoch: file i with n windows has round(weight *
 * n), at least 1, samples, and its sample j is window floor(j n / samples). So
 * 1 takes each window once, 2 twice, and 0.5 every other one.
 *
 * Files are mapped read-only and read in place; offsets have 64 bits. Ids of a
 * token file are checked against the vocabulary when it is opened (files up to
 * MZ_SCAN_BYTES) or when a sample is read (larger ones).
 *
 * Nothing here is collective.
 */
#ifndef MZ_DATA_DATA_H
#define MZ_DATA_DATA_H

#include <moezero/config.h>

enum { MZ_END_OF_TEXT = 256, MZ_SCAN_BYTES = 64 << 20 };

typedef struct mz_dataset mz_dataset_t;

/**
 * Opens @p num files.
 * @param paths    [num]; copied.
 * @param weights  [num] > 0, passes in an epoch; NULL: 1 each.
 * @param vocab_size  Ids must be below it (model.vocab_size).
 * @param[out] dataset_out  Owned by the caller; NULL after any error.
 * @return MZ_OK, MZ_ERR_ARG, MZ_ERR_NOMEM, MZ_ERR_IO (cannot be opened or
 * mapped), MZ_ERR_DATA (empty, truncated, another format, an id outside the
 * vocabulary, shorter than a sequence and its label), MZ_ERR_UNSUPPORTED (a
 * format of other programs). The message names the file and the numbers.
 */
mz_status_t mz_dataset_open(char *const *paths, const double *weights,
                            int32_t num, mz_data_format_t format,
                            int64_t vocab_size, int64_t sequence_length,
                            mz_dataset_t **dataset_out);

/**
 * What a file is to be read as: MZ_DATA_TEXT or MZ_DATA_TOKENS.
 * @return as mz_dataset_open.
 */
mz_status_t mz_data_find_format(const char *path, mz_data_format_t wanted,
                                mz_data_format_t *format_out);

void mz_dataset_close(mz_dataset_t **dataset);

/** Samples of one epoch, >= 1. */
int64_t mz_dataset_num_samples(const mz_dataset_t *dataset);

/** Tokens of all files, end-of-text marks included. */
int64_t mz_dataset_num_tokens(const mz_dataset_t *dataset);

/**
 * Reads sample @p index in [0, num_samples).
 * @param[out] tokens_out, labels_out  [S]
 * @return MZ_OK, MZ_ERR_ARG, MZ_ERR_DATA (an id outside the vocabulary).
 */
mz_status_t mz_dataset_sample(const mz_dataset_t *dataset, int64_t index,
                              int32_t *tokens_out, int32_t *labels_out);

#endif
