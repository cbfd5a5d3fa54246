#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks the layers of CONTRIBUTING.md: no #include points up, MPI stays in
# src/comm, and the library neither prints nor ends the process.
# Usage: ci/check_layers.sh [ROOT]; exit 1 names every violation.
set -eu
cd "${1:-$(dirname "$0")/..}"

find src kernels checkpoint include apps \
  \( -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) | sort |
  xargs awk '
BEGIN {
  # An include may go to a lower number, or stay in its folder.
  level["base"] = 0
  level["config"] = 1
  level["comm"] = level["plan"] = level["kernels"] = 2
  level["zero"] = level["moe"] = level["data"] = level["checkpoint"] = 3
  level["model"] = 3
  level["train"] = 4
  level["apps"] = 5
  beside["model", "moe"] = 1
  beside["comm", "kernels"] = 1 # the device
  # Types that every layer shares; the other public headers have an owner.
  owner["engine.h"] = "train"
  main["checkpoint/h5_gather.c"] = 1
}
function bad(what) {
  printf "%s:%d: %s\n", FILENAME, FNR, what
  failed = 1
}
function folder(path,    part) {
  split(path, part, "/")
  return part[1] == "src" ? part[2] : part[1]
}
# The line without comments and the text of strings (but for #include lines).
function code(line,    out, i, two, one, quoted) {
  out = ""
  quoted = 0
  for (i = 1; i <= length(line); i++) {
    two = substr(line, i, 2)
    one = substr(line, i, 1)
    if (comment) {
      if (two == "*/") { comment = 0; i++ }
    } else if (quoted) {
      if (one == "\\") i++
      else if (one == "\"") quoted = 0
    } else if (two == "/*") { comment = 1; i++ }
    else if (two == "//") break
    else if (one == "\"") quoted = 1
    else out = out one
  }
  return out
}
function check_public(header, from) {
  if (from == "include" || !(header in owner)) return
  if (level[from] < level[owner[header]])
    bad("src/" from " may not include moezero/" header)
}
function check_include(path, from,    to) {
  if (path ~ /^moezero\//) {
    check_public(substr(path, 9), from)
    return
  }
  if (from == "include") {
    bad("a public header may only include <moezero/...>, not \"" path "\"")
    return
  }
  if (path !~ /\//) return # the same folder
  to = folder(path)
  if (!(to in level)) bad("\"" path "\" belongs to no layer")
  else if (to != from && level[to] >= level[from] && !((from, to) in beside))
    bad(from " may not include \"" path "\"")
}
FNR == 1 {
  comment = 0
  from = folder(FILENAME)
  may_end = from == "apps" || (FILENAME in main)
  may_mpi = from == "comm" || may_end || FILENAME == "include/moezero/engine.h"
  if (from != "include" && !(from in level)) bad("the file belongs to no layer")
}
match($0, /^[ \t]*#[ \t]*include[ \t]*["<][^">]*[">]/) && !comment {
  path = substr($0, RSTART, RLENGTH)
  local = path ~ /"$/
  sub(/^[^"<]*["<]/, "", path)
  sub(/[">]$/, "", path)
  if (path == "mpi.h" && !may_mpi) bad("<mpi.h> belongs to src/comm")
  if (path ~ /^(cuda|cublas|curand|cudnn|nvml)/ && FILENAME !~ /kernels\/cuda\//)
    bad("CUDA headers belong to kernels/cuda")
  if (local || path ~ /^moezero\//) check_include(path, from)
}
{
  text = code($0)
  if (!may_end) {
    if (match(text, /(^|[^A-Za-z0-9_])(printf|vprintf|puts|putchar|perror|exit|_exit|quick_exit|abort|MPI_Abort|MPI_Init|MPI_Init_thread|MPI_Finalize)[ \t]*\(/))
      bad("the library neither prints nor ends: " substr(text, RSTART, RLENGTH))
    if (text ~ /(^|[^A-Za-z0-9_])(stdout|stderr)([^A-Za-z0-9_]|$)/)
      bad("the library does not write to stdout or stderr")
  }
  if (FILENAME != "src/base/alloc.c" &&
      match(text, /(^|[^A-Za-z0-9_])(malloc|calloc|realloc|aligned_alloc|posix_memalign|strdup|strndup)[ \t]*\(/))
    bad("memory comes from base/alloc.h: " substr(text, RSTART, RLENGTH))
}
END { exit failed }
'
