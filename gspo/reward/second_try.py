"""Retry a call next to a busy-looping reference process, to find out whether the call or the machine was slow.

In: the CPU time that the call has used, each time its deadline passes. Out: how much longer it may take, and finally
whether the machine starved it. Invariant: as for programs in the sandbox (`sandbox/clock.py`), the call is to blame
once it or the reference process has used the deadline in CPU time. If neither has within `PATIENCE_ALONE` times the
deadline, the machine is to blame.
"""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType

from gspo.errors import RewardError
from gspo.reward.process_usage import processor_seconds
from gspo.reward.sandbox.clock import PATIENCE_ALONE, SLACK

_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""The parent check makes it exit with the trainer, even if the trainer is killed."""


class SecondTry:
    """Owns the reference process."""

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
        """Seconds until the call or the reference may have used its CPU time. `0` if the call's time is over."""
        missing_s = self._timeout_s - max(used_s, processor_seconds(self._process.pid))
        if missing_s <= SLACK * self._timeout_s:
            return 0.0
        left_s = self._until - time.monotonic()
        self.kept_waiting = left_s <= 0
        return max(0.0, min(missing_s, left_s))
