"""Makes checkpoints with Levanter, and what Levanter's own export makes of them: NAME.json holds the dtype, shape and
SHA-256 of each tensor of the model, NAME.moment.json those of Adam's first moment, NAME.config.json is the model's
config.json. Those of this directory are of seed 0.

usage: make.py OUT SEED [KIND OPTIONS NAME]

pip install --pre marin-levanter==0.2.20.dev202606180959 gitpython
"""
import dataclasses
import hashlib
import importlib
import json
import os
import pathlib
import shutil
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import equinox as eqx
import haliax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax.state_dict import to_torch_compatible_state_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.checkpoint import save_checkpoint
from levanter.optim import AdamConfig
from levanter.trainer_state import TrainerState

OUT, SEED = pathlib.Path(sys.argv[1]).resolve(), int(sys.argv[2])
CONFIGS = {"llama": ("llama", "LlamaConfig"), "mistral": ("mistral", "MistralConfig"), "qwen2": ("qwen", "QwenConfig"),
           "qwen3": ("qwen", "Qwen3Config"), "gpt2": ("gpt2", "Gpt2Config"), "mixtral": ("mixtral", "MixtralConfig"),
           "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig"), "olmo2": ("olmo", "Olmo2Config"),
           "olmo3": ("olmo3", "Olmo3Config"), "gemma": ("gemma", "GemmaConfig"), "gemma2": ("gemma", "Gemma2Config"),
           "gemma3": ("gemma", "Gemma3Config"), "apertus": ("apertus", "ApertusConfig")}
SMALL = {"max_seq_len": 32, "hidden_dim": 16, "intermediate_dim": 24, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
         "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_dim": 8}
VOCABULARY = 24


def config_of(kind, options):
    module, name = CONFIGS[kind]
    cls = getattr(importlib.import_module("levanter.models." + module), name)
    members = {field.name for field in dataclasses.fields(cls)}
    return cls(**{k: v for k, v in SMALL.items() if k in members} | options)


def random_like(tree, seed):
    """Numbers in every array of floats, also where a model begins with ones and zeros."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    keys = jax.random.split(jax.random.PRNGKey(seed), len(leaves))
    return jax.tree_util.tree_unflatten(structure, [
        jax.random.normal(k, x.shape, jnp.float32) if eqx.is_inexact_array(x) else x for k, x in zip(keys, leaves)])


def cut(tree):
    """Divides each array among four devices, along the first axis that allows it."""
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def put(x):
        if not eqx.is_array(x):
            return x
        axis = next((d for d, n in enumerate(x.shape) if n and n % 4 == 0), None)
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "data")))

    return jax.tree_util.tree_map(put, tree)


def write_truth(path, model):
    lines = []
    for name, array in sorted(to_torch_compatible_state_dict(model).items()):
        array = np.ascontiguousarray(np.asarray(array))
        assert array.dtype == np.float32
        lines.append(f" {json.dumps(name)}: {json.dumps(['F32', list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()])}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def moments_of(state):
    """Adam's first moment, as a model."""
    found = [s for s in jax.tree_util.tree_leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")]
    return found[0].mu


def make(kind, options, name):
    config = config_of(kind, options)
    vocabulary = haliax.Axis("vocab", VOCABULARY)
    key = jax.random.PRNGKey(SEED)
    model = random_like(config.model_type.init(vocabulary, config, key=key), SEED + 1)
    optimizer = AdamConfig(learning_rate=1e-3).build(10)
    state = TrainerState.init(optimizer, model, key=key, is_trainable=True, mp=jmp.get_policy("f32"))
    parameters = eqx.filter(state.trainable_model, eqx.is_inexact_array)
    updates, opt_state = optimizer.update(random_like(parameters, SEED + 2), state.opt_state, params=parameters)
    state = cut(dataclasses.replace(state, opt_state=opt_state, model=eqx.apply_updates(state.model, updates),
                                    step=jnp.array(1)))
    step = OUT / name / "step-1"
    shutil.rmtree(step.parent, ignore_errors=True)
    save_checkpoint(state, step=1, checkpoint_path=str(step))
    config.to_hf_config(VOCABULARY).save_pretrained(OUT)
    (OUT / "config.json").rename(OUT / f"{name}.config.json")
    (OUT / "generation_config.json").unlink(missing_ok=True)
    write_truth(OUT / f"{name}.json", state.model)
    write_truth(OUT / f"{name}.moment.json", moments_of(state))


OUT.mkdir(parents=True, exist_ok=True)
if len(sys.argv) > 3:
    make(sys.argv[3], json.loads(sys.argv[4]), sys.argv[5])
else:
    make("llama", {}, "llama")
    make("qwen3", {"tie_word_embeddings": True, "scan_layers": False, "head_dim": 8}, "qwen3_unscanned")
    make("gpt2", {"num_layers": 2}, "gpt2")
    make("mixtral", {"num_layers": 2}, "mixtral")
