"""A rough estimate of the time of a step and of the whole run, scaled from a few completions.

In: a case with measured times. Out: findings. Invariant: the time of sampling is a range. At most it grows with the
number of completions; at least, a full set of slots takes as long as a single completion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gspo.objectives.samples import keeps_group
from gspo.preflight.case import Case, Timings
from gspo.preflight.findings import Finding, note, ok
from gspo.preflight.machine import digits


def check_time(case: Case) -> Iterator[Finding]:
    pace = case.pace
    config = case.config
    if pace is None or not pace.trained:
        yield note("Unknown: the training half of a step could not be measured.")
        return
    low = rollout_seconds(case, pace, slots_scale(case, pace))
    high = rollout_seconds(case, pace, case.completions / pace.completions)
    reward = pace.reward_s * case.completions / pace.completions
    train = pace.train_s * case.completions / pace.trained
    # The reference adds one forward pass to the two forward passes and one backward pass (about two forwards) measured.
    train *= 1.25 if case.objective and case.objective.kl else 1.0
    rest = reward * _batches(case) + train
    runs = 1 + config.steps // config.eval.every + bool(config.steps % config.eval.every) if config.eval.every else 0
    evaluation = _evaluation(case, pace)
    steps = config.steps
    each_ms = digits(1000 * pace.reward_s / pace.completions, 3)
    detail = [
        f"{'sampling':<24} {_range(low, high)}",
        f"{'rewards':<24} {duration(reward * _batches(case))}   {each_ms} ms per completion with "
        f"{config.reward.workers} workers",
        f"{'training':<24} {duration(train)}   old and new forward, backward; without the optimizer step",
        f"{'an evaluation':<24} {duration(evaluation)}   {runs} times",
    ]
    start = " The cold start comes first, and changes how long completions are." if case.cold else ""
    whole = _range(steps * (low + rest) + runs * evaluation, steps * (high + rest) + runs * evaluation)
    yield ok(
        f"A step takes about {_range(low + rest, high + rest)}, so the run of {steps} steps takes about "
        f"{whole}.{start}",
        detail=detail,
        step_s=[low + rest, high + rest],
        reward_s=reward,
        learn_s=train,
        evaluation_s=evaluation,
    )


def rollout_seconds(case: Case, pace: Timings, scale: float) -> float:
    """Time to sample a whole step, with refills."""
    return pace.rollout_s * scale * _batches(case)


def slots_scale(case: Case, pace: Timings) -> float:
    """Ratio of a step's sampling time to the measured one if only the number of rounds over the slots counts."""
    slots = int(case.config.rollout.engine_options.get("slots", 256))
    return math.ceil(case.completions / slots) / math.ceil(pace.completions / slots)


def _batches(case: Case) -> float:
    """Batches of prompts per step; more than one if groups with equal rewards are replaced."""
    if case.objective is None or case.objective.keep != "mixed" or not case.groups:
        return 1.0
    mixed = sum(keeps_group(case.objective, g) for g in case.groups) / len(case.groups)
    return min(float(case.config.rollout.refill_budget), 1 / mixed if mixed else math.inf)


def _evaluation(case: Case, pace: Timings) -> float:
    held_out = len(case.problems.held_out) if case.problems else 0
    completions = held_out * (case.config.eval.samples + case.config.eval.greedy)
    return (pace.rollout_s + pace.reward_s) * completions / pace.completions


def _range(low: float, high: float) -> str:
    # An estimate from a few seconds is no more precise than that.
    return duration(high) if high < 1.3 * low else f"{duration(low)} to {duration(high)}"


def duration(seconds: float) -> str:
    """12 ms, 3.4 s, 25 min, 7.5 h, 3 days."""
    for unit, scale in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * scale:
            return f"{digits(seconds / scale, 2)} {unit}"
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s" if seconds >= 0.1 else f"{digits(1000 * seconds, 2)} ms"
