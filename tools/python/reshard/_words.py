# SPDX-License-Identifier: Apache-2.0
"""Translates keyword arguments into the words of a command line."""

import numbers
import operator
import os
from collections.abc import Iterable, Mapping

from ._errors import UnsupportedError, UsageError


# Options whose values are tensor names, which may contain any character.
_NAMES = ("include", "exclude", "keep_dtype", "filter", "strip_prefix", "rename", "part")


def path_of(path):
    """Returns a path as text. Fails if it is empty or contains a NUL, which would end it."""
    text = os.fsdecode(path)
    if not text:
        raise UsageError("expected a path, got an empty one")
    if "\0" in text:
        raise UsageError(f"{text!r}: expected a path without a NUL character")
    return text


def index_of(name, value):
    """Returns an argument that is an integer, of Python or NumPy."""
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    if abs(value) >= 1 << 31:
        raise UsageError(f"{name}: {value} is too large")
    return value


def framework_of(framework, device):
    """Returns "numpy" or "torch", the kind of the arrays that a call returns."""
    names = {None: "numpy" if device is None else "torch", "np": "numpy", "numpy": "numpy", "pt": "torch", "torch": "torch"}
    if framework not in names:
        raise UsageError(f"framework: expected 'numpy' or 'torch', got {framework!r}")
    if names[framework] == "numpy" and device is not None and str(device) != "cpu":
        raise UsageError(f"device: NumPy has no arrays on {device}; expected framework='torch'")
    return names[framework]


def device_of(device):
    """Returns a torch device that exists, or None: an error that comes with the first tensor would come late."""
    if device is None or str(device) == "cpu":
        return device
    import torch

    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise UsageError(f"device: expected 'cpu' or 'cuda:0', got {device!r}") from e
    if wanted.type != "cuda":
        return wanted
    count = torch.cuda.device_count()
    if count == 0:
        raise UnsupportedError(f"device: {wanted}: torch {torch.__version__} finds no GPU on this machine; load on 'cpu'")
    if (wanted.index or 0) >= count:
        raise UnsupportedError(f"device: {wanted}: torch finds only {count} GPU{'' if count == 1 else 's'}")
    return wanted


def words_of(options, *positional):
    """Returns ["--keep-dtype=*norm*", "--force", "--", "step-1000"] for a dict and positional arguments. Skips None."""
    out = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None or (value is False and name != "shuffle"):
            continue
        if value is True:
            out.append(flag)
        elif value is False:
            out.append("--no-" + name)
        else:
            out.extend(f"{flag}={text}" for text in _texts(name, value))
    return out + ["--", *map(path_of, positional)] if positional else out


def _mesh(value):
    """Returns a mesh as text or a dict: a torch DeviceMesh by the names of its dimensions."""
    if isinstance(value, (str, dict)):
        return value
    from ._torch import axes_of, is_device_mesh

    return axes_of(value) if is_device_mesh(value) else value


def _dtype(value):
    """Returns the name of torch.bfloat16, numpy.float32 or numpy.dtype("float32")."""
    if isinstance(value, str):
        return value
    if isinstance(value, type) or hasattr(value, "itemsize") and hasattr(value, "kind"):
        import numpy

        return numpy.dtype(value).name
    return str(value).replace("torch.", "")


def _texts(name, value):
    """Returns the values of an option as words."""
    if name in ("mesh", "source_mesh"):
        value = _mesh(value)
    elif name in ("dtype", "grad_dtype"):
        value = _dtype(value)
    if name in ("mesh", "source_mesh") and isinstance(value, dict):
        value = ",".join(f"{axis}={size}" for axis, size in value.items())
    elif name in ("rename", "source", "shape") and isinstance(value, dict):
        value = [f"{a}={b}" for a, b in value.items()]
    if name in ("mesh", "source_mesh") and not isinstance(value, str):
        raise TypeError(f"{name}: expected text such as 'tp=2', a dict or a DeviceMesh, got {value!r}")
    is_one = isinstance(value, (str, bytes, os.PathLike, Mapping)) or not isinstance(value, Iterable)
    texts = [_text(name, v) for v in ([value] if is_one else value)]
    if name not in _NAMES and any("\0" in text for text in texts):
        raise UsageError(f"{name}: {value!r}: expected text without a NUL character")
    return texts


def _text(name, value):
    """Returns a single value of an option as a word."""
    if isinstance(value, (bytes, os.PathLike)):
        return os.fsdecode(value)
    if isinstance(value, (str, numbers.Number)) or hasattr(value, "__index__") or name == "device":
        return str(value)
    raise TypeError(f"{name}: expected text, a number or several of them, got {value!r}")


def progress_of(progress, what):
    """Returns (callback(done, total) or None, function to call at the end) for progress=True, a callable, or nothing."""
    if not progress:
        return None, lambda: None
    if callable(progress):
        return progress, lambda: None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _Line(what).show, lambda: None
    bar = tqdm(desc=what, unit="B", unit_scale=True)

    def show(done, total):
        bar.total = total
        bar.update(done - bar.n)

    return show, bar.close


class _Line:
    """Prints a line every ten seconds if tqdm is not installed."""

    def __init__(self, what):
        import time

        self.what, self.clock = what, time.monotonic
        self.last = self.clock()

    def show(self, done, total):
        import sys

        if self.clock() - self.last < 10:
            return
        self.last = self.clock()
        share = f"{100 * done // total} %" if total else f"{done} bytes"
        print(f"{self.what}: {share}", file=sys.stderr)


def glob_escaped(name):
    """Returns the glob that matches this name alone."""
    return "".join(f"[{c}]" if c in "*?[{" else c for c in name)
