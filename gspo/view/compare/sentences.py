"""How to read each figure, with the numbers of this comparison.

In: the arms' numbers. Out: paragraphs. The first explains the figure, the others describe this comparison.
Invariant: an arm is called better than another only if their 95 % intervals do not overlap and the interval of their
paired difference excludes 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gspo.view.compare.intervals import Number
from gspo.view.compare.spread import LengthBin
from gspo.view.compare.table import ArmNumbers
from gspo.view.compare.wording import listed, number, plain, points, share


def reward(arms: Sequence[ArmNumbers], window: int) -> list[str]:
    """Text below the reward curves."""
    smoothing = f"moving average over {window} steps" if window > 1 else "not smoothed"
    return [
        f"Mean reward of the completions sampled for training ({smoothing}). It varies with the sampled prompts; use "
        "held-out accuracy to compare arms.",
        _each(arms, "Over the last 10 % of the tokens", lambda a: a.reward, plain),
    ]


def accuracy(arms: Sequence[ArmNumbers], problems: int | None) -> list[str]:
    """Text below the held-out curves."""
    on = f" on {problems} held-out problems" if problems else ""
    partial = any(arm.held_out_after for arm in arms)
    return [
        f"Share of correct completions{on}, the same problems at every evaluation of a seed. All arms of a seed start "
        "from the same model.",
        _each(arms, "At the end", lambda a: a.after, share),
        *([_each(arms, "Mean held-out reward at the end", lambda a: a.held_out_after, plain)] if partial else []),
        *(verdict(arm, arms[0]) for arm in arms[1:]),
    ]


def verdict(arm: ArmNumbers, first: ArmNumbers) -> str:
    """Whether an arm is better or worse than the first one, and how certain that is."""
    difference = arm.difference
    if difference is None:
        return f"{arm.label} cannot be compared with {first.label} yet."
    size = f"{arm.label} ended {points(difference.value)} points from {first.label}"
    if difference.seeds < 2:
        return f"{size}, on one seed, which is too few to tell it from chance."
    if difference.low is None or difference.high is None:
        return _same_on_all_seeds(arm, first, difference)
    size += f" (paired by seed, 95 % interval {points(difference.low)} to {points(difference.high)})"
    if difference.low <= 0 <= difference.high:
        return f"{size}. The interval includes 0, so these {difference.seeds} seeds show no significant difference."
    if not _disjoint(arm.after, first.after):
        return f"{size}. The intervals of the two arms overlap, so more seeds are needed to confirm it."
    return f"{size}: {'better' if difference.value > 0 else 'worse'}, by more than the variance between seeds explains."


def _same_on_all_seeds(arm: ArmNumbers, first: ArmNumbers, difference: Number) -> str:
    """With identical differences on all seeds there is no interval over seeds, so those over problems decide."""
    if not difference.value:
        return f"{arm.label} ended exactly as {first.label} on all {difference.seeds} seeds, without a difference."
    size = (
        f"{arm.label} ended {points(difference.value)} points from {first.label}, "
        f"the same on all {difference.seeds} seeds"
    )
    others = {run.seed: run.after_interval for run in first.finished}
    pairs = [(run.after_interval, others.get(run.seed)) for run in arm.finished if run.seed in others]
    if pairs and all(a and b and (a[1] < b[0] or b[1] < a[0]) for a, b in pairs):
        direction = "better" if difference.value > 0 else "worse"
        return f"{size}: {direction} on each seed, by more than the variance between held-out problems explains."
    return f"{size}, so there is no interval over seeds. More problems or seeds are needed to confirm it."


def _disjoint(one: Number | None, other: Number | None) -> bool:
    """Whether the intervals of two numbers do not overlap."""
    if one is None or other is None:
        return False
    low, high = _bounds(one)
    other_low, other_high = _bounds(other)
    return low > other_high or other_low > high


def _bounds(number: Number) -> tuple[float, float]:
    """The interval, or the value itself if there is no interval."""
    return (number.value if number.low is None else number.low, number.value if number.high is None else number.high)


def clipping(arms: Sequence[ArmNumbers]) -> list[str]:
    """Text below the clip fractions."""
    ratios = [f"{arm.label} {_times(arm.clip_ratio)}" for arm in arms[1:] if arm.clip_ratio is not None]
    return [
        "Share of the trained tokens on which the trust region acts, and of the completions with at least one such "
        "token. A higher clip fraction is not worse: a sequence ratio outside its clip range clips all tokens of its "
        "completion. The first update of a batch clips nothing and is included. Objectives without a clip range "
        "(sapo, gpg, ...) show 0. A log axis omits zeros.",
        _each(arms, "Tokens, mean over all steps", lambda a: a.clip_tokens, share),
        f"Relative to {arms[0].label}: {listed(ratios)}." if ratios else "",
    ]


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times as many" if ratio >= 10 else f"{ratio:.2g} times as many"


def flips(arms: Sequence[ArmNumbers]) -> list[str]:
    """Text below the flip fractions."""
    return [
        "Share of a token's routed experts that differ between two forward passes on the same completion. With routing "
        "replay, the updates of a step flip exactly 0; the fraction without replay shows how much replay prevents.",
        _each(arms, "During the updates of a step", lambda a: a.flips, share),
        _each(arms, "Without replay (hypothetical)", lambda a: a.flips_native, share),
        _each(arms, "Between the sampling engine and the learner", lambda a: a.flips_sampler, share),
    ]


def spread(labels: Sequence[str], bins: Sequence[Sequence[LengthBin]]) -> list[str]:
    """Text below the variances."""
    parts = []
    for label, arm_bins in zip(labels, bins, strict=True):
        middle = arm_bins[len(arm_bins) // 2] if arm_bins else None
        if middle is not None and middle.completion_variance > 0:
            fold = middle.token_variance / middle.completion_variance
            parts.append(
                f"{label}, at about {middle.length:.0f} tokens: {plain(middle.token_variance)} over tokens, "
                f"{plain(middle.completion_variance)} over completions, a reduction by {plain(fold)} "
                f"(independent tokens: {middle.length:.0f})."
            )
    return [
        "Variance of log π − log π_old over tokens (left), and variance over completions of its mean per completion "
        "(right), binned by completion length on log axes. The dotted lines show the right side for independent "
        "tokens: the left side divided by the length. Points above them mean that the tokens of a completion are "
        "correlated. Completions used by the first update of a batch are excluded, because their log-ratios are 0.",
        *parts,
    ]


def health(arms: Sequence[ArmNumbers]) -> list[str]:
    """Text below gradient norm and entropy."""
    return [
        "Gradient norm before clipping (mean over the updates of a step) and entropy of the policy at the trained "
        "tokens, not smoothed. Spikes of the norm and a sudden drop of the entropy often precede a collapse; at an "
        "entropy near 0 the policy no longer explores.",
        _each(arms, "Mean gradient norm", lambda a: a.grad_norm, plain),
        _each(arms, "Final entropy", lambda a: a.entropy_last, plain),
    ]


def _each(
    arms: Sequence[ArmNumbers],
    what: str,
    of: Callable[[ArmNumbers], Number | None],
    form: Callable[[float], str],
) -> str:
    known = [f"{arm.label} {number(value, form)}" for arm in arms if (value := of(arm)) is not None]
    return f"{what}: {listed(known)}." if known else ""
