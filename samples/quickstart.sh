#!/bin/bash
# Goes from a clean checkout to a converted checkpoint: builds reshard if necessary, inspects a tensor-parallel training
# checkpoint, converts it to Hugging Face safetensors, and verifies that both have the same values.
#
#   samples/quickstart.sh [DIRECTORY]    writes DIRECTORY (must not exist); default: a fresh temporary one
set -eu
cd "$(dirname "$0")/.."

run() {
  printf '\n$ %s\n' "$*"
  "$@"
}

out=${1:-$(mktemp -d)/tp8-hf}
samples/setup.sh
if ! { cmake --preset release -DRESHARD_TESTS=OFF && cmake --build --preset release --target reshard; } > /dev/null; then
  echo "quickstart: the build failed; cmake --build --preset release says why" >&2
  exit 1
fi
run build/release/reshard inspect samples/checkpoints/tp8/checkpoint
run build/release/reshard convert samples/checkpoints/tp8/checkpoint "$out" --to hf
run build/release/reshard verify samples/checkpoints/tp8/checkpoint --against "$out"
