# SPDX-License-Identifier: Apache-2.0
"""Loads a model tensor by tensor, for loaders that take them one after another."""

import re

from . import _checkpoint
from ._errors import CorruptError
from ._load import _glob_escaped, load

_LAYER = re.compile(r".*?\.\d+\.")


def _groups(tensors, most_bytes):
    """Yields lists of source names that are loaded together.

    Tensors of one layer may become one tensor, or come from one (experts, fused projections), so a layer is not divided.
    Layers are joined up to `most_bytes`, since each load reads the metadata again.
    """
    layers = {}
    for name, nbytes in tensors:
        found = _LAYER.match(name)
        layer = layers.setdefault(found.group() if found else name, [[], 0])
        layer[0].append(name)
        layer[1] += nbytes
    names, size = [], 0
    for layer, nbytes in layers.values():
        if names and size + nbytes > most_bytes:
            yield names
            names, size = [], 0
        names, size = names + layer, size + nbytes
    if names:
        yield names


def stream(path, *, names="hf", chunk_bytes=1 << 30, framework=None, device=None, part="model", **options):
    """Yields (name, tensor) of a model, whatever the format, layout and names of the checkpoint.

    Holds about `chunk_bytes` of the model at once, or its largest layer if that is more. `options` are those of load().
    Fails (CorruptError) at the end if it has not yielded as many tensors as the model has.

    Example: model.load_weights(reshard.stream("step-1000", framework="torch"))
    """
    opening = {k: options[k] for k in ("strip_prefix", "rename", "weights", "source_layout", "source_mesh") if k in options}
    with _checkpoint.open(path, part=part, **opening) as checkpoint:
        tensors = [(name, tensor.nbytes) for name, tensor in checkpoint.items()]
    seen = set()
    for group in _groups(tensors, chunk_bytes):
        loaded = load(path, names=names, part=part, include=[_glob_escaped(n) for n in group], framework=framework,
                      device=device, **options)  # fmt: skip
        for name in list(loaded):
            if name in seen:
                raise CorruptError(f"{path}: tensor {name!r} comes from several layers of the checkpoint; use load()", path)
            seen.add(name)
            yield name, loaded.pop(name)
