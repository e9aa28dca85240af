"""Temporary folders for files that are sent to a vLLM on the same machine: in shared memory if they fit.

In: a size in bytes. Out: a new folder. Invariant: no file is left behind. A process keeps its files in a folder of its
own, which it holds locked and removes when it exits. The folder of a process that was killed is removed the next time
any process asks for a folder.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED = Path("/dev/shm")
PREFIX, LOCK = "gspo-weights-", ".held"
_folders: dict[tuple[Path, int], Path] = {}
"""The folders of this process, by parent directory and process id: a fork needs one of its own."""


def transfer_folder(size: int) -> str:
    """A new folder with room for `size` bytes: in shared memory if they fit, else in the temporary directory."""
    disk = Path(tempfile.gettempdir())
    shared = SHARED.is_dir() and os.access(SHARED, os.W_OK)
    for place in (SHARED, disk):
        _sweep(place)
    # A margin, because other programs use shared memory, too.
    fits = shared and shutil.disk_usage(SHARED).free > 1.2 * size
    return tempfile.mkdtemp(dir=_locked_folder(SHARED if fits else disk))


@contextmanager
def probe(size: int) -> Iterator[str]:
    """A small file where a file of `size` bytes would be, to ask another process whether it can read it."""
    folder = Path(transfer_folder(size))
    try:
        (folder / "probe").write_bytes(b"1")
        yield str(folder / "probe")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(place: Path) -> Path:
    """This process's folder in `place`, locked as long as the process lives."""
    process = os.getpid()
    known = _folders.get((place, process))
    if known is not None and (known / LOCK).exists():
        return known
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / LOCK).exists():  # otherwise another process swept it just before it was locked
            atexit.register(_remove, folder, process)
            _folders[place, process] = folder
            return folder
        os.close(lock)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Remove the folders of processes that no longer exist: their locks are free."""
    for held in place.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # another user's, or already removed
            lock = os.open(held, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(held.parent, ignore_errors=True)
            finally:
                os.close(lock)
