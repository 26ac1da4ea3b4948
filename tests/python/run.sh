#!/bin/bash
# Makes a wheel and tests it twice: in a new environment that has only NumPy and no compiler, and with the torch and
# ml_dtypes of the given Python.
#
#   tests/python/run.sh PYTHON      RESHARD_BUILD_DIR: as of tools/packages/build_wheel.sh
#
# Without RESHARD_BUILD_DIR the wheel is compiled. The second test is skipped if that Python has no NumPy.
#
# The last line is `python: N passed, N failed, N skipped`.
set -u -o pipefail
cd "$(dirname "$0")/../.."

python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0 skipped=0

# Runs the tests with a command and counts them.
run() {
  local line
  line=$("$@" tests/python/test_reshard.py 2>&1 | tee >(cat >&2) | tail -n 1)
  if [[ $line =~ ^python:\ ([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped ]]; then
    passed=$((passed + BASH_REMATCH[1]))
    failed=$((failed + BASH_REMATCH[2]))
    skipped=$((skipped + BASH_REMATCH[3]))
  else
    failed=$((failed + 1))
  fi
}

install() { "$1" -m pip install --quiet --disable-pip-version-check "${@:2}"; }

if wheel=$(RESHARD_WHEELS=$work tools/packages/build_wheel.sh "$python" 2> "$work/log") &&
  "$python" -m venv "$work/venv" && install "$work/venv/bin/python" "$wheel" &&
  install "$python" --no-deps --target "$work/package" "$wheel"; then
  echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes"
  run env -i PATH="$work/venv/bin" RESHARD_INSTALLED=1 "$work/venv/bin/python" -W ignore
  if "$python" -c "import numpy" 2> /dev/null; then
    run env PYTHONPATH="$work/package" "$python" -W ignore
  fi
else
  tail -n 40 "$work/log"
  failed=1
fi
echo "python: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
