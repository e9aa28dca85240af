"""Alarms: signs that a run has gone wrong, each with a sentence on what to try.

In: the metrics of recent steps. Out: the alarms that are active. Invariant: alarms depend on `metrics.jsonl` alone, so
they can be computed for any run at any time. A sign must be present in each of the last steps (or evaluations), so a
single bad step of a healthy run raises no alarm. The exception is an engine that drifts from the learner, which never
happens by chance.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.config import Config

Row = Mapping[str, Any]
HISTORY = 500
"""Number of recent rows of metrics that alarms use."""
BEFORE = 20
"""Number of earlier steps that a reward jump is compared with."""
JUMP = 4.0
"""A reward jump is this many of their standard deviations."""
APART = 10.0
"""The engine has drifted from the learner if the mismatch is this many times its median."""
ROUNDING = 1e-4
"""A mean difference of log-probs that is harmless, however small it was before."""
NOISY = 0.32
"""Share of the ratios that rounding alone moves outside the clip range. At this share, one standard deviation of the
noise is as wide as the range (a normal variable exceeds one standard deviation with probability 0.32)."""
FLAT = 1e-6
"""A standard deviation of advantages or rewards below this counts as zero."""


def before_sign(rows: Sequence[Row], steps: int) -> int:
    """The last step whose weights were good, for an alarm that is raised as soon as a sign has lasted for `steps`.

    The weights after step n sample the completions of step n + 1. So if step n + 1 is the first with a sign, the
    weights after step n are bad, and those after step n - 1 are good."""
    return int(rows[-1]["step"]) - steps - 1


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A sign of trouble, and what to try."""

    name: str
    holds: Callable[[Sequence[Row], int], bool]
    """Takes the rows so far and the number of steps for which a sign must last."""
    what: str
    last_good: Callable[[Sequence[Row], int], int] = before_sign
    """Takes the same when the alarm is raised. The last step whose weights were good, for a rollback; negative if no
    weights of the run were."""
    remedy: Callable[[Config], str] | None = None
    """What to try, by the settings of the run. None if `what` says it."""

    def message(self, config: Config) -> str:
        """What has happened and what to try, for a run with these settings."""
        return self.what if self.remedy is None else f"{self.what}; {self.remedy(config)}"


def rounding_remedy(*, dtype: str, old_logp: str, replay: str, adaptive: bool) -> str:
    """What to try if rounding exceeds the clip range, in a run with these settings. It is accepted with the others."""
    finer = {
        "bfloat16": 'set model.dtype = "float16", which rounds eight times finer at the same cost, or "float32", ',
        "float16": 'set model.dtype = "float32", ',
    }
    also = ['routing.replay = "off"'] * (replay == "old") + ["a fixed clip range"] * adaptive
    last = f"set learner.mini_batches = 1{''.join(f' and {a}' for a in also)}, which makes every ratio exactly 1"
    if old_logp == "sampler":
        last = 'recompute the old log-probs (learner.old_logp = "recompute")'
    return f"{finer.get(dtype, '')}widen objective.clip_low and objective.clip_high, or {last}"


def adapts_clip(settings: Mapping[str, Any]) -> bool:
    """Whether these settings of an objective ask for an adaptive clip range."""
    return any(str(settings.get(side)).startswith("auto:") for side in ("clip_low", "clip_high"))


def run_rounding_remedy(config: Config) -> str:
    """`rounding_remedy` for a run."""
    return rounding_remedy(
        dtype=config.model.dtype,
        old_logp=config.learner.old_logp,
        replay=config.routing.replay,
        adaptive=adapts_clip(config.objective.settings),
    )


def lasting(sign: Callable[[Row], bool]) -> Callable[[Sequence[Row], int], bool]:
    """True if each of the last steps has the sign. Step 0 is only an evaluation and is skipped."""

    def holds(rows: Sequence[Row], steps: int) -> bool:
        recent = [row for row in rows if row.get("step")][-steps:]
        return len(recent) == steps and all(map(sign, recent))

    return holds


def reward_jump(rows: Sequence[Row], steps: int) -> bool:
    """Whether the mean reward of each of the last steps is far above that of the steps before them."""
    scored = [row for row in rows if row.get("reward/mean") is not None]
    before = scored[-steps - BEFORE : -steps]
    recent = scored[-steps:]
    if len(before) < BEFORE:
        return False
    values = [float(row["reward/mean"]) for row in before]
    within = statistics.fmean(_metric(row, "reward/std") for row in recent)
    # A reward that was always 0 has no spread of its own: without this floor, the first success would be a jump.
    spread = max(statistics.pstdev(values), 0.1 * within)
    return min(float(row["reward/mean"]) for row in recent) > statistics.fmean(values) + JUMP * spread


def mismatch_jump(rows: Sequence[Row], steps: int) -> bool:
    """Whether the mismatch between engine and learner is far larger in the last step than before.

    One step is enough: an engine that samples with other weights than the learner's is wrong from the first token."""
    values = [float(row["mismatch/abs_mean"]) for row in rows if row.get("mismatch/abs_mean") is not None]
    if len(values) <= steps or rows[-1].get("mismatch/abs_mean") is None:
        return False
    return values[-1] > max(APART * statistics.median(values[:-1]), ROUNDING)


def held_out_drop(rows: Sequence[Row], steps: int) -> bool:
    """Whether held-out accuracy has fallen while more training completions are correct.

    It has fallen if the confidence intervals of two evaluations in a row lie below that of an earlier one."""
    evaluated = [i for i, row in enumerate(rows) if row.get("eval/accuracy_low") is not None]
    if len(evaluated) < 3:
        return False
    best = max(evaluated[:-2], key=lambda i: float(rows[i]["eval/accuracy_low"]))
    best_low = float(rows[best]["eval/accuracy_low"])
    # Disjoint intervals, twice in a row: out of many comparisons, one is exceeded by chance.
    fallen = all(float(rows[i]["eval/accuracy_high"]) < best_low for i in evaluated[-2:])
    before = _correct_fraction(rows[max(0, best - steps) : best + 1])
    after = _correct_fraction(rows[evaluated[-2] :][-steps:])
    return fallen and before is not None and after is not None and after > before


def before_drop(rows: Sequence[Row], steps: int) -> int:
    """The step of the last evaluation from before held-out accuracy fell, as `Alarm.last_good`."""
    evaluated = [row for row in rows if row.get("eval/accuracy_low") is not None]
    best_low = max(float(row["eval/accuracy_low"]) for row in evaluated[:-2])
    return max(int(row["step"]) for row in evaluated if float(row["eval/accuracy_high"]) >= best_low)


def before_skipped(rows: Sequence[Row], step: int, in_row: int) -> int:
    """The last step whose weights were good, when `step` has skipped updates after `in_row` others in a row."""
    first = step
    for row in reversed(rows):
        if in_row <= 0:
            break
        first = int(row["step"])
        in_row -= int(row.get("grad/skipped") or 0)
    return before_sign([{"step": first}], 1)


def _correct_fraction(rows: Sequence[Row]) -> float | None:
    values = [float(row["reward/correct_fraction"]) for row in rows if row.get("reward/correct_fraction") is not None]
    return statistics.fmean(values) if values else None


def _trick_fraction(row: Row) -> float:
    return sum(float(v or 0) for key, v in row.items() if key.startswith("reward/note/") and key.endswith("/trick"))


ALARMS = (
    Alarm(
        name="no trainable samples",
        holds=lasting(lambda row: row.get("samples/trained") == 0),
        what=(
            "no completion of these steps was trained on, so the policy has not changed; samples/dropped says why: "
            "uniform groups need problems that are sometimes solved, a reward with partial credit or more completions "
            "per prompt; truncated completions need a higher rollout.max_tokens; unscored ones need a working reward"
        ),
    ),
    Alarm(
        name="uniform rewards",
        holds=lasting(
            lambda row: _metric(row, "groups/uniform_fraction") >= 1 and _metric(row, "advantage/std") < FLAT
        ),
        what=(
            "the completions of every group have the same reward, so there is no gradient; use problems that are "
            "sometimes solved or more completions per prompt, or check the reward"
        ),
    ),
    Alarm(
        name="entropy collapse",
        holds=lasting(
            # A policy that solves nearly everything may be certain.
            lambda row: _metric(row, "entropy/mean", 1.0) < 1e-3 and _metric(row, "reward/correct_fraction", 1.0) < 0.9
        ),
        what=(
            "the policy is almost deterministic without solving the problems; start a new run from an earlier "
            "checkpoint (model.path) with a lower learning rate or, if the objective has a clip range, a higher "
            "objective.clip_high"
        ),
    ),
    Alarm(
        name="truncation",
        holds=lasting(lambda row: _metric(row, "length/truncated_fraction") >= 0.9),
        what=(
            "nearly all completions are truncated at rollout.max_tokens, so their answers are missing; raise it, check "
            "that the chat template's end token is among the stop tokens, or ask for shorter completions "
            "(data.instruction)"
        ),
    ),
    Alarm(
        name="repetition",
        holds=lasting(lambda row: _metric(row, "length/repetitive_fraction") >= 0.5),
        what=(
            "at least half of the completions repeat one token; "
            "start a new run from an earlier checkpoint (model.path) with a lower learning rate"
        ),
    ),
    Alarm(
        name="reward jump",
        holds=reward_jump,
        what=(
            "the reward has jumped, which can mean reward hacking; "
            "read completions of this step in rollouts/ before you trust it"
        ),
    ),
    Alarm(
        name="held-out drop",
        holds=held_out_drop,
        last_good=before_drop,
        what=(
            "more training completions count as correct while held-out accuracy has fallen: the policy exploits the "
            "reward or overfits the training problems; read completions, and start a new run from an earlier "
            "checkpoint (model.path)"
        ),
    ),
    Alarm(
        name="tricks in programs",
        holds=lasting(lambda row: _trick_fraction(row) >= 0.5),
        what=(
            "at least half of the programs use constructs that are typical of reward hacking (exit, __eq__, "
            "sys.modules, settrace, ...); read some in rollouts/"
        ),
    ),
    Alarm(
        name="engine mismatch",
        holds=mismatch_jump,
        what=(
            "the engine's log-probs are ten times further from the learner's than in earlier steps, as if a weight "
            "sync had failed or a kernel still used old weights; stop and resume (the engine is rebuilt and gets all "
            'weights), and if the alarm returns, sample with rollout.engine = "local"'
        ),
    ),
    Alarm(
        name="rounding noise",
        holds=lasting(lambda row: _metric(row, "noise/beyond_clip") >= NOISY),
        what=(
            "rounding alone moves at least a third of the ratios outside the clip range (noise/beyond_clip), so "
            "clipping is mostly noise"
        ),
        remedy=run_rounding_remedy,
    ),
)
NAMES = tuple(alarm.name for alarm in ALARMS)


def active_alarms(rows: Sequence[Row], steps: int) -> list[Alarm]:
    """The alarms that are active after these rows. A sign must last for `steps` steps."""
    return [alarm for alarm in ALARMS if alarm.holds(rows[-HISTORY:], steps)]


def _metric(row: Row, key: str, missing: float = 0.0) -> float:
    value = row.get(key)
    return missing if value is None else float(value)
