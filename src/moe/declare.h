/* SPDX-License-Identifier: Apache-2.0 */
/* Short forms of declarations, shared by the layers here and in src/model. */
#ifndef MZ_MOE_DECLARE_H
#define MZ_MOE_DECLARE_H

#include <moezero/decl.h>

/** Formats a name. @return MZ_OK, MZ_ERR_ARG when it is too long. */
mz_status_t mz_format_name(char name_out[MZ_NAME_MAX], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/** Declares the buffer "<prefix>.<suffix>"; opts.name is not read. */
mz_status_t mz_declare_buffer(mz_decl_t *decl, const char *prefix,
                              const char *suffix, mz_buffer_opts_t opts,
                              int32_t *buffer_out);

/** Declares the tensor "<prefix>.<suffix>"; opts.name is not read. */
mz_status_t mz_declare_tensor(mz_decl_t *decl, const char *prefix,
                              const char *suffix, mz_tensor_opts_t opts,
                              int32_t *tensor_out);

/** Appends ids to a list of references; negative ids (absent ones) are left
 * out. Too many are counted, not stored, so that mz_decl_compute refuses. */
void mz_add_refs(int32_t refs[MZ_STEP_MAX_REFS], int32_t *num,
                 const int32_t *ids, size_t num_ids);

/** MZ_REFS(&step, reads, a, b): step.reads gains a and b. */
#define MZ_REFS(step, list, ...)                                               \
  mz_add_refs((step)->list, &(step)->num_##list,                               \
              (const int32_t[]){__VA_ARGS__},                                  \
              sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

#endif
