"""Makes checkpoints with Google's gemma library, and what transformers' conversion script makes of them: NAME.json holds
the dtype, shape and SHA-256 of each tensor of the model, NAME.config.json is its config.json. Those of this directory are
of seed 0.

usage: make.py OUT SEED SCRIPT

SCRIPT is src/transformers/models/gemma3/convert_gemma3_weights.py of transformers' repository; it serves Gemma 2 as well.
pip install gemma==3.3.0 kauldron==1.3.0 jax==0.7.2 flax==0.12.0 orbax-checkpoint==0.11.28 typeguard==4.4.4
    sentencepiece==0.2.0
"""
import ast
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import sys
import types

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from gemma import gm
from gemma.gm.ckpts import _checkpoint
from gemma.gm.nn import _modules

OUT, SEED = pathlib.Path(sys.argv[1]).resolve(), int(sys.argv[2])
LOCAL, GLOBAL = _modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL
SMALL = {"num_embed": 24, "embed_dim": 16, "hidden_dim": 24, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2,
         "sliding_window_size": 4}
CONFIG = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "head_dim": 8,
          "num_key_value_heads": 2, "sliding_window": 4, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}


def script_function(path):
    """convert_transformer_weights of the script, without what the rest of it imports."""
    wanted = [n for n in ast.parse(pathlib.Path(path).read_text()).body
              if getattr(n, "name", "") == "convert_transformer_weights" or
              isinstance(n, ast.Assign) and n.targets[0].id.startswith("_TRANSFORMER_") and "flags" not in ast.unparse(n)]
    scope = {"np": np, "_INCLUDE_VISION_ENCODER": types.SimpleNamespace(value=False)}
    source = "from __future__ import annotations\n" + "\n".join(ast.unparse(n) for n in wanted)
    exec(source, scope)
    return scope["convert_transformer_weights"]


def random_like(tree):
    leaves, structure = jax.tree_util.tree_flatten(tree)
    keys = jax.random.split(jax.random.PRNGKey(SEED), len(leaves))
    return jax.tree_util.tree_unflatten(
        structure, [jax.random.normal(k, x.shape, jnp.bfloat16) for k, x in zip(keys, leaves)])


def write_truth(path, flat, config):
    convert = script_function(sys.argv[3])
    lines = []
    for module, values in flat.items():
        for name, value in values.items():
            for key, array in convert(types.SimpleNamespace(**config), (module, name), np.asarray(value)):
                array = np.ascontiguousarray(array)
                digest = hashlib.sha256(array.tobytes()).hexdigest()
                key = key.replace("language_model.", "")
                lines.append(f" {json.dumps(key)}: {json.dumps(['BF16', list(array.shape), digest])}")
    path.write_text("{\n" + ",\n".join(sorted(lines)) + "\n}\n")


def make(name, cls, model_type, layers, layout):
    model = cls()
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, attention_types=layers, **SMALL))
    params = random_like(jax.jit(model.init)(jax.random.PRNGKey(0), jnp.zeros((1, 4), jnp.int32))["params"])
    flat = _checkpoint._nested_to_flat(params)
    step = OUT / name
    shutil.rmtree(step, ignore_errors=True)
    if layout == "nested":
        gm.ckpts.save_params(params, str(step), wait_until_finished=True)
    else:  # as published checkpoints are
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(str(step), flat if layout == "flat" else _checkpoint._nested_to_stacked(params, 6))
    config = {**CONFIG, "model_type": model_type, "num_hidden_layers": len(layers)}
    (OUT / f"{name}.config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_truth(OUT / f"{name}.json", flat, config)


OUT.mkdir(parents=True, exist_ok=True)
make("gemma2", gm.nn.Gemma2_9B, "gemma2", (LOCAL, GLOBAL), "nested")
make("gemma3", gm.nn.Gemma3_270M, "gemma3_text", (LOCAL, LOCAL), "nested")
make("gemma3_flat", gm.nn.Gemma3_270M, "gemma3_text", (LOCAL, LOCAL), "flat")
make("gemma3_stacked", gm.nn.Gemma3_270M, "gemma3_text", (LOCAL,) * 5 + (GLOBAL, LOCAL), "stacked")
