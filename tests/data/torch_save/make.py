"""Makes the files beside it with real torch (2.15): python make.py DIRECTORY"""
import argparse
import collections
import os
import sys
import types

import torch

out = sys.argv[1]


def path(name):
    return os.path.join(out, name)


class ColoTensor(torch.Tensor):
    """Stands for colossalai.tensor.colo_tensor.ColoTensor: a subclass that adds attributes only."""


ColoTensor.__module__ = "colossalai.tensor.colo_tensor"
for name in ("colossalai", "colossalai.tensor", "colossalai.tensor.colo_tensor"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["colossalai"].tensor = sys.modules["colossalai.tensor"]
sys.modules["colossalai.tensor"].colo_tensor = sys.modules["colossalai.tensor.colo_tensor"]
sys.modules["colossalai.tensor.colo_tensor"].ColoTensor = ColoTensor


def mixed():
    base = torch.arange(24, dtype=torch.float32)
    tied = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    sub = torch.arange(4, dtype=torch.float16).as_subclass(ColoTensor)
    sub.note = "kept by the pickle, dropped by readers"
    model = collections.OrderedDict(
        view=base[4:16].reshape(3, 4),
        transposed=base.reshape(4, 6).t(),
        tied_a=tied,
        tied_b=tied,
        scalar=torch.tensor(2.5, dtype=torch.float64),
        empty=torch.zeros(0, 3, dtype=torch.int8),
        parameter=torch.nn.Parameter(torch.ones(2, dtype=torch.float32)),
        colo=sub,
        f8=torch.tensor([1.0, -2.0, 0.5], dtype=torch.float8_e4m3fn),
        u16=torch.tensor([1, 65535], dtype=torch.uint16),
        c64=torch.tensor([1 + 2j], dtype=torch.complex64),
        flags=torch.tensor([True, False, True]),
        i64=torch.tensor([-1, 1 << 40]),
    )
    model._metadata = collections.OrderedDict({"": {"version": 1}})
    return {
        "model": model,
        "epoch": 3,
        "none": None,
        "groups": [{"lr": 3e-4, "betas": (0.9, 0.95), "params": [0, 1]}],
        "state": {0: {"step": 7, "exp_avg": torch.ones(2)}, 1: {"step": torch.tensor(8.0)}},
        "pair": (torch.tensor([1, 2], dtype=torch.int32), "x"),
        "bytes": b"\x00\xff",
        "big": 1 << 80,
        "set": {1},
        "nothing": {},
    }


torch.save(mixed(), path("mixed.pt"))
torch.save(mixed(), path("mixed_legacy.pt"), _use_new_zipfile_serialization=False)
for protocol in (3, 4, 5):
    torch.save({"w": torch.arange(3)}, path(f"protocol{protocol}.pt"), pickle_protocol=protocol)
    torch.save({"w": torch.arange(3)}, path(f"protocol{protocol}_legacy.pt"), pickle_protocol=protocol,
               _use_new_zipfile_serialization=False)
torch.save(torch.arange(3), path("bare.pt"))
torch.save({"epoch": 3, "model": {"w": torch.arange(3)}}, path("nested.pt"))
torch.save({"q": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}, path("quantized.pt"))
torch.save({"s": torch.eye(3).to_sparse()}, path("sparse.pt"))
torch.save({"c": torch.tensor([1 + 2j]).conj()}, path("conj.pt"))
torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path("script.pt"))
torch.export.save(torch.export.export(torch.nn.Linear(3, 3), (torch.ones(1, 3),)), path("program.pt2"))
torch.save({"w": torch.zeros(1).expand(2**30, 2**30)}, path("expanded.pt"))
module = torch.nn.Linear(2, 1)
args = argparse.Namespace(lr=0.1, name="run")
torch.save({"model": {"w": torch.arange(3.0)}, "args": args}, path("with_args.pt"))
torch.save({"model": {"w": torch.arange(3.0)}, "head": module, "args": args}, path("with_module.pt"))
torch.save(module, path("module.pt"))
