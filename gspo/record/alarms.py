"""Signs that a run has gone wrong, each with a sentence on what to try.

In: the metrics of the last steps. Out: the alarms that hold. Invariant: a function of `metrics.jsonl` alone, so it can be
asked of any run at any time; each rule wants its sign in every one of the last steps (or evaluations), so that a healthy
run's bad moment is not an alarm. The exception is an engine that parts from the learner, which no chance brings about.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
HISTORY = 500
"""Rows that alarms look at."""
BEFORE = 20
"""Steps that a jump of the reward is measured against."""
JUMP = 4.0
"""Their standard deviations."""
APART = 10.0
"""Times the median of the steps before: engine and learner have parted."""
ROUNDING = 1e-4
"""A mean difference of log-probabilities that is harmless, however many times smaller it was before."""
NOISY = 0.32
"""Of the ratios beyond the clip range by rounding alone: a standard deviation of the noise is then as wide as the range."""
FLAT = 1e-6
"""A spread of advantages, or of rewards, that is none."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A sign, and what to do about it."""

    name: str
    holds: Callable[[Sequence[Row], int], bool]
    """Of the rows so far, and the steps for which a sign must last."""
    what: str


def lasting(sign: Callable[[Row], bool]) -> Callable[[Sequence[Row], int], bool]:
    """A sign of single steps that is in each of the last; step 0 has no signs."""

    def holds(rows: Sequence[Row], steps: int) -> bool:
        recent = [row for row in rows if row.get("step")][-steps:]
        return len(recent) == steps and all(map(sign, recent))

    return holds


def jumped(rows: Sequence[Row], steps: int) -> bool:
    """Whether every one of the last steps has a mean reward far above the steps before them."""
    scored = [row for row in rows if row.get("reward/mean") is not None]
    before, recent = scored[-steps - BEFORE : -steps], scored[-steps:]
    if len(before) < BEFORE:
        return False
    values = [float(row["reward/mean"]) for row in before]
    within = statistics.fmean(_at(row, "reward/std") for row in recent)
    spread = max(statistics.pstdev(values), 0.1 * within)  # a reward that was always 0 has no spread of its own
    return min(float(row["reward/mean"]) for row in recent) > statistics.fmean(values) + JUMP * spread


def drifted(rows: Sequence[Row], steps: int) -> bool:
    """Whether the last step has engine and learner far further apart than the steps before it. One step is enough: what an
    engine draws with other weights than the learner's is wrong from its first token."""
    values = [float(row["mismatch/abs_mean"]) for row in rows if row.get("mismatch/abs_mean") is not None]
    if len(values) <= steps or rows[-1].get("mismatch/abs_mean") is None:
        return False
    return values[-1] > max(APART * statistics.median(values[:-1]), ROUNDING)


def parted(rows: Sequence[Row], steps: int) -> bool:
    """Whether held-out accuracy is surely below an earlier one at two evaluations in a row, and more training replies are right."""
    tested = [i for i, row in enumerate(rows) if row.get("eval/accuracy_low") is not None]
    if len(tested) < 3:
        return False
    best = max(tested[:-2], key=lambda i: float(rows[i]["eval/accuracy_low"]))
    fallen = all(float(rows[i]["eval/accuracy_high"]) < float(rows[best]["eval/accuracy_low"]) for i in tested[-2:])
    before, after = _right(rows[max(0, best - steps) : best + 1]), _right(rows[tested[-2] :][-steps:])
    return fallen and before is not None and after is not None and after > before


def _right(rows: Sequence[Row]) -> float | None:
    values = [float(row["reward/correct_fraction"]) for row in rows if row.get("reward/correct_fraction") is not None]
    return statistics.fmean(values) if values else None


def _tricks(row: Row) -> float:
    return sum(float(v or 0) for key, v in row.items() if key.startswith("reward/note/") and key.endswith("/trick"))


ALARMS = (
    Alarm(
        name="nothing trained",
        holds=lasting(lambda row: row.get("samples/trained") == 0),
        what="no reply of these steps was trained on, so the policy has not changed; samples/left_out says why: groups of equal rewards need problems that are sometimes solved, a reward with partial credit or more replies per prompt; cut replies a higher rollout.max_tokens; unscored ones another reward",
    ),
    Alarm(
        name="uniform rewards",
        holds=lasting(lambda row: _at(row, "groups/uniform_fraction") >= 1 and _at(row, "advantage/std") < FLAT),
        what="every group's replies have the same reward, so nothing can be learned; use problems that are sometimes solved, more replies per prompt, or look at the reward",
    ),
    Alarm(
        name="entropy collapse",
        holds=lasting(
            lambda row: _at(row, "entropy/mean", 1.0) < 1e-3 and _at(row, "reward/correct_fraction", 1.0) < 0.9
        ),
        what="the policy has become certain of every token without solving the problems; go back to an earlier checkpoint with a lower learning rate, or a higher objective.clip_high",
    ),
    Alarm(
        name="length pinned",
        holds=lasting(lambda row: _at(row, "length/truncated_fraction") >= 0.9),
        what="nearly all replies are cut at rollout.max_tokens, so their answers are missing; raise it, check that the chat template's end token is among the stop tokens, or ask for shorter replies (data.instruction)",
    ),
    Alarm(
        name="repetition",
        holds=lasting(lambda row: _at(row, "length/repetitive_fraction") >= 0.5),
        what="half of the replies or more repeat one token; go back to an earlier checkpoint with a lower learning rate",
    ),
    Alarm(
        name="reward jump",
        holds=jumped,
        what="the reward has leapt, as it does when the policy finds a way around the problem; read replies of this step in rollouts/ before you believe it",
    ),
    Alarm(
        name="held-out falls",
        holds=parted,
        what="more training replies count as right while held-out accuracy has fallen: the policy learns the reward or the training problems, not the task; read replies, and go back to an earlier checkpoint",
    ),
    Alarm(
        name="tricks in programs",
        holds=lasting(lambda row: _tricks(row) >= 0.5),
        what="half of the programs or more use what programs use that want a reward without solving the problem (exit, __eq__, sys.modules, settrace, ...); read some in rollouts/",
    ),
    Alarm(
        name="engine apart",
        holds=drifted,
        what='the log-probabilities of the sampling engine are ten times further from the learner\'s than in the steps before, as when weights did not arrive or a kernel goes on with old ones; stop and resume (the engine is built anew and gets all weights), and if it comes back sample with rollout.engine = "local"',
    ),
    Alarm(
        name="rounding noise",
        holds=lasting(lambda row: _at(row, "noise/beyond_clip") >= NOISY),
        what="rounding alone takes a third of the ratios or more out of the clip range, so what is clipped is chance; train in float32 (model.dtype), widen objective.clip_low and clip_high, or use learner.mini_batches = 1",
    ),
)
NAMES = tuple(alarm.name for alarm in ALARMS)


def holding(rows: Sequence[Row], steps: int) -> list[Alarm]:
    """The alarms that hold after these rows; a sign must last for `steps`."""
    return [alarm for alarm in ALARMS if alarm.holds(rows[-HISTORY:], steps)]


def _at(row: Row, key: str, missing: float = 0.0) -> float:
    value = row.get(key)
    return missing if value is None else float(value)
