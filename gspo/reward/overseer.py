"""The process above a reward worker: whatever the functions leave behind ends with the worker.

In: a process that has just started. Out: the same program going on in a child, under an overseer that only waits. Invariant:
everything a function starts, also what leaves its session or loses its parent (a daemon), is a descendant of the overseer,
because orphans are given to it; it ends them all when the worker ends, when it is told to (SIGTERM), or when the trainer is
gone, and only then ends itself, in the way in which the worker did. Linux only; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LAST_S = 5
"""After this long the overseer ends, even if something cannot be ended."""


class _Told(BaseException):
    """To end everything."""


def leave_overseer() -> None:
    """Returns in the child alone."""
    if sys.platform != "linux":
        return
    system = ctypes.CDLL(None)
    system.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    system.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    overseer, child = os.getpid(), os.fork()
    if child:
        _oversee(child)
    system.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != overseer:
        os._exit(1)


def _oversee(child: int) -> None:
    os.closerange(0, 3)  # the pipes are the worker's: they must close when it ends
    status = _wait(child)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(_LAST_S)
    while True:
        for pid in _children():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            _end_as(status)
        status = ended if pid == child else status


def _wait(child: int) -> int:
    """Until the worker has ended, or this process is told to end it."""
    try:
        signal.signal(signal.SIGTERM, _tell)
        while True:  # orphans are reaped on the way
            pid, status = os.waitpid(-1, 0)
            if pid == child:
                return status
    except _Told:
        return signal.SIGKILL


def _tell(number: int, frame: FrameType | None) -> None:
    raise _Told


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return list(map(int, file.read().split()))


def _end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
