#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every fenced C block of docs/tutorial.md is verbatim text of apps/own_model.c.
# Usage: tutorial.sh ROOT
set -eu
root=$1
copy=$(mktemp)
trap 'rm -f "$copy"' EXIT

# check TEXT PROGRAM: names the first line of each block that is not there
check() {
  awk '
NR == FNR { program = program $0 "\n"; next }
/^```c$/ { inside = 1; block = ""; first = FNR + 1; next }
/^```/ && inside {
  inside = 0
  num++
  if (index("\n" program, "\n" block)) next
  printf "%s:%d: the block is not in the program\n", FILENAME, first
  failed = 1
}
inside { block = block $0 "\n" }
END {
  if (inside || num < 10) { print num " whole blocks of C"; failed = 1 }
  exit failed
}' "$2" "$1"
}

check "$root/docs/tutorial.md" "$root/apps/own_model.c"

sed 's/num_tokens; t++/num_tokens; ++t/' "$root/apps/own_model.c" >"$copy"
if check "$root/docs/tutorial.md" "$copy" >/dev/null; then
  echo "a program that differs from the text was not found"
  exit 1
fi
echo "every block of the tutorial is in the program"
