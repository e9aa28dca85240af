"""Programs side by side, and now and then one alone.

In: whether a program must run alone. Out: its turn. Invariant: while one runs alone, no other grader of this machine that
uses this installation runs a program, whatever process it is in; nobody waits longer than asked, and where locks do not
work nobody waits at all.

The locks are on two files of this package, which everybody who can import it can open and no program in a sandbox can.
A program in a hurry passes through the gate; one that wants to be alone stays in it until the room is empty, so that those
who come after it cannot keep it waiting.
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
def turn(*, alone: bool, patience_s: float) -> Iterator[None]:
    """Hold a place among the running programs, or all of them. After `patience_s` it is taken for granted."""
    until = time.monotonic() + patience_s
    with open(_ROOM, "rb") as room:
        with open(_GATE, "rb") as gate:
            _take(gate, fcntl.LOCK_EX, until)
            _take(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, until)
        yield


def _take(file: IO[bytes], how: int, until: float) -> None:
    while True:
        try:
            return fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return
        except OSError:  # a file system without locks
            return
        time.sleep(_TICK_S)
