"""A growing file of JSON lines as columns of numbers, read as far as it got and no line twice.

In: `metrics.jsonl` or `timings.jsonl` of a run that may still be writing. Out: one float64 column per key, NaN where a line
has no number. Invariant: what was read is what the file holds: a file that was cut back by a resume, replaced or deleted is
noticed and read anew (`generation` counts that), and a torn last line waits until it is whole.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 8 << 20
MARK = 64
"""Bytes before the reading position that must not have changed."""
MOST_KEYS = 2000
"""A file with more names than this is no metrics file; the rest are not kept."""
NAN = math.nan


class Columns:
    """Owns what was read of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._forget()

    def _forget(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self._starts = array("q")
        self._position = 0
        self._mark = b""
        self._identity: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever the content does."""
        return self.generation, len(self)

    def refresh(self) -> None:
        """Read what is new."""
        try:
            with self.path.open("rb") as file:
                self._read_on(file)
        except OSError:
            if self._identity is not None:
                self._anew()

    def values(self, key: str) -> NDArray[np.float64]:
        """A copy of one column; empty if the key was never there."""
        return np.array(self.columns.get(key, ()), dtype=np.float64)

    def latest(self, key: str) -> float:
        """The last number of a column; NaN if there is none."""
        return next((v for v in reversed(self.columns.get(key, ())) if not math.isnan(v)), NAN)

    def row(self, index: int) -> dict[str, Any]:
        """One line as it was written; empty if the file has changed under it."""
        import orjson

        try:
            with self.path.open("rb") as file:
                file.seek(self._starts[index])
                found = orjson.loads(file.readline())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def last(self, count: int) -> list[dict[str, float]]:
        """The last lines as numbers, without what was not measured."""
        begin = max(0, len(self) - count)
        return [
            {key: column[i] for key, column in self.columns.items() if not math.isnan(column[i])}
            for i in range(begin, len(self))
        ]

    def _anew(self) -> None:
        self._forget()
        self.generation += 1

    def _read_on(self, file: Any) -> None:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if self._identity is not None and (identity != self._identity or not self._unchanged(file, status.st_size)):
            self._anew()
        self._identity = identity
        file.seek(self._position)
        rest = b""
        while chunk := file.read(CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            self._take(lines)
        file.seek(max(0, self._position - MARK))
        self._mark = file.read(min(MARK, self._position))

    def _unchanged(self, file: Any, size: int) -> bool:
        """Whether the file still begins with what was read."""
        if size < self._position:
            return False
        file.seek(self._position - len(self._mark))
        return bool(file.read(len(self._mark)) == self._mark)

    def _take(self, lines: Sequence[bytes]) -> None:
        import orjson

        columns, loads = self.columns, orjson.loads
        for line in lines:
            try:
                values = loads(line) if line else None
            except ValueError:
                values = None
            if isinstance(values, dict):
                if values.keys() - columns.keys():
                    self._widen(values)
                for key, column in columns.items():
                    value = values.get(key)
                    column.append(value if type(value) is float or type(value) is int else NAN)
                self._starts.append(self._position)
            self._position += len(line) + 1

    def _widen(self, values: Mapping[str, Any]) -> None:
        """Columns for names that were not there before."""
        for key, value in values.items():
            if key not in self.columns and isinstance(value, int | float) and len(self.columns) < MOST_KEYS:
                self.columns[key] = array("d", [NAN]) * len(self)


def downsample(x: NDArray[np.float64], y: NDArray[np.float64], points: int) -> dict[str, list[float | None]]:
    """The measured points of a curve, at most `points`: where there are more, the mean, lowest and highest of each bucket."""
    there = ~np.isnan(y) & ~np.isnan(x)
    x, y = x[there], y[there]
    if len(x) <= points:
        return {"x": x.tolist(), "y": _finite(y)}
    edges = np.linspace(0, len(x), points + 1).astype(np.int64)[:-1]
    sizes = np.diff(np.append(edges, len(x)))
    return {
        "x": (np.add.reduceat(x, edges) / sizes).tolist(),
        "y": _finite(np.add.reduceat(y, edges) / sizes),
        "low": _finite(np.minimum.reduceat(y, edges)),
        "high": _finite(np.maximum.reduceat(y, edges)),
    }


def _finite(values: NDArray[np.float64]) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in values.tolist()]
