"""Closing the door from the inside, before a single byte of the program is read.

In: what `Box` asks for. Out: a process that can no longer do harm. Invariant: limits are hard ones, so that nobody can
raise them again; a step that fails ends the process instead of going on without it.
"""

from __future__ import annotations

import ctypes
import os
import resource

from gspo.reward.sandbox.inside import landlock, seccomp

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import Any

THREADS = 32
_SIGKILL = 9
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def claim_pipes() -> tuple[int, int]:
    """Take the protocol away from the descriptors that programs use."""
    requests, answers = os.dup(0), os.dup(1)
    _lead_nowhere(0, 1)
    return requests, answers


def hush() -> None:
    """Until now the outside listened to what went wrong."""
    _lead_nowhere(2)


def _lead_nowhere(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def close_files(settings: dict[str, Any]) -> None:
    """Let this process open nothing but Python's own files. Without namespaces, leave it under an overseer."""
    if settings["level"] != 5:  # bubblewrap sees to that itself
        die_with_parent(settings["parent"])
    if settings["level"] == 6:
        _leave_overseer()
    if settings["level"] == 6 or (settings["level"] == 5 and landlock.version()):
        landlock.restrict(settings["readable"], settings["listed"])


def close_calls(settings: dict[str, Any]) -> None:
    """Limits and, unless there is no sandbox at all, the filter. Nothing can be started afterwards."""
    if settings["level"] and not settings["processes"]:
        _leave_doorkeeper()
    limit(settings)
    if settings["level"]:
        seccomp.install()


def limit(settings: dict[str, Any]) -> None:
    """Hard limits on memory, processor time, files and threads, and on what all processes of a user share."""
    limits = {
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 0,  # of real-time signals; ordinary ones arrive all the same
    }
    if settings["processes"]:
        limits[resource.RLIMIT_NPROC] = settings["processes"] + THREADS
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def die_with_parent(parent: int) -> None:
    """The kernel ends this process when the one that started it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _leave_doorkeeper() -> None:
    """Leave a child that counts this process's threads.

    A limit on processes is one on all processes of a user: where sandboxes share one, a program with many threads would
    keep its neighbors, and the trainer, from starting any."""
    questions, program = seccomp.ask_for_threads(), os.getpid()
    if os.fork():
        os.close(questions)
        return
    die_with_parent(program)
    os.dup2(questions, 0)
    os.closerange(1, 64)
    folder = f"/proc/{program}/task"  # it has a link for each thread, which can be counted without opening it
    while True:
        try:
            seccomp.answer(0, lambda: os.stat(folder).st_nlink - 2 <= THREADS)
        except FileNotFoundError:  # the thread that asked, or all of them, are gone
            if not os.path.exists(folder):
                os._exit(0)


def _leave_overseer() -> None:
    """Go on in a child. The parent adopts whatever the child leaves behind, and ends it with the child."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    overseer = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(overseer)
        return
    os.closerange(0, 64)
    _oversee(child)


def _oversee(child: int) -> None:
    try:
        _, status = os.waitpid(child, 0)
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                for pid in children.read().split():
                    os.kill(int(pid), _SIGKILL)
            os.waitpid(-1, 0)
    except OSError:  # nobody is left
        os._exit(0 if status == 0 else 1)
