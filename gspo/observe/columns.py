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

from gspo.observe.regular import open_regular

CHUNK = 2 << 20
MARK = 64
"""Bytes before the reading position that must not have changed."""
TAIL = 1 << 18
"""Bytes at the end of a long file that a first look reads in full."""
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
        self._behind = False

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever the content does."""
        return self.generation, len(self)

    @property
    def behind(self) -> bool:
        """Whether there is more in the file than was read, because the last `refresh` was bounded."""
        return self._behind

    def refresh(self, most: int | None = None) -> None:
        """Read what is new; about `most` bytes of it, if that is given."""
        try:
            with open_regular(self.path) as file:
                self._read_on(file, most)
        except OSError:
            if self._identity is not None:
                self._anew()

    @classmethod
    def sampled(cls, path: Path, count: int) -> Columns:
        """About `count` lines spread over a long file, and its last ones: a first look that does not read it all."""
        found = cls(path)
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                tail = max(0, size - TAIL)
                for place in range(0, tail, max(1, size // count)):
                    found._take_at(file, place, lines=1)
                found._take_at(file, tail, lines=None)
        except OSError:
            pass
        return found

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
            with open_regular(self.path) as file:
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

    def _read_on(self, file: Any, most: int | None) -> None:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        if self._identity is not None and (identity != self._identity or not self._unchanged(file, status.st_size)):
            self._anew()
        self._identity = identity
        file.seek(self._position)
        rest, left = b"", math.inf if most is None else most
        while left > 0 and (chunk := file.read(CHUNK)):
            *lines, rest = (rest + chunk).split(b"\n")
            self._take(lines)
            left -= len(chunk)
        self._behind = left <= 0 and self._position + len(rest) < status.st_size
        file.seek(max(0, self._position - MARK))
        self._mark = file.read(min(MARK, self._position))

    def _take_at(self, file: Any, place: int, lines: int | None) -> None:
        """Take the lines that begin after a place, unless they were taken."""
        file.seek(place)
        if place:
            file.readline()
        if file.tell() < self._position:
            file.seek(self._position)
        self._position = file.tell()
        data = b"".join(file.readline() for _ in range(lines)) if lines else file.read()
        self._take(data.split(b"\n")[:-1])

    def _unchanged(self, file: Any, size: int) -> bool:
        """Whether the file still begins with what was read."""
        if size < self._position:
            return False
        file.seek(self._position - len(self._mark))
        return bool(file.read(len(self._mark)) == self._mark)

    def _take(self, lines: Sequence[bytes]) -> None:
        import orjson

        rows: list[dict[str, Any]] = []
        for line in lines:
            try:
                row = orjson.loads(line) if line else None
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
                self._starts.append(self._position)
            self._position += len(line) + 1
        if rows:
            self._append(rows)

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        before = len(self) - len(rows)
        for key in set().union(*rows) - self.columns.keys():
            if len(self.columns) < MOST_KEYS:
                self.columns[key] = array("d", [NAN]) * before
        for key, column in self.columns.items():
            column.frombytes(_numbers([row.get(key) for row in rows]).tobytes())


def _numbers(values: list[Any]) -> NDArray[np.float64]:
    """NaN for whatever is not a number."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        plain = [v if isinstance(v, int | float) and abs(v) < 1e308 else NAN for v in values]
        return np.array(plain, dtype=np.float64)


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
