"""Stop requests. The first signal ends the current phase and saves a checkpoint, the second exits immediately.

In: SIGINT, SIGTERM, or SIGUSR1, which job schedulers send before they preempt a job. Out: a flag, and `Interrupted` in
phases that may be abandoned halfway. Invariant: a phase that changes weights always finishes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupted(BaseException):
    """A stop request arrived in an interruptible phase. Not an `Exception`, so no `except Exception` catches it."""


_shields = [0, False]  # how many are active, and whether a stop request arrived meanwhile


@contextmanager
def shielded() -> Iterator[None]:
    """A part of an interruptible phase that finishes first: a stop request inside raises `Interrupted` at its end."""
    _shields[0] += 1
    try:
        yield
    finally:
        _shields[0] -= 1
    if not _shields[0] and _shields[1]:
        _shields[1] = False
        raise Interrupted


class StopRequest:
    """A context in which signals set a flag. `signal` is the first one received; None if there was none."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self._announce = announce
        self._before: dict[int, Any] = {}
        self._interruptible = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A phase that a stop request ends immediately with `Interrupted`, also a request from before the phase."""
        if self:
            raise Interrupted
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only, and refuses handlers from any other
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        if self._interruptible and _shields[0]:
            _shields[1] = True
            return
        if self._interruptible:
            raise Interrupted
        self._announce("Stopping after the current phase. A second signal (Ctrl-C) exits immediately.")
