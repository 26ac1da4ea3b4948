# SPDX-License-Identifier: Apache-2.0
"""Loads checkpoints into memory."""

from dataclasses import dataclass, field

from . import _reshard
from ._checkpoint import _by_name
from ._destinations import check_memory, destination, mark_written
from ._dtypes import numpy_type, tell_raw
from ._errors import Error, UsageError
from ._words import path_of, progress_of, words_of

_SHOWN = 8


@dataclass(frozen=True)
class LoadReport:
    """What load() read."""

    tensors: int  #: tensors of this rank
    bytes_read: int  #: of tensor data
    checksums: int  #: recorded checksums that were verified
    digests: dict = field(repr=False)  #: digest of each loaded tensor, as in reshard_manifest.json
    warnings: list = field(default_factory=list)


def load(path, *, into=None, mesh=None, rank=0, names=None, layout=None, dtype=None, keep_dtype=None, include=None,
         exclude=None, part=None, strict=True, config=None, family=None, family_file=None, vocab_padding=None,
         vocab_divisible_by=None, keep_unknown=False, source_layout=None, source_mesh=None, strip_prefix=None,
         rename=None, weights=None, memory=None, threads=None, check_whole_items=False, progress=False):  # fmt: skip
    """Loads the tensors of one rank of a mesh, directly into the caller's memory.

    into: a mapping from names to tensors, such as model.state_dict(), which are filled in place. They may be torch
    tensors, NumPy arrays or other DLPack tensors, all in CPU memory or all on one GPU. They need the rank's shapes and
    the loaded dtype; strides must not be negative, and no two elements may share memory. After an exception their
    content is undefined. Without `into` the result is a dict of new NumPy arrays, otherwise a LoadReport.

    mesh: "tp=4,dp_shard=2" or a dict; rank: the rank in it. layout: how tensors are sharded (default: by the rules of
    the model family). names: "hf", "torchtitan", "megatron", ... (default: as stored). strict=False ignores tensors of
    the checkpoint that are not in `into`; part="model" ignores optimizer state. memory: the limit of the buffers that
    are used besides the tensors (default "256MiB"). The other options are those of `reshard convert`.

    Example: reshard.load("step-1000", into=model.state_dict(), mesh="tp=4", rank=3)
    """
    options = {
        k: v
        for k, v in locals().items()
        if k not in ("path", "into", "rank", "strict", "check_whole_items", "progress")
    }
    path = path_of(path)
    holders = {name: destination(name, tensor) for name, tensor in into.items()} if into is not None else None
    devices = {h.device for h in holders.values()} if holders else {"cpu"}
    if len(devices) > 1:
        raise UsageError(f"into: expected tensors on one device, got {', '.join(sorted(devices))}", path)

    def prepare(**more):
        words = words_of(dict(options, **more))
        return _reshard.Load.prepare(path, words, rank, next(iter(devices)), check_whole_items)

    try:
        job = prepare()
        tensors = job.tensors()
        if holders is not None and not strict and names is None:
            beyond = [t[0] for t in tensors if t[0] not in holders]
            if beyond:
                job = prepare(exclude=[*_list(exclude), *map(_glob_escaped, beyond)])
                tensors = job.tensors()
        by_name = _by_name([(t[0], t) for t in tensors], path)
        arrays = None if holders is not None else {n: _empty(t[1], t[2]) for n, t in by_name.items()}
        if holders is None:
            holders = {name: destination(name, array, t[1]) for (name, array), t in zip(arrays.items(), tensors)}
        places = _places(holders, tensors, path)
        tied = check_memory(holders) if into is not None else []
        callback, close = progress_of(progress, "load")
        try:
            report = job.run(places, callback)
        finally:
            close()
            mark_written(holders.values())
        _check_tied(tied, report["digests"], path)
    except Error as e:
        e.path = e.path or path
        raise
    return arrays if arrays is not None else LoadReport(tensors=len(tensors), **report)


def _check_tied(pairs, digests, path):
    """Fails if tensors that share memory have different values in the checkpoint, as the last one written would win."""
    for a, b in pairs:
        if digests[a] != digests[b]:
            raise UsageError(
                f"{path}: tensors {a!r} and {b!r} share memory in `into` but have different values in the checkpoint; "
                "give one of them its own memory", path, b,
            )  # fmt: skip


def _list(value):
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _glob_escaped(name):
    return "".join(f"[{c}]" if c in "*?[{" else c for c in name)


def _empty(dtype, shape):
    import numpy

    kind, is_own = numpy_type(dtype)
    if not is_own:
        tell_raw(dtype, kind)
    return numpy.empty(shape, kind)


def _places(holders, tensors, path):
    wanted = {t[0] for t in tensors}
    if missing := [name for name in holders if name not in wanted]:
        raise UsageError(
            f"{path}: has no {_some(missing)} that `into` has; names= selects the naming convention", path, missing[0]
        )
    if beyond := [name for name in (t[0] for t in tensors) if name not in holders]:
        raise UsageError(
            f"{path}: has {_some(beyond)} that `into` has not; strict=False ignores them, as do part=, include= and exclude=",
            path, beyond[0],
        )  # fmt: skip
    out = []
    for name, dtype, shape, whole in tensors:
        holder = holders[name]
        if holder.shape != shape:
            of = f" (a shard of {list(whole)})" if whole != shape else ""
            raise UsageError(
                f"{path}: tensor {name!r}: expected memory of shape {list(shape)}{of}, got {list(holder.shape)}",
                path,
                name,
            )
        expected = _reshard.dlpack_type(dtype) if isinstance(holder.dtype, tuple) else dtype
        if holder.dtype != expected and not _is_raw(dtype, holder.dtype):
            raise UsageError(
                f"{path}: tensor {name!r}: expected memory of {dtype}, got {holder.dtype}; dtype= converts while loading",
                path,
                name,
            )
        out.append((holder.address, holder.strides if holder.shape else None))
    return out


def _is_raw(dtype, got):
    """Returns whether an array of unsigned integers receives the bits of a dtype that NumPy does not have."""
    raw = {"bfloat16": "uint16", "complex32": "uint32"}.get(
        dtype, "uint8" if dtype.startswith(("float8", "float4")) else None
    )
    return raw is not None and got == raw


def _some(names):
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {', '.join(map(repr, names[:_SHOWN]))}{more}"
