"""Makes checkpoints with EasyDeL, and what EasyDeL's own export makes of them: NAME.json holds the dtype, shape and
SHA-256 of each tensor of the model, NAME.moment.json those of Adam's first moment. Those of this directory are of seed 0.

usage: make.py OUT SEED [KIND OPTIONS NAME]

pip install easydel==0.3.0 'jax[cpu]' torch pillow
"""
import hashlib
import json
import os
import pathlib
import shutil
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import easydel
import jax
import jax.numpy as jnp
import numpy as np
from easydel.utils.parameters_transformation import StateDictConverter
from flax import nnx

OUT, SEED = pathlib.Path(sys.argv[1]).resolve(), int(sys.argv[2])
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe",
           "mixtral": "Mixtral", "gemma": "Gemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3", "olmo2": "Olmo2",
           "olmo3": "Olmo3", "qwen2_moe": "Qwen2Moe", "phi3": "Phi3", "glm4": "Glm4", "smollm3": "SmolLM3",
           "deepseek_v3": "DeepseekV3", "gpt_oss": "GptOss", "seed_oss": "SeedOss", "cohere": "Cohere"}
SMALL = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "tie_word_embeddings": False}


def random_like(tree, seed):
    """Numbers in every array of floats, also where a model begins with ones and zeros."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    keys = jax.random.split(jax.random.PRNGKey(seed), len(leaves))
    return jax.tree_util.tree_unflatten(structure, [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves)])


def write_truth(path, model):
    """A tied head is left out: EasyDeL stores numbers for it that it does not use, and exports these."""
    lines = []
    tensors = StateDictConverter.easydel_to_torch(module=model, dtype=jnp.float32, reform_param=model._get_reform_param())
    for name, tensor in sorted(tensors.items()):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = np.ascontiguousarray(tensor.detach().numpy())
        assert array.dtype == np.float32
        lines.append(f" {json.dumps(name)}: {json.dumps(['F32', list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()])}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def adam_of(state):
    """optax's ScaleByAdamState in the trainer's chain."""
    found = [s for s in jax.tree_util.tree_leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")]
    return found[0]


def make(kind, options, name):
    config = getattr(easydel, CLASSES[kind] + ("TextConfig" if kind == "gemma3_text" else "Config"))(**{**SMALL, **options}, sharding_axis_dims=(2, 2, 1, 1, 1))
    model = getattr(easydel, CLASSES[kind] + "ForCausalLM")(
        config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    state = model.to_state()
    state = state.replace(graphstate=random_like(state.graphstate, SEED + 1))
    arguments = easydel.TrainingArguments(model_name=name, save_directory=str(OUT), clip_grad=1.0, weight_decay=0.1,
                                          learning_rate=1e-3, learning_rate_end=1e-4, optimizer="adamw", scheduler="linear")
    state = state.init_tx(arguments.get_optimizer_and_scheduler(10)[0])
    state = state.shard_state()
    state = state.apply_gradients(grads=random_like(state.graphstate, SEED + 2))
    step = OUT / name / "run-1"
    shutil.rmtree(step.parent, ignore_errors=True)
    state.save_state(str(step), save_optimizer=name != "mixtral")
    (step / "README.md").unlink()
    write_truth(OUT / f"{name}.json", state.model)
    if name != "mixtral":
        write_truth(OUT / f"{name}.moment.json", state.merge(adam_of(state).mu))


OUT.mkdir(parents=True, exist_ok=True)
if len(sys.argv) > 3:
    make(sys.argv[3], json.loads(sys.argv[4]), sys.argv[5])
else:
    make("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 1}, "qwen3")
    make("mixtral", {"num_local_experts": 3, "num_hidden_layers": 2}, "mixtral")
