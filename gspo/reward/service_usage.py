"""What a service was asked for and how long it took.

In: one entry per completion, from any thread. Out: sums since the last call of `take`. Invariant: these depend on time
and on what earlier runs have paid for, so they go to `timings.jsonl` and never into a score or its notes.
"""

from __future__ import annotations

import threading

COUNTS = ("requests", "cached", "retries", "not_cached", "seconds")
"""Completions that were sent to the model, completions whose score was known, further tries, scores that could not be
kept, and the time that requests took, added up."""


class ServiceUsage:
    """Sums of `COUNTS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(COUNTS, 0.0)

    def add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._sums[name] += count

    def take(self) -> dict[str, float]:
        """The sums since the last call."""
        with self._lock:
            sums, self._sums = self._sums, dict.fromkeys(COUNTS, 0.0)
            return sums
