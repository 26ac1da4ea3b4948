#!/bin/bash
# Builds tests/cuda/bench.cc with nvcc, outside the checkout, checks a GPU against the CPU and prints how fast it is.
# Needs this tree, nvcc (on the PATH or in $CUDA_HOME/bin), nccl.h, a GPU and libnccl. Exit codes: 0 all checks hold,
# 1 one failed, 77 there is no GPU.
#
#   tests/cuda/bench.sh [--sanitize] [option of the program ...]      --help lists them
#
# --sanitize runs the checks under compute-sanitizer's tools instead, and prints no figures. CUDA_ARCH (sm_90) is what
# is built for; default: the GPU that is there.
set -eu -o pipefail
cd "$(dirname "$0")/../.."

nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
[ -x "$nvcc" ] || { echo "no nvcc: put it on the PATH or set CUDA_HOME" >&2; exit 2; }
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
nccl=$(ls "$cuda"/lib*/libnccl.so.2 /usr/lib/*/libnccl.so.2 2> /dev/null | head -n 1 || true)

arch=${CUDA_ARCH:-}
if [ -z "$arch" ]; then
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d '. ' || true)
  arch=sm_${capability:-90}
fi

build=$(mktemp -d "${TMPDIR:-/tmp}/reshard-cuda-XXXXXX")
trap 'rm -rf "$build"' EXIT
sources=(tests/cuda/bench.cc tests/support/{device,exchange}_checks.cc
  lib/device/{convert,copy,cpu_device,device,digest}.cc lib/device/cuda/{cuda_device,cufile}.cc
  lib/device/cuda/kernels.cu
  lib/transport/{collectives,nccl}.cc lib/layout/{box,dtype}.cc lib/base/{cursor,file,parallel,sys,text}.cc)
compile() {
  "$nvcc" -std=c++20 -O3 -arch="$arch" --expt-relaxed-constexpr -I. "-DRESHARD_NCCL_LIBRARY=\"${nccl:-libnccl.so.2}\"" \
    -c "$1" -o "$build/$(echo "$1" | tr / _).o"
}
export -f compile
export nvcc arch nccl build
echo "building for $arch" >&2
printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} bash -c 'compile {}'
"$nvcc" -arch="$arch" "$build"/*.o -o "$build/bench" -ldl

if [ "${1:-}" = --sanitize ]; then
  shift
  sanitizer=$(command -v compute-sanitizer || echo "$cuda/bin/compute-sanitizer")
  [ -x "$sanitizer" ] || { echo "no compute-sanitizer beside nvcc" >&2; exit 2; }
  for tool in memcheck racecheck synccheck initcheck; do
    echo "== $tool"
    "$sanitizer" --tool "$tool" --error-exitcode 1 "$build/bench" --checks-only --no-large "$@"
  done
  exit 0
fi
date -u +%Y-%m-%d
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null || true
"$nvcc" --version | grep release
"$build/bench" "$@"
