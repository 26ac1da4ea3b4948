"""Loads and saves workers' state with vLLM's own ShardedStateLoader.

    python vllm_loader.py SOURCE_OF_VLLM DIRECTORY STATES BACK

STATES is a torch.save file {(stage, rank): {name: tensor}} of what the workers' modules hold. Each is made with other values,
loaded from DIRECTORY and compared; then saved to BACK. vLLM as a whole wants a GPU stack of its own; its loader is plain
torch and safetensors. So only that file is the real one here, and what it imports is a stand-in that does nothing.
"""
import importlib.util
import pathlib
import sys
import types
from unittest.mock import MagicMock

import torch

NAME = "vllm.model_executor.model_loader.sharded_state_loader"


def sharded_state_loader(source, stages, ranks):
    """The class of the file, and a list whose one member is the worker that it takes itself for, (stage, rank)."""
    worker = [(0, 0)]
    made = {}

    def stand_in(name, **members):
        made[name] = types.ModuleType(name)
        made[name].__dict__.update(members)

    class BaseModelLoader:
        def __init__(self, load_config):
            self.load_config = load_config

    parts = NAME.split(".")
    for i in range(1, len(parts)):
        stand_in(".".join(parts[:i]), __path__=[])
    stand_in("vllm.config", ModelConfig=object, __path__=[])
    stand_in("vllm.config.load", LoadConfig=object)
    stand_in("vllm.logger", init_logger=MagicMock())
    stand_in("vllm.distributed", get_tensor_model_parallel_rank=lambda: worker[0][1],
             get_pipeline_model_parallel_rank=lambda: worker[0][0],
             get_pp_group=lambda: types.SimpleNamespace(world_size=stages),
             get_tp_group=lambda: types.SimpleNamespace(world_size=ranks))
    stand_in("vllm.model_executor.model_loader.base_loader", BaseModelLoader=BaseModelLoader)
    stand_in("vllm.model_executor.model_loader.weight_utils", download_weights_from_hf=None,
             runai_safetensors_weights_iterator=None)
    stand_in("vllm.transformers_utils", __path__=[])
    stand_in("vllm.transformers_utils.s3_utils", glob=None)
    stand_in("vllm.transformers_utils.utils", is_s3=lambda path: False)
    sys.modules.update(made)
    spec = importlib.util.spec_from_file_location(NAME, source / (NAME.replace(".", "/") + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ShardedStateLoader, worker


def module_of(state):
    """A module whose state_dict has these names, and other values."""
    root = torch.nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        if last.endswith("_scale"):
            at.register_buffer(last, torch.full_like(tensor, 7))
        else:
            at.register_parameter(last, torch.nn.Parameter(torch.full_like(tensor, 7), requires_grad=False))
    return root


def main():
    source, directory, states, back = map(pathlib.Path, sys.argv[1:])
    states = torch.load(states)
    stages, ranks = (1 + max(worker[i] for worker in states) for i in (0, 1))
    loader_class, taken = sharded_state_loader(source, stages, ranks)
    loader = loader_class(types.SimpleNamespace(load_format="sharded_state", model_loader_extra_config=None))
    model_config = types.SimpleNamespace(model=str(directory), model_weights=None)
    for worker, state in states.items():
        taken[0] = worker
        module = module_of(state)
        loader.load_weights(module, model_config)
        got = module.state_dict()
        assert got.keys() == state.keys(), got.keys() ^ state.keys()
        for name, tensor in state.items():
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), (worker, name)
        loader_class.save_model(module, str(back), max_size=100_000)


if __name__ == "__main__":
    main()
