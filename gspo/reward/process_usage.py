"""Memory and CPU time of a process and its descendants.

In: a process id. Out: bytes, or seconds. Invariant: memory that processes share is counted once, and these functions
never raise: a process that has ended holds nothing. Linux only; elsewhere the result is 0.

Memory is monitored, not limited with `RLIMIT_AS`. That limit counts address space, of which numpy, torch and CUDA
reserve many times what they use, and it would fail inside a library instead of naming the reward function.
"""

from __future__ import annotations

import os

_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, at_least: int = 0) -> int:
    """Bytes held by a process and its descendants. Below `at_least`, a cheaper upper bound is returned."""
    tree = [pid, *descendants(pid)]
    rough = sum(map(_resident, tree))  # counts shared pages several times, but smaps_rollup is far slower to read
    return rough if rough < at_least else sum(map(_proportional, tree))


def processor_seconds(pid: int) -> float:
    """CPU seconds of a process and its descendants, including children that have already been reaped."""
    return sum(map(_used, [pid, *descendants(pid)])) / _TICKS


def _used(pid: int) -> int:
    # The second field is the process name in parentheses, which may itself contain spaces and parentheses.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) if len(fields) > 14 else 0


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants."""
    found = []
    for child in _read(f"/proc/{pid}/task/{pid}/children").split():
        found += [int(child), *descendants(int(child))]
    return found


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if len(fields) > 1 else 0


def _proportional(pid: int) -> int:
    """Proportional set size: shared pages are divided among their holders, since forks share nearly everything."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(pid)


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:  # a process name may hold any bytes
            return file.read()
    except OSError:
        return ""
