# SPDX-License-Identifier: Apache-2.0
"""merge, latest, synth, families and mount: more commands of the program, with options of the same names."""

import ctypes
import os
import subprocess
import sys
from dataclasses import dataclass

from ._commands import Conversion, ConversionPlan, _of, _run
from ._errors import CorruptError, UnsupportedError, UsageError, of
from ._words import path_of, words_of


def merge(sources, dst, *, to, average=False, weights=None, ema=None, expression=None, accumulate=None,
          others_from=None, names=None, mesh=None, layout=None, dtype=None, keep_dtype=None, include=None, exclude=None,
          max_shard_size=None, shard_format=None, strategy=None, codec=None, shuffle=None, allow=None, repair=None,
          donor=None, vocab_divisible_by=None, vocab_padding=None, keep_unknown=False, source_layout=None,
          source_mesh=None, strip_prefix=None, part=None, rename=None, family=None, family_file=None,
          source_names=None, config=None,
          memory=None, threads=None, device=None, gpu_memory=None, transport=None, dry_run=False, force=False,
          progress=False):  # fmt: skip
    """Merges checkpoints of one model, element by element, and writes the result. Returns a Conversion.

    sources: a list of two or more paths, or a dict of names and paths for `expression`. They may differ in format,
    layout, names and dtype. Exactly one of these says how: average=True; weights, a number for each source; ema, the
    decay of a moving average in the given order; expression, a formula such as "base + 0.7*(tuned - base)" (sources of
    a list are named s1, s2, ...). accumulate: "float32" (default) or "float64", the precision of each step; the result
    is rounded to the dtype of the first source, or `dtype`. others_from: the name of the source whose tensors that are
    not floating-point are taken (default: all must be equal). config.json and the tokenizer are the first source's.
    The other options are those of convert(). Returns a ConversionPlan with dry_run=True.

    Example: reshard.merge(["step-900", "step-1000"], "model", average=True, to="hf")
    """
    options = {k: v for k, v in locals().items() if k not in ("sources", "dst", "progress")}
    if isinstance(sources, (str, bytes, os.PathLike)):
        raise UsageError(f"sources: expected a list of paths, got {sources!r}")
    if isinstance(sources, dict):
        places = [f"{name}={path_of(path)}" for name, path in sources.items()]
    else:
        places = [path_of(path) for path in sources]
    if weights is not None and not isinstance(weights, str):
        options["weights"] = ",".join(repr(float(w)) for w in weights)
    _, data = _run("merge", options, (*places, dst), progress, None)
    return _of(Conversion if not dry_run else ConversionPlan, data, json=data)


def latest(run):
    """Returns the path of the newest complete checkpoint of a training run: the one with the highest step in its name
    whose metadata is valid and whose files all exist.

    run: the directory with a checkpoint for each step. Raises CorruptError if none is complete, with the reason of the
    last one, UnsupportedError if several models are next to each other and no steps ("unet", "vae"), and MissingError
    or FileError if there is none.

    Example: reshard.open(reshard.latest("outputs/checkpoint"))
    """
    _, data = _run("latest", {}, (run,), None, run)
    if data["newest"] is None and any(one["complete"] for one in data["checkpoints"]):
        raise UnsupportedError(f"{data['run']}: {data['problem']}", data["run"])
    if data["newest"] is None:
        last = data["checkpoints"][-1]
        raise CorruptError(f"{data['run']}: no checkpoint is complete; the last: {last['path']}: {last['problem']}", data["run"])
    return data["newest"]


@dataclass(frozen=True)
class Family:
    """A model family that reshard knows."""

    name: str  #: as family= takes it: "llama"
    title: str  #: "Llama"
    model_types: list  #: what config.json calls it
    conventions: list  #: whose names it has, as names= takes them: "hf", "torchtitan"


def families():
    """Returns the model families that reshard knows, a list of Family.

    Example: [f.name for f in reshard.families() if "qwen3_moe" in f.model_types]
    """
    _, data = _run("families", {}, (), None, None)
    return [_of(Family, family) for family in data["families"]]


def synth(dst, *, model=None, config=None, to=None, mesh=None, names=None, dtype=None, layers=None, optimizer=False,
          metadata_only=False, headers_only=False, shape=None, without=None, force=False, memory=None, threads=None,
          device=None, gpu_memory=None, transport=None):  # fmt: skip
    """Writes a checkpoint of a model's real names and shapes with made-up values, for tests and benchmarks.

    model: "llama3-tiny" (1 MB), "llama3-8b", ...; or config: a config.json. to, mesh, names: the format, the mesh of
    the ranks that save it and the names, as for convert(). optimizer=True adds Adam's state. metadata_only and
    headers_only write no tensor data. shape ({name: "16064x8192"}) and without (globs) make a faulty one. The same
    model has the same values for every mesh and naming. Returns `dst` as text.

    Example: reshard.synth("tiny", model="llama3-tiny", mesh="tp=2,dp_shard=2")
    """
    options = {k: v for k, v in locals().items() if k != "dst"}
    _run("synth", dict(options, quiet=True), (dst,), None, dst, json=False)
    return path_of(dst)


class Mount:
    """A mounted checkpoint: a directory that shows it in another format. Returned by mount(); a context manager that
    unmounts at its end."""

    def __init__(self, path):
        self.path = path  #: the directory

    def unmount(self):
        """Ends the mount. Files in it must be closed."""
        for program in ("fusermount3", "fusermount"):
            try:
                done = subprocess.run([program, "-u", self.path], capture_output=True, text=True)
            except FileNotFoundError:
                continue
            if done.returncode:
                raise of(5, f"{self.path}: {done.stderr.strip()}")
            return
        # Root mounts without fusermount3, and can unmount without it.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(self.path), 0):
            why = os.strerror(ctypes.get_errno())
            raise UsageError(f"{self.path}: cannot unmount: {why}; expected fusermount3 on PATH: install fuse3")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.unmount()

    def __repr__(self):
        return f"<reshard.Mount {self.path!r}>"


# The format is `to` as in the other functions, because `as` is a keyword.
def mount(src, directory, *, to, names=None, dtype=None, keep_dtype=None, quantize=None, include=None, exclude=None,
          max_shard_size=None, config=None, family=None, family_file=None, source_names=None, part=None,
          strip_prefix=None, rename=None, weights=None, source_layout=None, source_mesh=None, allow=None, check=False,
          log=None, memory=None, threads=None):  # fmt: skip
    """Mounts a checkpoint at an empty directory in another format, without writing anything. Returns a Mount.

    The files are computed when they are read, by a process of its own that ends with the mount. Needs FUSE
    (/dev/fuse and fusermount3). to: the format, as the command line's --as; check=True verifies an item's checksum
    before its bytes are served; log: a file to which failed reads are appended. The other options are those of
    convert(). Raises what convert() would raise.

    Example: with reshard.mount("step-1000", "m", to="hf") as m: model = from_pretrained(m.path)
    """
    options = {k: v for k, v in locals().items() if k not in ("src", "directory", "to")}
    words = words_of(dict({"as": to}, **options), src, directory)
    program = [sys.executable, "-c", "from reshard._program import main; main()", "mount", "--background", "--quiet"]
    done = subprocess.run(program + words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          env=dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p)))  # fmt: skip
    if done.returncode:
        raise of(done.returncode, done.stderr.strip().replace("reshard: error: ", "", 1))
    return Mount(path_of(directory))
