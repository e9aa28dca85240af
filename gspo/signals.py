"""Asking a run to stop: the first SIGINT, SIGTERM or SIGUSR1 (which schedulers send before they take a machine) ends the current phase and saves, the second leaves at once.

In: signals. Out: a flag, and `Interrupted` where a phase may be left in its middle. Invariant: a phase that changes weights is
never left in its middle.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupted(BaseException):
    """A request to stop came in a phase that can be left at once. No error, so no `except Exception` may catch it."""


class StopRequest:
    """A context in which signals set a flag. `signal` is the first one received, or None."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self._announce = announce
        self._before: dict[int, Any] = {}
        self._interruptible = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A phase that a request ends at once, with `Interrupted`; one that came before it too."""
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
            return self  # signals reach the main thread only; its owner decides about them
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
        if self._interruptible:
            raise Interrupted
        self._announce("Stopping as soon as what is under way is finished. Once more to leave at once.")
