"""Files of a run directory that may come from anywhere: only plain files are opened, and no link is followed.

In: a path. Out: its bytes or text, or an `OSError`. Invariant: opening never waits, as it would on a pipe.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

LARGEST_TEXT = 64 << 20


def open_regular(path: Path) -> BinaryIO:
    """A plain file for reading."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return open(handle, "rb")


def read_regular(path: Path) -> str:
    """The text of a plain file of ordinary size."""
    with open_regular(path) as file:
        data = file.read(LARGEST_TEXT + 1)
    if len(data) > LARGEST_TEXT:
        raise OSError(errno.EFBIG, "too large", str(path))
    return data.decode("utf-8", "replace")
