#!/bin/bash
# Makes a toolchain in DIR that builds for glibc 2.28 (RHEL 8, Debian 10) on a newer Debian: `cc` and `c++` are zig's
# clang with zig's stubs of that glibc and its static libc++, and `prefix` has the headers and archives of the Debian
# packages of samples/setup.sh. /usr/include is never searched, because it describes this machine's glibc.
#
#   tools/packages/toolchain.sh PYTHON DIR      PYTHON has the package ziglang
set -u -e -o pipefail

python=$1
mkdir -p "$2"
dir=$(realpath "$2")
rm -rf "$dir/prefix"
mkdir -p "$dir/prefix/include" "$dir/prefix/lib/pkgconfig"

for mode in cc c++; do
  printf '#!/bin/sh\nexec "%s" -m ziglang %s -target x86_64-linux-gnu.2.28 -fno-sanitize=all "$@"\n' "$(realpath -s "$python")" "$mode" > "$dir/$mode"
  chmod +x "$dir/$mode"
done

multiarch=/usr/lib/$(gcc -print-multiarch)
include() { ln -s "$1" "$dir/prefix/include/"; }
include /usr/include/zstd.h
include /usr/include/zstd_errors.h
include /usr/include/zlib.h
include /usr/include/zconf.h
include /usr/include/isa-l.h
include /usr/include/isa-l
include /usr/include/nlohmann
include /usr/include/CLI
include /usr/include/fuse3
for header in /usr/include/hdf5/serial/*.h; do include "$header"; done
include "$(realpath "$multiarch/../../include/$(basename "$multiarch")/curl")"
mkdir -p "$dir/prefix/share/cmake"
cp -r /usr/share/cmake/CLI11 /usr/share/cmake/nlohmann_json "$dir/prefix/share/cmake/"  # they find headers by their own path

# Archives where Debian has them: what is linked must not need a library of this machine. ISA-L has none.
for archive in hdf5_serial zstd z sz aec; do ln -s "$multiarch/lib$archive.a" "$dir/prefix/lib/"; done
ln -s "$multiarch/libisal.so" "$dir/prefix/lib/"

# A description for pkg-config: its name, the version of Debian's, and what to link.
describe() {
  printf 'Name: %s\nDescription: %s\nVersion: %s\nCflags: -I%s\nLibs: -L%s %s\n' "$1" "$1" "$(pkg-config --modversion "$1")" \
    "$dir/prefix/include${3:-}" "$dir/prefix/lib" "$2" > "$dir/prefix/lib/pkgconfig/$1.pc"
}
describe libzstd -lzstd
describe libisal -lisal
describe zlib -lz
describe hdf5-serial "-lhdf5_serial -lsz -laec -lz -ldl -lm"
describe fuse3 "" /fuse3
describe libcurl ""
