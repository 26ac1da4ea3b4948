#!/bin/bash
# tests/run.sh: builds the release configuration, runs its tests, and the interoperability tests against the real PyTorch
# and transformers. `tests/run.sh all` also builds the sanitized configuration, runs its tests, the tests of the Python
# package from a wheel, and the linters: everything that must hold before a change is merged. The last line counts it all.
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

# The name of a step, and the minutes and seconds since the beginning.
heading() { printf '\n== %s   [%d:%02d]\n' "$1" $((SECONDS / 60)) $((SECONDS % 60)); }

# A step that is one check: fine or not.
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

# The Python module is made of what the release is made of, where there is a Python that can.
python_options() {
  local python
  python=$(tests/interop/venv.sh) && "$python" -c "import nanobind, scikit_build_core" 2> /dev/null &&
    echo "-DRESHARD_PYTHON=ON -DRESHARD_BUNDLE=ON -DPython_EXECUTABLE=$python"
}

# Counts what ran: each test of a suite of GoogleTest, and each other test of ctest as one.
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

# Counts the tests of the script's closing line, "python: 40 passed, 0 failed, 4 skipped".
run_python() {
  heading "the Python package, from a wheel"
  local python line
  if ! python=$(tests/interop/venv.sh); then
    echo "FAILED: no python environment"
    count 0 1
    return
  fi
  RESHARD_BUILD_DIR=build/release tests/python/run.sh "$python" 2>&1 | tee "$logs/python.log"
  line=$(tail -n 1 "$logs/python.log")
  if [[ $line =~ ^python:\ ([0-9]+)\ passed,\ ([0-9]+)\ failed ]]; then
    count "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
  else
    count 0 1
  fi
}

# Counts the tests of the script's closing line, "interop: 20 passed, 1 failed, 2 skipped".
run_interop() {
  heading "interoperability with PyTorch, safetensors and transformers"
  local python line
  if ! python=$(tests/interop/venv.sh); then
    echo "FAILED: no python environment"
    count 0 1
    return
  fi
  RESHARD=$PWD/build/release/reshard "$python" -W ignore tests/interop/test_interop.py 2>&1 | tee "$logs/interop.log"
  line=$(tail -n 1 "$logs/interop.log")
  if [[ $line =~ ^interop:\ ([0-9]+)\ passed,\ ([0-9]+)\ failed ]]; then
    count "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
  else
    count 0 1
  fi
}

samples/setup.sh tests || check "packages" false
if command -v ccache > /dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi
options=()
$all && read -r -a options <<< "$(python_options)"
check "build, release" build release "${options[@]}" && run_ctest release
if [ -x build/release/reshard ]; then
  run_interop
  $all && run_python
else
  check "the reshard program" false
fi
if $all; then
  check "build, dev" build dev && run_ctest dev
  check "lint" tests/lint.sh
fi

heading "all of it"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
