"""A program's deadline, and whether the program or the machine is to blame when it passes.

In: a program's process, its time limit, and on its second try a reference process. Out: deadlines, or the reason why
there are no more: `DeadlinePassed` (the program is to blame), `ProgramWaited` (not known yet), `MachineBusy` (the
machine is to blame). Invariant: a program that uses more CPU time than its limit is to blame, and so is one that could
have run but did not. A program cannot disguise itself as one that the machine starved.

A program's own statistics cannot tell these cases apart: on a busy machine, a program that sleeps for microseconds or
has many threads waits for a CPU most of the time, just like a well-behaved one. They only decide how long the first try
may take. The second try runs next to a reference process that only busy-loops. Once the reference has used the limit in
CPU time, the program could have, too. If neither has used it in all that time, the machine is to blame.
"""

from __future__ import annotations

import os
import time

from gspo.reward.sandbox.box import Box, DeadlinePassed

SLACK = 0.1
"""Fraction of the limit that is not worth another wait."""
PATIENCE = 3.0
"""Multiple of its limit that a program may take in its first try if the machine is busy."""
PATIENCE_ALONE = 10.0
"""Multiple of its limit that a program may take in its second try if the machine is busy."""
_CORES = os.cpu_count() or 1


class ProgramWaited(Exception):
    """The time is up but the program did not use it: it slept, or the machine starved it."""


class MachineBusy(TimeoutError):
    """The machine, not the program, was too slow."""


class Clock:
    """Runs while the program works and pauses while the tests do."""

    def __init__(self, box: Box, limit_s: float, reference: Box | None) -> None:
        self._box = box
        self._limit_s = limit_s
        self._reference = reference
        self._used = 0.0
        self._allowed = limit_s
        self._since = 0.0
        # Waiting and CPU time before the first request, such as the start of Python, do not count.
        self._waited = box.waited()
        self._cpu_s = box.cpu_s()
        self.reference_s = self._reference_since = 0.0

    def start(self) -> None:
        """Start the clock: the program receives a request."""
        self._since = time.monotonic()
        self._reference_since = self._reference.cpu_s() if self._reference else 0.0

    def stop(self) -> float:
        """Pause the clock and return the seconds since `start`. The program answered, or never will."""
        took = time.monotonic() - self._since
        self._used += took
        self.reference_s = self._reference_cpu_s()
        return took

    @property
    def deadline(self) -> float:
        """The current deadline on the monotonic clock."""
        return self._since - self._used + self._allowed

    def extend(self) -> None:
        """Move a deadline that has passed, or raise if the time is up."""
        fair = self._fair() if self._reference is None else self._fair_alone()
        if fair > self._allowed:
            self._allowed = fair
        elif max(self._spent(), self._reference_cpu_s()) >= (1 - SLACK) * self._limit_s:
            raise DeadlinePassed
        elif self._reference is None:
            raise ProgramWaited
        else:
            waited = self._allowed - max(self._spent(), self._reference_cpu_s())
            raise MachineBusy(f"a program waited {waited:.1f} s for a CPU; use fewer reward.workers")

    def check(self) -> None:
        """Raise `DeadlinePassed` if several threads together used more CPU time than the limit."""
        # The first comparison saves a read of /proc: in less wall time than this, no program can exceed the limit.
        if self._used * _CORES > self._limit_s and self._spent() > self._limit_s:
            raise DeadlinePassed

    def _fair(self) -> float:
        """The limit plus the time that the program waited for other processes."""
        waited = self._box.waited() - self._waited
        fair = min(self._limit_s + waited, PATIENCE * self._limit_s)
        return fair if fair - self._allowed > SLACK * self._limit_s else 0.0

    def _fair_alone(self) -> float:
        """Long enough for the program or the reference to use up the limit if it runs without pause from now on."""
        missing = self._limit_s - max(self._spent(), self._reference_cpu_s())
        fair = min(self._allowed + missing, PATIENCE_ALONE * self._limit_s)
        return fair if missing > SLACK * self._limit_s else 0.0

    def _spent(self) -> float:
        return self._box.cpu_s() - self._cpu_s

    def _reference_cpu_s(self) -> float:
        """CPU time of the reference while the program worked."""
        return self.reference_s + (self._reference.cpu_s() - self._reference_since if self._reference else 0.0)
