#!/bin/bash
# Prints the compiled kernels' registers, spilled bytes, instructions and width of reads. Fails if a kernel
# spills. Needs nvcc and cuobjdump (on the PATH, in $CUDA_HOME/bin, or $CUOBJDUMP), which needs
# nvdisasm; no GPU.
#
#   tests/cuda/sass.sh [OBJECT]        an object of kernels.cu; default: compiled here for CUDA_ARCH (sm_90)
#
# "loop": instructions of the loop with the most reads of global memory; "/ word": of it for each of these reads.
# A loop with several ways through it, such as a conversion's, counts all of them.
set -eu -o pipefail
cd "$(dirname "$0")/../.."
home=${CUDA_HOME:-/usr/local/cuda}
cuobjdump=${CUOBJDUMP:-$(command -v cuobjdump || echo "$home/bin/cuobjdump")}
[ -x "$cuobjdump" ] || { echo "no cuobjdump: put it on the PATH or set CUOBJDUMP" >&2; exit 2; }
work=$(mktemp -d "${TMPDIR:-/tmp}/reshard-sass-XXXXXX")
trap 'rm -rf "$work"' EXIT
object=${1:-}
arch=${CUDA_ARCH:-sm_90}
if [ -z "$object" ]; then
  nvcc=$(command -v nvcc || echo "$home/bin/nvcc")
  [ -x "$nvcc" ] || { echo "no nvcc: put it on the PATH or set CUDA_HOME" >&2; exit 2; }
  object=$work/kernels.o
  "$nvcc" -std=c++20 -O3 -arch="$arch" --expt-relaxed-constexpr -I. -c lib/device/cuda/kernels.cu -o "$object"
fi
"$cuobjdump" -arch "$arch" -res-usage "$object" > "$work/usage" 2>&1
"$cuobjdump" -arch "$arch" -sass "$object" > "$work/sass"
printf '| %-62s | %4s | %5s | %6s | %6s | %6s |\n' kernel regs spill loop 128-b '/ word'
echo '| --- | ---: | ---: | ---: | ---: | ---: |'
awk '
  FNR == NR {
    if ($1 == "Function") { name = $2; sub(/:$/, "", name) }
    for (i = 1; i <= NF; ++i) {
      if ($i ~ /^REG:/) regs[name] = substr($i, 5)
      if ($i ~ /^STACK:/) stack[name] = substr($i, 7)
      if ($i ~ /^LOCAL:/) spill[name] = substr($i, 7)
    }
    next
  }
  $1 == "Function" { name = $3; order[++n] = name; at = 0; split("", place) }
  /^ +\/\*[0-9a-f]+\*\/ / {
    ++at
    place[$1] = at
    reads[at] = reads[at - 1] + (/ LDG/ ? 1 : 0)
    if (/ LDG.*128| STG.*128/) ++wide[name]
    if (/ BRA / && match($0, /0x[0-9a-f]+/)) {
      to = sprintf("/*%4s*/", substr($0, RSTART + 2, RLENGTH - 2))
      gsub(/ /, "0", to)
      if (to in place && place[to] < at) {
        r = reads[at] - reads[place[to] - 1]
        if (r > most[name]) { most[name] = r; loop[name] = at - place[to] + 1 }
      }
    }
  }
  END {
    for (i = 1; i <= n; ++i) {
      k = order[i]
      each = most[k] > 0 ? sprintf("%.1f", loop[k] / most[k]) : "-"
      printf "%s\t%d\t%d\t%d\t%d\t%s\n", k, regs[k], spill[k] + stack[k], loop[k], wide[k], each
    }
  }' "$work/usage" "$work/sass" | c++filt | sed 's/reshard:://g; s/(anonymous namespace):://g; s/^void //; s/([^\t]*\t/\t/' |
  awk -F '\t' '
    { printf "| %-62s | %4d | %5d | %6d | %6d | %6s |\n", $1, $2, $3, $4, $5, $6; if ($3 > 0) spills = 1 }
    END { exit spills }'
