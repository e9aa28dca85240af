"""Restrict the current process before a single byte of the program is read.

In: the settings from `Box`. Out: a process that can no longer do harm. Invariant: all limits are hard limits, so they
cannot be raised again. If a step fails, the process ends; it never continues without it.
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
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def claim_pipes() -> tuple[int, int]:
    """Move the protocol to descriptors that programs do not use."""
    # A program that reads its standard input or prints must neither swallow a request nor forge an answer.
    requests = os.dup(0)
    answers = os.dup(1)
    _redirect_to_null(0, 1)
    return requests, answers


def silence_stderr() -> None:
    """Discard standard error. Until now it reported start-up errors to `Box`."""
    _redirect_to_null(2)


def _redirect_to_null(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def restrict_files(settings: dict[str, Any]) -> None:
    """Allow this process to open Python's own files only. Without namespaces, put it under an overseer."""
    if settings["level"] != 5:  # bubblewrap does this itself
        die_with_parent(settings["parent"])
    if settings["level"] == 6:
        _leave_overseer()
    # After the fork: the overseer must still be able to read /proc.
    if settings["level"] == 6 or (settings["level"] == 5 and landlock.version()):
        landlock.restrict(settings["readable"], settings["listed"])


def restrict_calls(settings: dict[str, Any]) -> None:
    """Set the limits and, except at level 0, the seccomp filter. No process can be started afterwards."""
    if settings["level"] and not settings["processes"]:
        _fork_thread_counter()
    limit(settings)
    if settings["level"]:
        seccomp.install()


def limit(settings: dict[str, Any]) -> None:
    """Set hard limits on memory, CPU time, files and threads, and on resources that all processes of a user share."""
    limits = {
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_CPU: settings["cpu_s"],
        # Applies to regular files only; pipes still work. A second barrier behind Landlock and read-only mounts.
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 64,
        # A core dump would write the memory of a crashed program to the disk.
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 0,  # limits real-time signals only; ordinary ones still arrive
    }
    if settings["processes"]:
        limits[resource.RLIMIT_NPROC] = settings["processes"] + THREADS
    for which, value in limits.items():
        # An unprivileged process cannot raise a hard limit, so a lower one that is already set stays.
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL))
    if os.getppid() != parent:  # the parent ended before the call above took effect
        os._exit(1)


def _fork_thread_counter() -> None:
    """Fork a child that limits this process's threads.

    `RLIMIT_NPROC` counts all processes of a user. If sandboxes share a user, a program with many threads would keep
    other sandboxes, and the trainer, from starting any.
    """
    questions = seccomp.ask_for_threads()
    program = os.getpid()
    if os.fork():
        os.close(questions)
        return
    die_with_parent(program)
    os.dup2(questions, 0)
    # A copy of the answer pipe here would hide the program's end from `Box` for as long as this process lives.
    os.closerange(1, 64)
    # The link count is 2 plus one per thread. Landlock still allows `stat`, but not opening the folder.
    folder = f"/proc/{program}/task"
    while True:
        try:
            seccomp.answer(0, lambda: os.stat(folder).st_nlink - 2 <= THREADS)
        except FileNotFoundError:  # the thread that asked, or the whole program, is gone
            if not os.path.exists(folder):
                os._exit(0)


def _leave_overseer() -> None:
    """Continue in a child. The parent adopts the child's orphans and kills them when the child ends."""
    # Without a process namespace, init would otherwise adopt what a program leaves behind, and it would outlive the
    # sandbox.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    overseer = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(overseer)
        return
    # The overseer must hold no pipe: `Box` notices the end of a program by the end of its answer pipe.
    os.closerange(0, 64)
    _oversee(child)


def _oversee(child: int) -> None:
    try:
        _, status = os.waitpid(child, 0)
        # Killing a process hands its children to the overseer, so this repeats until there are none.
        while True:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                for pid in children.read().split():
                    os.kill(int(pid), _SIGKILL)
            os.waitpid(-1, 0)
    except OSError:  # no children remain
        os._exit(0 if status == 0 else 1)
