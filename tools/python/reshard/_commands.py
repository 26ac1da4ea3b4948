# SPDX-License-Identifier: Apache-2.0
"""convert, plan, verify, diff, check and inspect: commands of the program, with options of the same names."""

import json as _json
import os
from dataclasses import dataclass, field
from typing import Optional

from . import _reshard
from ._checkpoint import _bytes, _count
from ._errors import Error
from ._words import progress_of, words_of

_SHOWN = 12


def _run(command, options, positional, progress, path, json=True):
    callback, close = progress_of(progress, command)
    words = words_of(dict(options, json=json or None), *positional)
    try:
        code, answer = _reshard.run_command(command, words, callback)
    except Error as e:
        e.path = e.path or (os.fsdecode(path) if path is not None else None)
        raise
    finally:
        close()
    return code, _json.loads(answer) if answer else {}


def _of(cls, data, **more):
    """Makes a dataclass from the members of a JSON object that it has fields for."""
    names = cls.__dataclass_fields__
    return cls(**{k: v for k, v in data.items() if k in names}, **more)


@dataclass(frozen=True)
class Finding:
    """An error, a warning or a note of an audit."""

    severity: str  #: "error", "warning" or "note"
    id: str  #: "vocabulary-padded"; docs/audit.md lists them
    what: str  #: a sentence
    why: list  #: sentences: the evidence
    tensors: list  #: names; empty: the whole checkpoint
    lost: str  #: which data are lost
    advice: str  #: what to do

    def __str__(self):
        return f"{self.severity}: {self.what}" + "".join(
            f"\n    {line}" for line in [*self.why, self.lost, self.advice] if line
        )


@dataclass(frozen=True)
class Check:
    """A check of an audit."""

    id: str
    title: str
    looked_at: int  #: number of tensors, shards, files or ranks that were checked
    findings: int  #: number of findings
    skipped: Optional[str]  #: why it did not run, or None


@dataclass(frozen=True, repr=False)
class _Audit:
    ok: bool  #: no finding reaches fail_on
    findings: list  #: of Finding, errors first
    checks: list  #: of Check
    seconds: float
    json: dict = field(compare=False)  #: the complete result, as of --json

    def __bool__(self):
        return self.ok

    def __repr__(self):
        head = f"<reshard.{type(self).__name__} of {self._of()!r}: {'ok' if self.ok else 'not ok'}, "
        head += f"{_count(len(self.findings), 'finding')} in {_count(len(self.checks), 'check')}>"
        lines = [f"  {line}" for f in self.findings[:_SHOWN] for line in str(f).split("\n")]
        if len(self.findings) > _SHOWN:
            lines.append(f"  ... and {len(self.findings) - _SHOWN} more")
        return "\n".join([head, *lines])

    def _repr_html_(self):
        from html import escape

        items = "".join(
            f"<li><b>{escape(f.severity)}</b> {escape(f.what)}<br>{'<br>'.join(map(escape, f.why))}"
            f"<br>{escape(f.advice)}</li>"
            for f in self.findings[:100]
        )
        verdict = "ok" if self.ok else "not ok"
        return f"<p><b>{escape(str(self._of()))}</b>: {verdict}, {_count(len(self.findings), 'finding')}</p><ul>{items}</ul>"


@dataclass(frozen=True, repr=False)
class VerifyReport(_Audit):
    """The result of verify()."""

    path: str = ""
    format: str = ""
    config: Optional[str] = None  #: the config.json that was used
    family: Optional[str] = None
    facts: dict = field(default_factory=dict)  #: label -> sentence
    tensors: list = field(default_factory=list)  #: dicts of name, dtype, shape, digest, ... for tensors whose data were read
    files: list = field(default_factory=list)  #: with sha256=True: dicts of path and sha256

    def _of(self):
        return self.path


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank during training, in bytes; `parameters` is a number of elements."""

    rank: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    total: int


@dataclass(frozen=True, repr=False)
class CheckReport(_Audit):
    """The result of check()."""

    config: str = ""
    family: str = ""
    mesh: dict = field(default_factory=dict)  #: axis -> degree
    mesh_ranks: int = 1
    parameters: int = 0  #: number of the model's parameters
    largest: Optional[RankMemory] = None  #: None if the model does not fit the mesh
    smallest: Optional[RankMemory] = None
    tensors: list = field(default_factory=list)  #: with tensors=True: dicts of name, shape, dtype, tied

    def _of(self):
        return self.config


@dataclass(frozen=True)
class ConversionPlan:
    """The plan of a conversion."""

    source: str
    source_format: str
    target_format: str
    mesh: str
    family: Optional[str]
    tensors: int  #: tensors to write
    moves: int  #: pairs of source and target boxes that share elements
    bytes_read: int
    bytes_written: int
    converted_tensors: int  #: tensors that change dtype
    left_out: list  #: dicts of what, tensors, objects, bytes
    files: list  #: dicts of path, bytes, tensors (False: metadata, an index)
    warnings: list
    notes: list
    json: dict = field(repr=False, compare=False)
    layout: Optional[str] = None
    peak_memory: Optional[int] = None  #: bytes
    disk_free: Optional[int] = None  #: bytes

    def __repr__(self):
        files = sum(file["tensors"] for file in self.files)
        return (
            f"<reshard.{type(self).__name__} {self.source_format} -> {self.target_format}: "
            f"{_count(self.tensors, 'tensor')}, {_bytes(self.bytes_read)} in, {_bytes(self.bytes_written)} out in "
            f"{_count(files, 'file')}>"
        )


@dataclass(frozen=True, repr=False)
class Conversion(ConversionPlan):
    """The result of convert()."""

    destination: str = ""
    checksums: int = 0  #: checksums of the source that were verified
    digests: int = 0  #: digests in reshard_manifest.json
    source_digests: int = 0  #: digests of the source's manifest that were verified
    seconds: float = 0.0


@dataclass(frozen=True)
class TensorView:
    """The result of a conversion to a format that refers to the source's files."""

    source: str
    source_format: str
    target_format: str
    destination: str
    tensors: int  #: tensors of the view
    refused: list  #: dicts of name, why
    seconds: float


@dataclass(frozen=True)
class TensorDifference:
    """The difference of a tensor between two checkpoints."""

    name: str
    shape: list
    dtype_a: str
    dtype_b: str
    different_elements: int
    differs: bool  #: whether it exceeds the tolerance
    max_abs: Optional[float] = None  #: of numbers: the largest |a-b|
    relative_l2: Optional[float] = None  #: |a-b| / |a|


@dataclass(frozen=True)
class DiffReport:
    """The result of diff()."""

    a: str
    b: str
    tolerance: float
    equal: bool
    structure: list  #: sentences about tensors that are missing on one side or differ in shape
    objects: list  #: names of values that differ
    not_compared: list  #: sentences about tensors and objects that were skipped
    renamed: list  #: sentences about different prefixes of names
    tensors: list  #: a TensorDifference for each common tensor
    json: dict = field(repr=False, compare=False)

    def __bool__(self):
        return self.equal

    def __repr__(self):
        differ = sorted((t for t in self.tensors if t.differs), key=lambda t: -(t.relative_l2 or 0))
        head = f"<reshard.DiffReport of {self.a!r} and {self.b!r}: {'equal' if self.equal else 'not equal'}, "
        head += f"{len(self.tensors) - len(differ)} of {_count(len(self.tensors), 'tensor')} equal>"
        lines = [f"  {s}" for s in self.structure[:_SHOWN]]
        lines += [
            f"  {t.name}  {_count(t.different_elements, 'element')}, relative L2 {t.relative_l2 or 0:.3g}"
            for t in differ[:_SHOWN]
        ]
        return "\n".join([head, *lines])


@dataclass(frozen=True)
class Inspection:
    """The result of inspect(). Its dicts have the members of `reshard inspect --json`."""

    path: str
    format: dict  #: name, title
    complete: bool
    attributes: dict
    files: dict  #: count, bytes, missing, cut_short, stale
    mesh: dict  #: ranks, axes, hypotheses, notes
    parts: list
    state: dict  #: model, optimizer, other
    objects: dict
    problems: list  #: sentences
    warnings: list
    notes: list
    tensors: list  #: dicts of name, kind, dtype, shape, placement, boxes, bytes
    json: dict = field(repr=False, compare=False)

    def __repr__(self):
        mesh = ", ".join(f"{a['name']}={a['size'] or '?'}" for a in self.mesh["axes"])
        lines = [f"<reshard.Inspection of {self.path!r}: {self.format['title']}, {_count(len(self.tensors), 'tensor')}"
                 f"{', ' + mesh if mesh else ''}, {'complete' if self.complete else 'not complete'}>"]  # fmt: skip
        for kind, facts in self.state.items():
            if facts["tensors"]:
                lines.append(
                    f"  {kind:9}  {_count(facts['tensors'], 'tensor')}, {_bytes(facts['bytes'])}, {', '.join(facts['dtypes'])}"
                )
        return "\n".join(lines + [f"  {p}" for p in [*self.problems, *self.warnings]])


def convert(src, dst, *, to, names=None, mesh=None, layout=None, dtype=None, keep_dtype=None, quantize=None,
            include=None, exclude=None, max_shard_size=None, shard_format=None, strategy=None, codec=None,
            shuffle=None, allow=None, repair=None, donor=None, vocab_divisible_by=None, vocab_padding=None,
            merge_adapter=False, adapter=None, lora_alpha=None, keep_unknown=False, source_layout=None,
            source_mesh=None, strip_prefix=None, part=None, rename=None, weights=None, family=None, family_file=None,
            source_names=None,
            config=None, memory=None, threads=None, device=None, gpu_memory=None, transport=None, dry_run=False,
            force=False, resume=None, state=None, progress=False):  # fmt: skip
    """Writes a checkpoint in another format, layout, naming or dtype. Returns a Conversion.

    Returns a ConversionPlan with dry_run=True, and a TensorView with to="hdf5-view". The options are those of `reshard
    convert --help`, by the same names. mesh may be a dict of axis and degree, rename a dict, repeatable options a list.
    progress: True (tqdm if installed), or a callable of bytes done and bytes in total. The destination appears when it
    is complete; after Ctrl-C the same call resumes.

    Example: reshard.convert("step-1000", "model", to="hf", dtype="bfloat16")
    """
    options = {k: v for k, v in locals().items() if k not in ("src", "dst", "progress")}
    _, data = _run("convert", options, (src, dst), progress, src)
    if "refused" in data:
        return _of(TensorView, data)
    return _of(Conversion if not dry_run else ConversionPlan, data, json=data)


def plan(src, dst=None, *, to, names=None, mesh=None, layout=None, dtype=None, keep_dtype=None, quantize=None,
         include=None, exclude=None, max_shard_size=None, shard_format=None, strategy=None, codec=None, shuffle=None,
         allow=None, repair=None, donor=None, vocab_divisible_by=None, vocab_padding=None, merge_adapter=False,
         adapter=None, lora_alpha=None, keep_unknown=False, source_layout=None, source_mesh=None, strip_prefix=None,
         part=None, rename=None, weights=None, family=None, family_file=None,
         source_names=None, config=None, memory=None, threads=None,
         device=None, gpu_memory=None, transport=None, ranks=None, ranks_per_machine=None,
         html=None):  # fmt: skip
    """Returns a ConversionPlan: what convert() would do with these options. Reads metadata only, writes nothing.

    dst: also checks the free space there. ranks, ranks_per_machine: plans for a job of so many ranks. The other options
    are those of convert(). Raises what convert() would raise before it reads tensor data.

    Example: reshard.plan("step-1000", to="dcp", mesh="tp=4").bytes_written
    """
    options = {k: v for k, v in locals().items() if k not in ("src", "dst")}
    _, data = _run("plan", options, (src,) if dst is None else (src, dst), None, src)
    return _of(ConversionPlan, data, json=data)


def _audit(cls, data, **more):
    members = dict(
        data, findings=[_of(Finding, f) for f in data["findings"]], checks=[_of(Check, c) for c in data["checks"]]
    )
    return _of(cls, dict(members, **more), json=data)


def verify(path, *, config=None, family=None, family_file=None,
           source_names=None, layout=None, mesh=None, against=None, bytes=False,
           values=False, replicas=False, sha256=False, lineage=False, source=None, source_layout=None, source_mesh=None,
           strip_prefix=None, part=None, rename=None, weights=None, junit=None, html=None, fail_on=None, memory=None,
           threads=None, device=None, gpu_memory=None, transport=None, progress=False):  # fmt: skip
    """Verifies the bytes, checksums and digests of a checkpoint, and compares it with a config, mesh or checkpoint.

    Returns a VerifyReport. Faults of the checkpoint are findings, not exceptions. report.ok, or bool(report), is true
    if no finding reaches fail_on: "note" (default), "warning" or "error".

    config: the model's config.json (default: the one in `path` or the directory above). mesh, layout: how it should be
    sharded. against: another checkpoint of the same model, in any format. bytes: reads all data and verifies checksums,
    which is the default without config, mesh, layout and against. values: also finds NaN, infinities, zero and constant
    rows. replicas: compares all stored copies of each shard. sha256: lists the SHA-256 of each file. lineage: merges the
    sources of a merged checkpoint again and compares; source={"a": "dir"} says where they are now. junit, html: files for
    a report; they replace only an earlier report. The other options are those of open() and convert().

    Raises MissingError if there is no checkpoint, and CorruptError if its metadata cannot be read.

    Example: reshard.verify("model", config="config.json").findings
    """
    options = {k: v for k, v in locals().items() if k not in ("path", "progress")}
    return _audit(VerifyReport, _run("verify", options, (path,), progress, path)[1])


def check(config, *, mesh, family=None, family_file=None, world=None, sequence=None, dtype=None, grad_dtype=None,
          tensors=False, junit=None, html=None, fail_on=None):  # fmt: skip
    """Checks if the model of a config.json fits a mesh, and estimates the memory of each rank. Returns a CheckReport.

    mesh: "tp=8,pp=4", a dict, or a torch DeviceMesh. world: the number of ranks that its degrees must multiply to.
    sequence: tokens per sequence, checked against cp and tp. dtype, grad_dtype: of the weights (default: the config's)
    and the gradients (default: float32) in memory. tensors=True lists the model's tensors. report.ok, or bool(report), is
    true if no finding reaches fail_on: "note" (default), "warning" or "error". junit, html: files for a report; they
    replace only an earlier report. No checkpoint is needed.

    Example: reshard.check("config.json", mesh="tp=8,pp=4", world=32).largest
    """
    data = _run("check", dict(locals()), (), None, config)[1]
    ranks = data["ranks"] or {}
    memory = {k: _of(RankMemory, ranks[k]) for k in ("largest", "smallest") if k in ranks}
    return _audit(CheckReport, data, **memory)


def diff(a, b, *, tolerance=None, source_layout=None, source_mesh=None, strip_prefix=None, part=None, rename=None,
         weights=None, family=None, family_file=None,
         source_names=None, config=None, memory=None, threads=None, device=None,
         gpu_memory=None, transport=None, html=None, progress=False):  # fmt: skip
    """Compares the tensors of two checkpoints, in any formats and layouts. Returns a DiffReport.

    tolerance: the largest |a - b| at which floating-point values count as equal (default: 0). Options on how a
    checkpoint is to be read (part, rename, source_layout, ...) are those of open() and convert(), and apply to `a`.
    html: a file for a report; it replaces only an earlier report. report.equal, or bool(report), is true if nothing
    differs.

    Example: reshard.diff("step-1000", "step-2000").tensors
    """
    options = {k: v for k, v in locals().items() if k not in ("a", "b", "progress")}
    data = _run("diff", options, (a, b), progress, a)[1]
    return _of(DiffReport, dict(data, tensors=[_of(TensorDifference, t) for t in data["tensors"]]), json=data)


def inspect(path, *, shards=False, filter=None, source_layout=None, source_mesh=None, strip_prefix=None, part=None,
            rename=None, weights=None, html=None):  # fmt: skip
    """Reads from its metadata what a checkpoint contains and how it is sharded. Returns an Inspection.

    shards=True lists the file, offset and length in bytes of each shard. filter: a glob, or several, of the tensors to
    list. html: a file for a report; it replaces only an earlier report. The other options are those of open(). Files
    that are missing or cut short are problems of the Inspection, not exceptions.

    Example: reshard.inspect("step-1000").mesh["axes"]
    """
    options = {k: v for k, v in locals().items() if k != "path"}
    data = _run("inspect", options, (path,), None, path)[1]
    return _of(Inspection, data, json=data)
