"""Sentences that interpret the numbers of a replay.

In: a `Replay`. Out: sentences. Invariant: each sentence follows from measured numbers only.
"""

from __future__ import annotations

from gspo.view.compare.wording import listed, plain, share
from gspo.view.replay.agreement import Agreement
from gspo.view.replay.measure import ReplayNumbers, SweepResult
from gspo.view.replay.replay import Replay
from gspo.view.replay.source import ranges

SIMILAR = 0.99
"""Gradients with at least this cosine are called similar."""
MUCH_CLIPPING = 0.5
"""Share of clipped tokens that is reported."""

COSINES = (
    "Cosine similarity of every pair of gradients, sorted by similarity to the run's. 1 is the same direction, 0 is "
    "orthogonal, negative is opposing."
)
WEIGHTS = (
    "Each completion's share of an objective's total gradient weight: the sum over its tokens of the coefficient of "
    "grad log π. White: no gradient (clipped, or all completions of the prompt have the same reward). Gray: the "
    "objective does not train on the completion. All rows list the completions in the same order."
)


def agreement(replay: Replay) -> tuple[str, bool]:
    """Whether the recomputed steps agree with the run, and whether that is a warning."""
    steps = replay.agreements
    worst = max(steps, key=lambda a: (a.logp != a.logp, a.logp))  # NaN first
    span = f"step {replay.step}" if len(steps) == 1 else f"steps {steps[0].step} to {replay.step}"
    s = "s" * (len(steps) == 1)  # of the verb
    tokens = sum(a.tokens for a in steps)
    difference = f"largest log-prob difference {worst.logp:.1e} over {tokens:,} tokens"
    measured = [a for a in steps if a.metrics]
    if replay.exact:
        metrics = "its metrics are not written yet"
        if measured:
            metrics = f"{min(a.metrics for a in measured)} metrics per step are reproduced"
        saved = [a.step for a in steps if a.weights]
        weights = f"; bitwise the weights of checkpoint{'s' * (len(saved) > 1)} {ranges(saved)}" * bool(saved)
        return f"Exact: {span} agree{s} with the run ({difference}, which is rounding; {metrics}{weights}).", False
    return (
        f"NOT exact: {span} differ{s} from the run ({difference}{_other_differences(steps, measured)}). Possible "
        "causes are another device, precision, thread count or library version, or modified files. The numbers below "
        "belong to a policy that differs by this much."
    ), True


def _other_differences(steps: tuple[Agreement, ...], measured: list[Agreement]) -> str:
    worst = max(measured, key=lambda a: a.worst_difference, default=None)
    text = ""
    if worst and worst.worst_metric:
        text += f"; relative difference of {worst.worst_metric} {worst.worst_difference:.1e}"
    if other := sum(a.other_completions for a in steps):
        text += f"; {other} completions were trained on in only one of the two"
    if others := [a.step for a in steps if a.weights is False]:
        text += f"; other weights than in checkpoint{'s' * (len(others) > 1)} {ranges(others)}"
    if others := [a.step for a in steps if a.ledger is False]:
        text += f"; other batches than in the ledger in step{'s' * (len(others) > 1)} {ranges(others)}"
    return text


def readings(replay: Replay) -> list[str]:
    """The sentences below the table."""
    numbers = replay.numbers
    found = [_log_ratios(numbers), _similar(numbers), _least_similar(numbers), *_clipping(numbers), _norms(replay)]
    found += [sweep(s) for s in numbers.sweeps]
    return [text for text in found if text]


def _log_ratios(n: ReplayNumbers) -> str:
    before = n.mini_batch - 1
    if not before:
        single = "" if n.mini_batches > 1 else " (learner.mini_batches = 1)"
        return (
            "The first mini-batch is computed at the weights of the old log-probs: every importance ratio is 1, "
            f"nothing is clipped, and objectives differ only in advantages and token weights{single}."
        )
    return (
        f"After {before} {'update' if before == 1 else 'updates'}, the log importance ratio has a standard deviation "
        f"of {plain(n.token_log_std)} over tokens and {plain(n.sequence_log_std)} over completions (mean per "
        "completion). A much wider clip range never clips, a much narrower one clips nearly everything."
    )


def similar(numbers: ReplayNumbers) -> list[list[str]]:
    """Sets of rows in which every pair has similar gradients."""
    sets: list[list[int]] = []
    for i, row in enumerate(numbers.rows):
        # Every pair, not a chain of neighbors: similarity is not transitive.
        fits = next(
            (s for s in sets if row.grad_norm and all((numbers.cosines[i][j] or 0) >= SIMILAR for j in s)), None
        )
        if fits is None:
            sets.append([i])
        else:
            fits.append(i)
    return [[numbers.rows[i].label for i in s] for s in sets if len(s) > 1]


def _similar(numbers: ReplayNumbers) -> str:
    sets = "; ".join(listed(names) for names in similar(numbers))
    if not sets:
        return ""
    return (
        f"Objectives with nearly the same gradient direction (all cosines at least {SIMILAR}), which on this batch "
        f"differ only in step size: {sets}."
    )


def _least_similar(numbers: ReplayNumbers) -> str:
    others = [r for r in numbers.rows[1:] if r.cosine is not None]
    if not others:
        return ""
    row = min(others, key=lambda r: 1.0 if r.cosine is None else r.cosine)
    return f"Least similar to the run's own gradient: {row.label}, cosine {row.cosine:.2f}."


def _clipping(numbers: ReplayNumbers) -> list[str]:
    much = [
        f"{r.label} ({share(r.clipped_tokens.share)}, "
        f"{plain(r.effective_completions)} effective completions of {r.completions})"
        for r in numbers.rows
        if r.clipped_tokens.share >= MUCH_CLIPPING
    ]
    found = [f"Half or more of the tokens are clipped by {listed(much)}."] if much else []
    zero = [r.label for r in numbers.rows if not r.grad_norm]
    if zero:
        found.append(f"The gradient of {listed(zero)} is 0: this mini-batch has no training signal.")
    return found


def _norms(replay: Replay) -> str:
    limit = replay.max_grad_norm
    above = [r.label for r in replay.numbers.rows if r.grad_norm > limit]
    if not above:
        return ""
    return (
        f"The gradient norms of {listed(above)} exceed learner.max_grad_norm = {limit:g}. Gradient clipping would "
        "scale them down to it, so their size hardly matters."
    )


def sweep(s: SweepResult) -> str:
    """How the numbers change over a sweep."""
    first = s.points[0]
    last = s.points[-1]
    own = "disabled or unset" if s.own is None else plain(s.own)
    near = [p.value for p in s.points if p.cosine is not None and p.cosine >= SIMILAR]
    where = f"from {plain(near[0])} to {plain(near[-1])}" if near else "at no value"
    return (
        f"{s.setting} from {plain(first.value)} to {plain(last.value)} (run: {own}): the share of clipped completions "
        f"goes from {share(first.clipped_completions.share)} to {share(last.clipped_completions.share)}, the gradient "
        f"norm from {plain(first.grad_norm)} to {plain(last.grad_norm)}. The gradient is similar to the run's (cosine "
        f"at least {SIMILAR}) {where}."
    )


def notes(replay: Replay) -> list[str]:
    """Skipped objectives, deviations from labels, and limits of the numbers."""
    n = replay.numbers
    found = [f"{r.label}: {r.note}." for r in n.rows if r.note]
    found += [f"{skipped.label} is not computed: {skipped.reason}." for skipped in replay.skipped]
    if replay.untrained:
        found.append(f"No row includes the {replay.untrained} sampled completions that the run did not train on.")
    if n.balanced:
        found.append("All rows exclude the run's load-balancing loss, which is the same for every objective.")
    if n.standard_error:
        found.append(
            f"The model is too large to store {len(n.rows)} gradients. Norms and cosines are estimates from a count "
            f"sketch; a cosine has a standard error of {n.standard_error:.4f}."
        )
    return found
