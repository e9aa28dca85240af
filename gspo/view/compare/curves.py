"""Run directories as curves over sampled tokens.

In: run directories. Out: `Run`s, `Curve`s and `Band`s. Invariant: nothing but the run directory is read, a value that was
not measured (absent or null) is no point of a curve, and a band ends where the first of its curves ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.config import read_toml
from gspo.record.run_dir import read_jsonl

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run directory says, as far as it got."""

    path: Path
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    """Metrics, step 0 first."""
    minutes: float
    finished: bool
    problem: str | None
    """Why it ended with an error, if it did."""

    @property
    def seed(self) -> int:
        """The seed of everything random in it."""
        return int(self.settings.get("seed", 0))

    @property
    def step(self) -> int:
        """The last step it has written."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def tokens(self) -> int:
        """Reply tokens it has sampled."""
        return sampled_tokens(self.rows)[-1] if self.rows else 0

    @property
    def idle(self) -> int:
        """Steps that trained on nothing."""
        return sum(row.get("samples/trained") == 0 for row in self.rows)

    def until(self, tokens: int) -> Run:
        """The run as it stood when it had sampled at most this many tokens."""
        kept = [row for row, at in zip(self.rows, sampled_tokens(self.rows), strict=True) if at <= tokens]
        return dataclasses.replace(self, rows=kept)

    def values(self, key: str) -> list[float]:
        """Every measured value of a metric."""
        return [float(row[key]) for row in self.rows if row.get(key) is not None]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Runs that differ in nothing but their seed, under one label."""

    label: str
    runs: Sequence[Run]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric against sampled tokens."""

    x: Floats
    y: Floats


@dataclass(frozen=True, kw_only=True)
class Band:
    """Several curves as one: their mean, lowest and highest on common points."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def read_run(path: Path) -> Run | None:
    """The run in a directory; None if there is none yet."""
    if not (path / "config.toml").is_file():
        return None
    settings, rows, events = read_toml(path / "config.toml"), read_jsonl(path / "metrics.jsonl"), read_jsonl(path / "events.jsonl")  # fmt: skip
    seconds = sum(row.get("time/step_s") or 0.0 for row in read_jsonl(path / "timings.jsonl"))
    last = events[-1] if events else {}
    problem = f"{last.get('error')}: {last.get('what')}" if last.get("event") == "error" else None
    return Run(
        path=path, settings=settings, rows=rows, minutes=seconds / 60, finished=_finished(settings, rows, last), problem=problem
    )  # fmt: skip


def _finished(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], last_event: Mapping[str, Any]) -> bool:
    """Whether it ended in good order at the end that its own settings give it."""
    if not rows or last_event.get("event") != "stop" or last_event.get("step") != rows[-1]["step"]:
        return False
    step, steps, tokens = rows[-1]["step"], settings.get("steps", 0), settings.get("tokens", 0)
    if not tokens:
        return bool(step >= steps)
    return sampled_tokens(rows)[-1] >= tokens or bool(step >= 2 * steps)


def sampled_tokens(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Reply tokens sampled up to and including each row."""
    total, totals = 0, []
    for row in rows:
        total = int(row.get("tokens/sampled", total + (row.get("tokens/generated") or 0)))
        totals.append(total)
    return totals


def curve(run: Run, key: str, window: int = 1) -> Curve:
    """A metric of a run, smoothed over `window` of its values."""
    points = [(x, row[key]) for row, x in zip(run.rows, sampled_tokens(run.rows), strict=True) if row.get(key) is not None]  # fmt: skip
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return Curve(x=x, y=smooth(y, window))


def smooth(y: Floats, window: int) -> Floats:
    """Mean of the `window` values around each; near the ends of as many as there are on both sides."""
    reach = [min(window // 2, i, len(y) - 1 - i) for i in range(len(y))]
    return np.array([y[i - r : i + r + 1].mean() for i, r in enumerate(reach)], dtype=np.float64)


def window_of(series: Sequence[Series]) -> int:
    """About a twentieth of the longest run, odd."""
    return max((run.step for s in series for run in s.runs), default=0) // 20 | 1


def band(curves: Sequence[Curve]) -> Band | None:
    """The curves together, on every point of any of them within the stretch that all of them cover."""
    curves = [c for c in curves if len(c.x)]
    if not curves:
        return None
    first, last = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
    x = np.unique(np.concatenate([c.x for c in curves]))
    x = x[(x >= first) & (x <= last)]
    if not len(x):
        return None
    y = np.stack([np.interp(x, c.x, c.y) for c in curves])
    return Band(x=x, mean=y.mean(axis=0), low=y.min(axis=0), high=y.max(axis=0))
