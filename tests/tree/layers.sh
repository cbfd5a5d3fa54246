#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# ci/check_layers.sh passes the tree, and finds each violation planted in a copy.
# Usage: layers.sh ROOT
set -eu
root=$1
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

"$root/ci/check_layers.sh" "$root"

# plant FILE LINE WORDS: the line in that file must be refused with the words
plant() {
  rm -rf "$copy/tree"
  mkdir -p "$copy/tree/ci"
  for d in src kernels checkpoint include apps; do
    cp -r "$root/$d" "$copy/tree/$d"
  done
  mkdir -p "$copy/tree/$(dirname "$1")"
  printf '%s\n' "$2" >>"$copy/tree/$1"
  if "$root/ci/check_layers.sh" "$copy/tree" >"$copy/out" 2>&1; then
    echo "not found: $2 in $1"
    exit 1
  fi
  if ! grep -qF "$3" "$copy/out" || ! grep -q "^$1:" "$copy/out"; then
    echo "$2 in $1: the message is"
    cat "$copy/out"
    exit 1
  fi
}

plant src/comm/seeded.c '#include "plan/plan.h"' 'comm may not include'
plant src/plan/seeded.c '#include "comm/comm.h"' 'plan may not include'
plant src/base/seeded.c '#include "config/keys.h"' 'base may not include'
plant kernels/cpu/seeded.c '#include "zero/unit.h"' 'kernels may not include'
plant src/moe/seeded.c '#include "model/layers.h"' 'moe may not include'
plant src/moe/seeded.c '#include "zero/unit.h"' 'moe may not include'
plant src/zero/seeded.c '#include <moezero/engine.h>' 'moezero/engine.h'
plant src/data/seeded.h '  #  include "train/run.h"' 'data may not include'
plant src/zero/seeded.c '#include "elsewhere/x.h"' 'belongs to no layer'
plant src/zero/seeded.c '#include <mpi.h>' '<mpi.h> belongs to src/comm'
plant include/moezero/seeded.h '#include <mpi.h>' '<mpi.h> belongs to'
plant include/moezero/seeded.h '#include "base/alloc.h"' 'public header'
plant src/model/seeded.c '#include <cuda_runtime.h>' 'CUDA headers'
plant src/train/seeded.c 'void f(void) { printf("x"); }' 'neither prints'
plant src/train/seeded.c 'void f(void) { exit(1); }' 'neither prints'
plant src/comm/seeded.c 'void f(void) { MPI_Abort(0, 1); }' 'neither prints'
plant checkpoint/seeded.c 'void f(void) { abort(); }' 'neither prints'
plant src/train/seeded.c 'void f(void) { fputs("x", stderr); }' 'stderr'
plant src/zero/seeded.c 'void *f(void) { return malloc(1); }' 'memory comes from'

# what is allowed: a model on moe, words in comments and strings
mkdir -p "$copy/fine/ci"
for d in src kernels checkpoint include apps; do
  cp -r "$root/$d" "$copy/fine/$d"
done
cat >"$copy/fine/src/model/seeded.c" <<'END'
#include "base/alloc.h"
#include "moe/gate.h"
#include <moezero/layer.h>
/* printf("x"), stderr,
 * exit(1) */
const char *text = "malloc(1) to stdout"; // abort()
void f(void) { snprintf(0, 0, "x"); }
END
"$root/ci/check_layers.sh" "$copy/fine"
echo "every planted violation was found"
