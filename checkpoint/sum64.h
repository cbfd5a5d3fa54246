/* SPDX-License-Identifier: Apache-2.0 */
/**
 * The checksum of a file: 64 bits, in any order of its pieces.
 *
 * The bytes are 8-byte little-endian words w[i], the last one filled up with
 * zeros. sum = mix(bytes xor (SUM over i of mix(w[i] xor (i + 1) * K))) with
 * the odd constant K = 0x9e3779b97f4a7c15 and the finalizer of SplitMix64
 * (Steele et al. 2014) as mix, a bijection: a changed word always changes the
 * sum, and exchanged words do too, but for one chance in 2^64. Since it is a
 * sum, a writer adds each piece from memory when it writes it.
 */
#ifndef MZ_CHECKPOINT_SUM64_H
#define MZ_CHECKPOINT_SUM64_H

#include <stdint.h>

/** What the bytes from place @p at on (a multiple of 8) add; only at the end of
 * the file may num_bytes not be a multiple of 8. */
uint64_t mz_sum64_part(const void *bytes, int64_t at, int64_t num_bytes);

/** From the parts to the checksum of a file. */
uint64_t mz_sum64_end(uint64_t parts, int64_t file_bytes);

#endif
