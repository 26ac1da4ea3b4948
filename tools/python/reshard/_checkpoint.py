# SPDX-License-Identifier: Apache-2.0
"""Open checkpoints and their tensors."""

from collections import namedtuple
from collections.abc import KeysView, Mapping

from . import _reshard
from ._dtypes import numpy_type, safetensors_name, tell_raw, torch_type
from ._errors import Error, UnsupportedError
from ._words import device_of, framework_of, path_of, words_of

_SHOWN = 20
_SHOWN_HTML = 100


def _bytes(n):
    """Formats bytes in decimal units with three digits: "3.00 GB", "864 B"."""
    if n < 1000:
        return f"{n} B"
    for unit in ("kB", "MB", "GB", "TB", "PB", "EB"):
        n /= 1000
        if n < 999.5 or unit == "EB":
            break
    return f"{n:.{2 if n < 9.995 else 1 if n < 99.95 else 0}f} {unit}"


def _count(n, noun):
    """ "1,024 tensors", "1 tensor"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _by_name(pairs, path):
    """Returns a dict of (name, value) pairs. Fails if escaping bytes that are not UTF-8 makes two names equal."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UnsupportedError(f"{path}: two tensors are named {twice!r} after escaping bytes that are not UTF-8", path, twice)
    return out


class Piece(namedtuple("Piece", "file offset length origin shape copy")):
    """A shard of a tensor: a box of its elements, stored in a range of bytes of a file.

    file: relative to the checkpoint; offset, length: bytes; origin, shape: of the box, in elements of the whole tensor;
    copy: whether it is another copy of a box.
    """

    __slots__ = ()


class Tensor:
    """A lazy tensor of a checkpoint: data is read when elements are accessed.

    t.numpy(), t[128:256, ::2] and numpy.asarray(t) read into a new NumPy array; t.torch() and torch.from_dlpack(t) into
    a new torch tensor on the CPU. A slice reads only the bytes it needs (gaps below 4 KB are read, too). Thread-safe.
    """

    __slots__ = ("_checkpoint", "_index", "_dtype", "_nbytes", "_shape", "name")

    def __init__(self, checkpoint, name, index):
        self._checkpoint = checkpoint
        self._index = index
        self.name = name
        self._dtype, self._shape, self._nbytes = checkpoint._open().facts(index)

    @property
    def dtype(self):
        """The dtype by torch's name: "bfloat16"."""
        return self._dtype

    @property
    def shape(self):
        """The shape of the whole tensor, a tuple."""
        return self._shape

    @property
    def ndim(self):
        return len(self._shape)

    @property
    def size(self):
        """The number of elements."""
        n = 1
        for extent in self._shape:
            n *= extent
        return n

    @property
    def nbytes(self):
        """Bytes of all elements."""
        return self._nbytes

    @property
    def placement(self):
        """How the tensor is sharded: "whole", "shard(0) x 8", "irregular (5 boxes)"; "" in a view."""
        return self._checkpoint._placement(self._index)

    @property
    def pieces(self):
        """The shards, a list of Piece. Reads headers, not data."""
        return [Piece(*p) for p in self._checkpoint._open().pieces(self._index)]

    def __len__(self):
        if not self._shape:
            raise TypeError("len() of a tensor without dimensions")
        return self._shape[0]

    def numpy(self):
        """Reads all elements into a new NumPy array. bfloat16 and float8 need ml_dtypes; without it the array contains
        their bits as uint16 or uint8, with a warning."""
        return self[...]

    def __getitem__(self, key):
        """Reads the part that integers, slices and ... select into a new NumPy array. Integers drop their dimension."""
        dtype, is_own = numpy_type(self._dtype)
        if not is_own:
            tell_raw(self._dtype, dtype)
        return self._read(key, dtype)

    def __array__(self, dtype=None, copy=None):
        if copy is False:
            raise ValueError("copy=False is not possible: a lazy tensor is read from files")
        own, is_own = numpy_type(self._dtype)
        if dtype is not None and not is_own and own != dtype:
            raise TypeError(f"NumPy has no {self._dtype} to convert to {dtype}: pip install ml_dtypes, or use .torch()")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def torch(self, key=...):
        """Reads all elements, or the part that `key` selects, into a new torch tensor on the CPU."""
        import torch

        dtype = torch_type(self._dtype)
        raw = numpy_type(self._dtype)[0]
        if raw.kind not in "iufcb" or raw.name in ("uint16", "uint32", "uint64") or raw.name != self._dtype:
            raw = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}[raw.itemsize]
        array = self._read(key, raw)
        if any(s < 0 for s in array.strides):
            array = array.copy()
        return torch.from_numpy(array).view(dtype) if array.ndim else torch.from_numpy(array.reshape(1)).view(dtype)[0]

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device is not None and tuple(dl_device) != (1, 0):
            raise BufferError("a lazy tensor is read into CPU memory; move it to a device afterwards")
        if copy is False:
            raise BufferError("copy=False is not possible: a lazy tensor is read from files")
        array = self._read(..., numpy_type(self._dtype)[0])
        return _reshard.to_dlpack(array.ctypes.data, self._dtype, self._shape, array)

    def __dlpack_device__(self):
        return (1, 0)

    def __getattr__(self, name):
        # Only names that Tensor lacks come here. Those with underscores are questions of protocols.
        hint = ""
        if not name.startswith("_"):
            hint = "; it is lazy: t.torch() or t.numpy() reads it first"
        raise AttributeError(f"reshard.Tensor has no attribute {name!r}{hint}")

    def _read(self, key, dtype):
        import numpy

        ranges, flips, kept = _ranges(key, self._shape)
        out = numpy.empty([count for _, count, _ in ranges], dtype)
        self._checkpoint._read(self._index, ranges, out)
        if any(flips):
            out = out[tuple(slice(None, None, -1) if flip else slice(None) for flip in flips)]
        return out.reshape(kept) if len(kept) != out.ndim else out

    def __repr__(self):
        return (
            f"<reshard.Tensor {self.name!r}: {self._dtype} {list(self._shape)}, {_bytes(self._nbytes)}"
            f"{', ' + self.placement if self.placement else ''}>"
        )

    def _repr_html_(self):
        from html import escape

        rows = [("dtype", self._dtype), ("shape", " × ".join(map(str, self._shape)) or "scalar")]
        rows += [("bytes", _bytes(self._nbytes)), ("placement", self.placement)]
        cells = "".join(f"<tr><th>{k}</th><td>{escape(str(v))}</td></tr>" for k, v in rows)
        return f"<table><caption><code>{escape(self.name)}</code></caption>{cells}</table>"


def _integer(key):
    """Returns an integer index. Refuses booleans and arrays of one element, which NumPy takes as masks and lists."""
    import operator

    try:
        if type(key).__name__ in ("bool", "bool_") or getattr(key, "ndim", 0) > 0:
            raise TypeError
        return operator.index(key)
    except TypeError:
        raise TypeError(
            f"lazy tensors accept only integers, slices and `...` as indices, got {type(key).__name__}; "
            "t.numpy() accepts all that NumPy does"
        ) from None


def _ranges(key, shape):
    """Returns [(start, count, step > 0)], whether each is reversed, and the shape without the dimensions of integers."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if sum(k is Ellipsis for k in keys) > 1:
        raise IndexError("an index may contain only one `...`")
    given = len(keys) - (Ellipsis in [k for k in keys if k is Ellipsis])
    if given > len(shape):
        raise IndexError(f"too many indices: got {given}, the tensor has {len(shape)} dimensions")
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[at : at + 1] = [slice(None)] * (len(shape) - given)
    ranges, flips, kept = [], [], []
    for d, (k, extent) in enumerate(zip(keys, shape)):
        if isinstance(k, slice):
            start, stop, step = k.indices(extent)
            count = len(range(start, stop, step))
            if count < 2:
                step = 1  # any step selects the same element
            if step < 0:
                start, step = start + (count - 1) * step, -step
                flips.append(True)
            else:
                flips.append(False)
            ranges.append((start if count else 0, count, step))
            kept.append(count)
            continue
        index = _integer(k)
        if not -extent <= index < extent:
            raise IndexError(f"index {index} is out of bounds for dimension {d} with size {extent}")
        ranges.append((index % extent, 1, 1))
        flips.append(False)
    return ranges, flips, kept


def _is_plain(key):
    """Whether a lazy tensor accepts an index."""
    for part in key if isinstance(key, tuple) else (key,):
        try:
            part is Ellipsis or isinstance(part, slice) or _integer(part)
        except TypeError:
            return False
    return True


class _Names(KeysView):
    """The names of a checkpoint's tensors, which can also be indexed, as the list that safe_open returns."""

    __slots__ = ()

    def __getitem__(self, index):
        return list(self)[index]


class Slice:
    """A tensor whose elements are read when they are selected: s[128:256], s[...]. Returned by Checkpoint.get_slice()."""

    __slots__ = ("_device", "_framework", "_tensor")

    def __init__(self, tensor, framework, device):
        self._tensor, self._framework, self._device = tensor, framework, device

    def get_shape(self):
        """The shape of the whole tensor, a list."""
        return list(self._tensor.shape)

    def get_dtype(self):
        """The dtype by safetensors' name: "BF16"."""
        return safetensors_name(self._tensor.dtype)

    def __getitem__(self, key):
        """Reads the elements that integers, slices and `...` select, and no more than they need. Other indices that the
        framework knows (None, lists, masks) read the whole tensor."""
        if not _is_plain(key):
            return self[...][key]
        if self._framework == "numpy":
            return self._tensor[key]
        part = self._tensor.torch(key)
        return part if self._device is None else part.to(self._device)


class Checkpoint(Mapping):
    """An open checkpoint: a mapping from names to Tensor, in natural order of the names. Returned by reshard.open().

    Contains metadata only. Thread-safe, and a context manager: close() releases its files.
    """

    def __init__(self, native, path, framework="numpy", device=None, made_by=None):
        self._native = native
        self._made_by = made_by  # (function, arguments) that open it again in another process
        self._framework, self._device = framework, device
        self._indices = _by_name(native.names(), path)
        self._axes = None
        self._is_view = False
        self.path = path  #: the path as given

    @property
    def format(self):
        """The name of the format, as for convert(to=): "dcp"."""
        return self._open().format

    @property
    def title(self):
        """The title of the format: "PyTorch DCP"."""
        return self._open().title

    @property
    def mesh(self):
        """The mesh that saved it, inferred from the shards: {"dp_shard": 4, "tp": 2}. An unknown size is None. inspect()
        has the evidence."""
        if self._axes is None:
            self._axes = {name: size or None for name, size in self._open().mesh()}
        return dict(self._axes)

    @property
    def objects(self):
        """The values that are not tensors, as text by name: {"train_state.step": "1000"}. Nothing is executed."""
        return dict(self._open().objects())

    @property
    def warnings(self):
        """Sentences about oddities that do not prevent reading."""
        return self._open().warnings

    @property
    def nbytes(self):
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.values())

    def __getitem__(self, name):
        return Tensor(self, name, self._indices[name])

    def __contains__(self, name):
        return name in self._indices

    # Checkpoints are compared as files are: reading all tensors is diff().
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self):
        """Pickles how it was opened: a process that unpickles it opens it again."""
        self._open()
        return self._made_by

    def __iter__(self):
        return iter(self._indices)

    def __len__(self):
        return len(self._indices)

    def view(self, *, names=None, config=None, family=None, family_file=None, include=None, exclude=None,
             keep_unknown=False):  # fmt: skip
        """Returns a Checkpoint of the same tensors under other names and in another order of rows. Copies nothing.

        names: "hf" for Hugging Face's, "keep" for the stored ones, or another convention whose rows and matrices are as
        they are stored; config: the model's config.json (default: in the checkpoint's directory or its parent); include,
        exclude: globs over the stored names. Reads the headers around all payloads.
        """
        words = words_of(dict(names=names, config=config, family=family, family_file=family_file, include=include,
                              exclude=exclude, keep_unknown=keep_unknown))  # fmt: skip
        return _view(self, words)

    def keys(self):
        """The names, in natural order: a set that can be indexed as well, keys()[0]."""
        return _Names(self)

    def get_tensor(self, name):
        """Reads a whole tensor, as safetensors.safe_open has it: a new NumPy array, or a torch tensor on the device that
        open() was given with framework="torch".

        Example: reshard.open("step-1000", framework="torch", device="cuda").get_tensor("norm.weight")
        """
        return self.get_slice(name)[...]

    def get_slice(self, name):
        """Returns a Slice of a tensor, as safetensors.safe_open has it: nothing is read until elements are selected."""
        if name not in self:
            raise KeyError(f"{self.path}: no tensor {name!r}{_near(name, self)}")
        return Slice(self[name], self._framework, self._device)

    def metadata(self):
        """The __metadata__ of the safetensors files, a dict of text: {"format": "pt"}. Empty for other formats."""
        return dict(self._open().metadata())

    def close(self):
        """Releases the files. Its tensors can no longer be read."""
        self._native = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _open(self):
        if self._native is None:
            raise ValueError(f"{self.path}: the checkpoint is closed")
        return self._native

    def _placement(self, index):
        return "" if self._is_view else self._open().placement(index)

    def _read(self, index, ranges, out):
        self._open().read(index, ranges, out.ctypes.data, out.nbytes)

    def __repr__(self):
        if self._native is None:
            return f"<reshard.Checkpoint {str(self.path)!r}: closed>"
        tensors = [self[name] for name in list(self)[:_SHOWN]]
        mesh = ", ".join(f"{axis}={size or '?'}" for axis, size in ({} if self._is_view else self.mesh).items())
        head = f"<reshard.Checkpoint {str(self.path)!r}: {self.title}, {_count(len(self), 'tensor')}"
        head += f", {_bytes(self.nbytes)}" + (f", {mesh}" if mesh else "") + ">"
        width = max((len(t.name) for t in tensors), default=0)
        rows = [
            f"  {t.name:{min(width, 70)}}  {t.dtype:9}  {list(t.shape)!s:16}  {t.placement}".rstrip() for t in tensors
        ]
        if len(self) > _SHOWN:
            rows.append(f"  ... and {len(self) - _SHOWN:,} more")
        return "\n".join([head, *(row if len(row) <= 120 else row[:117] + "..." for row in rows)])

    def _repr_html_(self):
        from html import escape

        rows = [
            f"<tr><td><code>{escape(t.name)}</code></td><td>{t.dtype}</td>"
            f"<td>{' × '.join(map(str, t.shape))}</td><td>{_bytes(t.nbytes)}</td><td>{escape(t.placement)}</td></tr>"
            for t in (self[name] for name in list(self)[:_SHOWN_HTML])
        ]
        more = f"<p>and {len(self) - _SHOWN_HTML:,} more</p>" if len(self) > _SHOWN_HTML else ""
        head = "<tr><th>tensor</th><th>dtype</th><th>shape</th><th>bytes</th><th>placement</th></tr>"
        return (
            f"<p><b>{escape(str(self.path))}</b>: {escape(self.title)}, {_count(len(self), 'tensor')}, "
            f"{_bytes(self.nbytes)}</p>"
            f"<table>{head}{''.join(rows)}</table>{more}"
        )


def _near(name, names):
    """Returns "; did you mean 'norm.weight'?", or nothing."""
    from difflib import get_close_matches

    near = get_close_matches(str(name), names, 1) if len(names) < 10000 else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _view(checkpoint, words):
    out = Checkpoint(checkpoint._open().view(words), checkpoint.path, checkpoint._framework, checkpoint._device,
                     (_view, (checkpoint, words)))  # fmt: skip
    out._is_view = True
    return out


def _opened(path, words, framework, device):
    try:
        return Checkpoint(_reshard.open(path, words), path, framework, device, (_opened, (path, words, framework, device)))
    except Error as e:
        e.path = e.path or path
        raise


def open(path, *, part=None, strip_prefix=None, rename=None, weights=None, source_layout=None, source_mesh=None,
         framework=None, device=None):  # fmt: skip
    """Opens a checkpoint, a directory or a file in any format, and reads its metadata. Returns a Checkpoint.

    part: "model", "optimizer", "ema", ... of a training state. strip_prefix, rename ({"from": "to"}): change the names of
    tensors. weights: "model" or "master" (the optimizer's float32 copy), if the state has both. source_layout,
    source_mesh: how per-rank files join, if they do not record it. Pickles are never executed.

    framework: "numpy" (default) or "torch": what get_tensor() and get_slice() return; device: where torch's tensors are
    put, "cpu" or "cuda:0".

    Example: reshard.open("step-1000")["layers.0.attention.wq.weight"][128:256]
    """
    path = path_of(path)
    words = words_of(dict(part=part, strip_prefix=strip_prefix, rename=rename, weights=weights,
                          source_layout=source_layout, source_mesh=source_mesh))  # fmt: skip
    return _opened(path, words, framework_of(framework, device), device_of(device))
