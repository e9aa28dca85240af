"""What this process is doing right now, for whoever shows it.

    with activity("sampling", total=256, unit="completions") as doing:
        doing.done += 1

In: counts, from the code that does the work. Out: `current()`, the activities of each thread, the outermost first.
Invariant: nothing here is read by the code that trains, and nothing is recorded. A count is one assignment, so work is
not slowed down, and only displays look at it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(eq=False, kw_only=True)
class Activity:
    """Something that takes time. Whoever does it changes the counts."""

    name: str
    unit: str = ""
    """What `done` and `total` count, in the plural."""
    total: int = 0
    """How many there are; `0` if unknown."""
    done: int = 0
    tokens: int = 0
    """Tokens sampled so far; `0` if that does not apply."""
    since: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.since


_activities: dict[int, list[Activity]] = {}
"""By thread, the outermost first."""


@contextmanager
def activity(name: str, *, total: int = 0, unit: str = "") -> Iterator[Activity]:
    """Within this context, this thread does something that takes time."""
    thread = threading.get_ident()
    own = Activity(name=name, total=total, unit=unit)
    _activities.setdefault(thread, []).append(own)
    try:
        yield own
    finally:
        # By identity: a generator that was abandoned inside may end later than what came after it.
        mine = _activities.get(thread, [])
        mine[:] = [other for other in mine if other is not own]
        if not mine:
            _activities.pop(thread, None)


def counted(items: Iterable[Item], name: str, *, total: int, unit: str) -> Iterator[Item]:
    """The items, each counted as done when the next one is asked for."""
    with activity(name, total=total, unit=unit) as doing:
        for item in items:
            yield item
            doing.done += 1


def current() -> list[tuple[Activity, ...]]:
    """The activities of each thread that has any, in the order in which the threads began."""
    return [tuple(mine) for mine in list(_activities.values()) if mine]
