#!/bin/bash
# Checks the format of every source (clang-format) and the program (clang-tidy).
#
#   tests/lint.sh                    all of lib, formats and tools, directories as one file: a quarter of the time,
#                                    but without clang-analyzer, which does not look into sources that another includes
#   tests/lint.sh --quarter 0|1|2|3  the same for every fourth of these files
#   tests/lint.sh --each             every source by itself, with clang-analyzer: 45 minutes of CPU
#   tests/lint.sh FILE.cc ...        these sources by themselves, with clang-analyzer
set -u -o pipefail
cd "$(dirname "$0")/.."

status=0
find lib formats tools tests samples -name '*.h' -o -name '*.cc' -o -name '*.cu' | xargs clang-format --dry-run -Werror || status=1

quarter=
[ "${1:-}" = --quarter ] && quarter=$2 && shift 2
unity=$([ $# -eq 0 ] && echo ON || echo OFF)
[ "${1:-}" = --each ] && shift
# clang-tidy cannot use another compiler's precompiled headers.
cmake --preset release -B build/lint -DCMAKE_UNITY_BUILD="$unity" -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DRESHARD_TESTS=OFF -DRESHARD_SAMPLES=OFF > /dev/null || exit 1
files=("$@")
if [ ${#files[@]} -eq 0 ]; then
  # What is compiled, without the sources that this build leaves out (no CUDA, no MPI).
  mapfile -t files < <(sed -nE 's/^ *"file": "(.*\.(cc|cxx))",?$/\1/p' build/lint/compile_commands.json | sort -u |
    awk -v quarter="$quarter" 'quarter == "" || NR % 4 == quarter')
fi
# The error stream only has the number of suppressed warnings.
printf '%s\n' "${files[@]}" | xargs -P "${RESHARD_JOBS:-2}" -n 1 clang-tidy -p build/lint --quiet 2> /dev/null || status=1
exit $status
