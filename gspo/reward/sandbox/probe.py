"""Find the strongest sandbox that works on this machine, by trying each one.

In: which Python to use, and whether to continue without a sandbox. Out: the strongest `Level` that works, or a
`ConfigError` with the fix. Invariant: a level is used only after a program inside it tried several ways to escape and
failed.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator

from gspo.errors import ConfigError
from gspo.reward.function import RewardWarning, one_line
from gspo.reward.sandbox.box import Box, DeadlinePassed, ProcessExited, SandboxError
from gspo.reward.sandbox.inside import landlock
from gspo.reward.sandbox.interpreter import Interpreter, InterpreterError, choices, examine, read_through
from gspo.reward.sandbox.level import NAMES, Level, bubblewrap, identity

_ESCAPES = """
import os

def attempts(pid, file):
    yield "read a file", lambda: open(file).read()
    yield "read the environment of its parent", lambda: open("/proc/%d/environ" % pid).read()
    yield "write a file", lambda: os.remove(open("/tmp/gspo-sandbox-probe", "w").name)
    yield "signal its parent", lambda: os.kill(pid, 0)
    yield "open a socket", lambda: __import__("_socket").socket()
    yield "start a process", lambda: os.fork() or os._exit(0)
    yield "run another program", lambda: os.execv("/bin/true", ["true"])

def escapes(pid, file):
    possible = []
    for name, attempt in attempts(pid, file):
        try:
            attempt()
        except OSError:
            continue
        possible.append(name)
    return possible
"""


def sandbox_level(python: str = "", packages: bool = False, allow_unsafe: bool = False) -> Level:
    """The level that programs run at. Also used by the run header and `gspo doctor`."""
    level, reasons = _best(python, packages)
    if level is not None:
        return level
    if not allow_unsafe:
        raise ConfigError(
            f"sandbox: none works here ({'; '.join(reasons)}); install bubblewrap (apt-get install bubblewrap) or "
            "use a kernel with Landlock (5.13 or newer), or set reward.options.code_tests.allow_unsafe = true to run "
            "model-written programs with no protection"
        )
    warnings.warn(
        "code_tests: NO SANDBOX: model-written programs run with your rights (allow_unsafe = true): "
        f"{'; '.join(reasons)}",
        RewardWarning,
        stacklevel=2,
    )
    return Level(number=0, python=_interpreter(python, packages)[0], own_users=False, detail="; ".join(reasons))


# Each trial starts a sandbox, and every call of the reward asks for the level.
@functools.cache
def _best(python: str, packages: bool) -> tuple[Level | None, tuple[str, ...]]:
    interpreter, own_users = _interpreter(python, packages)
    reasons: list[str] = []
    if not sys.platform.startswith("linux"):
        return None, (f"it needs Linux, not {sys.platform}",)
    # A level counts only if it works: an installed bwrap may fail in a container that forbids user namespaces.
    for level in _candidates(interpreter, own_users):
        reason = flaw(level) if isinstance(level, Level) else level
        if isinstance(level, Level) and not reason:
            read_through(interpreter)
            return level, tuple(reasons)
        reasons.append(reason)
    return None, tuple(reasons)


def _candidates(python: Interpreter, own_users: bool) -> Iterator[Level | str]:
    """Levels to try, strongest first, or the reason why one is unavailable."""
    program = shutil.which("bwrap")
    if program is None:
        yield "bubblewrap: bwrap is not installed"
    else:
        version = _version(program)
        old = version < (0, 8)
        text = ".".join(map(str, version))
        # Some containers allow user namespaces but no network namespace. The seccomp filter refuses sockets in any
        # case.
        for network, detail in ((False, text), (True, f"{text}, no network namespace: seccomp refuses sockets")):
            wrapper = bubblewrap(program, python, old=old, network=network)
            yield Level(number=5, python=python, own_users=own_users, wrapper=wrapper, detail=detail)
    yield Level(number=6, python=python, own_users=own_users, detail=f"version {landlock.version()}")


def flaw(level: Level) -> str:
    """The reason why a level is unusable: it does not start, or a program can escape. Empty if it works."""
    question = json.dumps(["call", {"r": 0}, [os.getpid(), os.path.abspath(__file__)], {"d": []}]).encode()
    try:
        with Box(level, "candidate", limit_s=10.0, memory_mb=512) as box:
            box.ready()
            deadline = time.monotonic() + 10.0
            lines = [json.dumps(_ESCAPES).encode(), b'["name", "escapes"]', question]
            answers = [box.ask(line, deadline) for line in lines]
    except SandboxError as error:
        return f"{NAMES[level.number]}: {str(error).removeprefix('sandbox: ')}"
    except (DeadlinePassed, ProcessExited) as error:
        return f"{NAMES[level.number]}: a program in it does not work: {error}"
    if answers[-1] != b"v[]":
        return f"{NAMES[level.number]}: a program in it can {one_line(answers[-1].decode(errors='replace')[1:])}"
    return ""


def _interpreter(python: str, packages: bool) -> tuple[Interpreter, bool]:
    """The first Python that works, and whether each sandbox can have its own user."""
    reasons = []
    for path in choices(python, packages):
        # A container may map only a few user ids, and then cannot use the range that no system assigns.
        for own_users in (True, False) if os.geteuid() == 0 else (False,):
            try:
                return examine(path, packages, identity(own_users)), own_users
            except InterpreterError as error:
                reasons.append(one_line(error))
    raise ConfigError(
        f"reward.options.code_tests.python: no Python that an unprivileged user can run ({'; '.join(reasons)}); "
        "set it to one outside of closed home directories (apt-get install python3)"
    )


def _version(program: str) -> tuple[int, ...]:
    words = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10).stdout
    return tuple(map(int, re.findall(r"[0-9]+", words)[:3])) or (0,)
