# SPDX-License-Identifier: Apache-2.0
"""Loads a model tensor by tensor, for loaders that take them one after another."""

import re

from . import _checkpoint, _reshard
from ._errors import CorruptError, UnsupportedError
from ._load import _Layout, load
from ._words import glob_escaped, path_of, words_of

_LAYER = re.compile(r".*?\.\d+\.")
_OF_OPEN = ("strip_prefix", "rename", "weights", "source_layout", "source_mesh")
_OF_VIEW = ("config", "family", "family_file", "include", "exclude", "keep_unknown")
_OF_CALL = ("rank", "strict", "check_whole_items", "progress")  # options of load() that are no words of the command
_COMPARED = 16 << 20  # bytes of two tied tensors that are compared at once


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
    Fails (CorruptError) at the end if it has not yielded each tensor of the model.

    Example: model.load_weights(reshard.stream("step-1000", framework="torch"))
    """
    opening = {k: options[k] for k in _OF_OPEN if k in options}
    with _checkpoint.open(path, part=part, **opening) as checkpoint:
        tensors = [(name, tensor.nbytes) for name, tensor in checkpoint.items()]
    seen = set()
    for group in _groups(tensors, chunk_bytes):
        loaded = load(path, names=names, part=part, include=[glob_escaped(n) for n in group], framework=framework,
                      device=device, **options)  # fmt: skip
        for name in list(loaded):
            if name in seen:
                raise CorruptError(f"{path}: tensor {name!r} comes from several layers of the checkpoint; use load()", path)
            seen.add(name)
            yield name, loaded.pop(name)
    _check_all_seen(path, seen, dict(options, names=names, part=part))


def _check_all_seen(path, seen, options):
    """Fails if tensors of the model are not among those that its layers made."""
    words = words_of({name: value for name, value in options.items() if name not in _OF_CALL})
    with _Layout(None, {"mesh": options.get("mesh")}, options.get("rank")) as rank:
        tensors = _reshard.Load.prepare(path_of(path), words, rank, "cpu", False).tensors()
    missing = [t[0] for t in tensors if t[0] not in seen]
    if missing:
        raise CorruptError(f"{path}: the layers of the checkpoint do not make tensor {missing[0]!r} of the model"
                           f" ({len(missing)} missing); use load()", path, missing[0])  # fmt: skip


def lazy_stream(path, *, count=lambda nbytes: None, names="hf", chunk_bytes=1 << 30, part="model", **options):
    """Yields the tensors of stream(framework="torch") as LazyTensors, which read only the part that is used.

    Tensors that must be computed, or that options such as dtype= change, are read as stream() does. `count` is called with
    the number of bytes of each read.
    """
    viewed = _viewed(path, names, part, options)
    if viewed is None:
        for name, tensor in stream(path, names=names, chunk_bytes=chunk_bytes, framework="torch", part=part, **options):
            count(tensor.nbytes)
            yield name, tensor
        return
    from ._lazy import lazy_tensor

    for tensor in viewed:
        yield tensor.name, lazy_tensor(tensor, count)


def _viewed(path, names, part, options):
    """Returns the tensors of a load with these options as tensors of a view, or None if a view does not have them all."""
    if set(options) - {*_OF_OPEN, *_OF_VIEW, "memory", "threads"}:
        return None
    words = words_of(dict(options, names=names, part=part))
    loaded = {name: facts for name, *facts in _reshard.Load.prepare(path_of(path), words, 0, "cpu", False).tensors()}
    checkpoint = _checkpoint.open(path, part=part, **{k: v for k, v in options.items() if k in _OF_OPEN})
    try:
        view = checkpoint.view(names=names, **{k: v for k, v in options.items() if k in _OF_VIEW})
    except UnsupportedError:
        return None
    if any(name not in view or (view[name].dtype, view[name].shape) != tuple(facts[:2]) for name, facts in loaded.items()):
        return None
    for name in view:
        if name not in loaded:
            _check_tied(view, name, loaded)
    return [view[name] for name in loaded]


def _check_tied(view, name, loaded):
    """Fails if a tensor that a load leaves out, because the model has it twice, is equal to no other."""
    tensor = view[name]
    others = [view[other] for other in loaded if (view[other].dtype, view[other].shape) == (tensor.dtype, tensor.shape)]
    if not any(_equal(tensor, other) for other in others):
        raise CorruptError(f"{view.path}: tensor {name!r} is equal to no other of its shape, but the model ties it to one; "
                           "if it is not tied, set tie_word_embeddings in config.json to false", view.path, name)  # fmt: skip


def _equal(a, b):
    rows = max(1, _COMPARED // max(1, a.nbytes // max(1, len(a)))) if a.shape else 1
    parts = [slice(at, at + rows) for at in range(0, len(a), rows)] if a.shape else [()]
    return all(a[part].tobytes() == b[part].tobytes() for part in parts)
