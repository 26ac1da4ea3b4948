#!/bin/bash
# Measures which lines of formats/ are executed by reshard_tests, the programs that it starts, and the fuzz targets'
# inputs. Prints the share of each file, the lowest first, and lists lines that were not executed in
# build/logs/coverage.txt. Fails if the total is below 95 %. Killed and forked processes are not counted.
#
#   tests/coverage.sh [FILTER]    FILTER: tests to run (as --gtest_filter); then any share is accepted
#   tests/coverage.sh --again     print the counts of the last run
set -u -o pipefail
cd "$(dirname "$0")/.."

aim=95
jobs=${RESHARD_JOBS:-$(nproc)}
build=build/coverage
logs=build/logs
mkdir -p "$logs"

for tool in g++ gcov python3; do
  command -v $tool > /dev/null || { echo "coverage: $tool is needed (Debian: g++, python3)" >&2; exit 77; }
done

run_all() {
  local source name
  cmake --preset coverage > "$logs/configure-coverage.log" 2>&1 || { tail -n 20 "$logs/configure-coverage.log"; exit 1; }
  cmake --build --preset coverage -j "$jobs" --target reshard_tests fuzz_replay | tail -n 30 || exit 1

  # A place that the program in its sandbox may write to: the directory of its temporary files.
  rm -rf "$build/counts"
  mkdir -p "$build/counts"
  export TMPDIR=$PWD/$build/counts GCOV_PREFIX=$PWD/$build/counts GCOV_PREFIX_STRIP=0
  "$build/tests/reshard_tests" --gtest_brief=1 --gtest_filter="$1" > "$logs/coverage-tests.log" 2>&1 ||
    grep -a '  FAILED  ' "$logs/coverage-tests.log"
  for source in tests/fuzz/*_fuzz.cc; do
    name=$(basename "$source" _fuzz.cc)
    "$build/tests/fuzz/fuzz_replay" "$name" "$build/tests/fuzz/corpus/$name" > "$logs/coverage-fuzz-$name.log" 2>&1 ||
      echo "fuzz $name: failed, $logs/coverage-fuzz-$name.log"
  done
  unset TMPDIR GCOV_PREFIX GCOV_PREFIX_STRIP
}

if [ "${1:-}" = --again ]; then
  shift
else
  run_all "${1:--PackageTest.*}"  # but what is installed: the names of counts are in it
fi

# gcov expects the counts next to the compiler's notes.
find "$build/counts" -name '*.gcda' -printf '%P\n' | while read -r counts; do
  cp "$build/counts/$counts" "/$counts"
  echo "/$counts"
done | xargs gcov --json-format --stdout 2> "$logs/coverage-gcov.log" |
  python3 tests/coverage.py "$PWD" "$logs/coverage.txt" "$([ $# -gt 0 ] && echo 0 || echo $aim)"
