"""How to read each figure, in plain words with the numbers at hand.

In: the arms' numbers. Out: paragraphs, the first for every comparison, the others about this one. Invariant: one arm is called better than another only if their 95 % intervals lie apart
and so does the interval of their difference, seed by seed, from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gspo.view.compare.intervals import Number
from gspo.view.compare.spread import LengthBin
from gspo.view.compare.table import ArmNumbers
from gspo.view.compare.wording import listed, number, plain, points, share


def reward(arms: Sequence[ArmNumbers], window: int) -> list[str]:
    """Under the reward curves."""
    smoothed = f"each point is the mean of {window} steps around it" if window > 1 else "not smoothed"
    return [
        f"Mean reward of the replies sampled for training ({smoothed}). It moves with the luck of the prompts; compare by the held-out figure.",
        _each(arms, "Over the last tenth of the tokens", lambda a: a.reward, plain),
    ]


def accuracy(arms: Sequence[ArmNumbers], problems: int | None) -> list[str]:
    """Under the held-out curves."""
    on = f" on {problems} held-out problems" if problems else ""
    return [
        f"Share of right replies{on}, the same problems at every evaluation of a seed. Arms of a seed start from one point.",
        _each(arms, "At the end", lambda a: a.after, share),
        *(verdict(arm, arms[0]) for arm in arms[1:]),
    ]


def verdict(arm: ArmNumbers, first: ArmNumbers) -> str:
    """What can be said of an arm against the first one."""
    difference = arm.difference
    if difference is None:
        return f"{arm.label} cannot be compared with {first.label} yet."
    size = f"{arm.label} ended {points(difference.value)} points from {first.label}"
    if difference.seeds < 2:
        return f"{size}, on one seed: too few to say whether that is more than chance."
    if difference.low is None or difference.high is None:
        return _same_on_all_seeds(arm, first, difference)
    size += f" (seed by seed, 95 % interval {points(difference.low)} to {points(difference.high)})"
    if difference.low <= 0 <= difference.high:
        return f"{size}: the interval includes 0, so these {difference.seeds} seeds do not tell the two apart."
    if not _apart(arm.after, first.after):
        return f"{size}: a hint that more seeds would have to confirm, since the intervals of the two overlap."
    return f"{size}: {'better' if difference.value > 0 else 'worse'} by more than chance between seeds explains."


def _same_on_all_seeds(arm: ArmNumbers, first: ArmNumbers, difference: Number) -> str:
    """Seeds that agree to the last digit give no interval, so that the problems of each seed have to tell."""
    if not difference.value:
        return f"{arm.label} ended as {first.label} did on all {difference.seeds} seeds: no difference is shown."
    size = f"{arm.label} ended {points(difference.value)} points from {first.label}, the same on all {difference.seeds} seeds"
    others = {run.seed: run.after_interval for run in first.finished}
    pairs = [(run.after_interval, others.get(run.seed)) for run in arm.finished if run.seed in others]
    if pairs and all(a and b and (a[1] < b[0] or b[1] < a[0]) for a, b in pairs):
        way = "better" if difference.value > 0 else "worse"
        return f"{size}: {way} on each by more than chance between held-out problems explains."
    return f"{size}, which gives no interval over seeds: a hint that more problems or seeds would have to confirm."


def _apart(one: Number | None, other: Number | None) -> bool:
    if one is None or other is None:
        return False
    (low, high), (other_low, other_high) = (_ends(n) for n in (one, other))
    return low > other_high or other_low > high


def _ends(number: Number) -> tuple[float, float]:
    """The interval; seeds that agree exactly have none, and are where they are."""
    return (number.value if number.low is None else number.low, number.value if number.high is None else number.high)


def clipping(arms: Sequence[ArmNumbers]) -> list[str]:
    """Under the clip fractions."""
    ratios = [f"{arm.label} {_times(arm.clip_ratio)}" for arm in arms[1:] if arm.clip_ratio is not None]
    return [
        "Share of the trained tokens on which the trust region acted, and of the replies with at least one such token. Clipping more is not worse: "
        "a sequence ratio out of its range takes all tokens of its reply along. The first update of a batch clips nothing and is counted; rows "
        "without a clip range (sapo, gpg, ...) show 0. A logarithmic axis leaves zeros out.",
        _each(arms, "Tokens, mean over all steps", lambda a: a.clip_tokens, share),
        f"Against {arms[0].label}: {listed(ratios)}." if ratios else "",
    ]


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times as many" if ratio >= 10 else f"{ratio:.2g} times as many"


def flips(arms: Sequence[ArmNumbers]) -> list[str]:
    """Under the flip fractions."""
    return [
        "Share of the experts chosen for a token that differ between two forwards of the same reply. Replay makes what the updates flip exactly 0; "
        "what would have flipped without it shows how much it holds back.",
        _each(arms, "By the updates of a step", lambda a: a.flips, share),
        _each(arms, "What would have flipped without replay", lambda a: a.flips_native, share),
        _each(arms, "Between the sampling engine and the learner", lambda a: a.flips_sampler, share),
    ]


def spread(labels: Sequence[str], bins: Sequence[Sequence[LengthBin]]) -> list[str]:
    """Under the variances."""
    parts = []
    for label, mine in zip(labels, bins, strict=True):
        middle = mine[len(mine) // 2] if mine else None
        if middle is not None and middle.reply_variance > 0:
            fold = middle.token_variance / middle.reply_variance
            parts.append(
                f"{label}, at about {middle.length:.0f} tokens: {plain(middle.token_variance)} over tokens, "
                f"{plain(middle.reply_variance)} over replies, {plain(fold)} times less (independent tokens: {middle.length:.0f} times)."
            )
    return [
        "Variance of log π − log π_old over single tokens (left) and, of its mean over a reply, over replies (right), in bins of reply length; "
        "both axes are logarithmic. The dotted lines are what the right side would be if tokens moved independently: the left side divided by the "
        "length. Points above them mean that tokens of a reply move together. Replies used by the first update of a batch are left out: nothing had moved.",
        *parts,
    ]


def health(arms: Sequence[ArmNumbers]) -> list[str]:
    """Under gradient norm and entropy."""
    return [
        "Norm of the gradient before it is scaled down (mean over the updates of a step), and entropy of the policy at the trained tokens; not "
        "smoothed. Spikes of the norm and a sudden fall of the entropy often come before a collapse; an entropy near 0 leaves nothing to explore.",
        _each(arms, "Mean gradient norm", lambda a: a.grad_norm, plain),
        _each(arms, "Entropy at the end", lambda a: a.entropy_last, plain),
    ]


def _each(arms: Sequence[ArmNumbers], what: str, of: Callable[[ArmNumbers], Number | None], form: Callable[[float], str]) -> str:  # fmt: skip
    known = [f"{arm.label} {number(value, form)}" for arm in arms if (value := of(arm)) is not None]
    return f"{what}: {listed(known)}." if known else ""
