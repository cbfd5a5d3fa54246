/* SPDX-License-Identifier: Apache-2.0 */
/**
 * Where the time of a device's stream goes. Between mz_spans_begin and
 * mz_spans_take every moment belongs to one *part*, a number that the caller
 * gives a meaning: a mark ends the span before it and begins one of another
 * part. So the parts add up to the whole time. A mark is a place in the
 * stream's work, so a span is what passes on the device: nothing while the host
 * does something and the device is still busy.
 *
 * A kernel table that is made with spans (mz_kernels_opts_t) gives each
 * operation a span of part first + MZ_KERNEL_<operation>, first being what
 * mz_spans_operations said last, and what follows it to MZ_SPAN_GAPS.
 *
 * Nothing is allocated between create and destroy. Marks wait for nothing
 * unless some thousand of them are not read: then for the oldest. One thread.
 */
#ifndef MZ_KERNELS_SPANS_H
#define MZ_KERNELS_SPANS_H

#include "kernels/device.h"

typedef struct mz_spans mz_spans_t;
struct mz_kernels_ops;

enum { MZ_SPAN_GAPS }; /* the part 0: no operation runs */

typedef struct mz_span_sum {
  double ms;
  int64_t num; /* spans */
} mz_span_sum_t;

/** @param num_parts  At least 1. @return MZ_OK, MZ_ERR_NOMEM, MZ_ERR_CUDA. */
mz_status_t mz_spans_create(const mz_device_t *device, int32_t num_parts,
                            mz_spans_t **spans_out);
/** The device is still open. */
void mz_spans_destroy(mz_spans_t **spans);

/** Forgets what was marked and begins with a gap. */
mz_status_t mz_spans_begin(mz_spans_t *spans);

/** A span of @p part, in [0, num_parts), begins on the device's stream. Outside
 * of begin and take nothing happens. */
mz_status_t mz_spans_mark(mz_spans_t *spans, int32_t part);

/** Operations of the table are from now on the parts from @p first on. */
void mz_spans_operations(mz_spans_t *spans, int32_t first);

/** Ends the last span and waits for the device.
 * @param[out] sums_out  [num_parts], borrowed until the next begin. */
mz_status_t mz_spans_take(mz_spans_t *spans, const mz_span_sum_t **sums_out);

/** A table of the same operations that marks each; owned by @p spans. A second
 * call replaces the first one's. */
const struct mz_kernels_ops *mz_spans_table(mz_spans_t *spans,
                                            const struct mz_kernels_ops *ops);

/** Name of operation MZ_KERNEL_<name>. */
const char *mz_kernel_name(int32_t op);

#endif
