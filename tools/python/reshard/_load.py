# SPDX-License-Identifier: Apache-2.0
"""Loads checkpoints into memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from . import _reshard
from ._checkpoint import _by_name, _near
from ._destinations import check_memory, destination, mark_written
from ._dtypes import numpy_type, tell_raw
from ._errors import Error, UsageError
from ._words import device_of, framework_of, glob_escaped, index_of, path_of, progress_of, words_of

_SHOWN = 8


@dataclass(frozen=True)
class LoadReport:
    """The result of load()."""

    tensors: int  #: tensors of this rank
    bytes_read: int  #: of tensor data
    checksums: int  #: recorded checksums that were verified
    digests: dict = field(repr=False)  #: digest of each loaded tensor, as in reshard_manifest.json
    warnings: list = field(default_factory=list)


def load(path, *, into=None, mesh=None, rank=None, names=None, layout=None, dtype=None, keep_dtype=None, include=None,
         exclude=None, part=None, strict=True, config=None, family=None, family_file=None,
         source_names=None, vocab_padding=None,
         vocab_divisible_by=None, keep_unknown=False, source_layout=None, source_mesh=None, strip_prefix=None,
         rename=None, weights=None, memory=None, threads=None, check_whole_items=False, framework=None, device=None,
         progress=False):  # fmt: skip
    """Loads a checkpoint, or the part of it that one rank of a mesh holds, directly into the caller's memory.

    Returns a dict of new arrays, or, if there is `into`, a LoadReport.

    into: what to fill in place:
        - a torch module. Parameters and buffers on the meta device get memory on `device`. DTensors (FSDP2, tensor
          parallelism) are filled with this rank's part, by their own placements. Of a training state the model is
          loaded: part="model" is the default.
        - a mapping from names to torch tensors, NumPy arrays or other DLPack tensors, such as model.state_dict(), all
          in CPU memory or all on one GPU. They need the rank's shapes and the loaded dtype; strides must not be
          negative, and no two elements may share memory.
        After an exception the content is undefined.
    framework: without `into`: "numpy" (default) or "torch", the kind of the new arrays.
    device: where new torch tensors, and those of modules on the meta device, are put: "cpu" (default) or "cuda:0".

    mesh: "tp=4,dp_shard=2", a dict, or a torch DeviceMesh whose dimensions are named dp_replicate, dp_shard (or dp,
    fsdp), cp, tp. rank: the rank in it, counted with tp fastest, then cp, dp_shard, dp_replicate and pp (default: this
    process' rank in a DeviceMesh, otherwise 0). Neither is needed for DTensors. layout: a file that says how tensors
    are sharded (default: by the rules of the model family).

    names: "hf", "torchtitan", "megatron", ...: the names of `into` or of the result (default: as stored). dtype:
    torch.bfloat16 or "bf16": converts floating-point tensors. strict=False ignores tensors of the checkpoint that are
    not in `into`; with names=, those of the model are read and dropped, which takes memory for them. memory: the limit
    of the buffers that are used besides the tensors, in bytes or as text (default "256MiB"). check_whole_items: read
    stored items of which this rank needs a part completely, to verify their checksums. The other options are those of
    convert().

    Raises UsageError if names, shapes or dtypes do not fit, CorruptError if a recorded checksum does not hold, and
    MissingError for a missing file.

    Example: reshard.load("step-1000", into=model, names="hf", dtype=torch.bfloat16)
    """
    options = {
        k: v
        for k, v in locals().items()
        if k not in ("path", "into", "rank", "strict", "check_whole_items", "framework", "device", "progress")
    }
    path = path_of(path)
    if into is not None and framework is not None:
        raise UsageError("framework applies without `into`, whose tensors are filled as they are")
    framework = framework_of(framework, device)
    device = device_of(device)
    finish = None
    if into is not None and not isinstance(into, Mapping):
        into, finish = _of_module(into, device)
        options["part"] = part or "model"
    if into is not None and not into:
        raise UsageError("into: has no tensors to fill")
    with _Layout(into, options, rank) as rank:
        holders = {name: destination(name, tensor) for name, tensor in into.items()} if into is not None else None
        try:
            report, tensors, arrays = _load(path, holders, options, rank, strict, check_whole_items, framework, device,
                                            progress)  # fmt: skip
        except Error as e:
            e.path = e.path or path
            raise
    if finish is not None and (left := finish()):
        import warnings

        warnings.warn(f"{_some(left)} of the module stay on the meta device: they are in no state_dict()", stacklevel=2)
    return arrays if arrays is not None else LoadReport(tensors=len(tensors), **report)


def _load(path, holders, options, rank, strict, check_whole_items, framework, device, progress):
    """Returns (report, the rank's tensors, new arrays or None)."""
    devices = {h.device for h in holders.values()} if holders else {_device_name(device)}
    if len(devices) > 1:
        raise UsageError(f"into: expected tensors on one device, got {', '.join(sorted(devices))}", path)

    def prepare(**more):
        words = words_of(dict(options, **more))
        return _reshard.Load.prepare(path, words, rank, next(iter(devices)), check_whole_items)

    job = prepare()
    tensors = job.tensors()
    ignored = {}
    if holders is not None and not strict:
        job, tensors, ignored = _without_others(job, tensors, holders, options, prepare)
    by_name = _by_name([(t[0], t) for t in tensors], path)
    arrays = None if holders is not None else {n: _empty(t[1], t[2], framework, device) for n, t in by_name.items()}
    tied = []
    if arrays is None:
        _leave_out_tied(holders, by_name)
        places = _places({**holders, **ignored}, tensors, path, options["names"])
        tied = check_memory(holders)
    else:
        holders = {name: destination(name, array, t[1]) for (name, array), t in zip(arrays.items(), tensors)}
        places = _places(holders, tensors, path, options["names"])
    callback, close = progress_of(progress, "load")
    try:
        report = job.run(places, callback)
    finally:
        close()
        mark_written(holders.values())
    _check_tied(tied, report["digests"], path)
    return report, [t for t in tensors if t[0] not in ignored], arrays


def _without_others(job, tensors, holders, options, prepare):
    """Returns a load of the tensors in `holders`, its tensors, and memory for those among them that are to be ignored.

    Stored names can be excluded. Names of a convention cannot, so what the model has beyond `holders` is read and
    dropped; its optimizer is not read.
    """
    names = {t[0] for t in tensors}
    beyond = [name for name in names if name not in holders]
    if not beyond or len(beyond) == len(names):  # nothing to ignore, or nothing to load, which _places() reports
        return job, tensors, {}
    if options["names"] is None:
        job = prepare(exclude=[*_list(options["exclude"]), *map(glob_escaped, beyond)])
        return job, job.tensors(), {}
    if options["part"] is None:
        model = prepare(part="model")
        if names.intersection(holders) <= {t[0] for t in model.tensors()}:
            job, tensors = model, model.tensors()
    device = next((h.device for h in holders.values()), "cpu")
    framework, device = ("numpy", None) if device == "cpu" else ("torch", device)
    ignored = [t for t in tensors if t[0] not in holders]
    return job, tensors, {t[0]: destination(t[0], _empty(t[1], t[2], framework, device), t[1]) for t in ignored}


class _Layout:
    """Gives DTensors of `into` a layout file for the time of a load, and yields the rank in it."""

    def __init__(self, into, options, rank):
        self.options, self.file, self.rank = options, None, rank
        mesh = options["mesh"]
        if mesh is not None and not isinstance(mesh, (str, Mapping)):
            from ._torch import is_device_mesh, rank_in

            if is_device_mesh(mesh) and rank is None:
                self.rank = rank_in(mesh)
        if into is not None and mesh is None and options["layout"] is None and rank is None:
            self.of_dtensors(into)

    def of_dtensors(self, into):
        if not any(hasattr(tensor, "to_local") for tensor in into.values()):
            return
        import tempfile

        from ._torch import layout_of

        layout, self.rank = layout_of(into)
        self.file = tempfile.NamedTemporaryFile("w", suffix=".json", prefix="reshard-layout-")
        self.file.write(layout)
        self.file.flush()
        self.options["layout"] = self.file.name

    def __enter__(self):
        return 0 if self.rank is None else index_of("rank", self.rank)

    def __exit__(self, *exception):
        if self.file is not None:
            self.file.close()


def _of_module(into, device):
    from ._torch import is_module, tensors_of

    if not is_module(into):
        raise UsageError(f"into: expected a torch module or a mapping of names to tensors, got a {type(into).__name__}")
    return tensors_of(into, device)


def _device_name(device):
    """Returns "cpu" or "cuda:0"."""
    if device is None or str(device) == "cpu":
        return "cpu"
    import torch

    if device.type != "cuda":
        raise UsageError(f"device: expected 'cpu' or 'cuda', got {str(device)!r}")
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def _leave_out_tied(holders, stored):
    """Removes names that the checkpoint lacks, of tensors that are also there under a name that it has: a tied head."""
    there = {(h.address, h.shape, h.dtype) for name, h in holders.items() if name in stored}
    for name in [name for name in holders if name not in stored]:
        h = holders[name]
        if (h.address, h.shape, h.dtype) in there and 0 not in h.shape:
            del holders[name]


def _check_tied(pairs, digests, path):
    """Fails if tensors that share memory have different values in the checkpoint: the last one written would win."""
    for a, b in pairs:
        if digests[a] != digests[b]:
            raise UsageError(
                f"{path}: tensors {a!r} and {b!r} share memory in `into` but have different values in the checkpoint; "
                "give one of them its own memory", path, b,
            )  # fmt: skip


def _list(value):
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _empty(dtype, shape, framework, device):
    if framework == "torch":
        import torch

        from ._dtypes import torch_type

        return torch.empty(shape, dtype=torch_type(dtype), device=device)
    import numpy

    kind, is_own = numpy_type(dtype)
    if not is_own:
        tell_raw(dtype, kind)
    return numpy.empty(shape, kind)


def _places(holders, tensors, path, names):
    wanted = {t[0] for t in tensors}
    if missing := [name for name in holders if name not in wanted]:
        hint = "; select the naming convention with names=" if names is None else _near(missing[0], list(wanted))
        raise UsageError(f"{path}: lacks {_some(missing)} of `into`{hint}", path, missing[0])
    if beyond := [name for name in (t[0] for t in tensors) if name not in holders]:
        raise UsageError(
            f"{path}: has {_some(beyond)} that `into` lacks; ignore them with strict=False, part=, include= or exclude=",
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
                f"{path}: tensor {name!r}: expected memory of {dtype}, got {holder.dtype}; convert while loading with dtype=",
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
