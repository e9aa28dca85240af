"""A growing file of JSON lines as columns of numbers, read as far as it got and no line twice.

In: `metrics.jsonl` or `timings.jsonl` of a run that may still be writing. Out: one float64 column per key, NaN where a line
has no number. Invariant: what was read is what the file holds: a file that was cut back by a resume, replaced or deleted is
noticed and read anew (`generation` counts that), and a torn last line waits until it is whole. Only numbers that are in the
file are stored, so memory grows with the file and not with its lines times its names.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gspo.view.panels import KEYS, PHASES
from gspo.view.safe_files import ReadPosition, open_regular

CHUNK = 1 << 19
LONGEST_LINE = 1 << 20
"""A line that is longer is no metrics line; it is passed over."""
TAIL = 1 << 18
"""Bytes at the end of a long file that a first look reads in full."""
SAMPLED_LINE = 1 << 16
"""A first look passes over longer lines."""
MOST_KEYS = 2000
"""A file with more names than this is no metrics file; only those that are shown are kept."""
SHOWN = {"step", "tokens/sampled", "time/step_s", *KEYS, *(curve.key for curve in PHASES)}
NAN = math.nan
NUMBERS = {float, int, bool, type(None)}


class Column:
    """The numbers of one key and the lines they stand in, in order."""

    def __init__(self) -> None:
        self.lines, self.numbers = array("i"), array("d")

    def add(self, lines: NDArray[np.int32], numbers: NDArray[np.float64]) -> None:
        """Append numbers of later lines; NaN is none."""
        there = ~np.isnan(numbers)
        self.lines.frombytes(lines[there].tobytes())
        self.numbers.frombytes(numbers[there].tobytes())

    def dense(self, length: int) -> NDArray[np.float64]:
        """One number per line."""
        values = np.full(length, NAN)
        values[np.array(self.lines)] = np.array(self.numbers)
        return values

    def since(self, line: int) -> Iterator[tuple[int, float]]:
        """Line and number from a line on, the last first."""
        for at in range(len(self.lines) - 1, -1, -1):
            if self.lines[at] < line:
                return
            yield self.lines[at], self.numbers[at]


class Columns:
    """Owns what was read of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._forget()

    def _forget(self) -> None:
        self.columns: dict[str, Column] = {}
        self._starts = array("q")
        self._place = ReadPosition()
        self._behind = self._within_long = False

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
                if not self._place.still_holds(file):
                    self._anew()
                    self._place.still_holds(file)
                self._read_on(file, most)
        except OSError:
            if self._place.known:
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
                    found._take_at(file, place, SAMPLED_LINE)
                found._take_at(file, tail, None)
        except OSError:
            pass
        return found

    def values(self, key: str) -> NDArray[np.float64]:
        """A copy of one column; empty if the key was never there."""
        return self.columns[key].dense(len(self)) if key in self.columns else np.empty(0)

    def latest(self, key: str) -> float:
        """The last number of a column; NaN if there is none."""
        numbers = self.columns[key].numbers if key in self.columns else ()
        return numbers[-1] if numbers else NAN

    def row(self, index: int) -> dict[str, Any]:
        """One line as it was written; empty if the file has changed under it."""
        import orjson

        try:
            with open_regular(self.path) as file:
                file.seek(self._starts[index])
                found = orjson.loads(file.readline(LONGEST_LINE))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def last(self, count: int) -> list[dict[str, float]]:
        """The last lines as numbers, without what was not measured."""
        begin = max(0, len(self) - count)
        rows: list[dict[str, float]] = [{} for _ in range(begin, len(self))]
        for key, column in self.columns.items():
            for line, number in column.since(begin):
                rows[line - begin][key] = number
        return rows

    def _anew(self) -> None:
        self._forget()
        self.generation += 1

    def _read_on(self, file: BinaryIO, most: int | None) -> None:
        """Take whole lines; a bounded read goes on until it has at least one, so that it always gets further."""
        size = os.fstat(file.fileno()).st_size
        file.seek(self._place.position)
        rest, left, moved = b"", math.inf if most is None else most, most == 0
        while (left > 0 or not moved) and (chunk := file.read(CHUNK)):
            *lines, rest = (rest + chunk).split(b"\n")
            self._take(lines)
            moved = moved or bool(lines)
            if len(rest) > LONGEST_LINE:
                self._place.position += len(rest)
                rest, self._within_long, moved = b"", True, True
            left -= len(chunk)
        self._behind = left <= 0 and self._place.position + len(rest) < size
        self._place.remember(file)

    def _take_at(self, file: BinaryIO, place: int, longest: int | None) -> None:
        """Take the line that begins after a place, unless it was taken or is longer than `longest`; None: all lines there."""
        file.seek(place)
        if place and not file.readline(longest or -1).endswith(b"\n"):
            return
        if file.tell() < self._place.position:
            file.seek(self._place.position)
        start = file.tell()
        data = file.readline(longest) if longest else file.read()
        if data.endswith(b"\n") or not longest:
            self._place.position = start
            self._take(data.split(b"\n")[:-1])

    def _take(self, lines: Sequence[bytes]) -> None:
        import orjson

        rows: list[dict[str, Any]] = []
        for line in lines:
            try:
                row = orjson.loads(line) if line and not self._within_long else None
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
                self._starts.append(self._place.position)
            self._within_long = False
            self._place.position += len(line) + 1
        if rows:
            self._append(rows)

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Lines with the same names are taken together, so that the work is that of the numbers there are."""
        shapes: dict[tuple[str, ...], list[int]] = {}
        for at, row in enumerate(rows):
            shapes.setdefault(tuple(row), []).append(at)
        found: dict[str, list[tuple[list[int], list[Any]]]] = {}
        for keys, places in shapes.items():
            for key in keys:
                found.setdefault(key, []).append((places, [rows[at][key] for at in places]))
        before = len(self) - len(rows)
        for key in sorted(found, key=lambda k: (k not in SHOWN, k)):
            if key in self.columns or len(self.columns) < MOST_KEYS:
                column = self.columns.setdefault(key, Column())
                lines = np.array([at for places, _ in found[key] for at in places], dtype=np.int32)
                numbers = _numbers([v for _, values in found[key] for v in values])
                order = np.argsort(lines) if len(found[key]) > 1 else slice(None)
                column.add(before + lines[order], numbers[order])


def _numbers(values: list[Any]) -> NDArray[np.float64]:
    """NaN for whatever is not a number."""
    if not set(map(type, values)) <= NUMBERS:
        values = [v if type(v) in NUMBERS else None for v in values]
    return np.array(values, dtype=np.float64)


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
