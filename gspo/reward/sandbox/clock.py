"""How long a program may take, and who is to blame when it takes longer.

In: a program's process, its limit, and in its second try a reference. Out: deadlines, or why there are no more: `DeadlinePassed` (the
program), `ProgramWaited` (not known yet), `MachineBusy` (the machine). Invariant: a program that uses more processor time than its limit
is to blame, and so is one that does not run although it could have; what it does cannot make it look like one that is
kept waiting.

Its own figures do not tell these apart: a program that takes naps of a microsecond on a busy machine, or has many threads,
waits for a processor most of the time, as an honest one does there. They only decide how long the first try may take. The
second try has a process beside it that does nothing but run. Once that has had the limit in processor time, the program
could have had it too. If neither has had it in all that time, the machine is to blame.
"""

from __future__ import annotations

import os
import time

from gspo.reward.sandbox.box import Box, DeadlinePassed

SLACK = 0.1
"""Of the limit: not worth another wait."""
PATIENCE, PATIENCE_ALONE = 3.0, 10.0
"""How many times its limit a program may take when the machine is busy, at first and in its second try."""
_CORES = os.cpu_count() or 1


class ProgramWaited(Exception):
    """The time is over, and the program did not use it: it waited, or the machine let it wait."""


class MachineBusy(TimeoutError):
    """The machine, not the program, was too slow."""


class Clock:
    """Runs while the program works, and stands still while the tests do."""

    def __init__(self, box: Box, limit_s: float, reference: Box | None) -> None:
        self._box, self._limit_s, self._reference = box, limit_s, reference
        self._used, self._allowed, self._since = 0.0, limit_s, 0.0
        self._waited, self._cpu_s = box.waited(), box.cpu_s()
        self.reference_s = self._reference_since = 0.0

    def start(self) -> None:
        """The program is asked something."""
        self._since = time.monotonic()
        self._reference_since = self._reference.cpu_s() if self._reference else 0.0

    def stop(self) -> float:
        """It has answered, or will not: seconds since `start`."""
        took = time.monotonic() - self._since
        self._used += took
        self.reference_s = self._reference_had()
        return took

    @property
    def deadline(self) -> float:
        """When to look again, on the monotonic clock."""
        return self._since - self._used + self._allowed

    def extend(self) -> None:
        """Move the deadline, which has passed; raises when the time is over."""
        fair = self._fair() if self._reference is None else self._fair_alone()
        if fair > self._allowed:
            self._allowed = fair
        elif self._spent() >= (1 - SLACK) * self._limit_s or self._reference_had() >= (1 - SLACK) * self._limit_s:
            raise DeadlinePassed
        elif self._reference is None:
            raise ProgramWaited
        else:
            waited = self._allowed - max(self._spent(), self._reference_had())
            raise MachineBusy(f"a program waited {waited:.1f} s for a processor; use fewer reward.workers")

    def check(self) -> None:
        """Several threads use more processor time than passes on the wall."""
        if self._used * _CORES > self._limit_s and self._spent() > self._limit_s:
            raise DeadlinePassed

    def _fair(self) -> float:
        """The limit, and the time that other processes took."""
        waited = self._box.waited() - self._waited
        fair = min(self._limit_s + waited, PATIENCE * self._limit_s)
        return fair if fair - self._allowed > SLACK * self._limit_s else 0.0

    def _fair_alone(self) -> float:
        """Long enough for the program or the reference to use up the limit, should it run all the time from now on."""
        missing = self._limit_s - max(self._spent(), self._reference_had())
        fair = min(self._allowed + missing, PATIENCE_ALONE * self._limit_s)
        return fair if missing > SLACK * self._limit_s else 0.0

    def _spent(self) -> float:
        return self._box.cpu_s() - self._cpu_s

    def _reference_had(self) -> float:
        """Processor time of the reference while the program worked."""
        return self.reference_s + (self._reference.cpu_s() - self._reference_since if self._reference else 0.0)
