"""A run directory as it is looked at, while it may still grow. In: the directory. Out: curves, events, state, findings.

Invariant: the run directory is only read, and never locked; a file that is missing, torn or gone is an answer, not an error.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gspo.redact import redacted_values
from gspo.view.columns import Columns, downsample
from gspo.view.diagnosis import WINDOW, Finding, RunFacts, diagnose
from gspo.view.panels import KEYS, PHASES
from gspo.view.safe_files import ReadPosition, open_regular, read_regular

MOST_EVENTS = 500
EVENT_BYTES = 4 << 20
MOST_FIELDS = 20
SAMPLED = 1000
"""Lines of a long file that are looked at before it was read."""
LONGEST_EVENT = 1000
"""Characters of an event's text that are kept."""
LARGEST_SETTINGS = 1 << 20
DEEPEST, MOST_ITEMS, LONGEST_TEXT, LONGEST_NAME = 6, 500, 20_000, 200
"""Of settings and the environment: levels, items of one level, and characters of a text or a name that are kept."""
MOST_EVALUATIONS = 10_000
STEP_TIME = "time/step_s"


class RunReader:
    """One run, read on at each `refresh`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics, self._timings = IncrementalFile(path / "metrics.jsonl"), IncrementalFile(path / "timings.jsonl")
        self._events = JsonlTail(path / "events.jsonl", most=MOST_EVENTS)
        self._settings: dict[str, Any] = {}
        self._read_settings: tuple[int, int] | None = None

    def refresh(self, most: int | None = None) -> None:
        """Read what is new; of very long files about `most` bytes, if that is given, and lines here and there of the rest."""
        self._metrics.refresh(most)
        self._timings.refresh(most)
        self._events.refresh()

    @property
    def metrics(self) -> Columns:
        """What is known of `metrics.jsonl`."""
        return self._metrics.columns

    @property
    def timings(self) -> Columns:
        """What is known of `timings.jsonl`."""
        return self._timings.columns

    @property
    def partial(self) -> bool:
        """Whether only a part of the steps was read so far."""
        return self._metrics.whole.behind or self._timings.whole.behind

    @property
    def version(self) -> str:
        """Changes whenever something to show does."""
        parts = (
            *self._metrics.whole.version,
            *self._timings.whole.version,
            *self._events.version,
            self.partial,
            self.state,
        )
        return "-".join(map(str, parts))

    @property
    def settings(self) -> dict[str, Any]:
        """`config.toml`, without secrets; empty while there is none."""
        file = self.path / "config.toml"
        try:
            status = file.stat()
        except OSError:
            return {}
        if (status.st_mtime_ns, status.st_size) != self._read_settings:
            self._settings, self._read_settings = _tables(file), (status.st_mtime_ns, status.st_size)
        return self._settings

    @property
    def environment(self) -> dict[str, Any]:
        """`environment.json`; empty while there is none."""
        try:
            found = json.loads(read_regular(self.path / "environment.json", LARGEST_SETTINGS))
        except (OSError, ValueError, RecursionError):
            return {}
        return bounded(found) if isinstance(found, dict) else {}

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """The last events, the oldest first."""
        return self._events.rows

    @property
    def step(self) -> int:
        """The last step that was written."""
        last = self.metrics.latest("step")
        return int(last) if 0 <= last < 1 << 53 else 0

    @property
    def planned_steps(self) -> int | None:
        """Steps after which the run ends; None if that is not known, as where it ends by sampled tokens."""
        steps = self.settings.get("steps")
        return steps if isinstance(steps, int) and not self.settings.get("tokens") else None

    @property
    def state(self) -> str:
        """`running`, `finished`, `stopped` (by a signal), `failed` (with an error), `ended` (without a word), or `gone`."""
        if not self.path.is_dir():
            return "gone"
        if _locked(self.path / ".lock"):
            return "running"
        last = self.events[-1] if self.events else {}
        if last.get("event") == "error":
            return "failed"
        if last.get("event") == "stop":
            return "finished" if last.get("signal") is None else "stopped"
        return "ended"

    def curves(self, points: int, *, x: str = "step", first: float = -math.inf, last: float = math.inf) -> dict[str, Any]:  # fmt: skip
        """Every metric on a panel with at most `points` points within `first <= x <= last`, and the times of the steps there."""
        axis, steps = self.metrics.values(x), self.metrics.values("step")
        inside = (axis >= first) & (axis <= last)
        keys = [key for key in KEYS if key in self.metrics.columns] if len(axis) == len(steps) else []
        found = {key: downsample(axis[inside], self.metrics.values(key)[inside], points) for key in keys}
        there = steps[inside] if keys else steps
        bounds = (float(there.min()), float(there.max())) if len(there) else (-math.inf, math.inf)
        return {"curves": {k: v for k, v in found.items() if v["x"]}, "phases": self._phases(points, *bounds)}

    def _phases(self, points: int, first: float, last: float) -> dict[str, Any]:
        """Seconds of a step by phase, `other` for the rest; fewer points, because bars must be seen."""
        steps, total = self.timings.values("step"), self.timings.values(STEP_TIME)
        if not len(steps) or len(steps) != len(total):
            return {"x": [], "y": {}}
        inside = (steps >= first) & (steps <= last) & ~np.isnan(total)
        parts = {c.key: np.nan_to_num(self.timings.values(c.key)) for c in PHASES if c.key in self.timings.columns}
        other = np.maximum(0.0, total - sum(parts.values(), np.zeros_like(total)))
        bars = {key: downsample(steps[inside], y[inside], min(points, 120)) for key, y in (*parts.items(), ("other", other))}  # fmt: skip
        return {"x": bars["other"]["x"], "y": {key: bar["y"] for key, bar in bars.items()}}

    def look(self) -> RunFacts:
        """What the plain-language rules look at."""
        rows = [row for row in self.metrics.last(2 * WINDOW + 1) if row.get("step")][-2 * WINDOW :]
        return RunFacts(
            rows=rows,
            evaluations=self._evaluations(),
            timings=self.timings.last(WINDOW),
            events=self.events,
            settings=self.settings,
            state=self.state,
        )

    def findings(self) -> list[Finding]:
        """What is going on, in plain language."""
        return diagnose(self.look())

    def _evaluations(self) -> list[dict[str, float]]:
        keys = ("step", "reward/mean", "eval/accuracy", "eval/accuracy_low", "eval/accuracy_high")
        columns = {key: self.metrics.values(key) for key in keys if key in self.metrics.columns}
        if "eval/accuracy" not in columns:
            return []
        rows = np.flatnonzero(~np.isnan(columns["eval/accuracy"]))[-MOST_EVALUATIONS:]
        found = [{k: float(c[i]) for k, c in columns.items() if not np.isnan(c[i])} for i in rows]
        return [row for row in found if {"step", "eval/accuracy_low", "eval/accuracy_high"} <= row.keys()]

    def pace(self) -> float | None:
        """Median seconds of the recent steps."""
        seconds = [row[STEP_TIME] for row in self.timings.last(WINDOW) if STEP_TIME in row]
        return float(np.median(seconds)) if seconds else None

    def row_of(self, step: int) -> dict[str, Any]:
        """The metrics and times of one step, as they were written; empty if there is none."""
        found: dict[str, Any] = {}
        for file in (self._metrics.whole, self._timings.whole):
            at = np.flatnonzero(file.values("step") == step)
            found |= file.row(int(at[-1])) if len(at) else {}
        return {key: value for key, value in found.items() if isinstance(value, int | float)}


class IncrementalFile:
    """A step file that is read in bites: until it was read to its end, a sample of its lines stands for it."""

    def __init__(self, path: Path) -> None:
        self.whole = Columns(path)
        self._sample: Columns | None = None

    def refresh(self, most: int | None) -> None:
        """Read on; the first time a file is longer than `most` only the sample is taken, so that there is an answer at once."""
        first = not len(self.whole) and not self.whole.behind
        self.whole.refresh(0 if first and most is not None and self._size() > most else most)
        if not self.whole.behind:
            self._sample = None
        elif self._sample is None:
            self._sample = Columns.sampled(self.whole.path, SAMPLED)

    def _size(self) -> int:
        try:
            return self.whole.path.stat().st_size
        except OSError:
            return 0

    @property
    def columns(self) -> Columns:
        """All of it, or the sample."""
        return self._sample or self.whole


class JsonlTail:
    """The last rows of a file of JSON lines; texts are cut, and of a long file only the end is read."""

    def __init__(self, path: Path, *, most: int) -> None:
        self.path, self.most = path, most
        self._generation = self._seen = 0
        self._forget()

    def _forget(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._place = ReadPosition()

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever the content does."""
        return self._generation, self._seen

    def refresh(self) -> None:
        """Read what is new."""
        try:
            with open_regular(self.path) as file:
                if not self._place.still_holds(file):
                    self._forget()
                    self._generation += 1
                    self._place.still_holds(file)
                self._read_on(file)
        except OSError:
            return

    def _read_on(self, file: BinaryIO) -> None:
        end = os.fstat(file.fileno()).st_size
        begin = max(self._place.position, end - EVENT_BYTES)
        file.seek(begin)
        data = file.read(EVENT_BYTES)
        if begin > self._place.position:
            skipped = data.find(b"\n") + 1
            begin, data = begin + skipped, data[skipped:]
        whole = data.rfind(b"\n") + 1
        if whole:
            self._take(data[:whole])
            self._place.position = begin + whole
            self._place.remember(file)

    def _take(self, data: bytes) -> None:
        for line in data.split(b"\n")[:-1]:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                self.rows.append(
                    {k[:LONGEST_NAME]: _short(v) for k, v in list(row.items())[:MOST_FIELDS] if _sound(k, v)}
                )
                self._seen += 1
        del self.rows[: -self.most]


def _tables(file: Path) -> dict[str, Any]:
    """The tables of a TOML file that anybody may have written, without secrets; empty if it is none."""
    try:
        return dict(redacted_values(bounded(tomllib.loads(read_regular(file, LARGEST_SETTINGS)))))
    except (OSError, ValueError, RecursionError):  # tomllib raises ValueError also for a number of too many digits
        return {}


def bounded(value: Any, depth: int = DEEPEST) -> Any:
    """A value of a file that anybody may have written, as it can be shown: short texts, numbers that a page can hold, and no
    more than a few levels and items."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 53 else f"a number of about {value.bit_length() * 0.30103:.0f} digits"
    if isinstance(value, Mapping | list) and not depth:
        return "…"
    if isinstance(value, Mapping):
        return {str(k)[:LONGEST_NAME]: bounded(v, depth - 1) for k, v in list(value.items())[:MOST_ITEMS]}
    if isinstance(value, list):
        return [bounded(v, depth - 1) for v in value[:MOST_ITEMS]]
    return str(value)[:LONGEST_TEXT]


def _short(value: Any) -> Any:
    """A value of an event as it can be shown."""
    value = bounded(value)
    if isinstance(value, int | float) or value is None:
        return value
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST_EVENT]


def _sound(key: str, value: Any) -> bool:
    """Whether a field can be what it is called: a step is a whole number."""
    return key != "step" or (isinstance(value, int) and 0 <= value < 1 << 53)


def _locked(path: Path) -> bool:
    """Whether a process holds the trainer's lock. Asked of the kernel's list: trying the lock could refuse a trainer."""
    try:
        inode = path.stat().st_ino
        with open("/proc/locks", encoding="ascii") as locks:
            return any("FLOCK" in line and line.split()[5].endswith(f":{inode}") for line in locks if "->" not in line)
    except (OSError, IndexError):
        return False
