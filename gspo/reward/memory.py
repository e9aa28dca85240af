"""How much memory a process and its descendants hold, and how much processor time they have used.

In: a process id. Out: bytes, or seconds. Invariant: what processes share is counted once, and a number is never an error: what has ended
meanwhile holds nothing. Linux only; elsewhere the answer is 0.

Memory is watched, not limited by `RLIMIT_AS`: that counts addresses, of which numpy, torch and CUDA reserve many times what
they use, and it would fail in the middle of a library instead of naming the function.
"""

from __future__ import annotations

import os

_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


def held(pid: int, at_least: int = 0) -> int:
    """Bytes of a process and all below it. Below `at_least` an upper bound will do, which is quicker to find."""
    tree = [pid, *descendants(pid)]
    rough = sum(map(_resident, tree))
    return rough if rough < at_least else sum(map(_proportional, tree))


def processor_seconds(pid: int) -> float:
    """Of a process and all below it, with the children that it has waited for."""
    return sum(map(_used, [pid, *descendants(pid)])) / _TICKS


def _used(pid: int) -> int:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) if len(fields) > 14 else 0


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    found = []
    for child in _read(f"/proc/{pid}/task/{pid}/children").split():
        found += [int(child), *descendants(int(child))]
    return found


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if len(fields) > 1 else 0


def _proportional(pid: int) -> int:
    """Its share of what it holds with others: forks share nearly everything."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(pid)


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:  # a process may give itself any name
            return file.read()
    except OSError:
        return ""
