"""Landlock: restrict which files a process may open, instead of namespaces or in addition to them.

In: paths to read, and folders to list. Out: a permanent rule for this thread and everything it starts. Invariant: every
kind of file access that the kernel can deny is denied, except reading under those paths and using /dev/null. From
version 6 on, signals and abstract sockets that lead out of the sandbox are denied, too. No version denies changing
modes, owners and times, which the seccomp filter does, or checking whether a file exists, which stays possible.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterable

# System call numbers, the same on x86_64 and aarch64.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _RULE_PATH = 1, 1
_WRITE, _READ, _LIST = 2, 4, 8
_KINDS_OF_ACCESS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of file access rights (bits) by version."""
_SCOPES = 0b11
_PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def version() -> int:
    """The kernel's Landlock version; `0` if it has none."""
    return max(0, _libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION_FLAG))


def restrict(readable: Iterable[str], listed: Iterable[str]) -> None:
    """Deny all file access except reading `readable`, listing `listed`, and /dev/null."""
    found = version()
    if not found:
        raise OSError("landlock: this kernel has none")
    # Rights that a rule set does not handle stay allowed, so all that this kernel knows are named.
    everything = (1 << _KINDS_OF_ACCESS.get(found, 16)) - 1
    attributes = struct.pack("QQQ", everything, 0, _SCOPES if found >= 6 else 0)
    size = 24 if found >= 6 else 8
    rules = _checked(_libc.syscall(_CREATE, attributes, ctypes.c_size_t(size), 0), "create")
    for path in readable:
        _allow(rules, path, _READ | _LIST)
    for path in listed:
        _allow(rules, path, _LIST)
    _allow(rules, os.devnull, _READ | _WRITE)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))), "no_new_privs")
    _checked(_libc.syscall(_RESTRICT, rules, 0), "restrict")
    os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        # The kernel refuses a rule for a file with a right of directories.
        access &= ~_LIST
    _checked(_libc.syscall(_ADD, rules, _RULE_PATH, struct.pack("=Qi", access, place), 0), path)
    os.close(place)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"landlock: {what}: {os.strerror(ctypes.get_errno())}")
    return result
