"""A call once more, next to a process that only runs: was the call waiting, or did the machine let it wait?

In: the processor time that the call has used, whenever its deadline passes. Out: how much longer it may take, and in
the end whether the machine kept it waiting. Invariant: as for programs in the sandbox (`sandbox/clock.py`), a call is
to blame once it or the process next to it has had the deadline in processor time; if neither has had it within
`PATIENCE_ALONE` times the deadline, the machine is to blame.
"""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType

from gspo.errors import RewardError
from gspo.reward.memory import processor_seconds
from gspo.reward.sandbox.clock import PATIENCE_ALONE, SLACK

_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""It ends with the trainer, however that ends."""


class SecondTry:
    """Owns the process that only runs."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.kept_waiting = False
        """Whether the machine is to blame."""

    def __enter__(self) -> SecondTry:
        self._until = time.monotonic() + PATIENCE_ALONE * self._timeout_s
        try:
            self._process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _SPIN])
        except OSError as error:
            raise RewardError(f"reward.workers: cannot start one more process: {error}; use fewer") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    def more_s(self, used_s: float) -> float:
        """Seconds until the call or the process next to it may have had its time. 0 if the call is over."""
        missing_s = self._timeout_s - max(used_s, processor_seconds(self._process.pid))
        if missing_s <= SLACK * self._timeout_s:
            return 0.0
        left_s = self._until - time.monotonic()
        self.kept_waiting = left_s <= 0
        return max(0.0, min(missing_s, left_s))
