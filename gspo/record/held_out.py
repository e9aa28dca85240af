"""The held-out scores of a run: which checkpoint is the best, and whether the run should end early.

In: the rows of `metrics.jsonl`. Out: the best step, the number of evaluations without a gain, `best.json`.
Invariant: everything is a function of the rows, which a checkpoint pins by their length, so a resumed run decides as an
uninterrupted one does. Equal scores count for the earlier step. Nothing here imports torch, so tools that only read a
run start fast.

The highest of many noisy scores is biased upward: part of it is luck. Evaluate the best checkpoint on fresh problems
before you report its accuracy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.config import EvalConfig
from gspo.errors import ConfigError
from gspo.safe_files import read_regular

FILE = "best.json"
LARGEST_FILE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Score:
    """The held-out score of a step."""

    step: int
    value: float


def scores(rows: Iterable[Mapping[str, Any]], metric: str) -> list[Score]:
    """The evaluations that have a score, in order. `metric` is a value of `eval.metric`."""
    found = ((row.get("step"), row.get(f"eval/{metric}")) for row in rows)
    return [
        Score(step=int(step), value=float(value))
        for step, value in found
        # An evaluation in which nothing could be scored has no value.
        if step is not None and value is not None and math.isfinite(value)
    ]


def best(evaluations: Iterable[Score], steps: Collection[int] | None = None) -> Score | None:
    """The highest score, of these steps if they are given, the earliest of equals; None if there is no score."""
    # `max` returns the first of equals.
    return max((s for s in evaluations if steps is None or s.step in steps), key=lambda s: s.value, default=None)


def without_gain(evaluations: Iterable[Score], min_gain: float) -> int:
    """The number of evaluations since the last one that was higher than those before it by more than `min_gain`."""
    reference = -math.inf
    count = 0
    for score in evaluations:
        gained = score.value > reference + min_gain
        reference = score.value if gained else reference
        count = 0 if gained else count + 1
    return count


class HeldOutScores:
    """The scores of a run so far."""

    def __init__(self, settings: EvalConfig) -> None:
        self.settings = settings
        self.evaluations: list[Score] = []

    def restart(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take over the metrics of a restored run."""
        self.evaluations = scores(rows, self.settings.metric)

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the metrics of a step, which may have been evaluated."""
        self.evaluations += scores([row], self.settings.metric)

    @property
    def without_gain(self) -> int:
        """The number of evaluations since the last gain."""
        return without_gain(self.evaluations, self.settings.min_gain)

    @property
    def end_run(self) -> bool:
        """Whether the run ends early."""
        return self.would_end_run({})

    def would_end_run(self, row: Mapping[str, Any]) -> bool:
        """Whether the run ends early once the metrics of one more step are taken."""
        evaluations = [*self.evaluations, *scores([row], self.settings.metric)]
        return 0 < self.settings.patience <= without_gain(evaluations, self.settings.min_gain)

    def best(self, steps: Collection[int] | None = None) -> Score | None:
        """The best score, of these steps if they are given."""
        return best(self.evaluations, steps)


def to_json(score: Score, metric: str) -> str:
    """The text of `best.json`."""
    return json.dumps({"step": score.step, "metric": f"eval/{metric}", "value": score.value}, indent=2) + "\n"


def best_step(run: Path) -> int:
    """The step that `best.json` names."""
    file = run / FILE
    try:
        step = json.loads(read_regular(file, LARGEST_FILE))["step"]
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{run}: has no best checkpoint ({FILE}); a run keeps it with checkpoint.keep_best = true"
        ) from None
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: cannot be read ({type(error).__name__}); restore it from a copy") from None
    # Not isinstance: JSON's `true` is a bool, which is a subclass of int.
    if type(step) is not int or step < 0:
        raise ConfigError(f"{file}: has no valid step; restore it from a copy")
    return step
