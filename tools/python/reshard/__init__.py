# SPDX-License-Identifier: Apache-2.0
"""Reshard, convert, inspect and verify training checkpoints, of any format that the program `reshard` knows.

    ckpt = reshard.open("step-1000")       # a mapping: name -> Tensor, nothing read but metadata
    ckpt["layers.0.attention.wq.weight"][128:256, ::2]
    reshard.load("step-1000", into=model, names="hf")              # a torch module, FSDP2's too
    reshard.convert("step-1000", "model", to="hf", dtype="bfloat16", progress=True)
    reshard.verify("step-1000").ok

Nothing of a checkpoint is ever executed. Exceptions are below reshard.Error.
"""

from . import _reshard
from ._checkpoint import Checkpoint, Piece, Slice, Tensor, open
from ._errors import (
    CorruptError,
    Error,
    FileError,
    InternalError,
    MissingError,
    RankError,
    UnsupportedError,
    UsageError,
)

__version__ = _reshard.version

# Those are imported when they are first asked for: dataclasses take as long as all the rest.
_LAZY = {
    "_commands": ("Check", "CheckReport", "Conversion", "ConversionPlan", "DiffReport", "Finding", "Inspection", "RankMemory",
                  "TensorDifference", "TensorView", "VerifyReport", "check", "convert", "diff", "inspect", "plan", "verify"),
    "_load": ("LoadReport", "load"),
    "_more": ("Family", "Mount", "families", "latest", "merge", "mount", "synth"),
}  # fmt: skip

__all__ = [
    "Checkpoint", "CorruptError", "Error", "FileError", "InternalError", "MissingError", "Piece", "RankError", "Slice",
    "Tensor", "UnsupportedError", "UsageError", "open", *_LAZY["_commands"], *_LAZY["_load"], *_LAZY["_more"],
]  # fmt: skip


def __getattr__(name):
    for module, names in _LAZY.items():
        if name in names:
            from importlib import import_module

            value = getattr(import_module("." + module, __name__), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'reshard' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
