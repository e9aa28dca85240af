"""A growing file of JSON lines as columns of numbers, read incrementally.

In: `metrics.jsonl` or `timings.jsonl` of a run that may still be writing. Out: one float64 column per key, NaN where a
line has no number. Invariant: the columns equal the file. A file that was truncated by a resume, replaced or deleted is
detected and read again (`generation` counts that), and an incomplete last line is read once it is complete. Columns are
sparse, so memory grows with the file and not with the number of lines times the number of keys.
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

from gspo import aliases
from gspo.record.metric_definitions import defined_keys
from gspo.safe_files import ReadPosition, open_regular

CHUNK = 1 << 19
LONGEST_LINE = 1 << 20
"""Longer lines are not metrics and are skipped."""
TAIL = 1 << 18
"""Bytes at the end of a long file that a sample reads in full."""
LONGEST_SAMPLED_LINE = 1 << 16
"""A sample skips longer lines."""
MOST_KEYS = 2000
"""A file with more keys is not a metrics file. Beyond the limit only metrics that are defined are stored."""
NAN = math.nan
NUMBER_TYPES = {float, int, bool, type(None)}


class Column:
    """The numbers of one key and their line indices, in order."""

    def __init__(self) -> None:
        # Arrays, not lists: a Python number takes four times the memory of its value.
        self.lines = array("i")
        self.numbers = array("d")

    def add(self, lines: NDArray[np.int32], numbers: NDArray[np.float64]) -> None:
        """Append numbers of later lines; NaN is skipped."""
        present = ~np.isnan(numbers)
        self.lines.frombytes(lines[present].tobytes())
        self.numbers.frombytes(numbers[present].tobytes())

    def dense(self, length: int) -> NDArray[np.float64]:
        """One number per line, NaN where there is none."""
        values = np.full(length, NAN)
        values[np.array(self.lines)] = np.array(self.numbers)
        return values

    def since(self, line: int) -> Iterator[tuple[int, float]]:
        """Line index and number from a line on, in descending order."""
        for at in range(len(self.lines) - 1, -1, -1):
            if self.lines[at] < line:
                return
            yield self.lines[at], self.numbers[at]


class Columns:
    """The columns of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._reset()

    def _reset(self) -> None:
        self.columns: dict[str, Column] = {}
        self._starts = array("q")
        self._read = ReadPosition()
        self._behind = False
        self._in_long_line = False

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever the content does."""
        return self.generation, len(self)

    @property
    def behind(self) -> bool:
        """Whether the file has unread lines because the last `refresh` was limited."""
        return self._behind

    def refresh(self, most: int | None = None) -> None:
        """Read new lines, at most about `most` bytes if given."""
        try:
            with open_regular(self.path) as file:
                if not self._read.is_valid(file):
                    self._restart()
                    self._read.is_valid(file)  # registers the new file
                self._read_on(file, most)
        except OSError:
            if self._read.known:
                self._restart()

    @classmethod
    def sampled(cls, path: Path, count: int) -> Columns:
        """About `count` lines spread evenly over a long file, and its last ones, without reading all of it."""
        sample = cls(path)
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                tail = max(0, size - TAIL)
                # Evenly spaced bytes, not lines: finding a line's number means reading everything before it.
                for position in range(0, tail, max(1, size // count)):
                    sample._take_at(file, position, LONGEST_SAMPLED_LINE)
                # The end in full, because the diagnosis looks at the last steps.
                sample._take_at(file, tail, None)
        except OSError:
            pass
        return sample

    def values(self, key: str) -> NDArray[np.float64]:
        """A copy of one column; empty if the key never occurred."""
        return self.columns[key].dense(len(self)) if key in self.columns else np.empty(0)

    def latest(self, key: str) -> float:
        """The latest number of a column; NaN if there is none."""
        numbers = self.columns[key].numbers if key in self.columns else ()
        return numbers[-1] if numbers else NAN

    def row(self, index: int) -> dict[str, Any]:
        """One line of the file; empty if the file has changed in the meantime."""
        import orjson

        try:
            with open_regular(self.path) as file:
                # The position of each line is kept, not the line: a page opens few of the steps.
                file.seek(self._starts[index])
                found = orjson.loads(file.readline(LONGEST_LINE))
        except (OSError, ValueError):
            return {}
        return aliases.metrics(found) if isinstance(found, dict) else {}

    def last(self, count: int) -> list[dict[str, float]]:
        """The last lines as numbers, without missing values."""
        first = max(0, len(self) - count)
        rows: list[dict[str, float]] = [{} for _ in range(first, len(self))]
        for key, column in self.columns.items():
            for line, number in column.since(first):
                rows[line - first][key] = number
        return rows

    def _restart(self) -> None:
        self._reset()
        self.generation += 1

    def _read_on(self, file: BinaryIO, most: int | None) -> None:
        """Read complete lines. A limited read takes at least one, so that it always makes progress."""
        size = os.fstat(file.fileno()).st_size
        file.seek(self._read.position)
        rest = b""
        budget = math.inf if most is None else most
        progress = most == 0
        while (budget > 0 or not progress) and (chunk := file.read(CHUNK)):
            # The last part may be a line that is still being written.
            *lines, rest = (rest + chunk).split(b"\n")
            self._take(lines)
            progress = progress or bool(lines)
            # A line without an end must not be collected in memory.
            if len(rest) > LONGEST_LINE:
                self._read.position += len(rest)
                rest = b""
                self._in_long_line = True
                progress = True
            budget -= len(chunk)
        self._behind = budget <= 0 and self._read.position + len(rest) < size
        self._read.remember(file)

    def _take_at(self, file: BinaryIO, position: int, longest: int | None) -> None:
        """Take the line that starts after a position, unless it was taken or is longer than `longest`.

        Without `longest`, take all lines after the position.
        """
        file.seek(position)
        if position and not file.readline(longest or -1).endswith(b"\n"):
            return
        if file.tell() < self._read.position:
            file.seek(self._read.position)
        start = file.tell()
        data = file.readline(longest) if longest else file.read()
        if data.endswith(b"\n") or not longest:
            self._read.position = start
            self._take(data.split(b"\n")[:-1])

    def _take(self, lines: Sequence[bytes]) -> None:
        import orjson

        rows: list[dict[str, Any]] = []
        for line in lines:
            try:
                row = orjson.loads(line) if line and not self._in_long_line else None
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
                self._starts.append(self._read.position)
            self._in_long_line = False
            self._read.position += len(line) + 1
        if rows:
            self._append(rows)

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to the columns. Rows with the same keys are added together, which is much faster."""
        rows_by_keys: dict[tuple[str, ...], list[int]] = {}
        for at, row in enumerate(rows):
            rows_by_keys.setdefault(tuple(row), []).append(at)
        found: dict[str, list[tuple[list[int], list[Any]]]] = {}
        for keys, indices in rows_by_keys.items():
            for key in keys:
                name = aliases.metric(key)
                if name == key or name not in keys:
                    found.setdefault(name, []).append((indices, [rows[at][key] for at in indices]))
        before = len(self) - len(rows)
        # Metrics with a definition first: a file with too many keys must not crowd them out.
        defined = defined_keys()
        for key in sorted(found, key=lambda k: (k not in defined, k)):
            if key in self.columns or len(self.columns) < MOST_KEYS:
                column = self.columns.setdefault(key, Column())
                lines = np.array([at for indices, _ in found[key] for at in indices], dtype=np.int32)
                numbers = _numbers([v for _, values in found[key] for v in values])
                order = np.argsort(lines) if len(found[key]) > 1 else slice(None)
                column.add(before + lines[order], numbers[order])


def _numbers(values: list[Any]) -> NDArray[np.float64]:
    """NaN for every value that is not a number."""
    if not set(map(type, values)) <= NUMBER_TYPES:
        values = [v if type(v) in NUMBER_TYPES else None for v in values]
    return np.array(values, dtype=np.float64)


def downsample(x: NDArray[np.float64], y: NDArray[np.float64], points: int) -> dict[str, list[float | None]]:
    """The measured points of a curve. If there are more than `points`, mean, minimum and maximum of each bucket."""
    present = ~np.isnan(y) & ~np.isnan(x)
    x, y = x[present], y[present]
    if len(x) <= points:
        return {"x": x.tolist(), "y": _finite(y)}
    # Buckets of points, not of steps, so that a sparse metric fills each of them.
    edges = np.linspace(0, len(x), points + 1).astype(np.int64)[:-1]
    sizes = np.diff(np.append(edges, len(x)))
    return {
        "x": (np.add.reduceat(x, edges) / sizes).tolist(),
        "y": _finite(np.add.reduceat(y, edges) / sizes),
        "low": _finite(np.minimum.reduceat(y, edges)),
        "high": _finite(np.maximum.reduceat(y, edges)),
    }


def _finite(values: NDArray[np.float64]) -> list[float | None]:
    # JSON has no infinity.
    return [v if math.isfinite(v) else None for v in values.tolist()]
