"""Files of a run directory that may come from anywhere and may still grow.

In: a path. Out: its text, or where to read on. Invariant: only plain files are opened and no link is followed, so opening
never waits, as it would on a pipe; a file that was cut back, replaced or deleted is not read on but anew.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

LARGEST_TEXT = 64 << 20
MARK = 64
"""Bytes before the reading position that must not have changed."""


def open_regular(path: Path) -> BinaryIO:
    """A plain file for reading."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return open(handle, "rb")


def read_regular(path: Path, largest: int = LARGEST_TEXT) -> str:
    """The text of a plain file of ordinary size."""
    with open_regular(path) as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise OSError(errno.EFBIG, "too large", str(path))
    return data.decode("utf-8", "replace")


class ReadPosition:
    """How far a growing file was read, and how to notice that it is not that file any more."""

    def __init__(self) -> None:
        self.position = 0
        self._mark = b""
        self._identity: tuple[int, int] | None = None

    @property
    def known(self) -> bool:
        """Whether there was a file."""
        return self._identity is not None

    def still_holds(self, file: BinaryIO) -> bool:
        """Whether the file begins with what was read; True for one that is seen for the first time."""
        status = os.fstat(file.fileno())
        before, self._identity = self._identity, (status.st_dev, status.st_ino)
        if before is None:
            return True
        if before != self._identity or status.st_size < self.position:
            return False
        file.seek(self.position - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def remember(self, file: BinaryIO) -> None:
        """Note what stands before the position."""
        file.seek(max(0, self.position - MARK))
        self._mark = file.read(min(MARK, self.position))
