"""What a check reports.

In: a result of a check. Out: a `Finding` with its level, one sentence that says what it means, and the remedy.
Invariant: `FAIL` is reserved for what would stop the run or make its result worthless, so that the exit code is
meaningful.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """Severity."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing."""
    WARNING = "warning"
    """The run would finish, but probably not as intended."""
    FAIL = "FAIL"
    """The run would stop, or its result would not be trustworthy."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One result of a check."""

    level: Level
    what: str
    """One sentence."""
    do: str = ""
    """What to change, if anything."""
    detail: tuple[str, ...] = ()
    """Lines of evidence: numbers with their origin, an example."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The same evidence for programs."""
    check: str = ""
    """Name of the check; set by `run_check`."""

    def without_folder(self, folder: str) -> Finding:
        """The finding with the names of the files in this folder instead of their paths."""

        def short(text: str) -> str:
            return text.replace(f"{folder}/", "")

        return replace(self, what=short(self.what), do=short(self.do), detail=tuple(map(short, self.detail)))


def ok(what: str, *, detail: Sequence[str] = (), **numbers: Any) -> Finding:
    return Finding(level=Level.OK, what=what, detail=tuple(detail), numbers=numbers)


def note(what: str, do: str = "", *, detail: Sequence[str] = (), **numbers: Any) -> Finding:
    return Finding(level=Level.NOTE, what=what, do=do, detail=tuple(detail), numbers=numbers)


def warning(what: str, do: str = "", *, detail: Sequence[str] = (), **numbers: Any) -> Finding:
    return Finding(level=Level.WARNING, what=what, do=do, detail=tuple(detail), numbers=numbers)


def fail(what: str, do: str = "", *, detail: Sequence[str] = (), **numbers: Any) -> Finding:
    return Finding(level=Level.FAIL, what=what, do=do, detail=tuple(detail), numbers=numbers)
