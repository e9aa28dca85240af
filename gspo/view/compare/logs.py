"""What a run printed. In: its log. Out: the last lines. Lines that begin with `MARK` were written by the comparison itself."""

from __future__ import annotations

from pathlib import Path

MARK = "== "
_MOST = 20_000


def tail(file: Path, lines: int) -> list[str]:
    """The last lines that the run printed and that are not empty."""
    if not file.is_file():
        return []
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - _MOST))
        text = log.read().decode("utf-8", errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith(MARK)][-lines:]
