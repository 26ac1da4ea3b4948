#!/usr/bin/env python3
"""What orbax-checkpoint does, for orbax_bench.py. Run by a Python that has jax, orbax-checkpoint and safetensors.

  tests/bench/peer_orbax.py save SRC DST      restores an item and saves it again, in chunks of zstd (zarr 3)
  tests/bench/peer_orbax.py convert SRC DST   restores a scanned Llama of MaxText and writes Hugging Face's tensors

The second is the least that MaxText's to_huggingface does: without loading MaxText, a model or a tokenizer.
"""
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402


def save(source, destination):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as saver:
        saver.save(os.path.abspath(destination), args=ocp.args.PyTreeSave(restore(source)))


def restore(source):
    return ocp.PyTreeCheckpointer().restore(os.path.abspath(source))


def projections(layers, i):
    attention, mlp = layers["self_attention"], layers["mlp"]
    query = attention["query"]["kernel"][:, i]
    width = query.shape[0]
    scale = np.float32(np.sqrt(query.shape[-1]))
    query = (query.astype(np.float32) * scale).astype(query.dtype)
    yield "self_attn.q_proj", query.reshape(width, -1).T
    yield "self_attn.k_proj", attention["key"]["kernel"][:, i].reshape(width, -1).T
    yield "self_attn.v_proj", attention["value"]["kernel"][:, i].reshape(width, -1).T
    yield "self_attn.o_proj", attention["out"]["kernel"][:, i].reshape(-1, width).T
    for name, stored in ("gate_proj", "wi_0"), ("up_proj", "wi_1"), ("down_proj", "wo"):
        yield f"mlp.{name}", mlp[stored]["kernel"][:, i].T
    yield "input_layernorm", layers["pre_self_attention_layer_norm"]["scale"][:, i]
    yield "post_attention_layernorm", layers["post_self_attention_layer_norm"]["scale"][:, i]


def convert(source, destination):
    from safetensors.numpy import save_file
    params = restore(source)["params"]["params"]
    decoder = params["decoder"]
    out = {"model.embed_tokens.weight": params["token_embedder"]["embedding"],
           "model.norm.weight": decoder["decoder_norm"]["scale"]}
    if "logits_dense" in decoder:
        out["lm_head.weight"] = decoder["logits_dense"]["kernel"].T
    for i in range(decoder["layers"]["mlp"]["wo"]["kernel"].shape[1]):
        for name, array in projections(decoder["layers"], i):
            out[f"model.layers.{i}.{name}.weight"] = array
    os.makedirs(destination)
    save_file({name: np.ascontiguousarray(array) for name, array in out.items()}, f"{destination}/model.safetensors")


if __name__ == "__main__":
    {"save": save, "convert": convert}[sys.argv[1]](*sys.argv[2:])
