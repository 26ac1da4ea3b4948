#!/bin/bash
# Packs built programs with the shared libraries that a machine without packages lacks, for tests/cuda/bench.sh
# --programs there.
#
#   tests/cuda/pack.sh DIR [BUILD]        BUILD: build/release
set -eu -o pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] || { sed -n 's/^#   //p' "$0" >&2; exit 2; }
out=$1 built=${2:-build/release}
mkdir -p "$out/lib"
cp "$built/reshard" "$built/samples/programs/load_cuda" "$out"
strip "$out/reshard" "$out/load_cuda"
# All except the C library and the driver's libraries.
ldd "$out/reshard" "$out/load_cuda" | awk '/=> \// { print $3 }' | sort -u |
  grep -vE '/(ld-linux|libc|libm|libdl|libpthread|librt|libcuda|libnvidia)[-.]' | xargs -r cp -Lt "$out/lib"
du -sh "$out" | cut -f 1
