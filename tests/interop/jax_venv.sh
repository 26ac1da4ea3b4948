#!/bin/bash
# Prints the path of a python that has jax and orbax-checkpoint, in an environment outside the checkout that is made
# on the first call (about 500 MB). RESHARD_JAX_PYTHON names one of your own.
set -u

[ -n "${RESHARD_JAX_PYTHON:-}" ] && echo "$RESHARD_JAX_PYTHON" && exit
venv=${XDG_CACHE_HOME:-$HOME/.cache}/reshard/jax-venv
python=$venv/bin/python
if ! "$python" -c "import jax, orbax.checkpoint" > /dev/null 2>&1; then
  echo "interop: making a python environment in $venv (once; a minute)" >&2
  mkdir -p "$(dirname "$venv")" && python3 -m venv "$venv" || exit 1
  "$python" -m pip install --quiet --disable-pip-version-check jax orbax-checkpoint >&2 || exit 1
fi
echo "$python"
