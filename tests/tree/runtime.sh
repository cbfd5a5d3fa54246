#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# gpt_moe, or the library that it uses, takes the CUDA runtime as a shared
# library and has none inside, so that MPI sees what memory is the GPU's. The
# counter-example, device_pointers_static, is the other way round.
# Usage: runtime.sh BUILD READELF
set -eu
build=$1 readelf=$2

# shares FILE: it asks for the shared runtime
shares() {
  "$readelf" -d "$1" | grep -q 'NEEDED.*libcudart\.so'
}

# has FILE: a runtime is inside
has() {
  "$readelf" -W --syms "$1" | grep -q 'FUNC .* [0-9][0-9]* cudaMalloc$'
}

fail() {
  echo "$*" >&2
  exit 1
}

library=$build/libmoezero.so
test -e "$library" || library=$build/apps/gpt_moe
shares "$library" || fail "$library asks for no libcudart.so"
for file in "$library" "$build/apps/gpt_moe"; do
  ! has "$file" || fail "$file has a CUDA runtime inside"
done
inside=$build/tests/device/device_pointers_static
if test -e "$inside"; then
  has "$inside" || fail "$inside has no CUDA runtime inside"
  ! shares "$inside" || fail "$inside asks for libcudart.so"
fi
echo "the CUDA runtime of $library is a shared library"
