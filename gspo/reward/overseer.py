"""The parent process of a reward worker: it kills everything the reward functions leave behind.

In: a process that has just started. Out: the same program continues in a child, under an overseer that only waits.
Invariant: every process a function starts stays a descendant of the overseer, even one that leaves its session or loses
its parent (a daemon), because the overseer is a child subreaper. It kills them all when the worker ends, on SIGTERM, or
when the trainer is gone. Then it exits with the worker's exit status. Linux only; elsewhere this does nothing.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LAST_S = 5
"""After this many seconds the overseer exits, even if a process cannot be killed."""


class _Terminated(BaseException):
    """SIGTERM arrived."""


def leave_overseer() -> None:
    """Fork, and continue in the child only. The parent becomes the overseer and never returns."""
    if sys.platform != "linux":
        return
    system = ctypes.CDLL(None)
    # SIGTERM, not SIGKILL: the overseer must still kill what the functions started.
    system.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    adopt_orphans()
    overseer = os.getpid()
    child = os.fork()
    if child:
        _oversee(child)
    system.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != overseer:  # the overseer died before the line above took effect
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def children() -> set[int]:
    """Process ids of the children of this process. Empty where the system does not say."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:
        return set()


def _oversee(child: int) -> None:
    os.closerange(0, 3)  # the pipes belong to the worker and must close when it ends
    status = _wait(child)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A process in an uninterruptible system call cannot be reaped.
    signal.alarm(_LAST_S)
    while True:
        for pid in children():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            _end_as(status)
        status = ended if pid == child else status


def _wait(child: int) -> int:
    """Wait until the worker ends or SIGTERM arrives."""
    try:
        signal.signal(signal.SIGTERM, _raise_terminated)
        while True:  # `-1` also reaps orphans
            pid, status = os.waitpid(-1, 0)
            if pid == child:
                return status
    except _Terminated:
        return signal.SIGKILL


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _end_as(status: int) -> None:
    """Exit the way the worker did, so the trainer sees its exit code or signal."""
    if os.WIFSIGNALED(status):
        # The signal would otherwise write a core dump of the overseer in place of the worker's.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
