#!/bin/bash
# Adds inputs to the archive of a fuzz target, tests/fuzz/corpus/NAME.tar.gz. The same inputs always make the same
# archive. New inputs are named after their SHA-1, as libFuzzer does.
#
#   tests/fuzz/pack.sh NAME FILE ...               adds the files
#   tests/fuzz/pack.sh --replace NAME FILE ...     keeps these files only, for example after -set_cover_merge=1
set -eu -o pipefail

replace=
[ "${1:-}" = --replace ] && { replace=yes; shift; }
[ $# -ge 2 ] || { sed -n 's/^#   //p' "$0" >&2; exit 2; }
name=$1
shift
archive=$(cd "$(dirname "$0")" && pwd)/corpus/$name.tar.gz
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$work/$name"
if [ -z "$replace" ] && [ -e "$archive" ]; then tar -xzf "$archive" -C "$work"; fi
for file in "$@"; do
  sum=$(sha1sum < "$file")
  sum=${sum%% *}
  cp "$file" "$work/$name/new.$sum"
done
# Of inputs with the same bytes, the one that was already there stays.
for file in "$work/$name"/new.*; do
  sum=${file##*/new.}
  if find "$work/$name" -type f ! -name 'new.*' -exec sha1sum {} + | grep -q "^$sum "; then rm "$file"; else mv "$file" "$work/$name/${sum:0:12}"; fi
done
chmod -R u=rwX,go=rX "$work/$name"
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --format=ustar -C "$work" -cf - "$name" | gzip -9n > "$work/packed"
mv "$work/packed" "$archive"
echo "$archive: $(find "$work/$name" -type f | wc -l) inputs"
