#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# docs/configuration.md is what ci/make_reference makes of the table of keys.
# Usage: reference.sh ROOT GPT_MOE
set -eu
made=$(mktemp)
trap 'rm -f "$made"' EXIT
"$1/ci/make_reference" "$2" >"$made"
if ! diff "$1/docs/configuration.md" "$made"; then
  echo "out of date: ci/make_reference build/apps/gpt_moe >docs/configuration.md"
  exit 1
fi
# a key a line, neither more nor fewer than the program prints
test "$("$2" config | grep -c '^[^ ]')" -eq "$(grep -c '^| `' "$made")"
echo "docs/configuration.md is up to date"
