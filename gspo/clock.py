"""Where a step's time goes. Durations come from the monotonic clock and never enter `metrics.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Accumulates seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the duration of the block to `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - start)

    def take(self) -> dict[str, float]:
        """The seconds so far. The clock starts again from 0."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere to `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
