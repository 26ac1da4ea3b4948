# For the samples in this directory: finds the program and runs it. A sample fails if it does not show what it promises.
set -eu
cd "$(dirname "$0")/../.."

reshard=${RESHARD:-$(command -v reshard || echo build/release/reshard)}

# show CODE TEXT ARGUMENT...   runs reshard; it must exit with CODE and say TEXT.
show() {
  local code=$1 text=$2 output status=0
  shift 2
  printf '\n$ reshard %s\n' "$*"
  output=$("$reshard" "$@" 2>&1) || status=$?
  printf '%s\n' "$output"
  if [ "$status" -ne "$code" ] || [[ "$(tr -s ' \n' ' ' <<< "$output")" != *"$text"* ]]; then
    printf 'sample: expected exit code %s and "%s", got exit code %s\n' "$code" "$text" "$status" >&2
    exit 1
  fi
}

# expect CODE TEXT OPTION...   the same for `reshard check` on the config of Llama 3.1 405B.
expect() {
  local code=$1 text=$2
  shift 2
  show "$code" "$text" check --config samples/audit/llama3-405b.json "$@"
}

# Makes a directory that is removed when the sample ends.
make_temporary() {
  temporary=$(mktemp -d)
  trap 'rm -rf "$temporary"' EXIT
}
