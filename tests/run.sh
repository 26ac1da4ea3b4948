#!/bin/bash
# tests/run.sh: builds the release configuration, runs its tests, and the interoperability tests against the real PyTorch
# and transformers. `tests/run.sh all` also builds the sanitized configuration with a quarter of the tests, and runs
# these, a quarter of the linters' work, and the tests of the Python package from a wheel: what must hold before a change
# is merged. The last line counts it all.
#
# Needs nothing but a checkout; installs what is missing (samples/setup.sh). RESHARD_JOBS limits the processes.
set -u -o pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  "") all=false ;;
  all) all=true ;;
  *) echo "usage: tests/run.sh [all]" >&2 && exit 2 ;;
esac
jobs=${RESHARD_JOBS:-$(nproc)}
logs=build/logs
passed=0
failed=0
mkdir -p "$logs"

# Prints the name of a step, and the minutes and seconds since the beginning.
heading() { printf '\n== %s   [%d:%02d]\n' "$1" $((SECONDS / 60)) $((SECONDS % 60)); }

# Runs a step that is a single check.
check() {
  local name=$1
  shift
  heading "$name"
  if "$@"; then
    passed=$((passed + 1))
  else
    echo "FAILED: $name"
    failed=$((failed + 1))
    return 1
  fi
}

count() {
  passed=$((passed + $1))
  failed=$((failed + $2))
}

build() {
  cmake --preset "$@" > "$logs/configure-$1.log" 2>&1 && cmake --build --preset "$1" -j "$jobs" | tail -n 30
}

# If a suitable Python is found, the Python module is built from the objects of the release.
python_options() {
  [ -n "$python" ] && "$python" -c "import nanobind, scikit_build_core" 2> /dev/null &&
    echo "-DRESHARD_PYTHON=ON -DRESHARD_BUNDLE=ON -DPython_EXECUTABLE=$python"
}

# Counts the tests that ran: those of each GoogleTest suite, and each other test of ctest as one.
count_ctest() {
  awk '/^\[  PASSED  \] [0-9]+ test/ { good = $4; suite = 1 }
       /^ *[0-9]+ FAILED TESTS?$/ { bad = $1 }
       /^Test Passed[.]$/ { passed += suite ? good : 1; good = bad = suite = 0 }
       /^Test Failed[.]$/ { passed += good; failed += bad ? bad : 1; good = bad = suite = 0 }
       END { print passed + 0, failed + 0 }' "build/$1/Testing/Temporary/LastTest.log"
}

run_ctest() {
  heading "tests, $1"
  ctest --preset "$1" -j "$jobs" --timeout 900 --progress > "$logs/ctest-$1.log" 2>&1
  local status=$? counts
  read -r -a counts <<< "$(count_ctest "$1")"
  count "${counts[@]}"
  echo "${counts[0]} tests passed, ${counts[1]} failed"
  [ $status -eq 0 ] && return
  echo "-- those that failed, once more:"
  ctest --preset "$1" --rerun-failed --timeout 900 2>&1 | grep -v Skipped | tail -n 200
  [ "${counts[1]}" -gt 0 ] || count 0 1
}

# With sanitizers, tests take twice as long, and clang-tidy takes 13 minutes of CPU. So a run compiles and runs a quarter
# of the tests' files, and checks a quarter of the sources. Which ones depends on the commit, and tests/soak.sh does all.
quarter() {
  local commit
  commit=$(git rev-parse HEAD 2> /dev/null)
  echo $((16#0${commit: -4} % 4))
}

# The tests in Python use one processor for the most part, and so run beside others. Each ends with a line such as
# "interop: 20 passed, 1 failed, 2 skipped".
run_interop() { RESHARD=$PWD/build/release/reshard "$python" -W ignore tests/interop/test_interop.py > "$logs/interop.log" 2>&1; }
run_python() { RESHARD_BUILD_DIR=build/release tests/python/run.sh "$python" > "$logs/python.log" 2>&1; }

# Waits for such tests, prints what is not fine, and counts.
#
#   finish NAME PROCESS
finish() {
  local line status=0
  heading "$1, begun before"
  wait "$2" || status=$?
  grep -v '^ok ' "$logs/$1.log"
  line=$(tail -n 1 "$logs/$1.log")
  if [[ $line =~ ^$1:\ ([0-9]+)\ passed,\ ([0-9]+)\ failed ]]; then
    count "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
    [ $status -eq 0 ] || [ "${BASH_REMATCH[2]}" -gt 0 ] || count 0 1
  else
    echo "FAILED: $1 did not end"
    count 0 1
  fi
}

samples/setup.sh tests || check "packages" false
# The Python environment is made during the first build, which does not need it.
tests/interop/venv.sh > "$logs/venv" &
venv=$!
has_python() {
  [ -z "$venv" ] || wait "$venv"
  venv=
  python=$(< "$logs/venv")
  [ -n "$python" ]
}

dev=false release=false options=()
if $all; then
  check "build, dev" build dev "-DRESHARD_TESTS_QUARTER=$(quarter)" && dev=true
  has_python && read -r -a options <<< "$(python_options)"
fi
check "build, release" build release "${options[@]}" && release=true
interop=() package=()
if [ ! -x build/release/reshard ]; then
  check "the reshard program" false
elif ! has_python; then
  check "the Python environment" false
else
  run_interop &
  interop=($!)
fi
$release && run_ctest release
if $all && [ ${#interop[@]} -gt 0 ]; then
  run_python &  # which takes the program and the module from build/release
  package=($!)
fi
$dev && run_ctest dev
$all && check "lint" tests/lint.sh --quarter "$(quarter)"
for process in "${interop[@]}"; do finish interop "$process"; done
for process in "${package[@]}"; do finish python "$process"; done

heading "all of it"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
