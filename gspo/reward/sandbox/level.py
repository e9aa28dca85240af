"""How strongly a process is closed in, and the command line that does it.

In: what the probe found to work. Out: the arguments to start Python with. Invariant: whoever starts a run as root,
programs never run as root.

Level 5 is bubblewrap: user, process, mount, network and IPC namespaces with nothing in them but the folders of Python and
of shared libraries, read-only; where the kernel has Landlock, that leaves Python's own files of those. Level 6 is Landlock
alone. Both go with the seccomp filter and the limits of `inside/confine.py`. Level 0 has limits only, and is used by explicit wish alone.
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
"""Where nobody has users. One number per sandbox, so that the limit on processes is each sandbox's own."""
_counter = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Level:
    """One working way to run a program."""

    number: int
    python: Interpreter
    own_users: bool
    """Whether each sandbox gets a user number of its own; only root can."""
    wrapper: tuple[str, ...] = ()
    """The command in front of Python."""
    detail: str = ""
    """Versions, and what is missing."""

    @property
    def name(self) -> str:
        return NAMES[self.number]

    def __str__(self) -> str:
        place = f"Python {self.python.version} at {self.python.path}"
        return f"L{self.number} {self.name}{f' ({self.detail})' if self.detail else ''}, {place}"

    def command(self, bootstrap: str) -> list[str]:
        """What to start."""
        return [*self.wrapper, _run_as(self.python), *self.python.flags, "-c", bootstrap]


def identity(own_users: bool) -> dict[str, Any]:
    """Arguments for `subprocess`: another user, when this one is root."""
    if os.geteuid() != 0:
        return {}
    user = FIRST_USER + next(_counter) % USERS if own_users else NOBODY
    return {"user": user, "group": user, "extra_groups": []}


def bubblewrap(program: str, python: Interpreter, *, old: bool, network: bool) -> tuple[str, ...]:
    """The command in front of Python for level 5. `old`: before version 0.8; `network`: without a namespace for it."""
    arguments = [program, *(() if old else ("--disable-userns",)), "--unshare-user", "--unshare-pid", "--unshare-ipc"]
    arguments += ["--unshare-uts", "--unshare-cgroup-try", *(() if network else ("--unshare-net",))]
    arguments += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    for place in python.places:
        if os.path.islink(place):
            arguments += ["--symlink", os.readlink(place), place]
        else:
            arguments += ["--ro-bind", place, place]
    for place in python.hidden:
        arguments += ["--tmpfs", place, "--remount-ro", place]
    arguments += ["--ro-bind", python.real, _run_as(python)]
    arguments += ["--dev-bind", "/dev/null", "/dev/null", "--remount-ro", "/", "--chdir", "/", "--"]
    return tuple(arguments)


def settings(level: Level) -> dict[str, Any]:
    """What the inside must know of the level."""
    return {
        "level": level.number,
        "readable": list(level.python.readable),
        "listed": list(level.python.listed),
        "processes": 3 if level.number == 5 or level.own_users else 0,
        "parent": os.getpid(),
    }


def _run_as(python: Interpreter) -> str:
    """A virtual environment is found by the path, not by the file behind it."""
    return python.path if python.packages else python.real
