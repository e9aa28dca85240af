"""Processes as listed in /proc. A process that ends during the scan counts as absent."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


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
