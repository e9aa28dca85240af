"""The final numbers of a comparison, per run and per arm.

In: `Series` of runs. Out: `SeedNumbers` and `ArmNumbers`. Invariant: an arm's numbers are over its finished runs only;
a value that was not measured is `None`, never 0.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gspo.view.compare.curves import Run, Series, sampled_tokens
from gspo.view.compare.intervals import Number, over_seeds

ACCURACY = "eval/accuracy"
GREEDY_ACCURACY = "eval/accuracy_greedy"
HELD_OUT_REWARD = "eval/reward"


@dataclass(frozen=True, kw_only=True)
class SeedNumbers:
    """The numbers of one run. Means are over its steps."""

    seed: int
    finished: bool
    tokens: int
    steps: int
    before: float | None
    """Held-out accuracy, sampled, at the first evaluation."""
    before_interval: tuple[float, float] | None
    """Wilson interval over problems."""
    after: float | None
    after_interval: tuple[float, float] | None
    greedy_before: float | None
    greedy_after: float | None
    held_out_before: float | None
    """Mean held-out reward at the first evaluation. All four are `None` if the reward equals the accuracy."""
    held_out_before_interval: tuple[float, float] | None
    """t-interval over problems."""
    held_out_after: float | None
    held_out_after_interval: tuple[float, float] | None
    lowest: float | None
    """Lowest held-out accuracy of any evaluation."""
    reward: float | None
    """Mean reward over the last 10 % of the tokens."""
    idle: float | None
    """Share of the steps without a trainable sample."""
    clip_tokens: float | None
    clip_sequences: float | None
    flips: float | None
    flips_native: float | None
    flips_sampler: float | None
    grad_norm: float | None
    entropy_lowest: float | None
    entropy_last: float | None
    minutes: float
    sets: Mapping[str, float] = field(default_factory=dict)
    """Accuracy of the last evaluation on each set of `eval.sets` and on each source of `data.mix`."""


@dataclass(frozen=True, kw_only=True)
class ArmNumbers:
    """The numbers of one arm over its finished seeds; fields as in `SeedNumbers`."""

    label: str
    runs: Sequence[SeedNumbers]
    tokens: Number | None
    steps: Number | None
    before: Number | None
    after: Number | None
    greedy_before: Number | None
    greedy_after: Number | None
    held_out_before: Number | None
    held_out_after: Number | None
    held_out_difference: Number | None
    """`held_out_after` minus that of the first arm, paired by seed; `None` for the first arm."""
    difference: Number | None
    """`after` minus that of the first arm, paired by seed; `None` for the first arm."""
    worse_than_start: int
    """Number of seeds whose last held-out accuracy is below their first."""
    lowest: float | None
    reward: Number | None
    idle: Number | None
    clip_tokens: Number | None
    clip_sequences: Number | None
    clip_ratio: float | None
    """`clip_tokens` relative to that of the first arm."""
    flips: Number | None
    flips_native: Number | None
    flips_sampler: Number | None
    grad_norm: Number | None
    entropy_lowest: Number | None
    entropy_last: Number | None
    minutes: Number | None
    sets: Mapping[str, Number | None] = field(default_factory=dict)

    @property
    def finished(self) -> list[SeedNumbers]:
        """The runs over which the arm's numbers are computed."""
        return [run for run in self.runs if run.finished]


def arm_numbers(series: Sequence[Series]) -> list[ArmNumbers]:
    """The numbers of every arm. The first arm is the baseline of the others."""
    runs_by_arm = [[seed_numbers(run) for run in s.runs] for s in series]
    return [
        _arm(s.label, runs, runs_by_arm[0] if number else None)
        for number, (s, runs) in enumerate(zip(series, runs_by_arm, strict=True))
    ]


def seed_numbers(run: Run) -> SeedNumbers:
    """The numbers of one run."""
    evaluations = [row for row in run.rows if row.get(ACCURACY) is not None]
    accuracy = run.values(ACCURACY)
    greedy = run.values(GREEDY_ACCURACY)
    entropy = run.values("entropy/mean")
    rewarded = [row for row in run.rows if row.get(HELD_OUT_REWARD) is not None]
    if all(row[HELD_OUT_REWARD] == row.get(ACCURACY) for row in rewarded):
        rewarded = []
    intervals = [
        (row["eval/accuracy_low"], row["eval/accuracy_high"])
        for row in evaluations
        if row.get("eval/accuracy_low") is not None
    ]
    return SeedNumbers(
        seed=run.seed,
        finished=run.finished,
        tokens=run.tokens,
        steps=run.step,
        before=_at(accuracy, 0),
        before_interval=intervals[0] if intervals else None,
        after=_at(accuracy, -1),
        after_interval=intervals[-1] if intervals else None,
        greedy_before=_at(greedy, 0),
        greedy_after=_at(greedy, -1),
        held_out_before=rewarded[0][HELD_OUT_REWARD] if rewarded else None,
        held_out_before_interval=_reward_interval(rewarded[:1]),
        held_out_after=rewarded[-1][HELD_OUT_REWARD] if rewarded else None,
        held_out_after_interval=_reward_interval(rewarded[-1:]),
        lowest=min(accuracy, default=None),
        reward=_late_reward(run),
        idle=run.idle / run.step if run.step else None,
        clip_tokens=_mean(run.values("clip/fraction_tokens")),
        clip_sequences=_mean(run.values("clip/fraction_sequences")),
        flips=_mean(run.values("routing/flip_fraction")),
        flips_native=_mean(run.values("routing/flip_fraction_native")),
        flips_sampler=_mean(run.values("routing/flip_fraction_sampler")),
        grad_norm=_mean(run.values("grad/norm")),
        entropy_lowest=min(entropy, default=None),
        entropy_last=_at(entropy, -1),
        minutes=run.minutes,
        sets={name: run.values(key)[-1] for name, key in set_accuracies([run]).items()},
    )


def _reward_interval(rows: Sequence[Mapping[str, float | None]]) -> tuple[float, float] | None:
    ends = [(row.get(f"{HELD_OUT_REWARD}_low"), row.get(f"{HELD_OUT_REWARD}_high")) for row in rows]
    return next(((low, high) for low, high in ends if low is not None and high is not None), None)


def set_accuracies(runs: Sequence[Run]) -> dict[str, str]:
    """The name and the metric key of each evaluation set, and of each source of a mixture, that was evaluated."""
    measured = dict.fromkeys(key for run in runs for row in run.rows for key, value in row.items() if value is not None)
    found = (re.fullmatch("eval/([^/]+)/accuracy", key) for key in measured)
    return {match[1]: match[0] for match in found if match}


def _late_reward(run: Run) -> float | None:
    rows = zip(run.rows, sampled_tokens(run.rows), strict=True)
    # A mean over the end: the reward of a single step is noisy.
    rewards = [row.get("reward/mean") for row, at in rows if at > 0.9 * run.tokens]
    return _mean([reward for reward in rewards if reward is not None])


def _arm(label: str, runs: Sequence[SeedNumbers], first: Sequence[SeedNumbers] | None) -> ArmNumbers:
    done = [run for run in runs if run.finished]

    def over(field: str, **limits: float) -> Number | None:
        return over_seeds([getattr(run, field) for run in done], **limits)

    share = {"lowest": 0.0, "highest": 1.0}
    return ArmNumbers(
        label=label,
        runs=runs,
        tokens=over("tokens", lowest=0.0),
        steps=over("steps", lowest=0.0),
        before=_with_interval(over("before", **share), [run.before_interval for run in done]),
        after=_with_interval(over("after", **share), [run.after_interval for run in done]),
        greedy_before=over("greedy_before", **share),
        greedy_after=over("greedy_after", **share),
        held_out_before=_with_interval(over("held_out_before"), [run.held_out_before_interval for run in done]),
        held_out_after=_with_interval(over("held_out_after"), [run.held_out_after_interval for run in done]),
        held_out_difference=None if first is None else _difference(done, first, "held_out_after", math.inf),
        difference=None if first is None else _difference(done, first, "after", 1.0),
        worse_than_start=sum(
            run.after < run.before for run in done if run.after is not None and run.before is not None
        ),
        lowest=min((run.lowest for run in done if run.lowest is not None), default=None),
        reward=over("reward"),
        idle=over("idle", **share),
        clip_tokens=over("clip_tokens", **share),
        clip_sequences=over("clip_sequences", **share),
        clip_ratio=_clip_ratio(done, first),
        flips=over("flips", **share),
        flips_native=over("flips_native", **share),
        flips_sampler=over("flips_sampler", **share),
        grad_norm=over("grad_norm", lowest=0.0),
        entropy_lowest=over("entropy_lowest", lowest=0.0),
        entropy_last=over("entropy_last", lowest=0.0),
        minutes=over("minutes", lowest=0.0),
        sets={name: over_seeds([run.sets.get(name) for run in done], **share) for name in _set_names(done)},
    )


def _set_names(runs: Sequence[SeedNumbers]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.sets))


def _with_interval(number: Number | None, intervals: Sequence[tuple[float, float] | None]) -> Number | None:
    """With a single seed, replace the interval over seeds by the one over problems."""
    if number is None or number.seeds > 1 or len(intervals) != 1 or intervals[0] is None:
        return number
    return Number(value=number.value, low=intervals[0][0], high=intervals[0][1])


def _difference(runs: Sequence[SeedNumbers], first: Sequence[SeedNumbers], field: str, largest: float) -> Number | None:
    values = {run.seed: getattr(run, field) for run in runs}
    reference = {run.seed: getattr(run, field) for run in first if run.finished}
    # Arms of a seed share their start, so pairing by seed removes the variance between cold starts.
    pairs = [(after, reference.get(seed)) for seed, after in values.items()]
    differences = [after - other for after, other in pairs if after is not None and other is not None]
    return over_seeds(differences, lowest=-largest, highest=largest)


def _clip_ratio(runs: Sequence[SeedNumbers], first: Sequence[SeedNumbers] | None) -> float | None:
    clipped = _mean([run.clip_tokens for run in runs if run.clip_tokens is not None])
    reference = _mean([run.clip_tokens for run in first or () if run.finished and run.clip_tokens is not None])
    # A ratio of means. A mean of ratios would divide by 0 for a seed that clips nothing.
    return clipped / reference if clipped is not None and reference else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _at(values: Sequence[float], place: int) -> float | None:
    return values[place] if values else None
