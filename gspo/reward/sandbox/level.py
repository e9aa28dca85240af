"""Isolation levels of a sandboxed process, and the command line for each.

In: what the probe found to work. Out: the arguments to start Python with. Invariant: programs never run as root, even
if root starts the run.

Level 5 is bubblewrap: user, process, mount, network and IPC namespaces that contain only the folders of Python and of
shared libraries, read-only. If the kernel has Landlock, it further restricts these to Python's own files. Level 6 is
Landlock alone. Both add the seccomp filter and the limits of `inside/confine.py`. Level 0 has limits only, and is used
only if the user asks for it.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

from gspo.reward.sandbox.interpreter import Interpreter

NAMES = {5: "bubblewrap", 6: "landlock", 0: "none"}
NOBODY = 65534
USERS = 64
FIRST_USER = 0x7800_0000 + USERS * (int.from_bytes(os.urandom(3), "big") >> 3)
"""A range of user ids that no system assigns. Each sandbox gets its own id, because the kernel counts the limit on
processes per user."""
_counter = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Level:
    """One working configuration for running programs."""

    number: int
    python: Interpreter
    own_users: bool
    """Whether each sandbox gets its own user id. Requires root."""
    wrapper: tuple[str, ...] = ()
    """The command prefix in front of Python."""
    detail: str = ""
    """Versions and missing features."""

    @property
    def name(self) -> str:
        return NAMES[self.number]

    def __str__(self) -> str:
        place = f"Python {self.python.version} at {self.python.path}"
        return f"L{self.number} {self.name}{f' ({self.detail})' if self.detail else ''}, {place}"

    def command(self, bootstrap: str) -> list[str]:
        """The command line that starts the process."""
        return [*self.wrapper, _run_as(self.python), *self.python.flags, "-c", bootstrap]


def identity(own_users: bool) -> dict[str, Any]:
    """Arguments for `subprocess`: an unprivileged user if this process runs as root."""
    if os.geteuid() != 0:
        return {}
    user = FIRST_USER + next(_counter) % USERS if own_users else NOBODY
    return {"user": user, "group": user, "extra_groups": []}


def bubblewrap(program: str, python: Interpreter, *, old: bool, network: bool) -> tuple[str, ...]:
    """The command prefix for level 5. `old` is for versions before 0.8; `network` omits the network namespace."""
    arguments = [program, *(() if old else ("--disable-userns",)), "--unshare-user", "--unshare-pid", "--unshare-ipc"]
    arguments += ["--unshare-uts", "--unshare-cgroup-try", *(() if network else ("--unshare-net",))]
    # A new session: otherwise a program could push input into the trainer's terminal (TIOCSTI).
    arguments += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    for place in python.places:
        # /lib is often a link to /usr/lib. The same link is made inside, because a bind mount would follow it.
        if os.path.islink(place):
            arguments += ["--symlink", os.readlink(place), place]
        else:
            arguments += ["--ro-bind", place, place]
    for place in python.hidden:
        # An empty folder on top hides what is below, and must not be writable.
        arguments += ["--tmpfs", place, "--remount-ro", place]
    arguments += ["--ro-bind", python.real, _run_as(python)]
    arguments += ["--dev-bind", "/dev/null", "/dev/null", "--remount-ro", "/", "--chdir", "/", "--"]
    return tuple(arguments)


def settings(level: Level) -> dict[str, Any]:
    """The settings that the code inside the sandbox needs."""
    return {
        "level": level.number,
        "readable": list(level.python.readable),
        "listed": list(level.python.listed),
        "processes": 3 if level.number == 5 or level.own_users else 0,
        "parent": os.getpid(),
    }


def _run_as(python: Interpreter) -> str:
    """The path to execute. Python locates its virtual environment by this path, so symlinks must not be resolved."""
    return python.path if python.packages else python.real
