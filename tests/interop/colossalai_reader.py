"""Loads model directories with ColossalAI's own checkpoint_io, and compares each with its safetensors file.

    python colossalai_reader.py SOURCE_OF_COLOSSALAI DIRECTORY SAFETENSORS ...

ColossalAI as a whole wants a GPU stack of its own; its index and shard readers are plain torch. So only the package
colossalai.checkpoint_io is the real one here, and whatever else it imports is a stand-in that does nothing.
"""
import importlib
import importlib.machinery
import pathlib
import sys
import types
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file

REAL = "colossalai.checkpoint_io"
STAND_INS = ("colossalai", "peft", "tensornvme", "einops", "galore_torch", "bitsandbytes")


class StandIns:
    """Finds a module that does nothing for everything but the real package."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STAND_INS and not name.startswith(REAL):
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module

    def exec_module(self, module):
        pass


def main():
    source, *pairs = map(pathlib.Path, sys.argv[1:])
    sys.meta_path.insert(0, StandIns())
    importlib.import_module("colossalai")
    package = types.ModuleType(REAL)
    package.__path__ = [str(source / "colossalai/checkpoint_io")]
    sys.modules[REAL] = package
    index_file = importlib.import_module(REAL + ".index_file")
    utils = importlib.import_module(REAL + ".utils")
    for directory, wanted in zip(pairs[::2], pairs[1::2]):
        has_index, path = utils.has_index_file(str(directory))
        assert has_index, f"{directory}: no index"
        files, _ = index_file.CheckpointIndexFile.from_file(path).get_checkpoint_filenames()
        got = {}
        for file in map(pathlib.Path, files):
            got.update(utils.load_shard_state_dict(file, file.suffix == ".safetensors"))
        wanted = load_file(wanted)
        assert sorted(got) == sorted(wanted), f"{directory}: {sorted(set(got) ^ set(wanted))}"
        for name, tensor in wanted.items():
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), f"{directory}: {name}"


if __name__ == "__main__":
    main()
