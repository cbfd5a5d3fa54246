#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Each public header compiles alone, as C11 and as C++17.
# Usage: headers.sh ROOT CC CXX [FLAG]...
set -eu
root=$1 cc=$2 cxx=$3
shift 3
if ! command -v "$cxx" >/dev/null; then
  echo "no C++ compiler ($cxx)"
  exit 77
fi
num=0
for header in "$root"/include/moezero/*.h; do
  name=moezero/$(basename "$header")
  for form in "$cc -xc -std=c11" "$cxx -xc++ -std=c++17"; do
    # shellcheck disable=SC2086 # the form is a command and its options
    if ! printf '#include <%s>\n' "$name" |
      $form -fsyntax-only -Wall -Wextra -Werror -I"$root/include" "$@" -; then
      echo "<$name> does not compile alone: $form"
      exit 1
    fi
  done
  num=$((num + 1))
done
test "$num" -gt 0
echo "$num headers compile alone"
