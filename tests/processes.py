"""Processes and descriptors as listed in /proc. A process that ends during the scan counts as absent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SETTLE_S = 60.0
"""What other threads start and open for a moment is gone by then, on any machine. A leak stays."""


def _state_and_parent(pid: int | str) -> tuple[str, int]:
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state, int(parent)


def children_of(pid: int) -> set[int]:
    """Children of a process, including zombies."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if _state_and_parent(folder.name)[1] == pid:
                found.add(int(folder.name))
    return found


def descendants(pid: int) -> list[int]:
    """Children of a process and their descendants."""
    return [each for child in children_of(pid) for each in (child, *descendants(child))]


def is_running(pid: int) -> bool:
    try:
        return _state_and_parent(pid)[0] not in ("Z", "X")
    except OSError:
        return False


def descriptors() -> int:
    """Number of descriptors that are open in this process."""
    return len(os.listdir("/proc/self/fd"))


def settled(read: Callable[[], T], expected: T) -> T:
    """What `read` returns once it is as expected, or at last after `SETTLE_S`.

    For counts that another thread may exceed for a moment: while it starts a worker or reads from /proc, it holds
    descriptors and children of its own.
    """
    until = time.monotonic() + SETTLE_S
    while (found := read()) != expected and time.monotonic() < until:
        time.sleep(0.05)
    return found


def steady(read: Callable[[], T]) -> T:
    """What `read` returns 40 times in a row, for 2 s."""
    found, times = read(), 1
    until = time.monotonic() + SETTLE_S
    while times < 40 and time.monotonic() < until:
        time.sleep(0.05)
        again = read()
        found, times = again, times + 1 if again == found else 1
    return found
