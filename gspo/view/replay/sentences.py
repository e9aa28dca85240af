"""What a replay's numbers say, in words. In: a `Replay`. Out: sentences, each from measured numbers only."""

from __future__ import annotations

from gspo.view.compare.wording import listed, plain, share
from gspo.view.replay.measure import ReplayNumbers, SweepResult
from gspo.view.replay.replay import Replay

ALIKE = 0.99
"""Gradients with this cosine or more are called alike."""
HALF = 0.5
"""Share of clipped tokens that is worth a word."""


def agreement(replay: Replay) -> tuple[str, bool]:
    """How exactly the run was met, and whether that is a warning."""
    steps, worst = replay.agreements, max(replay.agreements, key=lambda a: (a.logp != a.logp, a.logp))
    span = f"step {replay.step}" if len(steps) == 1 else f"steps {steps[0].step} to {replay.step}"
    tokens = sum(a.tokens for a in steps)
    told = f"largest difference of a log-probability to the record {worst.logp:.1e} over {tokens:,} tokens"
    measured = [a for a in steps if a.metrics]
    if replay.exact:
        metrics = f", and {min(a.metrics for a in measured)} metrics per step came out again" if measured else ", the metrics are not written yet"  # fmt: skip
        return f"Exact: {span} went as in the run ({told}: its rounding{metrics}).", False
    off = max(measured, key=lambda a: a.worst_difference, default=None)
    metric = f"; {off.worst_metric} differs by {off.worst_difference:.1e} of its value" if off and off.worst_metric else ""  # fmt: skip
    other = sum(a.other_replies for a in steps)
    replies = f"; {other} replies were learned from in only one of the two" if other else ""
    return f"NOT exact: {span} did not go as in the run ({told}{metric}{replies}). Another device, precision, thread count or library version does that, and so do files that were changed; the numbers are of a policy that differs this much.", True  # fmt: skip


def readings(replay: Replay) -> list[str]:
    """The reading under the table."""
    numbers = replay.numbers
    found = [_where(numbers), _alike(numbers), _least(numbers), *_clipping(numbers), _scale(replay)]
    found += [sweep(s) for s in numbers.sweeps]
    return [text for text in found if text]


def _where(n: ReplayNumbers) -> str:
    before = n.mini_batch - 1
    if not before:
        return f"The first mini-batch is used at the weights that gave the old log-probabilities: every ratio is 1, no range can act, and objectives differ only in advantages and weights{'' if n.mini_batches > 1 else ' (learner.mini_batches = 1)'}."  # fmt: skip
    return f"After {before} {'update' if before == 1 else 'updates'} the log-ratio has a standard deviation of {plain(n.token_log_std)} over tokens and {plain(n.sequence_log_std)} over replies (mean of a reply): a clip range far above it never acts, one far below it clips nearly all that moves."  # fmt: skip


def alike(numbers: ReplayNumbers) -> list[list[str]]:
    """Rows that belong together because every pair of them has alike gradients."""
    sets: list[list[int]] = []
    for i, row in enumerate(numbers.rows):
        fits = next((s for s in sets if row.grad_norm and all((numbers.cosines[i][j] or 0) >= ALIKE for j in s)), None)
        if fits is None:
            sets.append([i])
        else:
            fits.append(i)
    return [[numbers.rows[i].label for i in s] for s in sets if len(s) > 1]


def _alike(numbers: ReplayNumbers) -> str:
    sets = "; ".join(listed(names) for names in alike(numbers))
    return f"Objectives that push the same way here (every cosine among them at least {ALIKE}), so that but for the size of the step this batch cannot tell them apart: {sets}." if sets else ""  # fmt: skip


def _least(numbers: ReplayNumbers) -> str:
    others = [r for r in numbers.rows[1:] if r.cosine is not None]
    if not others:
        return ""
    row = min(others, key=lambda r: 1.0 if r.cosine is None else r.cosine)
    return f"Least like the run's own gradient: {row.label}, cosine {row.cosine:.2f}."


def _clipping(numbers: ReplayNumbers) -> list[str]:
    hard = [
        f"{r.label} ({share(r.clipped_tokens.share)}; the rest weighs as much as {plain(r.effective_replies)} equal replies of {r.replies})"
        for r in numbers.rows
        if r.clipped_tokens.share >= HALF
    ]
    told = [f"Half or more of the tokens are clipped by {listed(hard)}."] if hard else []
    silent = [r.label for r in numbers.rows if not r.grad_norm]
    if silent:
        told.append(f"The gradient of {listed(silent)} is 0: nothing would be learned from this mini-batch.")
    return told


def _scale(replay: Replay) -> str:
    limit = replay.max_grad_norm
    above = [r.label for r in replay.numbers.rows if r.grad_norm > limit]
    if not above:
        return ""
    return f"Gradients of {listed(above)} are longer than learner.max_grad_norm = {limit:g} and would be scaled down to it, so their length says little."  # fmt: skip


def sweep(s: SweepResult) -> str:
    """What moved along a sweep."""
    first, last = s.points[0], s.points[-1]
    had = "off or unset" if s.own is None else plain(s.own)
    clipped = f"clipped replies go from {share(first.clipped_replies.share)} to {share(last.clipped_replies.share)}"
    near = [p.value for p in s.points if p.cosine is not None and p.cosine >= ALIKE]
    same = f"at {plain(near[0])} to {plain(near[-1])} the gradient points as the run's (cosine at least {ALIKE})" if near else f"no value gives a gradient like the run's (cosine {ALIKE})"  # fmt: skip
    return f"{s.setting} from {plain(first.value)} to {plain(last.value)} (the run: {had}): {clipped}, the gradient norm from {plain(first.grad_norm)} to {plain(last.grad_norm)}; {same}."  # fmt: skip


def notes(replay: Replay) -> list[str]:
    """What is not in the table, or not as its label says."""
    n = replay.numbers
    told = [f"{r.label}: {r.note}." for r in n.rows if r.note]
    told += [f"{x.label} is not computed: {x.reason}." for x in replay.left_out]
    if replay.not_learned:
        told.append(f"{replay.not_learned} replies that the step sampled are in no row, because the run did not learn from them.")  # fmt: skip
    if n.balanced:
        told.append("The run's load-balancing loss is the same for every objective and is left out of all rows.")
    if n.standard_error:
        told.append(f"The model is too large to hold {len(n.rows)} gradients: norms and cosines are estimates from a random sketch, with a standard error of {n.standard_error:.4f} for a cosine.")  # fmt: skip
    return told
