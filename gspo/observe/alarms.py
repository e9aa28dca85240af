"""Signs that a run has gone wrong, each with a sentence on what to try.

In: the metrics of the last steps. Out: the alarms that hold. Invariant: a function of `metrics.jsonl` alone, so it can be
asked of any run at any time; each rule wants its sign in every one of the last steps, so that a healthy run's bad moment is
not an alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A sign, and what to do about it."""

    name: str
    holds: Callable[[Row], bool]
    """Of one step."""
    what: str


ALARMS = (
    Alarm(
        name="uniform rewards",
        holds=lambda row: _at(row, "groups/uniform_fraction") >= 1,
        what="every group's replies have the same reward, so nothing can be learned; use problems that are sometimes solved, more replies per prompt, or look at the reward",
    ),
    Alarm(
        name="entropy collapse",
        holds=lambda row: _at(row, "entropy/mean", 1.0) < 1e-3 and _at(row, "reward/correct_fraction", 1.0) < 0.9,
        what="the policy has become certain of every token without solving the problems; go back to an earlier checkpoint with a lower learning rate, or a higher objective.clip_high",
    ),
    Alarm(
        name="length pinned",
        holds=lambda row: _at(row, "length/truncated_fraction") >= 0.9,
        what="nearly all replies are cut at rollout.max_tokens, so their answers are missing; raise it, check that the chat template's end token is among the stop tokens, or set objective.shape",
    ),
    Alarm(
        name="repetition",
        holds=lambda row: _at(row, "length/repetitive_fraction") >= 0.5,
        what="half of the replies or more repeat one token; go back to an earlier checkpoint with a lower learning rate",
    ),
)
NAMES = tuple(alarm.name for alarm in ALARMS)


def holding(rows: Sequence[Row], steps: int) -> list[Alarm]:
    """The alarms whose sign is in each of the last `steps` rows; step 0 has no signs."""
    recent = [row for row in rows if row.get("step")][-steps:]
    return [alarm for alarm in ALARMS if len(recent) == steps and all(alarm.holds(row) for row in recent)]


def _at(row: Row, key: str, missing: float = 0.0) -> float:
    value = row.get(key)
    return missing if value is None else float(value)
