#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every configuration of apps/configs has a plan, and those of published models
# their number of parameters.
# Usage: presets.sh ROOT GPT_MOE
set -eu
root=$1 gpt_moe=$2

# millions of parameters, rounded down
size_of() {
  case $1 in
  mixtral-8x7b) echo 46702 ;;
  nlg-350m-moe128) echo 13141 ;;
  pr-moe) echo 4116 ;;
  *) echo any ;;
  esac
}

# ranks: some batches are small
ranks_of() {
  case $1 in
  bench-tiny) echo 4 ;;
  *) echo 8 ;;
  esac
}

plans=0
for path in "$root"/apps/configs/*.json; do
  name=$(basename "$path" .json)
  ranks=$(ranks_of "$name")
  wanted=$(size_of "$name")
  if ! plan=$("$gpt_moe" plan "$path" --ranks "$ranks" 2>&1); then
    echo "$name on $ranks ranks: $plan"
    exit 1
  fi
  millions=$(echo "$plan" | awk '
    /of the model/ { inside = 1; next }
    inside && NF == 0 { exit }
    inside { sum += $3 }
    END { printf "%d\n", sum / 1e6 }')
  echo "$name: $millions million parameters, on $ranks ranks" \
    "$(echo "$plan" | awk '/arena, in all/ { print $4 " GiB each" }')"
  test "$millions" -gt 0
  if test "$wanted" != any && test "$wanted" != "$millions"; then
    echo "$name: $wanted million are wanted"
    exit 1
  fi
  plans=$((plans + 1))
done
test "$plans" -ge 8
