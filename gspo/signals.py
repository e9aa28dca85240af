"""Stop requests: by a signal, or by a callback of the user.

The first signal ends the current phase and saves a checkpoint, the second exits immediately.

In: SIGINT, SIGTERM, or SIGUSR1, which job schedulers send before they preempt a job. Out: a flag, and `Interrupted` in
phases that may be abandoned halfway. Invariant: a phase that changes weights always finishes. A thread may end such a
phase, too, with an error of its own (`end_phase`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any


class Interrupted(BaseException):
    """A stop request arrived in an interruptible phase. Not an `Exception`, so no `except Exception` catches it."""


@dataclass
class _Phase:
    """The current phase of the main thread."""

    interruptible: bool = False
    shields: int = 0
    pending: BaseException | None = None
    """What ends the phase once no shield is active."""


_phase = _Phase()


@contextmanager
def shielded() -> Iterator[None]:
    """A part of an interruptible phase that finishes first: a stop request inside raises `Interrupted` at its end."""
    _phase.shields += 1
    try:
        yield
    finally:
        _phase.shields -= 1
    if not _phase.shields and _phase.interruptible and _phase.pending is not None:
        raise _phase.pending


def exit_process(number: int, frame: FrameType | None) -> None:
    """A handler of SIGTERM for commands that are no training run: the process ends, and closes what it has opened."""
    raise SystemExit(128 + number)


def stop_pending() -> bool:
    """Whether a stop request waits for the end of the shield that is active."""
    return _phase.pending is not None


def end_phase(error: Exception) -> None:
    """Raise an error in the main thread, from another one, if the main thread is in an interruptible phase."""
    if _phase.interruptible and _phase.pending is None and callable(signal.getsignal(signal.SIGUSR1)):
        _phase.pending = error
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGUSR1)


class StopRequest:
    """A context in which signals set a flag. `signal` is the first one received; None if there was none."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self.reason: str | None = None
        """Why a callback has asked for a stop; None if none has."""
        self._announce = announce
        self._before: dict[int, Any] = {}

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A phase that a stop request ends immediately with `Interrupted`, also a request from before the phase."""
        if self:
            raise Interrupted
        _phase.interruptible = True
        try:
            yield
        finally:
            _phase.interruptible = False
            _phase.pending = None

    def request(self, reason: str) -> None:
        """Stop after the current step, without a signal."""
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return self.signal is not None or self.reason is not None

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
        # A pending error was raised by a thread of this process, which used the signal to wake the main thread.
        if _phase.pending is None:
            self.signal = number
            if not _phase.interruptible:
                self._announce("Stopping after the current phase. A second signal (Ctrl-C) exits immediately.")
                return
            _phase.pending = Interrupted()
        if not _phase.shields:
            raise _phase.pending
