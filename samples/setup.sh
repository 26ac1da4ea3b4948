#!/bin/bash
# Installs missing Debian or Ubuntu packages.
#
#   samples/setup.sh          packages for building
#   samples/setup.sh tests    also packages for the tests and the linters
#   samples/setup.sh soak     also OpenStack Swift, for tests/storage/swift.sh: a hundred packages
set -u

packages=(g++ cmake ninja-build pkg-config libcli11-dev nlohmann-json3-dev libzstd-dev libisal-dev zlib1g-dev libhdf5-dev
          libopenmpi-dev openmpi-bin libfuse3-dev fuse3 libcurl4-openssl-dev)
tests=false
[[ ${1:-} != tests && ${1:-} != soak ]] || tests=true
if $tests; then
  packages+=(libgtest-dev libgmock-dev python3 python3-dev python3-venv clang clang-format clang-tidy lld libclang-rt-14-dev time iproute2)
fi

# A browser for the tests of HTML reports, which are skipped without one. Not every distribution packages it.
if $tests && ! command -v chromium > /dev/null && apt-cache policy chromium 2> /dev/null | grep -q 'Candidate: [0-9]'; then
  packages+=(chromium)
fi

if [ "${1:-}" = soak ]; then
  packages+=(swift swift-proxy swift-account swift-container swift-object memcached)
fi

if ! command -v dpkg-query > /dev/null; then
  echo "setup: this is not Debian or Ubuntu; the equivalents of these packages are needed: ${packages[*]}" >&2
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -eq 0 ]; then
  as_root=()
elif command -v sudo > /dev/null; then
  as_root=(sudo)
else
  echo "setup: packages are missing, and installing them needs root or sudo: apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -q > /dev/null || exit 1
"${as_root[@]}" apt-get install -q -y --no-install-recommends "${missing[@]}" > /dev/null || exit 1
