/* SPDX-License-Identifier: Apache-2.0 */
#include "moe/declare.h"

#include "base/check.h"

#include <stdarg.h>
#include <stdio.h>

mz_status_t mz_format_name(char name_out[MZ_NAME_MAX], const char *format, ...)
{
  va_list args;
  int length;

  va_start(args, format);
  length = vsnprintf(name_out, MZ_NAME_MAX, format, args);
  va_end(args);
  MZ_REQUIRE(length >= 0 && length < MZ_NAME_MAX, MZ_ERR_ARG,
             "name \"%.40s...\" has %d bytes, at most %d are allowed", name_out,
             length, MZ_NAME_MAX - 1);
  return MZ_OK;
}

mz_status_t mz_declare_buffer(mz_decl_t *decl, const char *prefix,
                              const char *suffix, mz_buffer_opts_t opts,
                              int32_t *buffer_out)
{
  char name[MZ_NAME_MAX];

  MZ_TRY(mz_format_name(name, "%s.%s", prefix, suffix));
  opts.name = name;
  return MZ_TRACE(mz_decl_buffer(decl, &opts, buffer_out));
}

mz_status_t mz_declare_tensor(mz_decl_t *decl, const char *prefix,
                              const char *suffix, mz_tensor_opts_t opts,
                              int32_t *tensor_out)
{
  char name[MZ_NAME_MAX];

  MZ_TRY(mz_format_name(name, "%s.%s", prefix, suffix));
  opts.name = name;
  return MZ_TRACE(mz_decl_tensor(decl, &opts, tensor_out));
}

void mz_add_refs(int32_t refs[MZ_STEP_MAX_REFS], int32_t *num,
                 const int32_t *ids, size_t num_ids)
{
  for (size_t i = 0; i < num_ids; i++) {
    if (ids[i] < 0) continue;
    if (*num < MZ_STEP_MAX_REFS) refs[*num] = ids[i];
    (*num)++;
  }
}
