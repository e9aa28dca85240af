"""Reads a run directory that may still grow.

In: the directory. Out: curves, events, state, findings. Invariant: the run directory is only read and never locked; a
missing, incomplete or deleted file is a valid state, not an error.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gspo import aliases
from gspo.record import run_format
from gspo.redact import redacted_values
from gspo.safe_files import ReadPosition, open_regular, read_regular
from gspo.view.diagnosis import WINDOW, Finding, RunFacts, diagnose
from gspo.view.jsonl_columns import Columns, downsample
from gspo.view.panel_data import panel_keys, phases

MOST_EVENTS = 500
EVENT_BYTES = 4 << 20
MOST_FIELDS = 20
SAMPLED_LINES = 1000
"""Lines sampled from a long file until it is read completely."""
LONGEST_EVENT = 1000
"""Limit of an event's text in characters."""
LARGEST_SETTINGS = 1 << 20
DEEPEST = 6
"""Limits of settings and environment: nesting levels, items per level, characters of a text, characters of a name."""
MOST_ITEMS = 500
LONGEST_TEXT = 20_000
LONGEST_NAME = 200
MOST_EVALUATIONS = 10_000
STEP_TIME = "time/step_s"
_TURN_START = re.compile(r"lag/turn/([0-9]{1,9})/start_s").fullmatch
SPANS = frozenset({"lag/sample_start_s", "lag/sample_end_s", "lag/learn_start_s", "lag/learn_end_s"})
"""Metrics of the timeline of sampling and training."""
TIMELINE = 16
"""Most steps that it shows."""


class RunReader:
    """One run; each `refresh` reads what was added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = IncrementalFile(path / "metrics.jsonl")
        self._timings = IncrementalFile(path / "timings.jsonl")
        self._events = JsonlTail(path / "events.jsonl", most=MOST_EVENTS)
        self._format = run_format.RunFormat(format=1, objective=None)
        self._settings: dict[str, Any] = {}
        self._settings_version: tuple[int, int] | None = None

    def refresh(self, most: int | None = None) -> None:
        """Read what was added; of each step file at most about `most` bytes if given, plus a sample of the rest.

        Raises `ConfigError` for a run directory that a later version of gspo wrote."""
        if not self.partial:
            self._format = run_format.read(self.path)
        self._metrics.refresh(most)
        self._timings.refresh(most)
        self._events.refresh()

    @property
    def metrics(self) -> Columns:
        """The columns of `metrics.jsonl` read so far, or a sample of them."""
        return self._metrics.columns

    @property
    def timings(self) -> Columns:
        """The columns of `timings.jsonl` read so far, or a sample of them."""
        return self._timings.columns

    @property
    def partial(self) -> bool:
        """Whether only a part of the steps has been read."""
        return self._metrics.whole.behind or self._timings.whole.behind

    @property
    def version(self) -> str:
        """Changes whenever the displayed content does."""
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
        """`config.toml` without secrets; empty if it does not exist."""
        file = self.path / "config.toml"
        try:
            status = file.stat()
        except OSError:
            return {}
        # Parsed again only after a change: the page polls.
        version = (status.st_mtime_ns, status.st_size)
        if version != self._settings_version:
            self._settings = _tables(file)
            self._settings_version = version
        return self._settings

    @property
    def objective(self) -> run_format.ObjectiveFacts:
        """What the run's objective does."""
        return self._format.objective or run_format.format_1_facts(self.settings)

    @property
    def environment(self) -> dict[str, Any]:
        """`environment.json`; empty if it does not exist."""
        try:
            found = json.loads(read_regular(self.path / "environment.json", LARGEST_SETTINGS))
        except (OSError, ValueError, RecursionError):
            return {}
        return bounded(found) if isinstance(found, dict) else {}

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """The latest events, oldest first."""
        return self._events.rows

    @property
    def step(self) -> int:
        """The last step in the metrics."""
        last = self.metrics.latest("step")
        return int(last) if 0 <= last < 1 << 53 else 0

    @property
    def planned_steps(self) -> int | None:
        """Number of steps the run will take; `None` if unknown, as for a run with a token budget."""
        steps = self.settings.get("steps")
        return steps if isinstance(steps, int) and not self.settings.get("tokens") else None

    @property
    def state(self) -> str:
        """`running`, `finished`, `stopped` (by a signal or a callback), `failed`, `ended` (exited unexpectedly) or
        `gone`."""
        if not self.path.is_dir():
            return "gone"
        # The lock first: a resumed run is running, although its last event may still be a stop or an error.
        if _locked(self.path / ".lock"):
            return "running"
        last = self.events[-1] if self.events else {}
        if last.get("event") == "error":
            return "failed"
        if last.get("event") == "stop":
            return "finished" if last.get("signal") is None and last.get("reason") is None else "stopped"
        return "ended"

    def curves(
        self, points: int, *, x: str = "step", first: float = -math.inf, last: float = math.inf
    ) -> dict[str, Any]:
        """Every panel metric with at most `points` points in `first <= x <= last`, and the phases of these steps."""
        axis = self.metrics.values(x)
        steps = self.metrics.values("step")
        inside = (axis >= first) & (axis <= last)
        keys = panel_keys(self.metrics.columns, self._equal) if len(axis) == len(steps) else []
        found = {key: downsample(axis[inside], self.metrics.values(key)[inside], points) for key in keys}
        selected = steps[inside] if keys else steps
        bounds = (float(selected.min()), float(selected.max())) if len(selected) else (-math.inf, math.inf)
        found |= self._timing_curves(points, axis, steps, *bounds)
        return {
            "curves": {k: v for k, v in found.items() if v["x"]},
            "phases": self._phases(points, *bounds),
            "timeline": self._timeline(),
        }

    def _equal(self, one: str, other: str) -> bool:
        """Whether two metrics have the same values."""
        return np.allclose(self.metrics.values(one), self.metrics.values(other), rtol=0, atol=1e-9, equal_nan=True)

    def _timing_curves(
        self, points: int, axis: NDArray[np.float64], steps: NDArray[np.float64], first: float, last: float
    ) -> dict[str, dict[str, list[float | None]]]:
        """The metrics of `timings.jsonl` that a panel of curves shows, for the steps that are in both files."""
        timed = self.timings.values("step")
        keys = panel_keys(self.timings.columns)
        if not keys or not len(timed) or not len(steps) or len(axis) != len(steps):
            return {}
        # Both files are in the order of steps, but metrics.jsonl begins with step 0, and either may be ahead.
        at = np.minimum(np.searchsorted(steps, timed), len(steps) - 1)
        inside = (steps[at] == timed) & (timed >= first) & (timed <= last)
        return {key: downsample(axis[at][inside], self.timings.values(key)[inside], points) for key in keys}

    def _phases(self, points: int, first: float, last: float) -> dict[str, Any]:
        """Seconds per step by phase, `other` for the remainder. Fewer points than a curve, because bars need width."""
        steps = self.timings.values("step")
        total = self.timings.values(STEP_TIME)
        if not len(steps) or len(steps) != len(total):
            return {"x": [], "y": {}}
        inside = (steps >= first) & (steps <= last) & ~np.isnan(total)
        timed = [m.key for m in phases().metrics if m.key in self.timings.columns]
        parts = {key: np.nan_to_num(self.timings.values(key)) for key in timed}
        # Rounding can make the phases add up to more than the step.
        other = np.maximum(0.0, total - sum(parts.values(), np.zeros_like(total)))
        seconds = {**parts, "other": other}
        bars = {key: downsample(steps[inside], y[inside], min(points, 120)) for key, y in seconds.items()}
        return {"x": bars["other"]["x"], "y": {key: bar["y"] for key, bar in bars.items()}}

    def _timeline(self) -> list[dict[str, Any]]:
        """When the last steps were sampled and trained on, as far as one process did it; empty if sampling and training
        take turns. `turns`: the weights, start and end of each turn, if a batch was sampled in several."""
        names = {key: key.removeprefix("lag/").removesuffix("_s") for key in SPANS}
        found: list[dict[str, Any]] = []
        for row in reversed(self.timings.last(TIMELINE)):
            # Another process has counted its seconds from its own start.
            if not row.keys() >= SPANS or (found and row["lag/learn_end_s"] > found[-1]["learn_end"]):
                break
            spans = {name: row[key] for key, name in names.items()}
            found.append({"step": row["step"], **spans, "turns": _turns(row)})
        return found[::-1]

    def facts(self) -> RunFacts:
        """The input of the diagnosis rules."""
        rows = [row for row in self.metrics.last(2 * WINDOW + 1) if row.get("step")][-2 * WINDOW :]
        return RunFacts(
            rows=rows,
            evaluations=self._evaluations(),
            timings=self.timings.last(WINDOW),
            events=self.events,
            settings=self.settings,
            objective=self.objective,
            state=self.state,
        )

    def findings(self) -> list[Finding]:
        """The diagnosis of the run."""
        return diagnose(self.facts())

    def _evaluations(self) -> list[dict[str, float]]:
        names = ("accuracy", "accuracy_low", "accuracy_high", "reward", "reward_low", "reward_high")
        keys = ("step", "reward/mean", *(f"eval/{name}" for name in names))
        columns = {key: self.metrics.values(key) for key in keys if key in self.metrics.columns}
        if "eval/accuracy" not in columns:
            return []
        rows = np.flatnonzero(~np.isnan(columns["eval/accuracy"]))[-MOST_EVALUATIONS:]
        found = [{k: float(c[i]) for k, c in columns.items() if not np.isnan(c[i])} for i in rows]
        return [row for row in found if {"step", "eval/accuracy_low", "eval/accuracy_high"} <= row.keys()]

    def latest(self, key: str) -> float:
        """The latest value of a metric; NaN if there is none."""
        return (self.metrics if key in self.metrics.columns else self.timings).latest(key)

    @property
    def rank_logs(self) -> list[str]:
        """What the followers of a run on several ranks have printed: paths relative to the run directory."""
        try:
            names = [entry.name for entry in os.scandir(self.path / "ranks")]
        except OSError:
            return []
        ranks = sorted(int(name[:-4]) for name in names if re.fullmatch(r"[0-9]{1,6}\.log", name))
        return [f"ranks/{rank}.log" for rank in ranks[:MOST_ITEMS]]

    def pace(self) -> float | None:
        """Median seconds per step over the recent steps."""
        seconds = [row[STEP_TIME] for row in self.timings.last(WINDOW) if STEP_TIME in row]
        return float(np.median(seconds)) if seconds else None

    def row_of(self, step: int) -> dict[str, Any]:
        """The metrics and timings of one step; empty if there are none."""
        found: dict[str, Any] = {}
        for file in (self._metrics.whole, self._timings.whole):
            at = np.flatnonzero(file.values("step") == step)
            found |= file.row(int(at[-1])) if len(at) else {}
        return {key: value for key, value in found.items() if isinstance(value, int | float)}


class IncrementalFile:
    """A step file that is read in parts. Until it is read completely, a sample of its lines represents it."""

    def __init__(self, path: Path) -> None:
        self.whole = Columns(path)
        self._sample: Columns | None = None

    def refresh(self, most: int | None) -> None:
        """Read the next part. On first sight of a file longer than `most`, only take the sample, which is fast."""
        first = not len(self.whole) and not self.whole.behind
        self.whole.refresh(0 if first and most is not None and self._size() > most else most)
        if not self.whole.behind:
            self._sample = None
        elif self._sample is None:
            self._sample = Columns.sampled(self.whole.path, SAMPLED_LINES)

    def _size(self) -> int:
        try:
            return self.whole.path.stat().st_size
        except OSError:
            return 0

    @property
    def columns(self) -> Columns:
        """All columns, or those of the sample."""
        return self._sample or self.whole


class JsonlTail:
    """The last rows of a file of JSON lines. Texts are truncated, and only the end of a long file is read."""

    def __init__(self, path: Path, *, most: int) -> None:
        self.path = path
        self.most = most
        self._generation = 0
        self._count = 0
        self._reset()

    def _reset(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._read = ReadPosition()

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever the content does."""
        return self._generation, self._count

    def refresh(self) -> None:
        """Read new rows."""
        try:
            with open_regular(self.path) as file:
                if not self._read.is_valid(file):
                    self._reset()
                    self._generation += 1
                    self._read.is_valid(file)  # registers the new file
                self._read_on(file)
        except OSError:
            return

    def _read_on(self, file: BinaryIO) -> None:
        end = os.fstat(file.fileno()).st_size
        # Events of a run that fails in a loop may fill gigabytes; the last ones are the ones to show.
        start = max(self._read.position, end - EVENT_BYTES)
        file.seek(start)
        data = file.read(EVENT_BYTES)
        if start > self._read.position:  # in the middle of the file, so the first line may be incomplete
            skipped = data.find(b"\n") + 1
            start += skipped
            data = data[skipped:]
        # A partial line is read again, once it is complete.
        complete = data.rfind(b"\n") + 1
        if complete:
            self._take(data[:complete])
            self._read.position = start + complete
            self._read.remember(file)

    def _take(self, data: bytes) -> None:
        for line in data.split(b"\n")[:-1]:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                fields = list(aliases.event(row).items())[:MOST_FIELDS]
                self.rows.append({k[:LONGEST_NAME]: _event_value(v) for k, v in fields if _valid_field(k, v)})
                self._count += 1
        del self.rows[: -self.most]


def _tables(file: Path) -> dict[str, Any]:
    """The tables of an untrusted TOML file, without secrets; empty if it is invalid."""
    try:
        tables, _ = aliases.tables(tomllib.loads(read_regular(file, LARGEST_SETTINGS)), where=str(file))
        return dict(redacted_values(bounded(tables)))
    except (OSError, ValueError, RecursionError):
        # ValueError is also raised for an integer with too many digits, and for a key under both of its names.
        return {}


def bounded(value: Any, depth: int = DEEPEST) -> Any:
    """A value of an untrusted file, limited for display in text length, nesting, items and integer size."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):  # JavaScript represents integers exactly only below 2**53
        return value if abs(value) < 1 << 53 else f"a number of about {value.bit_length() * 0.30103:.0f} digits"
    if isinstance(value, Mapping | list) and not depth:
        return "…"
    if isinstance(value, Mapping):
        return {str(k)[:LONGEST_NAME]: bounded(v, depth - 1) for k, v in list(value.items())[:MOST_ITEMS]}
    if isinstance(value, list):
        return [bounded(v, depth - 1) for v in value[:MOST_ITEMS]]
    return str(value)[:LONGEST_TEXT]


def _event_value(value: Any) -> Any:
    """A value of an event, limited for display."""
    value = bounded(value)
    if isinstance(value, int | float) or value is None:
        return value
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST_EVENT]


def _valid_field(key: str, value: Any) -> bool:
    """Whether a field has a valid value; only a step is checked, which must be an integer."""
    return key != "step" or (isinstance(value, int) and 0 <= value < 1 << 53)


def _locked(path: Path) -> bool:
    """Whether a trainer holds the lock.

    The kernel's list of locks is read instead of trying the lock, because a trainer that starts at that moment would
    find it taken.
    """
    try:
        inode = path.stat().st_ino
        with open("/proc/locks", encoding="ascii") as locks:
            return any("FLOCK" in line and line.split()[5].endswith(f":{inode}") for line in locks if "->" not in line)
    except (OSError, IndexError):
        return False


def _turns(row: Mapping[str, Any]) -> list[tuple[int, float, float]]:
    """The turns in which a batch was sampled (`rollout.span_tokens`): weights, start and end."""
    starts = {int(m[1]): row[key] for key in row if (m := _TURN_START(key))}
    return [(weights, start, row.get(f"lag/turn/{weights}/end_s", start)) for weights, start in sorted(starts.items())]
