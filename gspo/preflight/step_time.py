"""A rough estimate of the time of a step and of the whole run, scaled from a few completions.

In: the context with measured times. Out: findings. Invariant: the time of sampling is a range. At most it grows with
the number of completions; at least, a full set of slots takes as long as a single completion. On a GPU whose data sheet
is known, it grows as the model of `gspo plan` says, which also gives the time of the optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from gspo.config import EvalConfig, EvalSetConfig
from gspo.objectives.samples import keeps_group
from gspo.preflight.context import PreflightContext, Timings
from gspo.preflight.findings import Finding, note, ok
from gspo.preflight.gpus import Gpu, gpu_of_device
from gspo.preflight.machine import digits
from gspo.preflight.speed import StepTime
from gspo.preflight.speed import step_time as predicted_time
from gspo.rollout.engine import engine_traits


def check_time(context: PreflightContext) -> Iterator[Finding]:
    timings = context.timings
    config = context.config
    if timings is None or not timings.trained:
        yield note("Unknown: the training half of a step could not be measured.")
        return
    low = rollout_seconds(context, timings, slots_scale(context, timings))
    high = rollout_seconds(context, timings, context.completions / timings.completions)
    gpu = gpu_of(context)
    predicted = predicted_time(context.workload, gpu) if gpu else None
    if gpu and predicted:
        low = high = rollout_seconds(context, timings, _predicted_scale(context, timings, gpu, predicted))
    optimizer = predicted.phases["optimizer"] if predicted else 0.0
    reward = timings.reward_s * context.completions / timings.completions
    # An upper bound: the first update needs no old forward, and completions with advantage 0 need no forward at all.
    train = timings.train_s * context.completions / timings.trained
    # The reference adds one forward pass to the two forward passes and one backward pass (about two forwards) measured.
    train *= 1.25 if context.objective and context.objective.kl else 1.0
    rest = reward * batches_per_step(context) + train + optimizer
    problems = context.problems
    parts = [
        _Evaluations.of(context, timings, "an evaluation", config.eval, len(problems.held_out) if problems else 0),
        *(
            _Evaluations.of(context, timings, f"of {name}", one, len(problems.sets[name]) if problems else 0)
            for name, one in config.eval.sets.items()
        ),
    ]
    evaluations = sum(part.runs * part.seconds for part in parts)
    steps = config.steps
    each_ms = digits(1000 * timings.reward_s / timings.completions, 3)
    detail = [
        f"{'sampling':<24} {_range(low, high)}",
        f"{'rewards':<24} {duration(reward * batches_per_step(context))}   {each_ms} ms per completion with "
        f"{config.reward.workers} workers",
        f"{'training':<24} {duration(train)}   old and new forward, backward; without the optimizer step",
        *([f"{'optimizer steps':<24} {duration(optimizer)}   predicted for {gpu.name}"] if gpu else []),
        *(f"{part.what:<24} {duration(part.seconds)}   {part.runs} times" for part in parts),
    ]
    start = " The cold start comes first, and changes how long completions are." if context.cold else ""
    whole = _range(steps * (low + rest) + evaluations, steps * (high + rest) + evaluations)
    yield ok(
        f"A step takes about {_range(low + rest, high + rest)}, so the run of {steps} steps takes about "
        f"{whole}.{start}",
        detail=detail,
        step_s=[low + rest, high + rest],
        reward_s=reward,
        learn_s=train,
        evaluation_s=parts[0].seconds,
    )


def gpu_of(context: PreflightContext) -> Gpu | None:
    """The data sheet of the run's GPU; None on a CPU, for a GPU without one, or if another engine samples than the one
    that the model of its time is for."""
    if context.device is None or context.device.type != "cuda":
        return None
    if not engine_traits(context.config.rollout.engine).shares_weights:
        return None
    return gpu_of_device(torch.cuda.get_device_name(context.device))


def _predicted_scale(context: PreflightContext, timings: Timings, gpu: Gpu, whole: StepTime) -> float:
    """Ratio of a step's sampling time to the measured one, by the model of `gspo plan`."""
    rollout = context.config.rollout
    few = replace(rollout, prompts=max(1, timings.completions // rollout.group_size))
    sample = replace(context.workload, config=replace(context.config, rollout=few))
    return whole.phases["sampling"] / predicted_time(sample, gpu).phases["sampling"]


def rollout_seconds(context: PreflightContext, timings: Timings, scale: float) -> float:
    """Time to sample a whole step, with refills."""
    return timings.rollout_s * scale * batches_per_step(context)


def slots_scale(context: PreflightContext, timings: Timings) -> float:
    """Ratio of a step's sampling time to the measured one if only the number of rounds over the slots counts."""
    slots = int(context.config.rollout.engine_options.get("slots", 256))
    return math.ceil(context.completions / slots) / math.ceil(timings.completions / slots)


def batches_per_step(context: PreflightContext) -> float:
    """Batches of prompts per step; more than one if groups with equal rewards are replaced."""
    if context.objective is None or context.objective.keep != "mixed" or not context.groups:
        return 1.0
    mixed = sum(keeps_group(context.objective, g) for g in context.groups) / len(context.groups)
    return min(most_batches(context), 1 / mixed if mixed else math.inf)


def most_batches(context: PreflightContext) -> float:
    """The most batches of prompts per step: the budget; with "full", those of a pass over the data that keeps none."""
    rollout = context.config.rollout
    if rollout.refill_budget != "full":
        return float(rollout.refill_budget)
    return max(1.0, len(context.problems.train) / rollout.prompts) if context.problems else 1.0


@dataclass(frozen=True, kw_only=True)
class _Evaluations:
    """The evaluations of a run on one set of problems."""

    what: str
    runs: int
    seconds: float
    """Of each."""

    @classmethod
    def of(
        cls,
        context: PreflightContext,
        timings: Timings,
        what: str,
        settings: EvalConfig | EvalSetConfig,
        problems: int,
    ) -> _Evaluations:
        completions = problems * (settings.samples + settings.greedy)
        seconds = (timings.rollout_s + timings.reward_s) * completions / timings.completions
        return cls(what=what, runs=evaluation_count(context.config.steps, settings.every), seconds=seconds)


def evaluation_count(steps: int, every: int) -> int:
    """How often a run is evaluated: every so many steps, and before the first and after the last one."""
    return 1 + steps // every + bool(steps % every) if every else 0


def _range(low: float, high: float) -> str:
    # An estimate from a few seconds is no more precise than that.
    return duration(high) if high < 1.3 * low else f"{duration(low)} to {duration(high)}"


def duration(seconds: float) -> str:
    """12 ms, 3.4 s, 25 min, 7.5 h, 3 days."""
    for unit, scale in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * scale:
            return f"{digits(seconds / scale, 2)} {unit}"
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s" if seconds >= 0.1 else f"{digits(1000 * seconds, 2)} ms"
