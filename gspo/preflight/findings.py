"""What a check says.

In: what was found. Out: a `Finding`: how bad it is, what it means in one sentence, what to do. Invariant: `FAIL` is kept
for what would end the run or make it worthless, so that the exit code means something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing."""
    WARNING = "warning"
    """The run would go through, and probably not as meant."""
    FAIL = "FAIL"
    """The run would stop, or its result could not be trusted."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a check found."""

    level: Level
    what: str
    """One sentence."""
    do: str = ""
    """What to change, if anything."""
    detail: tuple[str, ...] = ()
    """Lines to look at: numbers with their origin, an example."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs."""
    check: str = ""
    """Which check said it; put in by `examine`."""


def ok(what: str, *, detail: Sequence[str] = (), **numbers: Any) -> Finding:
    return Finding(level=Level.OK, what=what, detail=tuple(detail), numbers=numbers)


def note(what: str, do: str = "", *, detail: Sequence[str] = (), **numbers: Any) -> Finding:
    return Finding(level=Level.NOTE, what=what, do=do, detail=tuple(detail), numbers=numbers)


def warning(what: str, do: str = "", *, detail: Sequence[str] = (), **numbers: Any) -> Finding:
    return Finding(level=Level.WARNING, what=what, do=do, detail=tuple(detail), numbers=numbers)


def fail(what: str, do: str = "", *, detail: Sequence[str] = (), **numbers: Any) -> Finding:
    return Finding(level=Level.FAIL, what=what, do=do, detail=tuple(detail), numbers=numbers)
