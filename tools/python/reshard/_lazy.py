# SPDX-License-Identifier: Apache-2.0
"""Torch tensors of a checkpoint that are read when they are used, for loaders that keep a part of each tensor."""

import torch
from torch.utils._pytree import tree_map_only

from ._checkpoint import _ranges
from ._dtypes import torch_type

_aten = torch.ops.aten
_COPIED = 16 << 20  # bytes that copy_() reads at once, if it cannot read into its destination


class _Stored:
    """A tensor of a checkpoint, which all lazy views of it share."""

    def __init__(self, tensor, count):
        self.tensor = tensor  # of reshard
        self.count = count  # called with the number of bytes of each read
        self.value = None  # the tensor in memory, once something has changed it in place

    def read(self, key):
        """Returns the part that integers and slices select, in memory."""
        if self.value is not None:
            return self.value[key]
        part = self.tensor.torch(key)
        self.count(part.nbytes)
        return part

    def read_into(self, key, to):
        """Fills a contiguous tensor in CPU memory with the part that integers and slices select."""
        self.tensor._checkpoint._open().read(self.tensor._index, _ranges(key, self.tensor.shape)[0], to.data_ptr(), to.nbytes)
        if hasattr(torch.autograd.graph, "increment_version") and not to.is_inference():
            torch.autograd.graph.increment_version(to)
        self.count(to.nbytes)


def lazy_tensor(tensor, count=lambda nbytes: None):
    """Returns a reshard.Tensor as a LazyTensor. `count` is called with the number of bytes of each read."""
    return LazyTensor(_Stored(tensor, count))


class LazyTensor(torch.Tensor):
    """A tensor of a checkpoint, or a part of one, that is not in memory.

    Narrowing, slicing, chunks and transposition make another lazy tensor. `parameter.copy_(lazy)` reads this part alone: into
    the parameter's memory if it fits, and otherwise some MiB at a time. Everything else reads the part and continues with an
    ordinary tensor, so each result is that of a tensor in memory.
    """

    # _key has an index or a slice (of step 1) of each dimension of the stored tensor. _dims are the stored dimensions of
    # the slices, in the order of this tensor's dimensions. _value is the part in memory, if something may have changed it.

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, stored, key=None, dims=None):
        shape = stored.tensor.shape
        strides = [1] * len(shape)
        for d in reversed(range(len(shape) - 1)):
            strides[d] = strides[d + 1] * max(shape[d + 1], 1)
        key = [slice(0, n) for n in shape] if key is None else key
        dims = range(len(shape)) if dims is None else dims
        return torch.Tensor._make_wrapper_subclass(
            cls, [key[d].stop - key[d].start for d in dims], strides=[strides[d] for d in dims],
            dtype=torch_type(stored.tensor.dtype), device="cpu",
        )  # fmt: skip

    def __init__(self, stored, key=None, dims=None):
        self._stored, self._value = stored, None
        self._key = tuple(slice(0, n) for n in stored.tensor.shape) if key is None else key
        self._dims = tuple(range(len(self._key))) if dims is None else dims

    def real(self):
        """Returns a tensor in memory with these elements. It shares its memory with this tensor only if is_in_memory()."""
        if self._value is not None:
            return self._value
        inner = sorted(self._dims)
        return self._stored.read(self._key).permute([inner.index(d) for d in self._dims])

    def kept(self):
        """Returns real(), with which this tensor shares its memory from now on."""
        if not self.is_in_memory():
            self._value = self.real()
        return self.real()

    def is_in_memory(self):
        return self._value is not None or self._stored.value is not None

    def part(self, dim, start, stop):
        """Returns the part with indices [start, stop) of a dimension."""
        d = self._dims[dim]
        begin = self._key[d].start
        key = (*self._key[:d], slice(begin + start, begin + stop), *self._key[d + 1:])
        return LazyTensor(self._stored, key, self._dims)

    def at(self, dim, index):
        """Returns the part with one index of a dimension, without this dimension."""
        d = self._dims[dim]
        key = (*self._key[:d], self._key[d].start + index, *self._key[d + 1:])
        return LazyTensor(self._stored, key, self._dims[:dim] + self._dims[dim + 1:])

    def permuted(self, order):
        return LazyTensor(self._stored, self._key, tuple(self._dims[d] for d in order))

    def copy_to(self, to):
        """Copies into a tensor of the same shape."""
        if to.is_meta or self.numel() == 0:
            return
        if not self.is_in_memory() and _is_plain(to, self.dtype) and list(self._dims) == sorted(self._dims):
            self._stored.read_into(self._key, to)
        elif self.is_in_memory() or self.nbytes <= _COPIED:
            to.copy_(self.real())
        else:
            dim = min((i for i, n in enumerate(self.shape) if n > 1), key=lambda i: self._dims[i])
            each = max(1, _COPIED * self.shape[dim] // self.nbytes)
            for start in range(0, self.shape[dim], each):
                stop = min(start + each, self.shape[dim])
                self.part(dim, start, stop).copy_to(to.narrow(dim, start, stop - start))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, cls) and not first.is_in_memory() and (make := _VIEWS.get(func)):
            return make(*args, **kwargs)
        if func is _aten.copy_.default and isinstance(args[1], cls) and not isinstance(first, cls) and first.shape == args[1].shape:
            args[1].copy_to(first)
            return first
        return _in_memory(func, args, kwargs)

    # What does not pass through the dispatcher.

    def numpy(self, **kwargs):
        return self.kept().numpy(**kwargs)

    def __array__(self, dtype=None):
        return self.kept().__array__(dtype) if dtype is not None else self.kept().__array__()

    def __dlpack__(self, **kwargs):
        return self.kept().__dlpack__(**kwargs)

    def tolist(self):
        return self.real().tolist()

    def data_ptr(self):
        return self.kept().data_ptr()

    def untyped_storage(self):
        return self.kept().untyped_storage()

    def __deepcopy__(self, memo):
        return self.real().clone()

    def __reduce_ex__(self, protocol):
        return self.real().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        return f"LazyTensor({self._stored.tensor.name!r}, shape={list(self.shape)}, dtype={self.dtype})"


def _is_plain(to, dtype):
    """Returns whether a tensor is contiguous memory of a CPU and no more than that."""
    is_own = type(to).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and to.layout == torch.strided
    return (is_own and to.device.type == "cpu" and to.dtype == dtype and to.is_contiguous() and not to.is_neg()
            and not to.is_conj())  # fmt: skip


def _in_memory(func, args, kwargs):
    """Reads lazy tensors into memory and calls an operator. Those that it writes or returns views of stay in memory."""
    shared = {}  # the lazy tensors that are written, by the identity of what stands for them
    arguments = func._schema.arguments

    def prepared(argument, value):
        def replaced(lazy):
            if argument is None or argument.alias_info is None:
                return lazy.real()
            if argument.alias_info.is_write and not lazy.is_in_memory():
                stored = lazy._stored
                stored.value = stored.read(tuple(slice(0, n) for n in stored.tensor.shape))
            out = lazy.kept()
            if argument.alias_info.is_write:
                shared[id(out)] = (out, lazy)
            return out

        return tree_map_only(LazyTensor, replaced, value)

    by_name = {a.name: a for a in arguments}
    args = [prepared(arguments[i] if i < len(arguments) else None, value) for i, value in enumerate(args)]
    kwargs = {name: prepared(by_name.get(name), value) for name, value in kwargs.items()}
    out = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda t: shared.get(id(t), (t, t))[1], out)


# ---- views, as the dispatcher has them after it has decomposed narrow(), chunk(), [...] and the like


def _slice(lazy, dim=0, start=None, end=None, step=1):
    if step != 1:
        return _in_memory(_aten.slice.Tensor, (lazy, dim, start, end, step), {})
    dim %= lazy.dim()
    start, stop, _ = slice(start, end).indices(lazy.shape[dim])
    return lazy.part(dim, start, max(start, stop))


def _select(lazy, dim, index):
    dim %= lazy.dim()
    if not -lazy.shape[dim] <= index < lazy.shape[dim]:
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(lazy.shape)} at dimension {dim}")
    return lazy.at(dim, index % lazy.shape[dim])


def _split_sizes(lazy, sizes, dim=0):
    out, start = [], 0
    for size in sizes:
        out.append(_slice(lazy, dim, start, start + size))
        start += size
    return out


def _split(lazy, size, dim=0):
    extent = lazy.shape[dim]
    return _split_sizes(lazy, [min(size, extent - at) for at in range(0, extent, size)] if size and extent else [extent], dim)


def _transpose(lazy, a, b):
    order = list(range(lazy.dim()))
    order[a], order[b] = order[b], order[a]
    return lazy.permuted(order)


def _same(lazy):
    return lazy.permuted(range(lazy.dim()))


_VIEWS = {
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_sizes,
    _aten.transpose.int: _transpose,
    _aten.t.default: lambda lazy: _same(lazy) if lazy.dim() < 2 else _transpose(lazy, 0, 1),
    _aten.permute.default: lambda lazy, order: lazy.permuted([d % lazy.dim() for d in order]),
    _aten.detach.default: _same,
    _aten.alias.default: _same,
}
