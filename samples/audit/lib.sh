# Sourced by the samples beside it: finds the program, and runs it so that a sample fails where it does not show what it
# promises.
set -eu
cd "$(dirname "$0")/../.."

reshard=${RESHARD:-$(command -v reshard || echo build/release/reshard)}

# expect CODE TEXT OPTION...   runs `reshard check` on the config of Llama 3.1 405B; it must exit with CODE and say TEXT.
expect() {
  local code=$1 text=$2 output status=0
  shift 2
  printf '\n$ reshard check --config samples/audit/llama3-405b.json %s\n' "$*"
  output=$("$reshard" check --config samples/audit/llama3-405b.json "$@" 2>&1) || status=$?
  printf '%s\n' "$output"
  if [ "$status" -ne "$code" ] || [[ "$(tr -s ' \n' ' ' <<< "$output")" != *"$text"* ]]; then
    printf 'sample: expected exit code %s and "%s", got exit code %s\n' "$code" "$text" "$status" >&2
    exit 1
  fi
}
