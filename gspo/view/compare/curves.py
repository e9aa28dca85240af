"""Run directories as curves over sampled tokens.

In: run directories. Out: `Run`s, `Curve`s and `Band`s. Invariant: only the run directory is read; a value that was not
measured (absent or null) adds no point to a curve; a band ends where the shortest of its curves ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo import aliases
from gspo.config import read_toml
from gspo.record import run_format
from gspo.record.held_out import scores, without_gain
from gspo.record.run_dir import abandoned_seconds, read_events, read_jsonl, read_metrics
from gspo.view.diagnosis import setting

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The contents of a run directory so far."""

    path: Path
    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    """Metrics per step, step 0 first."""
    minutes: float
    finished: bool
    problem: str | None
    """The error the run stopped with; `None` if there was none."""

    @property
    def seed(self) -> int:
        """The run's random seed."""
        return int(self.settings.get("seed", 0))

    @property
    def step(self) -> int:
        """The last step in its metrics."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def tokens(self) -> int:
        """Completion tokens sampled so far."""
        return sampled_tokens(self.rows)[-1] if self.rows else 0

    @property
    def idle(self) -> int:
        """Number of steps without a trainable sample."""
        return sum(row.get("samples/trained") == 0 for row in self.rows)

    def until(self, tokens: int) -> Run:
        """The run truncated to at most this many sampled tokens."""
        rows = [row for row, at in zip(self.rows, sampled_tokens(self.rows), strict=True) if at <= tokens]
        return dataclasses.replace(self, rows=rows)

    def values(self, key: str) -> list[float]:
        """Every measured value of a metric."""
        return [float(row[key]) for row in self.rows if row.get(key) is not None]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Runs of one arm, which differ only in their seed."""

    label: str
    runs: Sequence[Run]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric over sampled tokens."""

    x: Floats
    y: Floats


@dataclass(frozen=True, kw_only=True)
class Band:
    """Mean, minimum and maximum of several curves on a common grid."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def read_run(path: Path) -> Run | None:
    """The run in a directory; `None` if it has not started."""
    if not (path / "config.toml").is_file():
        return None
    run_format.read(path)
    settings, _ = aliases.tables(read_toml(path / "config.toml"), where=str(path / "config.toml"))
    rows = read_metrics(path)
    events = read_events(path)
    seconds = sum(row.get("time/step_s") or 0.0 for row in read_jsonl(path / "timings.jsonl"))
    # Steps that a rollback abandoned took their time, too, as their tokens are in tokens/sampled.
    seconds += abandoned_seconds(path)
    last = events[-1] if events else {}
    problem = f"{last.get('error')}: {last.get('message')}" if last.get("event") == "error" else None
    return Run(
        path=path,
        settings=settings,
        rows=rows,
        minutes=seconds / 60,
        finished=_finished(settings, rows, last),
        problem=problem,
    )


def _finished(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], last_event: Mapping[str, Any]) -> bool:
    """Whether the run stopped cleanly at the end defined by its own settings."""
    # A stop event of an earlier process says nothing about steps that were written after it.
    if not rows or last_event.get("event") != "stop" or last_event.get("step") != rows[-1]["step"]:
        return False
    if patience := setting(settings, "eval", "patience", 0):
        evaluations = scores(rows, setting(settings, "eval", "metric", "accuracy"))
        if without_gain(evaluations, setting(settings, "eval", "min_gain", 0.0)) >= patience:
            return True
    step = rows[-1]["step"]
    steps = settings.get("steps", 0)
    tokens = settings.get("tokens", 0)
    if not tokens:
        return bool(step >= steps)
    # A run with a token budget stops after twice its steps, even if completions became too short to use the budget up.
    return sampled_tokens(rows)[-1] >= tokens or bool(step >= 2 * steps)


def sampled_tokens(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Cumulative completion tokens at each row."""
    total, totals = 0, []
    for row in rows:
        # Runs of older versions lack the cumulative count.
        total = int(row.get("tokens/sampled", total + (row.get("tokens/generated") or 0)))
        totals.append(total)
    return totals


def curve(run: Run, key: str, window: int = 1) -> Curve:
    """A metric of a run, smoothed over `window` values."""
    rows = zip(run.rows, sampled_tokens(run.rows), strict=True)
    points = [(x, row[key]) for row, x in rows if row.get(key) is not None]
    # reshape: an empty list has no second dimension.
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return Curve(x=x, y=smooth(y, window))


def smooth(y: Floats, window: int) -> Floats:
    """Centered moving average. The window shrinks symmetrically near the ends."""
    # A window that is cut on one side would pull the ends of a rising curve inward.
    reach = [min(window // 2, i, len(y) - 1 - i) for i in range(len(y))]
    return np.array([y[i - r : i + r + 1].mean() for i, r in enumerate(reach)], dtype=np.float64)


def window_of(series: Sequence[Series]) -> int:
    """Smoothing window: about a twentieth of the longest run, odd."""
    # Odd, so that a window is symmetric around its value.
    return max((run.step for s in series for run in s.runs), default=0) // 20 | 1


def band(curves: Sequence[Curve]) -> Band | None:
    """Interpolate the curves onto the union of their points, within the range that all of them cover."""
    curves = [c for c in curves if len(c.x)]
    if not curves:
        return None
    # Only the common range: beyond it the mean would jump when a seed drops out.
    first, last = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
    x = np.unique(np.concatenate([c.x for c in curves]))
    x = x[(x >= first) & (x <= last)]
    if not len(x):
        return None
    y = np.stack([np.interp(x, c.x, c.y) for c in curves])
    return Band(x=x, mean=y.mean(axis=0), low=y.min(axis=0), high=y.max(axis=0))
