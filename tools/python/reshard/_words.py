"""Keyword arguments as the words of a command line."""

import os


def words_of(options, *positional):
    """["--keep-dtype=*norm*", "--force", "--", "step-1000"] of a dict and positional arguments. None: left out."""
    out = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None or (value is False and name != "shuffle"):
            continue
        if value is True:
            out.append(flag)
        elif value is False:
            out.append("--no-" + name)
        elif name in ("mesh", "source_mesh") and isinstance(value, dict):
            out.append(flag + "=" + ",".join(f"{axis}={size}" for axis, size in value.items()))
        elif name in ("rename", "source") and isinstance(value, dict):
            out.extend(f"{flag}={a}={b}" for a, b in value.items())
        elif isinstance(value, (list, tuple, set, frozenset)):
            out.extend(f"{flag}={os.fspath(v) if isinstance(v, os.PathLike) else v}" for v in value)
        else:
            out.append(f"{flag}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
    return out + ["--", *(os.fsdecode(p) for p in positional)] if positional else out


def progress_of(progress, what):
    """(callback(done, total) or None, what to call at the end) of progress=True, a callable, or nothing."""
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
    """A line every ten seconds, where there is no tqdm."""

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
