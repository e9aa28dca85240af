"""How long a step and the whole run will take, roughly: what was measured on a few replies, scaled to a step.

Sampling scales with the replies at the most; at the least, as many as there are slots take the time of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gspo.objectives.samples import keeps_group
from gspo.preflight.case import Case, Timings
from gspo.preflight.findings import Finding, note, ok
from gspo.preflight.machine import digits


def check_time(case: Case) -> Iterator[Finding]:
    pace, config = case.pace, case.config
    if pace is None or not pace.learned:
        yield note("Not told: the learning half of a step could not be tried.")
        return
    low, high = (rollout_seconds(case, pace, scale) for scale in (slots_scale(case, pace), case.replies / pace.replies))
    reward, learn = pace.reward_s * case.replies / pace.replies, pace.learn_s * case.replies / pace.learned
    learn *= 1.25 if case.objective and case.objective.kl else 1.0  # the reference's forward, beside four such parts
    rest = reward * _draws(case) + learn
    runs = 1 + config.steps // config.eval.every + bool(config.steps % config.eval.every) if config.eval.every else 0
    evaluation = _evaluation(case, pace)
    steps = config.steps
    detail = [
        f"{'sampling':<24} {_range(low, high)}",
        f"{'rewards':<24} {duration(reward * _draws(case))}   {digits(1000 * pace.reward_s / pace.replies, 3)} ms per reply with {config.reward.workers} workers",
        f"{'learning':<24} {duration(learn)}   old and new forward, backward; without the optimiser's step",
        f"{'an evaluation':<24} {duration(evaluation)}   {runs} times",
    ]
    start = " The cold start comes first, and changes how long replies are." if case.cold else ""
    yield ok(
        f"A step takes about {_range(low + rest, high + rest)}, so the run of {steps} steps about {_range(steps * (low + rest) + runs * evaluation, steps * (high + rest) + runs * evaluation)}.{start}",
        detail=detail, step_s=[low + rest, high + rest], reward_s=reward, learn_s=learn, evaluation_s=evaluation,
    )  # fmt: skip


def rollout_seconds(case: Case, pace: Timings, scale: float) -> float:
    """Sampling of a whole step, with refills."""
    return pace.rollout_s * scale * _draws(case)


def slots_scale(case: Case, pace: Timings) -> float:
    """How many times the measured batch a step takes if only full rounds of slots count."""
    slots = int(case.config.rollout.engine_options.get("slots", 256))
    return math.ceil(case.replies / slots) / math.ceil(pace.replies / slots)


def _draws(case: Case) -> float:
    """How often a batch of prompts is drawn per step: more than once where uniform groups are replaced."""
    if case.objective is None or case.objective.keep != "mixed" or not case.groups:
        return 1.0
    mixed = sum(keeps_group(case.objective, g) for g in case.groups) / len(case.groups)
    return min(float(case.config.rollout.refill_budget), 1 / mixed if mixed else math.inf)


def _evaluation(case: Case, pace: Timings) -> float:
    held_out = len(case.problems.held_out) if case.problems else 0
    replies = held_out * (case.config.eval.samples + case.config.eval.greedy)
    return (pace.rollout_s + pace.reward_s) * replies / pace.replies


def _range(low: float, high: float) -> str:
    return duration(high) if high < 1.3 * low else f"{duration(low)} to {duration(high)}"


def duration(seconds: float) -> str:
    """12 ms, 3.4 s, 25 min, 7.5 h, 3 days."""
    for unit, scale in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * scale:
            return f"{digits(seconds / scale, 2)} {unit}"
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s" if seconds >= 0.1 else f"{digits(1000 * seconds, 2)} ms"
