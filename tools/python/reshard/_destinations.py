# SPDX-License-Identifier: Apache-2.0
"""Destinations of load(): describes the memory of a caller's tensor and refuses memory that cannot be filled."""

import os
import sys
from bisect import bisect_right

from . import _reshard
from ._checkpoint import Tensor
from ._errors import UsageError

_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cpu"}  # memory of the CPU, a GPU; pinned, managed
_READ_ONLY, _IS_COPIED = 1, 2  # flags of DLPack 1.0


class Destination:
    """The memory of one tensor: address, strides in elements (None: row-major), and the dtype as torch's name or DLPack's
    triple. `keep` owns the memory. `element` is the size of an element in bytes, or None if unknown."""

    __slots__ = ("address", "device", "dtype", "element", "keep", "shape", "strides")

    def __init__(self, address, shape, strides, dtype, element, device, keep):
        self.address, self.shape, self.strides = address, tuple(shape), strides
        self.dtype, self.element, self.device, self.keep = dtype, element, device, keep

    def bounds(self):
        """Returns the (begin, end) addresses of its elements, or None if it has no elements or has invalid strides, which
        are refused later."""
        if self.element is None or 0 in self.shape or (self.strides and min(self.strides) < 0):
            return None
        strides = self.strides if self.strides is not None else _row_major(self.shape)
        last = sum(s * (n - 1) for s, n in zip(strides, self.shape))
        return self.address, self.address + (last + 1) * self.element


def destination(name, tensor, dtype=None):
    """Returns the Destination of a caller's tensor. `dtype`: torch's name of the dtype, if NumPy does not have it.

    Fails if the memory cannot be written, or if the tensor's values are not plain elements at its strides.
    """
    if isinstance(tensor, Tensor):
        raise TypeError(f"into: {name!r} is a tensor of a checkpoint, which is read-only")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _of_torch(name, tensor, torch)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _of_numpy(name, tensor, numpy, dtype)
    if hasattr(tensor, "__dlpack__") and not (numpy is not None and isinstance(tensor, numpy.generic)):
        return _of_dlpack(name, tensor)
    raise TypeError(
        f"into: {name!r} is a {type(tensor).__name__}: expected a torch tensor, a NumPy array or an object with __dlpack__"
    )


def _refuse(name, why):
    raise UsageError(f"into: tensor {name!r}: {why}", tensor=name)


def _row_major(shape):
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= n
    return out[::-1]


# ---- torch


def _of_torch(name, tensor, torch):
    if hasattr(tensor, "to_local"):  # a DTensor: this rank's part
        if any(p.is_partial() for p in tensor.placements):
            _refuse(name, f"its placement is partial ({tensor.placements}): ranks hold summands, not shards; redistribute() it first")
        tensor = tensor.to_local()
    if why := _why_not_torch(tensor, torch):
        _refuse(name, why)
    device = "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index or 0}"
    out = Destination(tensor.data_ptr(), tensor.shape, list(tensor.stride()), str(tensor.dtype).split(".")[1],
                      tensor.element_size(), device, tensor)  # fmt: skip
    storage = tensor.untyped_storage()
    if bounds := out.bounds():
        needed = bounds[1] - storage.data_ptr()
        if storage.nbytes() < needed:
            _refuse(name, f"its storage has {storage.nbytes():,} bytes, but it needs {needed:,}: the storage was "
                          "freed or resized, as FSDP does between steps")  # fmt: skip
    return out


def _why_not_torch(tensor, torch):
    """Returns why the memory of a torch tensor does not contain its values, or None if it does."""
    kind = type(tensor)
    if tensor.device.type == "meta":
        return "it is on the meta device and has no memory; allocate it with model.to_empty(device=...)"
    if tensor.is_nested:
        return "nested tensors are not supported"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; expected a dense tensor (torch.strided)"
    if tensor.is_quantized:
        return f"it is quantized ({tensor.dtype}): its scale would not match the loaded values"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"it is a {kind.__name__}, a subclass that stores its values in its own way; pass the tensors inside it"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"it is on device {tensor.device}; expected CPU or CUDA memory"
    if tensor.is_neg():
        return "its negative bit is set, so its memory contains the negated values; pass the tensor that it views"
    if tensor.is_conj():
        return "its conjugate bit is set, so its memory contains the conjugated values; pass the tensor that it views"
    if tensor._is_zerotensor():
        return "it is a zero tensor without memory"
    return None


def mark_written(destinations):
    """Marks tensors as modified in place after a load, so that autograd does not use values that it saved earlier."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    increment = getattr(torch.autograd.graph, "increment_version", None)
    for d in destinations:
        if increment is not None and isinstance(d.keep, torch.Tensor) and not d.keep.is_inference():
            increment(d.keep)


# ---- NumPy


def _of_numpy(name, array, numpy, dtype):
    if isinstance(array, numpy.ma.MaskedArray):
        _refuse(name, "it is a masked array, whose mask would hide values; pass its .data")
    if not array.flags.writeable:
        _refuse(name, "the array is not writable: it cannot be written to")
    if not array.dtype.isnative:
        _refuse(name, f"its byte order is not this machine's ({array.dtype.str}); pass an array of dtype "
                      f"{array.dtype.newbyteorder('=').name!r}")  # fmt: skip
    if array.dtype.hasobject or array.dtype.names is not None or array.dtype.subdtype is not None:
        _refuse(name, f"its dtype is {array.dtype}; expected a numeric dtype")
    size = max(array.itemsize, 1)
    if any(s % size for s in array.strides):
        _refuse(name, f"its strides {array.strides} are not multiples of the element size, {size} bytes")
    strides = [s // size for s in array.strides]
    return Destination(array.ctypes.data, array.shape, strides, dtype or array.dtype.name, size, "cpu", array)


# ---- DLPack


def _of_dlpack(name, tensor):
    try:
        capsule = tensor.__dlpack__(max_version=(1, 0))
    except TypeError:  # before DLPack 1.0, which has no read-only flag
        capsule = tensor.__dlpack__()
    address, shape, strides, code, (kind, number), flags = _reshard.from_dlpack(capsule)
    if flags & _READ_ONLY:
        _refuse(name, f"a {type(tensor).__name__} exports its memory as read-only")
    if flags & _IS_COPIED:
        _refuse(name, f"a {type(tensor).__name__} exports a copy of its memory, so the tensor itself would not be filled")
    if kind not in _DLPACK_DEVICES:
        _refuse(name, f"its DLPack device type is {kind}; expected CPU or CUDA memory")
    device = f"cuda:{number}" if kind == 2 else _DLPACK_DEVICES[kind]
    element = code[1] * code[2] // 8
    return Destination(address, shape, list(strides) if strides is not None else None, code, element, device,
                       (tensor, capsule))  # fmt: skip


# ---- All destinations


def check_memory(destinations):
    """Fails if memory of the destinations, a dict by tensor name, is read-only, or if two of them overlap.

    Returns the pairs of names that share all their memory, like tied weights. These may be filled if the checkpoint has
    the same values for both.
    """
    reaches = sorted((*bounds, name) for name, d in destinations.items() if (bounds := d.bounds()))
    writable = _writable()
    same, open_ones = [], []
    for begin, end, name in reaches:
        d = destinations[name]
        if d.device == "cpu" and writable and not _is_inside(begin, end, writable):
            _refuse(name, "its memory is mapped read-only; map the file for writing, or load into other memory")
        open_ones = [other for other in open_ones if other[0] > begin]
        for _, other in open_ones:
            o = destinations[other]
            if o.device != d.device:
                continue
            if (o.address, o.shape, o.dtype) == (d.address, d.shape, d.dtype) and o.strides == d.strides:
                same.append((other, name))
            elif _share_elements(o, d):
                _refuse(name, f"it shares memory with tensor {other!r}, so one would overwrite the other")
        open_ones.append((end, name))
    return same


def _writable():
    """Returns this process's writable memory mappings, adjacent ones joined: (begins, ends). None if unknown."""
    begins, ends = [], []
    try:
        with open("/proc/self/maps") as file:
            for line in file:
                span, rights = line.split(None, 2)[:2]
                if rights[1] != "w":
                    continue
                begin, end = (int(n, 16) for n in span.split("-"))
                if ends and ends[-1] == begin:
                    ends[-1] = end
                else:
                    begins.append(begin)
                    ends.append(end)
    except (OSError, ValueError):
        return None
    return begins, ends


def _is_inside(begin, end, ranges):
    i = bisect_right(ranges[0], begin) - 1
    return i >= 0 and end <= ranges[1][i]


def _share_elements(a, b):
    """Returns whether elements of two destinations overlap. Returns True if that takes too long to compute."""
    import numpy

    class Memory:
        def __init__(self, d):
            strides = d.strides if d.strides is not None else _row_major(d.shape)
            self.__array_interface__ = {
                "version": 3, "data": (d.address, False), "shape": d.shape, "typestr": f"|V{d.element}",
                "strides": tuple(s * d.element for s in strides),
            }  # fmt: skip

    try:
        return numpy.shares_memory(numpy.asarray(Memory(a)), numpy.asarray(Memory(b)), max_work=10**6)
    except Exception:  # numpy's TooHardError, which has moved between modules
        return True
