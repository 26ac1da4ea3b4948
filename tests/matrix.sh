#!/bin/bash
# Builds all combinations of the parts that can be left out (MPI, CUDA, NCCL) and converts a sample with each. Names and
# skips combinations whose parts this machine lacks. RESHARD_JOBS limits the processes.
#
#   tests/matrix.sh [none|mpi|cuda|mpi-cuda|cuda-nccl|all ...]    default: each of them
set -u -o pipefail
cd "$(dirname "$0")/.."

# Prints ON if a combination ("mpi-cuda") includes a part, otherwise OFF.
has() { if [[ $1 == all || -$1- == *-$2-* ]]; then echo ON; else echo OFF; fi; }

status=0
[ $# -gt 0 ] || set -- none mpi cuda mpi-cuda cuda-nccl all
for parts; do
  build=build/matrix-$parts
  mkdir -p "$build"
  if ! cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DRESHARD_TESTS=OFF -DRESHARD_MPI="$(has "$parts" mpi)" \
    -DRESHARD_CUDA="$(has "$parts" cuda)" -DRESHARD_NCCL="$(has "$parts" nccl)" > "$build/log" 2>&1; then
    if lacking=$(grep -o 'but there is no .*' "$build/log"); then
      echo "$parts: skipped: $lacking"
    else
      tail -n 30 "$build/log"
      echo "$parts: FAILED to configure"
      status=1
    fi
    continue
  fi
  start=$SECONDS
  out=$(mktemp -d)
  if cmake --build "$build" -j "${RESHARD_JOBS:-$(nproc)}" > "$build/log" 2>&1 &&
    "$build/reshard" --version > "$build/log" 2>&1 &&
    "$build/reshard" convert samples/checkpoints/tp8/checkpoint "$out/hf" --to hf > "$build/log" 2>&1; then
    echo "$parts: built in $((SECONDS - start)) s, converts"
  else
    tail -n 30 "$build/log"
    echo "$parts: FAILED"
    status=1
  fi
  rm -rf "$out"
done
exit $status
