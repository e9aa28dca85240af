"""Safe reading of run files that are untrusted and may still grow.

In: a path. Out: its text, or the position to continue from. Invariant: only regular files are opened and no link is
followed, so opening never blocks, as it would on a pipe; a file that was truncated, replaced or deleted is read again
from its start.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

LARGEST_TEXT = 64 << 20
MARK = 64
"""Bytes before the read position that must not have changed."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading."""
    # O_NONBLOCK: opening a named pipe would otherwise wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(handle, "rb")


def read_regular(path: Path, largest: int = LARGEST_TEXT) -> str:
    """The text of a regular file of at most `largest` bytes."""
    with open_regular(path) as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise OSError(errno.EFBIG, "too large", str(path))
    # A damaged character must not hide the rest of the file.
    return data.decode("utf-8", "replace")


class ReadPosition:
    """Read position in a growing file, which detects that the file was truncated or replaced."""

    def __init__(self) -> None:
        self.position = 0
        self._mark = b""
        self._identity: tuple[int, int] | None = None

    @property
    def known(self) -> bool:
        """Whether a file was seen."""
        return self._identity is not None

    def is_valid(self, file: BinaryIO) -> bool:
        """Whether the file still starts with what was read; also true for a file that is seen for the first time."""
        status = os.fstat(file.fileno())
        before, self._identity = self._identity, (status.st_dev, status.st_ino)
        if before is None:
            return True
        if before != self._identity or status.st_size < self.position:
            return False
        # The same inode and a larger size do not prove it: a resume truncates the file and then writes other lines.
        file.seek(self.position - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def remember(self, file: BinaryIO) -> None:
        """Store the bytes before the position."""
        file.seek(max(0, self.position - MARK))
        self._mark = file.read(min(MARK, self.position))
