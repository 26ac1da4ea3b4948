# SPDX-License-Identifier: Apache-2.0
"""Translates keyword arguments into the words of a command line."""

import os

from ._errors import UsageError


# Options whose values are tensor names, which may contain any character.
_NAMES = ("include", "exclude", "keep_dtype", "filter", "strip_prefix", "rename", "part")


def path_of(path):
    """Returns a path as text. Fails if it contains a NUL, which would end it."""
    text = os.fsdecode(path)
    if "\0" in text:
        raise UsageError(f"{text!r}: expected a path without a NUL character")
    return text


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


def _texts(name, value):
    """Returns the values of an option as words."""
    if name in ("mesh", "source_mesh") and isinstance(value, dict):
        value = ",".join(f"{axis}={size}" for axis, size in value.items())
    elif name in ("rename", "source") and isinstance(value, dict):
        value = [f"{a}={b}" for a, b in value.items()]
    values = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    texts = [os.fsdecode(v) if isinstance(v, (bytes, os.PathLike)) else str(v) for v in values]
    if name not in _NAMES and any("\0" in text for text in texts):
        raise UsageError(f"{name}: {value!r}: expected text without a NUL character")
    return texts


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
