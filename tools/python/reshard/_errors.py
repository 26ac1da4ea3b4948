# SPDX-License-Identifier: Apache-2.0
"""The exceptions: one hierarchy, below Error."""

import os
from errno import ENOENT

__all__ = [
    "Error",
    "UsageError",
    "CorruptError",
    "UnsupportedError",
    "FileError",
    "MissingError",
    "RankError",
    "InternalError",
]


class Error(Exception):
    """The base of all errors. The message says what is wrong, expected and got, and what to do.

    path: the file or checkpoint, or None.
    offset: bytes from the beginning of the file, or None.
    tensor: the name of the tensor, or None.
    """

    path = None
    tensor = None
    offset = None

    def __init__(self, message="", path=None, tensor=None, offset=None):
        super().__init__(message)
        self.message = message
        self.path = path
        self.tensor = tensor
        self.offset = offset

    def __str__(self):
        return self.message

    def __reduce__(self):
        return type(self), (self.message, self.path, self.tensor, self.offset)


class UsageError(Error, ValueError):
    """A wrong argument."""


class CorruptError(Error):
    """The bytes contradict the format or each other, or a checksum."""


class UnsupportedError(Error):
    """Valid, but refused; the message says what would be needed."""


class FileError(Error, OSError):
    """An error of the operating system. `filename` is the path."""

    @property
    def filename(self):
        return self.path


class MissingError(FileError, FileNotFoundError):
    """A file or a checkpoint does not exist."""

    errno = ENOENT


class RankError(Error):
    """Another rank failed."""


class InternalError(Error, RuntimeError):
    """A bug in reshard."""


_BY_CODE = {2: UsageError, 3: CorruptError, 4: UnsupportedError, 5: FileError, 6: RankError}
_PLACE = r"(?:^|(?<=: ))((?:(?!: ).)*)@(0x[0-9a-f]+|\d+): "
_ABSENT = r"not found|No such file|does not exist|is missing|contains no checkpoint"
_TENSOR = r"tensor '((?:[^'\\]|\\.)*)'"


def of(code, message):
    """Returns the exception for an error of the library."""
    import re

    path = offset = tensor = None
    if place := re.search(_PLACE, message):
        path, offset = place.group(1), int(place.group(2), 0)
    elif ": " in message:
        first = message.split(": ", 1)[0]
        if "'" not in first and (code == 5 or "/" in first or os.path.exists(first)):
            path = first
    if name := re.search(_TENSOR, message):
        tensor = name.group(1)
    kind = _BY_CODE.get(code, InternalError)
    if kind is FileError and path is not None and re.search(_ABSENT, message) and not os.path.exists(path):
        kind = MissingError
    return kind(message, path, tensor, offset)
