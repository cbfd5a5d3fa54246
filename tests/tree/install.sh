#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# An installed moezero is enough: every public header is there and compiles, and
# apps/own_model.c and apps/vector_moe.c compile and link through pkg-config
# alone (the second also with HDF5's).
# Usage: install.sh ROOT BUILD PREFIX CC
set -eu
root=$1 build=$2 prefix=$3 cc=$4
dest=$(mktemp -d)
trap 'rm -rf "$dest"' EXIT

meson install -C "$build" --no-rebuild --quiet --destdir "$dest"
test -x "$dest$prefix/bin/gpt_moe"
(cd "$root/include" && find moezero -name '*.h' | sort) >"$dest/wanted"
(cd "$dest$prefix/include" && find moezero -name '*.h' | sort) >"$dest/found"
diff "$dest/wanted" "$dest/found"

# what a package does that is moved to another prefix
config=$(find "$dest$prefix" -name moezero.pc)
grep -qx "prefix=$prefix" "$config"
sed "s|^prefix=.*|prefix=$dest$prefix|" "$config" >"$dest/moezero.pc"
PKG_CONFIG_PATH=$dest${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
export PKG_CONFIG_PATH
cflags=$(pkg-config --cflags moezero)
libs=$(pkg-config --libs moezero)

# away from the source tree, so that nothing of it can be found
cp "$root/apps/own_model.c" "$root/apps/vector_moe.c" \
  "$root/apps/vector_data.c" "$root/apps/vector_data.h" "$dest"
sed 's/.*/#include <&>/' "$dest/found" >"$dest/all.c"
cd "$dest"
# shellcheck disable=SC2086 # lists of words
for source in all.c own_model.c vector_moe.c vector_data.c; do
  $cc -std=c11 -Wall -Wextra -Werror $cflags -c "$source"
done
# shellcheck disable=SC2086
$cc own_model.o -o own_model $libs -lm
# shellcheck disable=SC2086
$cc vector_moe.o vector_data.o -o vector_moe $libs $(pkg-config --libs hdf5) -lm
test -x own_model && test -x vector_moe
echo "$(wc -l <found) headers and two programs of their own on an installed" \
  "moezero"
