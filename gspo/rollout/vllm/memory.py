"""Where files lie that travel to a vLLM on the same machine: in shared memory if they fit.

Invariant: nothing stays behind. A process keeps its files in a folder of its own, which it holds locked and removes at its
end; what a process has left that was killed goes when the next one asks for room.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")
PREFIX, LOCK = "gspo-weights-", ".held"
_own: dict[tuple[Path, int], Path] = {}
"""The folder of a process, by place and process: a fork needs one of its own."""


def memory_folder(size: int) -> str:
    """A new folder with room for so many bytes: in shared memory if they fit, else in the temporary directory."""
    disk, shared = Path(tempfile.gettempdir()), SHARED.is_dir() and os.access(SHARED, os.W_OK)
    for place in (SHARED, disk):
        _sweep(place)
    fits = shared and shutil.disk_usage(SHARED).free > 1.2 * size
    return tempfile.mkdtemp(dir=_held(SHARED if fits else disk))


def _held(place: Path) -> Path:
    """This process's folder there, held as long as it lives."""
    process = os.getpid()
    known = _own.get((place, process))
    if known is not None and (known / LOCK).exists():
        return known
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / LOCK).exists():  # else it was swept just before it was locked
            atexit.register(_remove, folder, process)
            _own[place, process] = folder
            return folder
        os.close(lock)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Remove what processes have left that are no more."""
    for held in place.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # somebody else's, or gone by now
            lock = os.open(held, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(held.parent, ignore_errors=True)
            finally:
                os.close(lock)
