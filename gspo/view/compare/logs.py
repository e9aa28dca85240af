"""The end of a run's log.

In: a log file. Out: its last lines. Invariant: lines that start with `MARK`, which the comparison wrote, are skipped.
"""

from __future__ import annotations

from pathlib import Path

MARK = "== "
_MOST_BYTES = 20_000


def tail(file: Path, lines: int) -> list[str]:
    """The last non-empty lines that the run printed."""
    if not file.is_file():
        return []
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - _MOST_BYTES))
        # The seek may end in the middle of a character.
        text = log.read().decode("utf-8", errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith(MARK)][-lines:]
