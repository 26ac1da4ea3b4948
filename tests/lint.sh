#!/bin/bash
# The form (clang-format) of every source and what clang-tidy finds in the program.
#
#   tests/lint.sh [FILE.cc ...]    default: all of lib, formats and tools
set -u -o pipefail
cd "$(dirname "$0")/.."

status=0
find lib formats tools tests samples -name '*.h' -o -name '*.cc' -o -name '*.cu' | xargs clang-format --dry-run -Werror || status=1

# Another compiler's precompiled headers are nothing to clang-tidy. Files that are named are looked at by themselves.
unity=$([ $# -eq 0 ] && echo ON || echo OFF)
cmake --preset release -B build/lint -DCMAKE_UNITY_BUILD="$unity" -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DRESHARD_TESTS=OFF -DRESHARD_SAMPLES=OFF > /dev/null || exit 1
files=("$@")
if [ ${#files[@]} -eq 0 ]; then
  # What is compiled: a directory's sources together, without those that this build leaves out (no CUDA, no MPI).
  mapfile -t files < <(sed -nE 's/^ *"file": "(.*\.(cc|cxx))",?$/\1/p' build/lint/compile_commands.json | sort -u)
fi
# clang-tidy counts the warnings it suppressed on the error stream; those are of no interest.
printf '%s\n' "${files[@]}" | xargs -P "${RESHARD_JOBS:-2}" -n 1 clang-tidy -p build/lint --quiet 2> /dev/null || status=1
exit $status
