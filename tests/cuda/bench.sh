#!/bin/bash
# Checks a GPU against the CPU and prints rates, each next to the limit that the same run measured.
# Needs this tree, nvcc (on the PATH or in $CUDA_HOME/bin) and a GPU; no network. Exit codes: 0 all checks hold, 1 one
# failed (the rates are printed anyway), 2 it cannot be run, 77 there is no GPU.
#
#   tests/cuda/bench.sh [option ...] [option of the program ...]        bench --help lists the latter
#
#   --programs DIR   where load_cuda and reshard are, for loads through the engine (default: build/release, if built;
#                    tests/cuda/pack.sh makes a folder of them for a machine without their libraries)
#   --model NAME     what is loaded: a model that reshard synth knows (default: llama3-8b, 16 GB, made twice in --dir)
#   --dir DIR        where files are made (default: /tmp)
#   --no-load        no loads through the engine
#   --bench PROGRAM  a bench that was built before
#   --sanitize       instead check our kernels under compute-sanitizer's tools; no rates
#   --build-only     only see that it builds, which needs no GPU
#
# NCCL is searched in $NCCL_HOME or, if that is not set, next to CUDA, in the system and in a Python package. Without it
# the exchange is left out. CUDA_ARCH (sm_90) is the architecture to build for; default: that of this GPU.
set -eu -o pipefail
cd "$(dirname "$0")/../.."

programs= model=llama3-8b dir=/tmp load=yes bench= sanitize= build_only= loads=3
options=()
while [ $# -gt 0 ]; do
  case $1 in
    --programs) programs=$2; shift ;;
    --model) model=$2; shift ;;
    --dir) dir=$2; options+=("$1" "$2"); shift ;;
    --no-load) load= ;;
    --bench) bench=$2; shift ;;
    --sanitize) sanitize=yes ;;
    --build-only) build_only=yes ;;
    *) options+=("$1") ;;
  esac
  shift
done

build=$(mktemp -d "${TMPDIR:-/tmp}/reshard-cuda-XXXXXX")
trap 'rm -rf "$build"' EXIT

if [ -z "$bench" ]; then
  if [ -z "$build_only" ] && ! nvidia-smi -L > /dev/null 2>&1 && [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ]; then
    echo "no device: neither nvidia-smi nor /dev/nvidiactl knows a GPU; nothing was built or measured" >&2
    exit 77
  fi
  nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
  [ -x "$nvcc" ] || { echo "no nvcc: put it on the PATH or set CUDA_HOME" >&2; exit 2; }
  cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
  python_nccl=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2> /dev/null || true)
  nccl= header=
  for place in ${NCCL_HOME:-"$cuda" /usr /usr/local ${python_nccl:+"$python_nccl"}}; do
    [ -n "$header" ] || header=$(ls "$place"/include/nccl.h 2> /dev/null || true)
    [ -n "$nccl" ] || nccl=$(ls "$place"/lib*/libnccl.so.2 "$place"/lib/*/libnccl.so.2 2> /dev/null | head -n 1 || true)
  done
  transport=nccl
  [ -n "$header" ] || { transport=nccl_absent; echo "no nccl.h: the exchange is left out" >&2; }
  arch=${CUDA_ARCH:-}
  if [ -z "$arch" ]; then
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d '. ' || true)
    arch=sm_${capability:-90}
  fi
  sources=(tests/cuda/bench.cc tests/support/{device_checks,exchange_checks,local_ranks,one_gpu_ranks}.cc
    lib/device/{convert,copy,cpu_device,device,digest}.cc lib/device/cuda/{context,cuda_device,cufile,pinned}.cc
    lib/device/cuda/kernels.cu lib/transport/{collectives,nccl_members,$transport}.cc lib/layout/{box,dtype}.cc
    lib/base/{cursor,file,machine,memory_limit,parallel,sandbox,syscalls,text}.cc lib/base/storage/url.cc
    tests/cuda/no_storage.cc)
  compile() {
    "$nvcc" -std=c++20 -O3 -arch="$arch" --expt-relaxed-constexpr -I. ${header:+-I"$(dirname "$header")"} \
      "-DRESHARD_NCCL_LIBRARY=\"${nccl:-libnccl.so.2}\"" -c "$1" -o "$build/$(echo "$1" | tr / _).o"
  }
  export -f compile
  export nvcc arch nccl header build
  echo "building for $arch" >&2
  printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} bash -c 'compile {}'
  "$nvcc" -arch="$arch" "$build"/*.o -o "$build/bench" -ldl
  bench=$build/bench
fi
[ -z "$build_only" ] || exit 0

# On one machine NCCL does not need to search for networks.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} NCCL_DEBUG=${NCCL_DEBUG:-WARN}

if [ -n "$sanitize" ]; then
  sanitizer=$(command -v compute-sanitizer || echo "${cuda:-/usr/local/cuda}/bin/compute-sanitizer")
  [ -x "$sanitizer" ] || { echo "no compute-sanitizer beside nvcc" >&2; exit 2; }
  for tool in memcheck racecheck synccheck initcheck; do
    echo "== $tool"
    # NCCL's own kernels synchronise in ways that racecheck and synccheck do not know.
    "$sanitizer" --tool "$tool" --error-exitcode 1 "$bench" --checks-only --no-large --no-exchange \
      ${options[@]+"${options[@]}"}
  done
  exit 0
fi

date -u +%Y-%m-%d
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null || true
nproc | sed 's/$/ cores/'
[ -z "${nvcc:-}" ] || "$nvcc" --version | grep release
code=0
"$bench" ${options[@]+"${options[@]}"} | tee "$build/out" || code=$?
[ "$code" -le 1 ] || exit "$code"
[ -n "$load" ] || exit "$code"

# ---- loads through the engine

if [ -z "$programs" ]; then
  for candidate in build/release build/release/samples/programs; do
    [ ! -x $candidate/load_cuda ] || programs=$candidate
  done
fi
find_program() { ls "$programs/$1" "$programs/samples/programs/$1" "$programs/../../$1" 2> /dev/null | head -n 1 || true; }
reshard=$(find_program reshard) load_cuda=$(find_program load_cuda)
if [ -z "$programs" ] || [ -z "$reshard" ] || [ -z "$load_cuda" ]; then
  printf '\nloads through the engine: not here: no load_cuda and reshard in %s\n' "${programs:-build/release}"
  exit "$code"
fi
[ ! -d "$programs/lib" ] || export LD_LIBRARY_PATH=$programs/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

read -r cached cold <<< "$(awk '/^limits of a load: / { print $(NF - 4), $(NF - 1) }' "$build/out")"
work=$(mktemp -d "$dir/reshard-load-XXXXXX")
trap 'rm -rf "$build" "$work"' EXIT
printf '\n| %-52s | %8s | %s |\n| --- | ---: | ---: |\n' "load of $model through the engine" "GB/s" "of the slower of files and transfer"
# "load 2: 16.1 GB in 0.512 s, 31.37 GB/s on cuda:0 ..." -> a row with the best of some loads, next to its limit.
row() {
  awk -v what="$1" -v limit="${2:-0}" '
    /^load [0-9]+: / { for (i = 1; i <= NF; ++i) if ($i == "GB/s" && $(i - 1) > rate) rate = $(i - 1) }
    END {
      if (!rate) { printf "| %-52s | FAILED | |\n", what; exit 1 }
      printf "| %-52s | %8.2f | %s |\n", what, rate, (limit > 0 ? sprintf("%5.1f %%", 100 * rate / limit) : "-")
    }'
}
for shape in hf dcp-tp8; do
  case $shape in
    hf) args=(--to hf) ;;
    *) args=(--mesh tp=8) ;;
  esac
  rm -rf "$work"/*
  if ! "$reshard" synth "$work/model" "${args[@]}" --model "$model" --memory 2GiB --quiet; then
    printf '| %-52s | FAILED | |\n' "$shape: synth"
    code=1
    continue
  fi
  # Drops files from the page cache, as far as the kernel permits.
  find "$work/model" -type f -exec dd if={} iflag=nocache count=0 status=none \; || true
  "$load_cuda" "$work/model" --memory 2GiB --time 1 > "$work/out" 2> "$work/err" || cat "$work/err" >&2
  row "$shape, cold" "${cold:-}" < "$work/out" || code=1
  # A load reads what is not cached past the cache.
  find "$work/model" -type f -exec cat {} + > /dev/null
  for threads in 8 16 32; do
    "$load_cuda" "$work/model" --memory 2GiB --threads $threads --time $loads > "$work/out" 2> "$work/err" ||
      cat "$work/err" >&2
    row "$shape, page cache, $threads threads" "${cached:-}" < "$work/out" || code=1
  done
done
exit "$code"
