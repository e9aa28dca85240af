"""A machine-wide readers-writer lock: programs run concurrently, and occasionally one runs alone.

In: whether a program must run alone. Out: the lock. Invariant: while a program runs alone, no other grader on this
machine that uses this installation runs a program, in any process. No grader waits longer than requested, and if file
locks do not work, none waits at all.

The locks are on two files of this package, which every process that can import it can open and no sandboxed program
can. Programs take the gate lock first and the room lock second, and release the gate once they hold the room. A program
that must run alone holds the gate until the room is empty, so later arrivals cannot starve it.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_GATE, _ROOM = Path(__file__), Path(__file__).with_name("__init__.py")
_TICK_S = 0.01


@contextmanager
def machine_lock(*, alone: bool, patience_s: float) -> Iterator[None]:
    """Hold the shared or exclusive lock. After `patience_s`, continue without it."""
    until = time.monotonic() + patience_s
    with open(_ROOM, "rb") as room:
        with open(_GATE, "rb") as gate:
            _take(gate, fcntl.LOCK_EX, until)
            _take(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, until)
        yield


def _take(file: IO[bytes], how: int, until: float) -> None:
    while True:
        try:
            # Polled, because a blocking flock has no time limit.
            return fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return
        except OSError:  # the file system does not support locks
            return
        time.sleep(_TICK_S)
